#include "layers/model_families.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config_testing.h"

namespace gatefold {
namespace {

using ::testing::ElementsAre;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::ShapeSource;
using testing::source_of;

ModelConfig config_of(const std::string& model_type) {
  ModelConfig config;
  config.path = "config.json";
  config.model_type = model_type;
  config.hidden_size = 16;
  config.intermediate_size = 24;
  config.num_layers = 3;
  config.bias = find_family(model_type)->bias.otherwise;
  config.activation.gated = find_family(model_type)->gated.otherwise;
  return config;
}

FfnSpec spec_of(const std::string& model_type, std::int64_t layer) {
  return config_of(model_type).layer_spec(layer);
}

// "[48,80]", as messages write it.
std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t size : shape) text += fmt::format("{}{}", text.empty() ? "" : ",", size);
  return "[" + text + "]";
}

void expect_unresolved(const ModelConfig& config, const TensorSource& source,
                       const std::string& word) {
  expect_error(ExitCode::kData, word, [&] { resolve_layer(config, 0, source); });
}

void expect_separate(const std::string& model_type, const std::string& stem) {
  SCOPED_TRACE(model_type);
  const FfnSpec spec = spec_of(model_type, 2);
  EXPECT_EQ(spec.layer, 2);
  EXPECT_EQ(spec.gate->name, stem + "gate_proj.weight");
  EXPECT_EQ(spec.up.name, stem + "up_proj.weight");
  EXPECT_EQ(spec.down.name, stem + "down_proj.weight");
  EXPECT_THAT(spec.up.stored_shape, ElementsAre(24, 16));
  EXPECT_THAT(spec.down.stored_shape, ElementsAre(16, 24));
  EXPECT_FALSE(spec.up.transposed || spec.gate_bias || spec.up_bias || spec.down_bias);
  const std::vector<StoredTensor> tensors = stored_tensors(spec);
  ASSERT_EQ(tensors.size(), 3U);
  EXPECT_THAT(tensors[1].shape, ElementsAre(24, 16));
  EXPECT_THAT(tensors[2].shape, ElementsAre(16, 24));
}

TEST(ModelFamilies, MostModelsKeepThreeSeparateMatrices) {
  for (const char* type : {"llama", "mistral", "qwen2", "qwen3", "gemma3_text"}) {
    expect_separate(type, "model.layers.2.mlp.");
  }
  for (const char* type : {"qwen3_5", "qwen3_5_text"}) {
    expect_separate(type, "model.language_model.layers.2.mlp.");
  }
}

class FusedFamilies : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(ModelFamilies, FusedFamilies, ::testing::Values("phi3", "glm4"));

TEST_P(FusedFamilies, KeepGateAndUpInOneTensorWithGateRowsFirst) {
  const FfnSpec spec = spec_of(GetParam(), 1);
  EXPECT_EQ(spec.gate->name, "model.layers.1.mlp.gate_up_proj.weight");
  EXPECT_EQ(spec.up.name, spec.gate->name);
  EXPECT_EQ(spec.gate->row_offset, 0);
  EXPECT_EQ(spec.up.row_offset, 24);
  EXPECT_THAT(spec.gate->stored_shape, ElementsAre(48, 16));
  EXPECT_THAT(spec.up.stored_shape, ElementsAre(48, 16));
  EXPECT_THAT(spec.down.stored_shape, ElementsAre(16, 24));
  EXPECT_EQ(spec.parameters(), 3 * 16 * 24);
  const std::vector<StoredTensor> tensors = stored_tensors(spec);
  ASSERT_EQ(tensors.size(), 2U) << "the fused one once";
  EXPECT_THAT(tensors[0].shape, ElementsAre(48, 16));
  EXPECT_EQ(tensors[0].fan_in, 16);
}

TEST(ModelFamilies, Gpt2StoresItsMatricesTransposed) {
  const FfnSpec spec = spec_of("gpt2", 0);
  EXPECT_FALSE(spec.gated());
  EXPECT_FALSE(spec.gate || spec.gate_bias);
  EXPECT_EQ(spec.up.name, "transformer.h.0.mlp.c_fc.weight");
  EXPECT_TRUE(spec.up.transposed && spec.down.transposed);
  EXPECT_THAT(spec.up.stored_shape, ElementsAre(16, 24));
  EXPECT_FALSE(spec.up_bias->transposed);
  EXPECT_EQ(spec.down_bias->name, "transformer.h.0.mlp.c_proj.bias");
  const std::vector<StoredTensor> tensors = stored_tensors(spec);
  ASSERT_EQ(tensors.size(), 4U);
  EXPECT_THAT(tensors[0].shape, ElementsAre(16, 24));
  EXPECT_THAT(tensors[1].shape, ElementsAre(24, 16));
  EXPECT_EQ(tensors[1].fan_in, 24);
  EXPECT_THAT(tensors[2].shape, ElementsAre(24));
}

TEST(ModelFamilies, OptsLayerHoldsItsMatricesWithoutAModuleAroundThem) {
  const ModelConfig config = config_of("opt");
  const FfnSpec spec = config.layer_spec(1);
  EXPECT_EQ(spec.up.name, "model.decoder.layers.1.fc1.weight");
  EXPECT_EQ(spec.down.name, "model.decoder.layers.1.fc2.weight");
  EXPECT_EQ(spec.down_bias->name, "model.decoder.layers.1.fc2.bias");
  EXPECT_FALSE(spec.gated() || spec.up.transposed);
  for (const std::string prefix : {"decoder.", ""}) {
    ShapeSource source;
    for (const auto& [name, shape] : source_of(spec).shapes) {
      source.shapes[prefix + name.substr(std::string_view("model.decoder.").size())] = shape;
    }
    EXPECT_EQ(resolve_layer(config, 1, source).up.name, prefix + "layers.1.fc1.weight");
  }
  ModelConfig denied = config;
  denied.bias = false;
  expect_unresolved(denied, source_of(config.layer_spec(0)), "--set enable_bias=true");
}

TEST(ModelFamilies, BertsOutputMatrixIsNotTheAttentionsOne) {
  const FfnSpec spec = spec_of("bert", 1);
  EXPECT_EQ(spec.up.name, "bert.encoder.layer.1.intermediate.dense.weight");
  EXPECT_EQ(spec.down.name, "bert.encoder.layer.1.output.dense.weight");
  EXPECT_EQ(spec.down_bias->name, "bert.encoder.layer.1.output.dense.bias");
  EXPECT_FALSE(spec.up.transposed);
}

TEST(ModelFamilies, EachModelTypeHasOneRowAndAllRowsAreWhole) {
  std::map<std::string_view, int> seen;
  for (const ModelFamily& family : model_families()) {
    ASSERT_FALSE(family.model_types.empty());
    ASSERT_FALSE(family.prefixes.empty());
    for (const std::string_view type : family.model_types) {
      EXPECT_EQ(++seen[type], 1) << type;
      EXPECT_EQ(find_family(type), &family) << type;
      EXPECT_THAT(known_model_types(), HasSubstr(std::string(type)));
    }
    EXPECT_TRUE(activation_from_name(family.default_activation)) << family.model_types[0];
    EXPECT_EQ(family.gate.empty(), family.gated.key.empty() && !family.gated.otherwise);
    EXPECT_EQ(family.beta.empty(), family.swish_beta.key.empty());
    EXPECT_EQ(family.older_type.empty(), family.older_key.empty());
    EXPECT_TRUE(family.older_type.empty() || find_family(family.older_type));
    for (const LayerStack& stack : family.stacks) {
      EXPECT_THAT(std::string(stack.path), HasSubstr("{}"));
    }
  }
  EXPECT_EQ(find_family("lama"), nullptr);
  EXPECT_EQ(find_family(""), nullptr);
}

TEST(ResolveLayer, PrefixesAreFoundInTheSource) {
  const ModelConfig config = config_of("llama");
  for (const std::string prefix :
       {"model.", "", "model.language_model.", "language_model.model."}) {
    ShapeSource source;
    for (const char* name : {"gate_proj", "up_proj"}) {
      source.shapes[fmt::format("{}layers.1.mlp.{}.weight", prefix, name)] = {24, 16};
    }
    source.shapes[prefix + "layers.1.mlp.down_proj.weight"] = {16, 24};
    EXPECT_EQ(resolve_layer(config, 1, source).down.name, prefix + "layers.1.mlp.down_proj.weight");
    expect_unresolved(config, source, "model.layers.0.mlp.up_proj.weight");
  }
  // What speculative decoding or a vision tower bring along is not the model's layer.
  ShapeSource other;
  other.shapes["mtp.layers.0.mlp.up_proj.weight"] = {24, 16};
  other.shapes["model.visual.layers.0.mlp.up_proj.weight"] = {24, 16};
  expect_unresolved(config, other, "no feed-forward weights");
}

TEST(ResolveLayer, ATensorWithTwoPrefixesIsRefusedByBothNames) {
  const ModelConfig config = config_of("llama");
  for (const char* module : {"gate_proj", "up_proj", "down_proj"}) {
    const std::string name = fmt::format("layers.0.mlp.{}.weight", module);
    ShapeSource source = source_of(config.layer_spec(0));
    source.shapes[name] = {1};
    expect_unresolved(config, source, fmt::format("both model.{} and {} (", name, name));
    source.shapes.erase(name);
    source.shapes["model.language_model." + name] = source.shapes["model." + name];
    expect_unresolved(config, source, fmt::format("both model.{} and model.language_model.", name));
  }
  ShapeSource source = source_of(config.layer_spec(0));
  source.shapes["layers.0.mlp.up_proj.bias"] = {24};
  expect_unresolved(config, source, "holds layers.0.mlp.up_proj.bias");
}

TEST(ResolveLayer, ALostTensorIsNamed) {
  ModelConfig config = config_of("llama");
  config.bias = true;
  const FfnSpec spec = config.layer_spec(0);
  const ShapeSource whole = source_of(spec);
  ASSERT_NO_THROW(resolve_layer(config, 0, whole));
  EXPECT_EQ(whole.shapes.size(), 6U);
  for (const auto& [name, shape] : whole.shapes) {
    ShapeSource source = whole;
    source.shapes.erase(name);
    expect_unresolved(config, source, name);
  }
  ShapeSource source = whole;
  source.shapes.erase("model.layers.0.mlp.down_proj.bias");
  expect_unresolved(config, source, "--set mlp_bias=false");
}

TEST(ResolveLayer, AWrongShapeIsNamedWithBothShapes) {
  ModelConfig config = config_of("llama");
  config.bias = true;
  const ShapeSource whole = source_of(config.layer_spec(0));
  for (const auto& [name, shape] : whole.shapes) {
    const std::vector<std::vector<std::int64_t>> wrong = {
        {},       {0},     {23},    {24, 16, 1}, {1, 24, 16}, {384},   {24, 15},
        {16, 16}, {0, 16}, {24, 0}, {15, 24},    {17},        {24, 24}};
    for (const auto& found : wrong) {
      ShapeSource source = whole;
      source.shapes[name] = found;
      expect_unresolved(config, source, name);
      expect_unresolved(config, source, shape_text(found));
      expect_unresolved(config, source, shape_text(shape));
    }
  }
}

TEST(ResolveLayer, OrientationComesFromTheModelTypeAlone) {
  const ModelConfig config = config_of("gpt2");
  ShapeSource source = source_of(config.layer_spec(0));
  ASSERT_NO_THROW(resolve_layer(config, 0, source));
  std::swap(source.shapes["transformer.h.0.mlp.c_fc.weight"],
            source.shapes["transformer.h.0.mlp.c_proj.weight"]);
  expect_unresolved(config, source, "stored [in, out]");
  ModelConfig square = config;
  square.intermediate_size = square.hidden_size;
  EXPECT_TRUE(resolve_layer(square, 0, source_of(square.layer_spec(0))).up.transposed);
}

TEST(ResolveLayer, ABiasThatTheConfigDeniesIsRefused) {
  for (const char* type : {"llama", "mistral"}) {
    const ModelConfig config = config_of(type);
    const ShapeSource whole = source_of(config.layer_spec(0));
    ASSERT_NO_THROW(resolve_layer(config, 0, whole));
    for (const char* module : {"gate_proj", "up_proj", "down_proj"}) {
      for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{16}, {0}}) {
        const std::string name = fmt::format("model.layers.0.mlp.{}.bias", module);
        ShapeSource source = whole;
        source.shapes[name] = shape;
        expect_unresolved(config, source, name);
        expect_unresolved(config, source, fmt::format("[{}]", shape[0]));
        expect_unresolved(config, source,
                          type == std::string("llama") ? "--set mlp_bias=true" : "mistral layers");
      }
    }
  }
}

TEST(ResolveLayer, AGateOrABetaThatTheConfigDeniesIsRefused) {
  const ModelConfig config = config_of("gatefold_ffn");
  const ShapeSource whole = source_of(config.layer_spec(0));
  ASSERT_NO_THROW(resolve_layer(config, 0, whole));
  ShapeSource source = whole;
  source.shapes["model.layers.0.mlp.gate_proj.weight"] = {24, 16};
  expect_unresolved(config, source, "--set gated=true");
  source = whole;
  source.shapes["model.layers.0.mlp.swish_beta"] = {};
  expect_unresolved(config, source, "--set swish_beta=true");
}

TEST(ResolveLayer, ALearnableBetaIsAScalarOfEitherShape) {
  ModelConfig config = config_of("gatefold_ffn");
  config.swish_beta = true;
  ShapeSource source = source_of(config.layer_spec(0));
  const std::string name = "model.layers.0.mlp.swish_beta";
  EXPECT_EQ(resolve_layer(config, 0, source).swish_beta, name);
  source.shapes[name] = {1};
  EXPECT_EQ(resolve_layer(config, 0, source).swish_beta, name);
  for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{0}, {2}, {1, 1}}) {
    source.shapes[name] = shape;
    expect_unresolved(config, source, "expected [] or [1]");
  }
  source.shapes.erase(name);
  expect_unresolved(config, source, name);
}

}  // namespace
}  // namespace gatefold
