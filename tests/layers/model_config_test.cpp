#include "layers/model_config.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "config_testing.h"
#include "layers/model_families.h"
#include "runtime/checkpoint.h"
#include "tests/build_paths.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;
using testing::expect_error;
using testing::Overrides;

const fs::path kSource = kSourceFolder;

using ModelConfigTest = testing::ConfigTest;

Json llama() {
  return {{"model_type", "llama"},    {"hidden_size", 16},      {"intermediate_size", 24},
          {"hidden_act", "silu"},     {"num_hidden_layers", 3}, {"vocab_size", 100},
          {"torch_dtype", "bfloat16"}};
}

TEST_F(ModelConfigTest, EveryPublishedConfigHasItsPublishedNumbers) {
  struct Published {
    const char* name;
    std::int64_t hidden, intermediate, layers, vocab, parameters;
    ActivationKind kind;
    DType dtype = DType::kBf16;
  };
  const std::vector<Published> table = {
      {"all-minilm-l6-v2", 384, 1536, 6, 30522, 2 * 384 * 1536 + 1536 + 384,
       ActivationKind::kGeluExact, DType::kF32},
      {"bert-base-uncased", 768, 3072, 12, 30522, 2 * 768 * 3072 + 3072 + 768,
       ActivationKind::kGeluExact, DType::kF32},
      {"gemma-3-270m", 640, 2048, 18, 262144, 3932160, ActivationKind::kGeluTanh},
      {"gpt2", 768, 3072, 12, 50257, 2 * 768 * 3072 + 3072 + 768, ActivationKind::kGeluTanh,
       DType::kF32},
      {"gpt2-large", 1280, 5120, 36, 50257, 2 * 1280 * 5120 + 5120 + 1280,
       ActivationKind::kGeluTanh, DType::kF32},
      {"gpt2-medium", 1024, 4096, 24, 50257, 2 * 1024 * 4096 + 4096 + 1024,
       ActivationKind::kGeluTanh, DType::kF32},
      {"gpt2-xl", 1600, 6400, 48, 50257, 2 * 1600 * 6400 + 6400 + 1600, ActivationKind::kGeluTanh,
       DType::kF32},
      {"llama-3.1-405b", 16384, 53248, 126, 128256, 2617245696, ActivationKind::kSilu},
      {"llama-3.1-70b", 8192, 28672, 80, 128256, 704643072, ActivationKind::kSilu},
      {"llama-3.1-8b", 4096, 14336, 32, 128256, 176160768, ActivationKind::kSilu},
      {"llama-3.2-1b", 2048, 8192, 16, 128256, 50331648, ActivationKind::kSilu},
      {"llama-3.2-3b", 3072, 8192, 28, 128256, 75497472, ActivationKind::kSilu},
      {"opt-1.3b", 2048, 8192, 24, 50272, 33564672, ActivationKind::kRelu, DType::kF16},
      {"opt-125m", 768, 3072, 12, 50272, 4722432, ActivationKind::kRelu, DType::kF16},
      {"opt-13b", 5120, 20480, 40, 50272, 209740800, ActivationKind::kRelu, DType::kF16},
      {"opt-30b", 7168, 28672, 48, 50272, 411077632, ActivationKind::kRelu, DType::kF16},
      {"opt-350m", 1024, 4096, 24, 50272, 8393728, ActivationKind::kRelu, DType::kF16},
      {"opt-6.7b", 4096, 16384, 32, 50272, 134238208, ActivationKind::kRelu, DType::kF16},
      {"opt-66b", 9216, 36864, 64, 50272, 679523328, ActivationKind::kRelu, DType::kF16},
      {"qwen2.5-0.5b", 896, 4864, 24, 151936, 13074432, ActivationKind::kSilu},
      {"qwen3-0.6b", 1024, 3072, 28, 151936, 9437184, ActivationKind::kSilu},
      {"qwen3-1.7b", 2048, 6144, 28, 151936, 37748736, ActivationKind::kSilu},
      {"qwen3-14b", 5120, 17408, 40, 151936, 267386880, ActivationKind::kSilu},
      {"qwen3-32b", 5120, 25600, 64, 151936, 393216000, ActivationKind::kSilu},
      {"qwen3-4b", 2560, 9728, 36, 151936, 74711040, ActivationKind::kSilu},
      {"qwen3-8b", 4096, 12288, 36, 151936, 150994944, ActivationKind::kSilu},
      {"qwen3.5-0.8b", 1024, 3584, 24, 248320, 11010048, ActivationKind::kSilu},
      {"qwen3.5-27b", 5120, 17408, 64, 248320, 267386880, ActivationKind::kSilu},
      {"qwen3.5-4b", 2560, 9216, 32, 248320, 70778880, ActivationKind::kSilu},
      {"qwen3.5-9b", 4096, 12288, 32, 248320, 150994944, ActivationKind::kSilu},
      {"smollm2-135m", 576, 1536, 30, 49152, 2654208, ActivationKind::kSilu},
  };
  std::size_t files = 0;
  for (const auto& file : fs::directory_iterator(kSource / "configs")) {
    if (file.path().extension() != ".json") continue;
    if (!read_model_config(file.path().string()).moe) ++files;
  }
  EXPECT_EQ(files, table.size()) << "every dense config belongs in this table";
  for (const Published& row : table) {
    SCOPED_TRACE(row.name);
    const ModelConfig config =
        read_model_config((kSource / "configs" / fmt::format("{}.json", row.name)).string());
    EXPECT_EQ(config.hidden_size, row.hidden);
    EXPECT_EQ(config.intermediate_size, row.intermediate);
    EXPECT_EQ(config.num_layers, row.layers);
    EXPECT_EQ(config.vocab_size, row.vocab);
    EXPECT_EQ(config.dtype, row.dtype);
    EXPECT_EQ(config.activation.kind, row.kind);
    EXPECT_EQ(config.layer_spec(row.layers - 1).parameters(), row.parameters);
  }
}

TEST_F(ModelConfigTest, EveryGoldenCheckpointResolvesInAllItsLayers) {
  std::size_t dense_layers = 0;
  std::size_t mixtures = 0;
  for (const auto& family : fs::directory_iterator(kSource / "tests" / "golden")) {
    for (const char* dtype : {"f32", "bf16"}) {
      const fs::path directory = family.path() / dtype;
      if (!fs::exists(directory)) continue;
      SCOPED_TRACE(directory.string());
      const ModelConfig config = read_model_config((directory / "config.json").string());
      EXPECT_EQ(config.hidden_size, config.moe ? 72 : 48);
      EXPECT_EQ(name_of(config.dtype), dtype);
      const Checkpoint source(directory.string());
      for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
        if (config.is_moe(layer)) {
          EXPECT_EQ(resolve_moe(config, layer, source).intermediate_size(), 32);
          ++mixtures;
          continue;
        }
        if (!config.moe) {
          EXPECT_EQ(config.intermediate_size, 80);
        }
        const FfnSpec spec = resolve_layer(config, layer, source);
        EXPECT_EQ(spec.up.name, config.layer_spec(layer).up.name) << "the canonical names";
        ++dense_layers;
      }
    }
  }
  EXPECT_EQ(dense_layers, 48U + 11U) << "of dense families, and of mixtures";
  EXPECT_EQ(mixtures, 25U);
}

TEST_F(ModelConfigTest, ARealModelsLayerResolves) {
  const fs::path directory = kSource / "tests" / "fixtures" / "smollm2-135m-instruct";
  const ModelConfig config = read_model_config((directory / "config.json").string());
  const FfnSpec spec = resolve_layer(config, 0, Checkpoint(directory.string()));
  EXPECT_EQ(spec.parameters(), 3 * 576 * 1536);
}

TEST_F(ModelConfigTest, Gpt2HasItsOwnFieldNames) {
  const ModelConfig config =
      read(Json{{"model_type", "gpt2"}, {"n_embd", 16}, {"n_inner", nullptr}, {"n_layer", 2}});
  EXPECT_EQ(config.hidden_size, 16);
  EXPECT_EQ(config.intermediate_size, 64) << "n_inner null means 4 n_embd";
  EXPECT_EQ(config.num_layers, 2);
  EXPECT_EQ(config.activation.kind, ActivationKind::kGeluTanh);
  EXPECT_FALSE(config.activation.gated);
  EXPECT_TRUE(config.bias);
  expect_error(ExitCode::kData, "no n_embd", [&] {
    read(Json{{"model_type", "gpt2"}, {"hidden_size", 16}, {"n_layer", 2}});
  });
}

TEST_F(ModelConfigTest, BertIsExactGeluWithBiases) {
  Json json = llama();
  json["model_type"] = "bert";
  json.erase("hidden_act");
  const ModelConfig config = read(json);
  EXPECT_EQ(config.activation.kind, ActivationKind::kGeluExact);
  EXPECT_EQ(config.layer_spec(0).parameters(), 2 * 16 * 24 + 16 + 24);
}

TEST_F(ModelConfigTest, OptHasItsOwnFieldNamesAndBiasesUnlessItDeniesThem) {
  Json json{{"model_type", "opt"}, {"hidden_size", 16}, {"ffn_dim", 24}, {"num_hidden_layers", 2}};
  const ModelConfig config = read(json);
  EXPECT_EQ(config.intermediate_size, 24);
  EXPECT_EQ(config.activation.kind, ActivationKind::kRelu);
  EXPECT_FALSE(config.activation.gated);
  EXPECT_EQ(config.layer_spec(1).parameters(), 2 * 16 * 24 + 24 + 16);
  json["enable_bias"] = false;
  json["activation_function"] = "gelu";
  EXPECT_EQ(read(json).layer_spec(1).parameters(), 2 * 16 * 24);
  EXPECT_EQ(read(json).activation.kind, ActivationKind::kGeluExact);
  json.erase("ffn_dim");
  json["intermediate_size"] = 24;
  expect_error(ExitCode::kData, "no ffn_dim", [&] { read(json); });
  expect_error(ExitCode::kUsage, "no such field of opt models", [&] {
    read(json, {{"intermediate_size", "24"}});
  });
}

TEST_F(ModelConfigTest, TheLadderModelTypeHasItsDefaults) {
  const ModelConfig plain = read(Json{{"model_type", "gatefold_ffn"}, {"hidden_size", 100}});
  EXPECT_EQ(plain.intermediate_size, 400);
  EXPECT_EQ(plain.num_layers, 1);
  EXPECT_EQ(plain.dtype, DType::kF32);
  EXPECT_FALSE(plain.activation.gated || plain.bias || plain.swish_beta);
  const std::vector<StoredTensor> tensors = stored_tensors(plain.layer_spec(0));
  ASSERT_EQ(tensors.size(), 2U);
  EXPECT_EQ(tensors[0].name, "model.layers.0.mlp.up_proj.weight");

  const ModelConfig gated = read(Json{{"model_type", "gatefold_ffn"},
                                      {"hidden_size", 100},
                                      {"gated", true},
                                      {"bias", true},
                                      {"swish_beta", true},
                                      {"activation", "silu"}});
  EXPECT_EQ(gated.intermediate_size, 272) << "8/3 * 100 = 266.7, rounded up to a multiple of 8";
  const FfnSpec spec = gated.layer_spec(0);
  EXPECT_EQ(spec.swish_beta, "model.layers.0.mlp.swish_beta");
  EXPECT_EQ(spec.parameters(), 3 * 100 * 272 + 2 * 272 + 100 + 1);
  EXPECT_EQ(stored_tensors(spec).size(), 7U);
  EXPECT_TRUE(stored_tensors(spec).back().shape.empty());

  const ModelConfig clamped = read(Json{{"model_type", "gatefold_ffn"},
                                        {"hidden_size", 8},
                                        {"gated", true},
                                        {"activation", "clamped_swiglu"},
                                        {"swiglu_limit", 5},
                                        {"swiglu_alpha", 1.5}});
  EXPECT_EQ(clamped.activation.kind, ActivationKind::kClampedSwiglu);
  EXPECT_EQ(clamped.activation.limit, 5.0F);
  EXPECT_EQ(clamped.activation.alpha, 1.5F);
}

TEST_F(ModelConfigTest, ActivationNamesMeanWhatTransformersMeans) {
  const std::vector<std::pair<const char*, ActivationKind>> names = {
      {"silu", ActivationKind::kSilu},         {"swish", ActivationKind::kSilu},
      {"gelu", ActivationKind::kGeluExact},    {"gelu_pytorch_tanh", ActivationKind::kGeluTanh},
      {"gelu_new", ActivationKind::kGeluTanh}, {"quick_gelu", ActivationKind::kQuickGelu},
      {"relu", ActivationKind::kRelu},         {"relu2", ActivationKind::kRelu2}};
  for (const auto& [name, kind] : names) {
    Json json = llama();
    json["hidden_act"] = name;
    EXPECT_EQ(read(json).activation.kind, kind) << name;
  }
}

TEST_F(ModelConfigTest, GemmasLegacyGeluMeansTanh) {
  Json gemma = llama();
  gemma["model_type"] = "gemma3_text";
  gemma["hidden_act"] = "gelu";
  EXPECT_EQ(read(gemma).activation.kind, ActivationKind::kGeluTanh);
  gemma["hidden_act"] = "gelu_pytorch_tanh";
  EXPECT_EQ(read(gemma).activation.kind, ActivationKind::kGeluTanh);
  gemma.erase("hidden_act");
  EXPECT_EQ(read(gemma).activation.kind, ActivationKind::kGeluTanh);
  gemma["hidden_activation"] = "gelu";
  EXPECT_EQ(read(gemma).activation.kind, ActivationKind::kGeluExact) << "the new field is exact";
  gemma["hidden_act"] = "silu";
  EXPECT_EQ(read(gemma).activation.kind, ActivationKind::kGeluExact) << "and it decides";
  gemma.erase("hidden_activation");
  expect_error(ExitCode::kData, "hidden_activation", [&] { read(gemma); });
}

TEST_F(ModelConfigTest, DtypeComesFromEitherFieldAndEitherLevel) {
  Json json = llama();
  EXPECT_EQ(read(json).dtype, DType::kBf16);
  json["dtype"] = "float16";
  EXPECT_EQ(read(json).dtype, DType::kF16) << "the new spelling wins";
  json["dtype"] = "torch.float32";
  EXPECT_EQ(read(json).dtype, DType::kF32);
  json.erase("dtype");
  json["torch_dtype"] = nullptr;
  EXPECT_EQ(read(json).dtype, DType::kF32);
  Json inner = llama();
  inner.erase("torch_dtype");
  EXPECT_EQ(read(Json{{"text_config", inner}, {"dtype", "bfloat16"}}).dtype, DType::kBf16);
}

TEST_F(ModelConfigTest, BadConfigsAreRefusedWithTheFieldAndItsValue) {
  struct Bad {
    const char* field;
    Json value;  // discarded: the field is erased
    const char* word;
  };
  const Json gone(Json::value_t::discarded);
  const std::vector<Bad> table = {
      {"hidden_size", gone, "no hidden_size"},
      {"hidden_size", nullptr, "no hidden_size"},
      {"hidden_size", "16", "hidden_size is \"16\" (not an integer)"},
      {"hidden_size", 1.5, "hidden_size is 1.5 (not an integer)"},
      {"hidden_size", 16.0, "hidden_size is 16.0 (not an integer)"},
      {"hidden_size", true, "hidden_size is true (not an integer)"},
      {"hidden_size", Json::array({16}), "hidden_size is [16] (not an integer)"},
      {"hidden_size", Json::object(), "hidden_size is {} (not an integer)"},
      {"hidden_size", 0, "hidden_size is 0 (must be positive)"},
      {"hidden_size", -16, "hidden_size is -16 (must be positive)"},
      {"hidden_size", INT64_MIN, "must be positive"},
      {"hidden_size", 1e300, "hidden_size is 1e+300"},
      {"hidden_size", UINT64_MAX, "hidden_size is 18446744073709551615 (absurd"},
      {"hidden_size", 1000000000000, "hidden_size is 1000000000000 (absurd"},
      {"hidden_size", (std::int64_t{1} << 31) + 1, "absurd"},
      {"hidden_size", std::int64_t{1} << 31, ""},  // not too large by itself
      {"hidden_size", std::string(5000, 'x'), "..."},
      {"intermediate_size", gone, "no intermediate_size"},
      {"intermediate_size", "wide", "intermediate_size is \"wide\""},
      {"intermediate_size", 0, "intermediate_size is 0"},
      {"intermediate_size", std::int64_t{1} << 62, "absurd"},
      {"num_hidden_layers", gone, "no num_hidden_layers"},
      {"num_hidden_layers", 100001, "num_hidden_layers is 100001 (absurd"},
      {"num_hidden_layers", -1, "num_hidden_layers is -1"},
      {"vocab_size", "many", "vocab_size is \"many\""},
      {"vocab_size", 1000000000000, "absurd"},
      {"mlp_bias", 1, "mlp_bias is 1 (not true or false)"},
      {"mlp_bias", "true", "mlp_bias is \"true\""},
      {"hidden_act", 3, "hidden_act is 3 (not a string)"},
      {"hidden_act", "sillu", "unknown hidden_act \"sillu\" (known: "},
      {"hidden_act", "sillu", "gelu_pytorch_tanh"},
      {"hidden_act", "", "unknown hidden_act"},
      {"model_type", gone, "no model_type"},
      {"model_type", 7, "model_type is 7 (not a string)"},
      {"model_type", "lama", "unknown model_type \"lama\" (known: llama, mistral"},
      {"torch_dtype", "float64", "torch_dtype is \"float64\" (known: float32, bfloat16, float16)"},
      {"torch_dtype", 16, "torch_dtype is 16"},
      {"text_config", "inner", "text_config is \"inner\" (not an object)"},
      {"num_experts", 8, "num_experts is 8 (a mixture of experts, which llama models are not)"},
      {"num_local_experts", 8, "which llama models are not"},
      {"n_routed_experts", 64, "which llama models are not"},
      {"num_experts", "8", "num_experts is \"8\""},
      {"model_type", "mixtral", "no num_local_experts"},
      {"model_type", "deepseek_v3", "no n_routed_experts"},
  };
  for (const Bad& bad : table) {
    const std::string what =
        fmt::format("{} = {}", bad.field, bad.value.is_discarded() ? "gone" : bad.value.dump());
    Json json = llama();
    if (bad.value.is_discarded()) {
      json.erase(bad.field);
    } else {
      json[bad.field] = bad.value;
    }
    if (std::string(bad.word).empty()) {
      EXPECT_NO_THROW(read(json)) << what;
      continue;
    }
    expect_error(
        ExitCode::kData, bad.word, [&] { read(json); }, what);
    expect_error(
        ExitCode::kData, "config.json", [&] { read(json); }, what);
  }
}

TEST_F(ModelConfigTest, AProductOfSizesBeyondSixtyTwoBitsIsAbsurd) {
  Json json = llama();
  json["hidden_size"] = std::int64_t{1} << 31;
  json["intermediate_size"] = std::int64_t{1} << 31;
  expect_error(ExitCode::kData, "absurd", [&] { read(json); });
  json["intermediate_size"] = 1;
  json["vocab_size"] = std::int64_t{1} << 31;
  expect_error(ExitCode::kData, "--set vocab_size=VALUE", [&] { read(json); });
  json["vocab_size"] = 1;
  expect_error(ExitCode::kUsage, "vocab_size 2147483648 is absurd", [&] {
    read(json, {{"vocab_size", "2147483648"}});
  });
  json["hidden_size"] = std::int64_t{1} << 26;
  json["intermediate_size"] = std::int64_t{1} << 26;
  const ModelConfig config = read(json);
  EXPECT_EQ(config.layer_spec(0).parameters(), 3 * (std::int64_t{1} << 52));
}

TEST_F(ModelConfigTest, TextThatIsNoConfigIsRefused) {
  const std::vector<std::pair<std::string, std::string>> table = {
      {"", "not JSON"},
      {"{", "not JSON"},
      {"{\"hidden_size\": 16,}", "not JSON"},
      {"{\"hidden_size\": NaN}", "not JSON"},
      {"{\"hidden_size\": Infinity}", "not JSON"},
      {"{\"hidden_size\": 16} x", "not JSON"},
      {"{\"model_type\": \"\xff\xfe\"}", "not JSON"},
      {"model_type: llama", "not JSON"},
      {"[]", "the top level is array []"},
      {"null", "the top level is null"},
      {"\"llama\"", "the top level is string"},
      {"16", "the top level is number"},
      {std::string(200000, '['), "nested deeper than 64"},
      {"{\"a\":" + std::string(200000, '[') + std::string(200000, ']') + "}", "nested deeper"},
      {"\xef\xbb\xbf{}", "byte order mark"},
      {std::string("{}\0", 3), "NUL"},
      {"{\"hidden_size\": 16, \"hidden_size\": 32}", "'hidden_size' is there twice"},
      {std::string(std::size_t{17} << 20, ' '), "larger than"}};
  for (const auto& [text, word] : table) {
    expect_error(
        ExitCode::kData, word, [&] { read_text(text); }, text.substr(0, 40));
  }
  std::string deep = "[]";
  for (int i = 0; i < 30; ++i) deep = fmt::format("{{\"a\":[{}]}}", deep);
  Json json = llama();
  json["note"] = Json::parse(deep);
  EXPECT_NO_THROW(read(json)) << "61 levels";
}

TEST_F(ModelConfigTest, ANestedModelIsChangedFieldByField) {
  Json inner = llama();
  const Json outer{{"text_config", inner}};
  for (const char* value : {"5", "null", "{}", "[]", "x"}) {
    expect_error(
        ExitCode::kUsage, "no such field",
        [&] {
          read(outer, {{"text_config", value}, {"hidden_size", "64"}});
        },
        value);
  }
  expect_error(ExitCode::kUsage, "no such field", [&] { read(inner, {{"text_config", "5"}}); });
}

TEST_F(ModelConfigTest, APathThatCantBeOpenedIsItsOwnError) {
  expect_error(ExitCode::kNoInput, "No such file",
               [&] { read_model_config((directory_ / "none.json").string()); });
  expect_error(ExitCode::kNoInput, "directory", [&] { read_model_config(directory_.string()); });
  const std::string fifo = (directory_ / "fifo").string();
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  expect_error(ExitCode::kNoInput, "not a regular file", [&] { read_model_config(fifo); });
}

TEST_F(ModelConfigTest, OverridesReplaceFields) {
  const ModelConfig config = read(llama(), {{"hidden_size", "128"},
                                            {"num_hidden_layers", "2"},
                                            {"mlp_bias", "true"},
                                            {"hidden_act", "gelu"},
                                            {"torch_dtype", "float16"}});
  EXPECT_EQ(config.hidden_size, 128);
  EXPECT_EQ(config.intermediate_size, 24);
  EXPECT_EQ(config.num_layers, 2);
  EXPECT_TRUE(config.bias);
  EXPECT_EQ(config.activation.kind, ActivationKind::kGeluExact);
  EXPECT_EQ(config.dtype, DType::kF16);
  EXPECT_EQ(read(llama(), {{"hidden_size", "8"}, {"hidden_size", "9"}}).hidden_size, 9)
      << "the last one wins";
  EXPECT_EQ(read(llama(), {{"hidden_act", "\"relu\""}}).activation.kind, ActivationKind::kRelu);
  EXPECT_EQ(read(llama(), {{"vocab_size", "null"}}).vocab_size, 0);
  EXPECT_EQ(read(llama(), {{"n_layer", "5"}, {"n_embd", "8"}, {"model_type", "gpt2"}}).num_layers,
            5)
      << "the new family's fields, wherever model_type stands";

  Json v5 = llama();
  v5["dtype"] = "float16";
  EXPECT_EQ(read(v5, {{"torch_dtype", "float32"}}).dtype, DType::kF32) << "either spelling";
  EXPECT_EQ(read(llama(), {{"dtype", "float32"}}).dtype, DType::kF32);

  Json mixture = llama();
  mixture["num_local_experts"] = 8;
  EXPECT_NO_THROW(read(mixture, {{"num_local_experts", "0"}}));
}

TEST_F(ModelConfigTest, OverridesOfANestedConfigGoInside) {
  const std::string path = (kSource / "configs" / "qwen3.5-0.8b.json").string();
  const ModelConfig config = read_model_config(
      path, {{"hidden_size", "256"}, {"dtype", "float16"}, {"num_hidden_layers", "3"}});
  EXPECT_EQ(config.hidden_size, 256);
  EXPECT_EQ(config.num_layers, 3);
  const Json json = Json::parse(config.canonical_text);
  EXPECT_EQ(json["text_config"]["hidden_size"], 256);
  EXPECT_EQ(json["vision_config"]["hidden_size"], 768) << "the vision tower keeps its own";
  EXPECT_EQ(config.dtype, DType::kF16) << "whatever the top level says";
  EXPECT_FALSE(json.contains("hidden_size"));
}

TEST_F(ModelConfigTest, QuantizationIsReadAtEitherLevelAndCanBeTakenAway) {
  EXPECT_FALSE(read(llama()).quantization.has_value());
  const Json fp8{{"quant_method", "fp8"}, {"weight_block_size", {64, 32}}};
  Json config = llama();
  config["quantization_config"] = fp8;
  const Overrides without{{"quantization_config", "null"}};
  for (const Json& json : {config, Json{{"text_config", config}},
                           Json{{"text_config", llama()}, {"quantization_config", fp8}}}) {
    const auto read_back = read(json).quantization.value();
    EXPECT_EQ(read_back.method, "fp8");
    EXPECT_EQ(read_back.block_rows, 64);
    EXPECT_EQ(read_back.block_columns, 32);
    const ModelConfig plain = read(json, without);
    EXPECT_FALSE(plain.quantization.has_value());
    EXPECT_THAT(plain.canonical_text, Not(HasSubstr("quant_method")));
  }
  config["quantization_config"] = {{"quant_method", "fp8"}, {"weight_block_size", nullptr}};
  EXPECT_EQ(read(config).quantization->block_columns, 128);
  config["quantization_config"] = Json::object();
  EXPECT_EQ(read(config).quantization->method, "");
  for (const Json& bad : {Json(5), Json{{"quant_method", 8}},
                          Json{{"quant_method", "fp8"}, {"weight_block_size", {128, 0}}},
                          Json{{"quant_method", "fp8"}, {"weight_block_size", {128}}},
                          Json{{"quant_method", "fp8"}, {"weight_block_size", {1.5, 1.5}}},
                          Json{{"quant_method", "fp8"}, {"weight_block_size", {1ULL << 63, 1}}}}) {
    config["quantization_config"] = bad;
    expect_error(
        ExitCode::kData, "quantization_config", [&] { read(config); }, bad.dump());
  }
}

TEST_F(ModelConfigTest, BadOverridesAreUsageErrors) {
  const auto expect_usage = [&](const std::string& key, const std::string& value,
                                const std::string& word) {
    expect_error(
        ExitCode::kUsage, word,
        [&] {
          read(llama(), {{key, value}});
        },
        key + "=" + value);
  };
  expect_usage("hiden_size", "8", "--set hiden_size=8: no such field");
  expect_usage("hiden_size", "8", "hidden_size");
  expect_usage("", "8", "no such field");
  expect_usage("n_embd", "8", "no such field");
  expect_usage("swiglu_limit", "8", "no such field");
  expect_usage("hidden_size", "wide", "hidden_size is \"wide\"");
  expect_usage("hidden_size", "0", "hidden_size is 0");
  expect_usage("hidden_size", "NaN", "hidden_size is \"NaN\"");
  expect_usage("hidden_size", "", "hidden_size is \"\"");
  expect_usage("hidden_size", std::string(100000, '['), "not an integer");
  expect_usage("hidden_size", "2000000000000", "absurd");
  expect_usage("hidden_act", "sillu", "unknown hidden_act");
  expect_usage("hidden_act", "\xff", "unknown hidden_act");
  expect_usage("model_type", "lama", "known: llama");
  expect_usage("mlp_bias", "yes", "mlp_bias is \"yes\"");
}

TEST_F(ModelConfigTest, AnOverrideThatNothingReadsIsRefusedEvenWhereTheFileHasTheField) {
  const auto refused = [&](Json json, const std::string& key, const std::string& says) {
    json[key] = "x";
    expect_error(
        ExitCode::kUsage, says,
        [&] {
          read(json, {{key, "y"}});
        },
        key);
  };
  refused(llama(), "rope_theta", "set one of model_type, vocab_size");
  refused(llama(), "activation", "no such field of llama models");
  Json gemma = llama();
  gemma["model_type"] = "gemma3_text";
  gemma["hidden_activation"] = "gelu";
  refused(gemma, "hidden_act", "hidden_activation");
  refused(Json{{"text_config", llama()}}, "image_token_id", "no such field");
  // Read to count the parameters of the whole model.
  EXPECT_NO_THROW(read(llama(), {{"num_attention_heads", "4"}, {"tie_word_embeddings", "true"}}));
}

TEST_F(ModelConfigTest, ALadderNamesItsActivationItself) {
  Json ladder = {{"model_type", "gatefold_ffn"}, {"hidden_size", 8}, {"hidden_act", "relu"}};
  expect_error(ExitCode::kData, "hidden_act is \"relu\" without activation", [&] { read(ladder); });
  ladder["hidden_act"] = "gelu";
  expect_error(ExitCode::kData, "hidden_act is \"gelu\" without activation", [&] { read(ladder); });
  expect_error(ExitCode::kData, "or --set activation=gelu", [&] { read(ladder); });
  EXPECT_NO_THROW(read(ladder, {{"activation", "gelu"}}));
  ladder["hidden_act"] = "silu";
  EXPECT_EQ(read(ladder).activation.kind, ActivationKind::kSilu) << "as without it";
  ladder["hidden_act"] = "gelu";
  ladder["activation"] = "relu";
  EXPECT_EQ(read(ladder).activation.kind, ActivationKind::kRelu) << "the own field decides";
}

TEST_F(ModelConfigTest, BadLadderConfigsAreRefused) {
  const Json base = {{"model_type", "gatefold_ffn"}, {"hidden_size", 8}};
  const auto expect_bad = [&](Json more, const std::string& word) {
    Json json = base;
    json.update(more);
    expect_error(ExitCode::kData, word, [&] { read(json); });
  };
  expect_bad({{"gated", "yes"}}, "gated is \"yes\"");
  expect_bad({{"activation", "clamped_swiglu"}}, "without a gate");
  expect_bad({{"gated", true}, {"activation", "clamped_swiglu"}, {"swiglu_limit", 0}},
             "swiglu_limit is 0");
  expect_bad({{"gated", true}, {"activation", "clamped_swiglu"}, {"swiglu_alpha", "x"}},
             "swiglu_alpha is \"x\"");
  expect_bad({{"gated", true}, {"activation", "clamped_swiglu"}, {"swiglu_limit", 1e200}},
             "swiglu_limit is 1e+200");
  expect_bad({{"activation", "relu"}, {"swish_beta", true}}, "isn't silu");
  expect_bad({{"gated", true}, {"swiglu_limit", 7}}, "swiglu_limit is there with activation");
  expect_bad({{"gated", true}, {"swiglu_alpha", 2}}, "only clamped_swiglu has it");
  expect_bad({{"swish_beta", 1.5}}, "swish_beta is 1.5");
}

TEST_F(ModelConfigTest, TheCanonicalTextReadsBackAsTheSameConfig) {
  const std::string path = (kSource / "configs" / "qwen3.5-0.8b.json").string();
  const Overrides overrides = {{"hidden_size", "64"}, {"hidden_act", "gelu"}, {"dtype", "float16"}};
  const ModelConfig first = read_model_config(path, overrides);
  const ModelConfig second = read_text(first.canonical_text);
  EXPECT_EQ(second.canonical_text, first.canonical_text);
  EXPECT_EQ(second.hidden_size, 64);
  EXPECT_EQ(second.dtype, DType::kF16);
  EXPECT_EQ(second.activation.kind, ActivationKind::kGeluExact);
  EXPECT_EQ(read_text(R"({"model_type":"llama","hidden_size":2,"intermediate_size":2,
                     "num_hidden_layers":1})")
                .canonical_text,
            read_text(R"({"num_hidden_layers": 1, "intermediate_size": 2, "hidden_size": 2,
                     "model_type": "llama"})")
                .canonical_text)
      << "key order and spaces don't matter";
}

TEST_F(ModelConfigTest, ALayerThatDoesntExistIsAUsageError) {
  const ModelConfig config = read(llama());
  expect_error(ExitCode::kUsage, "layers 0 to 2", [&] { (void)config.layer_spec(3); });
  expect_error(ExitCode::kUsage, "layer -1", [&] { (void)config.layer_spec(-1); });
}

}  // namespace
}  // namespace gatefold
