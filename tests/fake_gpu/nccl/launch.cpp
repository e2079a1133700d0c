// Launches: onto the stream, and what the stream's thread does.
#include <cstdlib>

#include "tests/fake_gpu/fake_cudart.h"
#include "tests/fake_gpu/nccl/comm.h"

namespace fake_nccl {
namespace {

/// A failed operation never completes, until the communicator is aborted.
void wait_for_abort(Core& core) {
  while (!core.aborted) core.members->sleep(core.members->bell());
}

/// Launches of a communicator run in the order in which they were given, whatever their streams.
bool wait_for_turn(Core& core, std::uint64_t ticket) {
  std::unique_lock lock(core.mutex);
  core.changed.wait(lock, [&] { return core.aborted || core.done == ticket; });
  if (core.aborted) return false;
  ++core.begun;
  return true;
}

void run(Launch& launch) {
  Core& core = *launch.core;
  try {
    if (launch.fails) throw Refusal{ncclSystemError, "planted: this launch fails"};
    if (launch.stalls || !transfer(*core.members, core.rank, launch.operations, core.aborted)) {
      wait_for_abort(core);
    }
  } catch (const Refusal& refusal) {
    report(refusal);
    if (refusal.code == ncclInvalidUsage) {
      int none = 0;
      core.members->shared().fault.compare_exchange_strong(none, refusal.code);
      core.members->ring_all();
    }
    core.set(refusal.code, refusal.why);
    wait_for_abort(core);
  }
}

void CUDART_CB run_on_stream(void* data) {
  const std::unique_ptr<Launch> launch(static_cast<Launch*>(data));
  Core& core = *launch->core;
  if (!wait_for_turn(core, launch->ticket)) return;
  run(*launch);
  const std::lock_guard lock(core.mutex);
  ++core.done;
  core.changed.notify_all();
}

}  // namespace

void Core::set(ncclResult_t code, const std::string& why) {
  const std::lock_guard lock(mutex);
  if (state == ncclSuccess || state == ncclInProgress) state = code;
  last_error = why;
  changed.notify_all();
}

void require_ready(Core& core) {
  const std::lock_guard lock(core.mutex);
  if (core.finalized) throw Refusal{ncclInvalidUsage, "a call on a finalized communicator"};
  if (core.state == ncclInProgress) {
    throw Refusal{ncclInvalidArgument,
                  "a call on a communicator whose last one is still in progress (poll "
                  "ncclCommGetAsyncError first)"};
  }
  if (core.state != ncclSuccess) {
    throw Refusal{core.state, "a call on a communicator that failed: " + core.last_error};
  }
}

/// Caller holds the lock.
void put_on_stream(Core& core) {
  while (!core.pending.empty()) {
    Launch* launch = core.pending.front().release();
    core.pending.pop_front();
    const cudaError_t status = cudaLaunchHostFunc(launch->stream, run_on_stream, launch);
    if (status == cudaSuccess) continue;
    delete launch;
    core.state = ncclUnhandledCudaError;
    core.last_error = cudaGetErrorString(status);
  }
}

ncclResult_t give(std::unique_ptr<Launch> launch) {
  if (cudaFakeFault("nccl_refuse") != 0)
    throw Refusal{ncclInternalError, "planted: this call is refused"};
  launch->fails = cudaFakeFault("nccl_fail") != 0;
  launch->stalls = cudaFakeFault("nccl_stall") != 0;
  const std::shared_ptr<Core> core = launch->core;
  const std::lock_guard lock(core->mutex);
  launch->ticket = core->given++;
  core->pending.push_back(std::move(launch));
  if (core->blocking) {
    put_on_stream(*core);
    return core->state;
  }
  core->state = ncclInProgress;
  core->polls = 0;
  return ncclInProgress;
}

}  // namespace fake_nccl
