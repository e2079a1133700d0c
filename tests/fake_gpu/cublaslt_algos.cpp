// Stand-in for cuBLASLt's algorithms and its heuristic.
#include "tests/fake_gpu/cublaslt_algos.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <span>
#include <sstream>
#include <string>

#include "tests/fake_gpu/fake_cudart.h"

namespace gatefold_fake {
namespace {

constexpr std::int64_t kKiB = 1024;

/// One algorithm id. The ids are among those that the real library uses; what they do isn't.
struct Kind {
  std::int32_t id;
  std::uint32_t tile;
  std::int64_t tile_rows, tile_cols;
  std::uint32_t stages;
  std::int64_t panel, lanes;
  std::int64_t alignment;
  std::int64_t workspace;
  std::uint32_t reductions;  // besides NONE
};
constexpr Kind kKinds[] = {
    {66, CUBLASLT_MATMUL_TILE_128x256, 128, 256, CUBLASLT_MATMUL_STAGES_UNDEFINED, 64, 16, 16,
     64 * kKiB, 0},
    {21, CUBLASLT_MATMUL_TILE_128x128, 128, 128, CUBLASLT_MATMUL_STAGES_32x3, 32, 8, 16, 0,
     CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE},
    {31, CUBLASLT_MATMUL_TILE_64x64, 64, 64, CUBLASLT_MATMUL_STAGES_16x4, 16, 4, 8, 0,
     CUBLASLT_REDUCTION_SCHEME_INPLACE},
    {0, CUBLASLT_MATMUL_TILE_32x32, 32, 32, CUBLASLT_MATMUL_STAGES_UNDEFINED, 1 << 30, 1, 1, 0, 0},
};

const Kind* kind_of(std::int32_t id) {
  const auto* kind = std::find_if(std::begin(kKinds), std::end(kKinds),
                                  [id](const Kind& row) { return row.id == id; });
  return kind == std::end(kKinds) ? nullptr : kind;
}

std::uint64_t impl_flags(cudaDataType input, cublasComputeType_t compute) {
  const std::uint64_t accumulates = CUBLASLT_NUMERICAL_IMPL_FLAGS_ACCUMULATOR_32F;
  if (compute == CUBLAS_COMPUTE_32F_FAST_TF32)
    return accumulates | CUBLASLT_NUMERICAL_IMPL_FLAGS_HMMA |
           CUBLASLT_NUMERICAL_IMPL_FLAGS_INPUT_TF32;
  switch (input) {
    case CUDA_R_16BF:
      return accumulates | CUBLASLT_NUMERICAL_IMPL_FLAGS_HMMA |
             CUBLASLT_NUMERICAL_IMPL_FLAGS_INPUT_16BF;
    case CUDA_R_16F:
      return accumulates | CUBLASLT_NUMERICAL_IMPL_FLAGS_HMMA |
             CUBLASLT_NUMERICAL_IMPL_FLAGS_INPUT_16F;
    default:
      return accumulates | CUBLASLT_NUMERICAL_IMPL_FLAGS_FMA |
             CUBLASLT_NUMERICAL_IMPL_FLAGS_INPUT_32F;
  }
}

Algo make_algo(const Kind& kind, cublasComputeType_t compute, cudaDataType input,
               cudaDataType output) {
  Algo algo;
  algo.id = kind.id;
  algo.tile = kind.tile;
  algo.stages = kind.stages;
  algo.compute = compute;
  algo.input_type = input;
  algo.output_type = output;
  return algo;
}

std::int64_t workspace_of(const Kind& kind, const Algo& algo, const Problem& problem) {
  const std::int64_t outputs = problem.m * problem.n * problem.batch;
  switch (algo.reduction) {
    case CUBLASLT_REDUCTION_SCHEME_INPLACE: return 4 * kKiB;  // counters
    case CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: return algo.split_k * outputs * 4;
    case CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE:
      return algo.split_k * outputs * bytes_of(problem.d.type);
    default: return kind.workspace;
  }
}

float waves_of(const Kind& kind, const Algo& algo, const Problem& problem) {
  constexpr std::int64_t multiprocessors = 108;
  const auto tiles = [](std::int64_t n, std::int64_t tile) { return (n + tile - 1) / tile; };
  const std::int64_t blocks = tiles(problem.m, kind.tile_rows) * tiles(problem.n, kind.tile_cols) *
                              problem.batch * algo.split_k;
  return static_cast<float>(blocks) / multiprocessors;
}

void try_one(const Kind& kind, std::uint32_t reduction, std::int32_t splits, const Problem& problem,
             const Limits& limits, std::vector<Ranked>& out) {
  Algo algo = make_algo(kind, problem.compute, problem.a.type, problem.d.type);
  algo.reduction = reduction;
  algo.split_k = splits;
  const bool allowed = (reduction & ~limits.reduction_mask) == 0 &&
                       limits.alignment >= kind.alignment &&
                       (limits.only_id < 0 || limits.only_id == kind.id) &&
                       (impl_flags(problem.a.type, problem.compute) & ~limits.impl_mask) == 0;
  if (!allowed) return;
  try {
    const Needs needs = needs_of(&algo, problem);
    if (needs.workspace <= limits.workspace)
      out.push_back({algo, needs.workspace, waves_of(kind, algo, problem)});
  } catch (const Refusal&) {
  }
}

void try_all(bool split, const Problem& problem, const Limits& limits, std::vector<Ranked>& out) {
  constexpr std::uint32_t schemes[] = {CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE,
                                       CUBLASLT_REDUCTION_SCHEME_INPLACE,
                                       CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE};
  for (const Kind& kind : kKinds) {
    if (!split) {
      try_one(kind, CUBLASLT_REDUCTION_SCHEME_NONE, 1, problem, limits, out);
      continue;
    }
    for (const std::uint32_t scheme : schemes)
      if ((kind.reductions & scheme) != 0) try_one(kind, scheme, 4, problem, limits, out);
  }
}

}  // namespace

Needs needs_of(const Algo* algo, const Problem& problem) {
  const Kind* kind = algo == nullptr ? nullptr : kind_of(algo->id);
  require(kind != nullptr, CUBLAS_STATUS_INVALID_VALUE, "no such algorithm");
  require(algo->compute == problem.compute && algo->input_type == problem.a.type &&
              algo->output_type == problem.d.type,
          CUBLAS_STATUS_INVALID_VALUE, "the algorithm was made for other types");
  require(algo->tile == kind->tile && algo->stages == kind->stages && algo->swizzling == 0 &&
              algo->custom == 0 && algo->inner_shape == 0 && algo->cluster_shape == 0,
          CUBLAS_STATUS_NOT_SUPPORTED, "the algorithm has no such tile, stages or option");
  const bool split = algo->split_k > 1;
  require(algo->split_k >= 1 && split == (algo->reduction != CUBLASLT_REDUCTION_SCHEME_NONE),
          CUBLAS_STATUS_INVALID_VALUE, "splits of k and reduction scheme contradict each other");
  require(!split || ((algo->reduction & (algo->reduction - 1)) == 0 &&
                     (algo->reduction & kind->reductions) != 0),
          CUBLAS_STATUS_NOT_SUPPORTED, "the algorithm has no such reduction scheme");
  for (const Operand* operand : {&problem.a, &problem.b, &problem.c, &problem.d})
    require(operand->alignment >= kind->alignment, CUBLAS_STATUS_NOT_SUPPORTED,
            "strides less aligned than the algorithm needs");
  Needs needs;
  needs.order = {kind->panel, kind->lanes, algo->split_k,
                 split && algo->reduction != CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE};
  needs.workspace = workspace_of(*kind, *algo, problem);
  needs.alignment = kind->alignment;
  return needs;
}

std::vector<Ranked> rank_algos(const Problem& problem, const Limits& limits) {
  std::vector<Ranked> ranked;
  const bool splits_first = std::min(problem.m, problem.n) <= 16 && problem.k >= 64;
  try_all(splits_first, problem, limits, ranked);
  try_all(!splits_first, problem, limits, ranked);
  if (!ranked.empty()) {
    const auto by = cudaFakeSetting("GEMM_RANKING", 0) % static_cast<long long>(ranked.size());
    std::rotate(ranked.begin(), ranked.begin() + by, ranked.end());
  }
  return ranked;
}

void refuse_by_request(const Problem& problem) {
  const char* refused = std::getenv("GATEFOLD_FAKE_GPU_GEMM_UNSUPPORTED");
  if (refused == nullptr) return;
  std::string shape = std::to_string(problem.m);
  shape.append("x").append(std::to_string(problem.n)).append("x").append(std::to_string(problem.k));
  std::istringstream items(refused);
  bool named = false;
  for (std::string item; std::getline(items, item, ',');) named = named || item == shape;
  require(!named, CUBLAS_STATUS_NOT_SUPPORTED, shape + " by request");
}

}  // namespace gatefold_fake

using namespace gatefold_fake;

namespace {

template <typename T>
void write_out(void* out, std::size_t bytes, std::size_t* written, std::span<const T> values) {
  const std::size_t size = values.size_bytes();
  require(bytes != 0 || written != nullptr, CUBLAS_STATUS_INVALID_VALUE, "nowhere to write");
  if (bytes != 0) {
    require(out != nullptr && bytes == size, CUBLAS_STATUS_INVALID_VALUE, "size");
    std::memcpy(out, values.data(), size);
  }
  if (written != nullptr) *written = size;
}

template <typename T>
void write_out(void* out, std::size_t bytes, std::size_t* written, T value) {
  write_out(out, bytes, written, std::span<const T>(&value, 1));
}

}  // namespace

extern "C" {

cublasStatus_t cublasLtMatmulAlgoGetIds(cublasLtHandle_t handle, cublasComputeType_t compute,
                                        cudaDataType_t scale, cudaDataType_t a, cudaDataType_t b,
                                        cudaDataType_t c, cudaDataType_t d, int requested,
                                        int ids[], int* returned) {
  return answer(__func__, [&] {
    require_handle(handle);
    require(requested > 0 && ids != nullptr && returned != nullptr, CUBLAS_STATUS_INVALID_VALUE,
            "nothing asked for, or nowhere to write");
    check_types(compute, scale, a, b, c, d);
    *returned = std::min(requested, static_cast<int>(std::size(kKinds)));
    std::transform(kKinds, kKinds + *returned, ids, [](const Kind& kind) { return kind.id; });
  });
}

// Like the real one it leaves tile and stages open: they are the caller's to set.
cublasStatus_t cublasLtMatmulAlgoInit(cublasLtHandle_t handle, cublasComputeType_t compute,
                                      cudaDataType_t scale, cudaDataType_t a, cudaDataType_t b,
                                      cudaDataType_t c, cudaDataType_t d, int id,
                                      cublasLtMatmulAlgo_t* out) {
  return answer(__func__, [&] {
    require_handle(handle);
    const Kind* kind = kind_of(id);
    require(out != nullptr && kind != nullptr, CUBLAS_STATUS_INVALID_VALUE, "no such algorithm");
    check_types(compute, scale, a, b, c, d);
    Algo algo = make_algo(*kind, compute, a, d);
    algo.tile = CUBLASLT_MATMUL_TILE_UNDEFINED;
    algo.stages = CUBLASLT_MATMUL_STAGES_UNDEFINED;
    *out = {};
    std::memcpy(out, &algo, sizeof algo);
  });
}

cublasStatus_t cublasLtMatmulAlgoCapGetAttribute(const cublasLtMatmulAlgo_t* opaque,
                                                 cublasLtMatmulAlgoCapAttributes_t attribute,
                                                 void* out, size_t bytes, size_t* written) {
  return answer(__func__, [&] {
    const Algo* algo = object_of<Algo>(opaque);
    const Kind* kind = algo == nullptr ? nullptr : kind_of(algo->id);
    require(kind != nullptr, CUBLAS_STATUS_INVALID_VALUE, "no such algorithm");
    const auto type = static_cast<cudaDataType>(algo->input_type);
    const auto compute = static_cast<cublasComputeType_t>(algo->compute);
    switch (attribute) {
      case CUBLASLT_ALGO_CAP_SPLITK_SUPPORT:
        return write_out<std::int32_t>(out, bytes, written, kind->reductions != 0);
      case CUBLASLT_ALGO_CAP_REDUCTION_SCHEME_MASK:
        return write_out(out, bytes, written, kind->reductions);
      case CUBLASLT_ALGO_CAP_STRIDED_BATCH_SUPPORT:
      case CUBLASLT_ALGO_CAP_OUT_OF_PLACE_RESULT_SUPPORT:
        return write_out<std::int32_t>(out, bytes, written, 1);
      case CUBLASLT_ALGO_CAP_TILE_IDS: return write_out(out, bytes, written, kind->tile);
      case CUBLASLT_ALGO_CAP_STAGES_IDS: return write_out(out, bytes, written, kind->stages);
      case CUBLASLT_ALGO_CAP_NUMERICAL_IMPL_FLAGS:
        return write_out(out, bytes, written, impl_flags(type, compute));
      case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES:
      case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_B_BYTES:
      case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_C_BYTES:
      case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_D_BYTES:
        return write_out(out, bytes, written, static_cast<std::uint32_t>(kind->alignment));
      default: throw Refusal{CUBLAS_STATUS_INVALID_VALUE, "capability"};
    }
  });
}

}  // extern "C"
