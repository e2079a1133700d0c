#pragma once

#include <cstdint>
#include <string_view>

namespace gatefold {

/// How files hold weights of which a block shares a scale.
enum class BlockFormat {
  /// X as F8_E4M3 [..., out, in] and X_scale_inv [..., ceil(out / rows), ceil(in / columns)], a
  /// factor in spite of its name (DeepSeek-V3): f32 of the same shape.
  kF8E4M3,
  /// X_blocks as U8 [..., out, in / 32, 16] and X_scales as U8 [..., out, in / 32] (GPT-OSS): bf16
  /// [..., in, out], transposed as its family has plain weights.
  kMxfp4,
};

/// The command line's spelling.
constexpr std::string_view name_of(BlockFormat format) {
  return format == BlockFormat::kF8E4M3 ? "f8_e4m3" : "mxfp4";
}

/// Rows and columns of F8_E4M3 weights that share a scale.
struct BlockSize {
  std::int64_t rows = 128;
  std::int64_t columns = 128;
};

/// As files spell them: types, and what follows the plain weight's name.
inline constexpr std::string_view kF8Type = "F8_E4M3";
inline constexpr std::string_view kF8Scales = "_scale_inv";
inline constexpr std::string_view kMxType = "U8";
inline constexpr std::string_view kMxBlocks = "_blocks";
inline constexpr std::string_view kMxScales = "_scales";

}  // namespace gatefold
