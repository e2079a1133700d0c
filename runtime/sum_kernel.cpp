#include "runtime/sum_kernel.h"

#include <algorithm>
#include <array>

#include "runtime/column_math.h"
#include "runtime/vector_isa.h"

namespace gatefold {
namespace {

/// More values on the stack than a tree of 2^62 blocks can have.
constexpr std::size_t kMaxDepth = 64;

/// 64 columns of one row: the roots in tree order. The result is in stack[0].
[[gnu::always_inline]] inline void add_roots(const RootSum& sum, std::int64_t offset,
                                             float (*stack)[kColumns]) {
  std::size_t height = 0;
  for (std::size_t leaf = 0; leaf < sum.roots.size(); ++leaf) {
    const float* root = sum.roots[leaf] + offset;
    const int merges = sum.plan->merges[leaf];
    if (merges == 0) {
      copy(root, stack[height++]);
      continue;
    }
    add(stack[height - 1], root, stack[height - 1]);
    for (int m = 1; m < merges; ++m, --height) {
      add(stack[height - 2], stack[height - 1], stack[height - 2]);
    }
  }
}

template <DType kDType>
[[gnu::always_inline]] inline void sum_rows(const RootSum& sum, std::int64_t group,
                                            std::int64_t first_row, std::int64_t rows) {
  float stack[kMaxDepth][kColumns];
  const std::int64_t valid = std::min(kGroup, sum.columns - group * kGroup);
  std::array<float, kColumns> bias{};
  if (sum.bias != nullptr) std::copy_n(sum.bias + group * kGroup, valid, bias.begin());
  for (std::int64_t row = first_row; row < first_row + rows; ++row) {
    add_roots(sum, group * sum.group_stride + row * sum.row_stride, stack);
    // x + 0 changes no bits but those of -0, so a layer without a bias skips it.
    if (sum.bias != nullptr) add(stack[0], bias.data(), stack[0]);
    std::byte* out =
        sum.out + (group * sum.out_group_stride + row * sum.out_row_stride) * size_of(kDType);
    if (valid == kGroup) {
      store<kDType>(stack[0], kGroup, out);
    } else {
      store<kDType>(stack[0], valid, out);
    }
  }
}

GATEFOLD_CLONES void sum_bf16(const RootSum& sum, std::int64_t group, std::int64_t first_row,
                              std::int64_t rows) {
  sum_rows<DType::kBf16>(sum, group, first_row, rows);
}
GATEFOLD_CLONES void sum_f16(const RootSum& sum, std::int64_t group, std::int64_t first_row,
                             std::int64_t rows) {
  sum_rows<DType::kF16>(sum, group, first_row, rows);
}
GATEFOLD_CLONES void sum_f32(const RootSum& sum, std::int64_t group, std::int64_t first_row,
                             std::int64_t rows) {
  sum_rows<DType::kF32>(sum, group, first_row, rows);
}

GATEFOLD_CLONES void merge(const Partials& stack, int height, int merges, std::int64_t group,
                           std::int64_t first_row, std::int64_t rows, const float* c,
                           std::int64_t ldc) {
  float* target = stack.at(height - merges, group);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t row = (first_row + r) * stack.row_stride;
    float sum[kColumns];
    copy(c + r * ldc, sum);
    for (int m = 1; m <= merges; ++m) add(stack.at(height - m, group) + row, sum, sum);
    copy(sum, target + row);
  }
}

}  // namespace

void merge_group(const Partials& stack, int height, int merges, std::int64_t group,
                 std::int64_t first_row, std::int64_t rows, const float* c, std::int64_t ldc) {
  merge(stack, height, merges, group, first_row, rows, c, ldc);
}

void sum_group(const RootSum& sum, std::int64_t group, std::int64_t first_row, std::int64_t rows) {
  switch (sum.dtype) {
    case DType::kBf16: sum_bf16(sum, group, first_row, rows); break;
    case DType::kF16: sum_f16(sum, group, first_row, rows); break;
    case DType::kF32: sum_f32(sum, group, first_row, rows); break;
  }
}

}  // namespace gatefold
