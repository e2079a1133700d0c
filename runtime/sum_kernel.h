#pragma once

#include <cstdint>

#include "runtime/tensor_layout.h"

namespace gatefold {

/// For rows [first_row, first_row + rows) of one group of 64 columns: adds the partial product c
/// (rows `ldc` apart) to the top `merges` slots of the stack in tree order and leaves the sum in
/// slot height - merges.
void merge_group(const Partials& stack, int height, int merges, std::int64_t group,
                 std::int64_t first_row, std::int64_t rows, const float* c, std::int64_t ldc);

/// For rows [first_row, first_row + rows) of one group: evaluates the merge plan over the roots,
/// adds the bias and rounds to the output's dtype.
void sum_group(const RootSum& sum, std::int64_t group, std::int64_t first_row, std::int64_t rows);

}  // namespace gatefold
