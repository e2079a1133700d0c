#pragma once

#include <cstdint>
#include <vector>

#include "layers/balance.h"
#include "parallel/expert_plan.h"
#include "runtime/device.h"

namespace gatefold {

/// What a backward pass of a mixture of experts needs of its forward pass. Rows are those that this
/// rank is home to, n of them: Moe::home(). No row is kept for each of its experts: `map` says how
/// x was dispatched, and so how it, and y's gradient, are again.
struct SavedForBackward {
  std::int64_t rows = 0;           // n
  Buffer x;                        // [n, H] in the layer's dtype
  Choices routing;                 // [n, k] ids and weights in the order of choice, the best first
  std::vector<std::uint8_t> kept;  // [n, k] of them: see Moe::kept(); empty without a capacity
  Buffer scores;                   // fp32 [n, E] P, and
  Buffer log_sums;                 // fp32 [n]: see ScoredLogits
  RowMap map;
  // Of the whole step, the same on all ranks: of what was chosen, dropped or not.
  std::vector<LoadSums> sequences;
  double loss = 0;  // of the router, by its MoeSpec::balance: likewise

  // Working space: what goes into the sums.
  std::vector<float> host_scores;
  std::vector<float> host_log_sums;
};

}  // namespace gatefold
