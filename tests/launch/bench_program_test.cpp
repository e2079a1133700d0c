// Runs the program's benchmarks, alone and under mpirun, and reads what they print and write.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/launch/program_testing.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class BenchProgram : public Program {};

TEST_F(BenchProgram, ComparesEveryPointUnlessToldNotTo) {
  const std::string bench =
      "bench --quiet --iterations 1 --warmup 0 --tokens 3 --model " + kFixture;
  const std::string json = " --json " + path("report.json");
  const auto wrong = [&] {
    return nlohmann::json::parse(content_of(path("report.json")))["rows"][0]["wrong"];
  };
  const Outcome one = alone(bench + json);
  EXPECT_EQ(one.code, 0) << one.error;
  EXPECT_THAT(one.out, HasSubstr("Out of bounds values : 0 OK"));
  EXPECT_EQ(wrong(), 0);
  const Outcome two = on_ranks(2, bench + json);
  EXPECT_EQ(two.code, 0) << two.error;
  EXPECT_THAT(two.out, HasSubstr("Out of bounds values : 0 OK"));
  EXPECT_EQ(wrong(), 0);
  const Outcome unchecked = on_ranks(2, bench + json + " --no-check");
  EXPECT_EQ(unchecked.code, 0) << unchecked.error;
  EXPECT_THAT(unchecked.out, HasSubstr("Out of bounds values : not checked (--no-check)"));
  EXPECT_EQ(wrong(), "-");
}

/// The fields of a CSV line, without the quotes around those that hold commas.
std::vector<std::string> csv_fields(const std::string& line) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (const char c : line) {
    if (c == '"') {
      quoted = !quoted;
    } else if (c == ',' && !quoted) {
      fields.emplace_back();
    } else {
      fields.back() += c;
    }
  }
  return fields;
}

TEST_F(BenchProgram, TableCsvAndJsonSayTheSame) {
  const Outcome outcome =
      on_ranks(3,
               "bench --iterations 2 --warmup 0 --hot --verbose --tokens 1,3-6:x2 --tp 1-3:+1 "
               "--reduce exact,fast --model " +
                   kFixture + " --csv " + path("bench.csv") + " --json " + path("bench.json"));
  ASSERT_EQ(outcome.code, 0) << outcome.error;
  const auto json = nlohmann::ordered_json::parse(content_of(path("bench.json")));
  ASSERT_EQ(json["rows"].size(), 3U * 3U * 2U);
  std::istringstream csv(content_of(path("bench.csv")));
  std::string line;
  std::getline(csv, line);
  std::vector<std::string> names;
  for (const auto& item : json["rows"][0].items()) names.push_back(item.key());
  EXPECT_EQ(line, fmt::format("{}", fmt::join(names, ",")));
  const std::string table = outcome.out.substr(outcome.out.find("#\n"));
  for (const auto& row : json["rows"]) {
    std::getline(csv, line);
    const std::vector<std::string> fields = csv_fields(line);
    ASSERT_EQ(fields.size(), names.size());
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (row[names[i]].is_number()) {
        EXPECT_EQ(std::stod(fields[i]), row[names[i]].get<double>()) << names[i];
      } else {
        EXPECT_EQ(fields[i], row[names[i]].get<std::string>()) << names[i];
      }
    }
    EXPECT_EQ(row["wrong"], 0);
    EXPECT_THAT(table, HasSubstr(fmt::format(" {:.1f} ", row["time_us"].get<double>())));
    EXPECT_EQ(row["busbw_gb_per_s"] == 0, row["ranks"] == 1) << row;
  }
  EXPECT_FALSE(std::getline(csv, line));
  for (const std::string& text : {outcome.out, content_of(path("bench.csv"))}) {
    for (const char* bad : {"inf", "nan", "-0,", "-0.0", " -0 "}) {
      EXPECT_THAT(text, Not(HasSubstr(bad)));
    }
  }
  EXPECT_EQ(json["options"]["tp"], "1,2,3");
  EXPECT_EQ(json["options"]["tokens"], "1,3,6");
  EXPECT_EQ(json["environment"]["points"], "9 of 9");
  for (const char* name : {"hosts", "cpu", "cores", "revision", "scaling"}) {
    EXPECT_TRUE(json["environment"].contains(name)) << name;
  }
}

TEST_F(BenchProgram, APointThatCantBeIsSkippedAndNoneLeftIsRefused) {
  const std::string bench = "bench --iterations 1 --warmup 0 --hot --tokens 2 --model " + kFixture;
  const Outcome some = on_ranks(2, bench + " --tp 1,2,4 --json " + path("bench.json"));
  EXPECT_EQ(some.code, 0) << some.error;
  EXPECT_THAT(some.out, HasSubstr("# skipped: tp 4 on 4 ranks (it takes 4 ranks of 2)"));
  const auto json = nlohmann::json::parse(content_of(path("bench.json")));
  EXPECT_EQ(json["environment"]["points"], "3 of 3, 1 of them skipped");
  expect_one_complaint(on_ranks(2, bench + " --tp 4"), 64, "it takes 4 ranks of 2");
  expect_one_complaint(on_ranks(2, bench + " --ep 2"), 64, "the model's layers are dense");
}

TEST_F(BenchProgram, ASweepThatIsToldToEndLeavesThePointsThatAreFinished) {
  for (const auto& [signal, code] : {std::pair{"TERM", 143}, {"INT", 130}}) {
    SCOPED_TRACE(signal);
    fs::remove(path("bench.csv"));
    // A point has fewer passes than a signal takes to come, the sweep more points. A shell without
    // job control has its children ignore SIGINT.
    const Outcome outcome = shell(
        "set -m; " + kProgram +
        " bench --iterations 1 --warmup 0 --hot --threads 1 --device cpu --tokens 1-900:+1" +
        " --model " + kFixture + " --csv " + path("bench.csv") + " --json " + path("bench.json") +
        " & job=$!\nfor i in {1..300}; do sleep 0.1; [[ $(wc -l 2>/dev/null <" + path("bench.csv") +
        ") -gt 3 ]] && break; done\nkill -" + signal + " $job; wait $job");
    EXPECT_EQ(outcome.code, code) << outcome.error;
    std::istringstream csv(content_of(path("bench.csv")));
    std::size_t lines = 0;
    std::size_t columns = 0;
    for (std::string line; std::getline(csv, line); ++lines) {
      if (lines == 0) columns = csv_fields(line).size();
      EXPECT_EQ(csv_fields(line).size(), columns) << line;
    }
    EXPECT_GT(lines, 3U);
    const auto json = nlohmann::json::parse(content_of(path("bench.json")));
    EXPECT_GE(json["rows"].size(), 3U);
    EXPECT_THAT(json["environment"]["points"].get<std::string>(), HasSubstr(" of 900"));
    for (const auto& entry : fs::directory_iterator(path("."))) {
      EXPECT_THAT(entry.path().filename().string(), Not(HasSubstr(".gatefold-")));
    }
  }
}

TEST_F(BenchProgram, TheHeaderOfASweepSaysWhatAllItsPointsShare) {
  std::ofstream(path("wide.json"))
      << R"({"model_type": "gatefold_ffn", "hidden_size": 32, "intermediate_size": 64,
             "num_hidden_layers": 2, "torch_dtype": "bfloat16"})";
  const std::string bench = "bench --iterations 1 --warmup 0 --hot --tokens 2 --json " +
                            path("bench.json") + " --config " + path("wide.json");
  const Outcome one = alone(bench + " --dtype f32");
  ASSERT_EQ(one.code, 0) << one.error;
  EXPECT_THAT(one.out, ContainsRegex("# dtype +f32\n"));
  std::ofstream(path("other.json"))
      << R"({"model_type": "gatefold_ffn", "hidden_size": 32, "intermediate_size": 64,
             "num_hidden_layers": 1, "torch_dtype": "float32"})";
  const std::string both = bench + " --config " + path("other.json");
  for (const std::string& line : {both, bench + " --dtype f32,bf16"}) {
    const Outcome several = alone(line);
    ASSERT_EQ(several.code, 0) << several.error;
    EXPECT_THAT(several.out, ContainsRegex("# dtype +as the table says\n"));
    EXPECT_THAT(several.out, ContainsRegex("# .* tp +dp +dtype "));
  }
  ASSERT_EQ(alone(both + " --layers 0").code, 0);
  const auto json = nlohmann::json::parse(content_of(path("bench.json")));
  EXPECT_EQ(json["options"]["dtype"], "model");
}

}  // namespace
}  // namespace gatefold
