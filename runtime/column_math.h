#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/tensor_layout.h"

// The 64 columns of a group at a time, for the CPU's kernels: inlined into functions that are
// compiled for several vector widths.

namespace gatefold {

constexpr std::size_t kColumns = kGroup;

[[gnu::always_inline]] inline void copy(const float* from, float* to) {
  for (std::size_t i = 0; i < kColumns; ++i) to[i] = from[i];
}

/// to = lower + upper; `to` may be either.
[[gnu::always_inline]] inline void add(const float* lower, const float* upper, float* to) {
  for (std::size_t i = 0; i < kColumns; ++i) to[i] = lower[i] + upper[i];
}

/// Rounds n values to the dtype.
template <DType kDType>
[[gnu::always_inline]] inline void store(const float* values, std::int64_t n, std::byte* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    if constexpr (kDType == DType::kF32) {
      reinterpret_cast<float*>(out)[i] = canonical_nan(values[i]);
    } else if constexpr (kDType == DType::kBf16) {
      reinterpret_cast<std::uint16_t*>(out)[i] = float_to_bf16(values[i]);
    } else {
      reinterpret_cast<std::uint16_t*>(out)[i] = float_to_f16(values[i]);
    }
  }
}

template <DType kDType>
[[gnu::always_inline]] inline float widened(const std::byte* in, std::int64_t i) {
  if constexpr (kDType == DType::kF32) return reinterpret_cast<const float*>(in)[i];
  const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(in)[i];
  return kDType == DType::kBf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

}  // namespace gatefold
