#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <memory>

#include "parallel/communicator.h"

namespace gatefold {

struct NcclOptions {
  double timeout_seconds = 300;  // of one wait; NCCL's own start gets half of it
  double grace_seconds = 2;      // for ncclCommAbort, then the whole job ends
};

/// A new NCCL communicator for the ranks of `over` on the current GPU; its calls are work on the
/// caller's `stream`. `over` carries what NCCL needs to start and moves host memory from then on;
/// both must outlive it. Collective over `over`. Throws Error 69 where two ranks share a GPU, 70,
/// 75.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& over, cudaStream_t stream,
                                                     const NcclOptions& options = {});

/// Over the caller's own communicator, which it keeps and which must be non-blocking, or a lost
/// peer can't be got rid of. After an Error it was aborted and is gone. `host` has the same ranks,
/// in the same order, for host memory. Collective. Throws Error 64 where the ranks differ.
std::unique_ptr<Communicator> use_nccl_communicator(ncclComm_t comm, Communicator& host,
                                                    cudaStream_t stream,
                                                    const NcclOptions& options = {});

}  // namespace gatefold
