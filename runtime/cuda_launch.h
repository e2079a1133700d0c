#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "runtime/canonical.h"
#include "runtime/dtype.h"

// How kernels are started: what the host decides for them.

namespace gatefold::cuda {

inline constexpr std::int64_t kMostBlocks = 65535;  // of a grid's second dimension

/// Blocks for `places` threads along each of `rows` rows.
inline dim3 row_grid(std::int64_t places, std::int64_t rows, std::int64_t block) {
  return {static_cast<unsigned>(ceil_div(places, block)),
          static_cast<unsigned>(std::min(rows, kMostBlocks))};
}

/// Calls visit.operator()<Unit>(bytes) with the widest unit that divides all `numbers`.
template <typename Visitor>
void with_unit(std::initializer_list<std::int64_t> numbers, Visitor visit) {
  std::int64_t all = 0;
  for (const std::int64_t number : numbers) all |= number;
  if (all % 16 == 0) return visit.template operator()<uint4>(16);
  if (all % 8 == 0) return visit.template operator()<uint2>(8);
  if (all % 4 == 0) return visit.template operator()<unsigned>(4);
  if (all % 2 == 0) return visit.template operator()<unsigned short>(2);
  return visit.template operator()<unsigned char>(1);
}

inline std::int64_t address(const void* pointer) {
  return reinterpret_cast<std::intptr_t>(pointer);
}

/// Calls visit.operator()<dtype>().
template <typename Visitor>
void with_dtype(DType dtype, Visitor visit) {
  switch (dtype) {
    case DType::kF32: return visit.template operator()<DType::kF32>();
    case DType::kBf16: return visit.template operator()<DType::kBf16>();
    case DType::kF16: return visit.template operator()<DType::kF16>();
  }
}

}  // namespace gatefold::cuda
