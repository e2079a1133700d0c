// What a device does for mixtures of experts, against plain loops: all bits, on any device.
#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "runtime/canonical.h"
#include "runtime/device.h"
#include "runtime/tensor_source.h"
#include "tests/runtime/expert_testing.h"
#include "tests/testing_device.h"

namespace gatefold {
namespace {

using testing::as_size;
using testing::fractions;
using testing::integers;
using testing::OnDevice;
using Bytes = std::vector<std::byte>;

constexpr std::byte kPoison{0xff};  // NaN in every element type
constexpr float kGuard = -77.0F;
constexpr DType kDTypes[] = {DType::kF32, DType::kBf16, DType::kF16};

Bytes in_dtype(const std::vector<float>& values, DType dtype) {
  Bytes bytes(values.size() * as_size(size_of(dtype)));
  convert(DType::kF32, reinterpret_cast<const std::byte*>(values.data()), dtype, bytes.data(),
          std::ssize(values));
  return bytes;
}
std::vector<float> as_floats(const Bytes& bytes, DType dtype) {
  std::vector<float> values(bytes.size() / as_size(size_of(dtype)));
  convert(dtype, bytes.data(), DType::kF32, reinterpret_cast<std::byte*>(values.data()),
          std::ssize(values));
  return values;
}
/// What is left of values in a model dtype.
std::vector<float> rounded(const std::vector<float>& values, DType dtype) {
  return as_floats(in_dtype(values, dtype), dtype);
}
void expect_bits(const std::vector<float>& got, const std::vector<float>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(got[i]), std::bit_cast<std::uint32_t>(expected[i]))
        << got[i] << " instead of " << expected[i] << ", element " << i << " of " << got.size();
  }
}

class ExpertDevice : public ::testing::TestWithParam<int> {
 protected:
  std::unique_ptr<Device> device_ = testing::testing_device(GetParam());
};
INSTANTIATE_TEST_SUITE_P(Threads, ExpertDevice, ::testing::Values(1, 2));

/// `rows` indices below `range`, some of them more than once.
std::vector<std::int32_t> some_rows(std::int64_t rows, std::int64_t range, std::uint32_t seed) {
  std::vector<std::int32_t> index(as_size(rows));
  for (std::int32_t& i : index) {
    i = static_cast<std::int32_t>(testing::step(seed) % static_cast<std::uint32_t>(range));
  }
  return index;
}

TEST_P(ExpertDevice, GathersRowsOfAnyBytes) {
  for (const std::int64_t bytes : {1, 2, 6, 16, 33, 4112}) {
    for (const std::int64_t rows : {0, 1, 7, 40}) {
      Bytes values(as_size(9 * bytes));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::byte(i * 37 + i / 251);
      const std::vector<std::int32_t> index = some_rows(rows, 9, 3);
      OnDevice in(*device_, values);
      OnDevice rows_of(*device_, index);
      OnDevice out(*device_, Bytes(as_size(rows * bytes + 16), kPoison));
      device_->gather_rows(out.data(), in.data(), rows_of.data(), rows, bytes);
      Bytes expected;
      for (const std::int32_t i : index) {
        const auto from = values.begin() + i * bytes;
        expected.insert(expected.end(), from, from + bytes);
      }
      expected.insert(expected.end(), 16, kPoison);
      ASSERT_EQ(out.get(), expected) << rows << " rows of " << bytes << " bytes";
    }
  }
}

struct TiledCase {
  DType model;
  std::int64_t rows, columns;
  bool gathered, scaled;
};

void expect_tiled(Device& device, const TiledCase& c) {
  constexpr std::int64_t kInputs = 11;
  const std::int64_t stride = c.columns + c.columns % 3;
  std::vector<float> x = fractions(std::max(kInputs, c.rows) * stride, 5);
  std::vector<float> scale = fractions(c.rows, 6);
  if (c.scaled && c.rows > 2) {
    scale[1] = std::numeric_limits<float>::quiet_NaN();
    scale[2] = std::numeric_limits<float>::infinity();
    x[0] = -std::numeric_limits<float>::quiet_NaN();
  }
  x = rounded(x, c.model);
  const std::vector<std::int32_t> index = some_rows(c.rows, kInputs, 8);
  OnDevice x_memory(device, in_dtype(x, c.model));
  OnDevice index_memory(device, index);
  OnDevice scale_memory(device, scale);

  const DType kept = device.storage(c.model);
  Tiles tiles{nullptr, c.rows, tile_rows(c.rows, device.tile_heights()),
              round_up(c.columns, kInnerStep)};
  const std::int64_t elements = tiles.padded_rows() * tiles.width;
  OnDevice memory(device, Bytes(as_size(elements * size_of(kept)) + 64, kPoison));
  tiles.data = memory.data();
  device.tile_rows({.data = x_memory.data(),
                    .stride = stride,
                    .index = c.gathered ? index_memory.data() : nullptr,
                    .scale = c.scaled ? scale_memory.data() : nullptr},
                   c.model, c.columns, tiles);

  std::vector<float> expected(as_size(elements));
  for (std::int64_t row = 0; row < c.rows; ++row) {
    const std::int64_t from = c.gathered ? index[as_size(row)] : row;
    for (std::int64_t column = 0; column < c.columns; ++column) {
      const float value = x[as_size(from * stride + column)];
      expected[as_size(row * tiles.width + column)] =
          c.scaled ? round_to(c.model, scale[as_size(row)] * value) : value;
    }
  }
  Bytes got = memory.get();
  const Bytes guard(got.end() - 64, got.end());
  EXPECT_THAT(guard, ::testing::Each(kPoison));
  got.erase(got.end() - 64, got.end());
  expect_bits(as_floats(got, kept), expected);
}

TEST_P(ExpertDevice, TilesRowsThatItGathersAndScales) {
  for (const DType model : kDTypes) {
    for (const std::int64_t columns : {1, 7, 64, 100, 1032}) {
      for (const std::int64_t rows : {0, 1, 3, 17}) {
        for (const int how : {0, 1, 2, 3}) {
          SCOPED_TRACE(std::string(name_of(model)) + ", " + std::to_string(rows) + " x " +
                       std::to_string(columns) + ", way " + std::to_string(how));
          ASSERT_NO_FATAL_FAILURE(
              expect_tiled(*device_, {model, rows, columns, how % 2 != 0, how / 2 != 0}));
        }
      }
    }
  }
}

struct LogitCase {
  DType model = DType::kF32;
  std::int64_t rows = 1;
  std::int64_t hidden = 64;
  std::int64_t outputs = 8;
  bool bias = false;
};

/// x rounded to the model dtype; the guard after the logits is looked at.
std::vector<float> logits_on(Device& device, const LogitCase& c, const std::vector<float>& x,
                             const std::vector<float>& w, const std::vector<float>& bias) {
  OnDevice x_memory(device, in_dtype(x, c.model));
  OnDevice w_memory(device, w);
  OnDevice bias_memory(device, bias);
  OnDevice logits(device, std::vector<float>(as_size(c.rows * c.outputs) + 8, kGuard));
  device.router_logits({.x = x_memory.data(),
                        .model = c.model,
                        .rows = c.rows,
                        .hidden = c.hidden,
                        .weight = w_memory.data(),
                        .bias = c.bias ? bias_memory.data() : nullptr,
                        .outputs = c.outputs,
                        .logits = logits.data()});
  std::vector<float> got = logits.get();
  for (std::size_t i = got.size() - 8; i < got.size(); ++i) EXPECT_EQ(got[i], kGuard);
  got.resize(got.size() - 8);
  return got;
}

void expect_logits(Device& device, const LogitCase& c) {
  const std::vector<float> x = rounded(fractions(c.rows * c.hidden, 3), c.model);
  const std::vector<float> w = fractions(c.outputs * c.hidden, 4);
  const std::vector<float> bias = fractions(c.outputs, 5);
  std::vector<float> expected;
  for (std::int64_t i = 0; i < c.rows * c.outputs; ++i) {
    std::vector<float> products;
    for (std::int64_t column = 0; column < c.hidden; ++column) {
      products.push_back(x[as_size(i / c.outputs * c.hidden + column)] *
                         w[as_size(i % c.outputs * c.hidden + column)]);
    }
    const float sum = testing::plain_lane_sum(products);
    expected.push_back(c.bias ? sum + bias[as_size(i % c.outputs)] : sum);
  }
  expect_bits(logits_on(device, c, x, w, bias), expected);
}

TEST_P(ExpertDevice, SumsLogitsByLanes) {
  for (const DType model : kDTypes) {
    for (const std::int64_t hidden : {1, 31, 40, 520, 521}) {
      for (const std::int64_t outputs : {1, 34}) {
        for (const std::int64_t rows : {0, 1, 3, 19}) {
          SCOPED_TRACE(std::string(name_of(model)) + ", " + std::to_string(rows) + " x " +
                       std::to_string(hidden) + ", " + std::to_string(outputs) + " outputs");
          ASSERT_NO_FATAL_FAILURE(
              expect_logits(*device_, {model, rows, hidden, outputs, rows % 2 != 0}));
        }
      }
    }
  }
  expect_logits(*device_, {DType::kBf16, 2, 64, 1024, true});
}

TEST_P(ExpertDevice, SumsIntegerLogitsExactlyAndGivesNanOnePattern) {
  const LogitCase c{DType::kBf16, 6, 777, 19, true};
  std::vector<float> w = integers(c.outputs * c.hidden, 4);
  const std::vector<float> bias = integers(c.outputs, 5);
  const std::vector<float> x = integers(c.rows * c.hidden, 3);
  std::vector<float> expected;
  for (std::int64_t i = 0; i < c.rows * c.outputs; ++i) {
    std::int64_t sum = static_cast<std::int64_t>(bias[as_size(i % c.outputs)]);
    for (std::int64_t column = 0; column < c.hidden; ++column) {
      sum += static_cast<std::int64_t>(x[as_size(i / c.outputs * c.hidden + column)] *
                                       w[as_size(i % c.outputs * c.hidden + column)]);
    }
    expected.push_back(static_cast<float>(sum));
  }
  expect_bits(logits_on(*device_, c, x, w, bias), expected);

  constexpr std::int64_t kNanOutput = 7;
  w[as_size(kNanOutput * c.hidden + 776)] = std::bit_cast<float>(0xffc12345U);
  for (std::int64_t row = 0; row < c.rows; ++row) {
    expected[as_size(row * c.outputs + kNanOutput)] = std::bit_cast<float>(0x7fc00000U);
  }
  expect_bits(logits_on(*device_, c, x, w, bias), expected);
}

testing::PlainChoice choose_on(Device& device, const RouteRule& rule,
                               const std::vector<float>& logits,
                               const std::vector<float>& correction) {
  const std::int64_t rows = std::ssize(logits) / rule.experts;
  OnDevice logits_memory(device, logits);
  OnDevice correction_memory(device, correction);
  OnDevice ids(device, std::vector<std::int32_t>(as_size(rows * rule.top_k + 8), -77));
  OnDevice weights(device, std::vector<float>(as_size(rows * rule.top_k + 8), kGuard));
  device.choose_experts(rule, logits_memory.data(),
                        correction.empty() ? nullptr : correction_memory.data(), rows, ids.data(),
                        weights.data());
  testing::PlainChoice got{ids.get(), weights.get()};
  for (std::size_t i = got.ids.size() - 8; i < got.ids.size(); ++i) {
    EXPECT_EQ(got.ids[i], -77);
    EXPECT_EQ(got.weights[i], kGuard);
  }
  got.ids.erase(got.ids.end() - 8, got.ids.end());
  got.weights.erase(got.weights.end() - 8, got.weights.end());
  return got;
}

void expect_choices(Device& device, const RouteRule& rule, const std::vector<float>& correction) {
  const std::vector<float> logits = testing::testing_logits(rule.experts, 7);
  const testing::PlainChoice got = choose_on(device, rule, logits, correction);
  for (std::int64_t row = 0; row * rule.experts < std::ssize(logits); ++row) {
    const auto from = logits.begin() + row * rule.experts;
    const testing::PlainChoice expected =
        testing::plain_choice(rule, {from, from + rule.experts}, correction);
    SCOPED_TRACE("row " + std::to_string(row));
    const auto id = got.ids.begin() + row * rule.top_k;
    const std::vector<std::int32_t> ids(id, id + rule.top_k);
    const auto weight = got.weights.begin() + row * rule.top_k;
    ASSERT_EQ(ids, expected.ids);
    ASSERT_NO_FATAL_FAILURE(expect_bits({weight, weight + rule.top_k}, expected.weights));
    EXPECT_EQ(std::set(ids.begin(), ids.end()).size(), ids.size());
    EXPECT_TRUE(std::ranges::all_of(ids, [&](auto i) { return i >= 0 && i < rule.experts; }));
  }
}

TEST_P(ExpertDevice, ChoosesExpertsAsASortWould) {
  for (const RouteRule& rule : testing::testing_rules()) {
    SCOPED_TRACE(std::to_string(rule.top_k) + " of " + std::to_string(rule.experts) + ", " +
                 std::to_string(rule.groups) + " groups, score " +
                 std::to_string(static_cast<int>(rule.score)));
    std::vector<float> correction = fractions(rule.experts, 6);
    ASSERT_NO_FATAL_FAILURE(expect_choices(*device_, rule, correction));
    if (rule.experts > 64) continue;  // stand-ins are slow
    ASSERT_NO_FATAL_FAILURE(expect_choices(*device_, rule, {}));
    for (float& bias : correction) bias -= 1000.0F;
    ASSERT_NO_FATAL_FAILURE(expect_choices(*device_, rule, correction));
  }
}

TEST_P(ExpertDevice, ChoosesNoExpertOfAGroupThatIsNotKept) {
  // Each kept expert's choice is far below 0, and that of the others just a little lower.
  const RouteRule rule{8, 4, Score::kSigmoid, 4, 2, GroupScore::kTwoBest, true, 0.0F, 1.0F};
  const std::vector<float> correction{-50, -50, -40, -40, -50, -50, -41, -41};
  const testing::PlainChoice got =
      choose_on(*device_, rule, std::vector<float>(8, 0.0F), correction);
  EXPECT_EQ(got.ids, (std::vector<std::int32_t>{2, 3, 6, 7}));
  EXPECT_EQ(got.weights, std::vector<float>(4, 0.25F));
}

TEST_P(ExpertDevice, WeighsByHandWhatIsEasyToWeigh) {
  const std::vector<float> zeros(4, 0.0F);
  const auto weights = [&](const RouteRule& rule) {
    return choose_on(*device_, rule, zeros, {}).weights;
  };
  using Weights = std::vector<float>;
  EXPECT_EQ(weights({.experts = 4, .top_k = 2}), Weights(2, 0.25F));
  EXPECT_EQ(weights({.experts = 4, .top_k = 2, .score = Score::kSoftmaxOfChosen}),
            Weights(2, 0.5F));
  EXPECT_EQ(weights({.experts = 4, .top_k = 3, .score = Score::kSigmoid}), Weights(3, 0.5F));
  EXPECT_EQ(weights({.experts = 4, .top_k = 1, .score = Score::kSigmoidOfChosen}),
            Weights(1, 0.5F));
  EXPECT_EQ(weights({.experts = 4, .top_k = 2, .normalize = true, .scaling = 2.5F}),
            Weights(2, 1.25F));
  EXPECT_EQ(
      weights(
          {.experts = 4, .top_k = 2, .score = Score::kSigmoid, .normalize = true, .epsilon = 1.0F}),
      Weights(2, 0.25F));
  // The correction counts for the choice only.
  const testing::PlainChoice got =
      choose_on(*device_, {.experts = 4, .top_k = 2, .score = Score::kSigmoid}, zeros,
                {0.0F, 0.25F, 0.5F, -1.0F});
  EXPECT_EQ(got.ids, (std::vector<std::int32_t>{2, 1}));
  EXPECT_EQ(got.weights, Weights(2, 0.5F));
}

TEST_P(ExpertDevice, ScoresAllLogits) {
  for (const RouteRule& rule : testing::testing_rules()) {
    if (rule.top_k > 1 || rule.groups > 1) continue;  // of which scores know nothing
    SCOPED_TRACE(std::to_string(rule.experts) + ", score " +
                 std::to_string(static_cast<int>(rule.score)));
    const std::vector<float> logits = testing::testing_logits(rule.experts, 7);
    const std::int64_t rows = std::ssize(logits) / rule.experts;
    OnDevice in(*device_, logits);
    OnDevice scores(*device_, std::vector<float>(logits.size() + 8, kGuard));
    OnDevice log_sums(*device_, std::vector<float>(as_size(rows + 8), kGuard));
    device_->score_logits(
        {rule.score, rule.experts, in.data(), rows, scores.data(), log_sums.data()});
    std::vector<float> expected;
    std::vector<float> expected_sums;
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto from = logits.begin() + row * rule.experts;
      const testing::PlainScores plain =
          testing::plain_scores(rule.score, {from, from + rule.experts});
      expected.insert(expected.end(), plain.scores.begin(), plain.scores.end());
      expected_sums.push_back(plain.log_sum);
    }
    expected.insert(expected.end(), 8, kGuard);
    expected_sums.insert(expected_sums.end(), 8, kGuard);
    ASSERT_NO_FATAL_FAILURE(expect_bits(scores.get(), expected));
    ASSERT_NO_FATAL_FAILURE(expect_bits(log_sums.get(), expected_sums));
  }
}

struct WeighCase {
  std::int64_t count, groups;
  bool bias, weights;
};

void expect_weighed(Device& device, const WeighCase& c) {
  const std::int64_t width = c.groups * kGroup;
  const std::int64_t slots = 5 * c.count + 3;
  const std::int64_t group_stride = c.count * kGroup + kGroup;
  const std::vector<float> rows = fractions(c.groups * group_stride, 3);
  const std::vector<float> bias = fractions(width, 4);
  const std::vector<float> weights = fractions(c.count, 5);
  std::vector<float> sums = fractions(slots * width, 6);
  // Row i has slots 5 i … 5 i + 4 of an order that isn't theirs; its last merge may be its target.
  std::uint32_t seed = 7;
  std::vector<std::int32_t> merge_begin{0};
  std::vector<std::int32_t> merges;
  std::vector<std::int32_t> targets;
  for (std::int64_t i = 0; i < c.count; ++i) {
    const auto first = static_cast<std::int32_t>((c.count - 1 - i) * 5);
    const auto many = static_cast<std::int32_t>(testing::step(seed) % 5U);
    for (std::int32_t m = 0; m < many; ++m) merges.push_back(first + 4 - m);
    merge_begin.push_back(static_cast<std::int32_t>(merges.size()));
    targets.push_back(many > 0 && i % 2 == 0 ? merges.back() : first);
  }
  OnDevice rows_memory(device, rows);
  OnDevice bias_memory(device, bias);
  OnDevice weights_memory(device, weights);
  OnDevice begin_memory(device, merge_begin);
  OnDevice merges_memory(device, merges);
  OnDevice targets_memory(device, targets);
  OnDevice sums_memory(device, sums);
  device.weigh_rows({.rows = rows_memory.data(),
                     .count = c.count,
                     .groups = c.groups,
                     .group_stride = group_stride,
                     .bias = c.bias ? bias_memory.data() : nullptr,
                     .weights = c.weights ? weights_memory.data() : nullptr,
                     .merge_begin = begin_memory.data(),
                     .merges = merges_memory.data(),
                     .targets = targets_memory.data(),
                     .sums = sums_memory.data()});

  for (std::int64_t i = 0; i < c.count; ++i) {
    for (std::int64_t column = 0; column < width; ++column) {
      float p = rows[as_size(column / kGroup * group_stride + i * kGroup + column % kGroup)];
      if (c.bias) p = p + bias[as_size(column)];
      if (c.weights) p = weights[as_size(i)] * p;
      for (std::int32_t m = merge_begin[as_size(i)]; m < merge_begin[as_size(i + 1)]; ++m) {
        p = sums[as_size(merges[as_size(m)] * width + column)] + p;
      }
      sums[as_size(targets[as_size(i)] * width + column)] = p;
    }
  }
  expect_bits(sums_memory.get(), sums);
}

TEST_P(ExpertDevice, WeighsRowsAndMergesThemInOrder) {
  for (const std::int64_t count : {0, 1, 5, 70}) {
    for (const std::int64_t groups : {1, 2, 9}) {
      for (const int how : {0, 1, 2, 3}) {
        SCOPED_TRACE(std::to_string(count) + " rows, " + std::to_string(groups) + " groups, way " +
                     std::to_string(how));
        ASSERT_NO_FATAL_FAILURE(
            expect_weighed(*device_, {count, groups, how % 2 != 0, how / 2 != 0}));
      }
    }
  }
}

}  // namespace
}  // namespace gatefold
