// Who is dropped where an expert takes no more rows: by hand, and for every split of tokens over
// ranks what plain loops over all tokens find.
#include "layers/capacity.h"

#include <gmock/gmock.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <random>

#include "layers/dropper.h"
#include "layers/reference_capacity.h"
#include "parallel/mpi_interop.h"
#include "plain_capacity.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

using testing::as_size;
using ::testing::HasSubstr;
using testing::Kept;
using testing::plainly_kept;

Choices choices_of(std::int64_t top_k, std::vector<std::int32_t> ids, std::vector<float> weights) {
  Choices made;
  made.rows = std::ssize(ids) / top_k;
  made.top_k = top_k;
  made.ids = std::move(ids);
  made.weights = std::move(weights);
  return made;
}

/// Splits of so many tokens over ranks: even, all on the last one, uneven with empty ranks.
std::vector<std::vector<std::int64_t>> splits(std::int64_t tokens, int ranks) {
  std::vector<std::int64_t> even;
  std::vector<std::int64_t> last(as_size(ranks));
  std::vector<std::int64_t> uneven(as_size(ranks));
  for (int r = 0; r < ranks; ++r) even.push_back(even_part(tokens, ranks, r).size());
  last.back() = tokens;
  std::int64_t left = tokens;
  for (std::size_t r = 0; r + 1 < uneven.size(); ++r) {
    uneven[r] = r % 3 == 1 ? 0 : left / 3;
    left -= uneven[r];
  }
  uneven.back() = left;
  return {even, last, uneven};
}

class CapacityTest : public ::testing::Test {
 protected:
  /// On every split of the tokens over this world.
  void expect_kept(const Choices& all, const Capacity& capacity, std::int64_t experts,
                   const Kept& expected) {
    EXPECT_EQ(reference_kept(capacity, experts, all.top_k, all.ids,
                             std::vector<double>(all.weights.begin(), all.weights.end())),
              expected)
        << text_of(capacity);
    for (const auto& split : splits(all.rows, world_->size())) {
      Range own;
      for (int r = 0; r <= world_->rank(); ++r) own = {own.end, own.end + split[as_size(r)]};
      Dropper dropper(*world_, capacity, experts);
      dropper.decide(all.part(own), all.rows, false);
      const auto at = [&](std::int64_t row) { return expected.begin() + row * all.top_k; };
      EXPECT_EQ(dropper.kept(), Kept(at(own.begin), at(own.end)))
          << ::testing::PrintToString(split) << ", " << text_of(capacity);
    }
  }
  std::unique_ptr<Communicator> world_ = make_mpi_communicator(MPI_COMM_WORLD);
};

TEST(Capacity, IsTheMeanTimesAFactorRoundedUpAndNeverMoreThanTheTokens) {
  const auto rows = [](double factor, std::int64_t tokens, std::int64_t experts, std::int64_t k) {
    return capacity_rows({.factor = factor}, tokens, experts, k);
  };
  EXPECT_EQ(rows(1.0, 8, 4, 2), 4);
  EXPECT_EQ(rows(1.25, 8, 4, 2), 5);
  EXPECT_EQ(rows(1.26, 8, 4, 2), 6);
  EXPECT_EQ(rows(1.0, 3, 4, 2), 2);  // of 1.5
  EXPECT_EQ(rows(1e-9, 8, 4, 2), 1);
  EXPECT_EQ(rows(2.0, 8, 4, 2), 8);
  EXPECT_EQ(rows(1e300, 8, 4, 2), 8);
  EXPECT_EQ(rows(1.0, 0, 4, 2), 0);
  EXPECT_EQ(capacity_rows({.rows = 64}, 100, 4, 1), 64);
  EXPECT_EQ(capacity_rows({.rows = 64}, 10, 4, 1), 10);
}

TEST(Capacity, OfNothingIsRefused) {
  const auto refused = [](const Capacity& capacity, const char* text) {
    try {
      check(capacity);
      ADD_FAILURE() << "accepted " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  };
  refused({}, "a capacity of nothing");
  refused({.factor = -1}, "a capacity factor of -1");
  refused({.factor = std::nan("")}, "a capacity factor of nan");
  refused({.factor = HUGE_VAL}, "a capacity factor of inf");
  refused({.rows = -3}, "a capacity of -3 rows");
  refused({.factor = 1, .rows = 2}, "a capacity factor of 1 and a capacity of 2 rows");
  refused({.rows = 2, .sequence_length = -1}, "sequences of -1 tokens");
  check({.rows = 1});
  check({.factor = 0.5, .sequence_length = 8});
}

TEST_F(CapacityTest, OfOneKeepsTheFirstTokenOfAnExpert) {
  const Choices all = choices_of(2, {0, 1, 0, 2, 1, 0}, {.5F, .5F, .5F, .5F, .9F, .1F});
  expect_kept(all, {.rows = 1}, 4, {1, 1, 0, 1, 0, 0});
}

TEST_F(CapacityTest, OfOneKeepsTheTokenOfTheLargestWeightAndOfEqualOnesTheFirst) {
  const Choices all = choices_of(1, {0, 0, 0, 1, 1, 2, 2}, {.25F, .5F, .5F, -0.F, 0.F, .1F, .2F});
  expect_kept(all, {.rows = 1, .drop = DropBy::kProbability}, 3, {0, 1, 0, 1, 0, 0, 1});
}

TEST_F(CapacityTest, AWeightThatIsNoNumberIsDroppedFirst) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Choices all = choices_of(1, {0, 0, 0, 0}, {nan, -1.F, nan, 2.F});
  expect_kept(all, {.rows = 2, .drop = DropBy::kProbability}, 1, {0, 1, 0, 1});
  expect_kept(all, {.rows = 3, .drop = DropBy::kProbability}, 1, {1, 1, 0, 1});
  expect_kept(all, {.rows = 3}, 1, {1, 1, 1, 0});
}

TEST_F(CapacityTest, CountsEachSequenceByItself) {
  const Choices all = choices_of(1, {0, 0, 1, 0, 0, 0}, {.1F, .2F, .3F, .4F, .5F, .6F});
  expect_kept(all, {.rows = 1, .sequence_length = 3}, 2, {1, 0, 1, 1, 0, 0});
  expect_kept(all, {.rows = 1, .drop = DropBy::kProbability, .sequence_length = 3}, 2,
              {0, 1, 1, 0, 0, 1});
  expect_kept(all, {.rows = 1}, 2, {1, 0, 1, 0, 0, 0});
}

TEST_F(CapacityTest, OfAllTokensDropsNone) {
  const Choices all = choices_of(2, {1, 0, 1, 0, 0, 1}, {1, 2, 3, 4, 5, 6});
  for (const DropBy drop : {DropBy::kPosition, DropBy::kProbability}) {
    expect_kept(all, {.rows = 3, .drop = drop}, 2, Kept(6, 1));
    expect_kept(all, {.factor = 1.0, .drop = drop}, 2, Kept(6, 1));  // k = E
  }
}

TEST_F(CapacityTest, IsTheSameForEverySplitOfManyTokens) {
  std::mt19937 random(3);
  for (const auto& [tokens, experts, k] : std::vector<std::array<std::int64_t, 3>>{
           {0, 3, 1}, {1, 4, 2}, {24, 5, 3}, {60, 8, 8}, {120, 16, 2}}) {
    Choices all;
    all.resize(tokens, k);
    std::vector<std::int32_t> order(as_size(experts));
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::size_t e = 0; e < order.size(); ++e) order[e] = static_cast<std::int32_t>(e);
      std::ranges::shuffle(order, random);
      if (t % 3 > 0) std::swap(order[0], *std::ranges::find(order, 1));  // a busy expert
      std::copy_n(order.begin(), k, all.ids.begin() + t * k);
    }
    // Few different ones: many ties.
    for (float& w : all.weights) w = static_cast<float>(random() % 4) / 4;
    for (const DropBy drop : {DropBy::kPosition, DropBy::kProbability}) {
      for (const std::int64_t length : {0, 4, 12}) {
        if (length > 0 && tokens % length != 0) continue;
        for (const double factor : {0.3, 1.0, 1.5}) {
          const Capacity capacity{.factor = factor, .drop = drop, .sequence_length = length};
          expect_kept(all, capacity, experts, plainly_kept(all, capacity, experts));
        }
      }
    }
  }
}

TEST_F(CapacityTest, PaddingIsSoManyRowsForEachSequence) {
  const Choices all = choices_of(1, std::vector<std::int32_t>(12, 0), std::vector<float>(12, 1.F));
  const Range own = even_part(12, world_->size(), world_->rank());
  const auto padded = [&](const Capacity& capacity) {
    Dropper dropper(*world_, capacity, 4);
    dropper.decide(all.part(own), 12, false);
    return dropper.padded_rows();
  };
  EXPECT_EQ(padded({.factor = 1}), 0);
  EXPECT_EQ(padded({.factor = 1, .pad = true}), 3);
  EXPECT_EQ(padded({.factor = 1, .sequence_length = 6, .pad = true}), 4);  // twice 1.5
  EXPECT_EQ(padded({.rows = 64, .pad = true}), 12);
}

TEST_F(CapacityTest, ARankThatFailsDropsNothingAndKeepsNobodyWaiting) {
  const Choices all = choices_of(1, {0, 0, 0, 0}, {1, 1, 1, 1});
  const bool last = world_->rank() + 1 == world_->size();
  Dropper dropper(*world_, {.rows = 1}, 2);
  dropper.decide(all.part({0, last ? 0 : 4}), 4, last);
  EXPECT_EQ(dropper.kept(), Kept(last ? 0 : 4, 1));
}

TEST_F(CapacityTest, TokensThatArentTheStepsOrNoWholeSequencesAreRefusedOnAllRanks) {
  const Choices all = choices_of(1, {0, 0, 0, 0}, {1, 1, 1, 1});
  const Range own = even_part(4, world_->size(), world_->rank());
  const auto refused = [&](const Capacity& capacity, std::int64_t tokens, const char* text) {
    Dropper dropper(*world_, capacity, 2);
    try {
      dropper.decide(all.part(own), tokens, false);
      ADD_FAILURE() << "accepted " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  };
  refused({.rows = 1}, 5, "4 tokens of all ranks in a step of 5");
  refused({.rows = 1, .sequence_length = 3}, 4, "4 tokens in sequences of 3");
  if (world_->size() == 1) return;
  refused({.rows = 1}, world_->rank() == 0 ? 4 : 3, "4 tokens of all ranks in a step of 4");
}

}  // namespace
}  // namespace gatefold
