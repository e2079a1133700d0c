// The router's logits and choices, by every instruction set of this CPU, against plain loops.
#include "runtime/router_kernels.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "runtime/error.h"
#include "runtime/tensor_source.h"
#include "tests/runtime/expert_testing.h"

namespace gatefold {
namespace {

using testing::as_size;

constexpr float kGuard = -77.0F;

std::vector<VectorIsa> own_isas() {
  std::vector<VectorIsa> isas{VectorIsa::kSse2};
  if (vector_isa() != VectorIsa::kSse2) isas.push_back(VectorIsa::kAvx2);
  if (vector_isa() == VectorIsa::kAvx512) isas.push_back(VectorIsa::kAvx512);
  return isas;
}

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> bits(values.size());
  if (!values.empty()) std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

std::vector<float> logits_of(const std::vector<float>& x, const std::vector<float>& w,
                             std::int64_t rows, std::int64_t hidden, std::int64_t outputs,
                             VectorIsa isa) {
  std::vector<float> logits(as_size(rows * outputs + 8), kGuard);
  LogitRows io;
  io.x = reinterpret_cast<const std::byte*>(x.data());
  io.rows = rows;
  io.hidden = hidden;
  io.weight = w.data();
  io.outputs = outputs;
  io.logits = logits.data();
  for (std::int64_t row = 0; row < rows; row += kLogitRows) {
    for (std::int64_t output = 0; output < outputs; output += kLogitOutputs) {
      sum_logits(io, row, output, isa);
    }
  }
  return logits;
}

TEST(RouterKernels, SumLogitsByLanesInEveryInstructionSet) {
  for (const std::int64_t hidden : {1, 31, 32, 33, 511, 512, 513, 1100}) {
    for (const std::int64_t outputs : {1, 5, 33}) {
      const std::int64_t rows = 13;
      const std::vector<float> x = testing::fractions(rows * hidden, 3);
      const std::vector<float> w = testing::fractions(outputs * hidden, 4);
      std::vector<float> expected;
      for (std::int64_t i = 0; i < rows * outputs; ++i) {
        std::vector<float> products;
        for (std::int64_t c = 0; c < hidden; ++c) {
          products.push_back(x[as_size(i / outputs * hidden + c)] *
                             w[as_size(i % outputs * hidden + c)]);
        }
        expected.push_back(testing::plain_lane_sum(products));
      }
      expected.insert(expected.end(), 8, kGuard);
      for (const VectorIsa isa : own_isas()) {
        EXPECT_EQ(bits_of(logits_of(x, w, rows, hidden, outputs, isa)), bits_of(expected))
            << hidden << " columns, " << outputs << " outputs, isa " << static_cast<int>(isa);
      }
    }
  }
}

TEST(RouterKernels, ChooseAsASortWouldInEveryInstructionSet) {
  for (const RouteRule& rule : testing::testing_rules()) {
    const std::vector<float> logits = testing::testing_logits(rule.experts, 5);
    const std::vector<float> correction = testing::fractions(rule.experts, 6);
    for (const bool corrected : {false, true}) {
      for (std::int64_t row = 0; row * rule.experts < std::ssize(logits); ++row) {
        const float* of_row = logits.data() + row * rule.experts;
        const testing::PlainChoice expected = testing::plain_choice(
            rule, {of_row, of_row + rule.experts}, corrected ? correction : std::vector<float>{});
        for (const VectorIsa isa : own_isas()) {
          std::vector<std::int32_t> ids(as_size(rule.top_k));
          std::vector<float> weights(as_size(rule.top_k));
          choose_for_token(rule, of_row, corrected ? correction.data() : nullptr, ids.data(),
                           weights.data(), isa);
          ASSERT_EQ(ids, expected.ids) << "row " << row << " of " << rule.experts;
          ASSERT_EQ(bits_of(weights), bits_of(expected.weights))
              << "row " << row << " of " << rule.experts << ", score "
              << static_cast<int>(rule.score);
          EXPECT_EQ(std::set<std::int32_t>(ids.begin(), ids.end()).size(), ids.size());
          EXPECT_GE(*std::min_element(ids.begin(), ids.end()), 0);
          EXPECT_LT(*std::max_element(ids.begin(), ids.end()), rule.experts);
        }
      }
    }
  }
}

TEST(RouterKernels, ScoreAllLogitsInEveryInstructionSet) {
  for (const RouteRule& rule : testing::testing_rules()) {
    const std::vector<float> logits = testing::testing_logits(rule.experts, 5);
    for (std::int64_t row = 0; row * rule.experts < std::ssize(logits); ++row) {
      const float* of_row = logits.data() + row * rule.experts;
      const testing::PlainScores expected =
          testing::plain_scores(rule.score, {of_row, of_row + rule.experts});
      for (const VectorIsa isa : own_isas()) {
        std::vector<float> scores(as_size(rule.experts + 1), kGuard);
        float log_sum = kGuard;
        score_token(rule.score, rule.experts, of_row, scores.data(), &log_sum, isa);
        EXPECT_EQ(scores.back(), kGuard);
        scores.pop_back();
        ASSERT_EQ(bits_of(scores), bits_of(expected.scores))
            << "row " << row << " of " << rule.experts << ", score "
            << static_cast<int>(rule.score);
        ASSERT_EQ(bits_of({log_sum}), bits_of({expected.log_sum})) << row << ' ' << rule.experts;
      }
    }
  }
}

TEST(RouterKernels, ScoresAreOneInSumAndLogSumsAreOfTheLogits) {
  constexpr std::int64_t kExperts = 60;
  const std::vector<float> logits = testing::fractions(kExperts, 9);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
  for (const Score score : {Score::kSoftmax, Score::kSoftmaxOfChosen, Score::kSigmoid,
                            Score::kSigmoidOfChosen, Score::kSqrtSoftplus, Score::kSparseMixer}) {
    std::vector<float> scores(as_size(kExperts));
    float log_sum = 0;
    score_token(score, kExperts, logits.data(), scores.data(), &log_sum);
    double all = 0;
    for (const float one : scores) all += static_cast<double>(one);
    EXPECT_NEAR(all, 1, 1e-6) << static_cast<int>(score);
    EXPECT_NEAR(log_sum, std::log(sum), 1e-6 * std::log(sum));
  }
}

TEST(RouterKernels, RefuseRulesThatCannotBe) {
  const RouteRule good{.experts = 64, .top_k = 8, .groups = 8, .kept_groups = 4};
  EXPECT_NO_THROW(check(good));
  const auto code = [&](auto change) {
    RouteRule rule = good;
    change(rule);
    try {
      check(rule);
    } catch (const Error& error) {
      return error.code();
    }
    return ExitCode::kOk;
  };
  EXPECT_EQ(code([](RouteRule& r) { r.experts = 0; }), ExitCode::kData);
  EXPECT_EQ(code([](RouteRule& r) { r.experts = kMaxExperts + 8; }), ExitCode::kData);
  EXPECT_EQ(code([](RouteRule& r) { r.top_k = 0; }), ExitCode::kData);
  EXPECT_EQ(code([](RouteRule& r) { r.top_k = 33; }), ExitCode::kData);
  EXPECT_EQ(code([](RouteRule& r) { r.experts = r.groups = 7; }), ExitCode::kData);
  EXPECT_EQ(code([](RouteRule& r) { r.groups = 7; }), ExitCode::kData);
  EXPECT_EQ(code([](RouteRule& r) { r.groups = 0; }), ExitCode::kData);
  EXPECT_EQ(code([](RouteRule& r) { r.kept_groups = 0; }), ExitCode::kData);
  EXPECT_EQ(code([](RouteRule& r) { r.kept_groups = 9; }), ExitCode::kData);
}

}  // namespace
}  // namespace gatefold
