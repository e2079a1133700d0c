#include "parallel/grid.h"

#include <gmock/gmock.h>
#include <mpi.h>

#include <limits>
#include <string>
#include <vector>

#include "parallel/mpi_interop.h"
#include "tests/parallel/usage_error.h"

namespace gatefold {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::usage_error;

TEST(Grid, NeighboursShareATensorParallelGroup) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  for (int tp = 1; tp <= world->size(); ++tp) {
    if (world->size() % tp != 0) continue;
    const Grid grid(*world, tp);
    EXPECT_EQ(&grid.world(), world.get());
    EXPECT_EQ(grid.tp().size(), tp);
    EXPECT_EQ(grid.tp().rank(), world->rank() % tp);
    EXPECT_EQ(grid.dp_size(), world->size() / tp);
    EXPECT_EQ(grid.dp_index(), world->rank() / tp);

    std::vector<int> members(static_cast<std::size_t>(tp));
    members[static_cast<std::size_t>(grid.tp().rank())] = world->rank();
    all_gather<int>(grid.tp(), members);
    for (int r = 0; r < tp; ++r) {
      EXPECT_EQ(members[static_cast<std::size_t>(r)], world->rank() / tp * tp + r);
    }
  }
}

TEST(Grid, NeighboursShareExperts) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  for (int ep = 1; ep <= world->size(); ++ep) {
    if (world->size() % ep != 0) {
      usage_error([&] { const Grid grid(*world, 1, ep); });
      continue;
    }
    const Grid grid(*world, world->size(), ep);
    const int etp = world->size() / ep;
    EXPECT_EQ(grid.ep(), ep);
    EXPECT_EQ(grid.etp().size(), etp);
    EXPECT_EQ(grid.etp().rank(), world->rank() % etp);
    std::vector<int> members(static_cast<std::size_t>(etp));
    members[static_cast<std::size_t>(grid.etp().rank())] = world->rank();
    all_gather<int>(grid.etp(), members);
    EXPECT_EQ(members.front(), world->rank() / etp * etp);
  }
  EXPECT_EQ(Grid(*world, 1).ep(), 0);
}

TEST(Grid, RefusesATensorParallelSizeThatDoesntDivideTheWorldOnAllRanks) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  const std::int64_t size = world->size();
  for (const std::int64_t tp : {std::int64_t{0}, std::int64_t{-1}, -size, size + 1, 2 * size,
                                std::int64_t{1} << 40, std::numeric_limits<std::int64_t>::max()}) {
    const std::string text = usage_error([&] { const Grid grid(*world, tp); });
    EXPECT_THAT(text, HasSubstr("--tp " + std::to_string(tp)));
    EXPECT_THAT(text, HasSubstr(std::to_string(size) + " ranks"));
  }
  for (std::int64_t tp = 2; tp < size; ++tp) {
    if (size % tp != 0) usage_error([&] { const Grid grid(*world, tp); });
  }
  world->barrier();  // no rank is stuck in a split
}

TEST(SplitTokens, IsAsEvenAsCanBeAndContiguousWithoutCounts) {
  EXPECT_THAT(split_tokens(10, 4),
              ElementsAre(Range{0, 2}, Range{2, 5}, Range{5, 7}, Range{7, 10}));
  EXPECT_THAT(split_tokens(2, 4), ElementsAre(Range{0, 0}, Range{0, 1}, Range{1, 1}, Range{1, 2}));
  EXPECT_THAT(split_tokens(0, 2), ElementsAre(Range{0, 0}, Range{0, 0}));
}

TEST(SplitTokens, FollowsTheCountsEmptyGroupsIncluded) {
  EXPECT_THAT(split_tokens(8, 4, {5, 2, 1, 0}),
              ElementsAre(Range{0, 5}, Range{5, 7}, Range{7, 8}, Range{8, 8}));
  EXPECT_THAT(split_tokens(8, 4, {8, 0, 0, 0}),
              ElementsAre(Range{0, 8}, Range{8, 8}, Range{8, 8}, Range{8, 8}));
  EXPECT_THAT(split_tokens(0, 1, {0}), ElementsAre(Range{0, 0}));
}

TEST(SplitTokens, RefusesCountsThatDontFit) {
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  const std::vector<std::vector<std::int64_t>> wrong{
      {8}, {4, 4, 0}, {4, 5}, {3, 4}, {-1, 9}, {9, -1}, {huge, huge}, {huge, 9}, {-huge, huge}};
  for (const auto& split : wrong) {
    const std::string text = usage_error([&] { split_tokens(8, 2, split); });
    EXPECT_THAT(text, HasSubstr("--token-split"));
    EXPECT_THAT(text, HasSubstr("8 tokens in 2 dp groups"));
  }
  EXPECT_THAT(usage_error([] { split_tokens(8, 2, {3, 4}); }), HasSubstr("--token-split 3,4 "));
  // A sum that comes back to 8 after passing 2^64 is not 8.
  usage_error([huge] { split_tokens(8, 4, {huge, huge, 5, 5}); });
}

}  // namespace
}  // namespace gatefold
