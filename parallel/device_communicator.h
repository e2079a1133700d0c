#pragma once

#include <memory>
#include <string>

#include "parallel/communicator.h"
#include "runtime/device.h"

namespace gatefold {

/// Who carries tensors in device memory between ranks.
enum class CommKind { kAuto, kMpi, kNccl };

struct CommChoice {
  CommKind kind = CommKind::kMpi;
  std::string why;  // in words, where the choice was ours
};

/// Settles kAuto: NCCL where the build has it and every rank of `world` a GPU of its own, MPI
/// otherwise. The same on all ranks. Collective. Throws Error 69 where NCCL is wanted but can't be.
CommChoice choose_comm(Communicator& world, const Device& device, CommKind wanted);

/// The ranks of `group`, which moves host memory, for tensors of `device`; both must outlive it.
/// Null where device memory is host memory: there `group` itself serves. Collective.
std::unique_ptr<Communicator> make_device_communicator(Communicator& group, Device& device,
                                                       CommKind chosen, double timeout_seconds);

}  // namespace gatefold
