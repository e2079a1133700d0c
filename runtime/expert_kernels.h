#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/expert_rows.h"

namespace gatefold {

/// Columns of one step of combine_rows(), a multiple of 64.
constexpr std::int64_t kCombinedColumns = 512;

/// One row of tile_rows() that has a scale: x [columns] in the model dtype → out [columns] in
/// `kept`.
void scale_row(DType model, const std::byte* x, float scale, std::int64_t columns, DType kept,
               std::byte* out);

/// Rows [first_row, first_row + rows) of one group of 64 columns.
void weigh_group(const WeighedRows& io, std::int64_t group, std::int64_t first_row,
                 std::int64_t rows);

/// Up to 512 columns of a token from this one on, counted from first_column.
void combine_columns(const CombinedRows& io, std::int64_t token, std::int64_t first);

}  // namespace gatefold
