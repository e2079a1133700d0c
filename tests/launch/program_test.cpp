// Runs the program itself, alone and under mpirun, and looks at what it prints and ends with.
#include <fmt/format.h>
#include <sys/stat.h>

#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "layers/seeded_source.h"
#include "runtime/checkpoint.h"
#include "runtime/device.h"
#include "tests/launch/program_testing.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::string gpt2() { return "--config " + kSource + "/configs/gpt2.json"; }

TEST_F(Program, HelpAndVersionArePrintedOnceAndEndWell) {
  for (const Outcome& outcome : {alone("--version"), on_ranks(3, "--version")}) {
    EXPECT_EQ(outcome.code, 0);
    EXPECT_THAT(outcome.out, ::testing::MatchesRegex(
                                 "gatefold [0-9.]+\nMPI     [^\n]*[0-9][^\n]*\noneDNN  [^\n]+\n"
                                 "CUDA    [^\n]+\nNCCL    [^\n]+\nfound   [^\n]+\n"));
  }
  EXPECT_EQ(alone("verify --bogus --help").code, 64);
  EXPECT_THAT(alone("run --help").out, HasSubstr("--ablate LIST"));
}

TEST_F(Program, ABadCommandLineIsOneLineHoweverManyRanksThereAre) {
  expect_one_complaint(alone("verify --model m --tp 4x"), 64, "'x' is left over");
  expect_one_complaint(on_ranks(3, "verify --model m --tp 4x"), 64, "'x' is left over");
  expect_one_complaint(on_ranks(2, "bench --model m --tokens 8-64:x1"), 64,
                       "'8-64:x1' is no range (a factor of 1 never ends)");
  expect_one_complaint(alone(""), 64, "no command");
}

TEST_F(Program, RanksThatWereStartedDifferentlyEndTogetherAndSayWhere) {
  expect_one_complaint(on_two("inspect " + gpt2(), "inspect " + gpt2() + " --seed 3"), 64,
                       "rank 1 has --seed 3, rank 0 has 0");
  expect_one_complaint(on_two("inspect " + gpt2(), "verify " + gpt2()), 64,
                       "rank 1 has command verify, rank 0 has inspect");
  expect_one_complaint(on_two("inspect " + gpt2(), "inspect --tp 0"), 64, "rank 1: --tp '0'");
  expect_one_complaint(on_two("inspect --tp 0", "inspect " + gpt2()), 64, "rank 0: --tp '0'");
  expect_one_complaint(on_two("inspect " + gpt2(), "--help"), 64, "some ranks print help");
}

TEST_F(Program, AnErrorOfTheSetUpIsPrintedOnceWithItsCode) {
  expect_one_complaint(on_ranks(2, "verify --config " + path("none.json")), 66, "can't be opened");
  std::ofstream(path("bad.json")) << "{";
  expect_one_complaint(alone("verify --config " + path("bad.json")), 65, "not JSON");
  expect_one_complaint(on_ranks(3, "verify " + gpt2() + " --tp 2"), 64, "does not divide");
  expect_one_complaint(on_ranks(2, "verify " + gpt2() + " --reduce fast --tp 4"), 64,
                       "--tp 4 does not divide 2 ranks");
  expect_one_complaint(alone("run " + gpt2() + " --layers 0,1"), 64, "give --layers N");
  expect_one_complaint(alone("run " + gpt2() + " --ablate 3072"), 64, "use 0 to 3071");
  expect_one_complaint(alone("inspect " + gpt2() + " --layers 12"), 64, "0-11");
  expect_one_complaint(alone("inspect " + gpt2() + " --tp 9"), 64, "--blocks 8");
}

TEST_F(Program, AGpuThatIsNotThereEndsEveryRank) {
  if (visible_cuda_devices().count > 0) GTEST_SKIP() << "this machine has a GPU";
  expect_one_complaint(on_ranks(3, "verify " + gpt2() + " --device cuda"), 69, "use --device cpu");
  expect_one_complaint(on_ranks(3, "verify " + gpt2() + " --comm nccl"), 69, "use --comm mpi");
}

TEST_F(Program, AnOutputThatCantBeWrittenIsRefusedBeforeAnyWork) {
  for (const char* option : {"--output", "--json", "--csv"}) {
    const std::string bad = std::string(" ") + option + " " + path("missing/file");
    expect_one_complaint(alone("run --model /nowhere" + bad), 74, "cannot write");
  }
  // A pipe, not /dev/null: were it replaced, a root user would miss it.
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  expect_one_complaint(on_ranks(2, "verify " + gpt2() + " --json " + path("pipe")), 74,
                       "cannot write");
}

TEST_F(Program, AnOutputThatWouldReplaceAnInputIsRefusedOnEveryRank) {
  write_small_model({1, 2, 3, 4});
  write_tokens(std::vector<float>(16), 16);
  const std::string command =
      "run --model " + path("model") + " --input " + path("x.safetensors") + " ";
  const std::string before = content_of(path("model/model.safetensors"));
  expect_one_complaint(on_ranks(3, command + "--output " + path("model/./model.safetensors")), 64,
                       "is a file of the model");
  expect_one_complaint(on_ranks(2, command + "--json " + path("x.safetensors")), 64,
                       "is the --input file");
  expect_one_complaint(alone(command + "--json " + path("r") + " --csv " + path("./r")), 64,
                       "is the same as --json");
  expect_one_complaint(alone(command + "--json /dev/stdout"), 64, "is standard output");
  EXPECT_EQ(content_of(path("model/model.safetensors")), before);
}

TEST_F(Program, NoControlCharacterReachesTheTerminal) {
  const std::string raw = "\x1b[31m\xc2\x9b\x07.json";
  fs::copy(kSource + "/configs/gpt2.json", path(raw));
  const std::string json = path("report.json");
  const Outcome fine = alone("inspect --config '" + path(raw) + "' --json " + json);
  EXPECT_EQ(fine.code, 0) << fine.error;
  EXPECT_THAT(fine.out, HasSubstr("?[31m??.json (gpt2)"));
  const Outcome wrong = alone("inspect --config '" + path(raw + raw) + "'");
  expect_one_complaint(wrong, 66, "?[31m??.json?[31m??.json");
  const std::string written = content_of(json);
  EXPECT_EQ(nlohmann::json::parse(written)["options"]["config"], path(raw));
  for (const std::string& text : {fine.out, wrong.error, written}) {
    EXPECT_EQ(text.find_first_of("\x1b\x07"), std::string::npos) << text;
  }
}

TEST_F(Program, AClosedOrFullStandardOutputIsAnErrorNotACrash) {
  const std::string command = kProgram + " inspect " + gpt2();
  EXPECT_EQ(shell(command + " >&-").code, 74);
  EXPECT_EQ(shell(command + " >/dev/full").code, 74);
  EXPECT_EQ(shell(kProgram + " --help >/dev/full").code, 74);
  const Outcome piped = shell("{ sleep 1; " + command + "; } | true; exit ${PIPESTATUS[0]}");
  EXPECT_EQ(piped.code, 74) << piped.error;
}

TEST_F(Program, SeveralProcessesThatAreEachAWorldOfOneAreNoPass) {
  const Outcome outcome = shell("SLURM_STEP_NUM_TASKS=4 " + kProgram + " inspect " + gpt2());
  expect_one_complaint(outcome, 64, "started 4 processes");
}

TEST_F(Program, ADryRunShowsWhoOwnsWhatAndComputesNothing) {
  const Outcome outcome =
      on_ranks(3, "run " + gpt2() + " --tokens 7 --dry-run --output " + path("y.safetensors"));
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_THAT(outcome.out, HasSubstr("[768,1920)"));
  EXPECT_FALSE(fs::exists(path("y.safetensors")));
}

TEST_F(Program, QuietPrintsTheClosingLinesOnly) {
  const Outcome outcome = alone("verify --quiet --model " + kFixture);
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_EQ(outcome.out, "# Out of bounds values : 0 OK\n");
}

TEST_F(Program, APlanOfManyTokensTakesNoMemoryForThem) {
  const Outcome outcome = alone("verify --config " + kSource +
                                "/configs/llama-3.1-405b.json --tokens 1000000 --dry-run");
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_THAT(outcome.out, HasSubstr("[0,1000000)"));
}

TEST_F(Program, MoreTokensThanCanBeCountedOrHeldAreRefusedBeforeTheyAreMade) {
  const std::string tokens = "verify --tokens 2147483647 " + gpt2();
  expect_one_complaint(alone(tokens + " --set n_embd=2147483648 --set n_inner=1"), 64,
                       "2147483647 tokens of 2147483648 values");
  expect_one_complaint(on_ranks(2, tokens + " --set n_embd=1048576 --set n_inner=1"), 71,
                       "18014398501093376 bytes (this machine has");
}

TEST_F(Program, VerifySaysOnATerminalWhichLayerItIsAt) {
  const std::string verify =
      kProgram + " verify --layers 0-2 --tokens 2 " + gpt2() + " --set n_embd=32 --device cpu";
  const Outcome shown = shell("GATEFOLD_PROGRESS=1 " + verify);
  EXPECT_EQ(shown.code, 0) << shown.error;
  EXPECT_THAT(shown.error, ContainsRegex("\r\x1b\\[Klayer 1 of 3.*\x1b\\[Klayer 3 of 3, about "
                                         "[0-9]+ s left\r\x1b\\[K$"));
  EXPECT_THAT(shell("GATEFOLD_PROGRESS=1 " + verify + " --quiet").error, IsEmpty());
  EXPECT_THAT(shell(verify).error, IsEmpty());
}

TEST_F(Program, InspectCountsGatesInEveryLayerByDefault) {
  const Outcome outcome =
      alone("inspect " + gpt2() + " --set n_embd=24 --tokens 3 --json " + path("report.json"));
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  const auto json = nlohmann::json::parse(content_of(path("report.json")));
  EXPECT_EQ(json["rows"].size(), 12U);
  EXPECT_EQ(json["options"]["layers"], "0-11");
  EXPECT_THAT(json["environment"]["kernel"].get<std::string>(), Not(HasSubstr("layers")));
}

TEST_F(Program, InspectSaysWhatAModelIsMadeOf) {
  const Outcome outcome = alone("inspect --config " + kSource +
                                "/configs/qwen3.5-0.8b.json --tp 3 --json " + path("report.json"));
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_THAT(outcome.out, HasSubstr("11.01 M parameters a layer, 264 M for 24, 22.0 MB a layer "
                                     "and 528 MB in all read per bf16 token"));
  // 8 blocks of 448 columns over 3 ranks: 2, 3, 3.
  EXPECT_THAT(outcome.out, HasSubstr("rank 0  blocks 0-1  columns 0-895"));
  EXPECT_THAT(outcome.out, HasSubstr("rank 2  blocks 5-7  columns 2240-3583"));
  const auto json = nlohmann::json::parse(content_of(path("report.json")));
  EXPECT_EQ(json["rows"][0]["parameters"], 11010048);
  EXPECT_EQ(json["rows"][0]["layers"], "0-23");
  EXPECT_EQ(json["options"]["command"], "inspect");
}

TEST_F(Program, InspectCountsTheWholeModelWhereItsConfigAllowsIt) {
  const auto says = [&](const std::string& config) {
    return alone("inspect --quiet --config " + kSource + "/configs/" + config).out;
  };
  EXPECT_THAT(says("llama-3.1-8b.json"), HasSubstr("of the model's 8.03 G parameters"));
  EXPECT_THAT(says("qwen3-0.6b.json"), HasSubstr("of the model's 596 M parameters"));
  EXPECT_THAT(says("gpt2.json"), HasSubstr("of the model's 124 M parameters"));
  EXPECT_THAT(says("gemma-3-270m.json"), HasSubstr("of the model's 268 M parameters"));
  EXPECT_THAT(says("qwen3.5-0.8b.json"), Not(HasSubstr("of the model's")));
}

TEST_F(Program, InspectMissesATensorThatTheModelPromises) {
  fs::create_directories(path("model"));
  fs::copy(kFixture + "/model.safetensors", path("model/model.safetensors"));
  std::string config = content_of(kFixture + "/config.json");
  config.replace(config.find("\"num_hidden_layers\": 1"), 22, "\"num_hidden_layers\": 2");
  std::ofstream(path("model/config.json")) << config;
  expect_one_complaint(alone("inspect --model " + path("model")), 65, "layers.1.");
}

TEST_F(Program, InspectCountsHowFarTheGatesOpen) {
  // silu: 0.73, 0.15, -0.27, -0.07 for the one token that opens them; 0 for the others.
  write_small_model({1.0F, 0.25F, -1.0F, -0.15F});
  std::vector<float> x(4 * 16);
  x[0] = 1.0F;
  write_tokens(x, 16);
  for (const int ranks : {1, 4}) {
    const Outcome outcome = on_ranks(
        ranks, "inspect --tp " + std::string(ranks == 1 ? "1" : "2") + " --model " + path("model") +
                   " --input " + path("x.safetensors") + " --json " + path("report.json"));
    ASSERT_EQ(outcome.code, 0) << outcome.error;
    const auto json = nlohmann::json::parse(content_of(path("report.json")));
    EXPECT_EQ(json["rows"][0]["gate_open"], 2.0 / 16);
    EXPECT_EQ(json["rows"][0]["gate_closed"], 1.0 / 16);
  }
}

TEST_F(Program, RunWritesTheSameYFromEveryGrid) {
  const std::string common = "run --model " + kFixture + " --input " + kFixture +
                             "/tokens.safetensors --output " + path("y.safetensors");
  ASSERT_EQ(alone(common).code, 0);
  const std::string expected = content_of(path("y.safetensors"));
  for (const char* grid : {"--tp 3", "--tp 1 --token-split 90,0,6"}) {
    const Outcome outcome = on_ranks(3, common + " " + grid);
    ASSERT_EQ(outcome.code, 0) << outcome.error;
    EXPECT_TRUE(content_of(path("y.safetensors")) == expected) << grid;
  }
  const SafetensorsFile file(path("y.safetensors"));
  EXPECT_EQ(file.header().tensors.at("y").dtype, "BF16");
  EXPECT_THAT(file.header().tensors.at("y").shape, ElementsAre(96, 576));
}

TEST_F(Program, AblationTakesAwayExactlyTheChannel) {
  write_small_model({1, 2, 3, 4});
  std::vector<float> x(16);
  x[0] = 1.0F;
  write_tokens(x, 16);
  const std::string common = "run --model " + path("model") + " --input " + path("x.safetensors") +
                             " --output " + path("y.safetensors");
  ASSERT_EQ(on_ranks(2, common).code, 0);
  const float whole = read_f32(path("y.safetensors"), "y")[0];
  EXPECT_NEAR(whole, 285.396347, 1e-4 * 285);
  ASSERT_EQ(on_ranks(2, common + " --ablate 3").code, 0);
  const std::vector<float> y = read_f32(path("y.safetensors"), "y");
  const std::vector<float> delta = read_f32(path("y.safetensors"), "delta");
  EXPECT_NEAR(y[0], 285.396347 - 40 * 3.928055, 1e-4 * 285);
  EXPECT_EQ(delta[0], whole - y[0]);
  for (std::size_t i = 1; i < 16; ++i) EXPECT_EQ(y[i], 0.0F);
}

TEST_F(Program, AblationKnowsTransposedFusedAndBiasedWeights) {
  // y is a sum over channels and a bias: what two halves take away is all but the bias.
  const std::pair<std::string, std::string> families[] = {
      {"gpt2", "transformer.h.1.mlp.c_proj.bias"},
      {"llama_bias", "model.layers.1.mlp.down_proj.bias"},
      {"phi3", ""},
  };
  for (const auto& [family, bias_name] : families) {
    SCOPED_TRACE(family);
    const std::string folder = kSource + "/tests/golden/" + family + "/f32";
    const auto delta = [&](const std::string& channels, const char* tensor) {
      const Outcome outcome =
          alone("run --layers 1 --model " + folder + " --input " + folder +
                "/golden.safetensors --ablate " + channels + " --output " + path("y.safetensors"));
      EXPECT_EQ(outcome.code, 0) << outcome.error;
      return read_f32(path("y.safetensors"), tensor);
    };
    const auto list = [](int begin, int end) {
      std::string text = std::to_string(begin);
      for (int i = begin + 1; i < end; ++i) text.append(",").append(std::to_string(i));
      return text;
    };
    const std::vector<float> first = delta(list(0, 37), "delta");
    const std::vector<float> second = delta(list(37, 80), "delta");
    const std::vector<float> bias = delta(list(0, 80), "y");
    const std::vector<float> y = read_f32(folder + "/golden.safetensors", "y.1");
    const std::vector<float> stored =
        bias_name.empty() ? std::vector<float>(48) : find_f32(folder, bias_name);
    ASSERT_EQ(first.size(), y.size());
    float largest = 0;
    for (const float v : y) largest = std::max(largest, std::abs(v));
    for (std::size_t i = 0; i < y.size(); ++i) {
      ASSERT_NEAR(first[i] + second[i] + bias[i], y[i], 1e-4 * largest) << i;
      ASSERT_EQ(bias[i], stored[i % 48]) << i;
    }
  }
}

TEST_F(Program, ANanTokenGivesANanRowAndOneWarning) {
  write_small_model({1, 2, 3, 4});
  std::vector<float> x(3 * 16, 0.5F);
  x[16 + 5] = std::numeric_limits<float>::quiet_NaN();
  write_tokens(x, 16);
  const Outcome outcome =
      on_ranks(2, "run --quiet --model " + path("model") + " --input " + path("x.safetensors") +
                      " --json " + path("report.json") + " --output " + path("y.safetensors"));
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_THAT(outcome.out, HasSubstr("warning: 1 of 3 rows of y hold NaN, the first is row 1"));
  const std::vector<float> y = read_f32(path("y.safetensors"), "y");
  for (std::size_t i = 0; i < 48; ++i) EXPECT_EQ(std::isnan(y[i]), i / 16 == 1) << i;
  const auto json = nlohmann::json::parse(content_of(path("report.json")));
  EXPECT_TRUE(json["rows"][0]["max"].is_number());
}

TEST_F(Program, AMadeModelGivesTheFingerprintOfItsSeed) {
  const std::string config = kSource + "/configs/smollm2-135m.json";
  const auto fingerprints = [&](const std::string& arguments) {
    const Outcome outcome = alone("verify --quiet --layers 0-1 --tokens 5 " + arguments +
                                  " --json " + path("report.json"));
    EXPECT_EQ(outcome.code, 0) << outcome.error;
    std::vector<std::string> found;
    const auto report = nlohmann::json::parse(content_of(path("report.json")));
    for (const auto& row : report["rows"]) found.push_back(row["fingerprint"]);
    return found;
  };
  for (const char* dtype : {"", " --dtype f32"}) {
    const std::string seeded = "--config " + config + " --seed 7" + dtype;
    const Outcome made =
        on_ranks(2, "make-model " + seeded + " --layers 0-1 --shards 3 --output " + path("made"));
    ASSERT_EQ(made.code, 0) << made.error;
    EXPECT_EQ(fingerprints(seeded), fingerprints("--seed 7 --model " + path("made")));
    fs::remove_all(path("made"));
  }
}

TEST_F(Program, AMadeModelHasItsFamilysNamesShapesAndFiles) {
  const std::string made = path("made");
  ASSERT_EQ(alone("make-model " + gpt2() + " --set n_embd=24 --set n_layer=2 --dtype f16 " +
                  "--shards 4 --output " + made)
                .code,
            0);
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(made)) {
    names.push_back(entry.path().filename().string());
  }
  EXPECT_THAT(names, ::testing::UnorderedElementsAre(
                         "config.json", "model.safetensors.index.json",
                         "model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors",
                         "model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors"));
  const auto index = nlohmann::json::parse(content_of(made + "/model.safetensors.index.json"));
  const auto& map = index["weight_map"];
  EXPECT_EQ(map.size(), 8U);
  const std::string name = "transformer.h.1.mlp.c_fc.weight";
  const SafetensorsFile file(made + "/" + map[name].get<std::string>());
  EXPECT_EQ(file.header().tensors.at(name).dtype, "F16");
  EXPECT_THAT(file.header().tensors.at(name).shape, ElementsAre(24, 96));
  EXPECT_EQ(index["metadata"]["total_size"], 2 * 2 * (24 * 96 * 2 + 96 + 24));
  const auto config = nlohmann::json::parse(content_of(made + "/config.json"));
  EXPECT_EQ(config["n_embd"], 24);
  EXPECT_EQ(config["dtype"], "float16");
  EXPECT_EQ(alone("verify --quiet --model " + made).code, 0);
}

TEST_F(Program, AMadeMixtureHoldsItsSeededWeightsWhateverTheLayout) {
  const std::map<std::string, std::string> configs = {
      {"mixtral", R"("intermediate_size": 24, "num_local_experts": 5)"},
      {"qwen3_5_moe", R"("moe_intermediate_size": 24, "num_experts": 5,
                         "shared_expert_intermediate_size": 8)"},
      {"gpt_oss", R"("intermediate_size": 24, "num_local_experts": 5)"},
      {"deepseek_v3", R"("intermediate_size": 8, "moe_intermediate_size": 24, "n_routed_experts": 5,
                         "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0)"}};
  for (const auto& [type, sizes] : configs) {
    SCOPED_TRACE(type);
    std::ofstream(path("mixture.json"))
        << fmt::format(R"({{"model_type": "{}", "hidden_size": 16, "num_hidden_layers": 2,
                           "num_experts_per_tok": 2, "torch_dtype": "bfloat16", {}}})",
                       type, sizes);
    const Outcome outcome = alone("make-model --seed 4 --shards 2 --config " +
                                  path("mixture.json") + " --output " + path("made"));
    ASSERT_EQ(outcome.code, 0) << outcome.error;
    const ModelConfig config = read_model_config(path("made/config.json"));
    const Checkpoint made(path("made"));
    const SeededSource seeded(config, 4);
    for (const auto& [name, info] : seeded.layer_tensors(1)) {
      ASSERT_TRUE(made.find(name)) << name;
      EXPECT_EQ(made.find(name)->shape, info.shape) << name;
      EXPECT_EQ(made.find(name)->dtype, info.dtype) << name;
      const Extent extent = extent_of(info.shape);
      std::vector<float> values(static_cast<std::size_t>(extent.rows * extent.columns));
      std::vector<float> expected(values.size());
      read_as_float(made, name, {0, extent.rows}, {0, extent.columns}, values.data());
      read_as_float(seeded, name, {0, extent.rows}, {0, extent.columns}, expected.data());
      EXPECT_EQ(values, expected) << name;
    }
    EXPECT_NO_THROW(resolve_moe(config, 1, made));
    fs::remove_all(path("made"));
  }
}

TEST_F(Program, MakeModelTouchesNoDirectoryThatHoldsAnything) {
  fs::create_directories(path("full"));
  std::ofstream(path("full/precious")) << "x";
  std::ofstream(path("file")) << "x";
  const std::string small = gpt2() + " --set n_embd=24 --layers 0";
  const auto make = [&](const std::string& output) {
    return on_ranks(2, "make-model " + small + " --output " + output);
  };
  expect_one_complaint(make(path("full")), 74, "isn't empty");
  expect_one_complaint(make(path("file")), 74, "is no directory");
  expect_one_complaint(make(path("missing/made")), 74, "cannot write");
  EXPECT_EQ(content_of(path("full/precious")), "x");
  fs::create_directories(path("empty"));
  EXPECT_EQ(make(path("empty")).code, 0);
  EXPECT_TRUE(fs::exists(path("empty/model.safetensors")));
  expect_one_complaint(alone("make-model " + small + " --shards 5 --output " + path("made")), 64,
                       "4 tensors");
  EXPECT_EQ(alone("make-model --dry-run " + small + " --output " + path("made")).code, 0);
  EXPECT_FALSE(fs::exists(path("made")));
  // A file that grows beyond the limit, as on a full disk.
  const Outcome full = shell("trap '' XFSZ; ulimit -f 8000; " + kProgram + " make-model --config " +
                             kSource + "/configs/smollm2-135m.json --output " + path("made"));
  expect_one_complaint(full, 74, "File too large");
  EXPECT_FALSE(fs::exists(path("made")));
  for (const auto& entry : fs::directory_iterator(path("."))) {
    EXPECT_THAT(entry.path().filename().string(), Not(HasSubstr(".gatefold-")));
  }
}

TEST_F(Program, AModelWhoseMakingIsTerminatedLeavesNothing) {
  struct Case {
    std::string signal;
    int code;
    std::string says;
  };
  for (const auto& [signal, code, says] :
       {Case{"TERM", 143, "terminated"}, {"INT", 130, "interrupted"}, {"HUP", 129, "hung up"}}) {
    // A shell without job control has its children ignore SIGINT.
    const Outcome ended = shell("set -m; " + kProgram + " make-model --config " + kSource +
                                "/configs/smollm2-135m.json --shards 30 --output " + path("made") +
                                " & until ls " + path(".gatefold-*/model-00002*") +
                                " 2>/dev/null || ! kill -0 $!; do sleep 0.01; done; kill -" +
                                signal + " $!; wait $!");
    EXPECT_EQ(ended.code, code) << ended.error;
    EXPECT_THAT(ended.error, HasSubstr(says + " while in: writing the model"));
    EXPECT_FALSE(fs::exists(path("made")));
    for (const auto& entry : fs::directory_iterator(path("."))) {
      EXPECT_THAT(entry.path().filename().string(), Not(HasSubstr(".gatefold-")));
    }
  }
}

TEST_F(Program, ASignalThatTheProgramIsStartedToIgnoreIsIgnored) {
  const Outcome outcome = shell("trap '' HUP; " + kProgram + " make-model --config " + kSource +
                                "/configs/smollm2-135m.json --output " + path("made") +
                                " & until ls " + path(".gatefold-*") +
                                " 2>/dev/null || ! kill -0 $!; do sleep 0.01; done; "
                                "kill -HUP $!; wait $!");
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_TRUE(fs::exists(path("made/config.json")));
}

}  // namespace
}  // namespace gatefold
