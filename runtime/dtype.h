#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string_view>

namespace gatefold {

/// The three element types that layers compute in. Files may hold others: see block_codecs.h.
enum class DType { kF32, kBf16, kF16 };

constexpr std::int64_t size_of(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

/// The command line's spelling: f32, bf16, f16.
constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBf16: return "bf16";
    case DType::kF16: return "f16";
  }
  return "?";
}

constexpr float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// Rounds to nearest even; every NaN becomes the one pattern 0x7fc0, so that bits never depend on
/// which operand a NaN came from.
constexpr std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const bool nan = (bits & 0x7fffffffU) > 0x7f800000U;
  return static_cast<std::uint16_t>(nan ? 0x7fc0U : rounded);
}

/// condition ? a : b in bit operations. Compilers turn `?:` on computed values into branches, which
/// keep loops from being vectorised.
constexpr std::uint32_t select(bool condition, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t mask = 0U - static_cast<std::uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

/// IEEE binary16, exact.
constexpr float f16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
  const std::uint32_t magnitude = bits & 0x7fffU;
  const std::uint32_t normal = (magnitude << 13) + (112U << 23);
  const std::uint32_t infinite = 0x7f800000U | (magnitude << 13);  // or NaN
  // Subnormals are magnitude * 2^-24: the low bits of 0.5, and 0.5 taken away again.
  const float small = std::bit_cast<float>(0x3f000000U | magnitude) - 0.5F;
  const std::uint32_t finite =
      select(magnitude < 0x400U, std::bit_cast<std::uint32_t>(small), normal);
  return std::bit_cast<float>(sign | select(magnitude >= 0x7c00U, infinite, finite));
}

/// Rounds to nearest even with overflow to infinity; every NaN becomes 0x7e00.
constexpr std::uint16_t float_to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  const std::uint32_t normal = (magnitude + 0xfffU + ((magnitude >> 13) & 1U) - (112U << 23)) >> 13;
  // Adding 0.5 leaves a unit in the last place of 2^-24, binary16's smallest step.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
  const std::uint32_t small = std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U;
  const std::uint32_t finite = select(magnitude < 0x38800000U, small, normal);
  const std::uint32_t rounded = select(magnitude >= 0x477ff000U, 0x7c00U, finite) | sign;
  return static_cast<std::uint16_t>(select(magnitude > 0x7f800000U, 0x7e00U, rounded));
}

/// fp32 keeps its bits but for NaN, which becomes the one pattern 0x7fc00000.
constexpr float canonical_nan(float value) {
  return value != value ? std::bit_cast<float>(0x7fc00000U) : value;
}

/// Rounds once to `dtype` and widens back.
constexpr float round_to(DType dtype, float value) {
  switch (dtype) {
    case DType::kBf16: return bf16_to_float(float_to_bf16(value));
    case DType::kF16: return f16_to_float(float_to_f16(value));
    case DType::kF32: break;
  }
  return canonical_nan(value);
}

}  // namespace gatefold
