#include "runtime/row_kernel.h"

#include <algorithm>
#include <cstring>

#include "runtime/tensor_layout.h"
#include "runtime/vector_isa.h"

namespace gatefold {
namespace {

// Sixteen columns side by side. The compiler splits it on machines with shorter vectors; columns
// are independent of each other, so the bits don't change.
using Floats = float __attribute__((vector_size(64)));
using Words = std::uint32_t __attribute__((vector_size(64)));
constexpr int kLanes = 16;
constexpr int kVectors = static_cast<int>(kGroup) / kLanes;
constexpr std::int64_t kVectorBytes = sizeof(Floats);
/// Weights are fetched this many bytes before they are used: one row has too little arithmetic to
/// hide memory's latency behind. Into L2: L1 has too few fill buffers for it. Past the end of a
/// weight a prefetch does nothing.
constexpr std::int64_t kAhead = 1024;

template <typename Vector>
[[gnu::always_inline]] inline void load(Vector& value, const std::byte* from) {
  std::memcpy(&value, from, sizeof(value));
}

/// One group of 64 columns for kRows rows. bf16: each 32-bit word holds the weights of two
/// consecutive k, the even one in its low half.
template <int kRows>
[[gnu::always_inline]] inline void group_bf16(const std::uint16_t* a, std::int64_t inputs,
                                              const std::byte* w, float* c, std::int64_t ldc) {
  Floats sum[static_cast<std::size_t>(kRows)][static_cast<std::size_t>(kVectors)] = {};
  for (std::int64_t k = 0; k < inputs; k += 2) {
    const std::byte* at = w + k * kGroup * 2;
    for (int v = 0; v < kVectors; ++v) {
      __builtin_prefetch(at + kAhead + v * kVectorBytes, 0, 2);
      Words pair;
      load(pair, at + v * kVectorBytes);
      const auto even = reinterpret_cast<Floats>(pair << 16);
      const auto odd = reinterpret_cast<Floats>(pair & 0xffff0000U);
      for (int r = 0; r < kRows; ++r) {
        sum[r][v] += even * bf16_to_float(a[r * inputs + k]);
        sum[r][v] += odd * bf16_to_float(a[r * inputs + k + 1]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) std::memcpy(c + r * ldc, sum[r], sizeof(sum[r]));
}

template <int kRows>
[[gnu::always_inline]] inline void group_f32(const float* a, std::int64_t inputs,
                                             const std::byte* w, float* c, std::int64_t ldc) {
  Floats sum[static_cast<std::size_t>(kRows)][static_cast<std::size_t>(kVectors)] = {};
  for (std::int64_t k = 0; k < inputs; ++k) {
    const std::byte* at = w + k * kGroup * 4;
    for (int v = 0; v < kVectors; ++v) {
      __builtin_prefetch(at + kAhead + v * kVectorBytes, 0, 2);
      Floats weight;
      load(weight, at + v * kVectorBytes);
      for (int r = 0; r < kRows; ++r) sum[r][v] += weight * a[r * inputs + k];
    }
  }
  for (int r = 0; r < kRows; ++r) std::memcpy(c + r * ldc, sum[r], sizeof(sum[r]));
}

GATEFOLD_CLONES void one_row_bf16(const std::uint16_t* a, std::int64_t inputs, const std::byte* w,
                                  float* c) {
  group_bf16<1>(a, inputs, w, c, 0);
}
GATEFOLD_CLONES void four_rows_bf16(const std::uint16_t* a, std::int64_t inputs, const std::byte* w,
                                    float* c, std::int64_t ldc) {
  group_bf16<4>(a, inputs, w, c, ldc);
}
GATEFOLD_CLONES void one_row_f32(const float* a, std::int64_t inputs, const std::byte* w,
                                 float* c) {
  group_f32<1>(a, inputs, w, c, 0);
}
GATEFOLD_CLONES void four_rows_f32(const float* a, std::int64_t inputs, const std::byte* w,
                                   float* c, std::int64_t ldc) {
  group_f32<4>(a, inputs, w, c, ldc);
}

template <typename Element, typename OneRow, typename FourRows>
void run(const std::byte* a, std::int64_t rows, std::int64_t inputs, const std::byte* w,
         std::int64_t groups, float* c, std::int64_t ldc, OneRow one_row, FourRows four_rows) {
  const auto* input = reinterpret_cast<const Element*>(a);
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::byte* group = w + g * inputs * kGroup * static_cast<std::int64_t>(sizeof(Element));
    std::int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
      four_rows(input + row * inputs, inputs, group, c + row * ldc + g * kGroup, ldc);
    }
    for (; row < rows; ++row) {
      one_row(input + row * inputs, inputs, group, c + row * ldc + g * kGroup);
    }
  }
}

}  // namespace

void plain_gemm(DType storage, const std::byte* a, std::int64_t rows, std::int64_t inputs,
                const std::byte* w, std::int64_t groups, float* c, std::int64_t ldc) {
  if (storage == DType::kBf16) {
    run<std::uint16_t>(a, rows, inputs, w, groups, c, ldc, one_row_bf16, four_rows_bf16);
  } else {
    run<float>(a, rows, inputs, w, groups, c, ldc, one_row_f32, four_rows_f32);
  }
}

}  // namespace gatefold
