// balance as it is run: that loads even out, that every number of ranks prints the same, and what
// it refuses.
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/launch/program_testing.h"

namespace gatefold {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

Json rows_of(const std::string& file) { return Json::parse(content_of(file))["rows"]; }

/// Without the lines that name ranks and what carries their data.
std::string table_of(const Outcome& outcome) {
  std::istringstream lines(outcome.out);
  std::string text;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("# ranks") && !line.starts_with("# comm")) text += line + '\n';
  }
  return text;
}

TEST_F(Program, ASkewedLoadIsEvenAfterTheDefaultSteps) {
  const std::string json = path("balance.json");
  const std::string steps = testing::on_cuda() ? " --steps 3" : "";  // stand-ins are slow
  const Outcome outcome = alone("balance --json " + json + steps);
  ASSERT_EQ(outcome.code, 0) << outcome.error;
  const Json rows = rows_of(json);
  EXPECT_GT(rows.front()["load_max_over_mean"].get<double>(), 2);
  EXPECT_EQ(rows.front()["mean_tokens"], 256);
  if (testing::on_cuda()) return;
  EXPECT_LT(rows.back()["load_max_over_mean"].get<double>(), 1.2);
  std::vector<int> shown;
  for (const Json& row : rows) {
    shown.push_back(row["step"]);
    const double megatron = row["loss_megatron"];
    EXPECT_GE(megatron, 1) << row;
    EXPECT_NEAR(row["loss_transformers"].get<double>(), 8 * megatron, 1e-9) << row;
    EXPECT_EQ(row["loss_sequence"], megatron) << "one sequence is the batch";
    EXPECT_GT(row["loss_z"].get<double>(), 0);
  }
  EXPECT_THAT(shown, ElementsAre(0, 1, 2, 5, 10, 20, 50, 100, 200, 300));
  EXPECT_LT(rows.back()["loss_megatron"], rows.front()["loss_megatron"]);
  EXPECT_GT(rows.back()["load_entropy_share"], 0.999);
  EXPECT_LT(rows.front()["load_entropy_share"], 0.95);
  EXPECT_THAT(outcome.out, HasSubstr("at balance megatron is 1, transformers is 8, switch is 1"));
  EXPECT_THAT(outcome.out, HasSubstr("after 300 updates of the bias by 0.001"));
}

TEST_F(Program, EveryNumberOfRanksBalancesBitForBitAlike) {
  const std::string arguments = "balance --steps 7 --tokens 130 --sequence-length 65 --rate 0.01";
  const Outcome one = alone(arguments + " --csv " + path("1.csv"));
  ASSERT_EQ(one.code, 0) << one.error;
  EXPECT_THAT(one.out, HasSubstr("megatron's mean over 2 sequences of 65 tokens"));
  const std::map<int, std::string> splits{{2, "1,129"}, {3, "100,0,30"}};
  for (const auto& [ranks, split] : splits) {
    for (const std::string& extra : {std::string(), " --token-split " + split}) {
      const Outcome several = on_ranks(ranks, arguments + extra + " --csv " + path("n.csv"));
      ASSERT_EQ(several.code, 0) << several.error;
      EXPECT_EQ(table_of(several), table_of(one)) << ranks << extra;
      EXPECT_EQ(content_of(path("n.csv")), content_of(path("1.csv"))) << ranks << extra;
    }
  }
}

TEST_F(Program, AFilesTokensAreBalancedAsTheyAre) {
  // Logits 1 to 4 of one token each time: the bias goes up for the idle, down for the busy one.
  const std::string config =
      "--set hidden_size=4 --set n_routed_experts=4 --set n_group=1 "
      "--set topk_group=1 --set num_experts_per_tok=1";
  write_tokens({0.5F, -0.25F, 1.0F, 0.125F}, 4);
  const std::string json = path("balance.json");
  const Outcome outcome = alone("balance --steps 1 --rate 0.5 " + config + " --input " +
                                path("x.safetensors") + " --verbose --json " + json);
  ASSERT_EQ(outcome.code, 0) << outcome.error;
  const Json rows = rows_of(json);
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0]["load_max_over_mean"], 4);
  EXPECT_EQ(rows[0]["most_tokens"], 1);
  const double up = rows[1]["bias_most"].get<double>() - rows[0]["bias_most"].get<double>();
  EXPECT_GE(up, 0.3);  // by 0.5, unless the busy one's was the highest: 0.1 at most
  EXPECT_LE(up, 0.5 + 1e-6);
  EXPECT_THAT(outcome.out, HasSubstr("step 0: how many tokens experts get"));
}

TEST_F(Program, AFilesShapeSaysWhatItsSequencesAre) {
  std::vector<float> x(6 * 32);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 37) % 29) / 14 - 1;
  write_tensors(path("flat.safetensors"), {{"x", "F32", {6, 32}}}, {x});
  write_tensors(path("shaped.safetensors"), {{"x", "F32", {2, 3, 32}}}, {x});
  const std::string balance = "balance --steps 1 --input ";
  const Outcome given = alone(balance + path("flat.safetensors") + " --sequence-length 3");
  ASSERT_EQ(given.code, 0) << given.error;
  EXPECT_THAT(given.out, HasSubstr("megatron's mean over 2 sequences of 3 tokens"));
  for (const int ranks : {1, 3}) {
    EXPECT_EQ(table_of(on_ranks(ranks, balance + path("shaped.safetensors"))), table_of(given));
  }
}

TEST_F(Program, ASmallRateShowsInTheBias) {
  const std::string json = path("balance.json");
  const Outcome outcome =
      alone("balance --steps 2 --tokens 64 --rate 0.00002 --quiet --json " + json);
  ASSERT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_THAT(outcome.out, ::testing::ContainsRegex("is now -0\\.[0-9]{5} to 0\\.[0-9]{5}\n"));
}

TEST_F(Program, BalanceSaysWhatItCantDo) {
  const std::string configs = kSource + "/configs/";
  for (const auto& [arguments, says] : std::vector<std::pair<std::string, std::string>>{
           {"--steps 0", "--steps '0' is out of range (the least is 1)"},
           {"--rate 0", "--rate '0' is out of range"},
           {"--rate -0.1", "--rate '-0.1' is out of range"},
           {"--rate nan", "--rate 'nan' is not a number (it is NaN)"},
           {"--rate inf", "--rate 'inf' is out of range"},
           {"--skew 1", "--skew '1' is out of range (the most is 0.99)"},
           {"--tokens 0", "--tokens '0' is out of range"},
           {"--tokens 1,2", "only bench takes several"},
           {"--step 3", "did you mean --steps?"},
           {"--tp 2", "balance does not take --tp"},
           {"--blocks 2", "balance does not take --blocks"},
           {"--model m --config c", "--model and --config are both given"},
           {"--dry-run", "balance does not take --dry-run"},
           {"--input x --skew 0.1", "--input and --skew are both given"},
           {"--sequence-length 100", "doesn't divide 2048 tokens"},
           {"--set num_experts_per_tok=65", "65"},
           {"--layers 1", "--layers 1 is beyond the model's 1 layer"},
           {"--config " + configs + "llama-3.1-405b.json", "layer 0 is dense (it has no router)"},
           {"--layers 0,1 --config " + configs + "mixtral-8x7b.json", "takes one layer's router"},
       }) {
    SCOPED_TRACE(arguments);
    expect_one_complaint(alone("balance " + arguments), 64, says);
  }
  expect_one_complaint(alone("run --steps 3 --config x"), 64, "run does not take --steps");
  const Outcome three = on_ranks(3, "balance --config " + configs + "mixtral-8x7b.json");
  expect_one_complaint(three, 64, "no correction bias (a mixtral model's is balanced by a loss");
}

}  // namespace
}  // namespace gatefold
