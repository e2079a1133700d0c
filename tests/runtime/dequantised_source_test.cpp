#include "runtime/dequantised_source.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "runtime/block_codecs.h"
#include "tests/runtime/file_testing.h"

namespace gatefold {
namespace {

using testing::HasSubstr;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// ---- the formats, as their specifications define them ----

float defined_e4m3(int code) {
  const int exponent = code >> 3 & 15;
  const auto fraction = static_cast<float>(code & 7);
  if ((code & 127) == 127) return kNaN;
  const float magnitude =
      exponent == 0 ? std::ldexp(fraction / 8, -6) : std::ldexp(1 + fraction / 8, exponent - 7);
  return code >= 128 ? -magnitude : magnitude;
}

float defined_mxfp4(int code, int scale) {
  constexpr float kValues[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  if (scale == 255) return kNaN;
  const float magnitude = std::ldexp(kValues[code & 7], scale - 127);
  return code >= 8 ? -magnitude : magnitude;
}

std::uint32_t bits_of(float value) {
  return std::isnan(value) ? 0x7fc00000U : std::bit_cast<std::uint32_t>(value);
}

TEST(BlockCodecs, EveryCodeOfE4m3IsTheNumberOfItsDefinition) {
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<std::uint8_t>(code);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(f8_e4m3_to_float(byte)), bits_of(defined_e4m3(code)))
        << code;
  }
  EXPECT_EQ(f8_e4m3_to_float(0x7e), 448.0F);
  EXPECT_EQ(f8_e4m3_to_float(0x01), 0x1p-9F);
}

TEST(BlockCodecs, EveryCodeOfE4m3TimesAScaleIsRoundedOnce) {
  std::vector<std::byte> codes(256);
  for (std::size_t i = 0; i < 256; ++i) codes[i] = static_cast<std::byte>(i);
  std::vector<float> out(256);
  for (const float scale : {1.0F, 0.25F, -3.0F, 0.1F, 1.7e-4F, 1e38F, 1e-42F, 0.0F, INFINITY}) {
    const std::vector<float> scales(3, scale);
    decode_f8_e4m3(codes.data(), {100, 356}, 128, scales.data(), out.data());
    for (int code = 0; code < 256; ++code) {
      const float product = defined_e4m3(code) * scale;
      EXPECT_EQ(std::bit_cast<std::uint32_t>(out[static_cast<std::size_t>(code)]), bits_of(product))
          << code << " times " << scale;
    }
  }
}

TEST(BlockCodecs, EveryCodeOfMxfp4WithEveryScaleIsTheNumberOfItsDefinition) {
  for (int scale = 0; scale < 256; ++scale) {
    std::vector<std::byte> codes(16);
    for (std::size_t i = 0; i < 16; ++i) codes[i] = static_cast<std::byte>(i | (15 - i) << 4);
    const auto scale_code = static_cast<std::byte>(scale);
    std::vector<std::uint16_t> out(32);
    decode_mxfp4(codes.data(), &scale_code, 1, out.data());
    for (int i = 0; i < 16; ++i) {
      // The low half comes first.
      const float pair[] = {defined_mxfp4(i, scale), defined_mxfp4(15 - i, scale)};
      for (int half = 0; half < 2; ++half) {
        const float found = bf16_to_float(out[static_cast<std::size_t>(2 * i + half)]);
        EXPECT_EQ(bits_of(found), bits_of(pair[half])) << i << " " << half << " " << scale;
      }
    }
  }
}

// ---- files ----

struct Stored {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
};

std::string random_bytes(std::int64_t n, unsigned seed) {
  std::mt19937 engine(seed);
  std::string bytes(static_cast<std::size_t>(n), '\0');
  for (char& byte : bytes) byte = static_cast<char>(engine() >> 24);
  return bytes;
}

template <typename Element>
std::string bytes_of(const std::vector<Element>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Element)};
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ","));
}

/// Weights of no power of two, so that each product is rounded.
std::vector<float> f8_scales(std::int64_t n) {
  std::vector<float> scales;
  for (std::int64_t i = 0; i < n; ++i) scales.push_back(0.01F * static_cast<float>(i + 1));
  return scales;
}

class Dequantised : public testing::Test, protected TestFolder {
 protected:
  Dequantised() : TestFolder("dequantised") {}

  void write(const std::vector<Stored>& tensors) const {
    std::vector<std::string> entries;
    std::string data;
    for (const Stored& one : tensors) {
      const std::string offsets =
          fmt::format("[{},{}]", data.size(), data.size() + one.bytes.size());
      entries.push_back(tensor_entry(one.dtype, shape_text(one.shape), offsets, one.name));
      data += one.bytes;
    }
    put(safetensors_text(header_json(entries), data), "model.safetensors");
  }
  DequantisedSource open(BlockSize block = {}) const {
    const std::string file = path("x");
    return {std::make_unique<Checkpoint>(file.substr(0, file.rfind('/'))), block};
  }
  std::string refused(const std::vector<Stored>& tensors, const std::string& name) const {
    write(tensors);
    const DequantisedSource source = open();
    return error_of(ExitCode::kData, [&] { source.find(name); });
  }

  /// The source has just these values, whichever rectangle is read; `whole` is [rows, columns].
  static void expect_values(const DequantisedSource& source, const std::string& name,
                            std::int64_t columns, const std::vector<float>& whole,
                            const std::vector<std::int64_t>& row_cuts,
                            const std::vector<std::int64_t>& column_cuts) {
    const DType dtype = source.find(name)->dtype;
    const auto each_range = [](const std::vector<std::int64_t>& cuts, const auto& action) {
      for (const std::int64_t begin : cuts) {
        for (const std::int64_t end : cuts) {
          if (begin <= end) action(Range{begin, end});
        }
      }
    };
    std::int64_t wrong = 0;
    each_range(row_cuts, [&](Range rows) {
      each_range(column_cuts, [&](Range cols) {
        std::vector<std::byte> read(
            static_cast<std::size_t>(rows.size() * cols.size() * size_of(dtype)));
        source.read(name, rows, cols, read.data());
        std::vector<float> values(static_cast<std::size_t>(rows.size() * cols.size()));
        convert(dtype, read.data(), DType::kF32, reinterpret_cast<std::byte*>(values.data()),
                rows.size() * cols.size());
        std::size_t i = 0;
        for (std::int64_t r = rows.begin; r < rows.end; ++r) {
          for (std::int64_t c = cols.begin; c < cols.end; ++c, ++i) {
            const float expected = whole[static_cast<std::size_t>(r * columns + c)];
            if (bits_of(values[i]) != bits_of(expected) && wrong++ == 0) {
              ADD_FAILURE() << name << " [" << r << ", " << c << "] is " << values[i] << ", not "
                            << expected << " in rows " << rows.begin << " to " << rows.end
                            << ", columns " << cols.begin << " to " << cols.end;
            }
          }
        }
      });
    });
    EXPECT_EQ(wrong, 0);
  }
};

/// What `matrices` of [rows, columns] in F8_E4M3 are, with scales of blocks counted from each
/// matrix's corner.
std::vector<float> plain_f8(const std::string& codes, const std::vector<float>& scales,
                            std::int64_t rows, std::int64_t columns, BlockSize block) {
  const std::int64_t down = (rows + block.rows - 1) / block.rows;
  const std::int64_t across = (columns + block.columns - 1) / block.columns;
  std::vector<float> values;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const std::int64_t row = at / columns % rows;
    const std::int64_t scale = at / columns / rows * down * across + row / block.rows * across +
                               at % columns / block.columns;
    values.push_back(defined_e4m3(static_cast<std::uint8_t>(codes[i])) *
                     scales[static_cast<std::size_t>(scale)]);
  }
  return values;
}

TEST_F(Dequantised, F8WeightsAreCodesTimesTheScaleOfTheirBlockHoweverTheyAreCut) {
  const std::string codes = random_bytes(300 * 200, 1);
  const std::vector<float> scales = f8_scales(3 * 2);
  write({{"a.weight", "F8_E4M3", {300, 200}, codes},
         {"a.weight_scale_inv", "F32", {3, 2}, bytes_of(scales)}});
  const DequantisedSource source = open();
  EXPECT_EQ(source.find("a.weight")->dtype, DType::kF32);
  EXPECT_EQ(source.find("a.weight")->shape, (std::vector<std::int64_t>{300, 200}));
  expect_values(source, "a.weight", 200, plain_f8(codes, scales, 300, 200, {}),
                {0, 1, 100, 128, 192, 257, 300}, {0, 33, 100, 128, 129, 192, 200});
}

TEST_F(Dequantised, F8BlocksHaveTheSizeThatTheConfigSaysAndStartAnewInEachMatrixOfAStack) {
  const BlockSize block{32, 48};
  const std::string codes = random_bytes(3 * 50 * 100, 2);
  const std::vector<float> scales = f8_scales(3 * 2 * 3);
  write({{"gate_up_proj", "F8_E4M3", {3, 50, 100}, codes},
         {"gate_up_proj_scale_inv", "F32", {3, 2, 3}, bytes_of(scales)}});
  expect_values(open(block), "gate_up_proj", 100, plain_f8(codes, scales, 50, 100, block),
                {0, 31, 32, 49, 50, 51, 82, 100, 131, 150}, {0, 47, 48, 49, 96, 100});
}

TEST_F(Dequantised, MoreThanIsStagedAtOnceComesOutAsTheRest) {
  const std::string codes = random_bytes(700 * 900, 3);
  const std::vector<float> scales = f8_scales(6 * 8);
  write({{"w", "F8_E4M3", {700, 900}, codes}, {"w_scale_inv", "F32", {6, 8}, bytes_of(scales)}});
  expect_values(open(), "w", 900, plain_f8(codes, scales, 700, 900, {}), {0, 5, 700},
                {0, 131, 900});
}

TEST_F(Dequantised, ScalesOfSixteenBitsAreWidened) {
  const std::string codes = random_bytes(20 * 30, 4);
  write({{"w", "F8_E4M3", {20, 30}, codes},
         {"w_scale_inv", "BF16", {1, 1}, bytes_of<std::uint16_t>({float_to_bf16(0.375F)})}});
  expect_values(open(), "w", 30, plain_f8(codes, {0.375F}, 20, 30, {}), {0, 20}, {0, 30});
}

TEST_F(Dequantised, AsBf16AProductIsRoundedOnceMore) {
  const std::string codes = random_bytes(4 * 64, 5);
  write(
      {{"w", "F8_E4M3", {4, 64}, codes}, {"w_scale_inv", "F32", {1, 1}, bytes_of<float>({0.1F})}});
  std::vector<std::uint16_t> read(4 * 64);
  read_as(open(), "w", {0, 4}, {0, 64}, DType::kBf16, reinterpret_cast<std::byte*>(read.data()));
  for (std::size_t i = 0; i < read.size(); ++i) {
    EXPECT_EQ(read[i], float_to_bf16(defined_e4m3(static_cast<std::uint8_t>(codes[i])) * 0.1F));
  }
}

/// `matrices` of [rows, groups * 32] in MXFP4, turned: each [groups * 32, rows].
std::vector<float> plain_mxfp4(const std::string& codes, const std::string& scales,
                               std::int64_t matrices, std::int64_t rows, std::int64_t groups) {
  std::vector<float> values;
  for (std::int64_t m = 0; m < matrices; ++m) {
    for (std::int64_t c = 0; c < groups * 32; ++c) {
      for (std::int64_t r = 0; r < rows; ++r) {
        const auto element = static_cast<std::size_t>((m * rows + r) * groups * 32 + c);
        const auto byte = static_cast<std::uint8_t>(codes[element / 2]);
        const auto scale = static_cast<std::uint8_t>(scales[element / 32]);
        values.push_back(defined_mxfp4(element % 2 == 0 ? byte & 15 : byte >> 4, scale));
      }
    }
  }
  return values;
}

TEST_F(Dequantised, Mxfp4WeightsAreTurnedHoweverTheyAreCut) {
  const std::string codes = random_bytes(3 * 70 * 4 * 16, 6);
  const std::string scales = random_bytes(3 * 70 * 4, 7);
  write({{"down_proj_blocks", "U8", {3, 70, 4, 16}, codes},
         {"down_proj_scales", "U8", {3, 70, 4}, scales}});
  const DequantisedSource source = open();
  EXPECT_EQ(source.find("down_proj")->dtype, DType::kBf16);
  EXPECT_EQ(source.find("down_proj")->shape, (std::vector<std::int64_t>{3, 128, 70}));
  expect_values(source, "down_proj", 70, plain_mxfp4(codes, scales, 3, 70, 4),
                {0, 1, 31, 32, 33, 100, 127, 128, 129, 192, 256, 301, 384}, {0, 1, 31, 33, 69, 70});
}

TEST_F(Dequantised, ManyRowsOfMxfp4AreReadInSeveralTurns) {
  const std::string codes = random_bytes(6001 * 3 * 16, 8);
  const std::string scales = random_bytes(6001 * 3, 9);
  write({{"w_blocks", "U8", {1, 6001, 3, 16}, codes}, {"w_scales", "U8", {1, 6001, 3}, scales}});
  expect_values(open(), "w", 6001, plain_mxfp4(codes, scales, 1, 6001, 3), {0, 50, 96},
                {0, 7, 6001});
}

TEST_F(Dequantised, ARankReadsNoMoreThanItsPartAndTheScalesOfIt) {
  write({{"f", "F8_E4M3", {256, 5000}, random_bytes(256 * 5000, 1)},
         {"f_scale_inv", "F32", {2, 40}, bytes_of(f8_scales(80))},
         {"m_blocks", "U8", {2, 9, 300, 16}, random_bytes(2 * 9 * 300 * 16, 2)},
         {"m_scales", "U8", {2, 9, 300}, random_bytes(2 * 9 * 300, 3)},
         {"short", "F8_E4M3", {256, 4096}, random_bytes(256 * 4096, 1)},
         {"short_scale_inv", "F32", {2, 32}, bytes_of(f8_scales(64))}});
  const DequantisedSource source = open();
  std::vector<std::byte> out(256 * 5000 * 4);
  const auto bytes_read = [&](const std::string& name, Range rows, Range cols) {
    io_faults().reads.clear();
    source.read(name, rows, cols, out.data());
    std::size_t sum = 0;
    for (const auto& [offset, bytes] : io_faults().reads) sum += bytes;
    return sum;
  };
  EXPECT_EQ(bytes_read("f", {100, 120}, {0, 5000}), 20U * 5000 + 40 * 4);
  EXPECT_EQ(bytes_read("f", {0, 256}, {130, 250}), 256U * 120 + 2 * 4);
  // Whole groups of the second matrix's nine rows, whose scales are less than a page each.
  EXPECT_EQ(bytes_read("m", {9600 + 33, 9600 + 100}, {0, 9}), 9U * (3 * 16 + 300));
  EXPECT_EQ(bytes_read("m", {0, 9600}, {4, 6}), 2U * (300 * 16 + 300));
  EXPECT_EQ(bytes_read("m", {7, 7}, {0, 9}), 0U);
  // The same pages, in few calls.
  EXPECT_EQ(bytes_read("short", {128, 256}, {0, 1}), 128U * 4096 + 2 * 4);
  EXPECT_LT(io_faults().reads.size(), 8U);
}

// Rows above and below a page's length are staged in two ways.
TEST_F(Dequantised, RowsLongerThanAPageAreCutAsShortOnesAre) {
  const std::string codes = random_bytes(70 * 260 * 16, 6);
  const std::string scales = random_bytes(70 * 260, 7);
  const std::string f8 = random_bytes(3 * 5000, 3);
  write({{"m_blocks", "U8", {70, 260, 16}, codes},
         {"m_scales", "U8", {70, 260}, scales},
         {"f", "F8_E4M3", {3, 5000}, f8},
         {"f_scale_inv", "F32", {1, 40}, bytes_of(f8_scales(40))}});
  expect_values(open(), "m", 70, plain_mxfp4(codes, scales, 1, 70, 260), {100, 192, 4097},
                {0, 33, 70});
  expect_values(open(), "f", 5000, plain_f8(f8, f8_scales(40), 3, 5000, {}), {0, 1, 3},
                {0, 129, 4097, 5000});
}

TEST_F(Dequantised, WhatHasNoScalesIsReadAsItIs) {
  write({{"router", "F32", {1, 2}, bytes_of<float>({1.5F, -2})},
         {"ids", "I64", {1}, std::string(8, '\0')},
         {"some_scales", "F16", {1}, std::string(2, '\0')},
         {"w", "F8_E4M3", {1, 1}, "x"},
         {"w_scale_inv", "F32", {1, 1}, bytes_of<float>({1})},
         {"m_blocks", "U8", {1, 1, 16}, std::string(16, '\0')},
         {"m_scales", "U8", {1, 1}, "x"}});
  const DequantisedSource source = open();
  float values[2];
  source.read("router", {0, 1}, {0, 2}, reinterpret_cast<std::byte*>(values));
  EXPECT_EQ(values[1], -2);
  EXPECT_FALSE(source.find("some").has_value());
  EXPECT_EQ(source.find("some_scales")->dtype, DType::kF16);
  EXPECT_THAT(error_of(ExitCode::kData, [&] { source.find("ids"); }), HasSubstr("I64"));
  EXPECT_EQ(source.count(BlockFormat::kF8E4M3), 1);
  EXPECT_EQ(source.count(BlockFormat::kMxfp4), 1);
  EXPECT_THAT(source.description(), HasSubstr("(7 tensors in 1 file), 1 weight as F8_E4M3 in "
                                              "blocks of 128 x 128, 1 weight as MXFP4"));
}

TEST_F(Dequantised, ScalesThatDontFitAreRefusedByName) {
  const Stored weight{"w", "F8_E4M3", {130, 2}, std::string(260, 'x')};
  const auto scales = [](const std::string& dtype, std::vector<std::int64_t> shape, int bytes) {
    return Stored{"w_scale_inv", dtype, std::move(shape),
                  std::string(static_cast<std::size_t>(bytes), 'x')};
  };
  EXPECT_THAT(refused({weight}, "w"), HasSubstr("no tensor 'w_scale_inv' (tensor 'w' is stored "));
  EXPECT_THAT(refused({scales("F32", {1}, 4)}, "w"), HasSubstr("no tensor 'w' (there are scales"));
  EXPECT_THAT(refused({weight, scales("F32", {1, 1}, 4)}, "w"),
              HasSubstr("'w_scale_inv' has shape '[1,1]' (for 'w' of shape '[130,2]' in blocks of "
                        "128 x 128: [2,1])"));
  EXPECT_THAT(refused({weight, scales("F32", {}, 4)}, "w"), HasSubstr("has shape '[]'"));
  EXPECT_THAT(refused({weight, scales("I32", {2, 1}, 8)}, "w"), HasSubstr("stored as I32"));
  EXPECT_THAT(refused({weight, scales("F8_E8M0", {2, 1}, 2)}, "w"), HasSubstr("as F8_E8M0"));
  EXPECT_THAT(refused({{"w", "BF16", {1, 2}, "xxxx"}, scales("F32", {1, 1}, 4)}, "w"),
              HasSubstr("'w' is stored as BF16 and has scales, 'w_scale_inv'"));
  EXPECT_THAT(refused({{"w", "F8_E4M3", {2}, "xx"}, scales("F32", {1}, 4)}, "w"),
              HasSubstr("only matrices have blocks"));
}

TEST_F(Dequantised, PartsOfMxfp4ThatDontFitAreRefusedByName) {
  const auto blocks = [](const std::string& dtype, std::vector<std::int64_t> shape, int bytes) {
    return Stored{"w_blocks", dtype, std::move(shape),
                  std::string(static_cast<std::size_t>(bytes), 'x')};
  };
  const auto scales = [](const std::string& dtype, std::vector<std::int64_t> shape, int bytes) {
    return Stored{"w_scales", dtype, std::move(shape),
                  std::string(static_cast<std::size_t>(bytes), 'x')};
  };
  const Stored good = blocks("U8", {2, 1, 16}, 32);
  EXPECT_THAT(refused({good}, "w"), HasSubstr("no tensor 'w_scales' (weights in MXFP4 need it"));
  EXPECT_THAT(refused({scales("U8", {2, 1}, 2)}, "w"), HasSubstr("no tensor 'w_blocks'"));
  EXPECT_THAT(refused({good, scales("F16", {2, 1}, 4)}, "w"), HasSubstr("'w_scales' is stored as"));
  EXPECT_THAT(refused({blocks("I8", {2, 1, 16}, 32), scales("U8", {2, 1}, 2)}, "w"),
              HasSubstr("'w_blocks' is stored as I8"));
  EXPECT_THAT(refused({good, scales("U8", {1, 2}, 2)}, "w"),
              HasSubstr("'w_blocks' has shape '[2,1,16]' with 'w_scales' of shape '[1,2]'"));
  EXPECT_THAT(refused({blocks("U8", {2, 1, 8}, 16), scales("U8", {2, 1}, 2)}, "w"),
              HasSubstr("[2,1,8]"));
  EXPECT_THAT(refused({blocks("U8", {1, 16}, 16), scales("U8", {1}, 1)}, "w"), HasSubstr("[1,16]"));
  EXPECT_THAT(refused({blocks("U8", {0, 1LL << 58, 16}, 0), scales("U8", {0, 1LL << 58}, 0)}, "w"),
              HasSubstr("w_blocks"));
  EXPECT_THAT(refused({good, scales("U8", {2, 1}, 2), {"w", "BF16", {1}, "xx"}}, "w"),
              HasSubstr("both 'w' and 'w_blocks'"));
}

// Whatever a header says, a weight is read or an Error names what is wrong with it.
TEST_F(Dequantised, NoHeaderOfQuantisedTensorsDoesHarm) {
  std::mt19937 engine(11);
  const auto any = [&](const auto& choices) { return choices[engine() % std::size(choices)]; };
  const char* const names[] = {"w", "w_scale_inv", "w_blocks", "w_scales", "_blocks", "_scale_inv"};
  const std::pair<const char*, int> types[] = {
      {"F8_E4M3", 1}, {"U8", 1}, {"F32", 4}, {"BF16", 2}, {"I8", 1}};
  const std::int64_t sizes[] = {0, 1, 2, 16, 16, 32, 129};
  int read = 0;
  for (int i = 0; i < 500; ++i) {
    std::vector<Stored> tensors;
    for (const char* name : names) {
      if (engine() % 3 == 0) continue;
      const auto [type, bytes] = any(types);
      std::vector<std::int64_t> shape;
      std::int64_t elements = 1;
      for (auto dimension = engine() % 4; dimension > 0; --dimension) {
        shape.push_back(any(sizes));
        elements *= shape.back();
      }
      if (elements > 5000) continue;
      tensors.push_back(
          {name, type, shape, std::string(static_cast<std::size_t>(elements * bytes), '\x35')});
    }
    write(tensors);
    const DequantisedSource source = open();
    for (const char* name : {"w", "", "w_blocks", "w_scales"}) {
      try {
        const auto info = source.find(name);
        if (!info) continue;
        const Extent extent = extent_of(info->shape);
        std::vector<std::byte> out(
            static_cast<std::size_t>(extent.rows * extent.columns * size_of(info->dtype)));
        source.read(name, {0, extent.rows}, {0, extent.columns}, out.data());
        ++read;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::kData) << error.what();
      }
    }
  }
  EXPECT_GT(read, 20);
}

TEST_F(Dequantised, AFileThatShrinksOrARectangleBeyondTheTensorIsAnError) {
  write({{"f", "F8_E4M3", {4, 40}, random_bytes(160, 1)},
         {"f_scale_inv", "F32", {1, 1}, bytes_of<float>({1})},
         {"m_blocks", "U8", {4, 1, 16}, random_bytes(64, 2)},
         {"m_scales", "U8", {4, 1}, random_bytes(4, 3)}});
  const DequantisedSource source = open();
  std::vector<std::byte> out(4 * 40 * 4);
  for (const char* name : {"f", "m"}) {
    const Extent extent = extent_of(source.find(name)->shape);
    const auto message = error_of(ExitCode::kData, [&] {
      source.read(name, {0, extent.rows + 1}, {0, 1}, out.data());
    });
    EXPECT_THAT(message, HasSubstr(fmt::format("of tensor '{}'", name)));
    error_of(ExitCode::kData, [&] { source.read(name, {0, 1}, {-1, 1}, out.data()); });
  }
  const std::string file = path("model.safetensors");
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 222);
  for (const char* name : {"f", "m"}) {
    EXPECT_THAT(error_of(ExitCode::kData,
                         [&] {
                           source.read(name, {0, 4}, {0, 4}, out.data());
                         }),
                HasSubstr("shrank"));
  }
}

}  // namespace
}  // namespace gatefold
