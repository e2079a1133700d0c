#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/baselines.h"
#include "launch/bench_columns.h"
#include "launch/job.h"
#include "launch/timed_layer.h"
#include "layers/reference.h"

namespace gatefold {

/// One way in which a point computes its layer.
struct Way {
  Reduce reduce = Reduce::kExact;
  Dispatcher dispatcher = Dispatcher::kAllToAll;
};

/// A layer to be timed, and on rank 0 what all its points are compared with: the same on one rank,
/// by how sums are made, and the library's own way where fast sums are asked for.
struct BenchLayer {
  std::string config;
  std::int64_t number = 0;
  LayerSpec spec;
  KernelChoice kernel;
  std::int64_t copies = 1;
  std::map<Reduce, std::unique_ptr<TimedLayer>> one_rank;
  std::unique_ptr<PlainLayer> plain;
  std::vector<std::int64_t>
      sample;  // rows that float64 judges in every batch, beside each rank's first
  std::map<std::int64_t, ReferenceResult> references;  // by row; rank 0's are what counts
};

/// The options of a layer that is made for this way.
MoeOptions options_for(const Job& job, const KernelChoice& kernel, const Way& way);

/// What the ranks of a grid reach at once, all together.
struct RankSpeeds {
  std::optional<double> gemm_peak;   // FLOP/s
  std::optional<double> read_speed;  // B/s, of cold memory
};
/// GEMMs of a size that is best_gemm_size(). Takes about a second. Collective over `ranks`.
RankSpeeds measure_ranks(Communicator& ranks, Device& device, DType dtype, std::int64_t gemm_size,
                         const Options& options);

/// One layer on one grid of ranks: loads it, and times it for any number of tokens, in turns with
/// the layer on one rank.
class BenchPoint {
 public:
  /// All must outlive it. Collective over job.world(). Throws Error 64, 65, 66, 71 on every rank.
  BenchPoint(Job& job, BenchLayer& layer, std::vector<Way> ways, const Beat& beat);

  /// A row for each way, complete on rank 0. Collective.
  std::vector<Measured> measure(std::int64_t tokens, const RankSpeeds& speeds);

  /// What this rank times in each pass, in an order that is the same on all; for tests.
  std::vector<TimedLayer*> layers() const;

 private:
  Job& job_;
  BenchLayer& layer_;
  std::vector<Way> ways_;
  const Beat& beat_;
  std::vector<std::unique_ptr<TimedLayer>> layers_;  // one for each way, but none on one rank
};

}  // namespace gatefold
