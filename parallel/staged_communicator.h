#pragma once

#include <memory>

#include "parallel/communicator.h"
#include "runtime/device.h"

namespace gatefold {

/// The ranks of `inner`, which moves host memory, for tensors in the device's memory: every piece
/// goes through pinned host memory. Needs no library between GPUs, and any number of ranks may have
/// the same one. Both must outlive it.
std::unique_ptr<Communicator> make_staged_communicator(Communicator& inner, Device& device);

}  // namespace gatefold
