#include "layers/seeded_source.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>

#include "layers/model_families.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

using testing::ElementsAre;

ModelConfig config_of(const std::string& model_type, DType dtype = DType::kF32) {
  ModelConfig config;
  config.path = "config.json";
  config.model_type = model_type;
  config.hidden_size = 48;
  config.intermediate_size = 80;
  config.num_layers = 3;
  config.dtype = dtype;
  return config;
}

ModelConfig ladder() {
  ModelConfig config = config_of("gatefold_ffn");
  config.bias = true;
  config.swish_beta = true;
  return config;
}

std::vector<std::byte> read_bytes(const SeededSource& source, const std::string& name, Range rows,
                                  Range cols, DType dtype) {
  std::vector<std::byte> out(static_cast<std::size_t>(rows.size() * cols.size() * size_of(dtype)));
  source.read(name, rows, cols, out.data());
  return out;
}

std::vector<float> read_floats(const SeededSource& source, const std::string& name, Range rows,
                               Range cols) {
  std::vector<float> out(static_cast<std::size_t>(rows.size() * cols.size()));
  read_as_float(source, name, rows, cols, out.data());
  return out;
}

struct Moments {
  double mean = 0;
  double variance = 0;
  double kurtosis = 0;
  double largest = 0;
};

Moments moments(const std::vector<float>& values) {
  Moments m;
  const auto n = static_cast<double>(values.size());
  for (const float v : values) m.mean += v / n;
  for (const float v : values) {
    const double d = v - m.mean;
    m.variance += d * d / n;
    m.kurtosis += d * d * d * d / n;
    m.largest = std::max(m.largest, std::abs(static_cast<double>(v)));
  }
  m.kurtosis /= m.variance * m.variance;
  return m;
}

// A slow, separate writing of what the header promises.
float expected(std::uint64_t seed, const std::string& name, std::uint64_t index, double scale) {
  const auto mix = [](std::uint64_t z) {
    z ^= z >> 30;
    z *= 0xbf58476d1ce4e5b9ULL;
    z ^= z >> 27;
    z *= 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  };
  std::uint64_t text = 14695981039346656037ULL;
  for (const char c : name) {
    text ^= static_cast<unsigned char>(c);
    text *= 1099511628211ULL;
  }
  const std::uint64_t gamma = 0x9e3779b97f4a7c15ULL;
  const std::uint64_t hash = mix(mix(mix(seed + gamma) ^ text) + index * gamma);
  double sum = -131070.0;
  for (int piece = 0; piece < 4; ++piece) {
    sum += static_cast<double>((hash >> (16 * piece)) & 65535);
  }
  const double unit = std::sqrt(3.0 / (65536.0 * 65536.0 - 1.0));
  return static_cast<float>(sum) * static_cast<float>(scale * unit);
}

TEST(SeededSource, ValuesAreThoseOfTheWrittenDefinition) {
  const SeededSource source(ladder(), 42);
  const std::string up = "model.layers.1.mlp.up_proj.weight";
  const std::vector<float> values = read_floats(source, up, {0, 80}, {0, 48});
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(values[i], expected(42, up, i, 1.0 / std::sqrt(48.0))) << i;
  }
  const std::string bias = "model.layers.0.mlp.down_proj.bias";
  EXPECT_EQ(read_floats(source, bias, {0, 1}, {7, 8})[0], expected(42, bias, 7, 0.5));
  const std::string beta = "model.layers.2.mlp.swish_beta";
  EXPECT_EQ(read_floats(source, beta, {0, 1}, {0, 1})[0], 1.0F + expected(42, beta, 0, 0.25));
}

// Bits that must never change: a checkpoint made today is verified by tomorrow's program.
TEST(SeededSource, ValuesAreFixedForEver) {
  const SeededSource source(config_of("llama"), 0);
  const std::vector<float> values =
      read_floats(source, "model.layers.0.mlp.down_proj.weight", {0, 1}, {0, 4});
  std::vector<std::uint32_t> bits;
  for (const float v : values) bits.push_back(std::bit_cast<std::uint32_t>(v));
  EXPECT_THAT(bits, ElementsAre(1043753897U, 3185683986U, 3185413509U, 3182885622U));
}

TEST(SeededSource, EverySliceIsThatPartOfTheWhole) {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (const char* type : {"llama", "phi3", "gpt2"}) {
      ModelConfig config = config_of(type, dtype);
      config.bias = type == std::string("gpt2");
      config.activation.gated = !config.bias;
      const SeededSource source(config, 5);
      for (const auto& [name, info] : source.layer_tensors(2)) {
        SCOPED_TRACE(fmt::format("{} {}", name, name_of(dtype)));
        const std::int64_t rows = info.shape.size() == 2 ? info.shape[0] : 1;
        const std::int64_t cols = info.shape.back();
        const auto width = static_cast<std::size_t>(size_of(dtype));
        const std::vector<std::byte> whole = read_bytes(source, name, {0, rows}, {0, cols}, dtype);
        const std::vector<Range> row_slices = {
            {0, rows}, {0, 1}, {rows - 1, rows}, {rows / 3, rows}, {rows / 2, rows / 2}};
        const std::vector<Range> col_slices = {{0, cols}, {0, 1},           {cols - 1, cols},
                                               {7, 20},   {cols / 3, cols}, {5, 5}};
        for (const Range r : row_slices) {
          for (const Range c : col_slices) {
            const std::vector<std::byte> part = read_bytes(source, name, r, c, dtype);
            std::size_t wrong = 0;
            for (std::int64_t i = 0; i < r.size(); ++i) {
              const auto from = static_cast<std::size_t>((r.begin + i) * cols + c.begin) * width;
              const auto to = static_cast<std::size_t>(i * c.size()) * width;
              const auto bytes = static_cast<std::size_t>(c.size()) * width;
              if (bytes != 0 && std::memcmp(&whole[from], &part[to], bytes) != 0) ++wrong;
            }
            EXPECT_EQ(wrong, 0U) << r.begin << ":" << r.end << " x " << c.begin << ":" << c.end;
          }
        }
      }
    }
  }
}

TEST(SeededSource, NarrowTypesAreTheFp32ValuesRoundedOnce) {
  const std::string name = "model.layers.0.mlp.gate_proj.weight";
  const std::vector<float> exact =
      read_floats(SeededSource(config_of("llama"), 9), name, {0, 80}, {0, 48});
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    const std::vector<float> narrow =
        read_floats(SeededSource(config_of("llama", dtype), 9), name, {0, 80}, {0, 48});
    for (std::size_t i = 0; i < exact.size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(narrow[i]),
                std::bit_cast<std::uint32_t>(round_to(dtype, exact[i])))
          << i;
    }
  }
}

TEST(SeededSource, WeightsHaveMeanZeroAndVarianceOneOverFanIn) {
  ModelConfig config = config_of("llama");
  config.hidden_size = 512;
  config.intermediate_size = 1024;
  const SeededSource source(config, 1);
  for (const auto& [name, info] : source.layer_tensors(0)) {
    SCOPED_TRACE(name);
    const auto fan_in = static_cast<double>(info.shape[1]);
    std::vector<float> values = read_floats(source, name, {0, info.shape[0]}, {0, info.shape[1]});
    const Moments m = moments(values);
    // Half a million values: the standard errors are 0.0014, 0.0017 and 0.006.
    EXPECT_NEAR(m.mean * std::sqrt(fan_in), 0.0, 0.006);
    EXPECT_NEAR(m.variance * fan_in, 1.0, 0.008);
    EXPECT_NEAR(m.kurtosis, 3.0 - 1.2 / 4.0, 0.03) << "four uniforms";
    EXPECT_LE(m.largest * std::sqrt(fan_in), 2.0 * std::sqrt(3.0) + 1e-3);
    const std::set<float> distinct(values.begin(), values.end());
    EXPECT_GT(distinct.size(), 80000U);
    // Neighbours along a row, and a row apart, have nothing to do with each other.
    for (const std::size_t lag : {std::size_t{1}, std::size_t{2}, std::size_t(info.shape[1])}) {
      double product = 0;
      for (std::size_t i = lag; i < values.size(); ++i) {
        product += static_cast<double>(values[i]) * static_cast<double>(values[i - lag]);
      }
      EXPECT_NEAR(product * fan_in / static_cast<double>(values.size()), 0.0, 0.007) << lag;
    }
  }
}

TEST(SeededSource, SeedsNamesAndLayersAllGiveOtherValues) {
  const SeededSource a(config_of("llama"), 0);
  const SeededSource b(config_of("llama"), 1);
  std::set<std::vector<float>> seen;
  for (std::int64_t layer = 0; layer < 3; ++layer) {
    for (const auto& [name, info] : a.layer_tensors(layer)) {
      seen.insert(read_floats(a, name, {0, 1}, {0, 48}));
      seen.insert(read_floats(b, name, {0, 1}, {0, 48}));
      EXPECT_EQ(read_floats(a, name, {0, 4}, {0, 48}),
                read_floats(SeededSource(config_of("llama"), 0), name, {0, 4}, {0, 48}));
    }
  }
  EXPECT_EQ(seen.size(), 18U);
}

TEST(SeededSource, LayersListTheirTensorsInTheFamilysOwnLayout) {
  using Shape = std::vector<std::int64_t>;
  const auto shapes = [](const ModelConfig& config) {
    std::vector<std::pair<std::string, Shape>> list;
    for (const auto& [name, info] : SeededSource(config, 0).layer_tensors(1)) {
      EXPECT_EQ(info.dtype, config.dtype);
      list.emplace_back(name, info.shape);
    }
    return list;
  };
  EXPECT_THAT(shapes(config_of("phi3", DType::kBf16)),
              ElementsAre(std::pair("model.layers.1.mlp.gate_up_proj.weight", Shape{160, 48}),
                          std::pair("model.layers.1.mlp.down_proj.weight", Shape{48, 80})));
  ModelConfig gpt2 = config_of("gpt2");
  gpt2.bias = true;
  gpt2.activation.gated = false;
  EXPECT_THAT(shapes(gpt2),
              ElementsAre(std::pair("transformer.h.1.mlp.c_fc.weight", Shape{48, 80}),
                          std::pair("transformer.h.1.mlp.c_proj.weight", Shape{80, 48}),
                          std::pair("transformer.h.1.mlp.c_fc.bias", Shape{80}),
                          std::pair("transformer.h.1.mlp.c_proj.bias", Shape{48})));
  EXPECT_THAT(shapes(ladder()).back(), testing::Pair("model.layers.1.mlp.swish_beta", Shape{}));
}

TEST(SeededSource, ResolvesItsOwnConfig) {
  for (const char* type : {"llama", "qwen3_5", "phi3", "gatefold_ffn"}) {
    const ModelConfig config = type == std::string("gatefold_ffn") ? ladder() : config_of(type);
    const SeededSource source(config, 3);
    EXPECT_NO_THROW(resolve_layer(config, 2, source)) << type;
  }
}

TEST(SeededSource, WhatIsntThereIsAnError) {
  const SeededSource source(config_of("llama"), 0);
  const std::string name = "model.layers.0.mlp.up_proj.weight";
  EXPECT_FALSE(source.find("model.layers.3.mlp.up_proj.weight"));
  EXPECT_FALSE(source.find("model.layers.0.mlp.up_proj.bias"));
  ASSERT_TRUE(source.find(name));
  std::vector<std::byte> out(80 * 48 * 4);
  EXPECT_THROW(source.read("model.layers.3.mlp.up_proj.weight", {0, 1}, {0, 1}, out.data()), Error);
  for (const auto& [rows, cols] : std::vector<std::pair<Range, Range>>{{{0, 81}, {0, 1}},
                                                                       {{0, 1}, {0, 49}},
                                                                       {{-1, 1}, {0, 1}},
                                                                       {{0, 1}, {-1, 1}},
                                                                       {{2, 1}, {0, 1}},
                                                                       {{0, 1}, {3, 2}}}) {
    EXPECT_THROW(source.read(name, rows, cols, out.data()), Error);
  }
  EXPECT_THROW(source.layer_tensors(3), Error);
  EXPECT_THROW(source.layer_tensors(-1), Error);
}

TEST(SeededTokens, DontDependOnHowTokensAreSplit) {
  constexpr std::int64_t kHidden = 33;
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    std::vector<float> whole(50 * kHidden);
    seeded_tokens(7, {0, 50}, kHidden, dtype, whole.data());
    std::vector<float> parts(whole.size());
    for (const Range part : {Range{0, 1}, Range{1, 1}, Range{1, 20}, Range{20, 50}}) {
      seeded_tokens(7, part, kHidden, dtype, parts.data() + part.begin * kHidden);
    }
    EXPECT_EQ(whole, parts);
    for (const float v : whole) ASSERT_EQ(v, round_to(dtype, v));
    std::vector<float> other(whole.size());
    seeded_tokens(8, {0, 50}, kHidden, dtype, other.data());
    EXPECT_NE(whole, other);
  }
}

TEST(SeededTokens, HaveVarianceOne) {
  std::vector<float> x(200 * 1000);
  seeded_tokens(0, {100, 300}, 1000, DType::kF32, x.data());
  const Moments m = moments(x);
  EXPECT_NEAR(m.mean, 0.0, 0.01);
  EXPECT_NEAR(m.variance, 1.0, 0.012);
}

}  // namespace
}  // namespace gatefold
