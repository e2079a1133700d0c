#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "runtime/dtype.h"

/// Rows on their way through a mixture of experts: what Device's calls for it work on. Memory of
/// the device throughout; fp32 rows in groups of 64 start at 16 bytes, others anywhere.
namespace gatefold {

/// Logits of a router, or of a shared expert's gate: logits = x Wᵀ + bias in fp32. Each is the sum
/// of 32 lanes, lane l from +0 over the columns l, l + 32, … in order, folded by halves (l and l +
/// 16, then l + 8, …), every product and sum rounded; the bias is added last. NaN has one pattern.
struct LogitRows {
  const std::byte* x = nullptr;  // [rows, hidden] in the model dtype
  DType model = DType::kF32;
  std::int64_t rows = 0;
  std::int64_t hidden = 0;
  const float* weight = nullptr;  // [outputs, hidden]
  const float* bias = nullptr;    // [outputs], may be null
  std::int64_t outputs = 0;
  float* logits = nullptr;  // [rows, outputs]
};

/// Rows to be tiled: tile row i is row index[i] of `data`, or round(scale[i] * that row) to the
/// model dtype, the product in fp32. `rows` is that of the tiles.
struct InputRows {
  const std::byte* data = nullptr;      // in the model dtype
  std::int64_t stride = 0;              // elements
  const std::int32_t* index = nullptr;  // [rows]; null: i
  const float* scale = nullptr;         // [rows]; null: 1, without a rounding
};

/// An expert's finished rows, weighed and added to what its tokens have from experts before it. For
/// each row i, in fp32: p = weights[i] * (row i + bias); then for each m in
/// merges[merge_begin[i] … merge_begin[i + 1]): p = sums[m] + p; then sums[targets[i]] = p. Rows
/// may be worked on in any order: none reads what another one writes.
struct WeighedRows {
  const float* rows = nullptr;  // [groups][count][64], group_stride apart
  std::int64_t count = 0;
  std::int64_t groups = 0;
  std::int64_t group_stride = 0;              // elements, a multiple of 4
  const float* bias = nullptr;                // [groups*64]; null: none is added
  const float* weights = nullptr;             // [count]; null: 1, without a rounding
  const std::int32_t* merge_begin = nullptr;  // [count + 1]
  const std::int32_t* merges = nullptr;       // rows of sums
  const std::int32_t* targets = nullptr;      // [count], all different
  float* sums = nullptr;                      // [..., groups*64]
};

/// Of the tree over 1024 experts, values that wait for their sum at once: one below each of the ten
/// bits of an id, and the last.
inline constexpr std::int64_t kMaxOpenSums = 11;
/// The most shared experts of a layer.
inline constexpr std::int64_t kMaxShared = 16;

/// What a shared expert adds to its token's sum: its row, times sigmoid(gate) where it has a gate.
struct SharedRows {
  const float* rows = nullptr;         // [tokens, row_stride]
  const float* gate_logits = nullptr;  // [tokens]; null: no gate
};

/// Roots of tokens' trees added in tree order, then the shared experts' rows, then one rounding.
/// The roots of token t are roots[begin[t] … begin[t + 1]), each a row of `sums`, which begins at
/// roots[r] * root_stride; after root r is pushed merges[r] times the two top values become (lower
/// + upper), until one is left. At most kMaxOpenSums lie on each other. A token without roots
/// starts from +0.
struct CombinedRows {
  const float* sums = nullptr;          // rows of groups*64
  const std::int32_t* begin = nullptr;  // [tokens + 1]
  const std::int32_t* roots = nullptr;  // one a root, as are merges
  const std::int32_t* merges = nullptr;
  std::int64_t tokens = 0;
  std::int64_t groups = 0;
  std::int64_t root_stride = 0;             // elements, a multiple of 4; 0: groups*64, dense rows
  std::int64_t first_column = 0;            // of y, of what `sums` has: a multiple of 64
  std::int64_t columns = 0;                 // of y that `sums` has, at most groups*64
  std::span<const SharedRows> shared = {};  // host; columns of y, so first_column applies
  std::int64_t row_stride = 0;              // of y and of shared rows, elements
  DType dtype = DType::kF32;
  std::byte* y = nullptr;  // [tokens, row_stride]
};

}  // namespace gatefold
