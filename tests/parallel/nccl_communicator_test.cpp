// NCCL as what carries a group's messages, and what only NCCL's communicator does. The suite knows
// host memory, so what it gives is carried to the GPU and back.
#include <gmock/gmock.h>
#include <mpi.h>

#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "parallel/mpi_interop.h"
#include "parallel/nccl_interop.h"
#include "runtime/error.h"
#include "tests/fake_gpu/nccl/nccl_testing.h"
#include "tests/parallel/backends.h"

namespace gatefold {
namespace {

using ::testing::HasSubstr;
using Bytes = fake_nccl_testing::OnDevice<std::byte>;

/// A piece of host memory for the length of a call.
class Piece {
 public:
  Piece(void* host, std::int64_t bytes)
      : host_(static_cast<std::byte*>(host)),
        bytes_(static_cast<std::size_t>(bytes)),
        device_(std::vector<std::byte>(host_, host_ + bytes_)) {}
  std::byte* data() const { return device_.data(); }
  /// What is on its way on the communicator's stream must have come.
  void fetch() const {
    const std::vector<std::byte> values = device_.get();
    std::copy(values.begin(), values.end(), host_);
  }

 private:
  std::byte* host_;
  std::size_t bytes_;
  Bytes device_;
};

/// What a rank's NCCL communicator needs, in the order in which it must go.
struct Rank {
  explicit Rank(const NcclOptions& options = {}) : over(make_mpi_communicator(MPI_COMM_WORLD)) {
    fake_nccl_testing::take_gpu(over->rank(), over->size());
    comm = make_nccl_communicator(*over, stream, options);
  }
  std::unique_ptr<Communicator> over;
  fake_nccl_testing::Stream stream;
  std::unique_ptr<Communicator> comm;
};

class Staged final : public Communicator {
 public:
  explicit Staged(std::unique_ptr<Rank> rank) : Staged(std::move(rank->comm)) {
    rank_ = std::move(rank);
  }
  explicit Staged(std::unique_ptr<Communicator> comm)
      : Communicator(comm->rank(), comm->size(), &comm->progress()), comm_(std::move(comm)) {}
  ~Staged() override { comm_.reset(); }
  Staged(const Staged&) = delete;
  Staged& operator=(const Staged&) = delete;

  std::string description() const override { return comm_->description(); }
  void exchange(std::span<const Transfer> sends, std::span<const Transfer> receives) override {
    std::vector<std::unique_ptr<Piece>> out;
    std::vector<std::unique_ptr<Piece>> in;
    const std::vector<Transfer> device_sends = carry(sends, out);
    const std::vector<Transfer> device_receives = carry(receives, in);
    comm_->exchange(device_sends, device_receives);
    comm_->wait();
    for (const auto& piece : in) piece->fetch();
  }
  void all_gather_v(std::byte* all, std::span<const std::int64_t> parts) override {
    const Piece piece(all, std::accumulate(parts.begin(), parts.end(), std::int64_t{0}));
    comm_->all_gather_v(piece.data(), parts);
    comm_->wait();
    piece.fetch();
  }
  void broadcast(std::byte* data, std::int64_t bytes, int root) override {
    const Piece piece(data, bytes);
    comm_->broadcast(piece.data(), bytes, root);
    comm_->wait();
    piece.fetch();
  }
  void barrier() override { comm_->barrier(); }
  void all_reduce(float* data, std::int64_t count) override {
    const Piece piece(data, count * 4);
    comm_->all_reduce(reinterpret_cast<float*>(piece.data()), count);
    comm_->wait();
    piece.fetch();
  }
  void reduce_scatter_v(float* data, std::span<const std::int64_t> counts) override {
    const Piece piece(data, 4 * std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
    comm_->reduce_scatter_v(reinterpret_cast<float*>(piece.data()), counts);
    comm_->wait();
    piece.fetch();
  }
  Communicator& host() override { return comm_->host(); }
  std::unique_ptr<Communicator> split(int color) override {
    return std::make_unique<Staged>(comm_->split(color));
  }

 private:
  static std::vector<Transfer> carry(std::span<const Transfer> transfers,
                                     std::vector<std::unique_ptr<Piece>>& pieces) {
    std::vector<Transfer> carried;
    for (const Transfer& t : transfers) {
      pieces.push_back(std::make_unique<Piece>(t.data, t.bytes));
      carried.push_back({t.peer, pieces.back()->data(), t.bytes});
    }
    return carried;
  }

  std::unique_ptr<Rank> rank_;  // goes last
  std::unique_ptr<Communicator> comm_;
};

NcclOptions soon() {
  NcclOptions options;
  options.timeout_seconds = fake_nccl_testing::on_stand_in() ? 1 : 10;  // NCCL's start gets half
  return options;
}

template <typename Call>
void expect_error(ExitCode code, const std::vector<std::string>& words, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const std::string& word : words) EXPECT_THAT(error.what(), HasSubstr(word));
  }
}

}  // namespace

std::vector<Backend> backends() {
  const auto whole = [] { return std::make_unique<Staged>(std::make_unique<Rank>()); };
  return {{"nccl", whole}, {"half_of_nccl", whole, true}};
}

namespace {

TEST(NcclCommunicator, SaysItsVersion) {
  EXPECT_THAT(Rank().comm->description(), ::testing::MatchesRegex("NCCL 2\\.[0-9]+\\.[0-9]+"));
}

TEST(NcclCommunicator, LeavesTheCallersCommunicatorToTheCaller) {
  Rank rank;
  ncclUniqueId id{};
  if (rank.over->rank() == 0) ncclGetUniqueId(&id);
  rank.over->broadcast(reinterpret_cast<std::byte*>(&id), sizeof(id), 0);
  ncclComm_t callers = nullptr;
  fake_nccl_testing::start(&callers, rank.over->size(), id, rank.over->rank(), 0);
  EXPECT_EQ(fake_nccl_testing::settle(callers), ncclSuccess);
  {
    const auto comm = use_nccl_communicator(callers, *rank.over, rank.stream);
    EXPECT_EQ(comm->rank(), rank.over->rank());
    EXPECT_EQ(comm->size(), rank.over->size());
    comm->barrier();
  }
  use_nccl_communicator(callers, *rank.over, rank.stream)->barrier();
  EXPECT_EQ(ncclCommAbort(callers), ncclSuccess);
}

TEST(NcclCommunicator, RefusesACallersCommunicatorOfOtherRanks) {
  Rank rank;
  if (rank.over->size() < 2) return;
  ncclUniqueId id{};
  ncclGetUniqueId(&id);
  ncclComm_t alone = nullptr;
  fake_nccl_testing::start(&alone, 1, id, 0, 0);
  EXPECT_EQ(fake_nccl_testing::settle(alone), ncclSuccess);
  expect_error(ExitCode::kUsage, {"rank 0 of 1 is rank 0 of"},
               [&] { use_nccl_communicator(alone, *rank.over, rank.stream); });
  EXPECT_EQ(ncclCommAbort(alone), ncclSuccess);
}

TEST(NcclCommunicator, HostValuesGoByTheCommunicatorItWasMadeOver) {
  Rank rank;
  EXPECT_EQ(&rank.comm->host(), rank.over.get());
  const auto part = rank.comm->split(rank.over->rank() % 2);
  EXPECT_EQ(part->host().size(), part->size());
  std::vector<int> ranks(static_cast<std::size_t>(part->size()));
  ranks[static_cast<std::size_t>(part->rank())] = rank.over->rank();
  all_gather<int>(*part, ranks);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    EXPECT_EQ(ranks[i], 2 * static_cast<int>(i) + rank.over->rank() % 2);
  }
}

TEST(NcclCommunicator, CallsReturnBeforeTheirWorkIsDone) {
  if (!fake_nccl_testing::on_stand_in()) GTEST_SKIP() << "a GPU may be faster than the question";
  Rank rank;
  Bytes memory(std::vector<std::byte>(100 * static_cast<std::size_t>(rank.over->size())));
  const std::vector<std::int64_t> parts(static_cast<std::size_t>(rank.over->size()), 100);
  rank.comm->all_gather_v(memory.data(), parts);
  EXPECT_EQ(cudaStreamQuery(rank.stream), cudaErrorNotReady);
  cudaGetLastError();
  rank.comm->wait();
  EXPECT_EQ(cudaStreamQuery(rank.stream), cudaSuccess);
}

TEST(NcclCommunicator, APeerThatDoesntAnswerIsError75AndTheCommunicatorIsGone) {
  Rank rank(soon());
  rank.over->progress().enter("the test's own phase");
  if (rank.over->size() < 2) return;
  const Bytes memory(std::vector<std::byte>(100));
  if (rank.over->rank() == 0) {
    const Transfer receive{1, memory.data(), 100};
    const auto start = std::chrono::steady_clock::now();
    expect_error(ExitCode::kTimeout, {"exchange", "the test's own phase", " s in ", "--timeout"},
                 [&] {
                   rank.comm->exchange({}, {&receive, 1});
                   rank.comm->wait();
                 });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(12));
    expect_error(ExitCode::kBackend, {"given up"}, [&] { rank.comm->barrier(); });
    rank.comm.reset();  // memory's end would wait for a receive that nobody gave up
  }
  MPI_Barrier(MPI_COMM_WORLD);
  // Its abort is a loss to the others, which end in order or by an abort of their own.
}

TEST(NcclCommunicator, AnErrorThatUnwindsAbortsAndNobodyWaits) {
  const auto start = std::chrono::steady_clock::now();
  try {
    const Rank rank;
    throw Error(ExitCode::kData, "the test's own");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(NcclCommunicator, TwoRanksOnOneGpuAreNamedBeforeNcclStarts) {
  const auto over = make_mpi_communicator(MPI_COMM_WORLD);
  if (over->size() < 2) return;
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  unsetenv("NCCL_HOSTID");
  const fake_nccl_testing::Stream stream;
  expect_error(ExitCode::kUnavailable, {"rank 0 and rank 1 share GPU", "MPI"},
               [&] { make_nccl_communicator(*over, stream); });
}

TEST(NcclCommunicator, HostMemoryIsError70) {
  if (!fake_nccl_testing::on_stand_in()) GTEST_SKIP() << "NCCL itself doesn't look";
  Rank rank(soon());
  if (rank.over->size() < 2) return;
  std::vector<std::byte> host(10);
  const int peer = rank.over->rank() ^ 1;
  const Transfer piece{peer < rank.over->size() ? peer : 0, host.data(), 10};
  expect_error(ExitCode::kBackend, {"ncclRecv"}, [&] {
    rank.comm->exchange({&piece, 1}, {&piece, 1});
    rank.comm->wait();
  });
}

TEST(NcclCommunicator, SizesThatDifferAreError70WithTheRanksNamed) {
  if (!fake_nccl_testing::on_stand_in()) GTEST_SKIP() << "NCCL itself hangs";
  Rank rank(soon());
  const int me = rank.over->rank();
  if (rank.over->size() < 2) return;
  const Bytes memory(std::vector<std::byte>(10));
  const Transfer send{1, memory.data(), 10};
  const Transfer receive{0, memory.data(), 9};
  if (me == 0) {
    expect_error(ExitCode::kBackend, {}, [&] {
      rank.comm->exchange({&send, 1}, {});
      rank.comm->wait();
    });
  } else if (me == 1) {
    expect_error(ExitCode::kBackend, {"rank 1", "rank 0", "9 bytes", "10 bytes"}, [&] {
      rank.comm->exchange({}, {&receive, 1});
      rank.comm->wait();
    });
  }
  if (me < 2) rank.comm.reset();  // before the memory, as above
  MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace
}  // namespace gatefold
