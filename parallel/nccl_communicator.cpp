#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <future>
#include <thread>
#include <utility>
#include <vector>

#include "parallel/agreement.h"
#include "parallel/nccl_interop.h"
#include "parallel/session.h"
#include "runtime/cuda_check.h"
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
  explicit Handle(const NcclOptions& options) : options_(options) {}
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
  Progress& progress() { return options_.progress != nullptr ? *options_.progress : own_progress_; }

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
  /// Gives the communicator up. An abort can hang itself: then the job ends.
  void abort(const std::string& why) noexcept;

  /// Checks a call's result; a bad one ends the communicator.
  void check_call(ncclResult_t result, const char* call) {
    if (result == ncclSuccess || result == ncclInProgress) return;
    const std::string text = text_of(result, call, comm_);
    abort(text);
    throw Error(code_of(result), text);
  }

 private:
  template <typename Done>
  void poll(const char* what, double seconds, const Done& done) {
    progress().tick();
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
    progress().tick();
  }
  template <typename Done>
  bool is_done(const Done& done) {
    try {
      return done();
    } catch (const Error& error) {
      abort(error.what());
      throw;
    }
  }
  [[noreturn]] void give_up(const char* what, double seconds) {
    const std::string why = fmt::format(
        "no answer for {} s in {} during {} (a peer is lost, stuck or slower than the "
        "deadline); look at its output, or raise --timeout",
        seconds, what, progress().phase());
    abort(why);
    throw Error(ExitCode::kTimeout, why);
  }
  void close() noexcept;

  NcclOptions options_;
  Progress own_progress_;
  ncclComm_t comm_ = nullptr;
  bool borrowed_ = false;  // the caller ends it
  int exceptions_ = std::uncaught_exceptions();
};

void Handle::abort(const std::string& why) noexcept {
  ncclComm_t comm = std::exchange(comm_, nullptr);
  if (comm == nullptr) return;
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
                  launched_rank(), why, options_.grace_seconds));
  Session::abort_job(static_cast<int>(ExitCode::kTimeout));
}

/// In order with the peers where all went well; otherwise nobody waits for anybody.
void Handle::close() noexcept {
  if (comm_ == nullptr || borrowed_) return;
  if (std::uncaught_exceptions() > exceptions_) {
    abort("an error ends this rank");
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

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(int rank, int size, std::unique_ptr<Handle> handle, cudaStream_t stream,
                   const NcclOptions& options)
      : Communicator(rank, size, &handle->progress()),
        handle_(std::move(handle)),
        stream_(stream),
        options_(options) {
    options_.progress = &progress();  // a part's is the whole's
    gatefold::check(cudaMalloc(&scratch_, sizeof(float)), "cudaMalloc");
  }
  ~NcclCommunicator() override {
    handle_.reset();  // before the memory that its work may use
    cudaFree(scratch_);
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  std::string description() const override {
    int version = 0;
    check(ncclGetVersion(&version), "ncclGetVersion");
    return fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  }

  void exchange(std::span<const Transfer> sends, std::span<const Transfer> receives) override {
    const cudaStream_t stream = stream_;
    copy_own_pieces(rank(), sends, receives,
                    [stream](std::byte* out, const std::byte* in, std::int64_t bytes) {
                      gatefold::check(cudaMemcpyAsync(out, in, static_cast<std::size_t>(bytes),
                                                      cudaMemcpyDeviceToDevice, stream),
                                      "cudaMemcpyAsync");
                    });
    grouped([&] {
      for (const Transfer& t : receives) receive(t);
      for (const Transfer& t : sends) send(t);
    });
    handle_->finish(stream_, "an exchange with its peers");
  }

  void all_gather_v(std::byte* all, std::span<const std::int64_t> parts) override {
    std::int64_t own = 0;
    for (int r = 0; r < rank(); ++r) own += parts[static_cast<std::size_t>(r)];
    if (std::adjacent_find(parts.begin(), parts.end(), std::not_equal_to<>()) == parts.end()) {
      handle_->check_call(ncclAllGather(all + own, all, static_cast<std::size_t>(parts[0]),
                                        ncclUint8, handle_->get(), stream_),
                          "ncclAllGather");
    } else {
      grouped([&] { gather_uneven(all, parts, all + own); });
    }
    handle_->finish(stream_, "an all-gather");
  }

  void broadcast(std::byte* data, std::int64_t bytes, int root) override {
    handle_->check_call(ncclBroadcast(data, data, static_cast<std::size_t>(bytes), ncclUint8, root,
                                      handle_->get(), stream_),
                        "ncclBroadcast");
    handle_->finish(stream_, "a broadcast");
  }

  void barrier() override { reduce(static_cast<float*>(scratch_), 1, "a barrier"); }

  void all_reduce(float* data, std::int64_t count) override {
    reduce(data, count, "an all-reduce");
  }

  /// Rank and size are the communicator's own.
  static std::unique_ptr<Communicator> wrap(std::unique_ptr<Handle> handle, cudaStream_t stream,
                                            const NcclOptions& options) {
    int rank = 0;
    int size = 0;
    check(ncclCommUserRank(handle->get(), &rank), "ncclCommUserRank");
    check(ncclCommCount(handle->get(), &size), "ncclCommCount");
    return std::make_unique<NcclCommunicator>(rank, size, std::move(handle), stream, options);
  }

  std::unique_ptr<Communicator> split(int color) override {
    auto part = std::make_unique<Handle>(options_);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    handle_->check_call(ncclCommSplit(handle_->get(), color, rank(), part->out(), &config),
                        "ncclCommSplit");
    handle_->settle("a split of the ranks", options_.timeout_seconds);
    part->settle("a split of the ranks", options_.timeout_seconds);
    return wrap(std::move(part), stream_, options_);
  }

 private:
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
    std::int64_t offset = 0;
    for (int r = 0; r < size(); ++r) {
      receive({r, all + offset, parts[static_cast<std::size_t>(r)]});
      send({r, own, parts[static_cast<std::size_t>(rank())]});
      offset += parts[static_cast<std::size_t>(r)];
    }
  }

  /// A group that was begun is ended, whatever happens in it.
  template <typename Calls>
  void grouped(const Calls& calls) {
    handle_->get();
    check(ncclGroupStart(), "ncclGroupStart");
    try {
      calls();
    } catch (const Error& error) {
      ncclGroupEnd();
      handle_->abort(error.what());
      throw;
    }
    handle_->check_call(ncclGroupEnd(), "ncclGroupEnd");
  }

  void reduce(float* data, std::int64_t count, const char* what) {
    handle_->check_call(ncclAllReduce(data, data, static_cast<std::size_t>(count), ncclFloat32,
                                      ncclSum, handle_->get(), stream_),
                        "ncclAllReduce");
    handle_->finish(stream_, what);
  }

  std::unique_ptr<Handle> handle_;
  cudaStream_t stream_;
  NcclOptions options_;
  void* scratch_ = nullptr;
};

/// Where a rank's GPU is, as NCCL tells two apart.
struct Place {
  std::array<char, 256> host;
  std::array<char, 32> gpu;
};

Place own_place() {
  Place mine{};
  const char* id = std::getenv("NCCL_HOSTID");
  if (id != nullptr) {
    std::strncpy(mine.host.data(), id, mine.host.size() - 1);
  } else {
    gethostname(mine.host.data(), mine.host.size() - 1);
  }
  int device = 0;
  gatefold::check(cudaGetDevice(&device), "cudaGetDevice");
  gatefold::check(cudaDeviceGetPCIBusId(mine.gpu.data(), static_cast<int>(mine.gpu.size()), device),
                  "cudaDeviceGetPCIBusId");
  return mine;
}

/// NCCL refuses two ranks on one GPU, with words that don't help; and late. Collective.
void require_own_gpus(Communicator& over) {
  std::vector<Place> places(static_cast<std::size_t>(over.size()));
  run_agreed(over, [&] { places[static_cast<std::size_t>(over.rank())] = own_place(); });
  all_gather<Place>(over, places);
  for (std::size_t b = 1; b < places.size(); ++b) {
    for (std::size_t a = 0; a < b; ++a) {
      if (places[a].host != places[b].host || places[a].gpu != places[b].gpu) continue;
      throw AgreedError(
          ExitCode::kUnavailable,
          fmt::format("rank {} and rank {} share GPU {} of {} (NCCL wants one for each rank); "
                      "start fewer ranks there, or let MPI move the data",
                      a, b, places[b].gpu.data(), places[b].host.data()));
    }
  }
}

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& over, cudaStream_t stream,
                                                     const NcclOptions& options) {
  NcclOptions own = options;
  if (own.progress == nullptr) own.progress = &over.progress();
  auto handle = std::make_unique<Handle>(own);
  std::unique_ptr<Communicator> made;
  require_own_gpus(over);
  ncclUniqueId id{};
  run_agreed(over, [&] {
    if (over.rank() == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  });
  over.broadcast(reinterpret_cast<std::byte*>(&id), sizeof(id), 0);
  run_agreed(over, [&] {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    handle->check_call(ncclCommInitRankConfig(handle->out(), over.size(), id, over.rank(), &config),
                       "ncclCommInitRankConfig");
    // Half the time, so that those who give up meet the others before these do.
    handle->settle("the start of NCCL", own.timeout_seconds / 2);
    made = NcclCommunicator::wrap(std::move(handle), stream, own);
  });
  return made;
}

std::unique_ptr<Communicator> use_nccl_communicator(ncclComm_t comm, cudaStream_t stream,
                                                    const NcclOptions& options) {
  auto handle = std::make_unique<Handle>(options);
  handle->borrow(comm);
  return NcclCommunicator::wrap(std::move(handle), stream, options);
}

}  // namespace gatefold
