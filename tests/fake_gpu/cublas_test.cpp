// cuBLAS's own GEMMs: column-major, typed operands.
#include <cublas_v2.h>
#include <gmock/gmock.h>

#include <vector>

#include "tests/fake_gpu/cublas_testing.h"

namespace gatefold {
namespace {

constexpr cublasStatus_t kOk = CUBLAS_STATUS_SUCCESS;

class Cublas : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(cublasCreate(&handle_), kOk); }
  void TearDown() override { EXPECT_EQ(cublasDestroy(handle_), kOk); }

  /// C [2, 2] = op(A) B + beta C for two matrices, A = [1 3; 2 4], B = [1 0; 1 1] and twice that.
  std::vector<float> small_product(cublasOperation_t op, float beta) {
    const DeviceBytes a(64), b(64), c(64);
    upload(a, CUDA_R_16BF, {1, 2, 3, 4, 1, 2, 3, 4});
    upload(b, CUDA_R_16BF, {1, 1, 0, 1, 2, 2, 0, 2});
    upload(c, CUDA_R_32F, std::vector<float>(8, 100));
    const float one = 1;
    EXPECT_EQ(
        cublasGemmStridedBatchedEx(handle_, op, CUBLAS_OP_N, 2, 2, 2, &one, a.data(), CUDA_R_16BF,
                                   2, 4, b.data(), CUDA_R_16BF, 2, 4, &beta, c.data(), CUDA_R_32F,
                                   2, 4, 2, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        kOk);
    return download(c, CUDA_R_32F, 8);
  }
  cublasStatus_t gemm(int m, int n, int k, int lda, const void* alpha) {
    const DeviceBytes memory(3 << 10);
    const float zero = 0;
    const cublasStatus_t status =
        cublasGemmEx(handle_, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, alpha, memory.at(0), CUDA_R_32F,
                     lda, memory.at(1 << 10), CUDA_R_32F, 8, &zero, memory.at(2 << 10), CUDA_R_32F,
                     8, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return status;
  }

  cublasHandle_t handle_ = nullptr;
  float one_ = 1;
};

TEST_F(Cublas, MultipliesBatches) {
  EXPECT_THAT(small_product(CUBLAS_OP_N, 0), testing::ElementsAre(4, 6, 3, 4, 8, 12, 6, 8));
  EXPECT_THAT(small_product(CUBLAS_OP_T, 0), testing::ElementsAre(3, 7, 2, 4, 6, 14, 4, 8));
  EXPECT_THAT(small_product(CUBLAS_OP_N, 1),
              testing::ElementsAre(104, 106, 103, 104, 108, 112, 106, 108));
}

TEST_F(Cublas, RefusesImpossibleSizes) {
  EXPECT_EQ(gemm(8, 8, 8, 8, &one_), kOk);
  EXPECT_EQ(gemm(8, 8, 8, 7, &one_), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(gemm(-1, 8, 8, 8, &one_), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(gemm(0, 8, 8, 8, &one_), kOk);
}

TEST_F(Cublas, KeepsItsStream) {
  cudaStream_t stream = nullptr;
  cudaStream_t found = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  EXPECT_EQ(cublasSetStream(handle_, stream), kOk);
  EXPECT_EQ(cublasGetStream(handle_, &found), kOk);
  EXPECT_EQ(found, stream);
  EXPECT_EQ(gemm(8, 8, 8, 8, &one_), kOk);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cublasSetStream(handle_, nullptr), kOk);
}

TEST_F(Cublas, TakesAnAlignedWorkspace) {
  const DeviceBytes memory(1 << 20);
  EXPECT_EQ(cublasSetWorkspace(handle_, memory.at(0), 1 << 19), kOk);
  EXPECT_EQ(gemm(8, 8, 8, 8, &one_), kOk);
  EXPECT_EQ(cublasSetWorkspace(handle_, memory.at(8), 1 << 19), CUBLAS_STATUS_INVALID_VALUE);
}

TEST(CublasWithoutAHandle, IsNotInitialized) {
  const float one = 1;
  EXPECT_EQ(cublasCreate(nullptr), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(cublasDestroy(nullptr), CUBLAS_STATUS_NOT_INITIALIZED);
  EXPECT_EQ(cublasSetStream(nullptr, nullptr), CUBLAS_STATUS_NOT_INITIALIZED);
  EXPECT_EQ(cublasGemmEx(nullptr, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &one, nullptr, CUDA_R_32F, 1,
                         nullptr, CUDA_R_32F, 1, &one, nullptr, CUDA_R_32F, 1, CUBLAS_COMPUTE_32F,
                         CUBLAS_GEMM_DEFAULT),
            CUBLAS_STATUS_NOT_INITIALIZED);
  int version = 0;
  EXPECT_EQ(cublasGetVersion(nullptr, &version), kOk);
  EXPECT_EQ(version, CUBLAS_VERSION);
}

}  // namespace
}  // namespace gatefold
