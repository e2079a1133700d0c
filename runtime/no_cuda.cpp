#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/versions.h"

namespace gatefold {

VisibleGpus visible_cuda_devices() { return {0, "this build has no CUDA part"}; }

std::unique_ptr<Device> make_cuda_device(int) {
  throw Error(ExitCode::kUnavailable,
              "no CUDA device (this build has no CUDA part); configure one with "
              "-DGATEFOLD_CUDA=ON, or use --device cpu");
}

std::string cuda_version() { return ""; }

std::string cuda_found() { return ""; }

}  // namespace gatefold
