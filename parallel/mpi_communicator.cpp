#include <fmt/format.h>
#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "parallel/mpi_check.h"
#include "parallel/mpi_interop.h"
#include "runtime/error.h"
#include "runtime/range.h"

namespace gatefold {

void check(int status, const char* call) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "unknown error";
  int length = 0;
  MPI_Error_string(status, text, &length);
  throw Error(ExitCode::kBackend,
              fmt::format("{} failed ({}); see MPI's own output above", call, text));
}

namespace {

using Clock = std::chrono::steady_clock;

/// MPI counts are ints; larger messages go in pieces of this many bytes.
constexpr std::int64_t kMaxMessage = std::int64_t{1} << 30;
constexpr int kTag = 7;

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm comm, int rank, int size, const MpiOptions& options)
      : Communicator(rank, size, options.progress != nullptr ? options.progress : &own_progress_),
        comm_(comm),
        timeout_(options.timeout_seconds) {}

  ~MpiCommunicator() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0) MPI_Comm_free(&comm_);
  }
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;

  std::string description() const override {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    check(MPI_Get_library_version(text, &length), "MPI_Get_library_version");
    std::string name(text, static_cast<std::size_t>(length));
    name = name.substr(0, name.find(','));  // "Open MPI v4.1.4, package: …"
    return name.substr(0, name.find('\n'));
  }

  void exchange(std::span<const Transfer> sends, std::span<const Transfer> receives) override {
    requests_.clear();
    copy_own(sends, receives);
    for (const Transfer& t : receives) {
      for_each_message(t, [this](std::byte* data, int bytes, int peer) {
        check(MPI_Irecv(data, bytes, MPI_BYTE, peer, kTag, comm_, &requests_.emplace_back()),
              "MPI_Irecv");
      });
    }
    for (const Transfer& t : sends) {
      for_each_message(t, [this](const std::byte* data, int bytes, int peer) {
        check(MPI_Isend(data, bytes, MPI_BYTE, peer, kTag, comm_, &requests_.emplace_back()),
              "MPI_Isend");
      });
    }
    wait("exchange with its peers");
  }

  void all_gather_v(std::byte* all, std::span<const std::int64_t> parts) override {
    std::vector<Transfer> sends;
    std::vector<Transfer> receives;
    std::int64_t offset = 0;
    std::int64_t own = 0;
    for (int r = 0; r < size(); ++r) {
      const std::int64_t bytes = parts[static_cast<std::size_t>(r)];
      if (r == rank()) own = offset;
      if (r != rank()) receives.push_back({r, all + offset, bytes});
      offset += bytes;
    }
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) sends.push_back({r, all + own, parts[static_cast<std::size_t>(rank())]});
    }
    exchange(sends, receives);
  }

  void broadcast(std::byte* data, std::int64_t bytes, int root) override {
    requests_.clear();
    for (std::int64_t at = 0; at < bytes; at += kMaxMessage) {
      check(MPI_Ibcast(data + at, static_cast<int>(std::min(kMaxMessage, bytes - at)), MPI_BYTE,
                       root, comm_, &requests_.emplace_back()),
            "MPI_Ibcast");
    }
    wait("a broadcast");
  }

  void barrier() override {
    requests_.clear();
    check(MPI_Ibarrier(comm_, &requests_.emplace_back()), "MPI_Ibarrier");
    wait("a barrier");
  }

  void all_reduce(float* data, std::int64_t count) override {
    progress().tick();
    const std::int64_t most = kMaxMessage / size_of_float;
    for (std::int64_t at = 0; at < count; at += most) {
      check(MPI_Allreduce(MPI_IN_PLACE, data + at, static_cast<int>(std::min(most, count - at)),
                          MPI_FLOAT, MPI_SUM, comm_),
            "MPI_Allreduce");
    }
    progress().tick();
  }

  std::unique_ptr<Communicator> split(int color) override {
    MPI_Comm part = MPI_COMM_NULL;
    check(MPI_Comm_split(comm_, color, rank(), &part), "MPI_Comm_split");
    int part_rank = 0;
    int part_size = 0;
    check(MPI_Comm_rank(part, &part_rank), "MPI_Comm_rank");
    check(MPI_Comm_size(part, &part_size), "MPI_Comm_size");
    const MpiOptions options{timeout_, &progress()};
    return std::make_unique<MpiCommunicator>(part, part_rank, part_size, options);
  }

 private:
  static constexpr std::int64_t size_of_float = 4;

  void copy_own(std::span<const Transfer> sends, std::span<const Transfer> receives) const {
    auto receive = receives.begin();
    for (const Transfer& send : sends) {
      if (send.peer != rank()) continue;
      receive = std::find_if(receive, receives.end(),
                             [this](const Transfer& t) { return t.peer == rank(); });
      std::memcpy(receive->data, send.data, static_cast<std::size_t>(send.bytes));
      ++receive;
    }
  }

  template <typename Start>
  void for_each_message(const Transfer& transfer, const Start& start) const {
    if (transfer.peer == rank()) return;
    for (std::int64_t at = 0; at < transfer.bytes; at += kMaxMessage) {
      start(transfer.data + at, static_cast<int>(std::min(kMaxMessage, transfer.bytes - at)),
            transfer.peer);
    }
  }

  /// Polls until all requests are done. Spins first, because most waits are short; then gives the
  /// core away; then sleeps, so that ranks that wait for a long step of another cost nothing.
  void wait(const char* what) {
    progress().tick();
    const auto start = Clock::now();
    int done = 0;
    for (std::int64_t polls = 0;; ++polls) {
      check(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done,
                        MPI_STATUSES_IGNORE),
            "MPI_Testall");
      if (done != 0) break;
      if (polls < 64) continue;
      const std::chrono::duration<double> waited = Clock::now() - start;
      if (waited.count() > timeout_) give_up(what);
      if (waited.count() < 0.02) {
        sched_yield();
      } else {
        usleep(200);
      }
    }
    progress().tick();
  }

  [[noreturn]] void give_up(const char* what) const {
    throw Error(ExitCode::kTimeout,
                fmt::format("no answer for {} s in {} during {} (a peer is lost, stuck or slower "
                            "than the deadline); look at its output, or raise --timeout",
                            timeout_, what, progress().phase()));
  }

  MPI_Comm comm_;
  double timeout_;
  Progress own_progress_;
  std::vector<MPI_Request> requests_;
};

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm comm, const MpiOptions& options) {
  MPI_Comm own = MPI_COMM_NULL;
  check(MPI_Comm_dup(comm, &own), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  int rank = 0;
  int size = 0;
  check(MPI_Comm_rank(own, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(own, &size), "MPI_Comm_size");
  return std::make_unique<MpiCommunicator>(own, rank, size, options);
}

}  // namespace gatefold
