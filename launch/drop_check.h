#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "launch/job.h"
#include "launch/tokens.h"
#include "layers/moe_spec.h"
#include "parallel/expert_plan.h"

namespace gatefold {

/// What a capacity has dropped of a batch, judged token by token: who is dropped depends on all.
struct DropCheck {
  std::vector<std::uint8_t> kept;  // [tokens, k] what the rule keeps of the routing
  std::int64_t near_ties = 0;      // tokens that float64 would route, or drop, otherwise
  std::int64_t wrong_routes = 0;   // tokens that no rounding sends there
  std::int64_t wrong_weights = 0;  // tokens with a weight outside float64's bound
  std::int64_t wrong_drops = 0;    // tokens of which something else is kept
  std::int64_t first_route = std::numeric_limits<std::int64_t>::max();
  std::int64_t first_weight = first_route;
  std::int64_t first_drop = first_route;
};

/// `routing` and `kept` [tokens, k] are one device's, of the whole batch. All its tokens are routed
/// in float64, each rank its part of them; what is dropped is then found again from the routing's
/// own weights, and must be just that. Reads no expert. Collective.
DropCheck check_drops(Job& job, const MoeSpec& spec, const TokenBatch& batch,
                      const Choices& routing, std::span<const std::uint8_t> kept);

struct DropCount {
  std::int64_t choices = 0;
  std::int64_t dropped = 0;
  std::int64_t tokens = 0;
  std::int64_t without = 0;  // of which all is dropped
};
/// Of kept [tokens, k].
DropCount count_drops(std::span<const std::uint8_t> kept, std::int64_t top_k);
/// "37 of 512 choices dropped (7.2 %), 3 of 256 tokens without an expert"
std::string text_of(const DropCount& count);

}  // namespace gatefold
