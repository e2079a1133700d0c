#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <new>
#include <string>
#include <utility>

#include "tests/fake_gpu/cublaslt_objects.h"

namespace gatefold_fake {

/// Why a call is refused; becomes its status, and a line where GATEFOLD_FAKE_EXPLAIN is set.
struct Refusal {
  cublasStatus_t status;
  std::string why;
};

inline void require(bool holds, cublasStatus_t status, std::string why) {
  if (!holds) throw Refusal{status, std::move(why)};
}

/// Runs a call's body; a refusal becomes the status that the call returns.
template <typename Body>
cublasStatus_t answer(const char* call, Body&& body);
cublasStatus_t explain(const char* call, const Refusal& refusal);

/// One operand, seen after its transposition: element (i, j) of matrix `b` of the batch lies at
/// b*batch_stride + i*row_step + j*col_step.
struct Operand {
  cudaDataType type = CUDA_R_32F;
  std::int64_t row_step = 0;
  std::int64_t col_step = 0;
  std::int64_t batch_stride = 0;
  std::int64_t bytes = 0;      // from the first element to the end of the last, over the batch
  std::int64_t alignment = 0;  // what leading dimension and batch stride leave, bytes, at most 256
};

/// D [m, n] = alpha · A [m, k] · B [k, n] + beta · C [m, n], `batch` times.
struct Problem {
  std::int64_t m = 0, n = 0, k = 0, batch = 0;
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  Operand a, b, c, d;
};

std::int64_t bytes_of(cudaDataType type);

/// Throws a Refusal unless A·B with these types is multiplied here.
void check_types(cublasComputeType_t compute, cudaDataType scale, cudaDataType a, cudaDataType b,
                 cudaDataType c, cudaDataType d);

/// The whole of what four layouts and an operation say, or a Refusal with the status that the real
/// library has for it.
Problem read_problem(const Operation* operation, const Layout* a, const Layout* b, const Layout* c,
                     const Layout* d);

template <typename Body>
cublasStatus_t answer(const char* call, Body&& body) {
  try {
    body();
    return CUBLAS_STATUS_SUCCESS;
  } catch (const Refusal& refusal) {
    return explain(call, refusal);
  } catch (const std::bad_alloc&) {
    return CUBLAS_STATUS_ALLOC_FAILED;
  }
}

}  // namespace gatefold_fake
