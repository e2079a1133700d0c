// Communicators from their unique id to their end.
#include "tests/fake_gpu/nccl/comm.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/fake_gpu/fake_cudart.h"

namespace fake_nccl {
void put_on_stream(Core& core);
namespace {

void require_rig() {
  const char* rig = std::getenv("GATEFOLD_FAKE_GPU");
  if (rig != nullptr && std::strcmp(rig, "1") == 0) return;
  throw Refusal{ncclSystemError,
                "this library is a stand-in for tests and moves nothing between GPUs; set "
                "GATEFOLD_FAKE_GPU=1 if that is what you want"};
}

/// Tells at the process's end what it forgot.
struct Census {
  std::atomic<int> alive{0};
  ~Census() {
    if (alive == 0) return;
    std::fprintf(stderr, "fake NCCL: %d communicators neither destroyed nor aborted\n",
                 alive.load());
  }
};
Census census;

/// Waits until `ready` holds for all ranks. Throws Refusal: a fault, a death, an abort.
template <typename Ready>
void wait_for_all(Core& core, const Ready& ready) {
  for (;;) {
    const std::uint32_t bell = core.members->bell();
    int missing = -1;
    for (int r = 0; r < core.size; ++r) {
      if (!ready(core.members->shared().ranks[r])) missing = r;
    }
    if (missing < 0) return;
    if (core.aborted) throw Refusal{ncclInvalidUsage, "aborted"};
    if (const int fault = core.members->shared().fault; fault != 0) {
      throw Refusal{static_cast<ncclResult_t>(fault), "another rank found a fault"};
    }
    if (core.members->sleep(bell)) continue;
    const int dead = cudaFakeSetting("SILENT_DEATH", 0) != 0 ? -1 : core.members->dead_rank();
    if (dead < 0) continue;
    throw Refusal{ncclRemoteError, "rank " + std::to_string(core.rank) + " lost its peer, rank " +
                                       std::to_string(dead)};
  }
}

std::uint64_t host_hash() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  const char* id = std::getenv("NCCL_HOSTID");
  return std::hash<std::string>()(id != nullptr ? id : name);
}

/// As NCCL 2.28 does: several ranks on one GPU are refused.
void require_own_gpus(const Core& core) {
  const RankEntry* ranks = core.members->shared().ranks;
  for (int b = 1; b < core.size; ++b) {
    for (int a = 0; a < b; ++a) {
      if (ranks[a].host != ranks[b].host || std::strcmp(ranks[a].bus_id, ranks[b].bus_id) != 0) {
        continue;
      }
      throw Refusal{ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(a) +
                                          " and rank " + std::to_string(b) +
                                          " both on CUDA device " + ranks[a].bus_id};
    }
  }
}

/// Joins the group and waits for the others.
void join(Core& core, const SegmentId& id) {
  const bool missing = cudaFakeFault("nccl_init") != 0;
  while (missing) {
    if (core.aborted) throw Refusal{ncclInvalidUsage, "aborted"};
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  auto members = std::make_unique<Membership>(id, core.size, core.rank);
  RankEntry& mine = members->mine();
  const cudaError_t status =
      cudaDeviceGetPCIBusId(mine.bus_id, static_cast<int>(sizeof(mine.bus_id)), core.device);
  if (status != cudaSuccess) throw Refusal{ncclUnhandledCudaError, cudaGetErrorString(status)};
  mine.host = host_hash();
  mine.joined = 1;
  members->ring_all();
  {
    const std::lock_guard lock(core.mutex);
    core.members = std::move(members);
  }
  wait_for_all(core, [](const RankEntry& entry) { return entry.joined != 0; });
  Membership::forget(id);
  require_own_gpus(core);
}

/// Runs `step` here, or, where calls don't block, in a thread of the communicator's.
template <typename Step>
ncclResult_t run_step(ncclComm& comm, const Step& step) {
  const std::shared_ptr<Core> core = comm.core;
  if (comm.worker.joinable()) comm.worker.join();
  core->state = ncclInProgress;
  const auto guarded = [core, step] {
    try {
      step(*core);
      core->set(ncclSuccess, "");
    } catch (const Refusal& refusal) {
      if (!core->aborted) report(refusal);
      core->set(refusal.code, refusal.why);
    }
  };
  if (!core->blocking) {
    comm.worker = std::thread(guarded);
    return ncclInProgress;
  }
  guarded();
  return core->state;
}

void free_comm(ncclComm_t comm) {
  if (comm->worker.joinable()) comm->worker.join();
  --census.alive;
  delete comm;
}

ncclResult_t init(ncclComm_t* out, const SegmentId& id, int size, int rank, int device,
                  bool blocking) {
  auto* comm = new ncclComm;
  ++census.alive;
  comm->core = std::make_shared<Core>();
  comm->core->rank = rank;
  comm->core->size = size;
  comm->core->device = device;
  comm->core->blocking = blocking;
  const ncclResult_t result = run_step(*comm, [id](Core& core) { join(core, id); });
  const bool kept = result == ncclSuccess || result == ncclInProgress;
  if (!kept) free_comm(comm);
  *out = kept ? comm : nullptr;
  return result;
}

bool is_blocking(const ncclConfig_t* config) { return config == nullptr || config->blocking != 0; }

/// The ranks of this rank's color, in order of key and rank.
std::vector<int> color_members(const Core& core, int slot, int color) {
  std::vector<int> members;
  const RankEntry* ranks = core.members->shared().ranks;
  for (int r = 0; r < core.size; ++r) {
    if (ranks[r].splits[slot].color == color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return ranks[a].splits[slot].key < ranks[b].splits[slot].key;
  });
  return members;
}

/// Every rank offers a segment; the group takes its first member's.
void split(Core& parent, Core& child, std::uint64_t generation, int color, int key) {
  const int slot = static_cast<int>(generation % 2);
  SplitEntry& mine = parent.members->mine().splits[slot];
  mine.color = color;
  mine.key = key;
  mine.id = Membership::create();
  mine.generation = generation;
  const SegmentId own = mine.id;
  parent.members->ring_all();
  wait_for_all(parent,
               [&](const RankEntry& entry) { return entry.splits[slot].generation == generation; });
  const std::vector<int> members = color_members(parent, slot, color);
  const SegmentId id = parent.members->shared().ranks[members[0]].splits[slot].id;
  child.size = static_cast<int>(members.size());
  child.rank =
      static_cast<int>(std::find(members.begin(), members.end(), parent.rank) - members.begin());
  if (id.nonce != own.nonce) Membership::forget(own);
  if (color != NCCL_SPLIT_NOCOLOR) join(child, id);
  if (color == NCCL_SPLIT_NOCOLOR && id.nonce == own.nonce) Membership::forget(own);
}

void finalize(Core& core) {
  {
    std::unique_lock lock(core.mutex);
    core.changed.wait(lock, [&] { return core.aborted || core.done == core.given; });
    if (core.aborted) throw Refusal{ncclInvalidUsage, "aborted"};
  }
  core.members->mine().finalized = 1;
  core.members->ring_all();
  wait_for_all(core, [](const RankEntry& entry) { return entry.finalized != 0; });
}

/// NCCL's own words: no thread may be inside a call while another aborts.
void require_alone(const Core& core) {
  if (core.callers == 0) return;
  std::fputs("fake NCCL: ncclCommAbort while another thread is inside a call\n", stderr);
  std::abort();
}

template <typename Action>
ncclResult_t guarded(const Action& action) {
  try {
    return action();
  } catch (const Refusal& refusal) {
    return report(refusal);
  }
}

}  // namespace
}  // namespace fake_nccl

using fake_nccl::Core;
using fake_nccl::guarded;
using fake_nccl::Inside;
using fake_nccl::Refusal;
using fake_nccl::SegmentId;

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  constexpr const char* kTexts[] = {"no error",
                                    "unhandled cuda error",
                                    "unhandled system error",
                                    "internal error",
                                    "invalid argument",
                                    "invalid usage",
                                    "remote process exited or there was a network error",
                                    "NCCL operation in progress"};
  return result >= 0 && result < ncclNumResults ? kTexts[result] : "unknown result code";
}

const char* ncclGetLastError(ncclComm_t comm) {
  thread_local std::string text;
  if (comm == nullptr) return "";
  const std::lock_guard lock(comm->core->mutex);
  text = comm->core->last_error;
  return text.c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return guarded([&] {
    fake_nccl::require_rig();
    const SegmentId made = fake_nccl::Membership::create();
    static_assert(sizeof(made) <= NCCL_UNIQUE_ID_BYTES);
    *id = {};
    std::memcpy(id->internal, &made, sizeof(made));
    return ncclSuccess;
  });
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return guarded([&] {
    fake_nccl::require_rig();
    if (size < 1 || size > fake_nccl::kMaxRanks || rank < 0 || rank >= size) {
      throw Refusal{ncclInvalidArgument, "rank " + std::to_string(rank) + " of " +
                                             std::to_string(size) + " (at most 16)"};
    }
    if (config != nullptr && (config->magic != 0xcafebeef || config->size != sizeof(*config))) {
      throw Refusal{ncclInvalidArgument, "a config without NCCL_CONFIG_INITIALIZER"};
    }
    SegmentId segment;
    std::memcpy(&segment, id.internal, sizeof(segment));
    int device = -1;
    const cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess) throw Refusal{ncclUnhandledCudaError, cudaGetErrorString(status)};
    return fake_nccl::init(comm, segment, size, rank, device, fake_nccl::is_blocking(config));
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out,
                           ncclConfig_t* config) {
  return guarded([&] {
    fake_nccl::require_ready(*comm->core);
    const Inside inside(*comm->core);
    const bool blocking = config == nullptr ? comm->core->blocking : fake_nccl::is_blocking(config);
    auto* part = new ncclComm;
    ++fake_nccl::census.alive;
    part->core = std::make_shared<Core>();
    part->core->device = comm->core->device;
    part->core->blocking = blocking;
    part->core->state = ncclInProgress;
    const std::shared_ptr<Core> child = part->core;
    const std::uint64_t generation = ++comm->splits;
    const ncclResult_t result = fake_nccl::run_step(*comm, [=](Core& parent) {
      try {
        fake_nccl::split(parent, *child, generation, color, key);
        child->set(ncclSuccess, "");
      } catch (const Refusal& refusal) {
        child->set(refusal.code, refusal.why);
        throw;
      }
    });
    const bool kept =
        color != NCCL_SPLIT_NOCOLOR && (result == ncclSuccess || result == ncclInProgress);
    if (!kept) fake_nccl::free_comm(part);
    *out = kept ? part : nullptr;
    return result;
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  Core& core = *comm->core;
  const Inside inside(core);
  const std::lock_guard lock(core.mutex);
  *error = core.state;
  if (core.pending.empty() || ++core.polls < 2) return ncclSuccess;
  // Launches of calls that don't block reach their stream late, so that nobody counts on more.
  fake_nccl::put_on_stream(core);
  if (core.state == ncclInProgress) core.state = ncclSuccess;
  *error = core.state;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return guarded([&] {
    fake_nccl::require_ready(*comm->core);
    const Inside inside(*comm->core);
    {
      const std::lock_guard lock(comm->core->mutex);
      comm->core->finalized = true;
    }
    return fake_nccl::run_step(*comm, [](Core& core) { fake_nccl::finalize(core); });
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return guarded([&] {
    Core& core = *comm->core;
    if (comm->worker.joinable()) comm->worker.join();
    if (core.state != ncclSuccess) {
      throw Refusal{ncclInvalidUsage,
                    "ncclCommDestroy of a communicator that failed or has work "
                    "would wait for ever; abort it"};
    }
    if (!core.finalized) fake_nccl::finalize(core);
    core.members->leave_in_order();
    core.members->leave();
    fake_nccl::free_comm(comm);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  Core& core = *comm->core;
  fake_nccl::require_alone(core);
  const bool stuck = cudaFakeFault("nccl_abort") != 0;
  while (stuck) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  {
    std::unique_lock lock(core.mutex);
    core.aborted = true;
    core.pending.clear();
    if (core.members != nullptr) core.members->ring(core.rank);
    core.changed.notify_all();
    core.changed.wait(lock, [&] { return core.begun == core.done; });
  }
  if (comm->worker.joinable()) comm->worker.join();
  if (core.members != nullptr) core.members->leave();
  fake_nccl::free_comm(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->core->size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->core->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->core->device;
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** data, size_t bytes) {
  return cudaMalloc(data, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void* data) {
  return cudaFree(data) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
