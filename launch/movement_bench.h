#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "launch/options.h"
#include "parallel/communicator.h"
#include "runtime/device.h"

/// What the runtime moves between ranks, timed beside what a library does in its place.
namespace gatefold {

struct Movement {
  std::string what;
  std::string how;
  std::int64_t bytes = 0;         // of what one rank brings
  std::vector<double> seconds{};  // a pass's, on its slowest rank
  std::vector<double> library{};  // the library's of the same passes
  bool is_all_reduce = false;     // so that it has an all-reduce's bandwidths
};

/// How many times as fast as the library: the median over passes of its time ÷ ours.
double times_library(const Movement& one);

/// How many passes a row is timed by where one takes `seconds`, all that isn't timed included: what
/// fits into 0.4 s, at most fifty for each of `iterations`, at least three or as many as those. A
/// pass is one movement, so that both sides meet the same moment of the machine, and medians of
/// such want many.
std::int64_t movement_passes(double seconds, std::int64_t iterations);

class MovementBench {
 public:
  /// `comm` carries the device's tensors between the ranks of `world`, of which there are several.
  /// All must outlive it.
  MovementBench(const Options& options, Communicator& world, Communicator& comm, Device& device)
      : options_(options), world_(world), comm_(comm), device_(device) {}

  /// Canonical sums of [rows, 2048] fp32 a rank, from 8 KiB to 16 MiB, with fp32 and with bf16
  /// results on all ranks, beside the library's all-reduce; then dispatch and combine of tokens
  /// beside PlainExchange. Throws Error 71 on all ranks alike. Collective.
  std::vector<Movement> time_all();

 private:
  /// A part of a pass. What it works on is written first, which isn't timed; then ranks meet.
  struct Turn {
    std::function<void()> write;
    std::function<void()> move;
  };
  using Side = std::vector<Turn>;

  Movement time_sum(std::int64_t rows, DType dtype);
  Movement time_dispatch();
  double seconds_of(const Side& side);
  void time_sides(const Side& own, const Side& library, Movement& movement);
  Buffer written(std::int64_t bytes);

  const Options& options_;
  Communicator& world_;
  Communicator& comm_;
  Device& device_;
};

}  // namespace gatefold
