// Balance losses: by hand, in closed form, and the same bits however tokens lie on ranks.
#include "layers/balance.h"

#include <gmock/gmock.h>
#include <mpi.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "layers/router.h"
#include "memory_moe.h"
#include "parallel/mpi_interop.h"
#include "runtime/error.h"
#include "runtime/range.h"
#include "tests/testing_device.h"

namespace gatefold {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Batch {
  LoadShape shape;
  std::vector<float> scores;
  std::vector<float> log_sums;
  std::vector<std::int32_t> ids;

  ScoredTokens part(Range tokens) const {
    return {.first = tokens.begin,
            .rows = tokens.size(),
            .scores = scores.data() + tokens.begin * shape.experts,
            .log_sums = log_sums.empty() ? nullptr : log_sums.data() + tokens.begin,
            .ids = ids.data() + tokens.begin * shape.top_k};
  }
};

/// Two sequences of three tokens, four experts, k = 2.
Batch by_hand() {
  return {{2, 3, 4, 2},
          {0.1F, 0.2F, 0.3F, 0.4F, 0.2F, 0.3F, 0.4F, 0.1F, 0.3F, 0.4F, 0.1F, 0.2F,
           0.4F, 0.1F, 0.2F, 0.3F, 0.1F, 0.4F, 0.2F, 0.3F, 0.2F, 0.1F, 0.4F, 0.3F},
          {},
          {3, 2, 2, 1, 1, 0, 0, 3, 1, 3, 2, 3}};
}

/// Scores of very different sizes, so that the order of additions shows.
Batch random_batch(const LoadShape& shape) {
  std::mt19937 random(7);
  Batch batch{shape, {}, {}, {}};
  std::vector<std::int32_t> order(static_cast<std::size_t>(shape.experts));
  for (std::int64_t token = 0; token < shape.tokens(); ++token) {
    for (std::int64_t e = 0; e < shape.experts; ++e) {
      batch.scores.push_back(
          std::ldexp(static_cast<float>(random() % 4096), -static_cast<int>(token % 23)));
      order[static_cast<std::size_t>(e)] = static_cast<std::int32_t>(e);
    }
    batch.log_sums.push_back(std::ldexp(static_cast<float>(random() % 4096), -6));
    std::shuffle(order.begin(), order.end(), random);
    batch.ids.insert(batch.ids.end(), order.begin(), order.begin() + shape.top_k);
  }
  return batch;
}

class Balance : public ::testing::Test {
 protected:
  void SetUp() override {
    world_ = make_mpi_communicator(MPI_COMM_WORLD);
    alone_ = make_mpi_communicator(MPI_COMM_SELF);
  }
  std::vector<LoadSums> on_one_rank(const Batch& batch) {
    return sum_loads(*alone_, batch.shape, batch.part({0, batch.shape.tokens()}));
  }
  /// Of this rank, where rank r begins at begins[r].
  Range own(const std::vector<std::int64_t>& begins) const {
    const auto rank = static_cast<std::size_t>(world_->rank());
    return {begins[rank], begins[rank + 1]};
  }

  std::unique_ptr<Communicator> world_;
  std::unique_ptr<Communicator> alone_;
};

TEST_F(Balance, WorkedExample) {
  const std::vector<LoadSums> sequences = on_one_rank(by_hand());
  ASSERT_EQ(sequences.size(), 2U);
  EXPECT_THAT(sequences[0].chosen, ElementsAre(1, 2, 2, 1));
  EXPECT_THAT(sequences[1].chosen, ElementsAre(1, 1, 1, 3));
  EXPECT_THAT(sequences[0].best, ElementsAre(0, 1, 1, 1));
  constexpr double kAlpha = 0.01;
  const auto loss = [](const LoadSums& sums) {
    return balance_loss(BalanceLoss::kMegatron, sums, 2);
  };
  EXPECT_THAT(loss(sequences[0]), DoubleNear(1.04444, 5e-6));
  EXPECT_THAT(loss(sequences[1]), DoubleNear(1.06667, 5e-6));
  EXPECT_THAT(kAlpha * mean_sequence_loss(BalanceLoss::kMegatron, sequences, 2),
              DoubleNear(0.0105556, 5e-8));
  const LoadSums batch = whole_batch(sequences);
  EXPECT_EQ(batch.tokens, 6);
  EXPECT_THAT(batch.chosen, ElementsAre(2, 3, 3, 4));
  EXPECT_THAT(kAlpha * loss(batch), DoubleNear(0.0101667, 5e-8));
  // k times as much; and of the first choices alone, 4 (1·1.3 + 2·1.5 + 2·1.6 + 1·1.6) / 36.
  EXPECT_THAT(balance_loss(BalanceLoss::kTransformers, batch, 2), DoubleNear(2.033333, 1e-6));
  EXPECT_THAT(batch.best, ElementsAre(1, 2, 2, 1));
  EXPECT_THAT(balance_loss(BalanceLoss::kSwitch, batch, 2), DoubleNear(36.4 / 36, 1e-6));
  EXPECT_DOUBLE_EQ(busiest_expert(batch), 4.0 / 3);
}

TEST_F(Balance, PerfectBalanceIsWhatItIsSaidToBe) {
  // Token t has experts t and t + 1, round and round.
  Batch batch{{2, 4, 4, 2}, std::vector<float>(32, 0.25F), std::vector<float>(8, 3.0F), {}};
  for (int token = 0; token < 8; ++token) {
    batch.ids.push_back(token % 4);
    batch.ids.push_back((token + 1) % 4);
  }
  const LoadSums sums = whole_batch(on_one_rank(batch));
  for (const auto& [loss, name] : kBalanceLosses) {
    EXPECT_DOUBLE_EQ(balance_loss(loss, sums, 2), loss_at_balance(loss, 2)) << name;
  }
  EXPECT_DOUBLE_EQ(loss_at_balance(BalanceLoss::kTransformers, 2), 2);
  EXPECT_DOUBLE_EQ(z_loss(sums), 9);
  EXPECT_DOUBLE_EQ(busiest_expert(sums), 1);
}

TEST_F(Balance, OneExpertForAllCostsAsManyTimesAsThereAreExperts) {
  Batch batch{{1, 3, 4, 1}, {0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0}, {}, {2, 2, 2}};
  const LoadSums sums = whole_batch(on_one_rank(batch));
  for (const auto& [loss, name] : kBalanceLosses) {
    EXPECT_DOUBLE_EQ(balance_loss(loss, sums, 1), 4) << name;
  }
}

TEST_F(Balance, BitsDontDependOnTheRanks) {
  for (const LoadShape& shape : {LoadShape{1, 1, 3, 1}, LoadShape{3, 5, 7, 2},
                                 LoadShape{2, 64, 5, 5}, LoadShape{5, 13, 33, 4}}) {
    const Batch batch = random_batch(shape);
    const std::vector<LoadSums> expected = on_one_rank(batch);
    const int ranks = world_->size();
    std::vector<std::vector<std::int64_t>> cuts(3);
    for (int r = 0; r <= ranks; ++r) {
      cuts[0].push_back(even_part(shape.tokens(), ranks, std::min(r, ranks - 1)).begin);
      cuts[1].push_back(r == ranks ? shape.tokens() : 0);  // all on the last one
      cuts[2].push_back(r == 0 ? 0 : std::min<std::int64_t>(shape.tokens(), r * r + 1));
    }
    cuts[0].back() = cuts[2].back() = shape.tokens();
    for (const auto& begins : cuts) {
      const auto got = sum_loads(*world_, shape, batch.part(own(begins)));
      ASSERT_EQ(got.size(), expected.size());
      for (std::size_t s = 0; s < got.size(); ++s) {
        EXPECT_EQ(got[s].chosen, expected[s].chosen);
        EXPECT_EQ(got[s].best, expected[s].best);
        EXPECT_EQ(std::bit_cast<std::uint32_t>(got[s].squares),
                  std::bit_cast<std::uint32_t>(expected[s].squares));
        for (std::size_t e = 0; e < got[s].scores.size(); ++e) {
          EXPECT_EQ(std::bit_cast<std::uint32_t>(got[s].scores[e]),
                    std::bit_cast<std::uint32_t>(expected[s].scores[e]))
              << "expert " << e << " in sequence " << s;
        }
      }
    }
  }
}

TEST_F(Balance, SumsGoByTheTreeOverTokens) {
  // ((a + b) + (c + d)) + e: in order, 1 would be lost in each of the large ones.
  const float large = 0x1p24F;
  const Batch batch{{1, 5, 1, 1}, {large, 1, 1, 1, 1}, {}, {0, 0, 0, 0, 0}};
  EXPECT_EQ(on_one_rank(batch)[0].scores[0], large + 4.0F);
}

TEST_F(Balance, TokensThatArentTheBatchAreRefusedOnEveryRank) {
  const Batch batch = by_hand();
  const int rank = world_->rank();
  const ScoredTokens gap = batch.part(rank == 0 ? Range{1, 6} : Range{6, 6});
  const ScoredTokens few = batch.part(rank == 0 ? Range{0, 5} : Range{5, 5});
  for (const auto& [own, words] :
       {std::pair(gap, "follow each other"), {few, "pass all of them"}}) {
    try {
      sum_loads(*world_, batch.shape, own);
      ADD_FAILURE() << "not refused: " << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      EXPECT_THAT(error.what(), HasSubstr(words));
    }
  }
}

TEST_F(Balance, NoTokensAreNoLoss) {
  const Batch none{{0, 3, 4, 2}, {}, {}, {}};
  const auto sums = sum_loads(*world_, none.shape, none.part({0, 0}));
  EXPECT_TRUE(sums.empty());
  EXPECT_EQ(mean_sequence_loss(BalanceLoss::kMegatron, sums, 2), 0);
  EXPECT_EQ(balance_loss(BalanceLoss::kMegatron, whole_batch(sums), 2), 0);
  EXPECT_EQ(z_loss(whole_batch(sums)), 0);
  EXPECT_EQ(busiest_expert(whole_batch(sums)), 0);
}

TEST_F(Balance, ABiasGoesUpForIdleExpertsAndDownForBusyOnes) {
  LoadSums batch;
  batch.chosen = {2, 3, 7, 0};  // 3 is the mean
  std::vector<float> bias{0.5F, 0.5F, 0.5F, 0.0F};
  update_correction_bias(batch, 0.125F, bias);
  EXPECT_THAT(bias, ElementsAre(0.625F, 0.5F, 0.375F, 0.125F));
}

// ---- with a router ----

testing::MemoryMoe eight_experts(bool correction) {
  return testing::MemoryMoe(
      {.hidden = 64, .intermediate = 8, .experts = 8, .top_k = 2, .correction = correction});
}

TEST(RouterBias, IsForTheNextRowsAndReadBack) {
  const testing::MemoryMoe moe = eight_experts(true);
  const auto device = testing::testing_device();
  Router router(moe.spec, moe.source, *device);
  EXPECT_EQ(router.correction_bias().size(), 8U);
  testing::OnDevice x(*device, testing::noise(5 * 64, 3, 1.7F));
  const auto* bytes = reinterpret_cast<const std::byte*>(x.data());
  Choices before;
  router.route(bytes, DType::kF32, 5, before);
  std::vector<float> bias(8, -2.0F);
  bias[3] = bias[6] = 2.0F;  // more than scores differ by
  router.set_correction_bias(bias);
  EXPECT_EQ(router.correction_bias(), bias);
  Choices after;
  router.route(bytes, DType::kF32, 5, after);
  for (std::int64_t row = 0; row < 5; ++row) {
    EXPECT_THAT(after.ids_of(row), ::testing::UnorderedElementsAre(3, 6));
    EXPECT_GE(after.weight(row, 0) + 0.0F, 0.0F) << "a bias never weighs";
    EXPECT_LE(after.weight(row, 0), 1.0F) << "a bias never weighs";
  }
}

TEST(RouterBias, ScoresKnowNothingOfIt) {
  const testing::MemoryMoe moe = eight_experts(true);
  const auto device = testing::testing_device();
  Router router(moe.spec, moe.source, *device);
  testing::OnDevice x(*device, testing::noise(5 * 64, 3, 1.7F));
  const auto scored = [&] {
    testing::OnDevice scores(*device, std::vector<float>(5 * 8));
    testing::OnDevice log_sums(*device, std::vector<float>(5));
    Choices chosen;
    router.route(reinterpret_cast<const std::byte*>(x.data()), DType::kF32, 5, chosen);
    router.score(5, scores.data(), log_sums.data());
    return std::pair(scores.get(), log_sums.get());
  };
  const auto before = scored();
  router.set_correction_bias(std::vector<float>{9, 0, 0, 0, -9, 0, 0, 0});
  EXPECT_EQ(scored(), before);
  for (std::size_t row = 0; row < 5; ++row) {
    double sum = 0;
    for (std::size_t e = 0; e < 8; ++e) sum += static_cast<double>(before.first[row * 8 + e]);
    EXPECT_NEAR(sum, 1, 1e-6);
  }
}

TEST(RouterBias, ThatCantBeIsRefused) {
  const auto device = testing::testing_device();
  const auto refused = [&](bool correction, const std::vector<float>& bias, const char* words) {
    const testing::MemoryMoe moe = eight_experts(correction);
    Router router(moe.spec, moe.source, *device);
    const std::vector<float> before = router.correction_bias();
    try {
      router.set_correction_bias(bias);
      ADD_FAILURE() << "not refused: " << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      EXPECT_THAT(error.what(), HasSubstr(words));
    }
    EXPECT_EQ(router.correction_bias(), before);
  };
  refused(false, std::vector<float>(8), "a router without one");
  refused(true, std::vector<float>(7), "a correction bias of 7 values");
  std::vector<float> bias(8);
  bias[5] = std::numeric_limits<float>::quiet_NaN();
  refused(true, bias, "nan for expert 5");
}

}  // namespace
}  // namespace gatefold
