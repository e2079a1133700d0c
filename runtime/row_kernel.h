#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/dtype.h"

namespace gatefold {

/// c[row][column] = Σ_k a[row][k] · w[column][k] in fp32, each column summed in the order of k with
/// one rounding per product and per sum: the same bits on every CPU, whatever its vectors.
/// a: [rows][inputs] dense; w: packed groups (see Weight); c: [rows][ldc]; inputs a multiple of 32.
/// One row runs at the speed of memory; more rows are a fallback, correct but not fast.
void plain_gemm(DType storage, const std::byte* a, std::int64_t rows, std::int64_t inputs,
                const std::byte* w, std::int64_t groups, float* c, std::int64_t ldc);

}  // namespace gatefold
