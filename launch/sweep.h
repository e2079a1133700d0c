#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/options.h"

namespace gatefold {

/// Ranks of a benchmark's points, from rank 0 on, and how they are divided.
struct RankGrid {
  std::int64_t ranks = 1;
  std::int64_t tp = 0;  // 0: as a Job of so many ranks has it
  std::int64_t ep = 0;  // likewise
  std::vector<Reduce> reduces;

  /// "tp 2", "tp 1, ep 4", "4 ranks".
  std::string text() const;
};

/// What the division of ranks depends on.
struct SweptModel {
  std::int64_t blocks = 8;
  std::int64_t experts = 0;  // 0: all layers are dense
  std::int64_t expert_blocks = 1;
};

struct SweepPlan {
  std::vector<RankGrid> grids;
  std::vector<std::string> skipped;  // which, and why
};

/// The grids that --tp, --ep and --dp ask for, each with the fewest ranks that it needs: tp x dp,
/// with experts lcm(tp, ep) x dp; all ranks where none of the three is given. Those that can't be
/// on a world of `ranks` are skipped.
SweepPlan plan_sweep(const Options& options, const SweptModel& model, std::int64_t ranks);

/// The tokens of a point of so many ranks, for `tokens` of the command line.
std::int64_t scaled_tokens(Scaling scaling, std::int64_t tokens, std::int64_t ranks);

}  // namespace gatefold
