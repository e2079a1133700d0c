#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "layers/moe_reference.h"
#include "plain_layer.h"
#include "plain_moe.h"

namespace gatefold {
namespace {

using namespace plain_moe;
using plain_layer::Bias;
using plain_layer::gated;
using plain_layer::kDTypes;
using plain_layer::plain;
using plain_layer::Random;

struct Case {
  std::string name;
  RouteRule rule;
  Activation activation = gated(ActivationKind::kSilu);
  WeightOn weight_on = WeightOn::kOutput;
  bool router_bias = false;
  bool correction = false;
  int shared = 0;
  bool shared_gate = false;
  Bias bias = Bias::kNone;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"softmax", {.experts = 5, .top_k = 2}},
      {"normalized, gated shared",
       {.experts = 8, .top_k = 3, .normalize = true},
       {.kind = ActivationKind::kSilu},
       WeightOn::kOutput,
       false,
       false,
       1,
       true},
      {"sigmoid, corrected, in groups",
       {.experts = 16,
        .top_k = 4,
        .score = Score::kSigmoid,
        .groups = 4,
        .kept_groups = 2,
        .group_score = GroupScore::kTwoBest,
        .normalize = true,
        .epsilon = 1e-20F,
        .scaling = 2.5F},
       {.kind = ActivationKind::kSilu},
       WeightOn::kOutput,
       false,
       true,
       1},
      {"softmax in groups, scaled, two shared",
       {.experts = 12, .top_k = 3, .groups = 3, .kept_groups = 2, .scaling = 16},
       {.kind = ActivationKind::kSilu},
       WeightOn::kOutput,
       false,
       false,
       2},
      {"softmax of the chosen, biases",
       {.experts = 8, .top_k = 4, .score = Score::kSoftmaxOfChosen},
       {.kind = ActivationKind::kClampedSwiglu},
       WeightOn::kOutput,
       true,
       false,
       0,
       false,
       Bias::kAll},
      {"weight on the input",
       {.experts = 4, .top_k = 1, .score = Score::kSigmoidOfChosen},
       {.kind = ActivationKind::kSilu},
       WeightOn::kInput,
       false,
       false,
       1},
      {"one plain expert", {.experts = 4, .top_k = 1}, plain(ActivationKind::kRelu)},
      {"sqrtsoftplus, corrected",
       {.experts = 8,
        .top_k = 3,
        .score = Score::kSqrtSoftplus,
        .normalize = true,
        .epsilon = 1e-20F,
        .scaling = 1.5F},
       {.kind = ActivationKind::kSilu},
       WeightOn::kOutput,
       false,
       true,
       0},
      {"sparse mixer",
       {.experts = 8, .top_k = 2, .score = Score::kSparseMixer, .margin = 0.5F},
       {.kind = ActivationKind::kSilu}}};
  return all;
}

Mixture random_mixture(Random& random, const Case& what, std::int64_t hidden, std::int64_t width,
                       DType dtype) {
  Mixture mixture;
  mixture.hidden = hidden;
  mixture.rule = what.rule;
  mixture.weight_on = what.weight_on;
  const double root = std::sqrt(static_cast<double>(hidden));
  mixture.router = random.values(what.rule.experts * hidden, 2 / root, DType::kF32);
  if (what.router_bias) mixture.router_bias = random.values(what.rule.experts, 0.5, DType::kF32);
  if (what.correction) mixture.correction = random.values(what.rule.experts, 0.1, DType::kF32);
  const auto layer = [&] {
    return plain_layer::random_layer(random, hidden, width, what.activation, what.bias, dtype);
  };
  for (std::int64_t e = 0; e < what.rule.experts; ++e) mixture.experts.push_back(layer());
  for (int i = 0; i < what.shared; ++i) mixture.shared.push_back(layer());
  if (what.shared_gate) mixture.shared_gate = random.values(hidden, 2 / root, DType::kF32);
  return mixture;
}

struct Verdict {
  double worst = 0;  // |error| / bound
  std::int64_t outside = 0;
};

Verdict judge(const std::vector<double>& reference, const std::vector<double>& bound,
              const std::vector<float>& found) {
  Verdict verdict;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    const double ratio = std::abs(double{found[i]} - reference[i]) / bound[i];
    verdict.worst = std::max(verdict.worst, ratio);
    if (!(ratio <= 1)) ++verdict.outside;
  }
  return verdict;
}

TEST(MoeReference, AgreesWithNaiveLoopsInDouble) {
  Random random(21);
  for (const Case& what : cases()) {
    const Mixture mixture = random_mixture(random, what, 70, 33, DType::kBf16);
    const std::vector<float> x = random.values(30 * 70, 1, DType::kBf16);
    const MoeReferenceResult result = reference_of(mixture, DType::kBf16, x);
    const auto naive = Naive<double>(mixture, DType::kBf16).run(x);
    EXPECT_EQ(result.ids, naive.ids) << what.name;
    for (std::size_t i = 0; i < naive.weights.size(); ++i) {
      EXPECT_NEAR(result.weights[i], naive.weights[i],
                  1e-14 * std::max(1.0F, mixture.rule.scaling));
    }
    for (std::size_t i = 0; i < naive.y.size(); ++i) {
      EXPECT_NEAR(result.y[i], naive.y[i], 1e-12) << what.name;
    }
  }
}

TEST(MoeReference, HoldsForHonestArithmetic) {
  Random random(22);
  for (const Case& what : cases()) {
    for (const DType dtype : kDTypes) {
      for (const std::int64_t hidden : {48, 512}) {
        const Mixture mixture = random_mixture(random, what, hidden, hidden / 2, dtype);
        const std::vector<float> x = random.values(16 * hidden, 1, dtype);
        const auto honest = Naive<float>(mixture, dtype).run(x);
        const MoeReferenceResult result = reference_of(mixture, dtype, x, honest.ids);
        EXPECT_TRUE(result.wrong_routes.empty()) << what.name;
        const Verdict y = judge(result.y, result.bound, honest.y);
        const Verdict w = judge(result.weights, result.weight_bounds, honest.weights);
        fmt::print("{:40} {:4} {:4}  y {:.3f}  weights {:.3f}  near ties {}\n", what.name,
                   name_of(dtype), hidden, y.worst, w.worst, result.near_ties);
        EXPECT_EQ(y.outside, 0) << what.name << ' ' << name_of(dtype);
        EXPECT_EQ(w.outside, 0) << what.name << ' ' << name_of(dtype);
      }
    }
  }
}

TEST(MoeReference, AddsTheErrorsOfIdenticalExpertsUp) {
  // h = 1.12890625 lies between two numbers of bf16, in each of 456 channels of each of 32 experts;
  // what y loses is lost in all of them.
  Mixture mixture;
  mixture.hidden = 1;
  mixture.rule = {.experts = 32, .top_k = 32};
  mixture.router.resize(32);
  Layer layer{1, 456, plain(ActivationKind::kIdentity), {}, {}, {}, {}, {}, {}};
  layer.up.resize(456, 1.0625F);
  layer.down.resize(456, 1);
  mixture.experts.assign(32, layer);
  const std::vector<float> x = {1.0625F};
  EXPECT_EQ(Naive<float>(mixture, DType::kBf16).run(x).y[0], 512);  // of 456 * 1.125 = 513
  const MoeReferenceResult result = reference_of(mixture, DType::kBf16, x);
  EXPECT_NEAR(result.y[0], 456 * 1.12890625, 1e-9);
  EXPECT_GT(result.bound[0], 456 * 1.12890625 - 512);
  EXPECT_LT(result.bound[0], 2 * (456 * 1.12890625 - 512));
}

/// A row whose product with ones is `target`, but by terms a thousand times as large.
std::vector<float> cancelling(Random& random, std::int64_t width, double target) {
  std::vector<float> row = random.values(width, 1000, DType::kF32);
  for (std::size_t i = 0; i + 1 < row.size(); ++i) target -= double{row[i]};
  row.back() = static_cast<float>(target);
  return row;
}

TEST(MoeReference, CarriesTheErrorsOfLogitsIntoY) {
  Random random(26);
  const std::vector<float> ones(65, 1.0F);
  for (const Score score : {Score::kSoftmax, Score::kSigmoid, Score::kSoftmaxOfChosen,
                            Score::kSigmoidOfChosen, Score::kSqrtSoftplus, Score::kSparseMixer}) {
    for (const bool normalize : {false, true}) {
      const RouteRule rule{
          .experts = 4, .top_k = 3, .score = score, .normalize = normalize, .margin = 0.5F};
      Mixture mixture = random_mixture(random, {"", rule}, 65, 32, DType::kF32);
      mixture.router.clear();
      for (const double target : {0.3, 0.9, 0.6, 0.1}) {
        const std::vector<float> row = cancelling(random, 65, target);
        mixture.router.insert(mixture.router.end(), row.begin(), row.end());
      }
      const auto honest = Naive<float>(mixture, DType::kF32).run(ones);
      const MoeReferenceResult result = reference_of(mixture, DType::kF32, ones, honest.ids);
      EXPECT_TRUE(result.wrong_routes.empty());
      EXPECT_EQ(judge(result.y, result.bound, honest.y).outside, 0);
    }
  }
}

TEST(MoeReference, CarriesTheErrorOfTheSharedGateIntoY) {
  Random random(27);
  const std::vector<float> ones(65, 1.0F);
  const RouteRule rule{.experts = 1, .top_k = 1};
  Mixture mixture = random_mixture(random, {"", rule}, 65, 32, DType::kF32);
  mixture.shared = mixture.experts;
  mixture.shared_gate = cancelling(random, 65, 0.5);
  std::fill(mixture.experts[0].down.begin(), mixture.experts[0].down.end(), 0.0F);
  const auto honest = Naive<float>(mixture, DType::kF32).run(ones);
  const MoeReferenceResult result = reference_of(mixture, DType::kF32, ones);
  EXPECT_EQ(judge(result.y, result.bound, honest.y).outside, 0);
}

TEST(MoeReference, CarriesTheRoundingOfWeighedInputsIntoY) {
  // The inputs are neighbours in bf16; what is left is mostly their roundings'.
  Mixture mixture;
  mixture.hidden = 2;
  mixture.weight_on = WeightOn::kInput;
  mixture.rule = {.experts = 1, .top_k = 1, .score = Score::kSigmoidOfChosen};
  mixture.router = {1, 0};
  mixture.experts = {
      {2, 1, plain(ActivationKind::kIdentity), {}, {1024, -1024}, {1, 0}, {}, {}, {}}};
  const std::vector<float> x = {1, 1.0078125F};
  const auto honest = Naive<float>(mixture, DType::kBf16).run(x);
  const MoeReferenceResult result = reference_of(mixture, DType::kBf16, x);
  EXPECT_EQ(honest.y[0], -8);
  EXPECT_NEAR(result.y[0], -8 * 0.7310586, 1e-5);
  EXPECT_GT(result.bound[0], 8 * (1 - 0.7310586));
  EXPECT_LT(result.bound[0], 7);  // twice 1024 * 0.73 / 256, and little more
}

TEST(MoeReference, FindsNoWrongRouteAmongManyTokensCloseToTies) {
  // Rows of the router come in pairs that differ by an ulp here and there.
  Random random(24);
  for (const Case& what : cases()) {
    Mixture mixture = random_mixture(random, what, 64, 4, DType::kF32);
    for (std::int64_t e = 1; e + 1 < what.rule.experts; e += 2) {
      for (std::int64_t c = 0; c < 64; ++c) {
        mixture.router[at(e + 1, 64, c)] =
            mixture.router[at(e, 64, c)] * (1 + (c % 7 == 0 ? 0x1p-23F : 0.0F));
      }
    }
    if (what.correction) mixture.correction.assign(mixture.correction.size(), 0.0625F);
    if (what.router_bias) mixture.router_bias.assign(mixture.router_bias.size(), 0.5F);
    const std::vector<float> x = random.values(300 * 64, 1, DType::kF32);
    const auto honest = Naive<float>(mixture, DType::kF32).run(x);
    const MoeReferenceResult result = reference_of(mixture, DType::kF32, x, honest.ids);
    fmt::print("{:40} near ties {} of 300\n", what.name, result.near_ties);
    EXPECT_TRUE(result.wrong_routes.empty()) << what.name;
    EXPECT_GT(result.near_ties, 0) << what.name;
    EXPECT_EQ(judge(result.y, result.bound, honest.y).outside, 0) << what.name;
  }
}

// ---- faults lie outside ----

struct Mistake {
  Fault fault;
  const char* name;
  std::size_t shown_by;  // index of cases()
};

constexpr std::array kMistakes = {
    Mistake{Fault::kExpertOffByOne, "expert off by one", 0},
    Mistake{Fault::kNextTokensInput, "combined to the wrong token", 0},
    Mistake{Fault::kScalingTwice, "scaling twice", 2},
    Mistake{Fault::kCorrectionInWeights, "correction in the weights", 2},
    Mistake{Fault::kSharedTwice, "shared expert twice", 2},
    Mistake{Fault::kSharedTwice, "shared experts twice", 3},
    Mistake{Fault::kSharedUngated, "shared expert without its gate", 1},
    Mistake{Fault::kWeightElsewhere, "weight on the output", 5},
    Mistake{Fault::kWeightElsewhere, "weight on the input", 1},
    Mistake{Fault::kOneExpertLost, "one expert lost", 4},
    Mistake{Fault::kNormalizedOtherwise, "not normalized", 1},
    Mistake{Fault::kNormalizedOtherwise, "normalized", 0},
};

TEST(MoeReference, LeavesRoutingMistakesOutsideTheBound) {
  Random random(25);
  for (const Mistake& mistake : kMistakes) {
    for (const DType dtype : kDTypes) {
      Mixture mixture = random_mixture(random, cases()[mistake.shown_by], 128, 96, dtype);
      for (float& weight : mixture.router) weight /= 4;  // weights near 1 would hide some
      const std::vector<float> x = random.values(8 * 128, 1, dtype);
      const auto wrong = Naive<float>(mixture, dtype, mistake.fault).run(x);
      const MoeReferenceResult result = reference_of(mixture, dtype, x, wrong.ids);
      const Verdict verdict = judge(result.y, result.bound, wrong.y);
      const double share = static_cast<double>(verdict.outside) / static_cast<double>(x.size());
      fmt::print("{:40} {:4}  {:.1f} times the bound, {:.0f} % outside\n", mistake.name,
                 name_of(dtype), verdict.worst, 100 * share);
      EXPECT_GT(share, 0.3) << mistake.name << ' ' << name_of(dtype);
      EXPECT_GT(verdict.worst, 4) << mistake.name << ' ' << name_of(dtype);
    }
  }
}

}  // namespace
}  // namespace gatefold
