#include "launch/device_choice.h"

#include <fmt/format.h>

#include "parallel/agreement.h"
#include "runtime/versions.h"

namespace gatefold {

std::unique_ptr<Device> make_device(const Options& options, Communicator& world) {
  const bool cuda =
      options.device == DeviceKind::kCuda ||
      (options.device == DeviceKind::kAuto && all_true(world, visible_cuda_devices().count > 0));
  const int local_rank = cuda ? world.split_by_host()->rank() : 0;
  std::unique_ptr<Device> device;
  run_agreed(world, [&] {
    device =
        cuda ? make_cuda_device(local_rank) : make_cpu_device(static_cast<int>(options.threads));
  });
  return device;
}

std::string why_no_gpu(const Options& options, const Device& device) {
  if (options.device != DeviceKind::kAuto || !device.in_host_memory()) return "";
  if (cuda_version().empty()) return "";
  const VisibleGpus own = visible_cuda_devices();
  return fmt::format(" (no CUDA device: {})", own.count == 0 ? own.why_none : "a rank sees none");
}

}  // namespace gatefold
