#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/count_matrix.h"
#include "parallel/exchange_shape.h"
#include "parallel/expert_plan.h"
#include "runtime/device.h"

namespace gatefold {

/// All that the device needs to know of a step's plans, in one piece of its memory.
class StepIndices {
 public:
  /// What a rank needs for it that packs `sent` rows.
  static std::int64_t bytes(const ExchangeShape& shape, const CountMatrix& counts, int rank,
                            std::int64_t sent);

  /// roots [etp, roots of own rows]: where each begins, as CombinedRows counts.
  void upload(Device& device, std::byte* memory, std::span<const std::int32_t> sent,
              const ExpertPlan& experts, const CombinePlan& combine,
              std::span<const std::int32_t> roots);

  const std::int32_t* sent() const { return at(at_.sent); }
  const std::int32_t* rows() const { return at(at_.rows); }
  const float* weights() const { return reinterpret_cast<const float*>(at(at_.weights)); }
  const std::int32_t* targets() const { return at(at_.targets); }
  const std::int32_t* merge_begin() const { return at(at_.merge_begin); }
  const std::int32_t* merges() const { return at(at_.merges); }
  const std::int32_t* combine_begin() const { return at(at_.combine_begin); }
  const std::int32_t* combine_roots(int member) const {
    return at(at_.combine_roots + member * all_roots_);
  }
  const std::int32_t* combine_merges() const { return at(at_.combine_merges); }

 private:
  const std::int32_t* at(std::int64_t offset) const { return memory_ + offset; }

  struct Offsets {
    std::int64_t sent, rows, weights, targets, merge_begin, merges;
    std::int64_t combine_begin, combine_roots, combine_merges;
  };
  Offsets at_{};
  std::int64_t all_roots_ = 0;
  std::vector<std::int32_t> host_;
  const std::int32_t* memory_ = nullptr;
};

}  // namespace gatefold
