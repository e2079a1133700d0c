#include "launch/model_total.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>

namespace gatefold {
namespace {

using Json = nlohmann::json;

/// The decoders whose rest is the same but for these: attention with grouped keys, RMS norms.
struct Decoder {
  std::string_view model_type;
  bool query_key_norms = false;
  double norms_per_layer = 2;
  bool query_key_value_biases = false;
  bool tied_by_default = false;
};
constexpr Decoder kDecoders[] = {
    {.model_type = "llama"},
    {.model_type = "mistral"},
    {.model_type = "phi3"},
    {.model_type = "qwen2", .query_key_value_biases = true},
    {.model_type = "qwen3", .query_key_norms = true},
    {.model_type = "mixtral"},
    {.model_type = "qwen2_moe", .query_key_value_biases = true},
    {.model_type = "qwen3_moe", .query_key_norms = true},
    {.model_type = "gemma3_text",
     .query_key_norms = true,
     .norms_per_layer = 4,
     .tied_by_default = true},
};

// Counts are doubles: three digits are shown, and no product of odd numbers overflows.
double number(const Json& text, const char* key, double otherwise) {
  const auto field = text.find(key);
  return field != text.end() && field->is_number_integer() ? field->get<double>() : otherwise;
}

bool flag(const Json& text, const char* key, bool otherwise) {
  const auto field = text.find(key);
  return field != text.end() && field->is_boolean() ? field->get<bool>() : otherwise;
}

std::optional<double> decoder_rest(const Decoder& decoder, const ModelConfig& config,
                                   const Json& text) {
  const double heads = number(text, "num_attention_heads", 0);
  if (heads <= 0 || config.vocab_size <= 0) return std::nullopt;
  const auto hidden = static_cast<double>(config.hidden_size);
  const double head = number(text, "head_dim", std::floor(hidden / heads));
  const double keys = number(text, "num_key_value_heads", heads) * head;
  const double queries = heads * head;
  if (head <= 0 || keys <= 0) return std::nullopt;
  double layer = 2 * hidden * (queries + keys) + decoder.norms_per_layer * hidden;
  if (decoder.query_key_norms) layer += 2 * head;
  if (decoder.query_key_value_biases) layer += queries + 2 * keys;
  if (flag(text, "attention_bias", false)) layer += queries + 2 * keys + hidden;
  const bool tied = flag(text, "tie_word_embeddings", decoder.tied_by_default);
  return static_cast<double>(config.num_layers) * layer + hidden +
         (tied ? 1 : 2) * static_cast<double>(config.vocab_size) * hidden;
}

std::optional<double> gpt2_rest(const ModelConfig& config, const Json& text) {
  const double positions = number(text, "n_positions", 0);
  if (positions <= 0 || config.vocab_size <= 0) return std::nullopt;
  const auto hidden = static_cast<double>(config.hidden_size);
  const double layer_norm = 2 * hidden;
  const double attention = 4 * hidden * hidden + 4 * hidden;
  return static_cast<double>(config.num_layers) * (2 * layer_norm + attention) + layer_norm +
         (static_cast<double>(config.vocab_size) + positions) * hidden;
}

}  // namespace

std::optional<ModelTotal> model_parameters(const ModelConfig& config) {
  const Json root = Json::parse(config.canonical_text, nullptr, false);
  const auto inner = root.find("text_config");
  const Json& text = inner != root.end() && inner->is_object() ? *inner : root;
  std::optional<double> rest;
  if (config.model_type == "gpt2") rest = gpt2_rest(config, text);
  for (const Decoder& decoder : kDecoders) {
    if (config.model_type == decoder.model_type) rest = decoder_rest(decoder, config, text);
  }
  if (!rest) return std::nullopt;
  ModelTotal total{*rest, *rest};
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    if (config.is_moe(layer)) {
      const MoeSpec spec = config.moe_spec(layer);
      total.all += static_cast<double>(spec.parameters(spec.route.experts));
      total.active += static_cast<double>(spec.parameters(spec.route.top_k));
    } else {
      const auto parameters = static_cast<double>(config.layer_spec(layer).parameters());
      total.all += parameters;
      total.active += parameters;
    }
  }
  return total;
}

}  // namespace gatefold
