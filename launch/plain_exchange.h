#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/expert_plan.h"
#include "runtime/device.h"

namespace gatefold {

/// Dispatch and combine as one writes them over a library: rows packed by rank, an all-to-all-v,
/// and one fp32 sum for each token and rank back by another; what TokenExchange is measured
/// against. Groups of experts are ranks.
class PlainExchange {
 public:
  /// choices: those of every rank's tokens, ids ascending. comm and device must outlive it. Throws
  /// Error 71.
  PlainExchange(Communicator& comm, Device& device, const ExpertPlacement& placement,
                std::span<const Choices> choices, std::int64_t hidden, DType dtype);

  /// x [own tokens, H] → rows() [received_rows(), H], by source rank, in order. Collective.
  void dispatch(const std::byte* x);
  const std::byte* rows() const { return received_.data(); }
  std::int64_t received_rows() const { return received_rows_; }

  /// [received_rows(), H]: for the caller to fill with what this rank's experts add to each row.
  float* sums() const { return sums_.as<float>(); }
  /// y [own tokens, H] = the ranks' sums, added from the lowest rank on. Collective.
  void combine(std::byte* y);

 private:
  Communicator& comm_;
  Device& device_;
  std::int64_t hidden_;
  DType dtype_;
  std::int64_t tokens_ = 0;
  std::int64_t sent_rows_ = 0;
  std::int64_t received_rows_ = 0;
  Buffer packed_;    // [sent rows, H]
  Buffer received_;  // [received rows, H]
  Buffer sums_;      // [received rows, H] fp32
  Buffer returned_;  // [sent rows, H] fp32
  Buffer rows_;      // [sent rows] int32: which token each is
  Buffer begin_;     // [tokens + 1] int32, into the two below
  Buffer roots_;     // [sent rows] int32: rows of returned_, token by token
  Buffer merges_;    // [sent rows] int32: a token's next one is added at once
  std::vector<Transfer> rows_out_, rows_in_, sums_out_, sums_in_;
};

}  // namespace gatefold
