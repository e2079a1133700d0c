#pragma once

#include <cstdint>
#include <vector>

#include "tests/fake_gpu/cublaslt_gemm.h"
#include "tests/fake_gpu/cublaslt_objects.h"
#include "tests/fake_gpu/cublaslt_problem.h"

namespace gatefold_fake {

/// What an algorithm, as configured, needs for a problem.
struct Needs {
  SumOrder order;
  std::int64_t workspace = 0;
  std::int64_t alignment = 1;  // of each operand, bytes
};

/// Throws a Refusal where the algorithm wasn't made for these types, its configuration is
/// impossible, or the problem's strides don't suit it.
Needs needs_of(const Algo* algo, const Problem& problem);

/// What a heuristic may choose from.
struct Limits {
  std::int64_t workspace = 0;
  std::uint32_t reduction_mask = CUBLASLT_REDUCTION_SCHEME_MASK;
  std::int64_t alignment = 256;  // of the operands' addresses
  std::uint64_t impl_mask = ~std::uint64_t{0};
  std::int32_t only_id = -1;
};

struct Ranked {
  Algo algo;
  std::int64_t workspace = 0;
  float waves = 0;
};

/// All that fit, best first. Few rows or columns and a long k rank split-K first, as the real
/// heuristic does; setting GATEFOLD_FAKE_GPU_GEMM_RANKING rotates the list ("0,1:1": on rank 1),
/// so that ranks which don't agree on one choice end up with other bits.
std::vector<Ranked> rank_algos(const Problem& problem, const Limits& limits);

/// Throws a Refusal unless the handle is alive.
void require_handle(cublasLtHandle_t handle);

/// Refused where GATEFOLD_FAKE_GPU_GEMM_UNSUPPORTED names the problem: "m x n x k", comma between.
void refuse_by_request(const Problem& problem);

}  // namespace gatefold_fake
