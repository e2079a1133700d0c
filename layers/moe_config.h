#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "layers/ffn_spec.h"
#include "layers/moe_family.h"
#include "layers/moe_spec.h"

namespace gatefold {

class ConfigDocument;
struct ModelConfig;

/// What a config says about its mixtures of experts; the same in each layer that is one.
struct MoeConfig {
  RouteRule route;                            // E, k and the rest
  std::int64_t intermediate_size = 0;         // of one expert
  std::int64_t shared_intermediate_size = 0;  // of one shared expert; 0: there is none
  std::int64_t shared_experts = 1;            // where there are any
  BalanceTerms balance;                       // of training
  std::int64_t expert_capacity = 0;           // 0: the family has none; layers drop by it on demand
  bool router_bias = false;
  bool correction_bias = false;
  bool expert_bias = false;  // of routed experts; shared ones go by ModelConfig::bias
  std::vector<bool> layers;  // [num_layers], which of them are mixtures
  std::size_t spelling = 0;  // the one of the family's that moe_spec() gives; 0 is canonical
};

/// "per-expert", "stacked", …
std::string_view name_of(ExpertLayout layout);
/// The module `pattern` of number `i`, which stands for {} where there is one.
std::string numbered(std::string_view pattern, std::int64_t i);
/// How moe_spec() has the experts of `config` stored, which has some.
ExpertLayout layout_of(const ModelConfig& config);
/// The spelling in which the family of `config` stores experts so; its only stack, whatever it
/// looks like, counts as kStacked. Throws Error 64 where it has none, or no experts.
std::size_t spelling_of(const ModelConfig& config, ExpertLayout layout);

/// Nothing for dense families. `stacks` are the layers of each stack. Throws as read_model_config.
std::optional<MoeConfig> read_moe_config(const ConfigDocument& document,
                                         std::span<const std::int64_t> stacks);

/// Layer `layer`, a mixture, spelled as `names` behind `prefix`.
/// Throws Error 64 where the model has no such layer, or a dense one there.
MoeSpec moe_under_prefix(const ModelConfig& config, std::int64_t layer, std::string_view prefix,
                         const ExpertNames& names);

}  // namespace gatefold
