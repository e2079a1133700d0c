#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "runtime/tensor_layout.h"

namespace gatefold {

/// Throws unless `status` is success: Error 71 where memory was short, 70 otherwise; `call` says
/// what was called.
void check(cudaError_t status, const char* call);
void check(cublasStatus_t status, const char* call);

/// Of the CUDA that the driver is for, "13.0"; empty where there is no driver.
std::string driver_version();

/// Memory of the current GPU. Throws Error 71 with the bytes wanted and free.
Buffer allocate_on_gpu(std::int64_t bytes);

}  // namespace gatefold
