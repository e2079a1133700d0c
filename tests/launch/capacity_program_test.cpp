// Capacities of experts, as the program takes and reports them.
#include <algorithm>
#include <utility>

#include "tests/launch/program_testing.h"

namespace gatefold {
namespace {

using ::testing::HasSubstr;

class CapacityProgram : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
    std::ofstream(path("config.json"))
        << R"({"model_type": "switch_transformers", "d_model": 64, "d_ff": 32, "num_layers": 2,
               "num_decoder_layers": 2, "encoder_sparse_step": 1, "decoder_sparse_step": 1,
               "num_experts": 4, "expert_capacity": 2, "dense_act_fn": "relu"})";
    std::ofstream(path("two.json"))
        << R"({"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 32,
               "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1,
               "hidden_act": "silu", "torch_dtype": "bfloat16"})";
  }
  std::string two() const { return " --config " + path("two.json"); }

  template <typename T>
  std::vector<T> read(const char* tensor) const {
    const SafetensorsFile file(path("y.safetensors"));
    const SafetensorsEntry& entry = file.header().tensors.at(tensor);
    std::vector<T> values((entry.end - entry.begin) / sizeof(T));
    file.read(tensor, 0, std::as_writable_bytes(std::span(values)));
    return values;
  }

  void expect_refused(const std::string& command, const std::string& text, int ranks = 1) const {
    const Outcome outcome = ranks == 1 ? alone(command) : on_ranks(ranks, command);
    EXPECT_EQ(outcome.code, 64) << command;
    EXPECT_THAT(outcome.complaints(), ::testing::ElementsAre(HasSubstr(text))) << command;
  }
};

TEST_F(CapacityProgram, EveryCommandDropsTheSame) {
  // Of 40 choices an expert takes ceil(40 / 4 * 0.5).
  const std::string how = two() + " --tokens 20 --capacity-factor 0.5 ";
  const Outcome ran = on_ranks(2, "run" + how + "--output " + path("y.safetensors"));
  ASSERT_EQ(ran.code, 0) << ran.error;
  const auto ids = read<std::int32_t>("topk_ids");
  const auto kept = read<std::uint8_t>("topk_kept");
  ASSERT_EQ(kept.size(), 40U);
  for (std::int32_t e = 0; e < 4; ++e) {
    std::ptrdiff_t taken = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] != e) continue;
      EXPECT_EQ(kept[i], taken++ < 5 ? 1 : 0) << "choice " << i;
    }
  }
  const auto dropped = std::ranges::count(kept, 0);
  const std::string said = std::to_string(dropped) + " of 40 choices dropped";
  EXPECT_GT(dropped, 0);
  EXPECT_THAT(ran.out, HasSubstr(said));
  EXPECT_THAT(ran.out, HasSubstr("# capacity  0.5 x the mean rows of an expert, by position"));
  for (const char* command : {"verify", "inspect"}) {
    const Outcome outcome = on_ranks(3, command + how);
    EXPECT_EQ(outcome.code, 0) << outcome.error;
    EXPECT_THAT(outcome.out, HasSubstr("layer 0: " + said)) << command;
  }
  const Outcome timed =
      on_ranks(2, "bench" + how + "--iterations 1 --warmup 0 --csv " + path("table.csv"));
  EXPECT_EQ(timed.code, 0) << timed.error;
  EXPECT_THAT(content_of(path("table.csv")), HasSubstr("dropped_percent"));
  EXPECT_THAT(timed.out, HasSubstr("dropped"));
}

TEST_F(CapacityProgram, AReplayedRoutingIsDroppedLikeARoutersOwn) {
  const std::string how = two() + " --capacity 6 --drop probability ";
  std::vector<float> x(20 * 64);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 37) % 29) / 14 - 1;
  write_tensors(path("x.safetensors"), {{"x", "F32", {20, 64}}}, {x});
  const std::string output = " --output " + path("y.safetensors");
  const Outcome first = on_ranks(2, "run --input " + path("x.safetensors") + how + output);
  ASSERT_EQ(first.code, 0) << first.error;
  const auto y = read<std::uint16_t>("y");
  const auto kept = read<std::uint8_t>("topk_kept");
  const auto ids = read<std::int32_t>("topk_ids");
  const auto weights = read<float>("topk_weights");
  SafetensorsWriter writer(
      path("routed.safetensors"),
      {{"x", "F32", {20, 64}}, {"topk_ids", "I32", {20, 2}}, {"topk_weights", "F32", {20, 2}}});
  writer.append(std::as_bytes(std::span(x)));
  writer.append(std::as_bytes(std::span(ids)));
  writer.append(std::as_bytes(std::span(weights)));
  writer.finish();
  const Outcome again = alone("run --input " + path("routed.safetensors") + how + output);
  ASSERT_EQ(again.code, 0) << again.error;
  EXPECT_THAT(again.out, HasSubstr("replayed"));
  EXPECT_EQ(read<std::uint8_t>("topk_kept"), kept);
  EXPECT_EQ(read<std::uint16_t>("y"), y);
}

TEST_F(CapacityProgram, SwitchDropsByItsConfigOnlyWhereAskedTo) {
  const std::string how = "verify --config " + path("config.json") + " --layers 0 --tokens 24 ";
  const Outcome all = alone(how);
  EXPECT_EQ(all.code, 0) << all.error;
  EXPECT_THAT(all.out, ::testing::Not(HasSubstr("dropped")));
  const Outcome some = alone(how + "--capacity config --per-sequence --sequence-length 12");
  EXPECT_EQ(some.code, 0) << some.error;
  EXPECT_THAT(some.out,
              HasSubstr("# capacity  2 rows of an expert in each 12 tokens, by position"));
  // Each sequence of 12 keeps at most 4 * 2.
  EXPECT_THAT(some.out, HasSubstr(" of 24 choices dropped"));
}

TEST_F(CapacityProgram, AFilesShapeSaysWhatItsSequencesAre) {
  std::vector<float> x(12 * 64);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 37) % 29) / 14 - 1;
  write_tensors(path("flat.safetensors"), {{"x", "F32", {12, 64}}}, {x});
  write_tensors(path("shaped.safetensors"), {{"x", "F32", {3, 4, 64}}}, {x});
  const std::string run = "run" + two() + " --capacity 1 --per-sequence --output " +
                          path("y.safetensors") + " --input " + path("");
  const Outcome given = alone(run + "flat.safetensors --sequence-length 4");
  ASSERT_EQ(given.code, 0) << given.error;
  const auto kept = read<std::uint8_t>("topk_kept");
  const Outcome shaped = on_ranks(3, run + "shaped.safetensors");
  ASSERT_EQ(shaped.code, 0) << shaped.error;
  EXPECT_THAT(shaped.out, HasSubstr("# capacity  1 row of an expert in each 4 tokens"));
  EXPECT_EQ(read<std::uint8_t>("topk_kept"), kept);
  expect_refused(run + "flat.safetensors", "--per-sequence without --sequence-length (x of", 2);
}

TEST_F(CapacityProgram, ACapacityThatCantBeIsRefusedOnce) {
  const std::string verify = "verify" + two() + " --tokens 24 ";
  for (const auto& [arguments, text] : std::vector<std::pair<std::string, std::string>>{
           {"--capacity-factor 0", "--capacity-factor '0' is out of range"},
           {"--capacity-factor nan", "--capacity-factor 'nan' is not a number"},
           {"--capacity 0", "--capacity '0' is out of range"},
           {"--capacity 4x", "--capacity '4x' is not a whole number"},
           {"--drop probability", "--drop without --capacity-factor or --capacity"},
           {"--pad", "--pad without"},
           {"--capacity 4 --drop weight", "--drop 'weight' is unknown (valid: position"},
           {"--capacity 4 --capacity-factor 1", "are both given"},
           {"--capacity 4 --per-sequence", "--per-sequence without --sequence-length"},
           {"--capacity config", "configs of mixtral models have none"}}) {
    expect_refused(verify + arguments, text);
  }
  expect_refused("inspect" + two() + " --capacity 4", "a capacity without tokens");
  expect_refused("verify --config " + kSource + "/configs/qwen3-0.6b.json --capacity-factor 1",
                 "--capacity-factor is not possible (the layers of qwen3 models are dense)", 2);
}

}  // namespace
}  // namespace gatefold
