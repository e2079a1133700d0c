#include "runtime/block_quantiser.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <utility>

#include "runtime/block_codecs.h"
#include "runtime/error.h"
#include "runtime/quoted_name.h"

namespace gatefold {
namespace {

constexpr float kMostF8 = 448.0F;
constexpr float kMostF4 = 6.0F;
/// Columns of a plain weight that become rows of MXFP4 at a time.
constexpr std::int64_t kBand = 64;

/// Of |values|, whose bits are in their order: NaN comes after infinity.
float largest_of(const float* values, std::int64_t n, float before) {
  auto largest = std::bit_cast<std::uint32_t>(before);
  for (std::int64_t i = 0; i < n; ++i) {
    largest = std::max(largest, std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffU);
  }
  return std::bit_cast<float>(largest);
}

void append(std::vector<std::byte>& bytes, float scale) {
  const auto more = std::bit_cast<std::array<std::byte, sizeof(scale)>>(scale);
  bytes.insert(bytes.end(), more.begin(), more.end());
}

}  // namespace

float block_scale(float largest, float most) {
  constexpr int kLeast = -126;  // normal in fp32 and in E8M0
  if (largest == 0.0F) return 1.0F;
  int exponent = std::max(std::ilogb(largest) - std::ilogb(most), kLeast);
  if (std::ldexp(most, exponent) < largest) ++exponent;
  return std::ldexp(1.0F, exponent);
}

BlockQuantiser::BlockQuantiser(const TensorSource& source, std::string name, BlockFormat format,
                               BlockSize block)
    : source_(&source), name_(std::move(name)), format_(format), block_(block) {
  shape_ = source.find(name_).value().shape;
  const std::size_t n = shape_.size();
  const bool fits = n >= 2 && (format == BlockFormat::kF8E4M3 || shape_[n - 2] % kMxGroup == 0);
  if (!fits) {
    throw Error(
        ExitCode::kUsage,
        fmt::format("tensor {} of shape [{}] can't be stored as {} ({}); choose other sizes "
                    "or a plain type",
                    quoted_name(name_), fmt::join(shape_, ","), name_of(format),
                    n < 2 ? std::string("only matrices have blocks")
                          : fmt::format("{} inputs share a scale, and {} are no multiple", kMxGroup,
                                        shape_[n - 2])));
  }
  rows_ = shape_[n - 2];
  columns_ = shape_[n - 1];
  for (std::size_t i = 0; i + 2 < n; ++i) matrices_ *= shape_[i];
}

SafetensorsWriter::Tensor BlockQuantiser::codes() const {
  if (format_ == BlockFormat::kF8E4M3) return {name_, std::string(kF8Type), shape_};
  std::vector<std::int64_t> shape(shape_.begin(), shape_.end() - 2);
  shape.insert(shape.end(), {columns_, rows_ / kMxGroup, kMxGroupBytes});
  return {name_ + std::string(kMxBlocks), std::string(kMxType), shape};
}

SafetensorsWriter::Tensor BlockQuantiser::scales() const {
  std::vector<std::int64_t> shape(shape_.begin(), shape_.end() - 2);
  if (format_ == BlockFormat::kF8E4M3) {
    shape.insert(shape.end(), {ceil_div(rows_, block_.rows), ceil_div(columns_, block_.columns)});
    return {name_ + std::string(kF8Scales), "F32", shape};
  }
  shape.insert(shape.end(), {columns_, rows_ / kMxGroup});
  return {name_ + std::string(kMxScales), std::string(kMxType), shape};
}

std::vector<std::byte> BlockQuantiser::write(const Sink& codes) const {
  return format_ == BlockFormat::kF8E4M3 ? write_f8(codes) : write_mxfp4(codes);
}

void BlockQuantiser::require_finite(float largest) const {
  if (std::isfinite(largest)) return;
  throw Error(ExitCode::kData,
              fmt::format("tensor {} has {} among its weights (no scale fits it); choose a plain "
                          "type for {}",
                          quoted_name(name_), largest, source_->description()));
}

std::vector<std::byte> BlockQuantiser::write_f8(const Sink& codes) const {
  std::vector<std::byte> scales;
  std::vector<float> values;
  std::vector<std::byte> made;
  for (std::int64_t at = 0; at < matrices_ * rows_;) {
    const std::int64_t n = std::min(block_.rows, rows_ - at % rows_);
    values.resize(static_cast<std::size_t>(n * columns_));
    made.resize(values.size());
    read_as_float(*source_, name_, {at, at + n}, {0, columns_}, values.data());
    for (std::int64_t column = 0; column < columns_; column += block_.columns) {
      const std::int64_t width = std::min(block_.columns, columns_ - column);
      float largest = 0;
      for (std::int64_t r = 0; r < n; ++r) {
        largest = largest_of(values.data() + r * columns_ + column, width, largest);
      }
      require_finite(largest);
      const float scale = block_scale(largest, kMostF8);
      const float inverse = 1 / scale;
      append(scales, scale);
      for (std::int64_t r = 0; r < n; ++r) {
        const float* in = values.data() + r * columns_ + column;
        std::byte* out = made.data() + r * columns_ + column;
        for (std::int64_t i = 0; i < width; ++i) {
          out[i] = static_cast<std::byte>(float_to_f8_e4m3(in[i] * inverse));
        }
      }
    }
    codes(made);
    at += n;
  }
  return scales;
}

std::vector<std::byte> BlockQuantiser::write_mxfp4(const Sink& codes) const {
  std::vector<std::byte> scales;
  std::vector<float> values;  // [inputs, a band of outputs]
  std::vector<std::byte> made;
  for (std::int64_t matrix = 0; matrix < matrices_; ++matrix) {
    for (std::int64_t column = 0; column < columns_; column += kBand) {
      const std::int64_t band = std::min(kBand, columns_ - column);
      values.resize(static_cast<std::size_t>(rows_ * band));
      read_as_float(*source_, name_, {matrix * rows_, (matrix + 1) * rows_},
                    {column, column + band}, values.data());
      made.clear();
      for (std::int64_t j = 0; j < band; ++j) {
        for (std::int64_t row = 0; row < rows_; row += kMxGroup) {
          std::array<float, kMxGroup> group;
          for (std::size_t i = 0; i < group.size(); ++i) {
            const std::int64_t at = (row + static_cast<std::int64_t>(i)) * band + j;
            group[i] = values[static_cast<std::size_t>(at)];
          }
          const float largest = largest_of(group.data(), kMxGroup, 0);
          require_finite(largest);
          const float scale = block_scale(largest, kMostF4);
          const float inverse = 1 / scale;
          scales.push_back(static_cast<std::byte>(std::ilogb(scale) + 127));
          for (std::size_t i = 0; i < group.size(); i += 2) {
            made.push_back(static_cast<std::byte>(float_to_f4_e2m1(group[i] * inverse) |
                                                  float_to_f4_e2m1(group[i + 1] * inverse) << 4));
          }
        }
      }
      codes(made);
    }
  }
  return scales;
}

}  // namespace gatefold
