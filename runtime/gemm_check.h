#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "runtime/dtype.h"

namespace gatefold {

struct GemmCheck {
  bool passed = false;
  std::uint64_t fingerprint = 0;
};

/// c [rows, columns] = a [rows, inputs] · w, one tile.
using TileGemm = std::function<void(const std::byte* a, const std::byte* w, float* c)>;

/// Does a row's result depend on anything but the row? Puts the same rows in every place of the
/// tile, beside other rows, beside NaN rows and beside zero padding, and repeats: all bits equal,
/// or the kernel can't be used for canonical sums. Values are seeded.
GemmCheck check_row_bits(std::int64_t rows, std::int64_t inputs, std::int64_t columns,
                         DType storage, const TileGemm& gemm);

}  // namespace gatefold
