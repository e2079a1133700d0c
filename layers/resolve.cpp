#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <string_view>

#include "layers/model_config.h"
#include "layers/model_families.h"
#include "layers/stored_tensors.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

// "[48,80]"
std::string shown(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ","));
}

std::string check_model_type(const ModelConfig& config) {
  return fmt::format("check that model_type \"{}\" is right", config.model_type);
}

// The field that decides about a tensor, to set or to unset: "--set mlp_bias=true".
std::string switch_advice(const ModelConfig& config, const FamilySwitch& rule, bool value) {
  if (rule.key.empty()) return check_model_type(config);
  return fmt::format("correct the config, or --set {}={}", rule.key, value);
}

std::string missing_advice(const ModelConfig& config, TensorRole role) {
  const ModelFamily& family = family_of(config);
  switch (role) {
    case TensorRole::kBias: return switch_advice(config, family.bias, false);
    case TensorRole::kSwishBeta: return switch_advice(config, family.swish_beta, false);
    case TensorRole::kRouterBias: return switch_advice(config, family.moe->router_bias, false);
    case TensorRole::kCorrectionBias:
      if (family.moe->method_key.empty()) break;
      return fmt::format("correct {} in the config, or the weights", family.moe->method_key);
    case TensorRole::kWeight:
    case TensorRole::kSharedGate:
    case TensorRole::kRouter: break;
  }
  return check_model_type(config);
}

void check_tensor(const ModelConfig& config, const StoredTensor& expected,
                  const TensorSource& source, bool transposed) {
  const std::optional<TensorInfo> found = source.find(expected.name);
  if (!found) {
    throw Error(ExitCode::kData,
                fmt::format("{}: no tensor {} (a {} layer needs it, shape {}); {}",
                            source.description(), expected.name, config.model_type,
                            shown(expected.shape), missing_advice(config, expected.role)));
  }
  if (found->shape == expected.shape) return;
  const bool scalar = expected.role == TensorRole::kSwishBeta;
  if (scalar && found->shape == std::vector<std::int64_t>{1}) return;
  throw Error(
      ExitCode::kData,
      fmt::format("{}: {} has shape {} (expected {}{} for {}'s sizes); correct the "
                  "config or the weights",
                  source.description(), expected.name, shown(found->shape), shown(expected.shape),
                  scalar ? " or [1]" : (transposed ? ", stored [in, out]," : ""), config.path));
}

// One tensor under two names is two models in one: taking either would be a silent choice.
[[noreturn]] void fail_two_spellings(const TensorSource& source, std::string_view one,
                                     std::string_view other) {
  throw Error(ExitCode::kData,
              fmt::format("{} holds both {} and {} (two spellings of one tensor: which one "
                          "counts isn't said); take one away",
                          source.description(), one, other));
}

void refuse_other_prefix(const std::vector<StoredTensor>& tensors, std::string_view prefix,
                         std::string_view other, const TensorSource& source) {
  for (const StoredTensor& tensor : tensors) {
    const std::string name = std::string(other) + tensor.name.substr(prefix.size());
    if (name != tensor.name && source.find(name)) fail_two_spellings(source, tensor.name, name);
  }
}

// What the config denies must not lie in the source: ignoring it would give a wrong answer.
void refuse_tensor(const std::string& name, const std::string& denier, const std::string& advice,
                   const TensorSource& source) {
  const std::optional<TensorInfo> found = source.find(name);
  if (!found) return;
  throw Error(ExitCode::kData,
              fmt::format("{} holds {} of shape {} ({}, and dropping it would "
                          "change the answer); {}",
                          source.description(), name, shown(found->shape), denier, advice));
}

void refuse_tensor(const ModelConfig& config, const std::string& name, const FamilySwitch& rule,
                   const TensorSource& source) {
  const std::string denier = rule.key.empty()
                                 ? fmt::format("{} layers have none", config.model_type)
                                 : fmt::format("{} is false in {}", rule.key, config.path);
  refuse_tensor(name, denier, switch_advice(config, rule, true), source);
}

// ---- dense layers ----

// The first prefix under which any of the layer's weights lies: so one lost weight is named as it
// should be spelled.
std::string_view find_prefix(const ModelConfig& config, std::int64_t layer,
                             const TensorSource& source) {
  std::vector<std::string> looked_for;
  for (const std::string_view prefix : family_of(config).prefixes) {
    const FfnSpec spec = layer_under_prefix(config, layer, prefix);
    for (const StoredTensor& tensor : stored_tensors(spec)) {
      if (tensor.role == TensorRole::kWeight && source.find(tensor.name)) return prefix;
    }
    looked_for.push_back(spec.up.name);
  }
  throw Error(
      ExitCode::kData,
      fmt::format("layer {} of {} has no feed-forward weights (looked for {}); check that "
                  "model_type \"{}\" and the number of layers are those of the weights",
                  layer, source.description(), fmt::join(looked_for, ", "), config.model_type));
}

void refuse_denied(const ModelConfig& config, std::int64_t layer, std::string_view prefix,
                   const TensorSource& source) {
  const ModelFamily& family = family_of(config);
  const std::string path = layer_path(config, layer, prefix);
  const auto name = [&](std::string_view module) { return path + std::string(module); };
  if (!config.bias) {
    for (const std::string_view module : {family.gate, family.up, family.down}) {
      if (module.empty()) continue;
      refuse_tensor(config, name(module) + ".bias", family.bias, source);
    }
  }
  if (!config.activation.gated && !family.gate.empty()) {
    for (const char* suffix : {".weight", ".bias"}) {
      refuse_tensor(config, name(family.gate) + suffix, family.gated, source);
    }
  }
  if (!config.swish_beta && !family.beta.empty()) {
    refuse_tensor(config, name(family.beta), family.swish_beta, source);
  }
}

// A config and weights of two minds about which layers are mixtures.
void refuse_router(const ModelConfig& config, std::int64_t layer, const TensorSource& source) {
  const ModelFamily& family = family_of(config);
  if (!family.moe) return;
  for (const std::string_view prefix : family.prefixes) {
    for (const ExpertNames& names : family.moe->names) {
      refuse_tensor(
          layer_path(config, layer, prefix) + std::string(names.router) + ".weight",
          fmt::format("a router, where {} says that layer {} is dense", config.path, layer),
          "correct which layers are mixtures of experts", source);
    }
  }
}

// ---- mixtures of experts ----

struct Spelling {
  std::string_view prefix;
  const ExpertNames* names = nullptr;
};

std::vector<Spelling> spellings(const ModelConfig& config) {
  std::vector<Spelling> all;
  for (const std::string_view prefix : family_of(config).prefixes) {
    for (const ExpertNames& names : family_of(config).moe->names) all.push_back({prefix, &names});
  }
  return all;
}

std::vector<StoredTensor> expert_weights(const MoeSpec& spec) {
  MoeSpec alone;
  alone.experts = spec.experts;
  std::vector<StoredTensor> tensors = stored_tensors(alone);
  std::erase_if(tensors, [](const StoredTensor& t) { return t.role != TensorRole::kWeight; });
  return tensors;
}

// The other way round: a dense layer's weights where the config says that there are experts.
void refuse_dense(const ModelConfig& config, std::int64_t layer, std::string_view prefix,
                  const TensorSource& source) {
  refuse_tensor(layer_path(config, layer, prefix) + std::string(family_of(config).up) + ".weight",
                fmt::format("a dense layer's, where {} says that layer {} is a mixture of experts",
                            config.path, layer),
                "correct which layers are mixtures of experts", source);
}

[[noreturn]] void fail_no_experts(const ModelConfig& config, std::int64_t layer,
                                  const TensorSource& source) {
  std::vector<std::string> looked_for;
  for (const Spelling& spelling : spellings(config)) {
    refuse_dense(config, layer, spelling.prefix, source);
    const MoeSpec spec = moe_under_prefix(config, layer, spelling.prefix, *spelling.names);
    looked_for.push_back(spec.experts.front().up.name);
  }
  throw Error(
      ExitCode::kData,
      fmt::format("layer {} of {} has no experts (looked for {}); check that model_type "
                  "\"{}\" and the number of layers are those of the weights",
                  layer, source.description(), fmt::join(looked_for, ", "), config.model_type));
}

// Whether the source has all of `tensors`, each of its shape.
bool fits(const std::vector<StoredTensor>& tensors, const TensorSource& source) {
  return std::ranges::all_of(tensors, [&](const StoredTensor& tensor) {
    const std::optional<TensorInfo> found = source.find(tensor.name);
    return found && found->shape == tensor.shape;
  });
}

// The one spelling under which any expert's weight lies; of two layouts under one name the one that
// fits, else the canonical one.
Spelling find_spelling(const ModelConfig& config, std::int64_t layer, const TensorSource& source) {
  std::optional<Spelling> found;
  std::string first;
  for (const Spelling& spelling : spellings(config)) {
    const MoeSpec spec = moe_under_prefix(config, layer, spelling.prefix, *spelling.names);
    const std::vector<StoredTensor> weights = expert_weights(spec);
    for (const StoredTensor& tensor : weights) {
      if (!source.find(tensor.name)) continue;
      if (first == tensor.name) {
        if (fits(weights, source)) found = spelling;
        break;
      }
      if (found) fail_two_spellings(source, first, tensor.name);
      found = spelling;
      first = tensor.name;
      break;
    }
  }
  if (!found) fail_no_experts(config, layer, source);
  return *found;
}

void refuse_denied_biases(const ModelConfig& config, const MoeSpec& spec,
                          const TensorSource& source) {
  const ModelFamily& family = family_of(config);
  const auto refuse = [&](const TensorRef& matrix, const FamilySwitch& rule) {
    constexpr std::string_view kWeight = ".weight";
    const bool own = matrix.name.ends_with(kWeight);
    const std::string module = matrix.name.substr(0, matrix.name.size() - (own ? 7 : 0));
    refuse_tensor(config, module + (own ? ".bias" : "_bias"), rule, source);
  };
  const auto refuse_all = [&](const std::vector<FfnSpec>& ffns, const FamilySwitch& rule) {
    for (const FfnSpec& ffn : ffns) {
      if (ffn.gate) refuse(*ffn.gate, rule);
      refuse(ffn.up, rule);
      refuse(ffn.down, rule);
    }
  };
  if (!config.moe->expert_bias) refuse_all(spec.experts, family.moe->expert_bias);
  if (!config.bias) refuse_all(spec.shared, family.bias);
}

// Shared experts of any family's name that the layer doesn't have.
void refuse_denied_shared(const ModelConfig& config, const std::string& path,
                          const std::set<std::string>& own, const TensorSource& source) {
  for (const ModelFamily& family : model_families()) {
    if (!family.moe || family.moe->shared.empty()) continue;
    const SharedNames& names = family.moe->shared_names;
    for (const std::string_view part : {names.gate, names.up, names.down}) {
      for (const std::int64_t number : {std::int64_t{0}, config.moe->shared_experts}) {
        const std::string name =
            path + numbered(family.moe->shared, number) + std::string(part) + ".weight";
        if (own.contains(name)) continue;
        refuse_tensor(name, fmt::format("{} has no such shared expert", config.path),
                      "correct the config", source);
      }
    }
  }
}

// What a mixture's config denies; `spec` is spelled as the source does.
void refuse_denied(const ModelConfig& config, const MoeSpec& spec, const Spelling& spelling,
                   const std::set<std::string>& own, const TensorSource& source) {
  const MoeFamily& family = *family_of(config).moe;
  const std::string path = layer_path(config, spec.layer, spelling.prefix);
  const std::string router = path + std::string(spelling.names->router);
  if (!spec.router_bias) {
    refuse_tensor(config, router + ".bias", family.router_bias, source);
  }
  if (!spec.correction_bias) {
    refuse_tensor(router + ".e_score_correction_bias",
                  family.method_key.empty()
                      ? fmt::format("{} layers have none", config.model_type)
                      : fmt::format("{} in {} chooses without", family.method_key, config.path),
                  missing_advice(config, TensorRole::kCorrectionBias), source);
  }
  refuse_denied_shared(config, path, own, source);
  if (spelling.names->layout != ExpertLayout::kPerExpert) return;
  ModelConfig more = config;
  ++more.moe->route.experts;
  refuse_tensor(
      moe_under_prefix(more, spec.layer, spelling.prefix, *spelling.names).experts.back().up.name,
      fmt::format("{} has {} experts", config.path, config.moe->route.experts),
      "correct the config or the weights", source);
}

}  // namespace

FfnSpec resolve_layer(const ModelConfig& config, std::int64_t layer, const TensorSource& source) {
  (void)config.layer_spec(layer);  // so that a layer that isn't dense is refused first
  refuse_router(config, layer, source);
  const std::string_view prefix = find_prefix(config, layer, source);
  const FfnSpec spec = layer_under_prefix(config, layer, prefix);
  const std::vector<StoredTensor> tensors = stored_tensors(spec);
  for (const StoredTensor& tensor : tensors) {
    check_tensor(config, tensor, source, spec.up.transposed);
  }
  for (const std::string_view any : family_of(config).prefixes) {
    refuse_other_prefix(tensors, prefix, any, source);
    refuse_denied(config, layer, any, source);
  }
  return spec;
}

MoeSpec resolve_moe(const ModelConfig& config, std::int64_t layer, const TensorSource& source) {
  MoeSpec spec = config.moe_spec(layer);  // so that a layer that is none is refused first
  const Spelling spelling = find_spelling(config, layer, source);
  spec = moe_under_prefix(config, layer, spelling.prefix, *spelling.names);
  const std::vector<StoredTensor> tensors = stored_tensors(spec);
  std::set<std::string> own;
  for (const StoredTensor& tensor : tensors) {
    const bool stacked = tensor.role == TensorRole::kWeight && tensor.shape.size() > 2;
    check_tensor(config, tensor, source, stacked && spec.experts.front().up.transposed);
    own.insert(tensor.name);
  }
  refuse_denied_biases(config, spec, source);
  for (const Spelling& any : spellings(config)) {
    refuse_other_prefix(tensors, spelling.prefix, any.prefix, source);
    refuse_denied(config, spec, {any.prefix, any.names}, own, source);
    refuse_dense(config, layer, any.prefix, source);
  }
  return spec;
}

}  // namespace gatefold
