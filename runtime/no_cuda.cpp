#include "runtime/device.h"
#include "runtime/error.h"

namespace gatefold {

int visible_cuda_devices() { return 0; }

std::unique_ptr<Device> make_cuda_device(int) {
  throw Error(ExitCode::kUnavailable,
              "no CUDA device (this build has no CUDA part); use --device cpu");
}

}  // namespace gatefold
