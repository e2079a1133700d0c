#pragma once

/// Bandwidths as nccl-tests define them (its doc/PERFORMANCE.md): bytes of one rank's buffer over
/// time, and the same scaled by what each of n ranks must at least send, so that figures of any n
/// are measured against one link's speed.
namespace gatefold {

/// Bytes per second; 0 where no time has passed.
constexpr double algorithm_bandwidth(double bytes, double seconds) {
  return seconds > 0 ? bytes / seconds : 0;
}

/// Bus bandwidth / algorithm bandwidth of an all-reduce among `ranks`: 2 (n - 1) / n.
constexpr double all_reduce_share(int ranks) { return ranks > 1 ? 2.0 * (ranks - 1) / ranks : 0; }

/// The same of an all-to-all, whose bytes are all that a rank gives, its own share too: (n - 1) /
/// n.
constexpr double all_to_all_share(int ranks) { return ranks > 1 ? 1.0 * (ranks - 1) / ranks : 0; }

}  // namespace gatefold
