#include "layers/model_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string_view>

#include "layers/config_document.h"
#include "layers/model_families.h"
#include "runtime/error.h"
#include "runtime/range.h"

namespace gatefold {
namespace {

constexpr double kMaxBytes = 0x1p62;

std::int64_t read_intermediate_size(const ConfigDocument& document, std::int64_t hidden,
                                    bool gated) {
  std::int64_t otherwise = document.family().default_intermediate;
  switch (document.family().intermediate_default) {
    case IntermediateDefault::kRequired: break;
    case IntermediateDefault::kFourTimesHidden: otherwise = 4 * hidden; break;
    case IntermediateDefault::kLadder:
      otherwise = gated ? round_up(ceil_div(8 * hidden, 3), 8) : 4 * hidden;
      break;
  }
  return document.size(document.family().intermediate_size_key, kMaxSize, otherwise);
}

ActivationKind activation_kind(const ConfigDocument& document, std::string_view key,
                               const std::string& name) {
  const std::optional<ActivationKind> kind = activation_from_name(name);
  if (!kind) {
    document.fail(key,
                  fmt::format("unknown {} {} (known: {})", key, shown(name), activation_names()));
  }
  return *kind;
}

// What another family's field, or an older one, may say is this family's default, whose tanh form
// was once called "gelu". Anything else would be read one way here and ignored elsewhere.
void check_legacy_activation(const ConfigDocument& document) {
  const ModelFamily& family = document.family();
  const std::string_view key = family.legacy_activation_key;
  if (key.empty() || !document.has(key) || document.has(family.activation_key)) return;
  const std::string name = document.string(key, "");
  const std::string standard(family.default_activation);
  const ActivationKind kind = activation_kind(document, key, standard);
  const bool old_tanh = name == "gelu" && kind == ActivationKind::kGeluTanh;
  if (old_tanh || activation_kind(document, key, name) == kind) return;
  document.fail(key,
                fmt::format("{} is \"{}\" without {} ({} layers read the latter, and use {} "
                            "where it is absent)",
                            key, name, family.activation_key, document.model_type(), standard),
                fmt::format("write {} in the file, or --set {}={}", family.activation_key,
                            family.activation_key, name));
}

// A clamp that the activation doesn't have would be dropped in silence.
void refuse_clamps(const ConfigDocument& document, const std::string& activation) {
  for (const auto key : {document.family().clamp_limit_key, document.family().clamp_alpha_key}) {
    if (key.empty() || !document.has(key)) continue;
    document.fail(key,
                  fmt::format("{} is there with {} \"{}\" (only clamped_swiglu has it)", key,
                              document.family().activation_key, activation),
                  "leave one out");
  }
}

Activation read_activation(const ConfigDocument& document, bool gated) {
  const std::string_view key = document.family().activation_key;
  check_legacy_activation(document);
  const std::string name = document.string(key, document.family().default_activation);
  Activation activation{.kind = activation_kind(document, key, name), .gated = gated};
  if (activation.kind != ActivationKind::kClampedSwiglu) {
    refuse_clamps(document, name);
    return activation;
  }
  if (!gated) {
    document.fail(key, fmt::format("{} is \"{}\" in a layer without a gate (it clamps gate and up)",
                                   key, name));
  }
  activation.limit = document.positive_number(document.family().clamp_limit_key, activation.limit);
  activation.alpha = document.positive_number(document.family().clamp_alpha_key, activation.alpha);
  return activation;
}

double mixture_layers(const ModelConfig& config) {
  if (!config.moe) return 0.0;
  return static_cast<double>(std::ranges::count(config.moe->layers, true));
}

double all_experts_width(const MoeConfig& moe) {
  return static_cast<double>(moe.route.experts) * static_cast<double>(moe.intermediate_size) +
         static_cast<double>(moe.shared_experts) *
             static_cast<double>(moe.shared_intermediate_size);
}

// Everything later may count elements and bytes in 64 bits without a thought.
void check_total(const ConfigDocument& document, const ModelConfig& config) {
  const double hidden = static_cast<double>(config.hidden_size);
  const double mixtures = mixture_layers(config);
  const double experts = config.moe ? all_experts_width(*config.moe) : 0.0;
  const double widths = mixtures * experts + (static_cast<double>(config.num_layers) - mixtures) *
                                                 static_cast<double>(config.intermediate_size);
  const double layers = 3.0 * hidden * widths;
  const double embeddings = 2.0 * hidden * static_cast<double>(config.vocab_size);
  if (4.0 * (layers + embeddings) < kMaxBytes) return;
  const ModelFamily& family = document.family();
  constexpr std::string_view kVocabulary = "vocab_size";
  std::string_view blamed = embeddings > layers ? kVocabulary : family.intermediate_size_key;
  const std::string_view layers_key = family.stacks.front().num_layers_key;
  std::vector<std::string_view> keys = {family.hidden_size_key, layers_key, kVocabulary};
  std::string of_experts;
  if (config.moe) {
    const std::string_view experts_key = document.first_of(family.moe->experts_keys);
    const std::string_view width_key = family.moe->intermediate_size_key;
    keys.insert(keys.end(), {experts_key, width_key});
    of_experts = fmt::format(", {} {} of {} {}", experts_key, config.moe->route.experts, width_key,
                             config.moe->intermediate_size);
  }
  for (const std::string_view key : keys) {
    if (document.overridden(key)) blamed = key;
  }
  document.fail(
      blamed, fmt::format("{} {} with {} {}{}, {} {} and {} {} is absurd (the weights alone pass "
                          "2^62 bytes)",
                          family.hidden_size_key, config.hidden_size, family.intermediate_size_key,
                          config.intermediate_size, of_experts, layers_key, config.num_layers,
                          kVocabulary, config.vocab_size));
}

// The layers of each stack; a later one that the config doesn't size has as many as the one before.
std::vector<std::int64_t> read_stacks(const ConfigDocument& document) {
  std::vector<std::int64_t> stacks;
  for (const LayerStack& stack : document.family().stacks) {
    const std::int64_t otherwise = stacks.empty() ? stack.default_num_layers : stacks.back();
    stacks.push_back(document.size(stack.num_layers_key, kMaxLayers, otherwise));
  }
  return stacks;
}

// Without a dense layer no width of one is needed: that of the experts stands in for it.
std::int64_t read_dense_width(const ConfigDocument& document, const ModelConfig& config,
                              bool gated) {
  const bool all_mixtures = config.moe && std::ranges::all_of(config.moe->layers, std::identity());
  if (all_mixtures && !document.has(document.family().intermediate_size_key)) {
    return config.moe->intermediate_size;
  }
  return read_intermediate_size(document, config.hidden_size, gated);
}

}  // namespace

FfnSpec ModelConfig::layer_spec(std::int64_t layer) const {
  return layer_under_prefix(*this, layer, family_of(*this).prefixes.front());
}

bool ModelConfig::is_moe(std::int64_t layer) const {
  return moe && layer >= 0 && layer < std::ssize(moe->layers) &&
         moe->layers[static_cast<std::size_t>(layer)];
}

MoeSpec ModelConfig::moe_spec(std::int64_t layer) const {
  const ModelFamily& family = family_of(*this);
  static const ExpertNames none;
  const ExpertNames& names = moe ? family.moe->names[moe->spelling] : none;
  return moe_under_prefix(*this, layer, family.prefixes.front(), names);
}

ModelConfig read_model_config(const std::string& path,
                              const std::vector<std::pair<std::string, std::string>>& overrides) {
  return parse_model_config(ConfigDocument::read(path), path, overrides);
}

ModelConfig parse_model_config(const std::string& text, const std::string& path,
                               const std::vector<std::pair<std::string, std::string>>& overrides) {
  const ConfigDocument document(text, path, overrides);
  document.refuse_experts();
  const ModelFamily& family = document.family();
  const bool gated = document.flag(family.gated);

  ModelConfig config;
  config.path = path;
  config.model_type = document.model_type();
  config.hidden_size = document.size(family.hidden_size_key, kMaxSize, 0);
  config.stacks = read_stacks(document);
  config.num_layers = std::accumulate(config.stacks.begin(), config.stacks.end(), std::int64_t{0});
  config.moe = read_moe_config(document, config.stacks);
  config.intermediate_size = read_dense_width(document, config, gated);
  if (document.has("vocab_size")) config.vocab_size = document.size("vocab_size", kMaxSize, 0);
  check_total(document, config);
  config.dtype = document.dtype();
  config.activation = read_activation(document, gated);
  config.bias = document.flag(family.bias);
  config.swish_beta = document.flag(family.swish_beta);
  config.quantization = document.quantization();
  if (config.swish_beta && config.activation.kind != ActivationKind::kSilu) {
    document.fail(family.swish_beta.key,
                  fmt::format("{} is true but {} isn't silu (beta scales silu's input only)",
                              family.swish_beta.key, family.activation_key));
  }
  config.canonical_text = document.text();
  return config;
}

}  // namespace gatefold
