#include <fmt/format.h>
#include <fmt/ranges.h>
#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
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

constexpr int kTag = 7;
/// Polls before a waiting rank first gives its core away: some tens of microseconds.
constexpr std::int64_t kSpins = 512;

class MpiCommunicator final : public Communicator {
 public:
  static constexpr std::int64_t kFloatBytes = 4;

  MpiCommunicator(MPI_Comm comm, int rank, int size, const MpiOptions& options)
      : Communicator(rank, size, options.progress != nullptr ? options.progress : &own_progress_),
        comm_(comm),
        timeout_(options.timeout_seconds),
        max_message_(options.max_message_bytes) {
    // An exchange of tree roots has a few messages from and to each peer.
    const std::size_t messages = 16 * static_cast<std::size_t>(size);
    requests_.reserve(messages);
    statuses_.reserve(messages);
    messages_.reserve(messages);
  }

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
    clear_requests();
    copy_own_pieces(rank(), sends, receives);
    for (const Transfer& t : receives) {
      for_each_message(t, [this](std::byte* data, int bytes, int peer) {
        messages_.push_back({peer, bytes});
        check(MPI_Irecv(data, bytes, MPI_BYTE, peer, kTag, comm_, &requests_.emplace_back()),
              "MPI_Irecv");
      });
    }
    receives_ = requests_.size();
    for (const Transfer& t : sends) {
      for_each_message(t, [this](const std::byte* data, int bytes, int peer) {
        messages_.push_back({peer, bytes});
        check(MPI_Isend(data, bytes, MPI_BYTE, peer, kTag, comm_, &requests_.emplace_back()),
              "MPI_Isend");
      });
    }
    wait("an exchange with its peers");
    check_sizes();
  }

  void all_gather_v(std::byte* all, std::span<const std::int64_t> parts) override {
    gather_sends_.clear();
    gather_receives_.clear();
    std::int64_t offset = 0;
    std::int64_t own = 0;
    for (int r = 0; r < size(); ++r) {
      const std::int64_t bytes = parts[static_cast<std::size_t>(r)];
      if (r == rank()) own = offset;
      if (r != rank()) gather_receives_.push_back({r, all + offset, bytes});
      offset += bytes;
    }
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      gather_sends_.push_back({r, all + own, parts[static_cast<std::size_t>(rank())]});
    }
    exchange(gather_sends_, gather_receives_);
  }

  void broadcast(std::byte* data, std::int64_t bytes, int root) override {
    clear_requests();
    for (std::int64_t at = 0; at < bytes; at += max_message_) {
      check(MPI_Ibcast(data + at, static_cast<int>(std::min(max_message_, bytes - at)), MPI_BYTE,
                       root, comm_, &requests_.emplace_back()),
            "MPI_Ibcast");
    }
    wait("a broadcast");
  }

  void barrier() override {
    clear_requests();
    check(MPI_Ibarrier(comm_, &requests_.emplace_back()), "MPI_Ibarrier");
    wait("a barrier");
  }

  void all_reduce(float* data, std::int64_t count) override {
    progress().tick();
    const std::int64_t most = max_message_ / kFloatBytes;
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
    return adopt(part);
  }

  std::unique_ptr<Communicator> split_by_host() override {
    MPI_Comm part = MPI_COMM_NULL;
    check(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank(), MPI_INFO_NULL, &part),
          "MPI_Comm_split_type");
    return adopt(part);
  }

 private:
  std::unique_ptr<Communicator> adopt(MPI_Comm part) {
    int part_rank = 0;
    int part_size = 0;
    check(MPI_Comm_rank(part, &part_rank), "MPI_Comm_rank");
    check(MPI_Comm_size(part, &part_size), "MPI_Comm_size");
    const MpiOptions options{timeout_, &progress(), max_message_};
    return std::make_unique<MpiCommunicator>(part, part_rank, part_size, options);
  }

  struct Message {
    int peer;
    int bytes;
  };

  void clear_requests() {
    requests_.clear();
    messages_.clear();
    receives_ = 0;
  }

  template <typename Start>
  void for_each_message(const Transfer& transfer, const Start& start) const {
    if (transfer.peer == rank()) return;
    for (std::int64_t at = 0; at < transfer.bytes; at += max_message_) {
      start(transfer.data + at, static_cast<int>(std::min(max_message_, transfer.bytes - at)),
            transfer.peer);
    }
  }

  /// Polls until all requests are done. Spins first, because most waits are short; then gives the
  /// core away; then sleeps, so that ranks that wait for a long step of another cost nothing.
  void wait(const char* what) {
    progress().tick();
    statuses_.resize(requests_.size());
    const auto start = Clock::now();
    int done = 0;
    for (std::int64_t polls = 0;; ++polls) {
      const int status = MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done,
                                     statuses_.data());
      if (status != MPI_SUCCESS) fail(status, what);
      if (done != 0) break;
      if (polls < kSpins) continue;
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

  /// A message longer than its receive is MPI's error, a shorter one is none.
  void check_sizes() const {
    for (std::size_t i = 0; i < receives_; ++i) {
      int bytes = 0;
      check(MPI_Get_count(&statuses_[i], MPI_BYTE, &bytes), "MPI_Get_count");
      if (bytes == messages_[i].bytes) continue;
      throw Error(ExitCode::kBackend,
                  fmt::format("a message from rank {} has {} bytes instead of {} during {} (the "
                              "ranks are out of step); this is a fault of the program",
                              world_rank(messages_[i].peer), bytes, messages_[i].bytes,
                              progress().phase()));
    }
  }

  int world_rank(int peer) const {
    MPI_Group own = MPI_GROUP_NULL;
    MPI_Group world = MPI_GROUP_NULL;
    check(MPI_Comm_group(comm_, &own), "MPI_Comm_group");
    check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
    int translated = peer;
    check(MPI_Group_translate_ranks(own, 1, &peer, world, &translated),
          "MPI_Group_translate_ranks");
    MPI_Group_free(&own);
    MPI_Group_free(&world);
    return translated;
  }

  /// " from rank 1, 2": the peers of messages that are still on their way.
  std::string missing_peers() {
    std::vector<int> peers;
    for (std::size_t i = 0; i < messages_.size(); ++i) {
      int done = 0;
      check(MPI_Request_get_status(requests_[i], &done, MPI_STATUS_IGNORE),
            "MPI_Request_get_status");
      if (done == 0) peers.push_back(world_rank(messages_[i].peer));
    }
    if (peers.empty()) return "";
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    return fmt::format(" from rank {}", fmt::join(peers, ", "));
  }

  /// So that a late message doesn't land in memory that the caller has given up.
  void cancel_receives() {
    for (std::size_t i = 0; i < receives_; ++i) {
      if (requests_[i] == MPI_REQUEST_NULL) continue;
      MPI_Cancel(&requests_[i]);
      MPI_Request_free(&requests_[i]);
    }
    receives_ = 0;
  }

  void fail(int status, const char* what) {
    cancel_receives();
    for (const MPI_Status& one : statuses_) {
      const bool failed = one.MPI_ERROR != MPI_SUCCESS && one.MPI_ERROR != MPI_ERR_PENDING;
      if (status == MPI_ERR_IN_STATUS && failed) check(one.MPI_ERROR, what);
    }
    check(status, what);
  }

  [[noreturn]] void give_up(const char* what) {
    const std::string missing = missing_peers();
    cancel_receives();
    throw Error(ExitCode::kTimeout,
                fmt::format("no answer{} for {} s in {} during {} (a peer is lost, stuck or slower "
                            "than the deadline); look at its output, or raise --timeout",
                            missing, timeout_, what, progress().phase()));
  }

  MPI_Comm comm_;
  double timeout_;
  std::int64_t max_message_;
  Progress own_progress_;
  std::vector<MPI_Request> requests_;
  std::vector<MPI_Status> statuses_;
  std::vector<Message> messages_;       // of an exchange, in the order of requests_
  std::vector<Transfer> gather_sends_;  // kept, so that steady calls allocate nothing
  std::vector<Transfer> gather_receives_;
  std::size_t receives_ = 0;  // of requests_, the first ones
};

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm comm, const MpiOptions& options) {
  const std::int64_t piece = options.max_message_bytes;
  if (piece < MpiCommunicator::kFloatBytes || piece > std::numeric_limits<int>::max()) {
    throw Error(ExitCode::kUsage,
                fmt::format("max_message_bytes {} (MPI counts are ints, and a piece holds at least "
                            "one float); use 4 to 2147483647",
                            piece));
  }
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
