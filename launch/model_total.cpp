#include "launch/model_total.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

namespace gatefold {
namespace {

using Json = nlohmann::json;

/// The decoders whose rest is the same but for these: attention with grouped keys, RMS norms.
struct Decoder {
  std::string_view model_type;
  bool query_key_norms = false;
  std::int64_t norms_per_layer = 2;
  bool query_key_value_biases = false;
  bool tied_by_default = false;
};
constexpr Decoder kDecoders[] = {
    {.model_type = "llama"},
    {.model_type = "mistral"},
    {.model_type = "phi3"},
    {.model_type = "qwen2", .query_key_value_biases = true},
    {.model_type = "qwen3", .query_key_norms = true},
    {.model_type = "gemma3_text",
     .query_key_norms = true,
     .norms_per_layer = 4,
     .tied_by_default = true},
};

std::int64_t number(const Json& text, const char* key, std::int64_t otherwise) {
  const auto field = text.find(key);
  return field != text.end() && field->is_number_integer() ? field->get<std::int64_t>() : otherwise;
}

bool flag(const Json& text, const char* key, bool otherwise) {
  const auto field = text.find(key);
  return field != text.end() && field->is_boolean() ? field->get<bool>() : otherwise;
}

std::optional<std::int64_t> decoder_rest(const Decoder& decoder, const ModelConfig& config,
                                         const Json& text) {
  const std::int64_t heads = number(text, "num_attention_heads", 0);
  if (heads <= 0 || config.vocab_size <= 0) return std::nullopt;
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t head = number(text, "head_dim", hidden / heads);
  const std::int64_t keys = number(text, "num_key_value_heads", heads) * head;
  const std::int64_t queries = heads * head;
  std::int64_t layer = 2 * hidden * (queries + keys) + decoder.norms_per_layer * hidden;
  if (decoder.query_key_norms) layer += 2 * head;
  if (decoder.query_key_value_biases) layer += queries + 2 * keys;
  if (flag(text, "attention_bias", false)) layer += queries + 2 * keys + hidden;
  const bool tied = flag(text, "tie_word_embeddings", decoder.tied_by_default);
  return config.num_layers * layer + hidden + (tied ? 1 : 2) * config.vocab_size * hidden;
}

std::optional<std::int64_t> gpt2_rest(const ModelConfig& config, const Json& text) {
  const std::int64_t positions = number(text, "n_positions", 0);
  if (positions <= 0 || config.vocab_size <= 0) return std::nullopt;
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t layer_norm = 2 * hidden;
  const std::int64_t attention = 4 * hidden * hidden + 4 * hidden;
  return config.num_layers * (2 * layer_norm + attention) + layer_norm +
         (config.vocab_size + positions) * hidden;
}

}  // namespace

std::optional<std::int64_t> model_parameters(const ModelConfig& config) {
  const Json root = Json::parse(config.canonical_text, nullptr, false);
  const auto inner = root.find("text_config");
  const Json& text = inner != root.end() && inner->is_object() ? *inner : root;
  std::optional<std::int64_t> rest;
  if (config.model_type == "gpt2") rest = gpt2_rest(config, text);
  for (const Decoder& decoder : kDecoders) {
    if (config.model_type == decoder.model_type) rest = decoder_rest(decoder, config, text);
  }
  if (!rest) return std::nullopt;
  return *rest + config.num_layers * config.layer_spec(0).parameters();
}

}  // namespace gatefold
