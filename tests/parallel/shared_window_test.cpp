// Memory that ranks share: who sees whose segment, what a fence promises, and what happens when a
// rank doesn't come.
#include "parallel/shared_window.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <mpi.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parallel/agreement.h"
#include "parallel/mpi_interop.h"
#include "tests/parallel/usage_error.h"

namespace gatefold {
namespace {

using ::testing::HasSubstr;
using testing::usage_error;

/// Ranks 0, 2, 4 … on one node, the others on another: their numbers interleave.
MpiOptions two_nodes(int rank) {
  MpiOptions options;
  options.node = rank % 2;
  return options;
}

int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

std::uint64_t& number_at(std::byte* segment, std::int64_t i) {
  return reinterpret_cast<std::uint64_t*>(segment)[i];
}

TEST(SharedWindowTest, RanksOfANodeReadWhatOthersWroteBeforeAFence) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  const auto window = world->share(1000);
  if (world->size() == 1) {
    EXPECT_EQ(window, nullptr);
    return;
  }
  ASSERT_NE(window, nullptr);  // on all ranks or none
  EXPECT_GE(window->bytes(), 1000);
  EXPECT_EQ(window->own(), world->rank());
  std::uint64_t wrong = 0;
  for (std::uint64_t round = 1; round <= 2000; ++round) {
    const auto own = static_cast<std::uint64_t>(world->rank());
    for (std::int64_t i : {0, 124})
      number_at(window->segment(world->rank()), i) = round * 100 + own;
    window->fence("a test");
    for (int peer = 0; peer < world->size(); ++peer) {
      for (std::int64_t i : {0, 124}) {
        const auto expected = round * 100 + static_cast<std::uint64_t>(peer);
        wrong += number_at(window->segment(peer), i) == expected ? 0U : 1U;
      }
    }
    window->fence("a test");  // before anyone overwrites it
  }
  EXPECT_EQ(wrong, 0U);
}

TEST(SharedWindowTest, SegmentsAreZeroAlignedAndBehindEachOther) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  for (const std::int64_t bytes : {0, 1, 4096, 4097, 300000}) {
    const auto window = world->share(bytes);
    if (window == nullptr) continue;
    EXPECT_GE(window->bytes(), bytes);
    for (int r = 0; r < world->size(); ++r) {
      EXPECT_EQ(window->segment(r), window->segment(0) + r * window->bytes());
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(window->segment(r)) % 256, 0U);
    }
    const std::vector<std::byte> zeros(static_cast<std::size_t>(window->bytes()));
    EXPECT_EQ(std::memcmp(window->segment(world->rank()), zeros.data(), zeros.size()), 0);
    window->fence("a test");
  }
}

TEST(SharedWindowTest, RanksOfOtherNodesHaveNoSegmentAndAreNotWaitedFor) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD, two_nodes(world_rank()));
  const auto window = world->share(64);
  if (world->size() < 3) {  // one rank a node
    EXPECT_EQ(window, nullptr);
    return;
  }
  ASSERT_NE(window, nullptr);
  std::vector<int> own_node;
  for (int r = world->rank() % 2; r < world->size(); r += 2) own_node.push_back(r);
  EXPECT_TRUE(std::ranges::equal(window->ranks(), own_node));
  std::byte* next = window->segment(own_node.front());
  for (int r = 0; r < world->size(); ++r) {
    const bool here = r % 2 == world->rank() % 2;
    EXPECT_EQ(window->segment(r), here ? next : nullptr) << "rank " << r;
    if (here) next += window->bytes();
  }
  // Node 0 passes its fences while node 1 has none.
  if (world->rank() % 2 == 0) {
    for (int i = 0; i < 10; ++i) window->fence("a test");
  }
  world->barrier();
  EXPECT_EQ(world->sharing(), "shared memory within a node, messages between nodes");
}

TEST(SharedWindowTest, GroupsSplitFromAGroupShareAsItDoes) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD, two_nodes(world_rank()));
  const auto half = world->split(world->rank() % 4 < 2 ? 0 : 1);
  const auto window = half->share(64);
  // Of ranks 0 … 7 the halves are 0 1 4 5 and 2 3 6 7.
  EXPECT_EQ(window != nullptr, half->size() >= 3) << half->size();
  if (window != nullptr) window->fence("a test");
}

TEST(SharedWindowTest, MessagesAloneShareNothing) {
  MpiOptions options;
  options.within_node = WithinNode::kMessages;
  const auto world = make_mpi_communicator(MPI_COMM_WORLD, options);
  EXPECT_EQ(world->share(64), nullptr);
  EXPECT_EQ(world->split(0)->share(64), nullptr);
  EXPECT_EQ(world->sharing(), world->size() == 1 ? "" : "messages alone");
}

TEST(SharedWindowTest, WhereThereIsNoRoomMessagesHaveToDoOnAllRanks) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  EXPECT_EQ(world->share(std::int64_t{1} << 50), nullptr);
  if (world->size() == 1) return;
  EXPECT_THAT(world->sharing(), HasSubstr("messages within a node: "));
  EXPECT_THAT(world->sharing(), HasSubstr(" bytes free"));
  EXPECT_NE(world->share(64), nullptr) << world->sharing();  // less still fits
}

/// While it lives, this process can open no file.
class NoMoreFiles {
 public:
  NoMoreFiles() {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit none{0, before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoMoreFiles() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  NoMoreFiles(const NoMoreFiles&) = delete;
  NoMoreFiles& operator=(const NoMoreFiles&) = delete;

 private:
  rlimit before_{};
};

TEST(SharedWindowTest, WhereOneRankFailsToMakeOrMapItMessagesHaveToDoOnAllRanks) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  if (world->size() == 1) return;
  // UBSan looks at a type that it hasn't met before through a pipe: let it meet those of messages.
  EXPECT_EQ(fmt::format("{} {}", std::string("why"), std::int64_t{64}), "why 64");
  for (int fails = 0; fails < world->size(); ++fails) {
    {
      std::optional<NoMoreFiles> none;
      if (world->rank() == fails) none.emplace();
      EXPECT_EQ(world->share(64), nullptr) << fails;
    }
    EXPECT_THAT(world->sharing(), HasSubstr(fails == 0 ? "can't be made" : "can't be mapped"));
    EXPECT_THAT(world->sharing(), HasSubstr("Too many open files"));
    EXPECT_NE(world->share(64), nullptr) << fails << world->sharing();
  }
}

TEST(SharedWindowTest, FewerThanNoBytesAreRefusedOnAllRanks) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  if (world->size() == 1) return;
  usage_error([&] { world->share(-1); });
  usage_error(
      [&] { world->share(world->rank() == 0 ? 64 : std::numeric_limits<std::int64_t>::min()); });
  EXPECT_NE(world->share(64), nullptr);
  EXPECT_EQ(world->share(std::numeric_limits<std::int64_t>::max()), nullptr);
}

TEST(SharedWindowTest, WindowsGoWhenTheyAreDoneWithInWhateverOrder) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  std::vector<std::unique_ptr<SharedWindow>> kept;
  for (int i = 0; i < 12; ++i) {
    auto window = world->share(1 << 20);
    if (window == nullptr) return;
    number_at(window->segment(world->rank()), 0) = 1;
    kept.push_back(std::move(window));
    // Another one on each rank.
    kept.erase(kept.begin() + world->rank() % static_cast<int>(kept.size()));
    for (const auto& one : kept) EXPECT_EQ(number_at(one->segment(world->rank()), 0), 1U);
  }
}

TEST(SharedWindowTest, ARankThatDoesntComeIsNamedWithinTheDeadline) {
  MpiOptions options;
  options.timeout_seconds = 0.5;
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  const auto impatient = make_mpi_communicator(MPI_COMM_WORLD, options);
  const auto window = impatient->share(64);
  if (window == nullptr) return;
  impatient->progress().enter("a test's phase");
  const int absent = world->size() - 1;
  window->fence("the first");
  std::string said;
  if (world->rank() != absent) {
    try {
      window->fence("the second");
    } catch (const NoAnswerError& error) {
      said = error.what();
    }
    EXPECT_THAT(said, HasSubstr("no answer from rank " + std::to_string(absent) +
                                " for 0.5 s in the second during a test's phase"));
  }
  world->barrier();  // and the end waits for nobody, though a rank never came
}

}  // namespace
}  // namespace gatefold
