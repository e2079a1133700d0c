#pragma once

#include <memory>

#include "launch/job.h"

namespace gatefold {

/// `gatefold bench`: times layers on grids of ranks, each beside one rank. A point takes the first
/// ranks of the world, a Job of their own, while the others sleep.
class Bench {
 public:
  /// Collective over `world`, which must outlive it.
  Bench(const Options& options, Communicator& world, const Seams& seams);
  ~Bench();

  /// The exit code of a finished job; errors are thrown. What a point has made stays until this
  /// object ends: a GPU that is stuck must not hold up the error. Collective.
  int run();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gatefold
