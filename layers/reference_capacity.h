#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layers/capacity.h"

namespace gatefold {

/// What a capacity keeps of the choices of a whole step: ids and weights [tokens, k] of experts
/// 0 … E - 1, tokens in global order. 1 for what is kept. Written from the rule in
/// layers/capacity.h, for one rank; no code of the runtime. Weights are taken as they are: of a
/// runtime's own fp32 ones the answer is exact, with its ties.
std::vector<std::uint8_t> reference_kept(const Capacity& capacity, std::int64_t experts,
                                         std::int64_t top_k, std::span<const std::int32_t> ids,
                                         std::span<const double> weights);

}  // namespace gatefold
