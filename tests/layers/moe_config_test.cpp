// What config.json files say about mixtures of experts: sizes, rules, and which layers are some.
#include "layers/moe_config.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "config_testing.h"
#include "layers/model_families.h"
#include "tests/build_paths.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;
using testing::Overrides;

ModelConfig published(const std::string& name, const Overrides& overrides = {}) {
  const fs::path path = fs::path(kSourceFolder) / "configs" / fmt::format("{}.json", name);
  return read_model_config(path.string(), overrides);
}

class MoeConfigTest : public testing::ConfigTest {
 protected:
  void expect_error(ExitCode code, const std::string& word, const Json& json,
                    const Overrides& overrides = {}) const {
    testing::expect_error(code, word, [&] { read(json, overrides); });
  }
};

std::vector<std::int64_t> mixtures(const ModelConfig& config) {
  std::vector<std::int64_t> layers;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    if (config.is_moe(layer)) layers.push_back(layer);
  }
  return layers;
}

Json qwen3_moe() {
  return {{"model_type", "qwen3_moe"},  {"hidden_size", 16}, {"intermediate_size", 24},
          {"moe_intermediate_size", 8}, {"num_experts", 6},  {"num_experts_per_tok", 2},
          {"num_hidden_layers", 4}};
}

Json deepseek_v3() {
  return {{"model_type", "deepseek_v3"}, {"hidden_size", 16},      {"intermediate_size", 24},
          {"moe_intermediate_size", 8},  {"n_routed_experts", 16}, {"num_experts_per_tok", 4},
          {"num_hidden_layers", 5},      {"n_group", 4},           {"topk_group", 2}};
}

TEST_F(MoeConfigTest, WhatTrainingAddsForARouterIsWhatTheConfigSays) {
  const BalanceTerms none = read(qwen3_moe()).moe->balance;
  EXPECT_EQ(none.loss, BalanceLoss::kTransformers);
  EXPECT_EQ(none.coefficient, 0);
  EXPECT_EQ(none.z_coefficient, 0);
  EXPECT_FALSE(none.per_sequence);
  EXPECT_EQ(published("mixtral-8x7b").moe_spec(0).balance.coefficient, 0.02);
  const ModelConfig deepseek = read(deepseek_v3(), {{"aux_loss_alpha", "0.001"}});
  EXPECT_EQ(deepseek.moe->balance.loss, BalanceLoss::kMegatron);
  EXPECT_EQ(deepseek.moe->balance.coefficient, 0.001);
  EXPECT_TRUE(deepseek.moe->balance.per_sequence);
  EXPECT_FALSE(read(deepseek_v3(), {{"seq_aux", "false"}}).moe->balance.per_sequence);
  const BalanceTerms minimind = published("minimind2-moe").moe->balance;
  EXPECT_EQ(minimind.loss, BalanceLoss::kMegatron);
  EXPECT_EQ(minimind.coefficient, 0.1);
  EXPECT_TRUE(minimind.per_sequence);
  EXPECT_EQ(published("minimind-3-moe").moe->balance.coefficient, 0.0005);
  const Overrides z = {{"router_z_loss_coef", "0.25"}};
  EXPECT_EQ(published("switch-base-8", z).moe->balance.z_coefficient, 0.25);
  EXPECT_EQ(published("switch-base-8").moe->balance.loss, BalanceLoss::kSwitch);
  for (const char* bad : {"-0.1", "1.5", "many"}) {
    expect_error(ExitCode::kUsage, "not a number from 0 to 1", qwen3_moe(),
                 {{"router_aux_loss_coef", bad}});
  }
}

TEST_F(MoeConfigTest, EveryPublishedConfigHasItsPublishedNumbers) {
  struct Published {
    const char* name;
    std::int64_t hidden, experts, top_k, inner, shared, layers, mixtures;
    std::int64_t parameters;  // of a layer, summed by hand from its tensors' shapes
    std::int64_t tensors;     // of the whole model's feed-forward layers
  };
  const std::vector<Published> table = {
      {"mixtral-8x7b", 4096, 8, 2, 14336, 0, 32, 32, 1409318912, 32 * (8 * 3 + 1)},
      {"mixtral-8x22b", 6144, 8, 2, 16384, 0, 56, 56, 2415968256, 56 * (8 * 3 + 1)},
      {"phi-3.5-moe", 4096, 16, 2, 6400, 0, 32, 32, 1258356736, 32 * (16 * 3 + 1)},
      {"qwen1.5-moe-a2.7b", 2048, 60, 4, 1408, 5632, 24, 24, 553773056, 24 * (60 * 3 + 5)},
      {"qwen2-57b-a14b", 3584, 64, 8, 2560, 20480, 28, 28, 1982041600, 28 * (64 * 3 + 5)},
      {"qwen3-30b-a3b", 2048, 128, 8, 768, 0, 48, 48, 604241920, 18480},
      {"qwen3-235b-a22b", 4096, 128, 8, 1536, 0, 94, 94, 2416443392, 94 * (128 * 3 + 1)},
      {"qwen3-coder-480b-a35b", 6144, 160, 8, 2560, 0, 62, 62, 7550730240, 62 * (160 * 3 + 1)},
      {"qwen3-next-80b-a3b", 2048, 512, 10, 512, 512, 48, 48, 1614809088, 48 * (512 * 3 + 5)},
      {"qwen3.5-35b-a3b", 2048, 256, 8, 512, 512, 40, 40, 808978432, 280},
      {"qwen3.5-122b-a10b", 3072, 256, 8, 1024, 1024, 48, 48, 2426145792, 48 * 7},
      {"qwen3.5-397b-a17b", 4096, 512, 10, 1024, 1024, 60, 60, 6457135104, 60 * 7},
      {"olmoe-1b-7b", 2048, 64, 8, 1024, 0, 16, 16, 402784256, 16 * (64 * 3 + 1)},
      {"deepseek-moe-16b", 2048, 64, 6, 1408, 2816, 28, 27, 571080704, 27 * (64 * 3 + 4) + 3},
      {"deepseek-v2-lite", 2048, 64, 6, 1408, 2816, 27, 26, 571080704, 26 * (64 * 3 + 4) + 3},
      {"deepseek-v2", 5120, 160, 6, 1536, 3072, 60, 59, 3822878720, 59 * (160 * 3 + 4) + 3},
      {"deepseek-v3", 7168, 256, 8, 2048, 2048, 61, 58, 11320164608, 44843},
      {"kimi-k2", 7168, 384, 8, 2048, 2048, 61, 60, 16958226816, 60 * (384 * 3 + 5) + 3},
      {"glm-4.5", 5120, 160, 8, 1536, 1536, 92, 89, 3799285920, 89 * (160 * 3 + 5) + 9},
      {"glm-4.5-air", 4096, 128, 8, 1408, 1408, 46, 45, 2232418432, 45 * (128 * 3 + 5) + 3},
      {"gpt-oss-20b", 2880, 32, 4, 2880, 0, 24, 24, 796631072, 24 * 6},
      {"gpt-oss-120b", 2880, 128, 4, 2880, 0, 36, 36, 3186524288, 36 * 6},
      {"llama-4-scout", 5120, 16, 1, 8192, 8192, 48, 48, 2139176960, 48 * 6},
      {"llama-4-maverick", 5120, 128, 1, 8192, 8192, 48, 24, 16232611840, 24 * 6 + 24 * 3},
      {"qwen3-vl-30b-a3b", 2048, 128, 8, 768, 0, 48, 48, 604241920, 48 * 3},
      {"qwen3-vl-235b-a22b", 4096, 128, 8, 1536, 0, 94, 94, 2416443392, 94 * 3},
      {"granite-3.1-1b-a400m", 1024, 32, 8, 512, 0, 24, 24, 50364416, 24 * 3},
      {"granite-3.1-3b-a800m", 1536, 40, 8, 512, 0, 32, 32, 94433280, 32 * 3},
      {"minimind-3-moe", 768, 4, 1, 2432, 0, 8, 8, 22416384, 8 * (4 * 3 + 1)},
      {"minimind2-moe", 640, 4, 2, 1728, 1728, 8, 8, 16591360, 8 * (4 * 3 + 4)},
      {"switch-base-8", 768, 8, 1, 3072, 0, 24, 12, 37754880, 12 * 17 + 12 * 2},
      {"switch-base-16", 768, 16, 1, 3072, 0, 24, 12, 75509760, 12 * 33 + 12 * 2},
      {"switch-base-32", 768, 32, 1, 3072, 0, 24, 12, 151019520, 12 * 65 + 12 * 2},
      {"switch-base-64", 768, 64, 1, 3072, 0, 24, 12, 302039040, 12 * 129 + 12 * 2},
      {"switch-base-128", 768, 128, 1, 3072, 0, 24, 12, 604078080, 12 * 257 + 12 * 2},
      {"switch-base-256", 768, 256, 1, 3072, 0, 24, 12, 1208156160, 12 * 513 + 12 * 2},
      {"switch-c-2048", 2080, 2048, 1, 6144, 0, 30, 30, 52349173760, 30 * 4097},
  };
  std::size_t files = 0;
  for (const auto& file : fs::directory_iterator(fs::path(kSourceFolder) / "configs")) {
    if (file.path().extension() != ".json") continue;
    if (read_model_config(file.path().string()).moe) ++files;
  }
  EXPECT_EQ(files, table.size()) << "every mixture's config belongs in this table";
  for (const Published& row : table) {
    SCOPED_TRACE(row.name);
    const ModelConfig config = published(row.name);
    ASSERT_TRUE(config.moe);
    EXPECT_EQ(config.hidden_size, row.hidden);
    EXPECT_EQ(config.num_layers, row.layers);
    EXPECT_EQ(config.moe->route.experts, row.experts);
    EXPECT_EQ(config.moe->route.top_k, row.top_k);
    EXPECT_EQ(config.moe->intermediate_size, row.inner);
    EXPECT_EQ(config.moe->shared_intermediate_size, row.shared);
    EXPECT_EQ(std::ssize(mixtures(config)), row.mixtures);
    EXPECT_EQ(config.moe_spec(row.layers - 1).parameters(row.experts), row.parameters);
    std::int64_t tensors = 0;
    std::int64_t elements = 0;
    for (std::int64_t layer = 0; layer < row.layers; ++layer) {
      const bool moe = config.is_moe(layer);
      for (const StoredTensor& tensor : moe ? stored_tensors(config.moe_spec(layer))
                                            : stored_tensors(config.layer_spec(layer))) {
        ++tensors;
        std::int64_t size = 1;
        for (const std::int64_t n : tensor.shape) size *= n;
        if (layer == row.layers - 1) elements += size;
      }
    }
    EXPECT_EQ(tensors, row.tensors);
    EXPECT_EQ(elements, row.parameters) << "as the files hold them";
  }
}

// Where feed-forward layers dominate a model, they are nearly all of what it is said to have. Not
// here: Kimi-K2, whose trillion is a rounded number, and small Switches, which publish none.
TEST_F(MoeConfigTest, FeedForwardLayersMakeUpMostOfThePublishedTotal) {
  const std::vector<std::pair<const char*, double>> published_billions = {
      {"mixtral-8x7b", 46.7},         {"mixtral-8x22b", 140.6},   {"qwen1.5-moe-a2.7b", 14.3},
      {"qwen2-57b-a14b", 57.4},       {"qwen3-30b-a3b", 30.5},    {"qwen3-235b-a22b", 235},
      {"qwen3-coder-480b-a35b", 480}, {"qwen3-next-80b-a3b", 80}, {"qwen3.5-35b-a3b", 35},
      {"qwen3.5-122b-a10b", 122},     {"qwen3.5-397b-a17b", 397}, {"olmoe-1b-7b", 6.9},
      {"deepseek-moe-16b", 16.4},     {"deepseek-v2-lite", 15.7}, {"deepseek-v2", 236},
      {"deepseek-v3", 671},           {"glm-4.5", 355},           {"glm-4.5-air", 106},
      {"gpt-oss-20b", 20.9},          {"gpt-oss-120b", 116.8},    {"llama-4-scout", 109},
      {"switch-c-2048", 1571},        {"llama-4-maverick", 400},  {"phi-3.5-moe", 41.9}};
  for (const auto& [name, billions] : published_billions) {
    const ModelConfig config = published(name);
    double parameters = 0;
    for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
      parameters += static_cast<double>(
          config.is_moe(layer) ? config.moe_spec(layer).parameters(config.moe->route.experts)
                               : config.layer_spec(layer).parameters());
    }
    const double share = parameters / (billions * 1e9);
    EXPECT_GT(share, 0.91) << name;  // embeddings and attention are the rest
    EXPECT_LT(share, 1.0) << name;
  }
}

TEST_F(MoeConfigTest, EveryFamilyHasItsRule) {
  struct Rule {
    const char* name;
    Score score;
    std::int64_t groups, kept_groups;
    GroupScore group_score;
    bool normalize;
    float scaling;
    WeightOn weight_on;
    bool correction_bias, router_bias, shared_gate;
  };
  constexpr auto kBest = GroupScore::kBest;
  constexpr auto kOut = WeightOn::kOutput;
  const std::vector<Rule> table = {
      {"mixtral-8x7b", Score::kSoftmax, 1, 1, kBest, true, 1, kOut, false, false, false},
      {"phi-3.5-moe", Score::kSparseMixer, 1, 1, kBest, false, 1, kOut, false, false, false},
      {"qwen1.5-moe-a2.7b", Score::kSoftmax, 1, 1, kBest, false, 1, kOut, false, false, true},
      {"qwen3-30b-a3b", Score::kSoftmax, 1, 1, kBest, true, 1, kOut, false, false, false},
      {"qwen3.5-35b-a3b", Score::kSoftmax, 1, 1, kBest, true, 1, kOut, false, false, true},
      {"qwen3-vl-30b-a3b", Score::kSoftmax, 1, 1, kBest, true, 1, kOut, false, false, false},
      {"deepseek-moe-16b", Score::kSoftmax, 1, 1, kBest, false, 1, kOut, false, false, false},
      {"granite-3.1-1b-a400m", Score::kSoftmaxOfChosen, 1, 1, kBest, false, 1, kOut, false, false,
       false},
      {"minimind-3-moe", Score::kSoftmax, 1, 1, kBest, true, 1, kOut, false, false, false},
      {"minimind2-moe", Score::kSoftmax, 1, 1, kBest, true, 1, kOut, false, false, false},
      {"deepseek-v2-lite", Score::kSoftmax, 1, 1, kBest, false, 1, kOut, false, false, false},
      {"deepseek-v3", Score::kSigmoid, 8, 4, GroupScore::kTwoBest, true, 2.5F, kOut, true, false,
       false},
      {"gpt-oss-20b", Score::kSoftmaxOfChosen, 1, 1, kBest, false, 1, kOut, false, true, false},
      {"llama-4-scout", Score::kSigmoidOfChosen, 1, 1, kBest, false, 1, WeightOn::kInput, false,
       false, false},
      {"switch-base-8", Score::kSoftmax, 1, 1, kBest, false, 1, kOut, false, false, false},
  };
  for (const Rule& row : table) {
    SCOPED_TRACE(row.name);
    const ModelConfig config = published(row.name);
    const MoeSpec spec = config.moe_spec(config.num_layers - 1);
    EXPECT_EQ(spec.route.score, row.score);
    EXPECT_EQ(spec.route.groups, row.groups);
    EXPECT_EQ(spec.route.kept_groups, row.kept_groups);
    EXPECT_EQ(spec.route.group_score, row.group_score);
    EXPECT_EQ(spec.route.normalize, row.normalize);
    EXPECT_EQ(spec.route.scaling, row.scaling);
    EXPECT_EQ(spec.weight_on, row.weight_on);
    EXPECT_EQ(spec.correction_bias.has_value(), row.correction_bias);
    EXPECT_EQ(spec.router_bias.has_value(), row.router_bias);
    EXPECT_EQ(spec.shared_gate.has_value(), row.shared_gate);
  }
  for (const char* name : {"deepseek-v3", "deepseek-moe-16b", "minimind-3-moe", "minimind2-moe"}) {
    EXPECT_EQ(published(name).moe->route.epsilon, 1e-20F) << name;
  }
  EXPECT_EQ(published("qwen3-30b-a3b").moe->route.epsilon, 0.0F);
}

TEST_F(MoeConfigTest, ASparseMixerHasAMarginOfTwiceItsJitterAndTwoExperts) {
  const auto route = [&](const Overrides& more) {
    return published("phi-3.5-moe", more).moe->route;
  };
  EXPECT_EQ(route({}).margin, 0.02F);
  EXPECT_EQ(route({{"router_jitter_noise", "0.25"}}).margin, 0.5F);
  EXPECT_EQ(route({{"router_jitter_noise", "0"}}).margin, 0.0F);
  Json absent = Json::parse(published("phi-3.5-moe").canonical_text);
  absent.erase("router_jitter_noise");
  absent.erase("num_experts_per_tok");
  EXPECT_EQ(read(absent).moe->route.margin, 0.02F);
  EXPECT_EQ(read(absent).moe->route.top_k, 2);
  expect_error(ExitCode::kUsage,
               "num_experts_per_tok is 3 (a sparse mixer, as of phimoe, chooses 2)", absent,
               {{"num_experts_per_tok", "3"}});
  expect_error(ExitCode::kUsage, "router_jitter_noise is 1.5 (not a number from 0 to 1)", absent,
               {{"router_jitter_noise", "1.5"}});
  EXPECT_EQ(published("mixtral-8x7b").moe->route.margin, 0.0F);
}

TEST_F(MoeConfigTest, GptOssClampsWhateverItsHiddenActSays) {
  const ModelConfig config = published("gpt-oss-20b");
  EXPECT_EQ(config.activation.kind, ActivationKind::kClampedSwiglu);
  EXPECT_EQ(config.activation.limit, 7.0F);
  EXPECT_EQ(config.activation.alpha, 1.702F);
  EXPECT_TRUE(config.bias);
  EXPECT_EQ(published("gpt-oss-20b", {{"swiglu_limit", "5"}}).activation.limit, 5.0F);
}

TEST_F(MoeConfigTest, AbsentFieldsMeanWhatTheFamilysClassMeans) {
  EXPECT_FALSE(read(qwen3_moe()).moe->route.normalize);
  Json next = qwen3_moe();
  next["model_type"] = "qwen3_next";
  next["shared_expert_intermediate_size"] = 12;
  EXPECT_TRUE(read(next).moe->route.normalize);
  EXPECT_EQ(read(next).moe->shared_intermediate_size, 12);

  Json v3 = {{"model_type", "deepseek_v3"}, {"hidden_size", 16},      {"intermediate_size", 24},
             {"moe_intermediate_size", 8},  {"n_routed_experts", 16}, {"num_experts_per_tok", 4},
             {"num_hidden_layers", 5}};
  const ModelConfig config = read(v3);
  EXPECT_THAT(mixtures(config), ElementsAre(3, 4));
  EXPECT_EQ(config.moe->route.groups, 8);
  EXPECT_EQ(config.moe->route.kept_groups, 4);
  EXPECT_EQ(config.moe->route.scaling, 2.5F);
  EXPECT_TRUE(config.moe->route.normalize);
  EXPECT_EQ(config.moe->shared_intermediate_size, 8);
  v3["model_type"] = "kimi_k2";
  EXPECT_EQ(read(v3).moe->route.score, Score::kSigmoid);
  v3["scoring_func"] = "sqrtsoftplus";
  EXPECT_EQ(read(v3).moe->route.score, Score::kSqrtSoftplus);
  v3["model_type"] = "glm4_moe";
  EXPECT_THAT(mixtures(read(v3)), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(read(v3).moe->route.groups, 1);
  EXPECT_EQ(read(v3).moe->route.scaling, 1.0F);
  EXPECT_TRUE(read(v3).moe_spec(4).correction_bias);
  v3["model_type"] = "deepseek_v2";
  EXPECT_THAT(mixtures(read(v3)), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_EQ(read(v3).moe->shared_intermediate_size, 0);
  EXPECT_FALSE(read(v3).moe->correction_bias);
}

TEST_F(MoeConfigTest, ASharedExpertOfNoWidthIsNone) {
  Json json = {{"model_type", "granitemoeshared"}, {"hidden_size", 16},
               {"intermediate_size", 8},           {"num_local_experts", 4},
               {"num_experts_per_tok", 2},         {"num_hidden_layers", 1}};
  EXPECT_TRUE(read(json).moe_spec(0).shared.empty());
  json["shared_intermediate_size"] = 0;
  EXPECT_TRUE(read(json).moe_spec(0).shared.empty());
  json["shared_intermediate_size"] = 12;
  EXPECT_EQ(read(json).moe_spec(0).shared.at(0).intermediate_size, 12);
  json["shared_intermediate_size"] = -1;
  expect_error(ExitCode::kData, "shared_intermediate_size is -1 (must not be negative)", json);
}

TEST_F(MoeConfigTest, AFieldThatOnlyOlderFilesHaveTellsThemApart) {
  const Json common = {{"model_type", "minimind"},
                       {"hidden_size", 16},
                       {"intermediate_size", 24},
                       {"num_hidden_layers", 2},
                       {"use_moe", true}};
  Json newer = common;
  newer["num_experts"] = 4;
  EXPECT_EQ(read(newer).model_type, "minimind");
  EXPECT_EQ(read(newer).moe->route.top_k, 1);
  EXPECT_TRUE(read(newer).moe->route.normalize) << "one of one weighs 1";
  EXPECT_EQ(read(newer).moe->intermediate_size, 24);
  EXPECT_EQ(read(newer).moe->shared_intermediate_size, 0);
  newer["moe_intermediate_size"] = 8;
  EXPECT_EQ(read(newer).moe->intermediate_size, 8);
  newer.erase("moe_intermediate_size");
  newer.erase("intermediate_size");
  expect_error(ExitCode::kData, "no moe_intermediate_size", newer);

  Json older = common;
  older["n_routed_experts"] = 6;
  const ModelConfig config = read(older);
  EXPECT_EQ(config.model_type, "minimind2");
  EXPECT_EQ(config.moe->route.experts, 6);
  EXPECT_EQ(config.moe->route.top_k, 2);
  EXPECT_EQ(config.moe->shared_experts, 1);
  EXPECT_EQ(config.moe->shared_intermediate_size, 24);
  EXPECT_EQ(parse_model_config(config.canonical_text, "again").model_type, "minimind2");
  EXPECT_EQ(read(older, {{"n_shared_experts", "3"}}).moe_spec(1).shared.size(), 3U);
  EXPECT_TRUE(read(older, {{"n_shared_experts", "0"}}).moe_spec(1).shared.empty());
  expect_error(ExitCode::kUsage, "n_shared_experts is 17 (absurd: more than 16)", older,
               {{"n_shared_experts", "17"}});
  expect_error(ExitCode::kUsage, "no such field of minimind2 models", older,
               {{"num_experts", "2"}});
  older["model_type"] = "minimind2";
  EXPECT_EQ(read(older).moe->route.experts, 6);

  older["model_type"] = "minimind";
  older["num_experts"] = 4;
  expect_error(ExitCode::kData, "both num_experts and n_routed_experts are there", older);
}

TEST_F(MoeConfigTest, ASwitchMakesAllLayersDense) {
  for (const char* experts : {"num_experts", "n_routed_experts"}) {
    Json json = {{"model_type", "minimind"}, {"hidden_size", 16},        {"intermediate_size", 24},
                 {"num_hidden_layers", 2},   {"num_experts_per_tok", 9}, {experts, 4}};
    const ModelConfig config = read(json);
    EXPECT_FALSE(config.moe) << "and nobody asks whether nine of four can be";
    EXPECT_EQ(config.layer_spec(1).parameters(), 3 * 16 * 24);
    EXPECT_THROW((void)config.moe_spec(1), Error);
    expect_error(ExitCode::kData, "num_experts_per_tok 9 is more than", json,
                 {{"use_moe", "true"}});
    json["use_moe"] = "yes";
    expect_error(ExitCode::kData, "use_moe is \"yes\" (not true or false)", json);
  }
}

TEST_F(MoeConfigTest, ATokensOnlyExpertKeepsItsScoreWhereTheFamilyNormalisesSeveral) {
  for (const auto& [type, alone] : std::vector<std::pair<const char*, bool>>{
           {"deepseek", false}, {"minimind2", false}, {"minimind", true}, {"qwen3_moe", true}}) {
    Json json = qwen3_moe();
    json["model_type"] = type;
    json["use_moe"] = true;
    json["norm_topk_prob"] = true;
    if (find_family(type)->moe->experts_keys.front() == "n_routed_experts") {
      json.erase("num_experts");
      json["n_routed_experts"] = 6;
    }
    EXPECT_TRUE(read(json).moe->route.normalize) << type;
    json["num_experts_per_tok"] = 1;
    EXPECT_EQ(read(json).moe->route.normalize, alone) << type;
  }
}

TEST_F(MoeConfigTest, TheFamilysRuleSaysWhichLayersAreMixtures) {
  Json qwen = qwen3_moe();
  EXPECT_THAT(mixtures(read(qwen)), ElementsAre(0, 1, 2, 3));
  qwen["decoder_sparse_step"] = 2;
  EXPECT_THAT(mixtures(read(qwen)), ElementsAre(1, 3));
  qwen["mlp_only_layers"] = {3};
  const ModelConfig config = read(qwen);
  EXPECT_THAT(mixtures(config), ElementsAre(1));
  EXPECT_EQ(config.layer_spec(3).intermediate_size, 24);
  EXPECT_EQ(config.moe_spec(1).intermediate_size(), 8);
  EXPECT_THROW((void)config.layer_spec(1), Error);
  EXPECT_THROW((void)config.moe_spec(3), Error);
  EXPECT_THROW((void)config.moe_spec(4), Error);

  Json deepseek = deepseek_v3();
  deepseek["first_k_dense_replace"] = 1;
  deepseek["moe_layer_freq"] = 2;
  EXPECT_THAT(mixtures(read(deepseek)), ElementsAre(2, 4));
  deepseek["first_k_dense_replace"] = 9;
  EXPECT_THAT(mixtures(read(deepseek)), ElementsAre());

  const auto scout = [](const Overrides& more) {
    Overrides overrides = {{"num_hidden_layers", "5"}};
    overrides.insert(overrides.end(), more.begin(), more.end());
    return published("llama-4-scout", overrides);
  };
  EXPECT_THAT(mixtures(scout({})), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(mixtures(scout({{"interleave_moe_layer_step", "2"}})), ElementsAre(1, 3));
  EXPECT_THAT(mixtures(scout({{"moe_layers", "[0,4,47]"}})), ElementsAre(0, 4));
  EXPECT_EQ(scout({{"moe_layers", "[0]"}}).layer_spec(1).intermediate_size, 16384);
}

TEST_F(MoeConfigTest, SwitchNumbersTheDecodersBlocksBehindTheEncoders) {
  const ModelConfig config = published("switch-base-8", {{"num_layers", "4"},
                                                         {"num_sparse_encoder_layers", "2"},
                                                         {"num_decoder_layers", "3"},
                                                         {"num_sparse_decoder_layers", "3"}});
  EXPECT_EQ(config.num_layers, 7);
  EXPECT_THAT(mixtures(config), ElementsAre(1, 3, 4, 5, 6));
  EXPECT_EQ(config.layer_spec(2).up.name, "encoder.block.2.layer.1.mlp.wi.weight");
  EXPECT_EQ(config.moe_spec(4).experts[7].down.name,
            "decoder.block.0.layer.2.mlp.experts.expert_7.wo.weight");
  EXPECT_EQ(config.moe_spec(3).router.name, "encoder.block.3.layer.1.mlp.router.classifier.weight");
  EXPECT_FALSE(config.activation.gated);
  EXPECT_THAT(mixtures(published("switch-base-8", {{"num_layers", "4"},
                                                   {"num_decoder_layers", "null"},
                                                   {"encoder_sparse_step", "3"},
                                                   {"num_sparse_decoder_layers", "0"}})),
              ElementsAre(1))
      << "a decoder that isn't sized is as deep as the encoder";
  Json unsaid = {{"model_type", "switch_transformers"}, {"d_model", 8},    {"d_ff", 8},
                 {"num_sparse_encoder_layers", 1},      {"num_layers", 2}, {"num_experts", 2}};
  expect_error(ExitCode::kData, "no decoder_sparse_step and no num_sparse_decoder_layers", unsaid);
  unsaid["num_sparse_decoder_layers"] = 3;
  expect_error(ExitCode::kData, "num_sparse_decoder_layers is 3", unsaid);
}

TEST_F(MoeConfigTest, OneFieldMayGoByAnotherFamilysName) {
  Json json = qwen3_moe();
  json.erase("num_experts");
  json["num_local_experts"] = 5;
  EXPECT_EQ(read(json).moe->route.experts, 5);
  json["num_experts"] = 6;
  EXPECT_EQ(read(json).moe->route.experts, 6) << "the family's own";
  EXPECT_EQ(read(json, {{"num_local_experts", "4"}}).moe->route.experts, 4) << "what the user says";
}

TEST_F(MoeConfigTest, AnotherNumberOfExpertsKeepsTheRest) {
  const ModelConfig config = published("deepseek-v3", {{"n_routed_experts", "32"}});
  EXPECT_EQ(config.moe->route.experts, 32);
  EXPECT_EQ(config.moe->route.groups, 8);
  EXPECT_EQ(config.moe_spec(60).experts.size(), 32U);
}

TEST_F(MoeConfigTest, RulesThatCantBeAreRefused) {
  struct Bad {
    const char* key;
    Json value;  // discarded: the field is erased
    const char* word;
  };
  const Json gone(Json::value_t::discarded);
  const std::vector<Bad> table = {
      {"num_experts_per_tok", 17, "num_experts_per_tok 17 is more than n_routed_experts 16"},
      {"num_experts_per_tok", 0, "num_experts_per_tok is 0 (must be positive)"},
      {"num_experts_per_tok", -1, "num_experts_per_tok is -1"},
      {"num_experts_per_tok", 33, "more than 32"},
      {"num_experts_per_tok", gone, "no num_experts_per_tok"},
      {"num_experts_per_tok", "2", "num_experts_per_tok is \"2\" (not an integer)"},
      {"n_routed_experts", gone, "no n_routed_experts"},
      {"n_routed_experts", 0, "n_routed_experts is 0"},
      {"n_routed_experts", 2049, "n_routed_experts is 2049 (absurd: more than 2048)"},
      {"n_routed_experts", 18, "n_group 4 does not divide n_routed_experts 18"},
      {"n_group", 3, "n_group 3 does not divide n_routed_experts 16"},
      {"n_group", 0, "n_group is 0"},
      {"topk_group", 5, "topk_group 5 is more than n_group 4"},
      {"topk_group", 0, "topk_group is 0"},
      {"num_experts_per_tok", 9, "leaves 8 of n_routed_experts 16"},
      {"scoring_func", "softplus",
       "unknown scoring_func \"softplus\" (known: softmax, sigmoid, sqrtsoftplus)"},
      {"scoring_func", 1, "scoring_func is 1 (not a string)"},
      {"topk_method", "best",
       "unknown topk_method \"best\" (known: greedy, group_limited_greedy, "},
      {"norm_topk_prob", "yes", "norm_topk_prob is \"yes\""},
      {"routed_scaling_factor", 0, "routed_scaling_factor is 0"},
      {"routed_scaling_factor", -1.5, "routed_scaling_factor is -1.5"},
      {"moe_intermediate_size", gone, "no moe_intermediate_size"},
      {"moe_intermediate_size", 0, "moe_intermediate_size is 0"},
      {"n_shared_experts", -1, "n_shared_experts is -1 (must not be negative)"},
      {"first_k_dense_replace", -1, "first_k_dense_replace is -1"},
      {"moe_layer_freq", "x", "moe_layer_freq is \"x\""},
      {"intermediate_size", gone, "no intermediate_size"},
  };
  for (const Bad& bad : table) {
    SCOPED_TRACE(fmt::format("{} {}", bad.key, bad.word));
    Json json = deepseek_v3();
    if (bad.value.is_discarded()) {
      json.erase(bad.key);
      expect_error(ExitCode::kData, bad.word, json);
      continue;
    }
    expect_error(ExitCode::kUsage, bad.word, json, {{bad.key, bad.value.dump()}});
    json[bad.key] = bad.value;
    expect_error(ExitCode::kData, bad.word, json);
  }
  Json alone = deepseek_v3();
  alone["n_group"] = 16;
  alone["topk_group"] = 8;
  expect_error(ExitCode::kData, "makes groups of one", alone);
  Json lists = qwen3_moe();
  lists["mlp_only_layers"] = 3;
  expect_error(ExitCode::kData, "mlp_only_layers is 3 (not a list of layers)", lists);
  lists["mlp_only_layers"] = {1, -1};
  expect_error(ExitCode::kData, "mlp_only_layers holds -1", lists);
}

TEST_F(MoeConfigTest, FieldsThatDontFitTogetherAreBlamedOnWhatWasSet) {
  const Json json = deepseek_v3();
  expect_error(ExitCode::kUsage, "does not divide", json, {{"n_routed_experts", "10"}});
  expect_error(ExitCode::kUsage, "leaves 4 of", json,
               {{"topk_group", "1"}, {"num_experts_per_tok", "5"}});
  expect_error(ExitCode::kUsage, "more than n_routed_experts 3", json, {{"n_routed_experts", "3"}});
  expect_error(ExitCode::kUsage, "no such field", json, {{"num_experts", "3"}});
  expect_error(ExitCode::kUsage, "no such field", qwen3_moe(), {{"n_group", "1"}});
  Json huge = qwen3_moe();
  huge["moe_intermediate_size"] = std::int64_t{1} << 31;
  huge["hidden_size"] = std::int64_t{1} << 24;
  huge["num_experts"] = 2048;
  expect_error(ExitCode::kData, "num_experts 2048 of moe_intermediate_size 2147483648", huge);
}

TEST_F(MoeConfigTest, GroupsCountOnlyForAMethodThatLooksAtThem) {
  Json json = deepseek_v3();
  json["model_type"] = "deepseek_v2";
  json["n_group"] = 3;
  EXPECT_EQ(read(json).moe->route.groups, 1) << "greedy";
  json["topk_method"] = "group_limited_greedy";
  expect_error(ExitCode::kData, "n_group 3 does not divide", json);
  json["n_group"] = 16;
  json["topk_group"] = 8;
  const ModelConfig config = read(json);
  EXPECT_EQ(config.moe->route.groups, 16) << "groups of one have a best expert";
  EXPECT_FALSE(config.moe->correction_bias);
  EXPECT_EQ(config.moe->route.group_score, GroupScore::kBest);
}

}  // namespace
}  // namespace gatefold
