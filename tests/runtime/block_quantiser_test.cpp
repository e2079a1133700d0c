#include "runtime/block_quantiser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "runtime/block_codecs.h"
#include "runtime/checkpoint.h"
#include "runtime/dequantised_source.h"
#include "tests/runtime/file_testing.h"

namespace gatefold {
namespace {

using testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// ---- codes ----

/// Each positive code's number comes back, what lies half way between two goes to the even one, and
/// what lies beside half way to the nearer one.
template <typename Decode, typename Encode>
void expect_nearest(unsigned most, unsigned sign, Decode decode, Encode encode) {
  for (unsigned code = 0; code <= most; ++code) {
    const float value = decode(code);
    EXPECT_EQ(encode(value), code);
    EXPECT_EQ(encode(-value), code | sign);
    if (code == most) continue;
    const float half = (value + decode(code + 1)) / 2;
    EXPECT_EQ(encode(half), code + code % 2) << half;
    EXPECT_EQ(encode(std::nextafter(half, 0.0F)), code);
    EXPECT_EQ(encode(-std::nextafter(half, kInfinity)), (code + 1) | sign);
  }
  for (const float beyond : {1.01F, 1.2F, 1e6F, kInfinity}) {
    EXPECT_EQ(encode(decode(most) * beyond), most);
    EXPECT_EQ(encode(-decode(most) * beyond), most | sign);
  }
}

TEST(BlockQuantiser, E4m3IsTheNearestAndTiesGoToTheEvenCode) {
  expect_nearest(
      0x7e, 0x80, [](unsigned code) { return f8_e4m3_to_float(static_cast<std::uint8_t>(code)); },
      [](float value) { return static_cast<unsigned>(float_to_f8_e4m3(value)); });
  EXPECT_EQ(float_to_f8_e4m3(kNaN) & 0x7f, 0x7f);
}

TEST(BlockQuantiser, E2m1IsTheNearestAndTiesGoToTheEvenCode) {
  expect_nearest(
      7, 8, [](unsigned code) { return f4_e2m1_to_float(code); },
      [](float value) { return float_to_f4_e2m1(value); });
}

TEST(BlockQuantiser, AScaleIsTheSmallestPowerOfTwoThatHoldsTheLargest) {
  EXPECT_EQ(block_scale(0, 448), 1.0F);
  EXPECT_EQ(block_scale(448, 448), 1.0F);
  EXPECT_EQ(block_scale(std::nextafter(448.0F, 449.0F), 448), 2.0F);
  EXPECT_EQ(block_scale(224, 448), 0.5F);
  EXPECT_EQ(block_scale(6, 6), 1.0F);
  EXPECT_EQ(block_scale(6.5F, 6), 2.0F);
  EXPECT_EQ(block_scale(3, 6), 0.5F);
  EXPECT_EQ(block_scale(4, 6), 1.0F);
  EXPECT_EQ(block_scale(1e-42F, 6), 0x1p-126F) << "none is subnormal";
  EXPECT_EQ(block_scale(std::numeric_limits<float>::max(), 6), 0x1p126F);
}

// ---- weights ----

/// One tensor "w" in memory.
class OneTensor final : public TensorSource {
 public:
  OneTensor(std::vector<std::int64_t> shape, std::vector<float> values)
      : info_{DType::kF32, std::move(shape)}, values_(std::move(values)) {}

  std::optional<TensorInfo> find(const std::string& name) const override {
    return name == "w" ? std::optional(info_) : std::nullopt;
  }
  void read(const std::string&, Range rows, Range cols, std::byte* out) const override {
    const std::int64_t columns = extent_of(info_.shape).columns;
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
      const auto bytes = static_cast<std::size_t>(cols.size()) * sizeof(float);
      std::memcpy(out, values_.data() + r * columns + cols.begin, bytes);
      out += bytes;
    }
  }
  std::string description() const override { return "memory"; }
  const std::vector<float>& values() const { return values_; }

 private:
  TensorInfo info_;
  std::vector<float> values_;
};

class Quantiser : public testing::Test, protected TestFolder {
 protected:
  Quantiser() : TestFolder("quantiser") {}

  /// `weight` in a file, as it is read from there.
  std::vector<float> there_and_back(const OneTensor& weight, BlockFormat format,
                                    BlockSize block = {}) const {
    const BlockQuantiser quantiser(weight, "w", format, block);
    {
      SafetensorsWriter writer(path("model.safetensors"), {quantiser.codes(), quantiser.scales()});
      const std::vector<std::byte> scales =
          quantiser.write([&](std::span<const std::byte> codes) { writer.append(codes); });
      writer.append(scales);
      writer.finish();
    }
    const std::string file = path("x");
    const DequantisedSource source(std::make_unique<Checkpoint>(file.substr(0, file.rfind('/'))),
                                   block);
    const TensorInfo info = source.find("w").value();
    EXPECT_EQ(info.shape, weight.find("w")->shape);
    const Extent extent = extent_of(info.shape);
    std::vector<float> values(weight.values().size());
    read_as_float(source, "w", {0, extent.rows}, {0, extent.columns}, values.data());
    return values;
  }
};

/// Codes at random, but for NaN, times one power of two.
OneTensor on_grid(std::vector<std::int64_t> shape, bool f8) {
  std::mt19937 engine(3);
  const Extent extent = extent_of(shape);
  std::vector<float> values;
  for (std::int64_t i = 0; i < extent.rows * extent.columns; ++i) {
    const auto code = static_cast<std::uint8_t>(engine() % 127 | (engine() % 2) << 7);
    const float value = f8 ? f8_e4m3_to_float(code) : f4_e2m1_to_float(code & 15U);
    values.push_back(std::ldexp(value, -9));
  }
  return {std::move(shape), std::move(values)};
}

TEST_F(Quantiser, F8WeightsOnTheGridComeBackAsTheyWere) {
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{200, 301}, {3, 130, 150}, {1, 1}, {128, 256}}) {
    const OneTensor weight = on_grid(shape, true);
    EXPECT_EQ(there_and_back(weight, BlockFormat::kF8E4M3), weight.values());
    EXPECT_EQ(there_and_back(weight, BlockFormat::kF8E4M3, {40, 56}), weight.values());
  }
}

TEST_F(Quantiser, Mxfp4WeightsOnTheGridComeBackAsTheyWere) {
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{3, 96, 150}, {32, 1}, {2, 64, 64}}) {
    const OneTensor weight = on_grid(shape, false);
    EXPECT_EQ(there_and_back(weight, BlockFormat::kMxfp4), weight.values());
  }
}

TEST_F(Quantiser, OtherWeightsAreOffByHalfAStepAtMostAndABlockOfZerosIsZeros) {
  std::mt19937 engine(4);
  std::normal_distribution<float> normal(0, 0.02F);
  std::vector<float> values(std::size_t{2} * 160 * 130);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = i < 64 * 130 ? 0 : normal(engine);
  const OneTensor weight({2, 160, 130}, values);
  // At most half a unit of the three bits or of the one bit behind the leading one, or of the
  // smallest code: the largest is above half of the largest code's number.
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::fabs(value));
  for (const BlockFormat format : {BlockFormat::kF8E4M3, BlockFormat::kMxfp4}) {
    const bool f8 = format == BlockFormat::kF8E4M3;
    const std::vector<float> read = there_and_back(weight, format);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float half_step =
          std::max(std::fabs(values[i]) * (f8 ? 0x1p-4F : 0x1p-2F),
                   2 * largest / (f8 ? 448.0F : 6.0F) * (f8 ? 0x1p-10F : 0x1p-2F));
      ASSERT_LE(std::fabs(read[i] - values[i]), half_step) << i;
    }
  }
}

TEST_F(Quantiser, WhatHasNoBlocksOrNoScaleIsRefusedByName) {
  const auto make = [](std::vector<std::int64_t> shape, BlockFormat format) {
    const OneTensor weight = on_grid(std::move(shape), true);
    BlockQuantiser(weight, "w", format, {});
  };
  EXPECT_THAT(error_of(ExitCode::kUsage, [&] { make({64}, BlockFormat::kF8E4M3); }),
              HasSubstr("tensor 'w' of shape [64] can't be stored as f8_e4m3 (only matrices"));
  EXPECT_THAT(error_of(ExitCode::kUsage,
                       [&] {
                         make({2, 48, 64}, BlockFormat::kMxfp4);
                       }),
              HasSubstr("can't be stored as mxfp4 (32 inputs share a scale, and 48 are no "));
  for (const float value : {kInfinity, -kInfinity, kNaN}) {
    std::vector<float> values(std::size_t{64} * 64, 1.0F);
    values[1000] = value;
    const OneTensor weight({64, 64}, values);
    for (const BlockFormat format : {BlockFormat::kF8E4M3, BlockFormat::kMxfp4}) {
      EXPECT_THAT(error_of(ExitCode::kData, [&] { there_and_back(weight, format); }),
                  HasSubstr("tensor 'w' has "));
    }
  }
}

}  // namespace
}  // namespace gatefold
