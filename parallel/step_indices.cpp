#include "parallel/step_indices.h"

#include <cstring>

namespace gatefold {

std::int64_t StepIndices::bytes(const ExchangeShape& shape, const CountMatrix& counts, int rank,
                                std::int64_t sent) {
  const GroupCounts& here = counts.for_group(shape.group(rank));
  // Rows, weights, targets and where their merges begin; all but one of a root's leaves are merged.
  const std::int64_t of_experts = 4 * here.expert_rows + 1 + (here.expert_rows - here.roots);
  const std::int64_t of_roots = (shape.etp + 1) * counts.of_source(rank).roots;
  const std::int64_t values = sent + of_experts + counts.rows(rank) + 1 + of_roots;
  return values * static_cast<std::int64_t>(sizeof(std::int32_t));
}

void StepIndices::upload(Device& device, std::byte* memory, std::span<const std::int32_t> sent,
                         const ExpertPlan& experts, const CombinePlan& combine,
                         std::span<const std::int32_t> roots) {
  host_.clear();
  const auto add = [this](std::span<const std::int32_t> values) {
    const auto begin = static_cast<std::int64_t>(host_.size());
    host_.insert(host_.end(), values.begin(), values.end());
    return begin;
  };
  at_.sent = add(sent);
  at_.rows = add(experts.rows);
  at_.weights = static_cast<std::int64_t>(host_.size());
  host_.resize(host_.size() + experts.weights.size());
  if (!experts.weights.empty()) {
    std::memcpy(host_.data() + at_.weights, experts.weights.data(),
                experts.weights.size() * sizeof(float));
  }
  at_.targets = add(experts.targets);
  at_.merge_begin = add(experts.merge_begin);
  at_.merges = add(experts.merges);
  at_.combine_begin = add(combine.begin);
  at_.combine_roots = add(roots);
  at_.combine_merges = add(combine.merges);
  all_roots_ = std::ssize(combine.merges);
  memory_ = reinterpret_cast<const std::int32_t*>(memory);
  device.upload(memory, reinterpret_cast<const std::byte*>(host_.data()),
                static_cast<std::int64_t>(host_.size() * sizeof(std::int32_t)));
}

}  // namespace gatefold
