#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/range.h"

namespace gatefold {

/// Element and scale types of the OCP Microscaling formats and of FP8, which files hold and no
/// layer computes in.

/// FP8 E4M3: exact; no infinities, and 0x7f and 0xff are NaN, as one pattern.
constexpr float f8_e4m3_to_float(std::uint8_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80U) << 24;
  const std::uint32_t magnitude = code & 0x7fU;
  const std::uint32_t normal = (magnitude << 20) + (120U << 23);
  // Subnormals are magnitude * 2^-9: the low bits of 2^14, and 2^14 taken away again.
  const float small = std::bit_cast<float>(0x46800000U | magnitude) - 16384.0F;
  const std::uint32_t finite = select(magnitude < 8, std::bit_cast<std::uint32_t>(small), normal);
  return std::bit_cast<float>(select(magnitude == 0x7fU, 0x7fc00000U, sign | finite));
}

/// The nearest FP8 E4M3, ties to even: 448 beyond it, infinities included, and 0x7f for NaN.
constexpr std::uint8_t float_to_f8_e4m3(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  const std::uint32_t rounded = (magnitude + 0x7ffffU + ((magnitude >> 20) & 1U)) >> 20;
  const std::uint32_t normal = std::min(rounded - (120U << 3), 0x7eU);
  // Below 2^-6: 2^14 has units of 2^-9.
  const float shifted = std::bit_cast<float>(magnitude) + 16384.0F;
  const std::uint32_t small = std::bit_cast<std::uint32_t>(shifted) - 0x46800000U;
  const std::uint32_t finite = select(magnitude < 0x3c800000U, small, normal);
  return static_cast<std::uint8_t>(sign | select(magnitude > 0x7f800000U, 0x7fU, finite));
}

/// FP4 E2M1, of the low four bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
constexpr float f4_e2m1_to_float(unsigned code) {
  const std::uint32_t sign = (code & 8U) << 28;
  const std::uint32_t magnitude = code & 7U;
  const std::uint32_t half = (0U - magnitude) & 0x3f000000U;  // of 0 and 1
  return std::bit_cast<float>(sign | select(magnitude < 2, half, (magnitude << 22) + (126U << 23)));
}

/// The nearest FP4 E2M1 of a number, ties to even: 6 beyond it, infinities included.
constexpr unsigned float_to_f4_e2m1(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 28) & 8U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  const std::uint32_t rounded = (magnitude + 0x1fffffU + ((magnitude >> 22) & 1U)) >> 22;
  const std::uint32_t normal = std::min(rounded - (126U << 1), 7U);
  // Below 1: 2^22 has units of 0.5.
  const float shifted = std::bit_cast<float>(magnitude) + 4194304.0F;
  const std::uint32_t small = std::bit_cast<std::uint32_t>(shifted) - 0x4a800000U;
  return sign | select(magnitude < 0x3f800000U, small, normal);
}

/// E8M0: 2^(code - 127); 255 is NaN.
constexpr float f8_e8m0_to_float(std::uint8_t code) {
  const std::uint32_t power = code == 0 ? 0x00400000U : static_cast<std::uint32_t>(code) << 23;
  return std::bit_cast<float>(code == 255 ? 0x7fc00000U : power);
}

/// Part of a row of FP8 weights: columns `cols`, whose codes are codes[0] on. Each block of `block`
/// columns, counted from the row's start, has one scale; scales[0] is that of the first column's.
/// out[i] = code * scale, rounded once to fp32; every NaN is the one pattern.
void decode_f8_e4m3(const std::byte* codes, Range cols, std::int64_t block, const float* scales,
                    float* out);

/// Elements that share a scale in MXFP4, and the bytes that they take.
inline constexpr std::int64_t kMxGroup = 32;
inline constexpr std::int64_t kMxGroupBytes = 16;

/// `groups` groups of MXFP4 weights to bf16 [groups * 32]: E2M1 * E8M0, which is exact but for an
/// overflow to infinity. A byte's low half comes first.
void decode_mxfp4(const std::byte* codes, const std::byte* scales, std::int64_t groups,
                  std::uint16_t* out);

/// 32 rows of 32 elements, `in_step` apart, turned: 32 columns, `out_step` apart.
void transpose_group(const std::uint16_t* in, std::int64_t in_step, std::uint16_t* out,
                     std::int64_t out_step);

}  // namespace gatefold
