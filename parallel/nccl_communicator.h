#pragma once

#include <memory>
#include <string>

#include "parallel/communicator.h"
#include "runtime/device.h"

// NCCL without its header, for builds that have it and builds that don't; with it: nccl_interop.h.

namespace gatefold {

/// Why NCCL can't move tensors of `device` between the ranks of `over`, as "this build has no
/// NCCL"; empty where it can. The same on all ranks. Collective.
std::string nccl_obstacle(Communicator& over, const Device& device);

/// A new NCCL communicator for the ranks of `over`, which carries what NCCL needs to start, moves
/// host memory from then on, and must outlive it, as `device` must. Its calls are work on the
/// device's stream. Collective. Throws Error 69 where there is an obstacle, 70, 75.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& over, const Device& device,
                                                     double timeout_seconds);

}  // namespace gatefold
