// Public bug reports of routers and of expert parallelism, as small inputs with the right numbers.
//
// The fixture: a token is [1, id, its own logits, 0 …], router row e picks feature 2 + e, and
// expert e returns exactly 4^e * id in component 0 (silu(32) is 32 in fp32), 0 in all others. So
// y[0] is id * (sum of w_e * 4^e), and every fault of routing, order or scale shows as a number.
#include <gmock/gmock.h>

#include <array>
#include <cmath>

#include "tested_moe.h"

namespace gatefold {
namespace {

using testing::as_floats;
using ::testing::ElementsAreArray;
using testing::in_dtype;
using testing::MemoryMoe;
using testing::MoeTest;
using testing::name_of;
using testing::options_for;
using testing::TestedMoe;

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

struct Token {
  float id;
  std::vector<float> logits;
};

class PowersOfFour {
 public:
  PowersOfFour(std::int64_t experts, const RouteRule& rule) : moe_(shape(experts)) {
    moe_.spec.route = rule;
    moe_.spec.route.experts = experts;
    const std::int64_t h = moe_.spec.hidden_size;
    std::vector<float> router(as_size(experts * h));
    for (std::int64_t e = 0; e < experts; ++e) router[as_size(e * h + 2 + e)] = 1.0F;
    moe_.source.set(moe_.spec.router.name, {experts, h}, router);
    for (std::int64_t e = 0; e < experts; ++e) {
      const FfnSpec& expert = moe_.spec.experts[as_size(e)];
      std::vector<float> gate(as_size(4 * h));
      std::vector<float> up(as_size(4 * h));
      std::vector<float> down(as_size(4 * h));
      for (std::int64_t i = 0; i < 4; ++i) {
        gate[as_size(i * h)] = 32.0F;
        up[as_size(i * h + 1)] = static_cast<float>(std::int64_t{1} << (2 * e)) / 32.0F;
        down[as_size(i)] = 0.25F;
      }
      moe_.source.set(expert.gate->name, {4, h}, gate);
      moe_.source.set(expert.up.name, {4, h}, up);
      moe_.source.set(expert.down.name, {h, 4}, down);
    }
  }

  void set_bias(std::optional<TensorRef>& ref, const std::vector<float>& values) {
    ref.emplace().name = "bias";
    ref->stored_shape = {std::ssize(values)};
    moe_.source.set("bias", {std::ssize(values)}, values);
  }
  MemoryMoe& moe() { return moe_; }

  std::vector<std::byte> x(const std::vector<Token>& tokens, DType dtype) const {
    const std::int64_t h = moe_.spec.hidden_size;
    std::vector<float> values(tokens.size() * as_size(h));
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      float* row = values.data() + t * as_size(h);
      row[0] = 1.0F;
      row[1] = tokens[t].id;
      std::ranges::copy(tokens[t].logits, row + 2);
    }
    return in_dtype(values, dtype);
  }

  /// y[0] of this group's tokens; expects all else to be 0.
  std::vector<float> y(const Grid& grid, const std::vector<Token>& tokens, Range own,
                       DType dtype = DType::kF32,
                       Dispatcher dispatcher = Dispatcher::kAllToAll) const {
    TestedMoe layer(moe_, grid, options_for(dtype, dispatcher));
    const std::vector<float> all = as_floats(layer.forward(x(tokens, dtype), own), dtype);
    const auto h = as_size(moe_.spec.hidden_size);
    std::vector<float> first;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (i % h == 0) {
        first.push_back(all[i]);
      } else {
        EXPECT_EQ(all[i], 0.0F) << "column " << i % h;
      }
    }
    return first;
  }

 private:
  static testing::MoeShape shape(std::int64_t experts) {
    return {.hidden = std::max<std::int64_t>(16, round_up(2 + experts, 2)),
            .intermediate = 4,
            .experts = experts,
            .top_k = 1};
  }
  MemoryMoe moe_;
};

RouteRule rule(std::int64_t top_k, Score score, bool normalize, float scaling = 1.0F) {
  RouteRule made;
  made.top_k = top_k;
  made.score = score;
  made.normalize = normalize;
  made.scaling = scaling;
  return made;
}

class MoeCases : public MoeTest {
 protected:
  /// One token on every grid.
  void expect_first(const PowersOfFour& fixture, const Token& token, double expected,
                    DType dtype = DType::kF32) {
    for_every_grid([&](const Grid& grid) {
      const Range own = split_tokens(1, grid.dp_size())[as_size(grid.dp_index())];
      for (const float y : fixture.y(grid, {token}, own, dtype)) {
        EXPECT_NEAR(y, expected, 1e-5 * expected) << name_of(grid);
      }
    });
  }
};

TEST_F(MoeCases, WeightsAreNormalisedIfTheRuleSaysSo) {
  const Token token{1, {2, 1, 0, -1}};
  expect_first({4, rule(2, Score::kSoftmax, true)}, token, 1.806824);
  expect_first({4, rule(2, Score::kSoftmax, false)}, token, 1.591446);
  expect_first({4, rule(2, Score::kSigmoid, true)}, token, 2.360653);
  expect_first({4, rule(2, Score::kSigmoid, false)}, token, 3.805031);
  expect_first({4, rule(2, Score::kSoftmaxOfChosen, false)}, token, 1.806824);
}

TEST_F(MoeCases, ScalingCountsOnceWithAndWithoutNormalising) {
  const Token token{1, {2, 1, 0, -1}};
  expect_first({4, rule(2, Score::kSoftmax, true, 2.5F)}, token, 4.517061);
  expect_first({4, rule(2, Score::kSoftmax, false, 2.5F)}, token, 3.978614);
}

TEST_F(MoeCases, ACorrectionBiasChoosesAndNeverWeighs) {
  PowersOfFour fixture(4, rule(2, Score::kSigmoid, true));
  fixture.set_bias(fixture.moe().spec.correction_bias, {0, 0.3F, 0, 0.1F});
  expect_first(fixture, {1, {0, 0, 0, 0}}, 34.0);
}

TEST_F(MoeCases, AGroupIsAsGoodAsItsTwoBestOrItsBest) {
  RouteRule grouped = rule(2, Score::kSigmoid, true);
  grouped.groups = 2;
  grouped.kept_groups = 1;
  const Token token{1, std::vector<float>(8, 0.0F)};
  const std::vector<float> bias{0.4F, -0.4F, -0.4F, -0.4F, 0.1F, 0.1F, -0.4F, -0.4F};
  grouped.group_score = GroupScore::kTwoBest;
  PowersOfFour two(8, grouped);
  two.set_bias(two.moe().spec.correction_bias, bias);
  expect_first(two, token, 640.0);
  grouped.group_score = GroupScore::kBest;
  PowersOfFour best(8, grouped);
  best.set_bias(best.moe().spec.correction_bias, bias);
  expect_first(best, token, 2.5);
}

TEST_F(MoeCases, ARoutersOwnBiasIsPartOfItsLogits) {
  PowersOfFour fixture(4, rule(2, Score::kSoftmaxOfChosen, false));
  fixture.set_bias(fixture.moe().spec.router_bias, {5, 0, 0, 0});
  expect_first(fixture, {1, {1, 2, 3, 4}}, 8.509784);
}

TEST_F(MoeCases, LogitsStayFp32InABf16Model) {
  PowersOfFour fixture(2, rule(1, Score::kSoftmax, true));
  std::vector<float> router(2 * 16);
  router[2] = router[16 + 2] = 1.0F;
  router[3] = 0.5F;
  router[16 + 3] = 1.0F;
  fixture.moe().source.set(fixture.moe().spec.router.name, {2, 16}, router);
  // 1 + 2^-10 and 1 + 2^-9: the same number in bf16.
  expect_first(fixture, {3, {1, 0x1p-9F}}, 12.0, DType::kBf16);
}

TEST_F(MoeCases, AWeightOnTheInputIsntOneOnTheOutput) {
  PowersOfFour fixture(1, rule(1, Score::kSigmoidOfChosen, false));
  MemoryMoe& moe = fixture.moe();
  std::vector<float> one(4 * 16);
  one[0] = 1.0F;
  moe.source.set(moe.spec.experts[0].gate->name, {4, 16}, one);
  moe.source.set(moe.spec.experts[0].up.name, {4, 16}, one);
  moe.source.set(moe.spec.experts[0].down.name, {16, 4}, one);
  std::vector<float> x(16);
  x[0] = 2.0F;
  const auto first = [&](const Grid& grid) {
    TestedMoe layer(moe, grid, options_for(DType::kF32));
    const Range own = split_tokens(1, grid.dp_size())[as_size(grid.dp_index())];
    const auto y = as_floats(layer.forward(in_dtype(x, DType::kF32), own), DType::kF32);
    return y.empty() ? std::optional<float>() : std::optional<float>(y.front());
  };
  for_every_grid([&](const Grid& grid) {
    moe.spec.weight_on = WeightOn::kInput;
    EXPECT_NEAR(first(grid).value_or(0.731059F), 0.731059, 1e-6);
    moe.spec.weight_on = WeightOn::kOutput;
    EXPECT_NEAR(first(grid).value_or(1.761594F), 1.761594, 1e-6);
  });
}

TEST_F(MoeCases, OneExpertPerTokenWeighsOneWhereNormalised) {
  const std::vector<Token> tokens{{1, {2, 0, 0, 0}}, {1, {0, 2, 0, 0}}};
  const PowersOfFour normalised(4, rule(1, Score::kSoftmax, true));
  const PowersOfFour plain(4, rule(1, Score::kSoftmax, false));
  const Grid grid(*world_, 1, 1);
  if (world_->size() > 4) return;
  const Range own = split_tokens(2, grid.dp_size())[as_size(grid.dp_index())];
  const auto y = normalised.y(grid, tokens, own);
  const auto z = plain.y(grid, tokens, own);
  for (std::int64_t t = own.begin; t < own.end; ++t) {
    EXPECT_EQ(y[as_size(t - own.begin)], t == 0 ? 1.0F : 4.0F);
    EXPECT_NEAR(z[as_size(t - own.begin)], t == 0 ? 0.711235 : 2.844938, 1e-5);
  }
}

/// Eight tokens, each with one expert: ids 1 … 8, experts in turn.
constexpr std::array<float, 8> kInTokenOrder{1, 8, 48, 256, 5, 24, 112, 512};

std::vector<Token> eight_tokens() {
  std::vector<Token> tokens;
  for (std::size_t i = 0; i < 8; ++i) {
    tokens.push_back({static_cast<float>(i + 1), std::vector<float>(4, 0.0F)});
    tokens.back().logits[i % 4] = 5.0F;
  }
  return tokens;
}

TEST_F(MoeCases, SumsComeHomeToTheirOwnTokensHoweverTokensAreSplit) {
  const PowersOfFour fixture(4, rule(1, Score::kSoftmax, true));
  for_every_grid([&](const Grid& grid) {
    std::vector<std::vector<std::int64_t>> splits{{}};
    splits.emplace_back(as_size(grid.dp_size()), 0).front() = 8;
    if (grid.dp_size() == 4) splits.push_back({5, 2, 1, 0});
    for (const auto& split : splits) {
      const Range own = split_tokens(8, grid.dp_size(), split)[as_size(grid.dp_index())];
      for (const Dispatcher dispatcher : {Dispatcher::kAllToAll, Dispatcher::kAllGather}) {
        const std::vector<float> expected(kInTokenOrder.begin() + own.begin,
                                          kInTokenOrder.begin() + own.end);
        EXPECT_THAT(fixture.y(grid, eight_tokens(), own, DType::kF32, dispatcher),
                    ElementsAreArray(expected))
            << name_of(grid);
      }
    }
  });
}

TEST_F(MoeCases, TokensOfATensorParallelGroupAreRoutedOnce) {
  const PowersOfFour fixture(4, rule(1, Score::kSoftmax, true));
  for_every_grid([&](const Grid& grid) {
    TestedMoe layer(const_cast<PowersOfFour&>(fixture).moe(), grid, options_for(DType::kF32));
    const Range own = split_tokens(8, grid.dp_size())[as_size(grid.dp_index())];
    layer.forward(fixture.x(eight_tokens(), DType::kF32), own);
    std::vector<std::int64_t> rows(as_size(world_->size()));
    rows[as_size(world_->rank())] = layer.moe().routing().rows;
    all_gather<std::int64_t>(*world_, rows);
    std::int64_t all = 0;
    for (const std::int64_t n : rows) all += n;
    EXPECT_EQ(all, 8) << name_of(grid);
  });
}

TEST_F(MoeCases, ExpertsThatDontDivideAndRanksWithoutExpertsAreFine) {
  const PowersOfFour five(5, rule(1, Score::kSoftmax, true));
  expect_first(five, {1, {0, 0, 0, 0, 5}}, 256.0);
  const PowersOfFour three(3, rule(1, Score::kSoftmax, true));
  expect_first(three, {7, {0, 0, 5}}, 7 * 16.0);
}

TEST_F(MoeCases, NothingIsDroppedByDefaultAndWithACapacityTheLastTokenIsWhole) {
  // Negative logits only, which are no reason to drop anything; C = ceil(3 * 2 / 4 * 1) = 2.
  const std::vector<Token> tokens(3, {1, {-1, -2, -3, -4}});
  PowersOfFour fixture(4, rule(2, Score::kSoftmax, false));
  const auto expect = [&](float last) {
    for_every_grid([&](const Grid& grid) {
      const Range own = split_tokens(3, grid.dp_size())[as_size(grid.dp_index())];
      const std::vector<float> y = fixture.y(grid, tokens, own);
      for (std::int64_t t = own.begin; t < own.end; ++t) {
        const float expected = t < 2 ? 1.591446F : last;
        EXPECT_NEAR(y[as_size(t - own.begin)], expected, 1e-5F * expected) << name_of(grid);
      }
    });
  };
  expect(1.591446F);
  for (const DropBy drop : {DropBy::kPosition, DropBy::kProbability}) {
    fixture.moe().spec.capacity = Capacity{.factor = 1, .drop = drop};
    expect(0.0F);
  }
}

TEST_F(MoeCases, OneExpertMayHaveAllTokens) {
  const PowersOfFour fixture(4, rule(1, Score::kSoftmax, true));
  std::vector<Token> tokens;
  for (int i = 1; i <= 300; ++i) tokens.push_back({static_cast<float>(i), {5, 0, 0, 0}});
  for_every_grid([&](const Grid& grid) {
    const Range own = split_tokens(300, grid.dp_size())[as_size(grid.dp_index())];
    const std::vector<float> y = fixture.y(grid, tokens, own);
    for (std::int64_t t = own.begin; t < own.end; ++t) {
      EXPECT_EQ(y[as_size(t - own.begin)], static_cast<float>(t + 1)) << name_of(grid);
    }
  });
}

}  // namespace
}  // namespace gatefold
