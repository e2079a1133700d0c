#include "layers/model_families.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "layers/model_config.h"
#include "runtime/error.h"

namespace gatefold {

const std::vector<ModelFamily>& model_families() {
  // Wrappers of a text model (vision-language checkpoints, say) put its modules one level deeper.
  static const std::vector<std::string_view> text_prefixes = {"model.", "", "model.language_model.",
                                                              "language_model.model."};
  static const std::vector<std::string_view> decoder_keys = {
      "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias",
      "tie_word_embeddings"};
  static const std::vector<ModelFamily> families = {
      {.model_types = {"llama"},
       .bias = {.key = "mlp_bias", .otherwise = false},
       .whole_model_keys = decoder_keys,
       .prefixes = text_prefixes},
      {.model_types = {"mistral", "qwen2", "qwen3"},
       .whole_model_keys = decoder_keys,
       .prefixes = text_prefixes},
      {.model_types = {"qwen3_5", "qwen3_5_text"},
       .prefixes = {"model.language_model.", "model.", "", "language_model.model."}},
      {.model_types = {"gemma3_text"},
       .activation_key = "hidden_activation",
       .default_activation = "gelu_pytorch_tanh",
       .legacy_activation_key = "hidden_act",
       .whole_model_keys = decoder_keys,
       .prefixes = text_prefixes},
      {.model_types = {"phi3"},
       .whole_model_keys = decoder_keys,
       .layout = WeightLayout::kFusedGateUp,
       .gate = "layers.{}.mlp.gate_up_proj",
       .up = "layers.{}.mlp.gate_up_proj"},
      {.model_types = {"gpt2"},
       .hidden_size_key = "n_embd",
       .intermediate_size_key = "n_inner",
       .intermediate_default = IntermediateDefault::kFourTimesHidden,
       .num_layers_key = "n_layer",
       .activation_key = "activation_function",
       .default_activation = "gelu_new",
       .gated = kNever,
       .bias = kAlways,
       .whole_model_keys = {"n_positions"},
       .layout = WeightLayout::kTransposed,
       .gate = {},
       .up = "h.{}.mlp.c_fc",
       .down = "h.{}.mlp.c_proj",
       .prefixes = {"transformer.", ""}},
      {.model_types = {"bert"},
       .default_activation = "gelu",
       .gated = kNever,
       .bias = kAlways,
       .gate = {},
       .up = "encoder.layer.{}.intermediate.dense",
       .down = "encoder.layer.{}.output.dense",
       .prefixes = {"bert.", ""}},
      {.model_types = {"gatefold_ffn"},
       .intermediate_default = IntermediateDefault::kLadder,
       .default_num_layers = 1,
       .activation_key = "activation",
       .legacy_activation_key = "hidden_act",
       .gated = {.key = "gated", .otherwise = false},
       .bias = {.key = "bias", .otherwise = false},
       .swish_beta = {.key = "swish_beta", .otherwise = false},
       .clamp_limit_key = "swiglu_limit",
       .clamp_alpha_key = "swiglu_alpha",
       .beta = "layers.{}.mlp.swish_beta"},
  };
  return families;
}

const ModelFamily* find_family(std::string_view model_type) {
  for (const ModelFamily& family : model_families()) {
    if (std::ranges::find(family.model_types, model_type) != family.model_types.end()) {
      return &family;
    }
  }
  return nullptr;
}

std::string known_model_types() {
  std::string names;
  for (const ModelFamily& family : model_families()) {
    for (const std::string_view type : family.model_types) {
      names.append(names.empty() ? "" : ", ").append(type);
    }
  }
  return names;
}

bool is_moe_model_type(std::string_view model_type) {
  static const std::vector<std::string_view> types = {
      "mixtral",      "qwen2_moe",   "qwen3_moe",        "qwen3_next",
      "qwen3_vl_moe", "qwen3_5_moe", "qwen3_5_moe_text", "olmoe",
      "deepseek",     "deepseek_v2", "deepseek_v3",      "kimi_k2",
      "glm4_moe",     "gpt_oss",     "llama4",           "llama4_text",
      "granitemoe",   "phimoe",      "minimax_m2",       "deepseek_v4",
      "mimo_v2",      "dbrx",        "kimi_k25",         "switch_transformers"};
  return std::ranges::find(types, model_type) != types.end();
}

const std::vector<std::string_view>& expert_count_keys() {
  static const std::vector<std::string_view> keys = {"num_experts", "num_local_experts",
                                                     "n_routed_experts"};
  return keys;
}

std::string layer_name(std::string_view prefix, std::string_view pattern, std::int64_t layer) {
  const std::size_t hole = pattern.find("{}");
  return fmt::format("{}{}{}{}", prefix, pattern.substr(0, hole), layer, pattern.substr(hole + 2));
}

const ModelFamily& family_of(const ModelConfig& config) {
  const ModelFamily* family = find_family(config.model_type);
  if (family == nullptr) {
    throw Error(ExitCode::kData, fmt::format("{}: unknown model_type \"{}\" (known: {}); check it",
                                             config.path, config.model_type, known_model_types()));
  }
  return *family;
}

FfnSpec layer_under_prefix(const ModelConfig& config, std::int64_t layer, std::string_view prefix) {
  if (layer < 0 || layer >= config.num_layers) {
    throw Error(ExitCode::kUsage,
                fmt::format("layer {} doesn't exist ({} has layers 0 to {}); choose another", layer,
                            config.path, config.num_layers - 1));
  }
  const ModelFamily& family = family_of(config);
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t inner = config.intermediate_size;
  const bool gated = config.activation.gated;
  const bool transposed = family.layout == WeightLayout::kTransposed;
  const std::int64_t fused = family.layout == WeightLayout::kFusedGateUp && gated ? inner : 0;
  const auto ref = [&](std::string_view module, const char* suffix, std::int64_t offset,
                       std::int64_t rows) {
    return TensorRef{.name = layer_name(prefix, module, layer) + suffix,
                     .transposed = transposed && suffix == std::string_view(".weight"),
                     .row_offset = offset,
                     .stored_rows = rows};
  };

  FfnSpec spec;
  spec.layer = layer;
  spec.hidden_size = hidden;
  spec.intermediate_size = inner;
  spec.activation = config.activation;
  if (gated) spec.gate = ref(family.gate, ".weight", 0, inner + fused);
  spec.up = ref(family.up, ".weight", fused, inner + fused);
  spec.down = ref(family.down, ".weight", 0, hidden);
  if (config.bias) {
    if (gated) spec.gate_bias = ref(family.gate, ".bias", 0, inner + fused);
    spec.up_bias = ref(family.up, ".bias", fused, inner + fused);
    spec.down_bias = ref(family.down, ".bias", 0, hidden);
  }
  if (config.swish_beta) spec.swish_beta = layer_name(prefix, family.beta, layer);
  return spec;
}

std::vector<StoredTensor> stored_tensors(const FfnSpec& spec) {
  std::vector<StoredTensor> tensors;
  const auto add = [&](const TensorRef& ref, TensorRole role, std::int64_t cols) {
    const auto same = [&](const StoredTensor& tensor) { return tensor.name == ref.name; };
    if (std::ranges::any_of(tensors, same)) return;
    StoredTensor tensor{.name = ref.name, .shape = {ref.stored_rows}, .role = role, .fan_in = 1};
    if (role == TensorRole::kWeight) {
      tensor.shape.push_back(cols);
      tensor.fan_in = cols;
      if (ref.transposed) std::swap(tensor.shape[0], tensor.shape[1]);
    }
    tensors.push_back(std::move(tensor));
  };
  if (spec.gate) add(*spec.gate, TensorRole::kWeight, spec.hidden_size);
  add(spec.up, TensorRole::kWeight, spec.hidden_size);
  add(spec.down, TensorRole::kWeight, spec.intermediate_size);
  for (const std::optional<TensorRef>* bias : {&spec.gate_bias, &spec.up_bias, &spec.down_bias}) {
    if (*bias) add(**bias, TensorRole::kBias, 1);
  }
  if (spec.swish_beta) {
    tensors.push_back({.name = *spec.swish_beta, .shape = {}, .role = TensorRole::kSwishBeta});
  }
  return tensors;
}

}  // namespace gatefold
