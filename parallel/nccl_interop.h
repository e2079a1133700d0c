#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <memory>

#include "parallel/communicator.h"

namespace gatefold {

struct NcclOptions {
  double timeout_seconds = 300;  // of one wait; NCCL's own start gets half of it
  double grace_seconds = 5;      // for ncclCommAbort, then the whole job ends
  Progress* progress = nullptr;  // must outlive the communicator; null: one of its own
};

/// A new NCCL communicator for the ranks of `over` on the current GPU; its calls order themselves
/// on the caller's `stream`, which must outlive it. Collective over `over`, which carries what NCCL
/// needs to start. Throws Error 69 where two ranks share a GPU, 70, 75.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& over, cudaStream_t stream,
                                                     const NcclOptions& options = {});

/// Over the caller's own communicator, which it keeps and which must be non-blocking, or a lost
/// peer can't be got rid of. After an Error it was aborted and is gone.
std::unique_ptr<Communicator> use_nccl_communicator(ncclComm_t comm, cudaStream_t stream,
                                                    const NcclOptions& options = {});

}  // namespace gatefold
