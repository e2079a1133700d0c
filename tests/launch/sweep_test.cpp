#include "launch/sweep.h"

#include <gmock/gmock.h>

namespace gatefold {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Of tp, ep and dp, empty where an option isn't given.
Options with(std::vector<std::int64_t> tp, std::vector<std::int64_t> ep,
             std::vector<std::int64_t> dp) {
  Options options;
  options.command = Command::kBench;
  options.sweep.tp = std::move(tp);
  options.sweep.ep = std::move(ep);
  options.sweep.dp = std::move(dp);
  return options;
}

std::vector<std::string> texts(const SweepPlan& plan) {
  std::vector<std::string> found;
  for (const RankGrid& grid : plan.grids) found.push_back(grid.text());
  return found;
}

constexpr SweptModel kDense{8, 0, 1};
constexpr SweptModel kMixture{8, 64, 2};

TEST(Sweep, TakesAllRanksWhereNoGridIsGiven) {
  for (const std::int64_t ranks : {1, 3, 8}) {
    const SweepPlan plan = plan_sweep(with({}, {}, {}), kDense, ranks);
    ASSERT_EQ(plan.grids.size(), 1U);
    EXPECT_EQ(plan.grids[0].ranks, ranks);
    EXPECT_EQ(plan.grids[0].tp, 0);
    EXPECT_EQ(plan.grids[0].ep, 0);
    EXPECT_THAT(plan.skipped, IsEmpty());
  }
}

TEST(Sweep, APointOfADenseModelTakesTpTimesDpRanks) {
  const SweepPlan plan = plan_sweep(with({1, 2, 3}, {}, {1, 2}), kDense, 4);
  EXPECT_THAT(texts(plan), ElementsAre("tp 1 on 1 rank", "tp 2 on 2 ranks", "tp 3 on 3 ranks",
                                       "tp 1 on 2 ranks", "tp 2 on 4 ranks"));
  EXPECT_THAT(plan.skipped, ElementsAre("tp 3 on 6 ranks (it takes 6 ranks of 4)"));
}

TEST(Sweep, OneOfTheThreeIsEnoughToSayWhichRanks) {
  EXPECT_THAT(texts(plan_sweep(with({}, {}, {2}), kDense, 4)), ElementsAre("tp 1 on 2 ranks"));
  EXPECT_THAT(texts(plan_sweep(with({2}, {}, {}), kMixture, 4)), ElementsAre("tp 2 on 2 ranks"));
  EXPECT_THAT(texts(plan_sweep(with({}, {3}, {}), kMixture, 4)),
              ElementsAre("tp 1, ep 3 on 3 ranks"));
}

TEST(Sweep, WithExpertsItTakesTheFewestThatTpAndEpDivide) {
  EXPECT_THAT(texts(plan_sweep(with({1, 2}, {1, 2, 3, 4}, {}), kMixture, 6)),
              ElementsAre("tp 1, ep 1 on 1 rank", "tp 2, ep 1 on 2 ranks", "tp 1, ep 2 on 2 ranks",
                          "tp 2, ep 2 on 2 ranks", "tp 1, ep 3 on 3 ranks", "tp 2, ep 3 on 6 ranks",
                          "tp 1, ep 4 on 4 ranks", "tp 2, ep 4 on 4 ranks"));
  EXPECT_THAT(texts(plan_sweep(with({}, {2}, {2}), kMixture, 6)),
              ElementsAre("tp 1, ep 2 on 4 ranks"));
}

TEST(Sweep, SaysWhatCantBe) {
  EXPECT_THAT(plan_sweep(with({}, {2}, {}), kDense, 4).skipped,
              ElementsAre("tp 1, ep 2 on 2 ranks (the model's layers are dense)"));
  EXPECT_THAT(plan_sweep(with({4}, {1}, {}), kMixture, 4).skipped,
              ElementsAre("tp 4, ep 1 on 4 ranks (4 ranks would share each expert, of 2 blocks)"));
  EXPECT_THAT(plan_sweep(with({9}, {}, {}), kDense, 16).skipped,
              ElementsAre("tp 9 on 9 ranks (there are 8 blocks)"));
}

TEST(Sweep, MoreRanksThanBlocksLeaveTheFastSumsAlone) {
  Options options = with({8, 9}, {}, {});
  options.sweep.reduces = {Reduce::kExact, Reduce::kFast};
  const SweepPlan plan = plan_sweep(options, kDense, 16);
  ASSERT_EQ(plan.grids.size(), 2U);
  EXPECT_THAT(plan.grids[0].reduces, ElementsAre(Reduce::kExact, Reduce::kFast));
  EXPECT_THAT(plan.grids[1].reduces, ElementsAre(Reduce::kFast));
}

TEST(Sweep, WeakScalingGivesEachRankItsTokens) {
  EXPECT_EQ(scaled_tokens(Scaling::kStrong, 64, 4), 64);
  EXPECT_EQ(scaled_tokens(Scaling::kWeak, 64, 4), 256);
}

}  // namespace
}  // namespace gatefold
