#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "runtime/cuda_check.h"
#include "runtime/cuda_gemm.h"
#include "runtime/cuda_kernels.h"
#include "runtime/device.h"
#include "runtime/versions.h"

namespace gatefold {
namespace {

/// 13000 is 13.0.
std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

/// CUDA says the same of an old driver and of none.
std::string why_none(cudaError_t status) {
  if (status == cudaSuccess) return "the driver shows none";
  const char* text = cudaGetErrorString(status);
  if (status != cudaErrorInsufficientDriver) return text;
  const std::string driver = driver_version();
  if (driver.empty()) return fmt::format("{}: there is no driver", text);
  return fmt::format("{}: {}, not {}", text, driver, version_text(CUDART_VERSION));
}

/// Empty unless one of the GPUs is older than all that the build has kernels for; a newer one gets
/// them from the driver.
std::string why_too_old(int count) {
  const int oldest = *std::ranges::min_element(cuda::compiled_for());
  for (int i = 0; i < count; ++i) {
    int major = 0;
    int minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i),
          "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, i),
          "cudaDeviceGetAttribute");
    if (100 * major + 10 * minor >= oldest) continue;
    return fmt::format(
        "GPU {} is of compute capability {}.{}, and this build has kernels for {}.{} "
        "and later",
        i, major, minor, oldest / 100, oldest % 100 / 10);
  }
  return "";
}

}  // namespace

std::string driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess && version > 0 ? version_text(version) : "";
}

VisibleGpus visible_cuda_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) {
    const std::string too_old = why_too_old(count);
    return {too_old.empty() ? count : 0, too_old};
  }
  static_cast<void>(cudaGetLastError());  // told here
  return {0, why_none(status)};
}

std::string cuda_version() {
  int runtime = 0;
  static_cast<void>(cudaRuntimeGetVersion(&runtime));  // it can't fail
  std::string text =
      fmt::format("toolkit {}, runtime {}, {}, compute ", version_text(CUDART_VERSION),
                  version_text(runtime), CublasLt::version());
  const char* separator = "";
  for (const int target : cuda::compiled_for()) {
    text += fmt::format("{}{}.{}", separator, target / 100, target % 100 / 10);
    separator = ", ";
  }
  return text;
}

std::string cuda_found() {
  std::map<std::string, int> kinds;
  const int count = visible_cuda_devices().count;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp gpu{};
    const cudaError_t status = cudaGetDeviceProperties(&gpu, i);
    ++kinds[status == cudaSuccess ? fmt::format("{}, {:.0f} GiB, compute {}.{}", gpu.name,
                                                static_cast<double>(gpu.totalGlobalMem) / 0x1p30,
                                                gpu.major, gpu.minor)
                                  : cudaGetErrorString(status)];
  }
  std::string text;
  for (const auto& [kind, number] : kinds) text += fmt::format("{} x {}; ", number, kind);
  return count == 0 ? "" : text + "driver for CUDA " + driver_version();
}

}  // namespace gatefold
