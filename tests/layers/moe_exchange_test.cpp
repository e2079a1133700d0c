// Rows and sums of a mixture of experts on their way, whatever ranks share and wherever they are:
// the same bits, and no row goes twice where once will do.
#include <gtest/gtest.h>
#include <mpi.h>

#include <memory>
#include <string>
#include <vector>

#include "one_device.h"
#include "parallel/grid.h"
#include "parallel/shared_window.h"
#include "tests/faults/hooked_communicator.h"

namespace gatefold::testing {
namespace {

using MoeExchange = MoeTest;

/// Every rank's node, and whether those of a node share memory.
struct Neighbourhood {
  std::string name;
  int (*node)(int rank, int ranks);
  WithinNode within = WithinNode::kSharedMemory;
};

TEST_F(MoeExchange, ByMessagesAloneAndBetweenNodesGivesTheBitsOfOneDevice) {
  if (on_cuda()) GTEST_SKIP() << "what a GPU has in its memory goes by messages";
  const std::vector<Neighbourhood> neighbourhoods = {
      {"messages alone", [](int, int) { return 0; }, WithinNode::kMessages},
      {"two nodes in turn", [](int rank, int) { return rank % 2; }},
      {"one rank and the others", [](int rank, int) { return rank == 0 ? 0 : 1; }},
      {"three nodes", [](int rank, int ranks) { return rank * 3 / ranks; }},
      {"messages between three nodes", [](int rank, int ranks) { return rank * 3 / ranks; },
       WithinNode::kMessages}};
  const MemoryMoe moe({.hidden = 200, .intermediate = 24, .experts = 7, .top_k = 3, .shared = 1});
  OneDevice one(moe);
  for (const Neighbourhood& ranks : neighbourhoods) {
    SCOPED_TRACE(ranks.name);
    MpiOptions options;
    options.within_node = ranks.within;
    options.node = ranks.node(world_->rank(), world_->size());
    const auto world = make_mpi_communicator(MPI_COMM_WORLD, options);
    for_every_grid_of(*world, [&](const Grid& grid) {
      const bool odd = (grid.tp().size() + grid.ep()) % 2 == 1;
      compare_with_one_device(
          one, grid,
          options_for(DType::kBf16, odd ? Dispatcher::kAllGather : Dispatcher::kAllToAll),
          {0, 1, 33, 3});
    });
  }
}

TEST_F(MoeExchange, ARowGoesOnceToAnotherNodeHoweverManyOfItsRanksNeedIt) {
  if (world_->size() != 4 || on_cuda()) return;
  const MemoryMoe moe({.hidden = 64, .intermediate = 24, .experts = 8, .top_k = 4});
  const auto x = in_dtype(noise(8 * 64, 3, 1.7F), DType::kF32);
  Choices given;
  given.resize(2, 4);
  given.ids = {0, 1, 2, 3, 0, 2, 4, 6};  // of ranks 0 and 1, and of all
  given.weights.assign(8, 1.0F);
  for (const auto within : {WithinNode::kSharedMemory, WithinNode::kMessages}) {
    MpiOptions options;
    options.within_node = within;
    options.node = world_->rank() / 2;
    const auto world = make_mpi_communicator(MPI_COMM_WORLD, options);
    const Grid grid(*world, 1, 4);
    TestedMoe layer(moe, grid, options_for(DType::kF32));
    layer.forward(x, {world_->rank() * 2, world_->rank() * 2 + 2}, &given);
    const ExchangeCounts& counts = layer.moe().counts();
    const bool first_node = world_->rank() < 2;
    EXPECT_EQ(counts.sent, first_node ? 1 + 3 : 2 + 3);
    EXPECT_EQ(counts.once_a_host, first_node ? 1 : 2);
    const bool shared = within == WithinNode::kSharedMemory;
    EXPECT_EQ(counts.sent_to_hosts, shared ? counts.once_a_host : first_node ? 2 : 4);
  }
}

TEST_F(MoeExchange, ARowTravelsOnceToARankHoweverManyOfItsExpertsAreThere) {
  if (world_->size() != 2 || on_cuda()) return;
  const MemoryMoe moe({.hidden = 64, .intermediate = 24, .experts = 8, .top_k = 4});
  const Grid grid(*world_, 1, 2);
  TestedMoe layer(moe, grid, options_for(DType::kF32));
  const auto x = in_dtype(noise(6 * 64, 3, 1.7F), DType::kF32);
  Choices given;
  given.resize(3, 4);
  // Two of each kind of token: all here, all there, both.
  given.ids = {0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5};
  given.weights.assign(12, 1.0F);
  layer.forward(x, {world_->rank() * 3, world_->rank() * 3 + 3}, &given);
  EXPECT_EQ(layer.moe().counts().sent, 2);
  EXPECT_EQ(layer.moe().counts().received, 4);
  EXPECT_EQ(layer.moe().counts().returned, 2);
  EXPECT_EQ(layer.moe().counts().sent_to_hosts, 0);  // ranks of a test share their host
  EXPECT_EQ(layer.moe().counts().once_a_host, 0);
}

/// Shares memory once, and never again.
class SharesOnce final : public HookedCommunicator {
 public:
  explicit SharesOnce(Communicator& inner)
      : HookedCommunicator(inner, [](Communicator& group, auto sends,
                                     auto receives) { group.exchange(sends, receives); }),
        group_(inner) {}
  std::unique_ptr<SharedWindow> share(std::int64_t bytes) override {
    ++asked;
    return asked == 1 ? group_.share(bytes) : nullptr;
  }
  int asked = 0;

 private:
  Communicator& group_;
};

TEST_F(MoeExchange, WhereMoreCantBeSharedMessagesTakeOver) {
  if (world_->size() == 1 || on_cuda()) return;
  const MemoryMoe moe({.hidden = 64, .intermediate = 24, .experts = 8, .top_k = 2, .shared = 1});
  OneDevice one(moe);
  SharesOnce sharing(*world_);
  const Grid grid(*world_, 1, world_->size());
  const auto device = testing_device();
  const MoeOptions options = options_for(DType::kF32);
  Moe layer(moe.spec, moe.source, {device.get(), &sharing, &grid.tp(), &grid.etp()}, options);
  for (const std::int64_t tokens : {3, 65, 257, 17}) {
    const auto x = batch(moe, DType::kF32, tokens);
    const Range own = split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())];
    std::vector<std::byte> y(as_size(own.size() * 256));
    layer.forward(x.data() + own.begin * 256, {own.size(), tokens}, y.data());
    EXPECT_TRUE(same_rows(y, one.outcome(options, tokens).y, own, 256)) << tokens;
  }
  EXPECT_EQ(sharing.asked, 2);
}

/// Counts what goes to peers, and has lost one of them once memory is to be shared.
class LosesAPeer final : public HookedCommunicator {
 public:
  explicit LosesAPeer(Communicator& inner)
      : HookedCommunicator(inner, [this](Communicator& group, auto sends, auto receives) {
          ++talks;
          group.exchange(sends, receives);
        }) {}
  Communicator& host() override { return *this; }
  void all_gather_v(std::byte* all, std::span<const std::int64_t> parts) override {
    ++talks;
    HookedCommunicator::all_gather_v(all, parts);
  }
  std::unique_ptr<SharedWindow> share(std::int64_t) override {
    if (lost) throw NoAnswerError("a peer is lost (planted); want another");
    return nullptr;
  }
  int talks = 0;
  bool lost = false;
};

TEST_F(MoeExchange, APeerThatIsLostBeforeRowsGoOutEndsTheStepWithoutAWordToTheOthers) {
  if (world_->size() == 1 || on_cuda()) return;
  const MemoryMoe moe({.hidden = 64, .intermediate = 24, .experts = 8, .top_k = 2});
  LosesAPeer world(*world_);
  const Grid grid(*world_, 1, 1);
  LosesAPeer etp(grid.etp());
  const auto device = testing_device();
  Moe layer(moe.spec, moe.source, {device.get(), &world, &grid.tp(), &etp},
            options_for(DType::kF32, Dispatcher::kAllToAll, 8));
  const std::int64_t tokens = world_->size();
  const auto x = batch(moe, DType::kF32, tokens);
  std::vector<std::byte> y(256);
  const int before = world.talks + etp.talks;
  etp.lost = true;
  EXPECT_THROW(layer.forward(x.data() + world_->rank() * 256, {1, tokens}, y.data()),
               NoAnswerError);
  EXPECT_EQ(world.talks + etp.talks, before);
}

}  // namespace
}  // namespace gatefold::testing
