#include "tests/fake_gpu/cublaslt_problem.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>

namespace gatefold_fake {
namespace {

constexpr cublasStatus_t kInvalid = CUBLAS_STATUS_INVALID_VALUE;
constexpr cublasStatus_t kUnsupported = CUBLAS_STATUS_NOT_SUPPORTED;
constexpr std::int64_t kWidest = 256;

/// Input and output types that cuBLASLt 13 multiplies with fp32 arithmetic, as far as they are
/// here.
struct Types {
  cudaDataType input;
  cudaDataType output;
  bool tf32;  // may be computed in TF32
};
constexpr Types kTypes[] = {
    {CUDA_R_32F, CUDA_R_32F, true},    {CUDA_R_16BF, CUDA_R_32F, false},
    {CUDA_R_16BF, CUDA_R_16BF, false}, {CUDA_R_16F, CUDA_R_32F, false},
    {CUDA_R_16F, CUDA_R_16F, false},
};

std::int64_t times(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  require(!__builtin_mul_overflow(a, b, &product), kInvalid, "an extent beyond 64 bits");
  return product;
}

std::int64_t plus(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  require(!__builtin_add_overflow(a, b, &sum), kInvalid, "an extent beyond 64 bits");
  return sum;
}

/// The largest power of two, at most 256, that divides `bytes`.
std::int64_t alignment_of(std::int64_t bytes) {
  return bytes == 0 ? kWidest : std::min(kWidest, bytes & -bytes);
}

void check_layout(const Layout& layout, const std::string& name) {
  require(layout.rows > 0 && layout.cols > 0, kInvalid, name + " has no element");
  constexpr std::uint64_t most = std::numeric_limits<std::int32_t>::max();
  require(layout.rows <= most && layout.cols <= most, kUnsupported, name + " beyond 2^31-1");
  require(layout.order == CUBLASLT_ORDER_COL || layout.order == CUBLASLT_ORDER_ROW, kUnsupported,
          name + ": order " + std::to_string(layout.order));
  const bool row_major = layout.order == CUBLASLT_ORDER_ROW;
  const std::uint64_t inner = row_major ? layout.cols : layout.rows;
  require(layout.ld >= static_cast<std::int64_t>(inner), kInvalid,
          name + ": leading dimension " + std::to_string(layout.ld) + " below " +
              std::to_string(inner));
  require(layout.batch_count > 0, kInvalid, name + ": batch count");
  require(layout.batch_stride >= 0, kInvalid, name + ": negative batch stride");
  require(layout.batch_mode == CUBLASLT_BATCH_MODE_STRIDED, kUnsupported, name + ": batch mode");
  require(layout.plane_offset == 0, kUnsupported, name + ": planar complex");
}

void check_operation(const Operation& operation) {
  require(operation.pointer_mode == CUBLASLT_POINTER_MODE_HOST, kUnsupported, "pointer mode");
  require(operation.fill == CUBLAS_FILL_MODE_FULL, kUnsupported, "fill mode");
  require(operation.epilogue == CUBLASLT_EPILOGUE_DEFAULT, kUnsupported, "epilogue");
  require(operation.trans_c == CUBLAS_OP_N, kUnsupported, "transposed C");
  for (const std::int32_t op : {operation.trans_a, operation.trans_b})
    require(op == CUBLAS_OP_N || op == CUBLAS_OP_T || op == CUBLAS_OP_C, kInvalid,
            "transposition " + std::to_string(op));
  const bool scaled = operation.a_scale != nullptr || operation.b_scale != nullptr ||
                      operation.c_scale != nullptr || operation.d_scale != nullptr ||
                      operation.amax_d != nullptr;
  require(!scaled, kInvalid, "scales are for fp8");
}

Operand view(const Layout& layout, bool transposed) {
  Operand operand;
  operand.type = static_cast<cudaDataType>(layout.type);
  const std::int64_t size = bytes_of(operand.type);
  const bool row_major = layout.order == CUBLASLT_ORDER_ROW;
  const auto rows = static_cast<std::int64_t>(layout.rows);
  const auto cols = static_cast<std::int64_t>(layout.cols);
  operand.row_step = row_major ? layout.ld : 1;
  operand.col_step = row_major ? 1 : layout.ld;
  if (transposed) std::swap(operand.row_step, operand.col_step);
  operand.batch_stride = layout.batch_stride;
  const std::int64_t outer = row_major ? rows : cols;
  const std::int64_t inner = row_major ? cols : rows;
  const std::int64_t one = plus(times(outer - 1, layout.ld), inner);
  const std::int64_t last = times(layout.batch_count - 1, layout.batch_stride);
  operand.bytes = times(plus(last, one), size);
  operand.alignment = alignment_of(times(layout.ld, size));
  if (layout.batch_count > 1)
    operand.alignment = std::min(operand.alignment, alignment_of(times(layout.batch_stride, size)));
  return operand;
}

}  // namespace

std::int64_t bytes_of(cudaDataType type) {
  switch (type) {
    case CUDA_R_32F: return 4;
    case CUDA_R_16F:
    case CUDA_R_16BF: return 2;
    default: throw Refusal{kUnsupported, "data type " + std::to_string(type)};
  }
}

void check_types(cublasComputeType_t compute, cudaDataType scale, cudaDataType a, cudaDataType b,
                 cudaDataType c, cudaDataType d) {
  require(compute == CUBLAS_COMPUTE_32F || compute == CUBLAS_COMPUTE_32F_PEDANTIC ||
              compute == CUBLAS_COMPUTE_32F_FAST_TF32,
          kUnsupported, "compute type " + std::to_string(compute));
  require(scale == CUDA_R_32F, kUnsupported, "scale type " + std::to_string(scale));
  require(a == b && c == d, kUnsupported, "types differ between A and B, or C and D");
  const bool known = std::any_of(std::begin(kTypes), std::end(kTypes), [&](const Types& row) {
    return row.input == a && row.output == d &&
           (row.tf32 || compute != CUBLAS_COMPUTE_32F_FAST_TF32);
  });
  require(known, kUnsupported, "this combination of types");
}

Problem read_problem(const Operation* operation, const Layout* a, const Layout* b, const Layout* c,
                     const Layout* d) {
  require(operation != nullptr && a != nullptr && b != nullptr && c != nullptr && d != nullptr,
          kInvalid, "a descriptor is null, destroyed, or of another kind");
  check_operation(*operation);
  check_layout(*a, "A");
  check_layout(*b, "B");
  check_layout(*c, "C");
  check_layout(*d, "D");
  const bool trans_a = operation->trans_a != CUBLAS_OP_N;
  const bool trans_b = operation->trans_b != CUBLAS_OP_N;
  Problem problem;
  problem.compute = static_cast<cublasComputeType_t>(operation->compute);
  problem.a = view(*a, trans_a);
  problem.b = view(*b, trans_b);
  problem.c = view(*c, false);
  problem.d = view(*d, false);
  check_types(problem.compute, static_cast<cudaDataType>(operation->scale), problem.a.type,
              problem.b.type, problem.c.type, problem.d.type);
  problem.m = static_cast<std::int64_t>(trans_a ? a->cols : a->rows);
  problem.k = static_cast<std::int64_t>(trans_a ? a->rows : a->cols);
  problem.n = static_cast<std::int64_t>(trans_b ? b->rows : b->cols);
  const auto inner = static_cast<std::int64_t>(trans_b ? b->cols : b->rows);
  require(inner == problem.k, kInvalid, "A and B disagree on k");
  for (const Layout* out : {c, d})
    require(static_cast<std::int64_t>(out->rows) == problem.m &&
                static_cast<std::int64_t>(out->cols) == problem.n,
            kInvalid, "C or D is not m by n");
  require(c->order == d->order, kUnsupported, "C and D differ in order");
  problem.batch = d->batch_count;
  for (const Layout* other : {a, b, c})
    require(other->batch_count == d->batch_count, kInvalid, "batch counts differ");
  const std::int64_t outer = d->order == CUBLASLT_ORDER_ROW ? problem.m : problem.n;
  require(problem.batch == 1 || d->batch_stride >= times(outer, d->ld), kInvalid,
          "matrices of D overlap");
  return problem;
}

cublasStatus_t explain(const char* call, const Refusal& refusal) {
  static const bool wanted = std::getenv("GATEFOLD_FAKE_EXPLAIN") != nullptr;
  if (wanted)
    std::fprintf(stderr, "fake cuBLAS: %s: %s (%s)\n", call, cublasLtGetStatusName(refusal.status),
                 refusal.why.c_str());
  return refusal.status;
}

}  // namespace gatefold_fake
