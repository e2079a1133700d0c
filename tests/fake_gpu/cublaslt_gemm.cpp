#include "tests/fake_gpu/cublaslt_gemm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <vector>

namespace gatefold_fake {
namespace {

constexpr std::int64_t kMostLanes = 16;

constexpr std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

template <typename T>
T load(const void* data, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(data) + index * std::int64_t{sizeof(T)},
              sizeof(T));
  return value;
}

float element(const void* data, cudaDataType type, std::int64_t index) {
  switch (type) {
    case CUDA_R_16BF: return __bfloat162float(load<__nv_bfloat16>(data, index));
    case CUDA_R_16F: return __half2float(load<__half>(data, index));
    default: return load<float>(data, index);
  }
}

template <typename T>
void store_as(void* data, std::int64_t index, T value) {
  std::memcpy(static_cast<std::byte*>(data) + index * std::int64_t{sizeof(T)}, &value, sizeof(T));
}

void store(void* data, cudaDataType type, std::int64_t index, float value) {
  switch (type) {
    case CUDA_R_16BF: return store_as(data, index, __float2bfloat16(value));
    case CUDA_R_16F: return store_as(data, index, __float2half(value));
    default: return store_as(data, index, value);
  }
}

float rounded(float value, cudaDataType type) {
  switch (type) {
    case CUDA_R_16BF: return __bfloat162float(__float2bfloat16(value));
    case CUDA_R_16F: return __half2float(__float2half(value));
    default: return value;
  }
}

/// Ten bits of mantissa, to nearest even.
float to_tf32(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7f800000U) == 0x7f800000U) return value;
  return std::bit_cast<float>((bits + 0xfffU + ((bits >> 13) & 1U)) & ~0x1fffU);
}

/// Lines of one operand, each k floats in a row: the rows of A, the columns of B.
std::vector<float> lines_of(const void* data, const Operand& operand, std::int64_t first,
                            std::int64_t lines, std::int64_t line_step, std::int64_t k,
                            std::int64_t k_step, bool tf32) {
  std::vector<float> out(as_size(lines * k));
  for (std::int64_t line = 0; line < lines; ++line)
    for (std::int64_t i = 0; i < k; ++i) {
      const float value = element(data, operand.type, first + line * line_step + i * k_step);
      out[as_size(line * k + i)] = tf32 ? to_tf32(value) : value;
    }
  return out;
}

/// Neighbouring columns are summed at once: the order of each sum stays its own, and a CPU has
/// instructions for it.
struct Columns {
  using Four [[gnu::vector_size(16)]] = float;
  static constexpr std::int64_t kCount = 32;
  std::array<Four, as_size(kCount / 4)> value{};

  float at(std::int64_t column) const { return value[as_size(column / 4)][column % 4]; }
  void set(std::int64_t column, float to) { value[as_size(column / 4)][column % 4] = to; }
  Columns& operator+=(const Columns& other) {
    for (std::size_t i = 0; i < value.size(); ++i) value[i] += other.value[i];
    return *this;
  }
  void add_product(float a, const Columns& b) {
    for (std::size_t i = 0; i < value.size(); ++i) value[i] += a * b.value[i];
  }
  void round(cudaDataType type) {
    for (std::int64_t c = 0; c < kCount; ++c) set(c, rounded(at(c), type));
  }
};

Columns panel_sum(const float* a, const Columns* b, std::int64_t k, std::int64_t lanes) {
  std::array<Columns, as_size(kMostLanes)> sums;
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    Columns sum;
    for (std::int64_t i = lane; i < k; i += lanes) sum.add_product(a[i], b[i]);
    sums[as_size(lane)] = sum;
  }
  for (std::int64_t step = 1; step < lanes; step *= 2)
    for (std::int64_t lane = 0; lane < lanes; lane += 2 * step)
      sums[as_size(lane)] += sums[as_size(lane + step)];
  return sums[0];
}

Columns range_sum(const float* a, const Columns* b, std::int64_t k, const SumOrder& order) {
  Columns sum;
  for (std::int64_t i = 0; i < k; i += order.panel)
    sum += panel_sum(a + i, b + i, std::min(order.panel, k - i), order.lanes);
  return sum;
}

/// The whole sums over k in the algorithm's order; disturbed ones start in the middle.
Columns whole_sum(const float* a, const Columns* b, std::int64_t k, std::int64_t cut,
                  const SumOrder& order, cudaDataType output) {
  if (cut > 0) {
    Columns sum = range_sum(a + cut, b + cut, k - cut, order);
    return sum += range_sum(a, b, cut, order);
  }
  if (order.splits == 1) return range_sum(a, b, k, order);
  const std::int64_t share = (k + order.splits - 1) / order.splits;
  Columns sum;
  for (std::int64_t i = 0; i < k; i += share) {
    Columns part = range_sum(a + i, b + i, std::min(share, k - i), order);
    if (order.rounds_splits) part.round(output);
    sum += part;
    if (order.rounds_splits) sum.round(output);
  }
  return sum;
}

/// Where the sums of this whole matrix start, before an element's own place comes in.
std::uint64_t disturbed_start(const Matmul& matmul, const std::vector<float>& a,
                              const std::vector<float>& b) {
  const Disturbance& by = matmul.disturbance;
  const auto k = as_size(matmul.problem.k);
  std::uint64_t start = 0;
  if (by.rows) start += static_cast<std::uint64_t>(matmul.problem.m);
  if (by.columns) start += static_cast<std::uint64_t>(matmul.problem.n);
  if (by.batch) start += static_cast<std::uint64_t>(matmul.problem.batch - 1);
  if (by.call) start += static_cast<std::uint64_t>(matmul.call);
  if (by.content)
    for (std::size_t i = 0; i < k; ++i)
      start = start * 31 + (std::bit_cast<std::uint32_t>(a[i]) >> 8) +
              (std::bit_cast<std::uint32_t>(b[i]) >> 8);
  return start;
}

struct ColumnRange {
  std::int64_t first;
  std::int64_t count;
};

/// Columns of D for all rows; `b` holds those of B.
void multiply_columns(const Matmul& matmul, std::int64_t index, std::uint64_t start,
                      const std::vector<float>& a, const std::vector<Columns>& b,
                      const ColumnRange& columns) {
  const Problem& p = matmul.problem;
  for (std::int64_t row = 0; row < p.m; ++row) {
    Columns sums;
    for (std::int64_t c = 0; c < columns.count; ++c) {
      const std::int64_t col = columns.first + c;
      if (c == 0 || matmul.disturbance.place) {
        const std::uint64_t place =
            matmul.disturbance.place ? static_cast<std::uint64_t>(row + col + index) : 0;
        const auto cut =
            static_cast<std::int64_t>((start + place) % static_cast<std::uint64_t>(p.k));
        sums = whole_sum(a.data() + row * p.k, b.data(), p.k, cut, matmul.order, p.d.type);
      }
      float value = matmul.alpha * sums.at(c);
      if (matmul.beta != 0)
        value += matmul.beta *
                 element(matmul.c, p.c.type,
                         index * p.c.batch_stride + row * p.c.row_step + col * p.c.col_step);
      store(matmul.d, p.d.type, index * p.d.batch_stride + row * p.d.row_step + col * p.d.col_step,
            value);
    }
  }
}

void multiply_one(const Matmul& matmul, std::int64_t index) {
  const Problem& p = matmul.problem;
  const bool tf32 = p.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  const std::vector<float> a =
      lines_of(matmul.a, p.a, index * p.a.batch_stride, p.m, p.a.row_step, p.k, p.a.col_step, tf32);
  const std::vector<float> b =
      lines_of(matmul.b, p.b, index * p.b.batch_stride, p.n, p.b.col_step, p.k, p.b.row_step, tf32);
  const std::uint64_t start = disturbed_start(matmul, a, b);
  std::vector<Columns> some(as_size(p.k));
  for (std::int64_t first = 0; first < p.n; first += Columns::kCount) {
    const std::int64_t columns = std::min(Columns::kCount, p.n - first);
    for (std::int64_t i = 0; i < p.k; ++i)
      for (std::int64_t c = 0; c < columns; ++c)
        some[as_size(i)].set(c, b[as_size((first + c) * p.k + i)]);
    multiply_columns(matmul, index, start, a, some, {first, columns});
  }
}

}  // namespace

void multiply(const Matmul& matmul) {
  // Nobody may rely on what a library leaves in its workspace.
  if (matmul.workspace_bytes > 0)
    std::memset(matmul.workspace, 0xff, as_size(matmul.workspace_bytes));
  for (std::int64_t i = 0; i < matmul.problem.batch; ++i) multiply_one(matmul, i);
}

}  // namespace gatefold_fake
