#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "parallel/expert_plan.h"
#include "runtime/range.h"
#include "runtime/routing.h"

namespace gatefold {

/// Where bench sends tokens, whatever the router of the layer would do.
enum class RoutingKind {
  kRouter,   // where it would
  kUniform,  // k different experts, each equally likely
  kZipf,     // k different ones, drawn one after the other with weight 1 / rank^S, where the ranks
             // are the seed's order of the experts
  kOneHot,   // all tokens to the same k: the first of that order
  kFile,     // as --input's topk_ids and topk_weights say
};

struct RoutingPattern {
  RoutingKind kind = RoutingKind::kRouter;
  double exponent = 0;  // S

  friend bool operator==(const RoutingPattern&, const RoutingPattern&) = default;
};

/// "router", "uniform", "zipf:1.2", "one-hot", "file". `name`: the option's. Throws Error 64.
RoutingPattern parse_routing(std::string_view name, std::string_view value);
std::string text_of(const RoutingPattern& pattern);

/// Where these tokens go, of any batch; not for kRouter and kFile. A token's ids are a function of
/// the seed, its number, E and k, by integers and by operations that IEEE rounds in one way: so the
/// same on all ranks and machines, however tokens are split. Weights are 1 / k.
Choices patterned_choices(const RoutingPattern& pattern, std::uint64_t seed, const RouteRule& rule,
                          Range tokens);

}  // namespace gatefold
