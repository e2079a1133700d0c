#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>

#include "runtime/dtype.h"

namespace gatefold {

struct GemmCheck {
  bool passed = false;
  std::uint64_t fingerprint = 0;
};

/// c [rows, columns] = a [rows, inputs] · w, one tile of packed weights, of fixed rows and columns.
using TileGemm = std::function<void(const std::byte* a, const std::byte* w, float* c)>;

/// Does a row's result depend on anything but the row? Puts the same rows in every place of the
/// tile, beside other rows, beside NaN rows and beside zero padding, and repeats: all bits equal,
/// or the kernel can't be used for canonical sums. Values are seeded.
GemmCheck check_row_bits(std::int64_t rows, std::int64_t inputs, std::int64_t columns,
                         DType storage, const TileGemm& gemm);

/// Does a column's result depend on how many columns a call has? Multiplies the same tile by the
/// first `columns` columns at once and in pieces of `piece`: all bits equal, or only one width may
/// ever be used. `whole` takes `columns` columns, `part` takes `piece` of them.
bool check_column_bits(std::int64_t rows, std::int64_t inputs, std::int64_t columns,
                       std::int64_t piece, DType storage, const TileGemm& whole,
                       const TileGemm& part);

struct WidthsCheck {
  bool rows = false;     // in panels of one size a row's bits depend on nothing but the row
  bool columns = false;  // nor at any other width, and none of them changes a column's bits
  std::uint64_t fingerprint = 0;  // of the panels alone: other widths go by the thread count
};

/// Both checks at each width in `gemms`, `base` among them. Panels of one size are `base` columns
/// wide, the last one `rest` (0: as wide).
WidthsCheck check_widths(std::int64_t rows, std::int64_t inputs, DType storage, std::int64_t base,
                         std::int64_t rest, const std::map<std::int64_t, TileGemm>& gemms);

}  // namespace gatefold
