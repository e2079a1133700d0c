#include "parallel/device_communicator.h"

#include <fmt/format.h>

#include "parallel/agreement.h"
#include "parallel/nccl_communicator.h"
#include "parallel/staged_communicator.h"
#include "runtime/error.h"

namespace gatefold {

CommChoice choose_comm(Communicator& world, const Device& device, CommKind wanted) {
  if (wanted == CommKind::kMpi) return {wanted, ""};
  const bool automatic = wanted == CommKind::kAuto;
  if (automatic && device.in_host_memory()) return {CommKind::kMpi, ""};
  if (automatic && world.size() == 1) return {CommKind::kMpi, "one rank moves nothing"};
  const std::string obstacle = nccl_obstacle(world, device);
  if (automatic && !obstacle.empty()) return {CommKind::kMpi, obstacle};
  if (automatic) return {CommKind::kNccl, "every rank has a GPU of its own"};
  if (obstacle.empty()) return {CommKind::kNccl, ""};
  throw AgreedError(ExitCode::kUnavailable,
                    fmt::format("no NCCL communicator ({}); use --comm mpi", obstacle));
}

std::unique_ptr<Communicator> make_device_communicator(Communicator& group, Device& device,
                                                       CommKind chosen, double timeout_seconds) {
  if (device.in_host_memory()) return nullptr;
  if (chosen != CommKind::kNccl) return make_staged_communicator(group, device);
  return make_nccl_communicator(group, device, timeout_seconds);
}

}  // namespace gatefold
