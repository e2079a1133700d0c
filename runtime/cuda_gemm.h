#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/tensor_layout.h"

namespace gatefold {

/// A handle of cuBLASLt and the one workspace that all its GEMMs have, whatever their shape.
class CublasLt {
 public:
  /// Throws Error 69 where the library can't be used, 71.
  CublasLt();
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  cublasLtHandle_t handle() const { return handle_; }
  void* workspace() const { return workspace_; }
  static constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
  static std::string version();

 private:
  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
};

/// One GEMM of a fixed shape, c [rows][columns] = a [rows][inputs] · w [columns][inputs], fp32 sums
/// and no TF32, by an algorithm chosen when it is made.
class CudaGemm {
 public:
  struct Shape {
    std::int64_t rows = 0;
    std::int64_t inputs = 0;
    std::int64_t columns = 0;
    DType storage = DType::kF32;
    bool canonical = true;  // one sum per element: no algorithm that cuts k and adds the parts
    auto operator<=>(const Shape&) const = default;
  };

  /// Returns null where the library has no algorithm for it.
  static std::unique_ptr<CudaGemm> create(const CublasLt& library, const Shape& shape);
  ~CudaGemm();
  CudaGemm(const CudaGemm&) = delete;
  CudaGemm& operator=(const CudaGemm&) = delete;

  void run(const std::byte* a, const std::byte* w, float* c, cudaStream_t stream) const;
  /// "cuBLASLt algorithm 66, tile 20, 4 stages": with the library and the GPU, what bits depend on.
  std::string algorithm() const;

 private:
  CudaGemm(const CublasLt& library, const Shape& shape);
  bool choose(const Shape& shape);
  template <typename T>
  T configured(cublasLtMatmulAlgoConfigAttributes_t attribute) const;

  const CublasLt& library_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t w_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr;
  cublasLtMatrixLayout_t c_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_{};
};

}  // namespace gatefold
