#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "runtime/dtype.h"
#include "runtime/tensor_layout.h"

// What a thread of the device's own kernels holds. Sums and products that meet are __fadd_rn and
// __fmul_rn, which nothing contracts; all else is compiled with -fmad=false. A thread has 16 bytes
// per access and several of them in flight; indices have 64 bits.

namespace gatefold::cuda {

constexpr int kThreads = 256;
/// Accesses that a thread has on their way at once.
constexpr int kInFlight = 4;
/// Elements that a thread of the activation and of the sums has: 16 bytes of bf16.
constexpr std::int64_t kEight = 8;

struct alignas(16) Eight {
  float4 low, high;
};

__device__ inline Eight load_eight(const float* from) {
  const auto* at = reinterpret_cast<const float4*>(from);
  return {at[0], at[1]};
}
__device__ inline float4 add(const float4& a, const float4& b) {
  return {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w)};
}
/// a is the lower operand in tree order.
__device__ inline Eight add(const Eight& a, const Eight& b) {
  return {add(a.low, b.low), add(a.high, b.high)};
}
__device__ inline void unpack(const Eight& from, float (&to)[kEight]) {
  const float all[kEight] = {from.low.x,  from.low.y,  from.low.z,  from.low.w,
                             from.high.x, from.high.y, from.high.z, from.high.w};
  for (int i = 0; i < kEight; ++i) to[i] = all[i];
}

template <DType kDType>
using Stored = std::conditional_t<kDType == DType::kF32, float, std::uint16_t>;

template <DType kDType>
__device__ inline Stored<kDType> rounded(float value) {
  if constexpr (kDType == DType::kF32) return canonical_nan(value);
  if constexpr (kDType == DType::kBf16) return float_to_bf16(value);
  if constexpr (kDType == DType::kF16) return float_to_f16(value);
}

/// `to` is 16-byte aligned.
template <DType kDType>
__device__ inline void store_eight(const float (&values)[kEight], Stored<kDType>* to) {
  constexpr int kWords = static_cast<int>(sizeof(Stored<kDType>) * kEight / sizeof(uint4));
  alignas(16) Stored<kDType> packed[kEight];
  for (int i = 0; i < kEight; ++i) packed[i] = rounded<kDType>(values[i]);
  for (int i = 0; i < kWords; ++i) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(packed)[i];
  }
}

template <typename T>
__device__ inline bool aligned16(const T* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

/// This thread's place along a row, in whatever it takes at a time.
__device__ inline std::int64_t place_in_row() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

template <DType kDType>
__device__ inline float widened(Stored<kDType> value) {
  if constexpr (kDType == DType::kF32) return value;
  if constexpr (kDType == DType::kBf16) return bf16_to_float(value);
  if constexpr (kDType == DType::kF16) return f16_to_float(value);
}

}  // namespace gatefold::cuda
