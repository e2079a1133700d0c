// Stand-in for libcublas.so.13: handles, and GEMMs with typed operands, which cublasLt computes.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

struct cublasContext {
  std::uint32_t tag = 0;
  cublasLtHandle_t lt = nullptr;
  cudaStream_t stream = nullptr;
  void* own_workspace = nullptr;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointer_mode = CUBLAS_POINTER_MODE_HOST;
};

namespace {

constexpr std::uint32_t kTag = 0x43424c53;
constexpr std::size_t kOwnWorkspace = 1 << 20;
constexpr std::uintptr_t kWorkspaceAlignment = 256;

bool alive(cublasHandle_t handle) { return handle != nullptr && handle->tag == kTag; }

void use_own_workspace(cublasHandle_t handle) {
  handle->workspace = handle->own_workspace;
  handle->workspace_bytes = kOwnWorkspace;
}

/// One operand of a GEMM as cuBLAS's callers give it: column-major, of `rows` by `cols`.
struct Matrix {
  std::int64_t rows, cols, ld;
  long long stride;
  cudaDataType type;
};

struct Gemm {
  cublasOperation_t trans_a, trans_b;
  std::int64_t m, n, k;
  std::int64_t batch;
  Matrix a, b, c;
};

bool valid(const Gemm& gemm) {
  const auto op = [](cublasOperation_t trans) {
    return trans == CUBLAS_OP_N || trans == CUBLAS_OP_T || trans == CUBLAS_OP_C;
  };
  const auto wide = [](const Matrix& matrix) {
    return matrix.ld >= std::max<std::int64_t>(1, matrix.rows);
  };
  return op(gemm.trans_a) && op(gemm.trans_b) && gemm.m >= 0 && gemm.n >= 0 && gemm.k >= 0 &&
         gemm.batch >= 0 && wide(gemm.a) && wide(gemm.b) && wide(gemm.c);
}

cublasStatus_t describe(const Matrix& matrix, std::int64_t batch,
                        cublasLtMatrixLayoutOpaque_t* layout) {
  const auto count = static_cast<std::int32_t>(batch);
  const std::int64_t stride = matrix.stride;
  cublasLtMatrixLayoutInit(layout, matrix.type, static_cast<std::uint64_t>(matrix.rows),
                           static_cast<std::uint64_t>(matrix.cols), matrix.ld);
  cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                   sizeof count);
  return cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                          &stride, sizeof stride);
}

cublasComputeType_t effective(cublasHandle_t handle, cublasComputeType_t compute,
                              cudaDataType input) {
  const bool tf32 = handle->math == CUBLAS_TF32_TENSOR_OP_MATH && input == CUDA_R_32F;
  return compute == CUBLAS_COMPUTE_32F && tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : compute;
}

cublasStatus_t run(cublasHandle_t handle, const Gemm& gemm, const void* alpha, const void* a,
                   const void* b, const void* beta, void* c, cublasComputeType_t compute) {
  if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (!valid(gemm) || alpha == nullptr || beta == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (gemm.m == 0 || gemm.n == 0 || gemm.batch == 0) return CUBLAS_STATUS_SUCCESS;
  // Not needed here: the real one scales C.
  if (gemm.k == 0 || handle->pointer_mode != CUBLAS_POINTER_MODE_HOST)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  cublasLtMatmulDescOpaque_t operation{};
  cublasLtMatmulDescInit(&operation, effective(handle, compute, gemm.a.type), CUDA_R_32F);
  const std::int32_t ops[] = {gemm.trans_a, gemm.trans_b};
  cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSA, &ops[0], sizeof ops[0]);
  cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSB, &ops[1], sizeof ops[1]);
  cublasLtMatrixLayoutOpaque_t layouts[3]{};
  describe(gemm.a, gemm.batch, &layouts[0]);
  describe(gemm.b, gemm.batch, &layouts[1]);
  describe(gemm.c, gemm.batch, &layouts[2]);
  return cublasLtMatmul(handle->lt, &operation, alpha, a, &layouts[0], b, &layouts[1], beta, c,
                        &layouts[2], c, &layouts[2], nullptr, handle->workspace,
                        handle->workspace_bytes, handle->stream);
}

}  // namespace

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* out) {
  if (out == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  cublasLtHandle_t lt = nullptr;
  const cublasStatus_t status = cublasLtCreate(&lt);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  void* workspace = nullptr;
  if (cudaMalloc(&workspace, kOwnWorkspace) != cudaSuccess) {
    cublasLtDestroy(lt);
    return CUBLAS_STATUS_ALLOC_FAILED;
  }
  *out = new cublasContext;
  (*out)->tag = kTag;
  (*out)->lt = lt;
  (*out)->own_workspace = workspace;
  use_own_workspace(*out);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
  const cublasStatus_t status = cublasLtDestroy(handle->lt);
  cudaFree(handle->own_workspace);  // waits for the device, as the real one does
  handle->tag = 0;
  delete handle;
  return status;
}

cublasStatus_t cublasGetVersion_v2(cublasHandle_t, int* version) {
  if (version == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *version = CUBLAS_VERSION;
  return CUBLAS_STATUS_SUCCESS;
}
const char* cublasGetStatusName(cublasStatus_t status) { return cublasLtGetStatusName(status); }
const char* cublasGetStatusString(cublasStatus_t status) { return cublasLtGetStatusString(status); }

/// Also takes the workspace away that the caller has set: a trap of the real one.
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
  handle->stream = stream;
  use_own_workspace(handle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t* stream) {
  if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (stream == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *stream = handle->stream;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void* workspace, size_t bytes) {
  if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
  const bool aligned = reinterpret_cast<std::uintptr_t>(workspace) % kWorkspaceAlignment == 0;
  if (!aligned || (workspace == nullptr && bytes != 0)) return CUBLAS_STATUS_INVALID_VALUE;
  handle->workspace = workspace;
  handle->workspace_bytes = bytes;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
  handle->math = mode;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
  handle->pointer_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t trans_a,
                                          cublasOperation_t trans_b, int m, int n, int k,
                                          const void* alpha, const void* a, cudaDataType a_type,
                                          int lda, long long a_stride, const void* b,
                                          cudaDataType b_type, int ldb, long long b_stride,
                                          const void* beta, void* c, cudaDataType c_type, int ldc,
                                          long long c_stride, int batch,
                                          cublasComputeType_t compute, cublasGemmAlgo_t) {
  const bool flip_a = trans_a != CUBLAS_OP_N;
  const bool flip_b = trans_b != CUBLAS_OP_N;
  const Gemm gemm{.trans_a = trans_a,
                  .trans_b = trans_b,
                  .m = m,
                  .n = n,
                  .k = k,
                  .batch = batch,
                  .a = {flip_a ? k : m, flip_a ? m : k, lda, a_stride, a_type},
                  .b = {flip_b ? n : k, flip_b ? k : n, ldb, b_stride, b_type},
                  .c = {m, n, ldc, c_stride, c_type}};
  return run(handle, gemm, alpha, a, b, beta, c, compute);
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t trans_a,
                            cublasOperation_t trans_b, int m, int n, int k, const void* alpha,
                            const void* a, cudaDataType a_type, int lda, const void* b,
                            cudaDataType b_type, int ldb, const void* beta, void* c,
                            cudaDataType c_type, int ldc, cublasComputeType_t compute,
                            cublasGemmAlgo_t algo) {
  return cublasGemmStridedBatchedEx(handle, trans_a, trans_b, m, n, k, alpha, a, a_type, lda, 0, b,
                                    b_type, ldb, 0, beta, c, c_type, ldc, 0, 1, compute, algo);
}

}  // extern "C"
