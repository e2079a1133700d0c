#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "layers/balance_terms.h"
#include "layers/capacity.h"
#include "layers/ffn_spec.h"
#include "runtime/routing.h"

namespace gatefold {

/// What a routing weight multiplies.
enum class WeightOn {
  kOutput,  // y = sum of w_e * expert_e(x)
  kInput,   // y = sum of expert_e(round(w_e * x)): Llama-4
};

/// One mixture-of-experts layer: what it computes and where its weights lie.
///   y = round( tree over e of w_e * (expert_e(x) + its down bias)  +  s_0 + s_1 + … )
/// with s_j the shared experts, times sigmoid(x · shared_gate) where there is one.
struct MoeSpec {
  std::int64_t layer = 0;
  std::int64_t hidden_size = 0;  // H
  RouteRule route;               // E, k and how a token's experts are chosen
  WeightOn weight_on = WeightOn::kOutput;
  BalanceTerms balance;              // of its training
  std::optional<Capacity> capacity;  // none: nothing is dropped

  TensorRef router;                          // [E, H], kept in fp32 as stored
  std::optional<TensorRef> router_bias;      // [E]
  std::optional<TensorRef> correction_bias;  // [E], counts for the choice only
  std::vector<FfnSpec> experts;              // [E], all of one shape
  std::vector<FfnSpec> shared;               // every token goes to each of them
  std::optional<TensorRef> shared_gate;      // [1, H]

  std::int64_t intermediate_size() const { return experts.front().intermediate_size; }

  /// Of the whole layer with all `routed` = E experts, or what a token meets with `routed` = k.
  std::int64_t parameters(std::int64_t routed) const {
    const std::int64_t biases = (router_bias ? 1 : 0) + (correction_bias ? 1 : 0);
    std::int64_t sum = route.experts * (hidden_size + biases) + (shared_gate ? hidden_size : 0);
    for (const FfnSpec& ffn : shared) sum += ffn.parameters();
    return sum + routed * experts.front().parameters();
  }
};

}  // namespace gatefold
