#include "runtime/cuda_gemm.h"

#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <string_view>

#include "runtime/cuda_check.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

constexpr int kChoices = 16;

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::kBf16: return CUDA_R_16BF;
    case DType::kF16: return CUDA_R_16F;
    case DType::kF32: break;
  }
  return CUDA_R_32F;
}

template <typename T>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, T value) {
  check(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)),
        "cublasLtMatmulDescSetAttribute");
}

/// What an algorithm may need and do.
class Preference {
 public:
  explicit Preference(bool canonical) {
    check(cublasLtMatmulPreferenceCreate(&preference_), "cublasLtMatmulPreferenceCreate");
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{CublasLt::kWorkspaceBytes});
    for (const auto operand :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      set(operand, CudaGemm::kAlignment);
    }
    if (canonical) {
      set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
          static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
    }
  }
  ~Preference() { cublasLtMatmulPreferenceDestroy(preference_); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  cublasLtMatmulPreference_t get() const { return preference_; }

 private:
  template <typename T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    check(cublasLtMatmulPreferenceSetAttribute(preference_, attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute");
  }
  cublasLtMatmulPreference_t preference_ = nullptr;
};

void make_layout(cublasLtMatrixLayout_t* layout, DType dtype, std::int64_t width,
                 std::int64_t rows) {
  check(cublasLtMatrixLayoutCreate(layout, cuda_type(dtype), static_cast<std::uint64_t>(width),
                                   static_cast<std::uint64_t>(rows), width),
        "cublasLtMatrixLayoutCreate");
}

/// By itself CUBLAS_COMPUTE_32F never means TF32, but this variable overrules what a program sets.
void refuse_tf32() {
  const char* value = std::getenv("NVIDIA_TF32_OVERRIDE");
  const std::string_view demand = value == nullptr ? "" : value;
  if (demand.empty() || demand == "0") return;
  throw Error(ExitCode::kUsage,
              fmt::format("NVIDIA_TF32_OVERRIDE is {} (with it the library may round f32 operands "
                          "to TF32, which is no fp32 product); unset it, or use --dtype bf16",
                          demand));
}

}  // namespace

void check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const bool memory = status == CUBLAS_STATUS_ALLOC_FAILED;
  throw Error(memory ? ExitCode::kOutOfMemory : ExitCode::kBackend,
              fmt::format("{} failed ({}); {}", call, cublasLtGetStatusString(status),
                          memory ? "use more ranks or fewer tokens"
                                 : "set CUBLASLT_LOG_LEVEL=2 to see why, or use --device cpu"));
}

CublasLt::CublasLt() : workspace_(allocate_on_gpu(kWorkspaceBytes)) {
  const cublasStatus_t status = cublasLtCreate(&handle_);
  if (status == CUBLAS_STATUS_SUCCESS) return;
  if (status == CUBLAS_STATUS_ALLOC_FAILED) check(status, "cublasLtCreate");
  throw Error(ExitCode::kUnavailable,
              fmt::format("cuBLASLt can't be used ({}); look at the driver's version and at the "
                          "GPU's free memory, or use --device cpu",
                          cublasLtGetStatusString(status)));
}

CublasLt::~CublasLt() { cublasLtDestroy(handle_); }

std::string CublasLt::version() {
  const std::size_t version = cublasLtGetVersion();  // 130100 is 13.1.0
  return fmt::format("cuBLASLt {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::unique_ptr<CudaGemm> CudaGemm::choose(const CublasLt& library, const Shape& shape) {
  std::unique_ptr<CudaGemm> gemm(new CudaGemm(library, shape));
  if (!gemm->find_algorithm(shape.canonical)) return nullptr;
  return gemm;
}

std::unique_ptr<CudaGemm> CudaGemm::pin(const CublasLt& library, const Shape& shape,
                                        const Algorithm& algorithm) {
  std::unique_ptr<CudaGemm> gemm(new CudaGemm(library, shape));
  cublasLtMatmulHeuristicResult_t needs{};
  const cublasStatus_t status =
      cublasLtMatmulAlgoCheck(library.handle(), gemm->operation_, gemm->w_, gemm->a_, gemm->c_,
                              gemm->c_, &algorithm, &needs);
  const bool refused = status == CUBLAS_STATUS_INVALID_VALUE ||
                       status == CUBLAS_STATUS_NOT_SUPPORTED ||
                       status == CUBLAS_STATUS_ARCH_MISMATCH;
  if (refused || needs.workspaceSize > CublasLt::kWorkspaceBytes) return nullptr;
  check(status, "cublasLtMatmulAlgoCheck");
  gemm->algorithm_ = algorithm;
  return gemm;
}

// The library counts columns first, so what is a row here is a column there: cᵀ = w · aᵀ.
CudaGemm::CudaGemm(const CublasLt& library, const Shape& shape) : library_(library) {
  if (shape.storage == DType::kF32) refuse_tf32();
  check(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "cublasLtMatmulDescCreate");
  set(operation_, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(operation_, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  make_layout(&w_, shape.storage, shape.inputs, shape.columns);
  make_layout(&a_, shape.storage, shape.inputs, shape.rows);
  make_layout(&c_, DType::kF32, shape.columns, shape.rows);
}

CudaGemm::~CudaGemm() {
  if (c_ != nullptr) cublasLtMatrixLayoutDestroy(c_);
  if (a_ != nullptr) cublasLtMatrixLayoutDestroy(a_);
  if (w_ != nullptr) cublasLtMatrixLayoutDestroy(w_);
  if (operation_ != nullptr) cublasLtMatmulDescDestroy(operation_);
}

bool CudaGemm::find_algorithm(bool canonical) {
  const Preference preference(canonical);
  std::array<cublasLtMatmulHeuristicResult_t, kChoices> results{};
  int found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(library_.handle(), operation_, w_, a_, c_, c_,
                                     preference.get(), kChoices, results.data(), &found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return false;
  check(status, "cublasLtMatmulAlgoGetHeuristic");
  for (int i = 0; i < found; ++i) {
    const auto& result = results[static_cast<std::size_t>(i)];
    if (result.state != CUBLAS_STATUS_SUCCESS) continue;
    algorithm_ = result.algo;
    // The mask should have left no others.
    const bool cuts_k = configured<std::int32_t>(CUBLASLT_ALGO_CONFIG_SPLITK_NUM) > 1;
    if (!canonical || !cuts_k) return true;
  }
  return false;
}

void CudaGemm::run(const std::byte* a, const std::byte* w, float* c, cudaStream_t stream) const {
  const float one = 1.0F;
  const float zero = 0.0F;
  check(cublasLtMatmul(library_.handle(), operation_, &one, w, w_, a, a_, &zero, c, c_, c, c_,
                       &algorithm_, library_.workspace(), CublasLt::kWorkspaceBytes, stream),
        "cublasLtMatmul");
}

template <typename T>
T CudaGemm::configured(cublasLtMatmulAlgoConfigAttributes_t attribute) const {
  T value{};
  std::size_t written = 0;
  check(
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm_, attribute, &value, sizeof(value), &written),
      "cublasLtMatmulAlgoConfigGetAttribute");
  return value;
}

std::string CudaGemm::name() const {
  return fmt::format("cuBLASLt algorithm {}, tile {}, stages {}",
                     configured<std::int32_t>(CUBLASLT_ALGO_CONFIG_ID),
                     configured<std::uint32_t>(CUBLASLT_ALGO_CONFIG_TILE_ID),
                     configured<std::uint32_t>(CUBLASLT_ALGO_CONFIG_STAGES_ID));
}

}  // namespace gatefold
