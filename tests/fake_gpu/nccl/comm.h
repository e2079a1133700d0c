#pragma once
// The communicator of the stand-in: its states, its launches, its threads.

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/fake_gpu/nccl/segment.h"
#include "tests/fake_gpu/nccl/transfer.h"

namespace fake_nccl {

struct Core;

/// What goes onto a stream as one: the calls of a group for one communicator.
struct Launch {
  std::shared_ptr<Core> core;  // outlives the communicator where a stream comes to it late
  std::vector<Operation> operations;
  cudaStream_t stream = nullptr;
  std::uint64_t ticket = 0;
  bool fails = false;   // planted
  bool stalls = false;  // planted
};

struct Core {
  int rank = 0;
  int size = 0;
  int device = 0;
  bool blocking = true;
  std::unique_ptr<Membership> members;

  std::mutex mutex;  // of everything below
  std::condition_variable changed;
  ncclResult_t state = ncclSuccess;
  std::string last_error;
  std::deque<std::unique_ptr<Launch>> pending;  // given, not yet on a stream
  int polls = 0;                                // since then
  std::uint64_t given = 0;
  std::uint64_t begun = 0;
  std::uint64_t done = 0;
  bool finalized = false;
  std::atomic<bool> aborted{false};
  std::atomic<int> callers{0};

  void set(ncclResult_t code, const std::string& why);
};

/// While it lives a thread is inside a call, where no other may abort.
class Inside {
 public:
  explicit Inside(Core& core) : core_(core) { ++core_.callers; }
  ~Inside() { --core_.callers; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Core& core_;
};

/// Throws Refusal unless the communicator can take a call.
void require_ready(Core& core);
/// Puts a launch onto its stream, or, where calls don't block, lets the second poll do it.
ncclResult_t give(std::unique_ptr<Launch> launch);

}  // namespace fake_nccl

struct ncclComm {
  std::shared_ptr<fake_nccl::Core> core;
  std::thread worker;        // of a call that doesn't block
  std::uint64_t splits = 0;  // how often it was split
};
