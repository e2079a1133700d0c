// bench --machine as it is run: what rows there are, and that they hang together; and that what
// bench reports can be drawn.
#include <fmt/format.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "launch/bandwidth.h"
#include "tests/launch/program_testing.h"

namespace gatefold {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

const char* const kMachine = "bench --machine --iterations 1 --warmup 0";

/// How many rows each kind of measurement has; each row's numbers are checked on the way.
std::map<std::string, int> checked_rows(const Json& report, int ranks) {
  std::map<std::string, int> rows;
  for (const Json& row : report["rows"]) {
    const std::string what = row["what"];
    ++rows[what];
    EXPECT_GT(row["time_us"].get<double>(), 0) << row;
    EXPECT_GE(row["time_us"], row["min_us"]) << row;
    EXPECT_LE(row["time_us"], row["max_us"]) << row;
    const bool moves = what == "canonical sum" || what == "dispatch + combine";
    EXPECT_EQ(row["times_library"].is_number(), moves) << row;
    if (moves) {
      EXPECT_TRUE(row["times"] >= 1 && row["times"] <= 50) << row;
      EXPECT_GT(row["times_library"].get<double>(), 0) << row;
      EXPECT_EQ(row["ranks"], ranks) << row;
    } else {
      EXPECT_EQ(row["times"], 1) << row;
    }
    if (what == "dispatch + combine") {
      EXPECT_EQ(row["bytes"], 128 * 4096 * 2) << row;
      EXPECT_EQ(row["busbw_gb_per_s"], "-") << row;
      continue;
    }
    if (what == "gemm") {
      EXPECT_GT(row["tflops"].get<double>(), 0) << row;
      continue;
    }
    const double algbw = row["algbw_gb_per_s"];
    EXPECT_GT(algbw, 0) << row;
    if (what == "read" || what == "copy") continue;
    const double bytes = row["bytes"];
    EXPECT_NEAR(algbw, bytes / row["time_us"].get<double>() * 1e-3, 1e-6 * algbw) << row;
    const bool reduces = what == "all-reduce" || what == "canonical sum";
    const double share = reduces                ? all_reduce_share(ranks)
                         : what == "all-to-all" ? all_to_all_share(ranks)
                                                : 1;
    EXPECT_NEAR(row["busbw_gb_per_s"].get<double>(), algbw * share, 1e-6 * algbw) << row;
    EXPECT_EQ(row["ranks"], what == "message" ? 2 : ranks) << row;
  }
  return rows;
}

/// Bytes of the canonical sums, by the type of their results.
std::map<std::string, std::vector<double>> sum_sizes(const Json& report) {
  std::map<std::string, std::vector<double>> sizes;
  for (const Json& row : report["rows"]) {
    if (row["what"] == "canonical sum") sizes[row["how"]].push_back(row["bytes"]);
  }
  return sizes;
}
std::map<std::string, std::vector<double>> all_sum_sizes() {
  std::vector<double> sizes;
  for (int power = 13; power <= 24; ++power) sizes.push_back(std::ldexp(1.0, power));
  return {{"f32", sizes}, {"bf16", sizes}};
}

TEST_F(Program, TheMachineIsMeasuredOnOneRankWithoutMessages) {
  const std::string json = path("machine.json");
  const Outcome one = alone(std::string(kMachine) + " --json " + json);
  ASSERT_EQ(one.code, 0) << one.error;
  EXPECT_THAT(one.out, HasSubstr("# cpu  "));
  EXPECT_THAT(one.out, HasSubstr("one rank sends nothing"));
  const Json report = Json::parse(content_of(json));
  EXPECT_EQ(report["options"]["machine"], true);
  const std::map<std::string, int> rows = checked_rows(report, 1);
  EXPECT_EQ(rows.at("gemm"), 3);
  EXPECT_EQ(rows.at("read"), 1);
  EXPECT_GE(rows.at("copy"), 1);
  EXPECT_EQ(rows.size(), 3U);
}

TEST_F(Program, TheMachineIsMeasuredOnThreeRanksWithMessagesOfEverySize) {
  const std::string json = path("machine.json");
  const Outcome three = on_ranks(3, std::string(kMachine) + " --quiet --json " + json);
  ASSERT_EQ(three.code, 0) << three.error;
  EXPECT_THAT(three.out, ::testing::StartsWith("# times are"));
  const Json report = Json::parse(content_of(json));
  const std::map<std::string, int> rows = checked_rows(report, 3);
  EXPECT_EQ(rows.at("gemm"), 6);
  EXPECT_EQ(rows.at("read"), 2);
  EXPECT_EQ(rows.at("all-reduce"), 13);
  EXPECT_EQ(rows.at("all-to-all"), 13);
  EXPECT_EQ(rows.at("message") % 13, 0) << "of each kind of pair, all sizes";
  EXPECT_EQ(sum_sizes(report), all_sum_sizes());
  EXPECT_EQ(rows.at("dispatch + combine"), 1);
  const Outcome plot = shell(kSource + "/launch/plot --only bandwidth " + json);
  EXPECT_TRUE(plot.code == 0 || plot.code == 69) << plot.error;  // 69: without matplotlib
  EXPECT_EQ(std::filesystem::exists(path("machine.png")), plot.code == 0);
  for (const char* fact : {"cpu", "hosts", "cores", "comm", "gemm"}) {
    EXPECT_TRUE(report["environment"].contains(fact)) << fact;
  }
}

TEST_F(Program, TheMachineIsMeasuredOnTwoRanksByMessagesAloneToo) {
  const std::string json = path("machine.json");
  const Outcome two = on_ranks(2, std::string(kMachine) + " --comm mpi --quiet --json " + json);
  ASSERT_EQ(two.code, 0) << two.error;
  const Json report = Json::parse(content_of(json));
  const std::map<std::string, int> rows = checked_rows(report, 2);
  EXPECT_EQ(sum_sizes(report), all_sum_sizes());
  EXPECT_EQ(rows.at("dispatch + combine"), 1);
  if (!testing::on_cuda()) {
    EXPECT_THAT(two.out, HasSubstr("canonical sums and rows: messages"));
  }
}

TEST_F(Program, WhatASweepReportsCanBeDrawn) {
  const std::string json = path("sweep.json");
  const Outcome sweep =
      on_ranks(2, "bench --quiet --hot --tokens 1,3 --tp 1,2 --iterations 2 --warmup 0 --model " +
                      kFixture + " --json " + json);
  ASSERT_EQ(sweep.code, 0) << sweep.error;
  const Outcome plot = shell(kSource + "/launch/plot " + json);
  if (plot.code == 69) GTEST_SKIP() << plot.error;  // without matplotlib
  ASSERT_EQ(plot.code, 0) << plot.error;
  EXPECT_TRUE(std::filesystem::exists(path("sweep.png")));
  const std::string drawn = content_of(path("sweep.svg"));
  std::vector<std::string> words{"1 token", "3 tokens", "ideal", "Efficiency"};
  if (!testing::on_cuda()) {  // host time isn't the device's: no phases
    words.insert(words.end(), {"gate_up", "down", "other", "tp 1", "tp 2"});
  }
  for (const std::string& word : words) EXPECT_THAT(drawn, HasSubstr("<!-- " + word + " -->"));
}

TEST_F(Program, ABenchSaysWhereThreadsAreMoreThanCores) {
  const std::string bench = " bench --dry-run --device cpu --model " + kFixture + " --tokens 1";
  const auto on_one_core = [&](int ranks, const std::string& threads) {
    const Outcome outcome =
        shell("core=$(taskset -cp $$ | sed 's/.*: //; s/[-,].*//')\ntaskset -c $core " +
              std::string(kMpirun) + " -n " + std::to_string(ranks) + " " + kProgram + bench +
              " --threads " + threads);
    EXPECT_EQ(outcome.code, 0) << outcome.error;
    return outcome.out;
  };
  EXPECT_THAT(on_one_core(1, "1"), Not(HasSubstr("# crowded")));
  EXPECT_THAT(on_one_core(3, "2"), HasSubstr("# crowded   6 threads on 1 core of "));
}

}  // namespace
}  // namespace gatefold
