#include "parallel/nccl_communicator.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <future>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "parallel/agreement.h"
#include "parallel/nccl_interop.h"
#include "parallel/session.h"
#include "parallel/versions.h"
#include "runtime/cuda_check.h"
#include "runtime/cuda_interop.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr std::int64_t kSpins = 512;

/// A lost peer is the time-out's sibling: the same code, whoever notices first.
ExitCode code_of(ncclResult_t result) {
  return result == ncclRemoteError ? ExitCode::kTimeout : ExitCode::kBackend;
}

std::string text_of(ncclResult_t result, const char* call, ncclComm_t comm) {
  const char* detail = comm != nullptr ? ncclGetLastError(comm) : "";
  return fmt::format("{} failed ({}{}{}); {}", call, ncclGetErrorString(result),
                     detail[0] != '\0' ? ": " : "", detail,
                     result == ncclRemoteError ? "a peer is lost, look at its output"
                                               : "run again with NCCL_DEBUG=WARN");
}

void check(ncclResult_t result, const char* call) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  throw Error(code_of(result), text_of(result, call, nullptr));
}

/// Waits as long as most waits take, then gives its core away, then sleeps.
void pause(std::int64_t polls, Seconds waited) {
  if (polls < kSpins) return;
  if (waited.count() < 0.02) {
    sched_yield();
  } else {
    usleep(100);
  }
}

/// A NCCL communicator that is destroyed or aborted, never both. One thread at a time is inside
/// NCCL with it, as an abort demands.
class Handle {
 public:
  Handle(Progress& progress, const NcclOptions& options) : progress_(progress), options_(options) {}
  ~Handle() { close(); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  ncclComm_t* out() { return &comm_; }
  ncclComm_t get() const {
    if (comm_ != nullptr) return comm_;
    throw Error(ExitCode::kBackend,
                "the NCCL communicator was given up after an error; end the program");
  }
  /// The caller's, who ends it.
  void borrow(ncclComm_t comm) {
    comm_ = comm;
    borrowed_ = true;
  }

  /// Until the last call has come through.
  void settle(const char* what, double seconds) {
    poll(what, seconds, [] { return true; });
  }
  /// Until all work on the stream is done.
  void finish(cudaStream_t stream, const char* what) {
    poll(what, options_.timeout_seconds, [stream] {
      const cudaError_t status = cudaStreamQuery(stream);
      if (status == cudaErrorNotReady) {
        cudaGetLastError();  // or the next check of a launch finds it
        return false;
      }
      gatefold::check(status, "cudaStreamQuery");
      return true;
    });
  }
  /// Gives the communicator up because of `why`. An abort can hang itself: then the job ends.
  void abort(const Error& why) noexcept;

  /// Checks a call's result; a bad one ends the communicator.
  void check_call(ncclResult_t result, const char* call) {
    if (result == ncclSuccess || result == ncclInProgress) return;
    const Error error(code_of(result), text_of(result, call, comm_));
    abort(error);
    throw error;
  }

 private:
  template <typename Done>
  void poll(const char* what, double seconds, const Done& done) {
    progress_.tick();
    const auto start = Clock::now();
    for (std::int64_t polls = 0;; ++polls) {
      ncclResult_t state = ncclSuccess;
      check_call(ncclCommGetAsyncError(get(), &state), "ncclCommGetAsyncError");
      check_call(state, what);
      if (state == ncclSuccess && is_done(done)) break;
      const Seconds waited = Clock::now() - start;
      if (waited.count() > seconds) give_up(what, seconds);
      pause(polls, waited);
    }
    progress_.tick();
  }
  template <typename Done>
  bool is_done(const Done& done) {
    try {
      return done();
    } catch (const Error& error) {
      abort(error);
      throw;
    }
  }
  [[noreturn]] void give_up(const char* what, double seconds) {
    const Error error(
        ExitCode::kTimeout,
        fmt::format("no answer for {} s in {} during {} (a peer is lost, stuck or slower than the "
                    "deadline); look at its output, or raise --timeout",
                    seconds, what, progress_.phase()));
    abort(error);
    throw error;
  }
  void close() noexcept;

  Progress& progress_;
  NcclOptions options_;
  ncclComm_t comm_ = nullptr;
  bool borrowed_ = false;  // the caller ends it
  int exceptions_ = std::uncaught_exceptions();
};

void Handle::abort(const Error& why) noexcept {
  ncclComm_t comm = std::exchange(comm_, nullptr);
  if (comm == nullptr) return;
  progress_.tick();  // the watchdog knows less
  std::promise<void> done;
  std::future<void> ended = done.get_future();
  std::thread([comm, done = std::move(done)]() mutable {
    ncclCommAbort(comm);
    done.set_value();
  }).detach();
  if (ended.wait_for(Seconds(options_.grace_seconds)) == std::future_status::ready) return;
  print_error(
      fmt::format("[rank {}] gatefold: {}; ncclCommAbort has not come back for {} s, "
                  "ending the job",
                  launched_rank(), why.what(), options_.grace_seconds));
  Session::abort_job(static_cast<int>(why.code()));
}

/// In order with the peers where all went well; otherwise nobody waits for anybody.
void Handle::close() noexcept {
  if (comm_ == nullptr || borrowed_) return;
  if (std::uncaught_exceptions() > exceptions_) {
    abort(Error(ExitCode::kBackend, "an error ends this rank"));
    return;
  }
  try {
    check_call(ncclCommFinalize(comm_), "ncclCommFinalize");
    settle("the end of NCCL", options_.timeout_seconds);
    check_call(ncclCommDestroy(comm_), "ncclCommDestroy");
    comm_ = nullptr;
  } catch (const Error& error) {
    print_error(fmt::format("[rank {}] gatefold: {}", launched_rank(), error.what()));
  }
}

/// Calls are work on the stream, which waits for nothing here but that NCCL has taken them: so all
/// communicators of a stream have one order of launches, as NCCL demands.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(Communicator& host, std::unique_ptr<Handle> handle, cudaStream_t stream,
                   const NcclOptions& options)
      : Communicator(host.rank(), host.size(), &host.progress()),
        host_(host),
        handle_(std::move(handle)),
        stream_(stream),
        options_(options) {
    gatefold::check(cudaMalloc(&scratch_, sizeof(float)), "cudaMalloc");
    gatefold::check(cudaMemsetAsync(scratch_, 0, sizeof(float), stream_), "cudaMemsetAsync");
    gatefold::check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  NcclCommunicator(std::unique_ptr<Communicator> host, std::unique_ptr<Handle> handle,
                   cudaStream_t stream, const NcclOptions& options)
      : NcclCommunicator(*host, std::move(handle), stream, options) {
    own_host_ = std::move(host);
  }
  ~NcclCommunicator() override {
    handle_.reset();  // before the memory that its work may use
    cudaFree(scratch_);
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  std::string description() const override { return "NCCL " + nccl_version(); }
  Communicator& host() override { return host_; }

  void exchange(std::span<const Transfer> sends, std::span<const Transfer> receives) override {
    copy_own_pieces(rank(), sends, receives,
                    [this](std::byte* out, const std::byte* in, std::int64_t bytes) {
                      gatefold::check(cudaMemcpyAsync(out, in, static_cast<std::size_t>(bytes),
                                                      cudaMemcpyDeviceToDevice, stream_),
                                      "cudaMemcpyAsync");
                    });
    grouped("an exchange with its peers", [&] {
      for (const Transfer& t : receives) receive(t);
      for (const Transfer& t : sends) send(t);
    });
  }

  void all_gather_v(std::byte* all, std::span<const std::int64_t> parts) override {
    std::byte* own = all + before_own(parts);
    if (!equal(parts)) return grouped("an all-gather", [&] { gather_uneven(all, parts, own); });
    start("an all-gather", "ncclAllGather", [&](ncclComm_t comm) {
      return ncclAllGather(own, all, static_cast<std::size_t>(parts[0]), ncclUint8, comm, stream_);
    });
  }

  void broadcast(std::byte* data, std::int64_t bytes, int root) override {
    start("a broadcast", "ncclBroadcast", [&](ncclComm_t comm) {
      return ncclBroadcast(data, data, static_cast<std::size_t>(bytes), ncclUint8, root, comm,
                           stream_);
    });
  }

  void barrier() override {
    reduce(static_cast<float*>(scratch_), 1, "a barrier");
    wait();
  }
  void wait() override { handle_->finish(stream_, last_); }

  void all_reduce(float* data, std::int64_t count) override {
    reduce(data, count, "an all-reduce");
  }

  void reduce_scatter_v(float* data, std::span<const std::int64_t> counts) override {
    float* own = data + before_own(counts);
    if (!equal(counts)) return grouped("a reduce-scatter", [&] { reduce_uneven(data, counts); });
    start("a reduce-scatter", "ncclReduceScatter", [&](ncclComm_t comm) {
      return ncclReduceScatter(data, own, static_cast<std::size_t>(counts[0]), ncclFloat32, ncclSum,
                               comm, stream_);
    });
  }

  std::unique_ptr<Communicator> split(int color) override {
    wait();  // NCCL splits nothing that has work to do
    std::unique_ptr<Communicator> host = host_.split(color);
    auto part = std::make_unique<Handle>(progress(), options_);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    handle_->check_call(ncclCommSplit(handle_->get(), color, rank(), part->out(), &config),
                        "ncclCommSplit");
    handle_->settle("a split of the ranks", options_.timeout_seconds);
    part->settle("a split of the ranks", options_.timeout_seconds);
    return std::make_unique<NcclCommunicator>(std::move(host), std::move(part), stream_, options_);
  }

 private:
  static bool equal(std::span<const std::int64_t> parts) {
    return std::adjacent_find(parts.begin(), parts.end(), std::not_equal_to<>()) == parts.end();
  }

  /// Both sides skip empty pieces: NCCL waits for one that only one side lists.
  bool goes(const Transfer& t) const { return t.peer != rank() && t.bytes > 0; }
  void receive(const Transfer& t) {
    if (!goes(t)) return;
    check(ncclRecv(t.data, static_cast<std::size_t>(t.bytes), ncclUint8, t.peer, handle_->get(),
                   stream_),
          "ncclRecv");
  }
  void send(const Transfer& t) {
    if (!goes(t)) return;
    check(ncclSend(t.data, static_cast<std::size_t>(t.bytes), ncclUint8, t.peer, handle_->get(),
                   stream_),
          "ncclSend");
  }

  void gather_uneven(std::byte* all, std::span<const std::int64_t> parts, std::byte* own) {
    for (int r = 0; r < size(); ++r) {
      const std::int64_t part = parts[static_cast<std::size_t>(r)];
      receive({r, all, part});
      send({r, own, parts[static_cast<std::size_t>(rank())]});
      all += part;
    }
  }

  void reduce_uneven(float* data, std::span<const std::int64_t> counts) {
    for (int r = 0; r < size(); ++r) {
      const auto count = static_cast<std::size_t>(counts[static_cast<std::size_t>(r)]);
      if (count == 0) continue;
      check(ncclReduce(data, data, count, ncclFloat32, ncclSum, r, handle_->get(), stream_),
            "ncclReduce");
      data += count;
    }
  }

  /// `what` it is to those who wait, `name` the call that starts it.
  template <typename Call>
  void start(const char* what, const char* name, const Call& call) {
    last_ = what;
    handle_->check_call(call(handle_->get()), name);
    handle_->settle(what, options_.timeout_seconds);
  }

  /// A group that was begun is ended, whatever happens in it.
  template <typename Calls>
  void grouped(const char* what, const Calls& calls) {
    start(what, "ncclGroupEnd", [&](ncclComm_t) {
      check(ncclGroupStart(), "ncclGroupStart");
      try {
        calls();
      } catch (const Error& error) {
        ncclGroupEnd();
        handle_->abort(error);
        throw;
      }
      return ncclGroupEnd();
    });
  }

  void reduce(float* data, std::int64_t count, const char* what) {
    start(what, "ncclAllReduce", [&](ncclComm_t comm) {
      return ncclAllReduce(data, data, static_cast<std::size_t>(count), ncclFloat32, ncclSum, comm,
                           stream_);
    });
  }

  std::unique_ptr<Communicator> own_host_;  // where this is a split's
  Communicator& host_;
  std::unique_ptr<Handle> handle_;
  cudaStream_t stream_;
  NcclOptions options_;
  void* scratch_ = nullptr;
  const char* last_ = "the work of its stream";
};

/// Where a rank's GPU is, as NCCL tells two apart.
struct Place {
  std::array<char, 256> host;
  std::array<char, 40> boot;
  std::array<char, 32> gpu;
  bool operator==(const Place&) const = default;
};

Place own_place() {
  Place mine{};
  const char* id = std::getenv("NCCL_HOSTID");
  if (id != nullptr) {
    std::strncpy(mine.host.data(), id, mine.host.size() - 1);
  } else {
    gethostname(mine.host.data(), mine.host.size() - 1);
    // Cloned machines may share a name.
    std::ifstream("/proc/sys/kernel/random/boot_id").read(mine.boot.data(), mine.boot.size() - 1);
  }
  int device = 0;
  gatefold::check(cudaGetDevice(&device), "cudaGetDevice");
  gatefold::check(cudaDeviceGetPCIBusId(mine.gpu.data(), static_cast<int>(mine.gpu.size()), device),
                  "cudaDeviceGetPCIBusId");
  return mine;
}

/// NCCL refuses two ranks on one GPU, with words that don't help; and late. Empty where there are
/// none. Collective.
std::string shared_gpu(Communicator& over) {
  std::vector<Place> places(static_cast<std::size_t>(over.size()));
  run_agreed(over, [&] { places[static_cast<std::size_t>(over.rank())] = own_place(); });
  all_gather<Place>(over, places);
  for (std::size_t b = 1; b < places.size(); ++b) {
    for (std::size_t a = 0; a < b; ++a) {
      if (places[a] != places[b]) continue;
      return fmt::format("rank {} and rank {} share GPU {} of {}, and NCCL wants one for each rank",
                         a, b, places[b].gpu.data(), places[b].host.data());
    }
  }
  return "";
}

/// Agreed, so that nobody waits for a rank that was given another communicator than its peers.
void require_same_ranks(ncclComm_t comm, Communicator& host) {
  run_agreed(host, [&] {
    int rank = 0;
    int size = 0;
    check(ncclCommUserRank(comm, &rank), "ncclCommUserRank");
    check(ncclCommCount(comm, &size), "ncclCommCount");
    if (rank == host.rank() && size == host.size()) return;
    throw Error(ExitCode::kUsage,
                fmt::format("the NCCL communicator's rank {} of {} is rank {} of {} in the one for "
                            "host memory (they must be of the same ranks in the same order); pass "
                            "one that matches",
                            rank, size, host.rank(), host.size()));
  });
}

}  // namespace

std::string nccl_version() {
  int version = 0;
  check(ncclGetVersion(&version), "ncclGetVersion");
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::string nccl_obstacle(Communicator& over, const Device& device) {
  if (device.in_host_memory()) {
    return fmt::format("NCCL moves the memory of GPUs, and the device is {}", device.description());
  }
  return shared_gpu(over);
}

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& over, const Device& device,
                                                     double timeout_seconds) {
  return make_nccl_communicator(over, cuda_stream(device), {timeout_seconds});
}

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& over, cudaStream_t stream,
                                                     const NcclOptions& options) {
  auto handle = std::make_unique<Handle>(over.progress(), options);
  const std::string shared = shared_gpu(over);
  if (!shared.empty()) {
    throw AgreedError(ExitCode::kUnavailable,
                      fmt::format("no NCCL communicator ({}); start fewer ranks there, or let MPI "
                                  "move the data",
                                  shared));
  }
  ncclUniqueId id{};
  run_agreed(over, [&] {
    if (over.rank() == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  });
  over.broadcast(reinterpret_cast<std::byte*>(&id), sizeof(id), 0);
  std::unique_ptr<Communicator> made;
  run_agreed(over, [&] {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    handle->check_call(ncclCommInitRankConfig(handle->out(), over.size(), id, over.rank(), &config),
                       "ncclCommInitRankConfig");
    // Half the time, so that those who give up meet the others before these do.
    handle->settle("the start of NCCL", options.timeout_seconds / 2);
    made = std::make_unique<NcclCommunicator>(over, std::move(handle), stream, options);
  });
  return made;
}

std::unique_ptr<Communicator> use_nccl_communicator(ncclComm_t comm, Communicator& host,
                                                    cudaStream_t stream,
                                                    const NcclOptions& options) {
  require_same_ranks(comm, host);
  auto handle = std::make_unique<Handle>(host.progress(), options);
  handle->borrow(comm);
  std::unique_ptr<Communicator> made;
  run_agreed(host, [&] {
    made = std::make_unique<NcclCommunicator>(host, std::move(handle), stream, options);
  });
  return made;
}

}  // namespace gatefold
