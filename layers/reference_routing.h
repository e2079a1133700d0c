#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layers/reference_math.h"
#include "runtime/routing.h"

/// Routing as RouteRule says, in float64 and for one token, with the errors that an honest fp32
/// router may make. Written from the rule; no code of the runtime's router.
namespace gatefold::reference {

/// What one token's logits [E] become on the way to its experts.
struct ScoredToken {
  std::vector<Number> logits;  // [E]
  std::vector<Number> scores;  // [E] s of RouteRule; logits where those choose
  std::vector<Number> choice;  // [E] c of RouteRule, before groups are left out
};

/// correction [E], exact; empty where there is none.
ScoredToken score_token(const RouteRule& rule, std::vector<Number> logits,
                        std::span<const double> correction);

/// The reference's own choice: k expert ids, the best first.
std::vector<std::int32_t> choose_experts(const RouteRule& rule, std::span<const Number> choice);

/// k different ids, each in [0, E).
bool well_formed(const RouteRule& rule, std::span<const std::int32_t> ids);

/// Whether these are one choice: the same experts and, where weights depend on it, in one order.
bool same_choice(const RouteRule& rule, std::span<const std::int32_t> a,
                 std::span<const std::int32_t> b);

/// Whether scores that differ from `choice` by no more than their likely errors can lead to
/// well-formed `ids`, in any order unless weights depend on it: every expert left out may be as low
/// as the lowest that any of `ids` may reach; and so for groups, by the errors of their experts'
/// scores.
bool may_choose(const RouteRule& rule, std::span<const Number> choice,
                std::span<const std::int32_t> ids);

/// The weights [k] of experts `ids`. Of a sparse mixer either weight may be right, and the bound
/// has both, where an expert may be on either side of the margin.
std::vector<Number> routing_weights(const RouteRule& rule, const ScoredToken& token,
                                    std::span<const std::int32_t> ids);

}  // namespace gatefold::reference
