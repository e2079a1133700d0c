#pragma once

#include <bit>
#include <cstdint>

#include "runtime/dtype.h"

// fp32, one IEEE rounding per +, -, *, /; selects instead of branches; no call into libm: a loop
// over these has the same bits in every vector width, in its scalar tail and on a GPU. Compile with
// -ffp-contract=off (nvcc: -fmad=false --expt-relaxed-constexpr).
//
// Largest errors found against the exact function of the fp32 input, in units of the result's last
// place, from the largest input to the last subnormal result: exp 1.0, sigmoid 2.5, log 2.0,
// square root of softplus 2.2.

namespace gatefold {

constexpr float select(bool condition, float a, float b) {
  return std::bit_cast<float>(
      select(condition, std::bit_cast<std::uint32_t>(a), std::bit_cast<std::uint32_t>(b)));
}

/// Unlike std::min and std::max these take values, which compilers fold to one instruction.
template <typename Integer>
constexpr Integer smaller(Integer a, Integer b) {
  return a < b ? a : b;
}
template <typename Integer>
constexpr Integer larger(Integer a, Integer b) {
  return a > b ? a : b;
}

constexpr bool sign_bit(float value) { return std::bit_cast<std::int32_t>(value) < 0; }

/// value * 2^exponent, where value and result are normal.
constexpr float add_exponent(float value, std::int32_t exponent) {
  return std::bit_cast<float>(std::bit_cast<std::int32_t>(value) + (exponent << 23));
}

/// 2^exponent for -127 < exponent < 128, and 0 for -127.
constexpr float power_of_two(std::int32_t exponent) {
  return std::bit_cast<float>((exponent + 127) << 23);
}

/// exp(x) = significand * 2^exponent, with a significand in [0.7, 1.42].
struct ExpParts {
  float significand;
  std::int32_t exponent;
};

/// exp(x - correction) for |x| <= 157.5, where |exponent| is 227 at most, or NaN; |correction| is
/// below 0.01.
constexpr ExpParts exp_parts(float x, float correction) {
  constexpr float kLog2E = 0x1.715476p0F;
  constexpr float kLn2High = 0x1.62e4p-1F;  // 16 bits, so that n * kLn2High is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20F;
  constexpr float kRounder = 0x1.8p23F;  // adding it leaves an integer in the low bits
  const float shifted = x * kLog2E + kRounder;
  const float n = shifted - kRounder;
  const float r = ((x - n * kLn2High) - n * kLn2Low) - correction;
  float p = 0x1.6a2408p-10F;
  p = p * r + 0x1.1239fep-7F;
  p = p * r + 0x1.5558f2p-5F;
  p = p * r + 0x1.555492p-3F;
  p = p * r + 0x1.fffffcp-2F;
  p = ((p * r) * r + r) + 1.0F;
  return {p, std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kRounder)};
}

/// Into [low, high], low < 0 < high, by comparing bits: one instruction each. NaN gives a bound.
constexpr float bound_by_bits(float x, float low, float high) {
  const std::int32_t capped =
      smaller(std::bit_cast<std::int32_t>(x), std::bit_cast<std::int32_t>(high));
  return std::bit_cast<float>(
      smaller(static_cast<std::uint32_t>(capped), std::bit_cast<std::uint32_t>(low)));
}

constexpr float exp_fp32(float x) {
  const ExpParts e = exp_parts(bound_by_bits(x, -105.0F, 89.0F), 0.0F);
  const std::int32_t normal = smaller(larger(e.exponent, -125), 127);
  const float scaled = add_exponent(e.significand, normal) * power_of_two(e.exponent - normal);
  return select(x != x, x, scaled);
}

/// z / (1 + exp(x)), that is z * sigmoid(-x), for x that is NaN only where z is. Where exp(x) would
/// overflow both summands are scaled by a power of two, so that results keep their precision down
/// to the last subnormal; from x = 157 on the scale, and with it the sigmoid, is 0.
constexpr float over_one_plus_exp(float z, float x) {
  const ExpParts e = exp_parts(bound_by_bits(x, -69.0F, 157.5F), 0.0F);
  const std::int32_t bounded = smaller(e.exponent, 100);
  const float scale = power_of_two(bounded - e.exponent);
  return z / (scale + add_exponent(e.significand, bounded)) * scale;
}

/// log(x) for a normal x > 0, or NaN.
constexpr float log_fp32(float x) {
  constexpr float kLn2High = 0x1.62e4p-1F;  // 16 bits, so that n * kLn2High is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20F;
  constexpr std::int32_t kRootOfHalf = 0x3f3504f3;
  const auto bits = std::bit_cast<std::int32_t>(x);
  const std::int32_t exponent = (bits - kRootOfHalf) >> 23;
  const float m = std::bit_cast<float>(bits - (exponent << 23));  // in [0.707, 1.415)
  // log(m) = 2 (f + f^3 / 3 + f^5 / 5 + ...), f = (m - 1) / (m + 1)
  const float f = (m - 1.0F) / (m + 1.0F);
  const float square = f * f;
  float p = 0x1.c71c72p-4F;
  p = p * square + 0x1.24924ap-3F;
  p = p * square + 0x1.99999ap-3F;
  p = p * square + 0x1.555556p-2F;
  const float twice = f + f;
  const auto n = static_cast<float>(exponent);
  const float low = twice * (p * square) + n * kLn2Low;
  return select(x != x, x, n * kLn2High + (twice + low));
}

constexpr float sigmoid_fp32(float t) { return over_one_plus_exp(select(t != t, t, 1.0F), -t); }

/// log(1 + t) for t in [0, 1] or NaN: twice artanh(t / (2 + t)), by its series.
constexpr float log_one_plus(float t) {
  const float z = t / (2.0F + t);
  const float square = z * z;
  float p = 0x1.3b13b2p-4F;  // 1 / 13
  p = p * square + 0x1.745d18p-4F;
  p = p * square + 0x1.c71c72p-4F;
  p = p * square + 0x1.24924ap-3F;
  p = p * square + 0x1.99999ap-3F;
  p = p * square + 0x1.555556p-2F;
  const float twice = z + z;
  return twice + twice * (square * p);
}

/// The square root of a normal number, of infinity or of NaN; three of Heron's steps from a guess
/// that halves the exponent.
constexpr float sqrt_of_normal(float x) {
  float r = std::bit_cast<float>((std::bit_cast<std::int32_t>(x) >> 1) + 0x1fbb67a9);
  for (int i = 0; i < 3; ++i) r = 0.5F * (r + x / r);
  return select(x > 0x1.fffffep127F, x, r);
}

/// sqrt(log(1 + exp(x))). Below -20 that is exp(x / 2) to fp32's precision, and no subnormal comes
/// in between.
constexpr float sqrt_softplus_fp32(float x) {
  const bool positive = x > 0.0F;
  const float softplus =
      select(positive, x, 0.0F) + log_one_plus(exp_fp32(select(positive, -x, x)));
  return select(x < -20.0F, exp_fp32(0.5F * x), sqrt_of_normal(softplus));
}

}  // namespace gatefold
