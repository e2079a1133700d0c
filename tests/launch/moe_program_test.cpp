// The program with mixtures of experts: models that it makes, of a dense one too, and what it says
// of them.
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <tuple>

#include "runtime/dtype.h"
#include "runtime/tensor_source.h"
#include "tests/launch/program_testing.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

class MoeProgram : public Program {
 protected:
  Json report() const { return Json::parse(content_of(path("report.json"))); }

  std::vector<std::string> fingerprints(const Outcome& verified) const {
    EXPECT_EQ(verified.code, 0) << verified.error << verified.out;
    std::vector<std::string> found;
    const Json all = report();  // outlives the loop over a part of it
    for (const auto& row : all["rows"]) found.push_back(row["fingerprint"]);
    EXPECT_FALSE(found.empty());
    return found;
  }

  void make(const std::string& arguments) const {
    const Outcome made = alone("make-model " + arguments + " --output " + path("made"));
    ASSERT_EQ(made.code, 0) << made.error;
  }

  /// y of `model` for its tokens, whatever it is stored in, and where they went.
  struct Output {
    std::vector<float> y;
    std::vector<std::int64_t> chosen;  // tokens of each expert
  };
  Output run(int ranks, const std::string& model, const std::string& tokens,
             const std::string& more = "") const {
    const Outcome outcome = on_ranks(ranks, "run --quiet --model " + model + " --input " + tokens +
                                                " " + more + " --output " + path("y.safetensors"));
    EXPECT_EQ(outcome.code, 0) << outcome.error;
    Output output;
    if (outcome.code != 0) return output;
    const SafetensorsFile file(path("y.safetensors"));
    const auto& tensors = file.header().tensors;
    output.y = widened(file, "y");
    if (!tensors.contains("topk_ids")) return output;
    const SafetensorsEntry& entry = tensors.at("topk_ids");
    std::vector<std::int32_t> ids((entry.end - entry.begin) / 4);
    file.read("topk_ids", 0, std::as_writable_bytes(std::span(ids)));
    for (const std::int32_t id : ids) {
      const auto at = static_cast<std::size_t>(id);
      output.chosen.resize(std::max(output.chosen.size(), at + 1));
      ++output.chosen[at];
    }
    return output;
  }

  static std::vector<float> widened(const SafetensorsFile& file, const std::string& tensor) {
    const SafetensorsEntry& entry = file.header().tensors.at(tensor);
    const DType dtype = entry.dtype == "F32" ? DType::kF32 : DType::kBf16;
    std::vector<std::byte> bytes(entry.end - entry.begin);
    file.read(tensor, 0, bytes);
    std::vector<float> values(bytes.size() / static_cast<std::size_t>(size_of(dtype)));
    convert(dtype, bytes.data(), DType::kF32, reinterpret_cast<std::byte*>(values.data()),
            static_cast<std::int64_t>(values.size()));
    return values;
  }

  static void expect_same_bits(const std::vector<float>& found, const std::vector<float>& expected,
                               float times = 1.0F) {
    ASSERT_EQ(found.size(), expected.size());
    std::size_t different = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      const float scaled = found[i] * times;
      if (std::memcmp(&scaled, &expected[i], sizeof(float)) != 0) ++different;
    }
    EXPECT_EQ(different, 0U) << "of " << found.size();
  }

  /// H 8, E 4, k 1: token t carries its own logits, so that it goes to expert `to[t]`.
  void write_routed_model(const std::vector<std::int64_t>& to) const {
    fs::create_directories(path("routed"));
    std::ofstream(path("routed/config.json"))
        << R"({"model_type": "qwen3_moe", "hidden_size": 8, "moe_intermediate_size": 4,
               "num_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 1,
               "hidden_act": "silu", "torch_dtype": "float32"})";
    const std::string mlp = "model.layers.0.mlp.";
    std::vector<SafetensorsWriter::Tensor> tensors = {{mlp + "gate.weight", "F32", {4, 8}}};
    std::vector<float> router(32);
    for (std::size_t e = 0; e < 4; ++e) router[e * 8 + e] = 1.0F;
    std::vector<std::vector<float>> values = {router};
    for (int e = 0; e < 4; ++e) {
      const std::string expert = mlp + "experts." + std::to_string(e) + ".";
      tensors.push_back({expert + "gate_proj.weight", "F32", {4, 8}});
      tensors.push_back({expert + "up_proj.weight", "F32", {4, 8}});
      tensors.push_back({expert + "down_proj.weight", "F32", {8, 4}});
      values.insert(values.end(), 3, std::vector<float>(32, 0.5F));
    }
    write_tensors(path("routed/model.safetensors"), tensors, values);
    std::vector<float> x(to.size() * 8);
    for (std::size_t t = 0; t < to.size(); ++t) x[t * 8 + static_cast<std::size_t>(to[t])] = 4.0F;
    write_tokens(x, 8);
  }
};

struct Family {
  std::string config;
  std::string set;     // what makes it small
  std::string tensor;  // a name that shows how it is stored
  std::vector<std::int64_t> shape;
};

const Family kFamilies[] = {
    {"qwen3-30b-a3b",
     "num_experts=6 num_experts_per_tok=2 moe_intermediate_size=40",
     "model.layers.1.mlp.experts.5.up_proj.weight",
     {40, 48}},
    {"deepseek-v3",
     "n_routed_experts=8 n_group=2 topk_group=1 num_experts_per_tok=3 moe_intermediate_size=40 "
     "intermediate_size=56 first_k_dense_replace=1",
     "model.layers.1.mlp.experts.7.down_proj.weight",
     {48, 40}},
    {"mixtral-8x7b",
     "num_local_experts=4 intermediate_size=40",
     "model.layers.1.block_sparse_moe.experts.3.w2.weight",
     {48, 40}},
    {"qwen3.5-35b-a3b",
     "num_experts=5 num_experts_per_tok=2 moe_intermediate_size=40 "
     "shared_expert_intermediate_size=24",
     "model.language_model.layers.1.mlp.experts.gate_up_proj",
     {5, 80, 48}},
    {"llama-4-scout",
     "num_local_experts=4 intermediate_size=40",
     "language_model.model.layers.1.feed_forward.experts.gate_up_proj",
     {4, 48, 80}},
    {"gpt-oss-20b",
     "num_local_experts=6 intermediate_size=40",
     "model.layers.1.mlp.experts.gate_up_proj_bias",
     {6, 80}},
    {"switch-base-8",
     "num_experts=3 d_ff=40 num_sparse_encoder_layers=1",
     "encoder.block.1.layer.1.mlp.experts.expert_2.wi.weight",
     {40, 48}},
    {"deepseek-v2-lite",
     "n_routed_experts=4 num_experts_per_tok=2 moe_intermediate_size=40 intermediate_size=56 "
     "mlp_bias=true",  // of dense layers and shared experts alone
     "model.layers.1.mlp.shared_experts.up_proj.bias",
     {80}},
};

std::string small(const Family& family) {
  const bool t5 = family.config.starts_with("switch");
  std::string text = "--config " + kSource + "/configs/" + family.config + ".json --set " +
                     (t5 ? "d_model" : "hidden_size") + "=48 --set " +
                     (t5 ? "num_layers" : "num_hidden_layers") + "=2";
  std::istringstream words(family.set);
  for (std::string word; words >> word;) text += " --set " + word;
  return text;
}

TEST_F(MoeProgram, AMadeMixtureLiesAsItsFamilyStoresItAndGivesTheFingerprintOfItsSeed) {
  for (const Family& family : kFamilies) {
    SCOPED_TRACE(family.config);
    const std::string seeded = small(family) + " --seed 7";
    make(seeded + " --layers 0-1 --shards 2");
    const auto index = Json::parse(content_of(path("made/model.safetensors.index.json")));
    ASSERT_TRUE(index["weight_map"].contains(family.tensor));
    const SafetensorsFile file(
        path("made/" + index["weight_map"][family.tensor].get<std::string>()));
    EXPECT_EQ(file.header().tensors.at(family.tensor).shape, family.shape);
    const std::string config = content_of(path("made/config.json"));
    EXPECT_THAT(config, Not(HasSubstr("quantization_config"))) << "what is written is plain";
    const std::string verify = "verify --layers 0-1 --tokens 5 --json " + path("report.json") + " ";
    EXPECT_EQ(fingerprints(alone(verify + seeded)),
              fingerprints(on_ranks(2, verify + "--seed 7 --model " + path("made"))));
    fs::remove_all(path("made"));
  }
}

// Whichever way the experts lie, they are those of the seed, or of the dense layer.
TEST_F(MoeProgram, AMadeMixtureInAnotherLayoutOfItsFamilyHasTheSameWeights) {
  struct Layout {
    std::string model;  // what make-model makes it of
    std::string layout;
    std::string tensor;
    std::vector<std::int64_t> shape;
  };
  const std::string dense =
      "--from-dense " + kFixture + " --experts 3 --copy --set num_experts_per_tok=3 ";
  const std::string fused = "model.layers.1.mlp.experts.gate_up_proj";
  const Layout layouts[] = {
      {small(kFamilies[1]), "stacked", "model.layers.1.mlp.experts.down_proj", {8, 48, 40}},
      {small(kFamilies[2]), "stacked", fused, {4, 80, 48}},
      {small(kFamilies[7]), "stacked", fused, {4, 80, 48}},
      {small(kFamilies[3]),
       "per-expert",
       "model.language_model.layers.1.mlp.experts.4.up_proj.weight",
       {40, 48}},
      {"--config " + kSource + "/configs/qwen3-vl-30b-a3b.json --set hidden_size=48 " +
           "--set moe_intermediate_size=40 --set num_experts=5 --set num_experts_per_tok=2 ",
       "stacked",
       "model.language_model.layers.1.mlp.experts.gate_up_proj",
       {5, 80, 48}},
      {dense, "stacked", "model.layers.0.mlp.experts.gate_up_proj", {3, 3072, 576}},
  };
  const std::string verify = "verify --tokens 5 --json " + path("report.json") + " --model ";
  for (const Layout& one : layouts) {
    SCOPED_TRACE(one.model + one.layout);
    const std::string layers = one.model == dense ? "" : " --layers 0-1";
    make(one.model + layers);
    const std::vector<std::string> own = fingerprints(alone(verify + path("made") + layers));
    fs::remove_all(path("made"));
    make(one.model + layers + " --layout " + one.layout);
    const SafetensorsFile file(path("made/model.safetensors"));
    ASSERT_TRUE(file.header().tensors.contains(one.tensor));
    EXPECT_EQ(file.header().tensors.at(one.tensor).shape, one.shape);
    EXPECT_EQ(fingerprints(alone(verify + path("made") + layers)), own);
    fs::remove_all(path("made"));
  }
}

// One rank has no other to agree with, and float64 no say in where a pattern sends tokens.
TEST_F(MoeProgram, ASweepsHeaderAndFootAgreeWithItsRows) {
  const Outcome outcome =
      on_ranks(2, "bench --iterations 1 --warmup 0 --hot --tokens 3 --layers 0 --tp 1,2 " +
                      small(kFamilies[0]) + " --routing uniform --dispatcher alltoall,allgather" +
                      " --json " + path("bench.json"));
  ASSERT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_THAT(outcome.out, ContainsRegex("# experts +[0-9]+ blocks? each, rows as the table says"));
  EXPECT_THAT(outcome.out,
              HasSubstr("# Out of bounds values : 0 OK in 2 rows; 1 row not checked (float64 "
                        "goes by the router, and one rank has no other to agree with)\n"));
  const auto rows = Json::parse(content_of(path("bench.json")))["rows"];
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows[0]["wrong"], "-");
  EXPECT_EQ(rows[1]["wrong"], 0);
  EXPECT_EQ(rows[2]["dispatcher"], "allgather");
}

// Mixtures have no fast sums: their points are passed over.
TEST_F(MoeProgram, PointsThatNoWayCanTimeCountAsSkipped) {
  const Outcome outcome =
      alone("bench --iterations 1 --warmup 0 --hot --tokens 3 --layers 0-1 --reduce fast " +
            small(kFamilies[1]) + " --json " + path("bench.json"));
  ASSERT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_EQ(Json::parse(content_of(path("bench.json")))["environment"]["points"],
            "2 of 2, 1 of them skipped");
}

TEST_F(MoeProgram, ALayoutThatAFamilyDoesntKnowIsRefused) {
  const std::string to = " --output " + path("made") + " --layout ";
  const std::tuple<std::string, std::string> bad[] = {
      {small(kFamilies[5]) + to + "stacked-transposed",
       "(they are stored stacked-alternating or per-expert)"},
      {"--config " + kSource + "/configs/switch-base-8.json" + to + "stacked",
       "(they are stored per-expert)"},
      {small(kFamilies[0]) + to + "stacked-transposed", "stored per-expert or stacked)"},
      {"--config " + kSource + "/configs/gpt2.json" + to + "stacked", "models are dense"},
  };
  for (const auto& [arguments, says] : bad) {
    SCOPED_TRACE(arguments);
    expect_one_complaint(alone("make-model " + arguments), 64, says);
    EXPECT_FALSE(fs::exists(path("made")));
  }
}

// 8 MiB of gates and ups; a few at a time are written.
TEST_F(MoeProgram, AStackThatIsWrittenInPiecesHoldsTheWeightsOfItsSeed) {
  const std::string seeded = "--config " + kSource +
                             "/configs/qwen3.5-35b-a3b.json --seed 7 --set num_hidden_layers=1 "
                             "--set num_experts=8 --set moe_intermediate_size=256 "
                             "--set hidden_size=1024 --set shared_expert_intermediate_size=8 ";
  make(seeded);
  const std::string verify = "verify --tokens 40 --json " + path("report.json") + " ";
  EXPECT_EQ(fingerprints(alone(verify + seeded)),
            fingerprints(alone(verify + "--seed 7 --model " + path("made"))));
}

TEST_F(MoeProgram, ACorrectionBiasStaysFp32InAMadeModel) {
  make(small(kFamilies[1]) + " --layers 1");
  const SafetensorsFile file(path("made/model.safetensors"));
  const auto& tensors = file.header().tensors;
  EXPECT_EQ(tensors.at("model.layers.1.mlp.gate.e_score_correction_bias").dtype, "F32");
  EXPECT_EQ(tensors.at("model.layers.1.mlp.gate.weight").dtype, "BF16");
}

// Eighths and eight times are exact, and the tree over eight experts is the one over eight blocks.
TEST_F(MoeProgram, ADenseLayerCutIntoEightExpertsGivesAnEighthOfItsBits) {
  make("--from-dense " + kFixture + " --experts 8 --split");
  const std::string tokens = kFixture + "/tokens.safetensors";
  for (const std::string dtype : {"", "--dtype f32"}) {
    const std::vector<float> dense = run(1, kFixture, tokens, "--blocks 8 " + dtype).y;
    ASSERT_EQ(dense.size(), 96U * 576U);
    for (const int ranks : {1, 2, 4}) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks " + dtype);
      const Output cut = run(ranks, path("made"), tokens,
                             "--expert-blocks 1 --ep " + std::to_string(ranks) + " " + dtype);
      expect_same_bits(cut.y, dense, 8.0F);
      EXPECT_EQ(cut.chosen, std::vector<std::int64_t>(8, 96));
    }
  }
}

TEST_F(MoeProgram, CopiesOfADenseLayerGiveItsBitsWhereOneOrTwoOfThemAreChosen) {
  make("--from-dense " + kFixture + " --experts 8 --copy");
  const std::string tokens = kFixture + "/tokens.safetensors";
  const std::vector<float> dense = run(1, kFixture, tokens).y;
  for (const auto& [ranks, ep] :
       std::vector<std::pair<int, int>>{{1, 1}, {2, 1}, {2, 2}, {4, 1}, {4, 2}, {4, 4}}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks, ep " + std::to_string(ep));
    const std::string grid = "--ep " + std::to_string(ep);
    expect_same_bits(run(ranks, path("made"), tokens, grid).y, dense);
    // Two halves of one number.
    const std::string two = grid + " --set num_experts_per_tok=2";
    expect_same_bits(run(ranks, path("made"), tokens, two).y, dense);
  }
}

// Thirds are not exact: each weight, product and sum may be off by 2^-24 of the whole.
TEST_F(MoeProgram, ThreeCopiesOfADenseLayerStayWithinTheirRounding) {
  make("--from-dense " + kFixture + " --experts 5 --copy --dtype f32 --set num_experts_per_tok=3");
  const std::string tokens = kFixture + "/tokens.safetensors";
  const std::vector<float> dense = run(1, kFixture, tokens, "--dtype f32").y;
  const std::vector<float> three = run(4, path("made"), tokens, "--ep 2").y;
  ASSERT_EQ(three.size(), dense.size());
  std::size_t different = 0;
  for (std::size_t i = 0; i < dense.size(); ++i) {
    ASSERT_LE(std::abs(three[i] - dense[i]), 5 * 0x1p-24F * std::abs(dense[i])) << i;
    if (three[i] != dense[i]) ++different;
  }
  EXPECT_GT(different, 0U) << "three thirds are never one here?";
  EXPECT_EQ(on_ranks(4, "verify --quiet --ep 2 --model " + path("made")).code, 0);
}

// phi3 has gate and up in one tensor, which the experts' rows are taken out of.
TEST_F(MoeProgram, ExpertsAreMadeOfFusedWeightsToo) {
  const std::string dense = kSource + "/tests/golden/phi3/f32";
  const std::string tokens = dense + "/golden.safetensors";
  make("--from-dense " + dense + " --experts 8 --split --layers 1");
  expect_same_bits(run(2, path("made"), tokens, "--layers 1 --expert-blocks 1").y,
                   run(1, dense, tokens, "--layers 1").y, 8.0F);
}

TEST_F(MoeProgram, AModelMadeOfADenseOneSaysSoInItsConfig) {
  make("--from-dense " + kFixture + " --experts 6 --split --shards 3");
  const auto split = Json::parse(content_of(path("made/config.json")));
  EXPECT_EQ(split["model_type"], "qwen3_moe");
  EXPECT_EQ(split["num_experts"], 6);
  EXPECT_EQ(split["num_experts_per_tok"], 6);
  EXPECT_EQ(split["norm_topk_prob"], false);
  EXPECT_EQ(split["moe_intermediate_size"], 256);
  EXPECT_EQ(split["dtype"], "bfloat16");
  fs::remove_all(path("made"));
  make("--from-dense " + kFixture + " --experts 3 --copy --dtype f16");
  const auto copy = Json::parse(content_of(path("made/config.json")));
  EXPECT_EQ(copy["num_experts_per_tok"], 1);
  EXPECT_EQ(copy["norm_topk_prob"], true);
  EXPECT_EQ(copy["moe_intermediate_size"], 1536);
  EXPECT_EQ(copy["dtype"], "float16");
  const SafetensorsFile file(path("made/model.safetensors"));
  const auto& tensors = file.header().tensors;
  EXPECT_EQ(tensors.size(), 10U);
  EXPECT_EQ(tensors.at("model.layers.0.mlp.experts.2.down_proj.weight").dtype, "F16");
}

TEST_F(MoeProgram, WhatCantBecomeExpertsIsRefusedAndLeavesNothing) {
  const std::string golden = kSource + "/tests/golden/";
  const std::tuple<std::string, int, std::string> bad[] = {
      {kFixture + " --experts 7 --split", 64, "7 experts out of the 1536 neurons"},
      {kFixture + " --experts 64 --split", 64, "32 experts of a token are the most"},
      {kFixture + " --experts 8 --split --set hidden_size=64", 64, "--set hidden_size=64"},
      {kFixture + " --experts 2 --copy --set num_experts_per_tok=3", 64, "more than num_experts 2"},
      {kFixture + " --experts 8 --split --layers 1", 64, "beyond the model's 1 layer"},
      {kFixture + " --experts 8 --split --shards 26", 64, "more than 25 tensors"},
      {golden + "gpt2/f32 --experts 8 --split", 65, "its layers have no gate"},
      {golden + "llama_bias/f32 --experts 8 --split", 65, "its layers have biases"},
      {golden + "qwen3_moe/bf16 --experts 8 --copy", 64, "is a mixture of experts"},
      {path("nowhere") + " --experts 8 --copy", 66, "can't be opened"},
  };
  for (const auto& [arguments, code, says] : bad) {
    SCOPED_TRACE(arguments);
    const std::string command = "make-model --output " + path("made") + " --from-dense ";
    expect_one_complaint(alone(command + arguments), code, says);
    EXPECT_FALSE(fs::exists(path("made")));
  }
  expect_one_complaint(on_ranks(3, "make-model --output " + path("made") + " --from-dense " +
                                       kFixture + " --experts 7 --split"),
                       64, "use a divisor");
  expect_one_complaint(
      alone("make-model --from-dense " + kFixture + " --experts 8 --copy --output " + path("made") +
            " --json " + kFixture + "/config.json"),
      64, "is a file of the model");
  EXPECT_EQ(alone("make-model --dry-run --from-dense " + kFixture +
                  " --experts 8 --copy --output " + path("made"))
                .code,
            0);
  EXPECT_FALSE(fs::exists(path("made")));
}

TEST_F(MoeProgram, ABenchSendsTokensByThePatternAndGetsOneRanksBits) {
  constexpr double kExperts = 16;
  constexpr double kTopK = 2;
  std::vector<double> hottest;
  for (const std::string routing : {"uniform", "zipf:1", "one-hot"}) {
    const Outcome outcome = on_ranks(
        2, "bench --quiet --hot --iterations 1 --warmup 0 --tokens 64 --ep 2 --config " + kSource +
               "/configs/qwen3-30b-a3b.json --set hidden_size=64 --set moe_intermediate_size=48 "
               "--set num_experts=16 --set num_experts_per_tok=2 --routing " +
               routing + " --json " + path("report.json"));
    ASSERT_EQ(outcome.code, 0) << outcome.error;
    const Json all = report();
    EXPECT_EQ(all["environment"]["routing"], routing);
    ASSERT_EQ(all["rows"].size(), 1U);
    const Json row = all["rows"][0];
    EXPECT_EQ(row["wrong"], 0) << row;
    EXPECT_GE(row["imbalance"].get<double>(), 1) << row;
    EXPECT_GT(row["sent_bytes"].get<double>(), 0) << row;
    hottest.push_back(row["hottest_expert"]);
    if (routing != "one-hot") continue;
    EXPECT_DOUBLE_EQ(row["hottest_expert"], kExperts / kTopK);
    EXPECT_DOUBLE_EQ(row["load_entropy_bits"], std::log2(kTopK));
  }
  EXPECT_LT(hottest[0], hottest[1]);
  EXPECT_LT(hottest[1], hottest[2]);
}

TEST_F(MoeProgram, InspectCountsWhatALayerHasAndWhatATokenMeets) {
  const Outcome outcome = alone("inspect --config " + kSource +
                                "/configs/qwen3-30b-a3b.json --json " + path("report.json"));
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  const auto rows = report()["rows"];
  ASSERT_EQ(rows.size(), 1U);
  const std::int64_t expert = std::int64_t{3} * 2048 * 768;
  const std::int64_t router = 128 * 2048;
  EXPECT_EQ(rows[0]["kind"], "moe, 8 of 128");
  EXPECT_EQ(rows[0]["gate"], "128 x [768, 2048]");
  EXPECT_EQ(rows[0]["parameters"], 128 * expert + router);
  EXPECT_EQ(rows[0]["active_parameters"], 8 * expert + router);
  EXPECT_EQ(rows[0]["bytes_per_token"], 8 * expert * 2 + router * 4);
  EXPECT_THAT(outcome.out, HasSubstr("29.0 G parameters in these feed-forward layers, 1.82 G "
                                     "active for a token"));
}

TEST_F(MoeProgram, InspectCountsTheWholeModelAsItsPublishersDo) {
  const auto says = [&](const std::string& config) {
    return alone("inspect --quiet --config " + kSource + "/configs/" + config + ".json").out;
  };
  const std::string whole = "of the model's ";
  EXPECT_THAT(says("qwen3-30b-a3b"), HasSubstr(whole + "30.5 G parameters (3.35 G active"));
  EXPECT_THAT(says("qwen3-235b-a22b"), HasSubstr(whole + "235 G parameters (22.2 G active"));
  EXPECT_THAT(says("mixtral-8x7b"), HasSubstr(whole + "46.7 G parameters (12.9 G active"));
  EXPECT_THAT(says("qwen1.5-moe-a2.7b"), HasSubstr(whole + "14.3 G parameters (2.69 G active"));
  EXPECT_THAT(says("gpt-oss-20b"), Not(HasSubstr(whole)));
}

TEST_F(MoeProgram, InspectTellsDenseLayersFromMixturesOfOneModel) {
  const Outcome outcome = alone("inspect --config " + kSource +
                                "/configs/deepseek-v3.json --json " + path("report.json"));
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  const auto rows = report()["rows"];
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0]["layers"], "0-2");
  EXPECT_EQ(rows[0]["kind"], "dense, gated");
  EXPECT_EQ(rows[0]["shared"], "-");
  EXPECT_EQ(rows[0]["active_parameters"], rows[0]["parameters"]);
  EXPECT_EQ(rows[1]["layers"], "3-60");
  EXPECT_EQ(rows[1]["kind"], "moe, 8 of 256 + 1");
  EXPECT_EQ(rows[1]["shared"], 2048);
}

TEST_F(MoeProgram, InspectSaysWhoOwnsWhichExpertsAndBlocks) {
  const std::string config = "inspect --config " + kSource + "/configs/qwen1.5-moe-a2.7b.json ";
  // 60 experts over 8: 7 and 8 of them; a grid that this world isn't.
  const Outcome alone_of_eight = alone(config + "--ep 8 --tp 2");
  EXPECT_EQ(alone_of_eight.code, 0) << alone_of_eight.error;
  EXPECT_THAT(alone_of_eight.out, HasSubstr("etp 1 x ep 8"));
  EXPECT_THAT(alone_of_eight.out, HasSubstr("rank 0  experts 0-6  blocks 0-3  columns 0-1407"));
  EXPECT_THAT(alone_of_eight.out, HasSubstr("rank 7  experts 52-59  blocks 0-3"));
  EXPECT_THAT(alone_of_eight.out, HasSubstr("shared expert, tp 2"));
  // Four blocks of 352 columns, two of them on each rank of an expert.
  const Outcome on_four = on_ranks(4, config + "--ep 2");
  EXPECT_EQ(on_four.code, 0) << on_four.error;
  EXPECT_THAT(on_four.out, HasSubstr("etp 2 x ep 2"));
  EXPECT_THAT(on_four.out, HasSubstr("rank 1  experts 0-29  blocks 2-3  columns 704-1407"));
  EXPECT_THAT(on_four.out, HasSubstr("rank 2  experts 30-59  blocks 0-1  columns 0-703"));
  expect_one_complaint(on_ranks(2, config + "--ep 1 --expert-blocks 1"), 64,
                       "2 ranks share each expert of 1 block");
}

TEST_F(MoeProgram, InspectShowsHowTheTokensSpreadOverTheExperts) {
  write_routed_model({1, 1, 0, 1, 3, 1, 0, 1});  // 2, 5, 0 and 1 tokens
  const double entropy =
      -(0.25 * std::log2(0.25) + 0.625 * std::log2(0.625) + 0.125 * std::log2(0.125));
  for (const auto& [ranks, grid] : std::vector<std::pair<int, std::string>>{
           {1, ""}, {3, "--token-split 6,0,2"}, {4, "--tp 2 --ep 2 --expert-blocks 2"}}) {
    SCOPED_TRACE(grid);
    const Outcome outcome =
        on_ranks(ranks, "inspect --model " + path("routed") + " --input " + path("x.safetensors") +
                            " --json " + path("report.json") + " " + grid);
    ASSERT_EQ(outcome.code, 0) << outcome.error;
    const auto row = report()["rows"][0];
    EXPECT_EQ(row["load_max_over_mean"], 2.5);
    EXPECT_NEAR(row["load_entropy_bits"].get<double>(), entropy, 1e-12);
    EXPECT_NEAR(row["load_entropy_share"].get<double>(), entropy / 2, 1e-12);
    EXPECT_EQ(row["experts_without_tokens"], 1);
    EXPECT_THAT(outcome.out, HasSubstr("layer 0: how many rows its experts get of 8 tokens"));
    EXPECT_THAT(outcome.out,
                HasSubstr("expert 1                 5  " + std::string(40, '#') + "\n"));
    EXPECT_THAT(outcome.out, HasSubstr("expert 2                 0\n"));
  }
}

TEST_F(MoeProgram, InspectRoutesAsRunDoes) {
  const std::string model = kSource + "/tests/golden/deepseek_v3/bf16";
  std::vector<float> x(std::size_t{29} * 72);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * i % 101) * 0.02F - 1.0F;
  write_tokens(x, 72);
  const std::string tokens = path("x.safetensors");
  const std::vector<std::int64_t> chosen = run(2, model, tokens, "--layers 1").chosen;
  ASSERT_FALSE(chosen.empty());
  const Outcome outcome = on_ranks(2, "inspect --layers 1 --model " + model + " --input " + tokens);
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  for (std::size_t e = 0; e < chosen.size(); ++e) {
    const std::string line = fmt::format("  {:<17}{:>9}", fmt::format("expert {}", e), chosen[e]);
    EXPECT_THAT(outcome.out, HasSubstr(line));
  }
}

TEST_F(MoeProgram, InspectLooksAtGatesAndRoutersOfOneModel) {
  const Outcome outcome = on_ranks(2, "inspect --layers 0-1 --tokens 9 --json " +
                                          path("report.json") + " " + small(kFamilies[1]));
  ASSERT_EQ(outcome.code, 0) << outcome.error;
  const auto rows = report()["rows"];
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_TRUE(rows[0]["gate_open"].is_number());
  EXPECT_EQ(rows[0]["load_max_over_mean"], "-");
  EXPECT_EQ(rows[1]["gate_open"], "-");
  EXPECT_TRUE(rows[1]["load_max_over_mean"].is_number());
}

TEST_F(MoeProgram, ADryRunShowsWhichExpertsEachRankWouldOwn) {
  const Outcome outcome = on_ranks(
      4, "verify --dry-run --layers 0-1 --tokens 7 --tp 2 --ep 2 --expert-blocks 4 --json " +
             path("report.json") + " " + small(kFamilies[1]));
  ASSERT_EQ(outcome.code, 0) << outcome.error;
  const auto rows = report()["rows"];
  ASSERT_EQ(rows.size(), 8U);
  const auto& dense = rows[3];
  EXPECT_EQ(dense["experts"], "-");
  EXPECT_EQ(dense["blocks"], "[4,8)");
  EXPECT_EQ(dense["columns"], "[28,56)");
  const auto& moe = rows[7];
  EXPECT_EQ(moe["rank"], 3);
  EXPECT_EQ(moe["etp"], 1);
  EXPECT_EQ(moe["ep"], 1);
  EXPECT_EQ(moe["experts"], "[4,8)");
  EXPECT_EQ(moe["blocks"], "[2,4)");
  EXPECT_EQ(moe["columns"], "[20,40)");
  EXPECT_EQ(moe["tokens"], "[3,7)");
}

}  // namespace
}  // namespace gatefold
