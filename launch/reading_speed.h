#pragma once

#include <optional>
#include <string>

#include "parallel/communicator.h"
#include "runtime/dtype.h"

namespace gatefold {

/// How fast quantised weights are read, beside the same weights stored plain.
struct ReadingSpeed {
  static constexpr int kTurns = 5;

  double quantised = 0;  // bytes of plain weights a second, medians
  double plain = 0;
  double ratio = 0;             // of these, the median over turns
  double quantised_stored = 0;  // bytes of codes and scales a second
  double stored_ratio = 0;      // of that to `plain`
};

/// Reads the quantised weights of the model at `from`, and the same ones of `to`, which has them
/// plain under the same names, as `dtype`: in turns, by all ranks, in pieces as layers take them.
/// One turn of each before counts for nothing, so that the files are in memory if it holds them.
/// Nothing where there are no such weights. Throws what open_model_files() does. Collective.
std::optional<ReadingSpeed> measure_reading(Communicator& world, const std::string& from,
                                            const std::string& to, DType dtype);

}  // namespace gatefold
