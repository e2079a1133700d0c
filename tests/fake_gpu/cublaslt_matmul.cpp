// Stand-in for cuBLASLt's handle, heuristic queries and matmul.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>

#include "tests/fake_gpu/cublaslt_algos.h"
#include "tests/fake_gpu/cublaslt_gemm.h"
#include "tests/fake_gpu/cublaslt_objects.h"
#include "tests/fake_gpu/cublaslt_problem.h"
#include "tests/fake_gpu/fake_cudart.h"

struct cublasLtContext {
  std::uint32_t tag = 0;
  int device = 0;
};

namespace gatefold_fake {
namespace {

constexpr std::uint32_t kHandleTag = 0x48414e44;
constexpr std::uintptr_t kWorkspaceAlignment = 256;

Problem problem_of(cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                   cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d) {
  Problem problem = read_problem(object_of<Operation>(operation), object_of<Layout>(a),
                                 object_of<Layout>(b), object_of<Layout>(c), object_of<Layout>(d));
  refuse_by_request(problem);
  return problem;
}

/// A matmul's view of memory: where each operand begins and how far it goes.
struct Span {
  const char* name;
  const void* data;
  std::int64_t bytes;

  std::uintptr_t begin() const { return reinterpret_cast<std::uintptr_t>(data); }
  std::uintptr_t end() const { return begin() + static_cast<std::uintptr_t>(bytes); }
};

bool overlap(const Span& a, const Span& b) { return a.begin() < b.end() && b.begin() < a.end(); }

/// On a GPU a wrong pointer is an illegal access some time later, or nothing at all.
void check_memory(const Span& span, std::int64_t alignment, int device) {
  const std::string name = span.name;
  require(span.data != nullptr, CUBLAS_STATUS_INVALID_VALUE, name + " is null");
  require(span.begin() % static_cast<std::uintptr_t>(alignment) == 0, CUBLAS_STATUS_NOT_SUPPORTED,
          name + " less aligned than the algorithm needs");
  if (cudaFakeIsDeviceRange(span.data, static_cast<std::size_t>(span.bytes)) == 0) {
    const std::string why = "cublasLtMatmul: " + name + " isn't " + std::to_string(span.bytes) +
                            " bytes of one device allocation";
    cudaFakeBreak(cudaErrorIllegalAddress, why.c_str());
    throw Refusal{CUBLAS_STATUS_EXECUTION_FAILED, why};
  }
  require(cudaFakeDeviceOf(span.data) == device, CUBLAS_STATUS_INVALID_VALUE,
          name + " is on another device than the handle");
}

bool same_view(const Operand& c, const Operand& d) {
  return c.row_step == d.row_step && c.col_step == d.col_step && c.batch_stride == d.batch_stride;
}

void check_operands(const Matmul& matmul, const Needs& needs, int device) {
  const Problem& problem = matmul.problem;
  const Span d{"D", matmul.d, problem.d.bytes};
  const Span c{"C", matmul.c, problem.c.bytes};
  const Span inputs[] = {{"A", matmul.a, problem.a.bytes}, {"B", matmul.b, problem.b.bytes}};
  for (const Span& span : {inputs[0], inputs[1], c, d}) check_memory(span, needs.alignment, device);
  for (const Span& input : inputs)
    require(!overlap(input, d), CUBLAS_STATUS_INVALID_VALUE, "D overlaps an input");
  require(!overlap(c, d) || (c.data == d.data && same_view(problem.c, problem.d)),
          CUBLAS_STATUS_INVALID_VALUE, "C overlaps D and isn't D");
  if (needs.workspace == 0) return;
  const Span workspace{"workspace", matmul.workspace, needs.workspace};
  check_memory(workspace, 1, device);
  require(workspace.begin() % kWorkspaceAlignment == 0, CUBLAS_STATUS_INVALID_VALUE,
          "workspace isn't 256-byte aligned");
  for (const Span& span : {inputs[0], inputs[1], c, d})
    require(!overlap(span, workspace), CUBLAS_STATUS_INVALID_VALUE, "workspace overlaps");
}

Disturbance disturbance() {
  const auto set = [](const char* name) { return cudaFakeSetting(name, 0) != 0; };
  return {.rows = set("GEMM_BY_ROWS"),
          .columns = set("GEMM_BY_COLUMNS"),
          .batch = set("GEMM_BY_BATCH"),
          .place = set("GEMM_BY_PLACE"),
          .content = set("GEMM_BY_CONTENT"),
          .call = set("GEMM_BY_CALL")};
}

void run_on_stream(void* job) {
  const std::unique_ptr<Matmul> matmul(static_cast<Matmul*>(job));
  if (matmul->breaks) {
    cudaFakeBreak(cudaErrorIllegalAddress, "a GEMM, by request");
    return;
  }
  multiply(*matmul);
}

void enqueue(const Matmul& matmul, cudaStream_t stream) {
  auto job = std::make_unique<Matmul>(matmul);
  const cudaError_t error = cudaLaunchHostFunc(stream, run_on_stream, job.get());
  require(error == cudaSuccess, CUBLAS_STATUS_EXECUTION_FAILED, cudaGetErrorString(error));
  static_cast<void>(job.release());
}

/// The caller's algorithm, or the one that a heuristic without preferences would take.
Algo chosen(const cublasLtMatmulAlgo_t* opaque, const Problem& problem,
            std::size_t workspace_bytes) {
  if (opaque != nullptr) {
    const Algo* algo = object_of<Algo>(opaque);
    require(algo != nullptr, CUBLAS_STATUS_INVALID_VALUE, "not an algorithm");
    return *algo;
  }
  Limits limits;
  limits.workspace = static_cast<std::int64_t>(workspace_bytes);
  const std::vector<Ranked> ranked = rank_algos(problem, limits);
  require(!ranked.empty(), CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm fits");
  return ranked.front().algo;
}

Limits limits_of(const Preference& preference, const cublasLtMatmulHeuristicResult_t& first) {
  Limits limits;
  limits.workspace =
      static_cast<std::int64_t>(std::min<std::uint64_t>(preference.max_workspace, INT64_MAX));
  limits.reduction_mask = preference.reduction_mask;
  limits.impl_mask = preference.impl_mask;
  for (const std::uint32_t alignment : preference.min_alignment)
    limits.alignment = std::min<std::int64_t>(limits.alignment, alignment);
  if (preference.search_mode == CUBLASLT_SEARCH_BEST_FIT) return limits;
  require(preference.search_mode == CUBLASLT_SEARCH_LIMITED_BY_ALGO_ID, CUBLAS_STATUS_INVALID_VALUE,
          "search mode");
  const Algo* algo = object_of<Algo>(&first.algo);
  require(algo != nullptr, CUBLAS_STATUS_INVALID_VALUE, "no algorithm to limit the search to");
  limits.only_id = algo->id;
  return limits;
}

cublasLtMatmulHeuristicResult_t result_of(const Ranked& ranked) {
  cublasLtMatmulHeuristicResult_t result{};
  std::memcpy(&result.algo, &ranked.algo, sizeof ranked.algo);
  result.workspaceSize = static_cast<std::size_t>(ranked.workspace);
  result.state = CUBLAS_STATUS_SUCCESS;
  result.wavesCount = ranked.waves;
  return result;
}

void fault(const char* point, cublasStatus_t status) {
  require(cudaFakeFault(point) == 0, status, std::string(point) + " fails by request");
}

}  // namespace

void require_handle(cublasLtHandle_t handle) {
  require(handle != nullptr && handle->tag == kHandleTag, CUBLAS_STATUS_NOT_INITIALIZED,
          "handle null or destroyed");
}

}  // namespace gatefold_fake

using namespace gatefold_fake;

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* out) {
  return answer(__func__, [&] {
    require(out != nullptr, CUBLAS_STATUS_INVALID_VALUE, "null");
    fault("cublas_create", CUBLAS_STATUS_NOT_INITIALIZED);
    int devices = 0;
    int device = 0;
    const bool there = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0 &&
                       cudaGetDevice(&device) == cudaSuccess;
    require(there, CUBLAS_STATUS_NOT_INITIALIZED, "no device");
    *out = new cublasLtContext{kHandleTag, device};
  });
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  return answer(__func__, [&] {
    require(handle != nullptr && handle->tag == kHandleTag, CUBLAS_STATUS_INVALID_VALUE,
            "handle null or destroyed");
    handle->tag = 0;
    delete handle;
  });
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle,
                                              cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* returned) {
  if (returned != nullptr) *returned = 0;
  return answer(__func__, [&] {
    require_handle(handle);
    const Preference* limits = object_of<Preference>(preference);
    require(limits != nullptr && requested > 0 && results != nullptr && returned != nullptr,
            CUBLAS_STATUS_INVALID_VALUE, "nothing asked for, or nowhere to write");
    const Problem problem = problem_of(operation, a, b, c, d);
    fault("heuristic", CUBLAS_STATUS_NOT_SUPPORTED);
    const std::vector<Ranked> ranked = rank_algos(problem, limits_of(*limits, results[0]));
    require(!ranked.empty(), CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm fits");
    *returned = std::min(requested, static_cast<int>(ranked.size()));
    std::transform(ranked.begin(), ranked.begin() + *returned, results, result_of);
  });
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algo,
                                       cublasLtMatmulHeuristicResult_t* result) {
  return answer(__func__, [&] {
    require_handle(handle);
    require(result != nullptr, CUBLAS_STATUS_INVALID_VALUE, "nowhere to write");
    const Needs needs = needs_of(object_of<Algo>(algo), problem_of(operation, a, b, c, d));
    result->workspaceSize = static_cast<std::size_t>(needs.workspace);
    result->state = CUBLAS_STATUS_SUCCESS;
    result->wavesCount = 1;
  });
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                              const void* alpha, const void* a, cublasLtMatrixLayout_t a_layout,
                              const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,
                              const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  return answer(__func__, [&] {
    static std::atomic<std::int64_t> calls{0};
    require_handle(handle);
    require(alpha != nullptr && beta != nullptr, CUBLAS_STATUS_INVALID_VALUE, "alpha or beta null");
    Matmul matmul;
    matmul.problem = problem_of(operation, a_layout, b_layout, c_layout, d_layout);
    const Algo with = chosen(algo, matmul.problem, workspace_bytes);
    const Needs needs = needs_of(&with, matmul.problem);
    require(needs.workspace <= static_cast<std::int64_t>(workspace_bytes),
            CUBLAS_STATUS_INVALID_VALUE, "the algorithm needs a larger workspace");
    matmul.order = needs.order;
    matmul.disturbance = disturbance();
    matmul.call = calls++;
    std::memcpy(&matmul.alpha, alpha, sizeof matmul.alpha);
    std::memcpy(&matmul.beta, beta, sizeof matmul.beta);
    matmul.a = a;
    matmul.b = b;
    matmul.c = c;
    matmul.d = d;
    matmul.workspace = workspace;
    matmul.workspace_bytes = needs.workspace;
    check_operands(matmul, needs, handle->device);
    fault("gemm", CUBLAS_STATUS_EXECUTION_FAILED);
    matmul.breaks = cudaFakeFault("gemm_kernel") != 0;
    enqueue(matmul, stream);
  });
}

}  // extern "C"
