// What the program makes of input that is wrong, empty or unusual.
#include <limits>
#include <nlohmann/json.hpp>

#include "tests/launch/program_testing.h"

namespace gatefold {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class OddInput : public Program {};

TEST_F(OddInput, AFileWithoutTokensIsRefused) {
  const std::string model = " --model " + kFixture + " --input " + path("x.safetensors");
  write_tensors(path("x.safetensors"), {{"x", "F32", {0, 576}}}, {{}});
  for (const char* command : {"run", "verify", "bench", "inspect"}) {
    expect_one_complaint(alone(command + model), 65, "x of shape [0, 576] holds no tokens");
  }
  write_tensors(path("x.safetensors"), {{"x", "F32", {3, 0, 576}}}, {{}});
  expect_one_complaint(on_ranks(2, "run --dry-run" + model), 65, "[3, 0, 576] holds no tokens");
}

TEST_F(OddInput, YKeepsTheShapeOfX) {
  write_small_model({1, 2, 3, 4});
  for (const std::vector<std::int64_t>& shape :
       std::vector<std::vector<std::int64_t>>{{6, 16}, {2, 3, 16}, {6, 1, 16}}) {
    write_tensors(path("x.safetensors"), {{"x", "F32", shape}}, {std::vector<float>(96, 0.5F)});
    const Outcome outcome =
        on_ranks(2, "run --ablate 3 --model " + path("model") + " --input " +
                        path("x.safetensors") + " --output " + path("y.safetensors"));
    ASSERT_EQ(outcome.code, 0) << outcome.error;
    const SafetensorsFile file(path("y.safetensors"));
    EXPECT_EQ(file.header().tensors.at("y").shape, shape);
    EXPECT_EQ(file.header().tensors.at("delta").shape, shape);
  }
  const Outcome seeded =
      alone("run --tokens 5 --model " + path("model") + " --output " + path("y.safetensors"));
  ASSERT_EQ(seeded.code, 0) << seeded.error;
  EXPECT_THAT(SafetensorsFile(path("y.safetensors")).header().tensors.at("y").shape,
              ElementsAre(5, 16));
}

TEST_F(OddInput, SequencesOfAFileAreAsLongAsTheOptionSays) {
  write_small_model({1, 2, 3, 4});
  const std::string model =
      " --model " + path("model") + " --input " + path("x.safetensors") + " --sequence-length ";
  write_tensors(path("x.safetensors"), {{"x", "F32", {2, 3, 16}}}, {std::vector<float>(96, 0.5F)});
  expect_one_complaint(alone("verify" + model + "2"), 64, "has sequences of 3 tokens");
  expect_one_complaint(on_ranks(2, "run" + model + "2"), 64, "--sequence-length 2 and ");
  EXPECT_EQ(alone("verify" + model + "3").code, 0);
  write_tensors(path("x.safetensors"), {{"x", "F32", {6, 16}}}, {std::vector<float>(96, 0.5F)});
  EXPECT_EQ(alone("verify" + model + "2").code, 0);
}

TEST_F(OddInput, WeightsBeyondTheMachinesMemoryAreRefusedBeforeTheyAreMade) {
  const std::string config = " --config " + kSource + "/configs/llama-3.1-8b.json --tokens 1" +
                             " --set hidden_size=1048576 --set intermediate_size=1048576";
  for (const char* command : {"verify", "bench"}) {
    expect_one_complaint(on_ranks(2, command + config), 71, "on each of 2 tensor-parallel ranks");
  }
}

TEST_F(OddInput, MoreThreadsThanOpenMPCanStartAreRefused) {
  const std::string command = kProgram + " verify --quiet --model " + kFixture;
  const std::string many = "export OMP_NUM_THREADS=99999; ";
  expect_one_complaint(shell(many + command), 64, "99999 threads for one process");
  expect_one_complaint(shell(many + kMpirun + " -n 2 " + command), 64, "99999 threads");
  EXPECT_EQ(shell(many + command + " --threads 1").code, 0);
  const std::string small_stack = "ulimit -s 256; ";
  expect_one_complaint(shell(small_stack + command + " --threads 4000"), 64,
                       "4000 threads for one process (more than 1536 ");
  EXPECT_EQ(shell(small_stack + command + " --threads 1536").code, 0);
}

TEST_F(OddInput, NoConfigMakesInspectsSumsOverflow) {
  std::ofstream(path("absurd.json"))
      << R"({"model_type": "gatefold_ffn", "hidden_size": 1000000000000, "intermediate_size": 1})";
  expect_one_complaint(alone("inspect --config " + path("absurd.json")), 65, "absurd");
  const std::string llama = "inspect --quiet --config " + kSource + "/configs/llama-3.1-8b.json ";
  const auto share = [&](const std::string& set) {
    const Outcome outcome = alone(llama + set);
    EXPECT_EQ(outcome.code, 0) << outcome.error;
    return outcome.out.substr(outcome.out.rfind("# "));
  };
  EXPECT_EQ(share("--set num_key_value_heads=9000000000000000000"),
            "# 0.0 % of the model's 301989888 E parameters, counted from its config\n");
  EXPECT_THAT(share("--set num_key_value_heads=-8"), Not(HasSubstr("of the model's")));
  EXPECT_THAT(share("--set hidden_size=2147483648 --set intermediate_size=1 "
                    "--set vocab_size=1"),
              HasSubstr("0.0 % of the model's 369 E parameters"));
}

TEST_F(OddInput, AQuantisationThatNothingReadsIsNamed) {
  write_small_model({1, 2, 3, 4});
  auto config = nlohmann::json::parse(content_of(path("model/config.json")));
  for (const char* method : {"gptq", "compressed-tensors"}) {
    config["quantization_config"] = {{"quant_method", method}, {"bits", 4}};
    std::ofstream(path("model/config.json")) << config;
    for (const char* command : {"verify", "inspect"}) {
      expect_one_complaint(on_ranks(2, command + std::string(" --model ") + path("model")), 65,
                           "quant_method \"" + std::string(method) + "\" (only fp8");
    }
  }
  EXPECT_EQ(alone("inspect --config " + path("model/config.json")).code, 0)
      << "no files, no matter";
  EXPECT_EQ(alone("verify --set quantization_config=null --model " + path("model")).code, 0);
}

TEST_F(OddInput, TheReportSaysHowManyTokensThereWere) {
  write_small_model({1, 2, 3, 4});
  write_tokens(std::vector<float>(5 * 16, 0.5F), 16);
  const auto tokens = [&](const std::string& command) {
    const Outcome outcome =
        alone(command + " --model " + path("model") + " --json " + path("report.json"));
    EXPECT_EQ(outcome.code, 0) << outcome.error;
    return nlohmann::json::parse(content_of(path("report.json")))["options"]["tokens"];
  };
  const std::string input = " --input " + path("x.safetensors");
  EXPECT_EQ(tokens("verify" + input), 5);
  EXPECT_EQ(tokens("run --dry-run" + input), 5);
  EXPECT_EQ(tokens("inspect" + input), 5);
  EXPECT_EQ(tokens("verify --tokens 3"), 3);
  EXPECT_EQ(tokens("verify"), 64);
  EXPECT_EQ(tokens("inspect"), "none");
}

TEST_F(OddInput, ANanIsCountedOnceAndNamedAsSuch) {
  write_small_model({1, 2, 3, 4});
  std::vector<float> x(3 * 16, 0.5F);
  x[16 + 5] = std::numeric_limits<float>::quiet_NaN();
  write_tokens(x, 16);
  const Outcome outcome =
      alone("verify --quiet --model " + path("model") + " --input " + path("x.safetensors"));
  EXPECT_EQ(outcome.code, 1) << outcome.error;
  EXPECT_EQ(outcome.out,
            "# layer 0: NaN in 16 values, first at token 1, column 0 on rank 0: NaN, as on one "
            "device\n# Out of bounds values : 16 FAILED\n");
}

TEST_F(OddInput, AnIndexWithAWrongTotalSizeIsRightAllTheSameButShown) {
  // transformers doesn't look at it either, and published indexes are known to be wrong.
  write_small_model({1, 2, 3, 4});
  const std::string mlp = "model.layers.0.mlp.";
  nlohmann::json index = {{"metadata", {{"total_size", 5}}}};
  for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
    index["weight_map"][mlp + name + ".weight"] = "model.safetensors";
  }
  std::ofstream(path("model/model.safetensors.index.json")) << index;
  for (const std::string command : {"verify", "run", "inspect"}) {
    const Outcome outcome = alone(command + " --model " + path("model"));
    EXPECT_EQ(outcome.code, 0) << outcome.error;
    EXPECT_THAT(outcome.out, HasSubstr("768 bytes where its index says 5"));
  }
}

}  // namespace
}  // namespace gatefold
