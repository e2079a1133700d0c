#include "layers/moe_reference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "layers/reference_math.h"
#include "plain_layer.h"
#include "plain_moe.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

using namespace plain_moe;
using plain_layer::kDTypes;
using plain_layer::plain;
using testing::ElementsAre;
using testing::IsEmpty;

// ---- numbers with errors ----

TEST(ReferenceMath, CarriesErrorsThroughQuotientsSumsAndSigmoids) {
  using reference::Number;
  const auto reaches = [](const Number& number, double value, double extreme) {
    EXPECT_NEAR(number.value, value, 1e-15);
    for (const double error : {number.certain, 8 * number.spread}) {
      EXPECT_GE(error, std::abs(extreme - value));
      EXPECT_LT(error, 1.1 * std::abs(extreme - value));
    }
  };
  reaches(reference::quotient({1, 0.25, 0.25 / 8}, {2, 0.5, 0.5 / 8}), 0.5, 1.25 / 1.5);
  reaches(reference::quotient({1, 0, 0}, {-2, 0.5, 0.5 / 8}), -0.5, -1 / 1.5);
  EXPECT_EQ(reference::quotient({1, 0, 0}, {2, 2, 0.25}).likely(), HUGE_VAL);
  reaches(reference::sum_of(std::array{Number{1, 0.5, 0.5 / 8}, Number{-3, 0.25, 0.25 / 8}}), -2,
          -2.75);
  reaches(reference::sigmoid_of({0, 0.1, 0.1 / 8}), 0.5, 1 / (1 + std::exp(-0.1)));
  reaches(reference::sigmoid_of({-20, 0.1, 0.1 / 8}), 1 / (1 + std::exp(20)),
          1 / (1 + std::exp(19.9)));
  const auto root = [](double z) { return std::sqrt(std::log1p(std::exp(z))); };
  for (const double z : {0.0, -20.0, 30.0}) {
    reaches(reference::sqrt_softplus_of({z, 0.1, 0.1 / 8}), root(z), root(z + 0.1));
  }
}

// ---- known numbers ----

/// One hidden channel, as wide as the layer's own: y_j = factor * act(x_j), by ones on diagonals.
Layer scaled_by(float factor, std::int64_t hidden,
                ActivationKind kind = ActivationKind::kIdentity) {
  Layer layer{hidden, hidden, plain(kind), {}, {}, {}, {}, {}, {}};
  layer.up.resize(static_cast<std::size_t>(hidden * hidden));
  layer.down.resize(layer.up.size());
  for (std::int64_t i = 0; i < hidden; ++i) {
    layer.up[at(i, hidden, i)] = 1;
    layer.down[at(i, hidden, i)] = factor;
  }
  return layer;
}

/// Width 1, x = 1 by default: logits are what the router holds, expert e gives factors[e] * x.
Mixture narrow(RouteRule rule, std::vector<float> logits, const std::vector<float>& factors) {
  Mixture mixture;
  mixture.hidden = 1;
  mixture.rule = rule;
  mixture.rule.experts = static_cast<std::int64_t>(logits.size());
  mixture.router = std::move(logits);
  for (const float factor : factors) mixture.experts.push_back(scaled_by(factor, 1));
  return mixture;
}

double only_y(const Mixture& mixture, float x = 1) {
  const MoeReferenceResult result = reference_of(mixture, DType::kF32, {x});
  EXPECT_GT(result.bound[0], 0);
  EXPECT_LT(result.bound[0], 1e-5 * std::abs(result.y[0]));
  return result.y[0];
}

TEST(MoeReference, SendsEachTokenToItsExpertAndBack) {
  Mixture mixture;
  mixture.hidden = 5;
  mixture.rule = {.experts = 4, .top_k = 1, .normalize = true};
  mixture.router.resize(20);
  for (std::int64_t e = 0; e < 4; ++e) mixture.router[at(e, 5, e + 1)] = 40;
  for (const float factor : {1.0F, 4.0F, 16.0F, 64.0F}) {
    mixture.experts.push_back(scaled_by(factor, 5));
  }
  std::vector<float> x(40);
  for (std::int64_t t = 0; t < 8; ++t) {
    x[at(t, 5, 0)] = static_cast<float>(t + 1);
    x[at(t, 5, 1 + t % 4)] = 1;
  }
  for (const DType dtype : kDTypes) {
    const MoeReferenceResult result = reference_of(mixture, dtype, x);
    std::vector<double> first;
    for (std::int64_t t = 0; t < 8; ++t) first.push_back(result.y[at(t, 5, 0)]);
    EXPECT_THAT(first, ElementsAre(1, 8, 48, 256, 5, 24, 112, 512));
    EXPECT_THAT(result.ids, ElementsAre(0, 1, 2, 3, 0, 1, 2, 3));
  }
}

const float kLn2 = std::log(2.0F);
const float kLn5 = std::log(5.0F);

TEST(MoeReference, WeighsByTheSoftmaxOfAllExperts) {
  const Mixture mixture = narrow({.top_k = 2}, {0, kLn5, kLn2}, {1000, 8, 80});
  EXPECT_NEAR(only_y(mixture), 5 + 20, 1e-5);
}

TEST(MoeReference, NormalizesTheChosenWeights) {
  Mixture mixture = narrow({.top_k = 2, .normalize = true}, {0, kLn5, kLn2}, {1000, 7, 70});
  EXPECT_NEAR(only_y(mixture), 5 + 20, 1e-5);
  mixture.rule.epsilon = 0.125F;  // 7/8 + 1/8
  EXPECT_NEAR(only_y(mixture), 7 * 0.625 + 70 * 0.25, 1e-5);
}

TEST(MoeReference, TakesTheSoftmaxOfTheChosenLogits) {
  Mixture mixture =
      narrow({.top_k = 2, .score = Score::kSoftmaxOfChosen}, {0, kLn5, kLn2}, {1000, 7, 70});
  EXPECT_NEAR(only_y(mixture), 5 + 20, 1e-5);
  mixture.router_bias = {kLn5, 0, -9};  // experts 0 and 1 are left, equal
  EXPECT_NEAR(only_y(mixture), 500 + 3.5, 1e-3 / 8);
}

TEST(MoeReference, WeighsByTheSquareRootOfSoftplus) {
  // log(1 + exp(l)) is 1/4, 1 and 4: scores of 1/2, 1 and 2.
  const auto logit = [](double softplus) {
    return static_cast<float>(std::log(std::expm1(softplus)));
  };
  Mixture mixture = narrow({.top_k = 2, .score = Score::kSqrtSoftplus},
                           {logit(0.25), logit(1), logit(4)}, {1000, 30, 60});
  EXPECT_NEAR(only_y(mixture), 30 + 120, 1e-4);
  mixture.rule.normalize = true;
  EXPECT_NEAR(only_y(mixture), 10 + 40, 1e-4);
  mixture.correction = {3, 0, 0};  // chooses expert 0 and never weighs it
  EXPECT_NEAR(only_y(mixture), 1000 * 0.2 + 60 * 0.8, 1e-3);
}

TEST(MoeReference, LeavesOutWhatIsDroppedAndWeighsTheOthersAsBefore) {
  const Mixture mixture = narrow({.top_k = 2, .normalize = true}, {0, kLn5, kLn2}, {1000, 7, 70});
  const Stored stored(mixture, DType::kF32);
  const std::vector<float> x(4, 1);
  const std::vector<std::uint8_t> kept{1, 1, 0, 1, 1, 0, 0, 0};
  const MoeReferenceResult result =
      reference_moe(stored.spec, stored.source, DType::kF32, x, 4, {}, {}, kept);
  EXPECT_NEAR(result.y[0], 5 + 20, 1e-5);
  EXPECT_NEAR(result.y[1], 20, 1e-5);
  EXPECT_NEAR(result.y[2], 5, 1e-5);
  EXPECT_EQ(result.y[3], 0);
  EXPECT_THAT(result.ids, ElementsAre(1, 2, 1, 2, 1, 2, 1, 2));
  const MoeReferenceResult routes = reference_routes(stored.spec, stored.source, DType::kF32, x, 4);
  EXPECT_EQ(routes.ids, result.ids);
  EXPECT_EQ(routes.weights, result.weights);
  EXPECT_THAT(routes.y, IsEmpty());
}

TEST(MoeReference, MixesEachOfTwoWithWhatIsLeftAndNear) {
  // log(1, 2, 4, 8) and far below: of 8, 4 is near, 2 is too far. Of 4, what is left: 2, and 1 not.
  const auto logit = [](double weight) { return static_cast<float>(std::log(weight)); };
  const std::vector<float> logits = {logit(1), logit(2), logit(4), logit(8), -90};
  Mixture mixture = narrow({.top_k = 2, .score = Score::kSparseMixer, .margin = 0.55F}, logits,
                           {1000, 1000, 60, 3, 1000});
  EXPECT_NEAR(only_y(mixture), 3 * (8 / 12.0) + 60 * (4 / 6.0), 1e-4);
  mixture.rule.margin = 0.3F;
  EXPECT_NEAR(only_y(mixture), 3 + 60, 1e-4);
  mixture.rule.margin = 2;  // all but the one that 91 is between
  EXPECT_NEAR(only_y(mixture), 3 * (8 / 15.0) + 60 * (4 / 7.0), 1e-4);
}

TEST(MoeReference, ScalesOnce) {
  const Mixture mixture =
      narrow({.top_k = 1, .normalize = true, .scaling = 2.5F}, {0, 1}, {100, 4});
  EXPECT_NEAR(only_y(mixture), 10, 1e-5);
}

TEST(MoeReference, ChoosesByTheCorrectionAndNeverWeighsByIt) {
  Mixture mixture = narrow({.top_k = 2, .score = Score::kSigmoid, .normalize = true}, {0, 0, 0, 0},
                           {2, 1000, 4, 1000});
  mixture.correction = {0.1F, -0.3F, 0.2F, 0};
  EXPECT_EQ(only_y(mixture), 3);
  EXPECT_THAT(reference_of(mixture, DType::kF32, {1}).ids, ElementsAre(2, 0));
}

TEST(MoeReference, LeavesOutTheGroupsWhoseBestIsWorse) {
  // Groups {4, 0}, {3, 3}, {1, 1}: by their best 0 and 1, by the sum of two 1 and 0.
  RouteRule rule{.top_k = 1, .score = Score::kSoftmaxOfChosen, .groups = 3, .kept_groups = 1};
  const std::vector<float> logits = {4, 0, 3, 3.5F, 1, 1};
  const std::vector<float> factors = {1, 2, 3, 4, 5, 6};
  EXPECT_EQ(only_y(narrow(rule, logits, factors)), 1);
  rule.group_score = GroupScore::kTwoBest;
  EXPECT_EQ(only_y(narrow(rule, logits, factors)), 4);
}

TEST(MoeReference, NeverChoosesFromALeftOutGroupEvenWhereScoresAreNegative) {
  Mixture mixture = narrow({.top_k = 2,
                            .score = Score::kSigmoid,
                            .groups = 2,
                            .kept_groups = 1,
                            .group_score = GroupScore::kTwoBest,
                            .normalize = true},
                           {0, 0, 0, 0}, {1000, 1000, 2, 4});
  mixture.correction = {-1, -2, -0.75F, -1.5F};  // choice -0.5, -1.5 | -0.25, -1
  EXPECT_EQ(only_y(mixture), 3);
}

TEST(MoeReference, PrefersTheLowestOfEqualExpertsAndGroups) {
  RouteRule rule{.top_k = 2, .score = Score::kSoftmaxOfChosen};
  const std::vector<float> logits = {1, 2, 2, 2, 1, 2};
  EXPECT_THAT(reference_of(narrow(rule, logits, {1, 1, 1, 1, 1, 1}), DType::kF32, {1}).ids,
              ElementsAre(1, 2));
  rule.groups = 3;
  rule.kept_groups = 2;
  rule.top_k = 3;
  EXPECT_THAT(reference_of(narrow(rule, logits, {1, 1, 1, 1, 1, 1}), DType::kF32, {1}).ids,
              ElementsAre(1, 2, 3));
}

TEST(MoeReference, WeighsTheInputWhereTheFamilyDoes) {
  Mixture mixture = narrow({.top_k = 1, .score = Score::kSigmoidOfChosen}, {0, -1}, {1, 1});
  mixture.experts[0] = scaled_by(1, 1, ActivationKind::kRelu2);
  EXPECT_EQ(only_y(mixture, 4), 8);
  mixture.weight_on = WeightOn::kInput;
  EXPECT_EQ(only_y(mixture, 4), 4);
}

TEST(MoeReference, WeighsTheExpertsDownBiasToo) {
  Mixture mixture = narrow({.top_k = 2, .score = Score::kSigmoid}, {0, 0}, {2, 4});
  mixture.experts[0].down_bias = {100};
  EXPECT_EQ(only_y(mixture), 1 + 2 + 50);
}

TEST(MoeReference, AddsEverySharedExpertOnceAndGatesItWhereTheFamilyDoes) {
  Mixture mixture = narrow({.top_k = 1, .normalize = true, .scaling = 2}, {0, -1}, {1, 1});
  mixture.shared = {scaled_by(10, 1), scaled_by(100, 1)};
  EXPECT_NEAR(only_y(mixture), 112, 1e-12);
  mixture.shared_gate = {0};
  EXPECT_NEAR(only_y(mixture), 57, 1e-12);
}

TEST(MoeReference, KeepsTheRouterInFp32) {
  const float odd = 1.00390625F;  // 1 + 2^-8, which bf16 rounds to 1
  const Mixture mixture =
      narrow({.top_k = 1, .score = Score::kSoftmaxOfChosen}, {1, odd, odd / 2}, {1, 2, 3});
  EXPECT_EQ(reference_of(mixture, DType::kBf16, {1}).y[0], 2);
}

// ---- the runtime's choice ----

Mixture choosing(RouteRule rule, const std::vector<float>& logits) {
  std::vector<float> factors;
  for (std::size_t e = 0; e < logits.size(); ++e) factors.push_back(static_cast<float>(e + 1));
  return narrow(rule, logits, factors);
}

const float kUlp = 0x1p-23F;

TEST(MoeReference, CountsATokenOneUlpFromATieAndFollowsIt) {
  const Mixture mixture =
      choosing({.top_k = 1, .score = Score::kSoftmaxOfChosen}, {1, 1 + kUlp, 0.5F});
  const MoeReferenceResult own = reference_of(mixture, DType::kF32, {1, 1}, {1, 1});
  EXPECT_EQ(own.near_ties, 0);
  EXPECT_THAT(own.y, ElementsAre(2, 2));
  const MoeReferenceResult theirs = reference_of(mixture, DType::kF32, {1, 1}, {0, 1});
  EXPECT_EQ(theirs.near_ties, 1);
  EXPECT_THAT(theirs.wrong_routes, IsEmpty());
  EXPECT_THAT(theirs.y, ElementsAre(1, 2));
  EXPECT_THAT(theirs.ids, ElementsAre(0, 1));
}

TEST(MoeReference, TakesTheRuntimesOrderOfTheSameExperts) {
  const Mixture mixture = choosing({.top_k = 2, .normalize = true}, {0, kLn2, kLn5});
  const MoeReferenceResult result = reference_of(mixture, DType::kF32, {1}, {1, 2});
  EXPECT_EQ(result.near_ties, 0);
  EXPECT_THAT(result.ids, ElementsAre(1, 2));
  EXPECT_NEAR(result.weights[0], 2.0 / 7, 1e-7);
  EXPECT_NEAR(result.weights[1], 5.0 / 7, 1e-7);
  EXPECT_GT(result.weight_bounds[0], 0);
  EXPECT_LT(result.weight_bounds[0], 1e-5);
}

void expect_wrong(const Mixture& mixture, const std::vector<std::int32_t>& expected,
                  const std::vector<std::int32_t>& found) {
  const MoeReferenceResult own = reference_of(mixture, DType::kF32, {1});
  const MoeReferenceResult result = reference_of(mixture, DType::kF32, {1}, found);
  ASSERT_EQ(result.wrong_routes.size(), 1U);
  EXPECT_EQ(result.wrong_routes[0].token, 0);
  EXPECT_EQ(result.wrong_routes[0].expected, expected);
  EXPECT_EQ(result.wrong_routes[0].found, found);
  EXPECT_EQ(result.near_ties, 0);
  EXPECT_EQ(result.ids, expected);
  EXPECT_EQ(result.y, own.y);
  EXPECT_EQ(result.bound, own.bound);
}

TEST(MoeReference, ReportsAChoiceThatNoRoundingExplains) {
  const Mixture mixture = choosing({.top_k = 2}, {1, 1.001F, 2, 3, 3 - kUlp});
  expect_wrong(mixture, {3, 4}, {3, 2});
  expect_wrong(mixture, {3, 4}, {3, 3});
  expect_wrong(mixture, {3, 4}, {3, 5});
  expect_wrong(mixture, {3, 4}, {-1, 3});
  EXPECT_THAT(reference_of(mixture, DType::kF32, {1}, {4, 3}).wrong_routes, IsEmpty());
}

TEST(MoeReference, AsksThatNoExpertBetweenTheTwoIsPassedOver) {
  // 2 may be taken for 0 only where 1, which lies between them, may be lower, too.
  const Mixture mixture = choosing({.top_k = 1, .score = Score::kSigmoid}, {2, 1.5F, 2 - kUlp});
  EXPECT_EQ(reference_of(mixture, DType::kF32, {1}, {2}).near_ties, 1);
  expect_wrong(mixture, {0}, {1});
}

TEST(MoeReference, TakesASparseMixersExpertsInTheirOrder) {
  const RouteRule rule{.top_k = 2, .score = Score::kSparseMixer, .margin = 0.5F};
  const Mixture apart = choosing(rule, {1, 2, 1.9F});
  EXPECT_THAT(reference_of(apart, DType::kF32, {1}, {1, 2}).wrong_routes, IsEmpty());
  expect_wrong(apart, {1, 2}, {2, 1});
  const Mixture tied = choosing(rule, {1, 2 - kUlp, 2});
  const MoeReferenceResult other = reference_of(tied, DType::kF32, {1}, {1, 2});
  EXPECT_EQ(other.near_ties, 1);
  EXPECT_NEAR(other.weights[0], 1 / (2 + std::exp(-1.0)), 1e-6);  // against all
  EXPECT_NEAR(other.weights[1], 1 / (1 + std::exp(-1.0)), 1e-6);  // the first is gone
}

TEST(MoeReference, AllowsASparseMixerBothSidesOfItsMargin) {
  const auto bound_at = [](float margin) {
    const RouteRule rule{.top_k = 2, .score = Score::kSparseMixer, .margin = margin};
    return reference_of(choosing(rule, {-9, 2, 1}), DType::kF32, {1}).weight_bounds[0];
  };
  const double apart = 1 - 1 / (1 + std::exp(-1.0));  // (2 - 1) / 2 is 0.5
  for (const float margin : {0.5F, 0.5F + kUlp / 4, 0.5F - kUlp / 4}) {
    EXPECT_GE(bound_at(margin), apart);
    EXPECT_LE(bound_at(margin), apart + 1e-5);
  }
  EXPECT_LE(bound_at(0.4999F), 1e-5);
  EXPECT_LE(bound_at(0.5001F), 1e-5);
}

TEST(MoeReference, SeesATieOfCorrectedScores) {
  Mixture mixture = choosing({.top_k = 1, .score = Score::kSigmoid}, {0, 30});
  mixture.correction = {0.5F + kUlp, 0};  // 1 + 2^-23 and 1 - 1e-13
  EXPECT_EQ(reference_of(mixture, DType::kF32, {1}, {1}).near_ties, 1);
  mixture.correction[0] = 0.51F;
  expect_wrong(mixture, {0}, {1});
}

TEST(MoeReference, SeesTiesOfGroups) {
  for (const GroupScore score : {GroupScore::kBest, GroupScore::kTwoBest}) {
    const RouteRule rule{.top_k = 2,
                         .score = Score::kSoftmaxOfChosen,
                         .groups = 3,
                         .kept_groups = 1,
                         .group_score = score};
    // Expert 3 is worse than all of group 0, but its group is as good.
    const std::vector<float> logits = {3, 2, 3 - kUlp, 2, 3, 1};
    EXPECT_EQ(reference_of(choosing(rule, logits), DType::kF32, {1}, {3, 2}).near_ties, 1);
    expect_wrong(choosing(rule, logits), {0, 1}, {0, 2});  // of two groups
    expect_wrong(choosing(rule, {3, 2, 2.9F, 2, 3, 1}), {0, 1}, {2, 3});
  }
  const RouteRule rule{.top_k = 2,
                       .score = Score::kSoftmaxOfChosen,
                       .groups = 3,
                       .kept_groups = 1,
                       .group_score = GroupScore::kTwoBest};
  expect_wrong(choosing(rule, {3, 2, 3, 2, 3, 1}), {0, 1}, {4, 5});
}

TEST(MoeReference, AsksThatTheGroupOfTheChosenIsKept) {
  const RouteRule rule{.top_k = 1,
                       .score = Score::kSoftmaxOfChosen,
                       .groups = 2,
                       .kept_groups = 1,
                       .group_score = GroupScore::kTwoBest};
  expect_wrong(choosing(rule, {1, -2, 1, 1}), {2}, {0});
}

TEST(MoeReference, ForgivesNoMoreWithinAGroupThanWithout) {
  RouteRule alone{.top_k = 1, .score = Score::kSoftmaxOfChosen};
  RouteRule grouped = alone;
  grouped.groups = 2;
  int forgiven = 0;
  for (int ulps = 1; ulps < 100; ++ulps) {
    const float better = 1 + static_cast<float>(ulps) * kUlp;
    const auto wrong = [](const Mixture& mixture) {
      return !reference_of(mixture, DType::kF32, {1}, {1}).wrong_routes.empty();
    };
    const bool without = wrong(choosing(alone, {better, 1}));
    if (!without) ++forgiven;
    EXPECT_LE(without, wrong(choosing(grouped, {better, 1, better - kUlp, -9}))) << ulps;
  }
  EXPECT_GT(forgiven, 0);
  EXPECT_LT(forgiven, 90);
}

TEST(MoeReference, FillsGroupsThatNoExpertIsChosenFrom) {
  // Two of three groups stay; the chosen come from group 0, and what is kept beside it must not
  // hold a better expert: group 1 does, group 2, equal to it, doesn't.
  const RouteRule rule{.top_k = 2,
                       .score = Score::kSoftmaxOfChosen,
                       .groups = 3,
                       .kept_groups = 2,
                       .group_score = GroupScore::kTwoBest};
  EXPECT_EQ(reference_of(choosing(rule, {5, 3, 4, -2, 1, 1}), DType::kF32, {1}, {0, 1}).near_ties,
            1);
  expect_wrong(choosing(rule, {5, 3, 4, -1.5F, 1, 1}), {0, 2}, {0, 1});
}

TEST(MoeReference, LeavesATokenWithNanToItself) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Mixture mixture = choosing({.top_k = 2, .normalize = true}, {1, 2, 3});
  const MoeReferenceResult result =
      reference_of(mixture, DType::kBf16, {1, nan, 1}, {2, 1, 0, 2, 1, 2});
  EXPECT_THAT(result.wrong_routes, IsEmpty());
  EXPECT_TRUE(std::isnan(result.y[1]));
  EXPECT_EQ(result.bound[1], HUGE_VAL);
  EXPECT_TRUE(std::isfinite(result.bound[0]));
  EXPECT_EQ(result.y[0], result.y[2]);
  EXPECT_EQ(reference_of(mixture, DType::kBf16, {nan}).ids, (std::vector<std::int32_t>{0, 1}));
}

TEST(MoeReference, ChoosesAnExpertWhoseScoreIsNanLast) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Mixture mixture = choosing({.top_k = 2, .score = Score::kSoftmaxOfChosen}, {nan, 1, 2});
  EXPECT_THAT(reference_of(mixture, DType::kF32, {1}).ids, ElementsAre(2, 1));
}

// ---- what is read ----

TEST(MoeReference, ReadsOnlyExpertsWithTokensAndAChunkAtATime) {
  plain_layer::Random random(5);
  Mixture mixture;
  mixture.hidden = 40;
  mixture.rule = {.experts = 3, .top_k = 1};
  mixture.router = random.values(120, 0.5, DType::kF32);
  std::fill(mixture.router.begin() + 40, mixture.router.begin() + 80, 0.0F);
  mixture.router_bias = {0, -100, 0};
  for (int e = 0; e < 3; ++e) {
    mixture.experts.push_back(plain_layer::random_layer(random, 40, 20,
                                                        plain_layer::gated(ActivationKind::kSilu),
                                                        plain_layer::Bias::kAll, DType::kBf16));
  }
  const Stored stored(mixture, DType::kBf16);
  const std::vector<float> x = random.values(400, 1, DType::kBf16);
  const MoeReferenceResult whole = reference_moe(stored.spec, stored.source, DType::kBf16, x, 10);
  EXPECT_TRUE(stored.source.was_read("expert0.up"));
  EXPECT_FALSE(stored.source.was_read("expert1.up") || stored.source.was_read("expert1.down.bias"));
  EXPECT_TRUE(stored.source.was_read("expert2.down"));
  for (const std::int64_t bytes : {1, 333, 700}) {
    const Stored again(mixture, DType::kBf16);
    const MoeReferenceResult part =
        reference_moe(again.spec, again.source, DType::kBf16, x, 10, {}, {.chunk_bytes = bytes});
    EXPECT_EQ(part.y, whole.y);
    EXPECT_EQ(part.bound, whole.bound);
    EXPECT_LE(again.source.largest_read(), std::max<std::int64_t>(bytes, 160));
  }
}

TEST(MoeReference, TakesNoTokens) {
  const Mixture mixture = choosing({.top_k = 1}, {1, 2});
  EXPECT_TRUE(reference_of(mixture, DType::kF32, {}).y.empty());
}

// ---- refusals ----

void expect_refused(const MoeSpec& spec, const TensorSource& source, const std::vector<float>& x,
                    const std::vector<std::int32_t>& ids, const std::string& message) {
  try {
    reference_moe(spec, source, DType::kF32, x, 1, ids);
    FAIL() << "expected: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
    EXPECT_THAT(error.what(), testing::HasSubstr(message));
  }
}

TEST(MoeReference, RefusesWhatDoesNotFit) {
  const Stored stored(choosing({.top_k = 1}, {1, 2, 3, 4}), DType::kF32);
  const auto refused = [&](RouteRule rule, const std::string& message) {
    MoeSpec spec = stored.spec;
    spec.route = rule;
    expect_refused(spec, stored.source, {1}, {}, message);
  };
  refused({.experts = 5, .top_k = 1}, "has 4 experts and routes to 5");
  refused({.experts = 4, .top_k = 0}, "chooses 0 of 4 experts");
  refused({.experts = 4, .top_k = 5}, "chooses 5 of 4 experts");
  refused({.experts = 4, .top_k = 1, .groups = 3}, "from 1 of 3 groups");
  refused({.experts = 4, .top_k = 1, .groups = 2, .kept_groups = 3}, "from 3 of 2 groups");
  refused({.experts = 4, .top_k = 3, .groups = 2, .kept_groups = 1}, "chooses 3 of 4");
  expect_refused(stored.spec, stored.source, {1, 2}, {}, "2 values for 1 tokens of width 1");
  expect_refused(stored.spec, stored.source, {1}, {1, 2}, "2 expert ids for 1 tokens of 1");
  MoeSpec spec = stored.spec;
  spec.experts[3].up.name = "expert3.up_proj";
  expect_refused(spec, stored.source, {1}, {}, "tensor expert3.up_proj is missing");
  spec = stored.spec;
  spec.router.name = "expert0.up";
  expect_refused(spec, stored.source, {1}, {}, "tensor expert0.up has shape [1, 1]");
}

}  // namespace
}  // namespace gatefold
