#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

namespace gatefold {

/// Throws unless `status` is success: Error 71 where memory was short, 70 otherwise; `call` says
/// what was called.
void check(cudaError_t status, const char* call);
void check(cublasStatus_t status, const char* call);

}  // namespace gatefold
