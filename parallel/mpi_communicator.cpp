#include <fmt/format.h>
#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "parallel/mpi_check.h"
#include "parallel/mpi_interop.h"
#include "parallel/mpi_windows.h"
#include "parallel/versions.h"
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

  MpiCommunicator(MPI_Comm comm, int rank, int size, const MpiOptions& options,
                  std::shared_ptr<SharingLog> log)
      : Communicator(rank, size, options.progress != nullptr ? options.progress : &own_progress_),
        comm_(comm),
        options_(options),
        timeout_(options.timeout_seconds),
        max_message_(options.max_message_bytes),
        log_(std::move(log)),
        windows_({comm, rank, size, options.timeout_seconds, &progress(), options.node}, *log_) {
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

  int world_rank(int peer) const override {
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
  std::string description() const override { return mpi_version(); }

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

  void reduce_scatter_v(float* data, std::span<const std::int64_t> counts) override {
    progress().tick();
    const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    if (total * kFloatBytes > max_message_) {
      reduce_to_owners(data, counts);
    } else {
      scatter_counts_.assign(counts.begin(), counts.end());
      check(
          MPI_Reduce_scatter(MPI_IN_PLACE, data, scatter_counts_.data(), MPI_FLOAT, MPI_SUM, comm_),
          "MPI_Reduce_scatter");
      // MPI puts the own part to the front.
      const std::int64_t bytes = counts[static_cast<std::size_t>(rank())] * kFloatBytes;
      if (bytes > 0) std::memmove(data + before_own(counts), data, static_cast<std::size_t>(bytes));
    }
    progress().tick();
  }

  std::unique_ptr<Communicator> split(int color) override {
    MPI_Comm part = MPI_COMM_NULL;
    check(MPI_Comm_split(comm_, color, rank(), &part), "MPI_Comm_split");
    return adopt(part);
  }

  std::unique_ptr<Communicator> split_by_host() override {
    MPI_Comm host = MPI_COMM_NULL;
    check(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank(), MPI_INFO_NULL, &host),
          "MPI_Comm_split_type");
    MPI_Comm part = MPI_COMM_NULL;
    check(MPI_Comm_split(host, options_.node, rank(), &part), "MPI_Comm_split");
    MPI_Comm_free(&host);
    return adopt(part);
  }

  std::unique_ptr<SharedWindow> share(std::int64_t bytes) override {
    if (size() == 1 || options_.within_node == WithinNode::kMessages) return nullptr;
    return windows_.share(bytes);
  }
  std::string sharing() const override {
    if (size() == 1) return "";
    if (options_.within_node == WithinNode::kMessages) return "messages alone";
    if (!log_->refused.empty()) return "messages within a node: " + log_->refused;
    if (!log_->shared) return "";
    return log_->several_nodes ? "shared memory within a node, messages between nodes"
                               : "shared memory within a node";
  }

 private:
  /// A reduce-scatter of more than one call can count.
  void reduce_to_owners(float* data, std::span<const std::int64_t> counts) {
    const std::int64_t most = max_message_ / kFloatBytes;
    for (int r = 0; r < size(); ++r) {
      const std::int64_t count = counts[static_cast<std::size_t>(r)];
      for (std::int64_t at = 0; at < count; at += most) {
        const bool mine = r == rank();
        check(
            MPI_Reduce(mine ? MPI_IN_PLACE : data + at, mine ? data + at : nullptr,
                       static_cast<int>(std::min(most, count - at)), MPI_FLOAT, MPI_SUM, r, comm_),
            "MPI_Reduce");
      }
      data += count;
    }
  }

  std::unique_ptr<Communicator> adopt(MPI_Comm part) {
    int part_rank = 0;
    int part_size = 0;
    check(MPI_Comm_rank(part, &part_rank), "MPI_Comm_rank");
    check(MPI_Comm_size(part, &part_size), "MPI_Comm_size");
    MpiOptions options = options_;
    options.progress = &progress();
    return std::make_unique<MpiCommunicator>(part, part_rank, part_size, options, log_);
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

  /// In the world's numbers, the peers of messages that are still on their way.
  std::vector<int> missing_peers() {
    std::vector<int> peers;
    for (std::size_t i = 0; i < messages_.size(); ++i) {
      int done = 0;
      check(MPI_Request_get_status(requests_[i], &done, MPI_STATUS_IGNORE),
            "MPI_Request_get_status");
      if (done == 0) peers.push_back(world_rank(messages_[i].peer));
    }
    return peers;
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
    std::vector<int> missing = missing_peers();
    cancel_receives();
    throw NoAnswerError(std::move(missing), timeout_, what, progress());
  }

  MPI_Comm comm_;
  MpiOptions options_;
  double timeout_;
  std::int64_t max_message_;
  Progress own_progress_;
  std::shared_ptr<SharingLog> log_;
  MpiWindows windows_;
  std::vector<MPI_Request> requests_;
  std::vector<MPI_Status> statuses_;
  std::vector<Message> messages_;       // of an exchange, in the order of requests_
  std::vector<Transfer> gather_sends_;  // kept, so that steady calls allocate nothing
  std::vector<Transfer> gather_receives_;
  std::vector<int> scatter_counts_;
  std::size_t receives_ = 0;  // of requests_, the first ones
};

}  // namespace

std::string mpi_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  check(MPI_Get_library_version(text, &length), "MPI_Get_library_version");
  std::string name(text, static_cast<std::size_t>(length));
  name = name.substr(0, name.find(','));  // "Open MPI v4.1.4, package: …"
  return name.substr(0, name.find('\n'));
}

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
  return std::make_unique<MpiCommunicator>(own, rank, size, options,
                                           std::make_shared<SharingLog>());
}

}  // namespace gatefold
