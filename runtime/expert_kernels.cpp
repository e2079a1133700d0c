#include "runtime/expert_kernels.h"

#include <algorithm>

#include "runtime/column_math.h"
#include "runtime/fp32_math.h"
#include "runtime/tensor_layout.h"
#include "runtime/tensor_source.h"
#include "runtime/vector_isa.h"

namespace gatefold {
namespace {

/// What of a token is worked on together.
struct Columns {
  std::int64_t column;  // of sums
  std::int64_t count;   // at most 64
};

[[gnu::always_inline]] inline void times(float factor, float* values) {
  for (std::size_t i = 0; i < kColumns; ++i) values[i] = factor * values[i];
}

GATEFOLD_CLONES void weigh(const WeighedRows& io, std::int64_t row, std::int64_t first) {
  const std::int64_t width = io.groups * kGroup;
  const std::int64_t end = std::min(first + kStepColumns, width);
  for (std::int64_t column = first; column < end; column += kGroup) {
    float p[kColumns];
    copy(io.rows + column / kGroup * io.group_stride + row * kGroup, p);
    // x + 0 changes no bits but those of -0, so an expert without a bias skips it.
    if (io.bias != nullptr) add(p, io.bias + column, p);
    if (io.weights != nullptr) times(io.weights[row], p);
    float* sums = io.sums + column;
    for (std::int32_t m = io.merge_begin[row]; m < io.merge_begin[row + 1]; ++m) {
      add(sums + io.merges[m] * width, p, p);
    }
    copy(p, sums + io.targets[row] * width);
  }
}

/// The token's roots in tree order; the result is in stack[0].
[[gnu::always_inline]] inline void add_roots(const CombinedRows& io, std::int64_t token,
                                             std::int64_t column,
                                             float (&stack)[kMaxOpenSums][kColumns]) {
  const std::int64_t stride = io.root_stride > 0 ? io.root_stride : io.groups * kGroup;
  std::size_t height = 0;
  for (std::int32_t r = io.begin[token]; r < io.begin[token + 1]; ++r) {
    copy(io.sums + io.roots[r] * stride + column, stack[height++]);
    for (std::int32_t m = 0; m < io.merges[r]; ++m, --height) {
      add(stack[height - 2], stack[height - 1], stack[height - 2]);
    }
  }
  if (height == 0) std::fill_n(stack[0], kColumns, 0.0F);
}

template <DType kDType>
[[gnu::always_inline]] inline void combine(const CombinedRows& io, std::int64_t token,
                                           const Columns& at) {
  float stack[kMaxOpenSums][kColumns];
  add_roots(io, token, at.column, stack);
  const std::int64_t in_row = token * io.row_stride + io.first_column + at.column;
  float* sum = stack[0];
  for (const SharedRows& shared : io.shared) {
    const float* row = shared.rows + in_row;
    if (shared.gate_logits == nullptr) {
      for (std::int64_t i = 0; i < at.count; ++i) sum[i] = sum[i] + row[i];
      continue;
    }
    const float gate = sigmoid_fp32(shared.gate_logits[token]);
    for (std::int64_t i = 0; i < at.count; ++i) sum[i] = sum[i] + gate * row[i];
  }
  store<kDType>(sum, at.count, io.y + in_row * size_of(kDType));
}

template <DType kDType>
[[gnu::always_inline]] inline void combine_all(const CombinedRows& io, std::int64_t token,
                                               std::int64_t first) {
  const std::int64_t end = std::min(first + kStepColumns, io.columns);
  for (std::int64_t column = first; column < end; column += kGroup) {
    combine<kDType>(io, token, {column, std::min(kGroup, end - column)});
  }
}

GATEFOLD_CLONES void combine_bf16(const CombinedRows& io, std::int64_t token, std::int64_t first) {
  combine_all<DType::kBf16>(io, token, first);
}
GATEFOLD_CLONES void combine_f16(const CombinedRows& io, std::int64_t token, std::int64_t first) {
  combine_all<DType::kF16>(io, token, first);
}
GATEFOLD_CLONES void combine_f32(const CombinedRows& io, std::int64_t token, std::int64_t first) {
  combine_all<DType::kF32>(io, token, first);
}

template <DType kDType>
[[gnu::always_inline]] inline void scale_by(const std::byte* x, float scale, std::int64_t columns,
                                            std::byte* out) {
  for (std::int64_t first = 0; first < columns; first += kGroup) {
    const std::int64_t n = std::min(kGroup, columns - first);
    float values[kColumns];
    for (std::int64_t i = 0; i < n; ++i) values[i] = scale * widened<kDType>(x, first + i);
    store<kDType>(values, n, out + first * size_of(kDType));
  }
}

GATEFOLD_CLONES void scale_bf16(const std::byte* x, float scale, std::int64_t columns,
                                std::byte* out) {
  scale_by<DType::kBf16>(x, scale, columns, out);
}
GATEFOLD_CLONES void scale_f16(const std::byte* x, float scale, std::int64_t columns,
                               std::byte* out) {
  scale_by<DType::kF16>(x, scale, columns, out);
}
GATEFOLD_CLONES void scale_f32(const std::byte* x, float scale, std::int64_t columns,
                               std::byte* out) {
  scale_by<DType::kF32>(x, scale, columns, out);
}

void scale_in_model(DType model, const std::byte* x, float scale, std::int64_t columns,
                    std::byte* out) {
  switch (model) {
    case DType::kBf16: return scale_bf16(x, scale, columns, out);
    case DType::kF16: return scale_f16(x, scale, columns, out);
    case DType::kF32: return scale_f32(x, scale, columns, out);
  }
}

}  // namespace

void scale_row(DType model, const std::byte* x, float scale, std::int64_t columns, DType kept,
               std::byte* out) {
  if (kept == model) return scale_in_model(model, x, scale, columns, out);
  constexpr std::int64_t kPiece = 512;
  std::byte narrow[kPiece * 2];  // what is kept wider than the model has it is of 16 bits
  for (std::int64_t first = 0; first < columns; first += kPiece) {
    const std::int64_t n = std::min(kPiece, columns - first);
    scale_in_model(model, x + first * size_of(model), scale, n, narrow);
    convert(model, narrow, kept, out + first * size_of(kept), n);
  }
}

void weigh_columns(const WeighedRows& io, std::int64_t row, std::int64_t first) {
  weigh(io, row, first);
}

void combine_columns(const CombinedRows& io, std::int64_t token, std::int64_t first) {
  switch (io.dtype) {
    case DType::kBf16: return combine_bf16(io, token, first);
    case DType::kF16: return combine_f16(io, token, first);
    case DType::kF32: return combine_f32(io, token, first);
  }
}

}  // namespace gatefold
