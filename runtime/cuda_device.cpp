#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "runtime/cuda_check.h"
#include "runtime/device.h"
#include "runtime/error.h"

namespace gatefold {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  const bool memory = status == cudaErrorMemoryAllocation;
  throw Error(
      memory ? ExitCode::kOutOfMemory : ExitCode::kBackend,
      fmt::format(
          "{} failed ({}: {}); {}", call, cudaGetErrorName(status), cudaGetErrorString(status),
          memory ? "use more ranks or fewer tokens" : "see the driver's log, or use --device cpu"));
}

namespace {

int visible_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return count;
  const char* why = status == cudaSuccess ? "the driver shows none" : cudaGetErrorString(status);
  throw Error(
      ExitCode::kUnavailable,
      fmt::format("no CUDA device ({}); look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use "
                  "--device cpu",
                  why));
}

}  // namespace

std::unique_ptr<Device> make_cuda_device(int) {
  throw Error(ExitCode::kUnavailable,
              fmt::format("{} CUDA devices are visible (this version only looks for them); use "
                          "--device cpu",
                          visible_devices()));
}

}  // namespace gatefold
