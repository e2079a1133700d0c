#pragma once
// A bf16 GEMM as fast as cuBLASLt has it: every algorithm that its heuristic names is timed.

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "tests/gpu/device_timer.h"

namespace gatefold_speed {

/// out [rows][columns] = a [rows][inputs] · w [columns][inputs], fp32 sums; `output` is CUDA_R_16BF
/// or CUDA_R_32F.
class BareGemm {
 public:
  struct Shape {
    std::int64_t rows;
    std::int64_t columns;
    std::int64_t inputs;
    cudaDataType output;
  };

  BareGemm(cublasLtHandle_t handle, const Shape& shape) : handle_(handle) {
    require(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t transposed = CUBLAS_OP_T;
    require(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                           sizeof(transposed)));
    layout(&w_, CUDA_R_16BF, shape.inputs, shape.columns);
    layout(&a_, CUDA_R_16BF, shape.inputs, shape.rows);
    layout(&out_, shape.output, shape.columns, shape.rows);
  }
  ~BareGemm() {
    for (cublasLtMatrixLayout_t layout : {w_, a_, out_}) cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulDescDestroy(operation_);
  }
  BareGemm(const BareGemm&) = delete;
  BareGemm& operator=(const BareGemm&) = delete;

  /// Keeps the algorithm whose median over some calls is least.
  void choose(DeviceTimer& timer, const void* a, const void* w, void* out, void* workspace,
              std::size_t bytes) {
    workspace_ = workspace;
    workspace_bytes_ = bytes;
    cublasLtMatmulPreference_t preference = nullptr;
    require(cublasLtMatmulPreferenceCreate(&preference));
    const auto most = static_cast<std::uint64_t>(bytes);
    require(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof(most)));
    std::array<cublasLtMatmulHeuristicResult_t, 16> found{};
    int count = 0;
    require(cublasLtMatmulAlgoGetHeuristic(handle_, operation_, w_, a_, out_, out_, preference,
                                           static_cast<int>(found.size()), found.data(), &count));
    cublasLtMatmulPreferenceDestroy(preference);
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
      const cublasLtMatmulAlgo_t algorithm = found[i].algo;
      std::vector<double> seconds;
      for (int repeat = 0; repeat < 6; ++repeat) {
        const double time = timer.seconds([&] { multiply(algorithm, a, w, out, timer.stream()); });
        if (repeat > 0) seconds.push_back(time);
      }
      if (median(seconds) >= least) continue;
      least = median(seconds);
      algorithm_ = algorithm;
    }
    require(count > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED);
  }

  void run(const void* a, const void* w, void* out, cudaStream_t stream) const {
    multiply(algorithm_, a, w, out, stream);
  }

 private:
  static void layout(cublasLtMatrixLayout_t* layout, cudaDataType type, std::int64_t width,
                     std::int64_t rows) {
    require(cublasLtMatrixLayoutCreate(layout, type, static_cast<std::uint64_t>(width),
                                       static_cast<std::uint64_t>(rows), width));
  }
  void multiply(const cublasLtMatmulAlgo_t& algorithm, const void* a, const void* w, void* out,
                cudaStream_t stream) const {
    const float one = 1;
    const float zero = 0;
    require(cublasLtMatmul(handle_, operation_, &one, w, w_, a, a_, &zero, out, out_, out, out_,
                           &algorithm, workspace_, workspace_bytes_, stream));
  }

  cublasLtHandle_t handle_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t w_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr;
  cublasLtMatrixLayout_t out_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_{};
  void* workspace_ = nullptr;
  std::size_t workspace_bytes_ = 0;
};

}  // namespace gatefold_speed
