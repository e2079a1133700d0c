#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "launch/job.h"
#include "launch/timed_layer.h"
#include "layers/reference.h"

namespace gatefold {

struct BenchLayer;

/// Where these tokens of the batch go; without rows and k, where the router sends them.
using RoutingFor = std::function<Choices(Range tokens)>;

/// What a benchmark's outputs should be: with exact sums on several ranks the bits of one rank;
/// else a few rows of each rank within float64's bound.
class ExpectedOutput {
 public:
  /// `one_rank_tokens`: what the layer on one rank took last; fewer than the batch has where tokens
  /// grow with the ranks. All must outlive it.
  ExpectedOutput(Job& job, BenchLayer& layer, const TokenBatch& batch, Range own,
                 std::int64_t one_rank_tokens, RoutingFor routing_for);

  /// Values of `timed`'s last pass, on all ranks, that are wrong; nothing where nothing can tell.
  /// Collective.
  std::optional<std::int64_t> wrong_values(const TimedLayer& timed, Reduce reduce);

 private:
  void make_bits();
  std::int64_t differing(const std::vector<std::byte>& y);
  std::vector<std::int64_t> judged_rows() const;
  void compute_references(const TimedLayer& timed, const std::vector<std::int64_t>& rows);
  std::int64_t outside_bound(const TimedLayer& timed, const std::vector<std::byte>& y);

  Job& job_;
  BenchLayer& layer_;
  const TokenBatch& batch_;
  Range own_;
  std::int64_t one_rank_tokens_;
  RoutingFor routing_for_;
  std::optional<std::vector<std::byte>> bits_;  // [tokens, H] of one rank
};

/// Values of y [rows.size(), H] that are farther from float64's than honest rounding explains.
std::int64_t outside_bound(const ReferenceResult& expected, DType dtype, const std::byte* y);

}  // namespace gatefold
