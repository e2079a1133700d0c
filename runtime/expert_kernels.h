#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/expert_rows.h"

namespace gatefold {

/// Columns of a row in one step of weigh_rows() and combine_rows(), a multiple of 64: sums lie row
/// by row, and to touch a little of each of many rows costs a TLB miss a piece.
constexpr std::int64_t kStepColumns = 512;

/// One row of tile_rows() that has a scale: x [columns] in the model dtype → out [columns] in
/// `kept`.
void scale_row(DType model, const std::byte* x, float scale, std::int64_t columns, DType kept,
               std::byte* out);

/// Up to kStepColumns columns of a row from this one on.
void weigh_columns(const WeighedRows& io, std::int64_t row, std::int64_t first);

/// Up to kStepColumns columns of a token from this one on, counted from first_column.
void combine_columns(const CombinedRows& io, std::int64_t token, std::int64_t first);

}  // namespace gatefold
