// Where the tensors of mixtures of experts lie, and what is refused where they don't.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>

#include "config_testing.h"
#include "layers/model_families.h"
#include "layers/reference.h"
#include "layers/seeded_source.h"
#include "layers/weights.h"
#include "memory_source.h"
#include "runtime/checkpoint.h"
#include "runtime/device.h"
#include "tests/build_paths.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::MemorySource;
using testing::noise;
using testing::ShapeSource;
using testing::source_of;

/// H 16, I 8, 4 experts, two layers that are both mixtures.
ModelConfig config_of(const std::string& model_type) {
  const ModelFamily& family = *find_family(model_type);
  ModelConfig config;
  config.path = "config.json";
  config.model_type = model_type;
  config.hidden_size = 16;
  config.intermediate_size = 24;
  config.num_layers = 2;
  config.bias = family.bias.otherwise;
  config.activation.gated = family.gated.otherwise;
  config.moe.emplace();
  config.moe->route.experts = 4;
  config.moe->route.top_k = 2;
  config.moe->intermediate_size = 8;
  config.moe->shared_intermediate_size = family.moe->shared_width == SharedWidth::kNone ? 0 : 12;
  if (family.moe->shared_width == SharedWidth::kListOfOneExpert) config.moe->shared_experts = 2;
  config.moe->router_bias = family.moe->router_bias.otherwise;
  config.moe->expert_bias = family.moe->expert_bias.otherwise;
  config.moe->correction_bias = family.moe->method == TopKMethod::kNoAuxTc;
  config.moe->layers = {true, true};
  return config;
}

void expect_unresolved(const ModelConfig& config, const TensorSource& source,
                       const std::string& word) {
  expect_error(ExitCode::kData, word, [&] { resolve_moe(config, 0, source); });
}

const std::vector<std::string>& moe_types() {
  static const std::vector<std::string> types = [] {
    std::vector<std::string> names;
    for (const ModelFamily& family : model_families()) {
      if (!family.moe) continue;
      names.insert(names.end(), family.model_types.begin(), family.model_types.end());
    }
    return names;
  }();
  return types;
}

TEST(MoeFamilies, MostKeepEachExpertByItself) {
  for (const char* type :
       {"qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3", "kimi_k2",
        "glm4_moe", "deepseek", "minimind", "minimind2"}) {
    SCOPED_TRACE(type);
    const MoeSpec spec = config_of(type).moe_spec(1);
    EXPECT_EQ(spec.router.name, "model.layers.1.mlp.gate.weight");
    ASSERT_EQ(spec.experts.size(), 4U);
    EXPECT_EQ(spec.experts[3].gate->name, "model.layers.1.mlp.experts.3.gate_proj.weight");
    EXPECT_EQ(spec.experts[3].up.name, "model.layers.1.mlp.experts.3.up_proj.weight");
    EXPECT_EQ(spec.experts[3].down.name, "model.layers.1.mlp.experts.3.down_proj.weight");
    EXPECT_THAT(spec.experts[3].down.stored_shape, ElementsAre(16, 8));
  }
  EXPECT_EQ(config_of("qwen2_moe").moe_spec(0).shared.at(0).up.name,
            "model.layers.0.mlp.shared_expert.up_proj.weight");
  EXPECT_EQ(config_of("qwen2_moe").moe_spec(0).shared_gate->name,
            "model.layers.0.mlp.shared_expert_gate.weight");
  EXPECT_EQ(config_of("deepseek_v3").moe_spec(0).shared.at(0).down.name,
            "model.layers.0.mlp.shared_experts.down_proj.weight");
  EXPECT_EQ(config_of("deepseek_v3").moe_spec(0).correction_bias->name,
            "model.layers.0.mlp.gate.e_score_correction_bias");
}

TEST(MoeFamilies, MixtralNumbersItsMatricesGateDownUp) {
  const MoeSpec spec = config_of("mixtral").moe_spec(0);
  EXPECT_EQ(spec.router.name, "model.layers.0.block_sparse_moe.gate.weight");
  EXPECT_EQ(spec.experts[2].gate->name, "model.layers.0.block_sparse_moe.experts.2.w1.weight");
  EXPECT_EQ(spec.experts[2].down.name, "model.layers.0.block_sparse_moe.experts.2.w2.weight");
  EXPECT_EQ(spec.experts[2].up.name, "model.layers.0.block_sparse_moe.experts.2.w3.weight");
}

TEST(MoeFamilies, StacksHoldAnExpertBehindTheOther) {
  const MoeSpec spec = config_of("qwen3_5_moe").moe_spec(0);
  const FfnSpec& expert = spec.experts[2];
  EXPECT_EQ(expert.gate->name, "model.language_model.layers.0.mlp.experts.gate_up_proj");
  EXPECT_EQ(expert.up.name, expert.gate->name);
  EXPECT_THAT(expert.up.stored_shape, ElementsAre(4, 16, 16));
  EXPECT_EQ(expert.gate->row_offset, 2 * 16);
  EXPECT_EQ(expert.up.row_offset, 2 * 16 + 8);
  EXPECT_FALSE(expert.up.transposed);
  EXPECT_THAT(expert.down.stored_shape, ElementsAre(4, 16, 8));
  EXPECT_EQ(expert.down.row_offset, 2 * 16);
  EXPECT_EQ(stored_tensors(spec).size(), 7U) << "router, two stacks, shared expert and its gate";
}

TEST(MoeFamilies, TheOldMinimindKeepsAListOfSharedExperts) {
  ModelConfig config = config_of("minimind2");
  const MoeSpec spec = config.moe_spec(0);
  ASSERT_EQ(spec.shared.size(), 2U);
  EXPECT_EQ(spec.shared[1].down.name, "model.layers.0.mlp.shared_experts.1.down_proj.weight");
  EXPECT_EQ(spec.shared[1].intermediate_size, 12);
  EXPECT_EQ(spec.parameters(2), 4 * 16 + 2 * 3 * 16 * 8 + 2 * 3 * 16 * 12);
  // More or fewer of them in the file.
  const ShapeSource two = source_of(spec);
  config.moe->shared_experts = 1;
  expect_unresolved(config, two, "holds model.layers.0.mlp.shared_experts.1.gate_proj.weight");
  config.moe->shared_experts = 3;
  expect_unresolved(config, two, "no tensor model.layers.0.mlp.shared_experts.2.gate_proj.weight");
  config.moe->shared_experts = config.moe->shared_intermediate_size = 0;
  expect_unresolved(config, two, "holds model.layers.0.mlp.shared_experts.0.gate_proj.weight");
  // One wide MLP is another model's.
  config = config_of("minimind2");
  ShapeSource wide = two;
  wide.shapes["model.layers.0.mlp.shared_experts.up_proj.weight"] = {24, 16};
  expect_unresolved(config, wide, "config.json has no such shared expert");
  ShapeSource list = source_of(config_of("deepseek").moe_spec(0));
  list.shapes["model.layers.0.mlp.shared_experts.0.up_proj.weight"] = {12, 16};
  expect_unresolved(config_of("deepseek"), list, "config.json has no such shared expert");
}

TEST(MoeFamilies, Qwen3VlStacksThemTransposedUnderItsTextModel) {
  const MoeSpec spec = config_of("qwen3_vl_moe").moe_spec(0);
  EXPECT_EQ(spec.router.name, "model.language_model.layers.0.mlp.gate.weight");
  const FfnSpec& expert = spec.experts[2];
  EXPECT_EQ(expert.up.name, "model.language_model.layers.0.mlp.experts.gate_up_proj");
  EXPECT_TRUE(expert.up.transposed && expert.gate->transposed && expert.down.transposed);
  EXPECT_EQ(expert.up.row_offset, 8);
  EXPECT_EQ(expert.up.column_offset, 2 * 16);
}

// Newer transformers save Qwen3-VL's experts as they have them in memory, under the same names.
// One of the two tensors has another shape then, whatever the sizes; a mix of both is neither.
TEST(ResolveMoe, TwoLayoutsUnderOneNameAreToldApartByBothTensors) {
  for (const std::int64_t hidden : {8, 16, 24}) {
    SCOPED_TRACE(hidden);
    ModelConfig config = config_of("qwen3_vl_moe");
    config.hidden_size = hidden;
    const std::string experts = "model.language_model.layers.0.mlp.experts.";
    const ShapeSource published = source_of(config.moe_spec(0));
    EXPECT_TRUE(resolve_moe(config, 0, published).experts[1].up.transposed);
    ShapeSource again = published;
    again.shapes[experts + "gate_up_proj"] = {4, 16, hidden};
    again.shapes[experts + "down_proj"] = {4, hidden, 8};
    const FfnSpec expert = resolve_moe(config, 0, again).experts[1];
    EXPECT_FALSE(expert.gate->transposed || expert.up.transposed || expert.down.transposed);
    EXPECT_EQ(expert.up.row_offset, 16 + 8);
    if (hidden == 24) {
      again.shapes[experts + "down_proj"] = {4, 8, hidden};
      expect_unresolved(config, again, "gate_up_proj has shape [4,16,24]");
    }
  }
}

TEST(MoeFamilies, GraniteFusesGateAndUpOfExpertsAndOfTheSharedOne) {
  const ModelConfig config = config_of("granitemoeshared");
  const MoeSpec spec = config.moe_spec(1);
  const std::string layer = "model.layers.1.";
  EXPECT_EQ(spec.router.name, layer + "block_sparse_moe.router.layer.weight");
  const FfnSpec& expert = spec.experts[2];
  EXPECT_EQ(expert.up.name, layer + "block_sparse_moe.input_linear.weight");
  EXPECT_EQ(expert.gate->name, expert.up.name);
  EXPECT_THAT(expert.up.stored_shape, ElementsAre(4, 16, 16));
  EXPECT_EQ(expert.gate->row_offset, 2 * 16);
  EXPECT_EQ(expert.up.row_offset, 2 * 16 + 8);
  EXPECT_EQ(expert.down.name, layer + "block_sparse_moe.output_linear.weight");
  EXPECT_THAT(expert.down.stored_shape, ElementsAre(4, 16, 8));
  const FfnSpec& shared = spec.shared.at(0);
  EXPECT_EQ(shared.gate->name, layer + "shared_mlp.input_linear.weight");
  EXPECT_EQ(shared.up.name, shared.gate->name);
  EXPECT_THAT(shared.up.stored_shape, ElementsAre(24, 16));
  EXPECT_EQ(shared.gate->row_offset, 0);
  EXPECT_EQ(shared.up.row_offset, 12);
  EXPECT_EQ(shared.down.name, layer + "shared_mlp.output_linear.weight");
  EXPECT_EQ(stored_tensors(spec).size(), 5U);
  // A shared expert that the config doesn't have, and a bias that no Granite has.
  ModelConfig alone = config;
  alone.moe->shared_intermediate_size = 0;
  ShapeSource source = source_of(config.moe_spec(0));
  expect_unresolved(alone, source, "holds model.layers.0.shared_mlp.input_linear.weight");
  source.shapes["model.layers.0.block_sparse_moe.input_linear.bias"] = {4, 16};
  expect_unresolved(config, source, "granitemoeshared layers have none");
}

TEST(MoeFamilies, Llama4StacksThemTransposed) {
  const FfnSpec expert = config_of("llama4").moe_spec(0).experts[2];
  EXPECT_EQ(expert.up.name, "language_model.model.layers.0.feed_forward.experts.gate_up_proj");
  EXPECT_TRUE(expert.up.transposed && expert.gate->transposed && expert.down.transposed);
  EXPECT_THAT(expert.up.stored_shape, ElementsAre(4, 16, 16));
  EXPECT_EQ(expert.gate->row_offset, 0);
  EXPECT_EQ(expert.up.row_offset, 8);
  EXPECT_EQ(expert.up.column_offset, 2 * 16);
  EXPECT_THAT(expert.down.stored_shape, ElementsAre(4, 8, 16));
  EXPECT_EQ(expert.down.column_offset, 2 * 8);
}

TEST(MoeFamilies, GptOssInterleavesGateAndUpAndHasBiasesEverywhere) {
  const MoeSpec spec = config_of("gpt_oss").moe_spec(0);
  const FfnSpec& expert = spec.experts[3];
  EXPECT_EQ(spec.router_bias->name, "model.layers.0.mlp.router.bias");
  EXPECT_EQ(expert.gate->row_step, 2);
  EXPECT_EQ(expert.gate->row_offset, 0);
  EXPECT_EQ(expert.up.row_offset, 1);
  EXPECT_EQ(expert.up.column_offset, 3 * 16);
  EXPECT_EQ(expert.down.row_step, 1);
  EXPECT_EQ(expert.up_bias->name, "model.layers.0.mlp.experts.gate_up_proj_bias");
  EXPECT_THAT(expert.up_bias->stored_shape, ElementsAre(4, 16));
  EXPECT_EQ(expert.up_bias->row_step, 2);
  EXPECT_EQ(expert.up_bias->row_offset, 1);
  EXPECT_EQ(expert.up_bias->column_offset, 3);
  EXPECT_EQ(expert.down_bias->name, "model.layers.0.mlp.experts.down_proj_bias");
  EXPECT_EQ(expert.down_bias->column_offset, 3);
  EXPECT_EQ(spec.parameters(4), 4 * (3 * 16 * 8 + 2 * 8 + 16) + 4 * 17);
  EXPECT_EQ(spec.parameters(2), 2 * (3 * 16 * 8 + 2 * 8 + 16) + 4 * 17);
}

// Every row and every way of it, over all prefixes: what is written is what is found.
TEST(ResolveMoe, EverySpellingOfEveryFamilyIsFound) {
  for (const std::string& type : moe_types()) {
    const ModelConfig config = config_of(type);
    for (const std::string_view prefix : family_of(config).prefixes) {
      for (const ExpertNames& names : family_of(config).moe->names) {
        SCOPED_TRACE(fmt::format("{} {} {}", type, prefix, names.up));
        const MoeSpec spec = moe_under_prefix(config, 1, prefix, names);
        const MoeSpec found = resolve_moe(config, 1, source_of(spec));
        EXPECT_EQ(found.router.name, spec.router.name);
        EXPECT_EQ(found.experts[3].up.name, spec.experts[3].up.name);
        EXPECT_EQ(found.experts[3].up.row_offset, spec.experts[3].up.row_offset);
        EXPECT_EQ(found.shared.size(), spec.shared.size());
      }
    }
  }
}

TEST(ResolveMoe, AMissingOrMisshapenTensorIsNamed) {
  for (const std::string& type : moe_types()) {
    const ModelConfig config = config_of(type);
    const ShapeSource whole = source_of(config.moe_spec(0));
    for (const auto& [name, shape] : whole.shapes) {
      SCOPED_TRACE(type + " " + name);
      ShapeSource source = whole;
      source.shapes.erase(name);
      expect_unresolved(config, source, name);
      for (const std::vector<std::int64_t>& wrong :
           {std::vector<std::int64_t>{}, {1}, {3, 16}, {4, 15}, {4, 16, 17}, {4, 16, 16, 1}}) {
        source.shapes[name] = wrong;
        expect_unresolved(config, source, name);
        expect_unresolved(config, source, fmt::format("[{}]", fmt::join(wrong, ",")));
      }
    }
  }
}

TEST(ResolveMoe, OneExpertsLostTensorIsNotTakenForAnotherLayout) {
  const ModelConfig config = config_of("qwen3_moe");
  ShapeSource source = source_of(config.moe_spec(0));
  source.shapes.erase("model.layers.0.mlp.experts.0.gate_proj.weight");
  expect_unresolved(config, source, "no tensor model.layers.0.mlp.experts.0.gate_proj.weight");
}

TEST(ResolveMoe, FewerOrMoreExpertsThanTheConfigSaysAreRefused) {
  ModelConfig config = config_of("qwen3_moe");
  const ShapeSource four = source_of(config.moe_spec(0));
  config.moe->route.experts = 3;
  ShapeSource source = four;
  source.shapes["model.layers.0.mlp.gate.weight"] = {3, 16};
  expect_unresolved(config, source, "experts.3.up_proj.weight");
  expect_unresolved(config, source, "config.json has 3 experts");
  config.moe->route.experts = 5;
  source.shapes["model.layers.0.mlp.gate.weight"] = {5, 16};
  expect_unresolved(config, source, "no tensor model.layers.0.mlp.experts.4.");
}

TEST(ResolveMoe, WhatTheConfigDeniesIsRefused) {
  const auto with = [](const ModelConfig& config, const std::string& name) {
    ShapeSource source = source_of(config.moe_spec(0));
    source.shapes[name] = {4};
    return source;
  };
  const std::string mlp = "model.layers.0.mlp.";
  const ModelConfig qwen = config_of("qwen3_moe");
  for (const char* name : {"gate.e_score_correction_bias", "gate.bias", "experts.2.up_proj.bias",
                           "shared_expert.up_proj.weight", "shared_experts.down_proj.weight"}) {
    expect_unresolved(qwen, with(qwen, mlp + name), mlp + name);
  }
  expect_unresolved(qwen, with(qwen, mlp + "gate.e_score_correction_bias"),
                    "qwen3_moe layers have none");
  ModelConfig greedy = config_of("deepseek_v3");
  greedy.moe->correction_bias = false;
  expect_unresolved(greedy, with(greedy, mlp + "gate.e_score_correction_bias"), "topk_method");
  expect_unresolved(greedy, with(greedy, mlp + "shared_experts.up_proj.bias"),
                    "shared_experts.up_proj.bias");
  const ModelConfig fused = config_of("qwen3_5_moe");
  const std::string stack = "model.language_model.layers.0.mlp.experts.gate_up_proj_bias";
  expect_unresolved(fused, with(fused, stack), stack);
}

// transformers' DeepseekV2MLP takes mlp_bias, and its experts, which are stacked, have none.
TEST(ResolveMoe, MlpBiasOfDeepSeekV2IsThatOfSharedExpertsAlone) {
  ModelConfig config = config_of("deepseek_v2");
  config.bias = true;
  const ShapeSource source = source_of(config.moe_spec(0));
  const MoeSpec spec = resolve_moe(config, 0, source);
  for (const FfnSpec& expert : spec.experts) {
    EXPECT_FALSE(expert.gate_bias || expert.up_bias || expert.down_bias);
  }
  EXPECT_EQ(spec.shared.front().down_bias->name,
            "model.layers.0.mlp.shared_experts.down_proj.bias");
  for (const char* name : {"experts.2.up_proj.bias", "experts.0.gate_proj.bias"}) {
    ShapeSource more = source;
    more.shapes["model.layers.0.mlp." + std::string(name)] = {8};
    expect_unresolved(config, more, "deepseek_v2 layers have none");
  }
}

TEST(ResolveMoe, TwoSpellingsOfOneTensorAreRefusedByBothNames) {
  const ModelConfig config = config_of("qwen3_moe");
  ShapeSource source = source_of(config.moe_spec(0));
  source.shapes["model.layers.0.mlp.experts.down_proj"] = {4, 16, 8};
  expect_unresolved(config, source,
                    "both model.layers.0.mlp.experts.0.gate_proj.weight and "
                    "model.layers.0.mlp.experts.down_proj");
  source = source_of(config.moe_spec(0));
  source.shapes["layers.0.mlp.gate.weight"] = {4, 16};
  expect_unresolved(config, source, "both model.layers.0.mlp.gate.weight and layers.0.mlp.gate");
}

TEST(ResolveMoe, AConfigAndWeightsOfTwoMindsAboutALayerAreRefused) {
  ModelConfig config = config_of("qwen3_moe");
  ModelConfig dense = config;
  dense.moe->layers = {false, true};
  const ShapeSource experts = source_of(config.moe_spec(0));
  ShapeSource one_mlp;
  for (const StoredTensor& tensor : stored_tensors(dense.layer_spec(0))) {
    one_mlp.shapes[tensor.name] = tensor.shape;
  }
  expect_unresolved(config, one_mlp, "config.json says that layer 0 is a mixture of experts");
  expect_unresolved(config, ShapeSource(), "layer 0 of the shapes has no experts (looked for ");
  // Both at once, under whichever prefix.
  for (const std::string dense_up :
       {"model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"}) {
    ShapeSource both = experts;
    both.shapes[dense_up] = {24, 16};
    expect_unresolved(config, both, dense_up + " of shape [24,16] (a dense layer's, where");
  }
  try {
    resolve_layer(dense, 0, experts);
    ADD_FAILURE() << "experts were taken for a dense layer";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
    EXPECT_THAT(error.what(), HasSubstr("config.json says that layer 0 is dense"));
  }
}

TEST(ResolveMoe, AskingForALayerOfTheOtherKindIsAUsageError) {
  ModelConfig config = config_of("qwen3_moe");
  config.moe->layers = {false, true};
  const auto code_of = [](const auto& action) {
    try {
      action();
    } catch (const Error& error) {
      return error.code();
    }
    return ExitCode::kOk;
  };
  const ShapeSource none;
  EXPECT_EQ(code_of([&] { resolve_layer(config, 1, none); }), ExitCode::kUsage);
  EXPECT_EQ(code_of([&] { resolve_moe(config, 0, none); }), ExitCode::kUsage);
  EXPECT_EQ(code_of([&] { resolve_moe(config, 2, none); }), ExitCode::kUsage);
}

// transformers wrote both from one model.
TEST(ResolveMoe, FusedAndPerExpertFilesOfOneModelGiveTheSameExperts) {
  const fs::path golden = fs::path(kSourceFolder) / "tests" / "golden";
  const auto open = [&](const char* name) {
    const std::string directory = (golden / name / "bf16").string();
    return std::pair(read_model_config(directory + "/config.json"), Checkpoint(directory));
  };
  const auto [config, source] = open("qwen3_moe");
  const auto [fused_config, fused_source] = open("qwen3_moe_fused");
  const std::vector<float> x = noise(3 * config.hidden_size, 7, 1.0F);
  int compared = 0;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    if (!config.is_moe(layer)) continue;
    const MoeSpec one = resolve_moe(config, layer, source);
    const MoeSpec other = resolve_moe(fused_config, layer, fused_source);
    ASSERT_EQ(one.experts[0].up.stored_shape.size(), 2U);
    ASSERT_EQ(other.experts[0].up.stored_shape.size(), 3U);
    for (std::size_t e = 0; e < one.experts.size(); ++e) {
      const ReferenceResult a = reference_ffn(one.experts[e], source, DType::kBf16, x, 3);
      const ReferenceResult b = reference_ffn(other.experts[e], fused_source, DType::kBf16, x, 3);
      EXPECT_EQ(a.y, b.y) << e;
      ++compared;
    }
  }
  EXPECT_EQ(compared, 5);
}

TEST(LoadRouter, ANumberThatIsntFiniteIsNamed) {
  const auto device = make_cpu_device();
  const TensorRef router{"gate.weight", false, {4, 16}};
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    MemorySource source;
    source.set(router.name, {4, 16}, noise(64, 1, 1.0F));
    ASSERT_NO_THROW(load_router(source, router, 4, 16, *device));
    source.at(router.name, 2 * 16 + 5) = bad;
    try {
      load_router(source, router, 4, 16, *device);
      ADD_FAILURE() << bad << " was loaded";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kData);
      EXPECT_THAT(error.what(), HasSubstr(fmt::format("gate.weight is {}", bad)));
      EXPECT_THAT(error.what(), HasSubstr("at row 2, column 5"));
    }
  }
}

// bf16 would make both the same.
TEST(LoadRouter, ARouterIsNotRounded) {
  const auto device = make_cpu_device();
  MemorySource source;
  source.set("gate.bias", {2}, {1.0009765625F, 1.001953125F});
  const Buffer loaded = load_router(source, {"gate.bias", false, {2}}, 1, 2, *device);
  EXPECT_EQ(loaded.as<float>()[0], 1.0009765625F);
  EXPECT_EQ(loaded.as<float>()[1], 1.001953125F);
}

TEST(SeededMoe, EveryFamilyResolvesItsOwnWeights) {
  for (const std::string& type : moe_types()) {
    SCOPED_TRACE(type);
    ModelConfig config = config_of(type);
    config.dtype = DType::kBf16;
    const SeededSource source(config, 3);
    const MoeSpec spec = resolve_moe(config, 1, source);
    for (const StoredTensor& tensor : stored_tensors(spec)) {
      const bool correction = tensor.role == TensorRole::kCorrectionBias;
      EXPECT_EQ(source.find(tensor.name)->dtype, correction ? DType::kF32 : DType::kBf16);
    }
    EXPECT_EQ(source.layer_tensors(1).size(), stored_tensors(spec).size());
  }
}

TEST(SeededMoe, RoutersAreSteepAndCorrectionBiasesAreSmall) {
  ModelConfig config = config_of("deepseek_v3");
  config.hidden_size = 64;
  config.moe->route.experts = 1024;
  const SeededSource source(config, 1);
  const auto read = [&](const char* name, std::int64_t rows, std::int64_t cols) {
    std::vector<float> values(static_cast<std::size_t>(rows * cols));
    read_as_float(source, name, {0, rows}, {0, cols}, values.data());
    double square = 0;
    double largest = 0;
    for (const float v : values) {
      square += double{v} * double{v} / static_cast<double>(values.size());
      largest = std::max(largest, std::abs(double{v}));
    }
    return std::pair(std::sqrt(square), largest);
  };
  const auto [router, largest_weight] = read("model.layers.0.mlp.gate.weight", 1024, 64);
  EXPECT_NEAR(router, 4.0 / 8.0, 0.005) << "4 / sqrt(H)";
  const auto [bias, largest] = read("model.layers.0.mlp.gate.e_score_correction_bias", 1, 1024);
  EXPECT_NEAR(bias, 0.1 / std::sqrt(12.0), 0.0015);
  EXPECT_LE(largest, 0.1);
  EXPECT_GT(largest, 0.07);
}

TEST(SeededMoe, AStacksRowsAreFilledWhereverAReadStarts) {
  const ModelConfig config = config_of("gpt_oss");
  const SeededSource source(config, 5);
  const std::string name = "model.layers.1.mlp.experts.gate_up_proj";
  std::vector<float> whole(4 * 16 * 16);
  read_as_float(source, name, {0, 64}, {0, 16}, whole.data());
  std::vector<float> part(3 * 5);
  read_as_float(source, name, {40, 43}, {7, 12}, part.data());
  for (std::size_t i = 0; i < part.size(); ++i) {
    EXPECT_EQ(part[i], whole[(40 + i / 5) * 16 + 7 + i % 5]) << i;
  }
  EXPECT_THROW(read_as_float(source, name, {64, 65}, {0, 1}, part.data()), Error);
  EXPECT_FALSE(source.find("model.layers.2.mlp.router.weight"));
  EXPECT_FALSE(source.find("model.layers.10.mlp.router.weight"));
  EXPECT_FALSE(source.find("model.layer"));
}

// DeepSeek-V3's feed-forward layers have 44843 tensors, Kimi-K2's 68000: looking one up makes the
// names of its own layer only.
TEST(SeededMoe, AHugeModelsTensorsAreThereAtOnce) {
  const fs::path path = fs::path(kSourceFolder) / "configs" / "deepseek-v3.json";
  const ModelConfig config = read_model_config(path.string());
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 10; ++i) {
    const SeededSource source(config, 0);
    EXPECT_TRUE(source.find("model.layers.60.mlp.experts.255.down_proj.weight"));
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_LT(took.count(), 5.0) << "ten times";
}

}  // namespace
}  // namespace gatefold
