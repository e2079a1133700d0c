// Tokens' experts added in the order of their tree, against a plain recursion, on any device.
#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <random>
#include <vector>

#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/tensor_source.h"
#include "tests/runtime/expert_testing.h"
#include "tests/testing_device.h"

namespace gatefold {
namespace {

using testing::as_size;
using testing::fractions;
using testing::OnDevice;

using Ids = std::vector<std::int32_t>;

/// The highest bit in which the first and the last id differ.
std::int32_t split_bit(const Ids& ids) {
  const auto differing = static_cast<std::uint32_t>(ids.front() ^ ids.back());
  return static_cast<std::int32_t>(std::bit_floor(differing));
}

/// ids in ascending order; the values that belong to them in the same.
float plain_tree(const Ids& ids, const std::vector<float>& values) {
  if (ids.size() == 1) return values[0];
  const std::int32_t bit = split_bit(ids);
  const auto lower = std::ranges::count_if(ids, [&](auto id) { return (id & bit) == 0; });
  return plain_tree({ids.begin(), ids.begin() + lower}, {values.begin(), values.begin() + lower}) +
         plain_tree({ids.begin() + lower, ids.end()}, {values.begin() + lower, values.end()});
}

/// How many sums are done once each id has been pushed.
void plan_merges(const Ids& ids, std::vector<std::int32_t>& merges) {
  if (ids.size() == 1) return merges.push_back(0);
  const std::int32_t bit = split_bit(ids);
  const auto lower = std::ranges::count_if(ids, [&](auto id) { return (id & bit) == 0; });
  plan_merges({ids.begin(), ids.begin() + lower}, merges);
  plan_merges({ids.begin() + lower, ids.end()}, merges);
  ++merges.back();
}

struct Shared {
  std::vector<float> rows;  // [tokens, row_stride]
  std::vector<float> gate_logits;
};

struct Problem {
  DType dtype = DType::kF32;
  std::int64_t columns = 64;
  std::int64_t first_column = 0;
  std::int64_t row_stride = 64;
  std::vector<Ids> tokens;
  std::vector<Shared> shared;
};

/// What lies where: the roots' rows in an order that isn't theirs.
struct Plan {
  std::vector<std::int32_t> begin{0};
  std::vector<std::int32_t> roots;
  std::vector<std::int32_t> merges;
};

Plan plan_of(const Problem& p) {
  Plan plan;
  for (const Ids& ids : p.tokens) {
    if (!ids.empty()) plan_merges(ids, plan.merges);
    plan.begin.push_back(static_cast<std::int32_t>(plan.merges.size()));
  }
  plan.roots.resize(plan.merges.size());
  std::iota(plan.roots.begin(), plan.roots.end(), 0);
  std::ranges::shuffle(plan.roots, std::minstd_rand(5));
  return plan;
}

std::vector<float> plain_sum(const Problem& p, const Plan& plan, const std::vector<float>& sums,
                             std::int64_t width, std::int64_t token) {
  std::vector<float> result;
  for (std::int64_t c = 0; c < p.columns; ++c) {
    std::vector<float> values;
    for (std::int32_t r = plan.begin[as_size(token)]; r < plan.begin[as_size(token + 1)]; ++r) {
      values.push_back(sums[as_size(plan.roots[as_size(r)] * width + c)]);
    }
    float sum = values.empty() ? 0.0F : plain_tree(p.tokens[as_size(token)], values);
    for (const Shared& shared : p.shared) {
      float value = shared.rows[as_size(token * p.row_stride + p.first_column + c)];
      if (!shared.gate_logits.empty()) {
        value = sigmoid_fp32(shared.gate_logits[as_size(token)]) * value;
      }
      sum = sum + value;
    }
    result.push_back(round_to(p.dtype, sum));
  }
  return result;
}

void expect_combined(Device& device, const Problem& p) {
  const std::int64_t groups = ceil_div(p.columns, kGroup);
  const std::int64_t width = groups * kGroup;
  const auto tokens = std::ssize(p.tokens);
  const Plan plan = plan_of(p);
  const std::vector<float> sums = fractions(std::ssize(plan.roots) * width, 3);
  OnDevice sums_memory(device, sums);
  OnDevice begin(device, plan.begin);
  OnDevice roots(device, plan.roots);
  OnDevice merges(device, plan.merges);
  std::vector<OnDevice<float>> shared_memory;
  shared_memory.reserve(2 * p.shared.size());
  std::vector<SharedRows> shared;
  for (const Shared& one : p.shared) {
    const float* rows = shared_memory.emplace_back(device, one.rows).data();
    OnDevice<float>& gate = shared_memory.emplace_back(device, one.gate_logits);
    shared.push_back({rows, one.gate_logits.empty() ? nullptr : gate.data()});
  }
  const std::int64_t element = size_of(p.dtype);
  OnDevice y(device, std::vector<std::byte>(as_size(tokens * p.row_stride * element) + 64,
                                            std::byte{0xab}));
  device.combine_rows({.sums = sums_memory.data(),
                       .begin = begin.data(),
                       .roots = roots.data(),
                       .merges = merges.data(),
                       .tokens = tokens,
                       .groups = groups,
                       .first_column = p.first_column,
                       .columns = p.columns,
                       .shared = shared,
                       .row_stride = p.row_stride,
                       .dtype = p.dtype,
                       .y = y.data()});
  std::vector<std::byte> expected(as_size(tokens * p.row_stride * element) + 64, std::byte{0xab});
  for (std::int64_t token = 0; token < tokens; ++token) {
    const std::vector<float> row = plain_sum(p, plan, sums, width, token);
    convert(DType::kF32, reinterpret_cast<const std::byte*>(row.data()), p.dtype,
            expected.data() + (token * p.row_stride + p.first_column) * element, p.columns);
  }
  const std::vector<std::byte> got = y.get();
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i], expected[i]) << "byte " << i << " of " << got.size();
  }
}

/// `tokens` tokens with up to 32 of `experts`; the first one has none, the second all 11 that wait
/// for each other.
std::vector<Ids> some_tokens(std::int64_t tokens, std::int32_t experts) {
  std::minstd_rand random(7);
  std::vector<Ids> all;
  for (std::int64_t t = 0; t < tokens; ++t) {
    Ids ids(as_size(experts));
    std::iota(ids.begin(), ids.end(), 0);
    std::ranges::shuffle(ids, random);
    ids.resize(std::min<std::size_t>(ids.size(), t == 0 ? 0 : random() % 33));
    std::ranges::sort(ids);
    if (t == 1 && experts == 1024) ids = {0, 512, 768, 896, 960, 992, 1008, 1016, 1020, 1022, 1023};
    all.push_back(ids);
  }
  return all;
}

std::vector<Shared> some_shared(std::int64_t many, std::int64_t tokens, std::int64_t stride) {
  std::vector<Shared> shared;
  for (std::uint32_t j = 0; j < many; ++j) {
    shared.push_back({fractions(tokens * stride, 20 + j),
                      j % 2 == 0 ? fractions(tokens, 30 + j) : std::vector<float>{}});
  }
  return shared;
}

class CombineRows : public ::testing::TestWithParam<int> {
 protected:
  std::unique_ptr<Device> device_ = testing::testing_device(GetParam());
};
INSTANTIATE_TEST_SUITE_P(Threads, CombineRows, ::testing::Values(1, 2));

TEST_P(CombineRows, AddsRootsInTreeOrderThenSharedExpertsAndRoundsOnce) {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (const std::int64_t columns : {1, 64, 100, 1031}) {
      for (const std::int64_t first_column : {0, 128}) {
        for (const std::int64_t many : {0, 1, 2}) {
          Problem p;
          p.dtype = dtype;
          p.columns = columns;
          p.first_column = first_column;
          p.row_stride = first_column + columns + columns % 4;
          p.tokens = some_tokens(5, 1024);
          p.shared = some_shared(many, 5, p.row_stride);
          SCOPED_TRACE(std::string(name_of(dtype)) + ", " + std::to_string(columns) +
                       " columns from " + std::to_string(first_column) + ", " +
                       std::to_string(many) + " shared experts");
          ASSERT_NO_FATAL_FAILURE(expect_combined(*device_, p));
        }
      }
    }
  }
}

TEST_P(CombineRows, TakesAnyNumberOfTokensAndExperts) {
  for (const std::int64_t tokens : {0, 1, 2, 70}) {
    for (const std::int32_t experts : {1, 3, 60}) {
      Problem p;
      p.dtype = DType::kBf16;
      p.tokens = some_tokens(tokens, experts);
      ASSERT_NO_FATAL_FAILURE(expect_combined(*device_, p));
    }
  }
  Problem p;
  p.tokens = some_tokens(3, 1024);
  p.shared = some_shared(kMaxShared, 3, p.row_stride);
  ASSERT_NO_FATAL_FAILURE(expect_combined(*device_, p));
}

TEST_P(CombineRows, RefusesMoreSharedExpertsThanAKernelTakes) {
  if (!testing::on_cuda()) GTEST_SKIP() << "a CPU takes any number";
  const std::vector<SharedRows> shared(static_cast<std::size_t>(kMaxShared) + 1);
  try {
    device_->combine_rows({.shared = shared});
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("17 shared experts"));
  }
}

TEST_P(CombineRows, FindsRootsByStepsThatArentRows) {
  const std::int64_t groups = 3;
  const std::vector<float> values = fractions(8 * kGroup, 3);
  OnDevice sums(*device_, values);
  OnDevice begin(*device_, std::vector<std::int32_t>{0, 1, 3});
  OnDevice roots(*device_, std::vector<std::int32_t>{4, 1, 5});  // two of them overlap
  OnDevice merges(*device_, std::vector<std::int32_t>{0, 0, 1});
  OnDevice y(*device_, std::vector<float>(as_size(2 * groups * kGroup)));
  device_->combine_rows({.sums = sums.data(),
                         .begin = begin.data(),
                         .roots = roots.data(),
                         .merges = merges.data(),
                         .tokens = 2,
                         .groups = groups,
                         .root_stride = kGroup,
                         .columns = groups * kGroup,
                         .row_stride = groups * kGroup,
                         .y = reinterpret_cast<std::byte*>(y.data())});
  const std::vector<float> found = y.get();
  for (std::int64_t c = 0; c < groups * kGroup; ++c) {
    EXPECT_EQ(found[as_size(c)], values[as_size(4 * kGroup + c)]);
    EXPECT_EQ(found[as_size(groups * kGroup + c)],
              values[as_size(kGroup + c)] + values[as_size(5 * kGroup + c)]);
  }
}

TEST_P(CombineRows, GivesEveryNanOnePattern) {
  const std::vector<float> nans(64, std::bit_cast<float>(0xffc12345U));
  OnDevice sums(*device_, nans);
  OnDevice begin(*device_, std::vector<std::int32_t>{0, 1});
  OnDevice zero(*device_, std::vector<std::int32_t>{0});
  OnDevice y(*device_, std::vector<std::uint32_t>(64));
  device_->combine_rows({.sums = sums.data(),
                         .begin = begin.data(),
                         .roots = zero.data(),
                         .merges = zero.data(),
                         .tokens = 1,
                         .groups = 1,
                         .columns = 64,
                         .row_stride = 64,
                         .y = reinterpret_cast<std::byte*>(y.data())});
  EXPECT_THAT(y.get(), ::testing::Each(0x7fc00000U));
}

}  // namespace
}  // namespace gatefold
