#include "runtime/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace gatefold {
namespace {

TEST(DType, Bf16RoundsToNearestEvenAndKeepsOneNan) {
  EXPECT_EQ(float_to_bf16(1.0F), 0x3f80);
  EXPECT_EQ(float_to_bf16(std::bit_cast<float>(0x3f808000U)), 0x3f80);  // tie to even
  EXPECT_EQ(float_to_bf16(std::bit_cast<float>(0x3f818000U)), 0x3f82);
  EXPECT_EQ(float_to_bf16(std::bit_cast<float>(0x3f808001U)), 0x3f81);
  EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(float_to_bf16(std::bit_cast<float>(0xff800001U)), 0x7fc0);
  EXPECT_EQ(float_to_bf16(std::bit_cast<float>(0x7fffffffU)), 0x7fc0);
}

TEST(DType, EveryBf16SurvivesTheWayThere) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float value = bf16_to_float(static_cast<std::uint16_t>(bits));
    if (std::isnan(value)) continue;
    ASSERT_EQ(float_to_bf16(value), bits);
  }
}

TEST(DType, EveryF16SurvivesTheWayThere) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float value = f16_to_float(static_cast<std::uint16_t>(bits));
    if (std::isnan(value)) continue;
    ASSERT_EQ(float_to_f16(value), bits) << value;
  }
}

TEST(DType, F16RoundsLikeTheNearestNeighbour) {
  // Between neighbours a < b the midpoint goes to the one with an even last bit.
  for (std::uint32_t bits = 0; bits < 0x7bffU; ++bits) {
    const double a = f16_to_float(static_cast<std::uint16_t>(bits));
    const double b = f16_to_float(static_cast<std::uint16_t>(bits + 1));
    const auto middle = static_cast<float>((a + b) / 2);
    ASSERT_EQ(float_to_f16(middle), (bits & 1U) != 0 ? bits + 1 : bits) << bits;
    ASSERT_EQ(float_to_f16(std::nextafter(middle, 1e9F)), bits + 1);
    ASSERT_EQ(float_to_f16(std::nextafter(middle, -1e9F)), bits);
  }
  EXPECT_EQ(float_to_f16(65519.9F), 0x7bff);
  EXPECT_EQ(float_to_f16(65520.0F), 0x7c00);
  EXPECT_EQ(float_to_f16(-1e30F), 0xfc00);
  EXPECT_EQ(float_to_f16(std::numeric_limits<float>::quiet_NaN()), 0x7e00);
}

}  // namespace
}  // namespace gatefold
