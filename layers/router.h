#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "layers/moe_spec.h"
#include "parallel/expert_plan.h"
#include "runtime/device.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// The part of a mixture of experts that says which of them a token goes to. It reads no expert.
class Router {
 public:
  /// Throws Error 65, 66, 71.
  Router(const MoeSpec& spec, const TensorSource& source, Device& device);

  const RouteRule& rule() const { return rule_; }
  /// Room for `rows` rows at a time.
  void reserve(std::int64_t rows);
  /// x [rows, H] in `dtype` → ids and weights [rows, k] in the order of choice, the best first. The
  /// host waits for them. Throws Error 70, 71.
  void route(const std::byte* x, DType dtype, std::int64_t rows, Choices& chosen);
  /// Of the rows that route() had last: P [rows, E] and log-sums [rows] as ScoredLogits has them,
  /// in the device's memory. Throws Error 70.
  void score(std::int64_t rows, float* scores, float* log_sums);

  /// What route() adds to scores when it chooses, [E]; empty where the family has no such thing.
  std::vector<float> correction_bias() const;
  /// From now on `bias` [E] in its place: a step of update_correction_bias(). Throws Error 64 where
  /// there is none, for another number of experts, and for numbers that aren't finite.
  void set_correction_bias(std::span<const float> bias);

 private:
  RouteRule rule_;
  std::int64_t hidden_;
  Device* device_;
  Buffer router_;           // fp32 [E, H]
  Buffer bias_;             // fp32 [E], may be empty
  Buffer correction_bias_;  // fp32 [E], may be empty
  Buffer logits_;           // fp32 [rows, E]
  Buffer ids_;              // int32 [rows, k]
  Buffer weights_;          // fp32 [rows, k]
};

}  // namespace gatefold
