// `gatefold convert`: what it writes, byte for byte, and what it leaves when it can't.
#include <fmt/format.h>
#include <sys/stat.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "runtime/checkpoint.h"
#include "runtime/dtype.h"
#include "tests/launch/program_testing.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

/// A tensor as files hold it.
struct Stored {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
  friend bool operator==(const Stored&, const Stored&) = default;
};
using Tensors = std::map<std::string, Stored>;

class Convert : public Program {
 protected:
  static std::string small(const std::string& config, const std::string& set) {
    std::string text = "--config " + kSource + "/configs/" + config + ".json";
    std::istringstream words(set);
    for (std::string word; words >> word;) text += " --set " + word;
    return text;
  }
  void make(const std::string& arguments, const std::string& name) const {
    const Outcome made = alone("make-model --quiet " + arguments + " --output " + path(name));
    ASSERT_EQ(made.code, 0) << made.error;
  }
  Outcome convert(int ranks, const std::string& from, const std::string& to,
                  const std::string& more = "") const {
    const std::string arguments =
        "convert --model " + path(from) + " --output " + path(to) + " " + more;
    return ranks == 1 ? alone(arguments) : on_ranks(ranks, arguments);
  }
  void converted(int ranks, const std::string& from, const std::string& to,
                 const std::string& more = "") const {
    const Outcome outcome = convert(ranks, from, to, more);
    ASSERT_EQ(outcome.code, 0) << outcome.error << outcome.out;
  }

  Tensors tensors_of(const std::string& name) const {
    Tensors tensors;
    const Checkpoint model(path(name));
    for (const auto& [tensor, entry] : model.entries()) {
      Stored stored{entry.dtype, entry.shape, std::string(entry.end - entry.begin, '\0')};
      const auto bytes = static_cast<std::int64_t>(stored.bytes.size());
      model.read_bytes(tensor, 1, {0, bytes}, {0, 1},
                       std::as_writable_bytes(std::span(stored.bytes)).data());
      tensors.emplace(tensor, std::move(stored));
    }
    return tensors;
  }
  /// Every file of the folder, and what is in it.
  std::map<std::string, std::string> files_of(const std::string& name) const {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::directory_iterator(path(name))) {
      files[entry.path().filename().string()] =
          entry.is_regular_file() ? content_of(entry.path().string()) : "no file";
    }
    return files;
  }
  void expect_same_files(const std::string& one, const std::string& other) const {
    const auto files = files_of(one), others = files_of(other);
    ASSERT_EQ(files.size(), others.size());
    for (const auto& [name, content] : files) {
      ASSERT_TRUE(others.contains(name)) << name;
      EXPECT_TRUE(content == others.at(name)) << name;
    }
  }
  std::set<std::string> listing() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(path("."))) {
      names.insert(entry.path().filename().string());
    }
    return names;
  }
  /// Nothing came of it, not even under a hidden name.
  void expect_nothing(const std::string& name) const {
    EXPECT_FALSE(fs::exists(path(name)));
    for (const std::string& left : listing()) EXPECT_THAT(left, Not(HasSubstr(".gatefold-")));
  }
  void put(const std::string& name, const std::string& text) const {
    fs::create_directories(fs::path(path(name)).parent_path());
    std::ofstream(path(name), std::ios::binary) << text;
  }
};

std::string floats(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}
std::string halves(const std::vector<std::uint16_t>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * 2};
}

struct Family {
  std::string config;
  std::string set;
  std::string own;     // layout
  std::string layout;  // another, where it has one
  std::string tensor;  // that the other layout has
  std::vector<std::int64_t> shape;
};

/// Matrices of several pieces, which end anywhere within them.
const Family kLarge = {
    "gpt-oss-20b",
    "num_local_experts=3 num_experts_per_tok=2 intermediate_size=612 hidden_size=324 "
    "num_hidden_layers=1",
    "stacked-alternating",
    "per-expert",
    "model.layers.0.mlp.experts.2.up_proj.bias",
    {612}};

const Family kFamilies[] = {
    {"qwen3-30b-a3b",
     "num_experts=5 num_experts_per_tok=2 moe_intermediate_size=24 hidden_size=16 "
     "num_hidden_layers=2",
     "per-expert",
     "stacked",
     "model.layers.1.mlp.experts.gate_up_proj",
     {5, 48, 16}},
    {"deepseek-v3",
     "n_routed_experts=4 n_group=2 topk_group=1 num_experts_per_tok=2 moe_intermediate_size=24 "
     "intermediate_size=40 first_k_dense_replace=1 hidden_size=16 num_hidden_layers=3",
     "per-expert",
     "stacked",
     "model.layers.2.mlp.experts.down_proj",
     {4, 16, 24}},
    {"mixtral-8x7b",
     "num_local_experts=3 intermediate_size=24 hidden_size=16 num_hidden_layers=2",
     "per-expert",
     "stacked",
     "model.layers.1.mlp.experts.gate_up_proj",
     {3, 48, 16}},
    {"qwen3.5-35b-a3b",
     "num_experts=5 num_experts_per_tok=2 moe_intermediate_size=24 "
     "shared_expert_intermediate_size=24 hidden_size=16 num_hidden_layers=2",
     "stacked",
     "per-expert",
     "model.language_model.layers.1.mlp.experts.4.up_proj.weight",
     {24, 16}},
    {"llama-4-scout",
     "num_local_experts=4 intermediate_size=24 hidden_size=16 num_hidden_layers=2",
     "fused",
     "per-expert",
     "language_model.model.layers.1.feed_forward.experts.3.up_proj.weight",
     {24, 16}},
    {"gpt-oss-20b",
     "num_local_experts=6 intermediate_size=24 hidden_size=16 num_hidden_layers=2",
     "fused",
     "per-expert",
     "model.layers.1.mlp.experts.5.down_proj.bias",
     {16}},
    {"qwen3-vl-30b-a3b",
     "num_experts=3 num_experts_per_tok=2 moe_intermediate_size=24 hidden_size=16 "
     "num_hidden_layers=2",
     "stacked-transposed",
     "per-expert",
     "model.language_model.layers.1.mlp.experts.2.down_proj.weight",
     {16, 24}},
    {"granite-3.1-1b-a400m",
     "num_local_experts=3 num_experts_per_tok=2 intermediate_size=24 hidden_size=16 "
     "num_hidden_layers=2",
     "fused",
     "per-expert",
     "model.layers.1.block_sparse_moe.experts.2.gate_proj.weight",
     {24, 16}},
    {"phi-3.5-moe",
     "num_local_experts=3 intermediate_size=24 hidden_size=16 num_hidden_layers=2",
     "per-expert",
     "fused",
     "model.layers.1.mlp.experts.down_proj",
     {3, 16, 24}},
    {"minimind2-moe",
     "n_routed_experts=3 intermediate_size=24 hidden_size=16 num_hidden_layers=2",
     "per-expert",
     "fused",
     "model.layers.1.mlp.experts.gate_up_proj",
     {3, 48, 16}},
    {"switch-base-8",
     "num_experts=3 d_ff=24 d_model=16 num_layers=2 num_decoder_layers=2 "
     "num_sparse_encoder_layers=1 num_sparse_decoder_layers=1",
     "per-expert",
     "per-expert",
     "decoder.block.1.layer.2.mlp.experts.expert_2.wo.weight",
     {16, 24}},
    kLarge,
};

TEST_F(Convert, ThereAndBackGivesTheSameFilesOnAnyNumberOfRanksFromAnyNumberOfShards) {
  int ranks = 0;
  for (const Family& family : kFamilies) {
    SCOPED_TRACE(family.config);
    ranks = ranks % 3 + 1;
    make(small(family.config, family.set) + " --seed 3 --shards 2", "made");
    const Tensors made = tensors_of("made");
    converted(1, "made", "plain");
    EXPECT_TRUE(tensors_of("plain") == made);
    const std::string other = " --shards 3 --layout " + family.layout;
    converted(ranks, "made", "other", other);
    const Tensors found = tensors_of("other");
    ASSERT_TRUE(found.contains(family.tensor));
    EXPECT_EQ(found.at(family.tensor).shape, family.shape);
    converted(1, "made", "again", other);
    expect_same_files("other", "again");
    converted(ranks % 3 + 1, "other", "back", "--layout " + family.own);
    expect_same_files("back", "plain");
    converted(1, "made", "same", "--layout " + family.own);
    expect_same_files("same", "plain");
    for (const char* name : {"made", "plain", "other", "back", "again", "same"}) {
      fs::remove_all(path(name));
    }
  }
}

TEST_F(Convert, TransposedStacksAreTurnedAndTurnedBack) {
  const std::string small_one =
      small("qwen3-30b-a3b",
            "model_type=qwen3_vl_moe num_experts=3 num_experts_per_tok=2 "
            "moe_intermediate_size=24 hidden_size=16 num_hidden_layers=2");
  make(small_one + " --seed 3", "made");
  make(small_one + " --seed 3 --layout stacked", "turned");
  converted(1, "made", "plain");
  converted(1, "turned", "plain_turned");
  converted(3, "made", "other", "--layout stacked");
  expect_same_files("other", "plain_turned");
  EXPECT_FALSE(tensors_of("made") == tensors_of("other"));
  converted(2, "other", "back", "--layout stacked-transposed");
  expect_same_files("back", "plain");
}

TEST_F(Convert, TheOtherLayoutComputesTheSame) {
  for (const auto& [family, layers] :
       {std::pair{&kFamilies[1], 3U}, {&kFamilies[4], 2U}, {&kFamilies[5], 2U}, {&kLarge, 1U}}) {
    SCOPED_TRACE(family->config);
    make(small(family->config, family->set) + " --seed 3", "made");
    converted(2, "made", "other", "--shards 3 --layout " + family->layout);
    std::vector<std::string> fingerprints;
    for (const char* name : {"made", "other"}) {
      const Outcome verified =
          alone("verify --tokens 5 --model " + path(name) + " --json " + path("report.json"));
      ASSERT_EQ(verified.code, 0) << verified.error;
      const Json report = Json::parse(content_of(path("report.json")));
      for (const auto& row : report["rows"]) fingerprints.push_back(row["fingerprint"]);
      fs::remove_all(path(name));
    }
    ASSERT_EQ(fingerprints.size(), 2 * layers);
    for (std::size_t i = 0; i < layers; ++i) EXPECT_EQ(fingerprints[i], fingerprints[i + layers]);
  }
}

// Every expert's gate, then its up, by hand: nothing that reads a model has a say.
TEST_F(Convert, AStackHasEachExpertsGateRowsBeforeItsUpRows) {
  put("a/config.json", R"({"model_type": "qwen3_moe", "hidden_size": 2, "num_experts": 2,
      "moe_intermediate_size": 1, "num_experts_per_tok": 1, "num_hidden_layers": 1})");
  const std::string mlp = "model.layers.0.mlp.";
  std::vector<SafetensorsWriter::Tensor> tensors = {{mlp + "gate.weight", "F32", {2, 2}}};
  std::vector<std::vector<float>> values = {{90, 91, 92, 93}};
  float next = 0;
  for (const char* name : {"experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj",
                           "experts.1.gate_proj", "experts.1.up_proj", "experts.1.down_proj"}) {
    const bool down = std::string_view(name).ends_with("down_proj");
    tensors.push_back({mlp + name + ".weight", "F32",
                       down ? std::vector<std::int64_t>{2, 1} : std::vector<std::int64_t>{1, 2}});
    values.push_back({next, next + 1});
    next += 2;
  }
  write_tensors(path("a/model.safetensors"), tensors, values);
  converted(3, "a", "b", "--layout stacked");
  const Tensors found = tensors_of("b");
  EXPECT_EQ(found.size(), 3U);
  EXPECT_EQ(found.at(mlp + "gate.weight"), (Stored{"F32", {2, 2}, floats(values[0])}));
  EXPECT_EQ(found.at(mlp + "experts.gate_up_proj"),
            (Stored{"F32", {2, 2, 2}, floats({0, 1, 2, 3, 6, 7, 8, 9})}));
  EXPECT_EQ(found.at(mlp + "experts.down_proj"),
            (Stored{"F32", {2, 2, 1}, floats({4, 5, 10, 11})}));
}

// Inputs are rows, and each gate column has its up column behind it, with biases likewise.
TEST_F(Convert, AnAlternatingStackIsTakenApartWithItsBiases) {
  put("a/config.json", R"({"model_type": "gpt_oss", "hidden_size": 2, "num_local_experts": 2,
      "intermediate_size": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1})");
  const std::string mlp = "model.layers.0.mlp.";
  const std::string experts = mlp + "experts.";
  write_tensors(path("a/model.safetensors"),
                {{mlp + "router.weight", "F32", {2, 2}},
                 {mlp + "router.bias", "F32", {2}},
                 {experts + "gate_up_proj", "F32", {2, 2, 4}},
                 {experts + "gate_up_proj_bias", "F32", {2, 4}},
                 {experts + "down_proj", "F32", {2, 2, 2}},
                 {experts + "down_proj_bias", "F32", {2, 2}}},
                {{90, 91, 92, 93},
                 {94, 95},
                 {0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17},
                 {20, 21, 22, 23, 24, 25, 26, 27},
                 {30, 31, 32, 33, 34, 35, 36, 37},
                 {40, 41, 42, 43}});
  converted(3, "a", "b", "--layout per-expert");
  const Tensors found = tensors_of("b");
  EXPECT_EQ(found.size(), 14U);
  EXPECT_EQ(found.at(mlp + "router.weight").bytes, floats({90, 91, 92, 93}));
  EXPECT_EQ(found.at(mlp + "router.bias"), (Stored{"F32", {2}, floats({94, 95})}));
  const std::tuple<const char*, std::vector<std::int64_t>, std::vector<float>> expected[] = {
      {"0.gate_proj.weight", {2, 2}, {0, 4, 2, 6}},
      {"0.up_proj.weight", {2, 2}, {1, 5, 3, 7}},
      {"1.gate_proj.weight", {2, 2}, {10, 14, 12, 16}},
      {"0.gate_proj.bias", {2}, {20, 22}},
      {"1.up_proj.weight", {2, 2}, {11, 15, 13, 17}},
      {"0.up_proj.bias", {2}, {21, 23}},
      {"0.down_proj.weight", {2, 2}, {30, 32, 31, 33}},
      {"1.gate_proj.bias", {2}, {24, 26}},
      {"1.down_proj.weight", {2, 2}, {34, 36, 35, 37}},
      {"1.up_proj.bias", {2}, {25, 27}},
      {"0.down_proj.bias", {2}, {40, 41}},
      {"1.down_proj.bias", {2}, {42, 43}},
  };
  for (const auto& [name, shape, values] : expected) {
    EXPECT_EQ(found.at(experts + name), (Stored{"F32", shape, floats(values)})) << name;
  }
}

/// A model of which only the names matter: nothing is relaid.
const char* const kLlama = R"({
  "torch_dtype": "float32",
  "model_type": "llama", "hidden_size": 2, "intermediate_size": 2, "num_hidden_layers": 1,
  "vision_config": {"dtype": "float32", "rope_theta": 1e-05}
})";

TEST_F(Convert, OfEveryTypeNoBitChangesUnlessTypesAreAskedFor) {
  put("a/config.json", kLlama);
  const std::vector<SafetensorsWriter::Tensor> tensors = {
      {"bytes", "F8_E4M3", {3}}, {"half", "F16", {2}}, {"ids", "I64", {1}},
      {"scalar", "F32", {}},     {"none", "F32", {0}}, {"bf", "BF16", {2, 2}}};
  const std::vector<std::string> values = {"\x7f\x80\xff",
                                           halves({0x7d01, 0x8000}),
                                           "\1\2\3\4\5\6\7\x80",
                                           floats({std::bit_cast<float>(0x7f812345U)}),
                                           "",
                                           halves({0x7f81, 0x8000, 0xff80, 1})};
  {
    SafetensorsWriter writer(path("a/model.safetensors"), tensors, {{"format", "pt"}, {"by", "x"}});
    for (const std::string& one : values) writer.append(std::as_bytes(std::span(one)));
    writer.finish();
  }
  converted(2, "a", "c");  // 27 bytes, one of which is over
  EXPECT_TRUE(tensors_of("c") == tensors_of("a"));
  converted(3, "a", "b");
  EXPECT_TRUE(tensors_of("b") == tensors_of("a"));
  EXPECT_EQ(content_of(path("b/config.json")), kLlama);
  const SafetensorsFile file(path("b/model.safetensors"));
  EXPECT_EQ(file.header().metadata,
            (std::map<std::string, std::string>{{"by", "x"}, {"format", "pt"}}));
  // The widest first, so that each is aligned.
  EXPECT_EQ(file.header().tensors.at("ids").begin, 0U);
  EXPECT_EQ(file.header().tensors.at("bytes").end, 8U + 4 + 4 + 8 + 3);
}

TEST_F(Convert, TypesAreRoundedOnceToNearestEvenWithOneNanAndBiasesKeepTheirs) {
  put("a/config.json", kLlama);
  const float nan = std::bit_cast<float>(0x7f812345U);
  const float tie = std::bit_cast<float>(0x3f808000U);       // between 0x3f80 and 0x3f81: even
  const float over_tie = std::bit_cast<float>(0x3f818000U);  // between 0x3f81 and 0x3f82: even
  const std::vector<float> values = {nan, -0.0F, tie, over_tie, 70000.0F, -INFINITY};
  write_tensors(path("a/model.safetensors"),
                {{"x", "F32", {3, 2}}, {"layer.mlp.gate.e_score_correction_bias", "F32", {1}}},
                {values, {0.1F}});
  for (const int ranks : {1, 3}) {
    converted(ranks, "a", "bf16", "--dtype bf16");
    Tensors found = tensors_of("bf16");
    EXPECT_EQ(found.at("x"),
              (Stored{"BF16", {3, 2}, halves({0x7fc0, 0x8000, 0x3f80, 0x3f82, 0x4789, 0xff80})}));
    EXPECT_EQ(found.at("layer.mlp.gate.e_score_correction_bias").dtype, "F32");
    converted(ranks, "bf16", "wide", "--dtype f32");
    EXPECT_EQ(tensors_of("wide").at("x").bytes,
              floats({std::bit_cast<float>(0x7fc00000U), -0.0F, 1.0F,
                      std::bit_cast<float>(0x3f820000U), 70144.0F, -INFINITY}));
    const Outcome half = convert(ranks, "a", "f16", "--dtype f16 --quiet");
    EXPECT_EQ(half.code, 0) << half.error;
    EXPECT_THAT(half.out, HasSubstr("1 value beyond f16 became infinite"));
    EXPECT_THAT(half.out, HasSubstr("1 tensor kept as stored"));
    EXPECT_EQ(tensors_of("f16").at("x").bytes,
              halves({0x7e00, 0x8000, 0x3c04, 0x3c0c, 0x7c00, 0xfc00}));
    const std::string config = content_of(path("bf16/config.json"));
    const Json read = Json::parse(config);
    EXPECT_EQ(read["torch_dtype"], "bfloat16");
    EXPECT_FALSE(read.contains("dtype"));
    EXPECT_EQ(read["vision_config"]["dtype"], "bfloat16");
    EXPECT_LT(config.find("torch_dtype"), config.find("model_type")) << "its order is its own";
    EXPECT_THAT(config, HasSubstr("1e-05"));
    for (const char* name : {"bf16", "wide", "f16"}) fs::remove_all(path(name));
  }
}

TEST_F(Convert, OnlyARoutersBiasKeepsItsTypeInALayerThatIsLaidOutAnew) {
  make(small(kFamilies[1].config, kFamilies[1].set) + " --seed 3 --dtype f32", "a");
  converted(2, "a", "b", "--layout stacked --dtype f16");
  int biases = 0;
  for (const auto& [name, tensor] : tensors_of("b")) {
    const bool bias = name.ends_with("e_score_correction_bias");
    EXPECT_EQ(tensor.dtype, bias ? "F32" : "F16") << name;
    if (bias) ++biases;
  }
  EXPECT_EQ(biases, 2);
}

// Ranks agree every 64 MiB.
TEST_F(Convert, AModelOfSeveralRoundsIsWhole) {
  make("--config " + kSource + "/configs/smollm2-135m.json --layers 0-6 --dtype f32", "a");
  converted(1, "a", "b");
  EXPECT_TRUE(tensors_of("b") == tensors_of("a"));
}

TEST_F(Convert, ShardsAreIndexedAndWhatBelongsToTheModelComesAlong) {
  put("a/config.json", kLlama);
  write_tensors(path("a/model.safetensors"),
                {{"c", "F32", {4}}, {"a", "F32", {4}}, {"b", "F32", {4}}},
                {{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 10, 11, 12}});
  const std::string tokenizer(3 << 20, 't');
  put("a/tokenizer.json", tokenizer);
  put("store/blob", "linked");
  fs::create_symlink(path("store/blob"), path("a/merges.txt"));
  for (const char* left : {".gitattributes", "pytorch_model.bin", "pytorch_model.bin.index.json",
                           "folder/x", "extra.safetensors"}) {
    put(std::string("a/") + left, "?");
  }
  converted(2, "a", "b", "--shards 3");
  std::map<std::string, std::string> found = files_of("b");
  const Json index = Json::parse(found["model.safetensors.index.json"]);
  EXPECT_EQ(index["metadata"]["total_size"], 48);
  EXPECT_EQ(index["weight_map"], (Json{{"a", "model-00001-of-00003.safetensors"},
                                       {"b", "model-00002-of-00003.safetensors"},
                                       {"c", "model-00003-of-00003.safetensors"}}));
  EXPECT_EQ(found["tokenizer.json"], tokenizer);
  EXPECT_EQ(found["merges.txt"], "linked");
  EXPECT_EQ(found.size(), 7U);
  EXPECT_TRUE(tensors_of("b") == tensors_of("a"));
  expect_one_complaint(convert(2, "a", "c", "--shards 4"), 64, "more than 3 tensors");
  expect_nothing("c");
}

TEST_F(Convert, WhatCantBeConvertedLeavesNothing) {
  make(small(kFamilies[0].config, kFamilies[0].set) + " --shards 2", "a");
  const std::string shard = path("a/model-00002-of-00002.safetensors");
  int ranks = 1;
  const auto refused = [&](int code, const std::string& says, const std::string& more = "",
                           const std::string& to = "b") {
    SCOPED_TRACE(says);
    ranks = 4 - ranks;
    expect_one_complaint(convert(ranks, "a", to, more), code, says);
    expect_nothing("b");
  };
  refused(64, "stored stacked-alternating", "--layout stacked-alternating");
  refused(64, "is within the --model directory", "", "a/b");
  refused(64, "is the --model directory", "", "a/../a");
  refused(74, "cannot write", "", "missing/b");
  fs::create_directories(path("full"));
  put("full/precious", "x");
  refused(74, "isn't empty", "", "full");
  EXPECT_EQ(content_of(path("full/precious")), "x");

  const std::string whole = content_of(shard);
  put("a/model-00002-of-00002.safetensors", whole.substr(0, whole.size() - 1));
  refused(65, "expected " + std::to_string(whole.size()) + " bytes, file has");
  fs::remove(shard);
  refused(66, "names files that are missing: model-00002-of-00002.safetensors");
  put("a/model-00002-of-00002.safetensors", whole);
  // Two types in what would be one tensor.
  converted(1, "a", "one");
  std::string text = content_of(path("one/model.safetensors"));
  const std::string name = R"("model.layers.0.mlp.experts.1.down_proj.weight":{"dtype":)";
  text.replace(text.find(name) + name.size(), 6, "\"F16\" ");
  put("two/model.safetensors", text);
  fs::copy(path("a/config.json"), path("two/config.json"));
  expect_one_complaint(convert(2, "two", "b", "--layout stacked"), 65, "which has one type");
  expect_nothing("b");
}

TEST_F(Convert, AnEmptyDirectoryIsTakenAndADryRunWritesNothing) {
  make(small(kFamilies[0].config, kFamilies[0].set), "a");
  const Outcome dry = convert(2, "a", "b", "--dry-run --layout stacked");
  EXPECT_EQ(dry.code, 0) << dry.error;
  EXPECT_THAT(dry.out, HasSubstr("nothing is written to"));
  expect_nothing("b");
  fs::create_directories(path("b"));
  converted(2, "a", "b", "--measure");
  EXPECT_TRUE(tensors_of("b") == tensors_of("a"));
  EXPECT_EQ(files_of("b").size(), 2U);
  for (const std::string& left : listing()) EXPECT_THAT(left, Not(HasSubstr(".gatefold-")));
}

// A limit on a file's size ends a write as a full disk does: of rank 0, which makes the files, and
// of the others.
TEST_F(Convert, ADiskThatIsFullForOneRankEndsAllAndLeavesNothing) {
  make("--config " + kSource + "/configs/smollm2-135m.json --layers 0-1", "a");
  const std::string limited = "bash -c 'ulimit -f 8000; exec " + kProgram + R"( "$@"' bash )";
  const std::string mpirun = std::string(kMpirun) + " -n 1 ";
  const std::string arguments = " convert --model " + path("a") + " --output " + path("b");
  expect_one_complaint(shell(limited + arguments), 74, "File too large");
  expect_nothing("b");
  expect_one_complaint(shell(mpirun + limited + arguments + " : -n 1 " + kProgram + arguments), 74,
                       "rank 0: cannot write " + path("b") + "/model.safetensors (File too large");
  expect_nothing("b");
  expect_one_complaint(shell(mpirun + kProgram + arguments + " : -n 1 " + limited + arguments), 74,
                       "rank 1: cannot write " + path("b") + "/model.safetensors (File too large");
  expect_nothing("b");
}

// A file system of 3 MiB: of its weights, or of what lies beside them.
TEST_F(Convert, AFullDiskLeavesNothingBehind) {
  if (shell("unshare --mount true").code != 0) GTEST_SKIP() << "no file system may be mounted";
  fs::create_directories(path("disk"));
  const auto full = [&](const std::string& says) {
    const std::string inside = fmt::format(
        "mount -t tmpfs -o size=3m none {0} || exit 9; {1} -n 2 {2} convert --model {3} "
        "--output {0}/b; code=$?; ls -A {0} >{4}; exit $code",
        path("disk"), kMpirun, kProgram, path("a"), path("left"));
    expect_one_complaint(shell("unshare --mount bash -c '" + inside + "'"), 74, says);
    EXPECT_EQ(content_of(path("left")), "");
  };
  make("--config " + kSource + "/configs/smollm2-135m.json --layers 0", "a");
  full("/b/model.safetensors (No space left on device");
  fs::remove_all(path("a"));
  make(small(kFamilies[0].config, kFamilies[0].set), "a");
  put("a/tokenizer.json", std::string(4 << 20, 't'));
  full("/b/tokenizer.json (No space left on device");
}

}  // namespace
}  // namespace gatefold
