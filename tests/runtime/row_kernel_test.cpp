// The plain kernel promises an order: each column summed over k from the first to the last, one
// rounding per product and per sum. A scalar loop that does just that must give the same bits.
#include "runtime/row_kernel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "runtime/device.h"

namespace gatefold {
namespace {

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

struct Size {
  std::int64_t rows;
  std::int64_t inputs;
  std::int64_t groups;
  std::int64_t columns() const { return groups * kGroup; }
};

struct Problem {
  std::vector<float> a;  // [rows][inputs], representable in the storage dtype
  std::vector<float> w;  // [columns][inputs], likewise
};

/// Values of many magnitudes; subnormals among them, and results near them, where `scale` is tiny.
Problem problem(const Size& size, DType storage, float scale = 1.0F) {
  Problem p;
  std::uint64_t state = 88172645463325252U;
  const auto fill = [&](std::vector<float>& values, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      const auto mantissa = static_cast<float>(static_cast<std::int64_t>(state >> 40) - (1 << 23));
      const float value = std::ldexp(mantissa, -23 - static_cast<int>(state % 12)) * scale;
      values.push_back(round_to(storage, value));
    }
  };
  fill(p.a, size.rows * size.inputs);
  fill(p.w, size.columns() * size.inputs);
  return p;
}

void put(DType storage, float value, std::vector<std::byte>& bytes, std::int64_t index) {
  if (storage == DType::kBf16) {
    const std::uint16_t narrow = float_to_bf16(value);
    std::memcpy(bytes.data() + 2 * index, &narrow, 2);
  } else {
    std::memcpy(bytes.data() + 4 * index, &value, 4);
  }
}

/// c [rows][ldc] by the kernel, on inputs packed here by the layout that Weight documents.
std::vector<float> by_kernel(const Size& size, DType storage, const Problem& p, std::int64_t ldc) {
  const std::int64_t element = size_of(storage);
  const std::int64_t pair = storage == DType::kBf16 ? 2 : 1;
  std::vector<std::byte> a(as_size(size.rows * size.inputs * element));
  std::vector<std::byte> w(as_size(size.columns() * size.inputs * element));
  for (std::size_t i = 0; i < p.a.size(); ++i) {
    put(storage, p.a[i], a, static_cast<std::int64_t>(i));
  }
  for (std::int64_t column = 0; column < size.columns(); ++column) {
    for (std::int64_t k = 0; k < size.inputs; ++k) {
      const std::int64_t group = column / kGroup * size.inputs * kGroup;
      const std::int64_t index = group + (k / pair * kGroup + column % kGroup) * pair + k % pair;
      put(storage, p.w[as_size(column * size.inputs + k)], w, index);
    }
  }
  std::vector<float> c(as_size(size.rows * ldc), -77.0F);
  plain_gemm(storage, a.data(), size.rows, size.inputs, w.data(), size.groups, c.data(), ldc);
  return c;
}

float by_loop(const Size& size, const Problem& p, std::int64_t row, std::int64_t column) {
  float sum = 0.0F;
  for (std::int64_t k = 0; k < size.inputs; ++k) {
    const float product =
        p.a[as_size(row * size.inputs + k)] * p.w[as_size(column * size.inputs + k)];
    sum = sum + product;
  }
  return sum;
}

class PlainGemm : public ::testing::TestWithParam<DType> {
 protected:
  void expect_the_loops_bits(const Size& size, const Problem& p, std::int64_t ldc) const {
    const std::vector<float> c = by_kernel(size, GetParam(), p, ldc);
    for (std::int64_t r = 0; r < size.rows; ++r) {
      for (std::int64_t column = 0; column < ldc; ++column) {
        const float expected = column < size.columns() ? by_loop(size, p, r, column) : -77.0F;
        const float got = c[as_size(r * ldc + column)];
        if (std::isnan(expected) && std::isnan(got)) continue;
        ASSERT_EQ(std::bit_cast<std::uint32_t>(got), std::bit_cast<std::uint32_t>(expected))
            << size.rows << " rows, " << size.inputs << " inputs, row " << r << ", column "
            << column;
      }
    }
  }
};

TEST_P(PlainGemm, HasTheBitsOfAScalarLoopForOneToNineRows) {
  for (std::int64_t rows = 1; rows <= 9; ++rows) {
    for (const std::int64_t inputs : {32, 64, 160}) {
      for (const std::int64_t groups : {1, 3}) {
        const Size size{rows, inputs, groups};
        const Problem p = problem(size, GetParam());
        expect_the_loops_bits(size, p, size.columns());
        expect_the_loops_bits(size, p, size.columns() + 16);  // and leaves what is between rows
      }
    }
  }
}

TEST_P(PlainGemm, KeepsDenormalInputsAndResults) {
  const Size size{5, 64, 1};
  expect_the_loops_bits(size, problem(size, GetParam(), 0x1p-66F), 64);   // results
  expect_the_loops_bits(size, problem(size, GetParam(), 0x1p-126F), 64);  // inputs
}

TEST_P(PlainGemm, KeepsNanAndInfinityInTheirRowAndColumn) {
  const Size size{6, 32, 2};
  Problem p = problem(size, GetParam());
  p.a[as_size(1 * size.inputs + 3)] = std::numeric_limits<float>::quiet_NaN();
  p.a[as_size(4 * size.inputs)] = std::numeric_limits<float>::infinity();
  p.w[as_size(70 * size.inputs + 31)] = std::numeric_limits<float>::infinity();
  expect_the_loops_bits(size, p, size.columns());
  const std::vector<float> c = by_kernel(size, GetParam(), p, size.columns());
  EXPECT_TRUE(std::isnan(c[as_size(1 * size.columns())]));
  EXPECT_TRUE(std::isinf(c[as_size(4 * size.columns())]));
  EXPECT_TRUE(std::isinf(c[as_size(70)]));
  EXPECT_TRUE(std::isfinite(c[as_size(69)]));
}

TEST_P(PlainGemm, IsNotBlindToTheOrder) {
  // The loop backwards must differ somewhere, or the tests above prove nothing about order.
  const Size size{4, 160, 1};
  const Problem p = problem(size, GetParam());
  Problem backwards = p;
  for (std::int64_t r = 0; r < size.rows; ++r) {
    std::reverse(backwards.a.begin() + r * size.inputs,
                 backwards.a.begin() + (r + 1) * size.inputs);
  }
  for (std::int64_t c = 0; c < size.columns(); ++c) {
    std::reverse(backwards.w.begin() + c * size.inputs,
                 backwards.w.begin() + (c + 1) * size.inputs);
  }
  EXPECT_NE(by_kernel(size, GetParam(), p, 64), by_kernel(size, GetParam(), backwards, 64));
}

INSTANTIATE_TEST_SUITE_P(Storage, PlainGemm, ::testing::Values(DType::kF32, DType::kBf16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

}  // namespace
}  // namespace gatefold
