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
  void* workspace() const { return workspace_.data(); }
  static constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
  static std::string version();

 private:
  Buffer workspace_;
  cublasLtHandle_t handle_ = nullptr;
};

/// One GEMM of a fixed shape, c [rows][columns] = a [rows][inputs] · w [columns][inputs], fp32 sums
/// and no TF32, by a fixed algorithm.
class CudaGemm {
 public:
  /// Every operand starts at a multiple of this, and algorithms are chosen for no less.
  static constexpr std::uint32_t kAlignment = 256;
  /// Plain bytes, valid wherever the library's version and the kind of GPU are the same.
  using Algorithm = cublasLtMatmulAlgo_t;
  struct Shape {
    std::int64_t rows = 0;
    std::int64_t inputs = 0;
    std::int64_t columns = 0;
    DType storage = DType::kF32;
    bool canonical = true;  // one sum per element: no algorithm that cuts k and adds the parts
    auto operator<=>(const Shape&) const = default;
  };

  /// By the library's own choice. Null where it has none. Throws Error 64 for f32 where the
  /// environment demands TF32.
  static std::unique_ptr<CudaGemm> choose(const CublasLt& library, const Shape& shape);
  /// By what choose() found on some rank. Null where that can't run here.
  static std::unique_ptr<CudaGemm> pin(const CublasLt& library, const Shape& shape,
                                       const Algorithm& algorithm);
  ~CudaGemm();
  CudaGemm(const CudaGemm&) = delete;
  CudaGemm& operator=(const CudaGemm&) = delete;

  void run(const std::byte* a, const std::byte* w, float* c, cudaStream_t stream) const;
  const Algorithm& algorithm() const { return algorithm_; }
  /// "cuBLASLt algorithm 66, tile 20, stages 4".
  std::string name() const;

 private:
  CudaGemm(const CublasLt& library, const Shape& shape);
  bool find_algorithm(bool canonical);
  template <typename T>
  T configured(cublasLtMatmulAlgoConfigAttributes_t attribute) const;

  const CublasLt& library_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t w_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr;
  cublasLtMatrixLayout_t c_ = nullptr;
  Algorithm algorithm_{};
};

}  // namespace gatefold
