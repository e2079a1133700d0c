#include "runtime/tensor_source.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <map>
#include <vector>

#include "runtime/error.h"

namespace gatefold {
namespace {

constexpr DType kAll[] = {DType::kF32, DType::kBf16, DType::kF16};

std::vector<std::byte> store(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> bytes;
  for (const float value : values) {
    std::byte element[4];
    const std::uint16_t bits = dtype == DType::kBf16 ? float_to_bf16(value) : float_to_f16(value);
    const auto n = static_cast<std::size_t>(size_of(dtype));
    std::memcpy(element, dtype == DType::kF32 ? static_cast<const void*>(&value) : &bits, n);
    bytes.insert(bytes.end(), element, element + n);
  }
  return bytes;
}

/// One [rows, cols] matrix, element i = `first` + i; notes the rows that are read at once.
class OneMatrix : public TensorSource {
 public:
  OneMatrix(DType dtype, std::int64_t rows, std::int64_t cols, float first = 0)
      : dtype_(dtype), rows_(rows), cols_(cols), first_(first) {}

  std::optional<TensorInfo> find(const std::string& name) const override {
    if (name != "m") return std::nullopt;
    return TensorInfo{.dtype = dtype_, .shape = {rows_, cols_}};
  }
  void read(const std::string&, Range rows, Range cols, std::byte* out) const override {
    reads.push_back(rows);
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
      for (std::int64_t c = cols.begin; c < cols.end; ++c) {
        const float value = first_ + static_cast<float>(r * cols_ + c);
        convert(DType::kF32, reinterpret_cast<const std::byte*>(&value), dtype_, out, 1);
        out += size_of(dtype_);
      }
    }
  }
  std::string description() const override { return "a test"; }

  mutable std::vector<Range> reads;

 private:
  DType dtype_;
  std::int64_t rows_;
  std::int64_t cols_;
  float first_;
};

TEST(Convert, IntegersSurviveEveryWayThere) {
  std::vector<float> values;
  for (int i = -100; i <= 100; ++i) values.push_back(static_cast<float>(i));
  for (const DType from : kAll) {
    for (const DType to : kAll) {
      const auto in = store(from, values);
      std::vector<std::byte> out(values.size() * static_cast<std::size_t>(size_of(to)));
      convert(from, in.data(), to, out.data(), std::ssize(values));
      EXPECT_EQ(out, store(to, values)) << name_of(from) << " to " << name_of(to);
    }
  }
}

TEST(Convert, EveryBf16AndF16WidensAsTheScalarDoes) {
  std::vector<std::uint16_t> bits(0x10000);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint16_t>(i);
  std::vector<std::uint32_t> wide(bits.size());
  for (const DType from : {DType::kBf16, DType::kF16}) {
    convert(from, reinterpret_cast<const std::byte*>(bits.data()), DType::kF32,
            reinterpret_cast<std::byte*>(wide.data()), std::ssize(bits));
    for (std::size_t i = 0; i < bits.size(); ++i) {
      const float expected = from == DType::kBf16 ? bf16_to_float(bits[i]) : f16_to_float(bits[i]);
      ASSERT_EQ(wide[i], std::bit_cast<std::uint32_t>(expected)) << name_of(from) << ' ' << i;
    }
  }
}

TEST(Convert, NarrowingRoundsOnceAsTheScalarDoes) {
  std::vector<float> values = {std::numeric_limits<float>::quiet_NaN(),
                               -std::numeric_limits<float>::infinity(), 65520.0F, -0.0F, 1e-8F};
  std::uint32_t state = 1;
  while (values.size() < 100'003) {
    state = state * 1664525U + 1013904223U;
    values.push_back(std::bit_cast<float>(state));
  }
  const auto in = store(DType::kF32, values);
  for (const DType to : {DType::kBf16, DType::kF16}) {
    std::vector<std::byte> out(values.size() * 2);
    convert(DType::kF32, in.data(), to, out.data(), std::ssize(values));
    EXPECT_TRUE(out == store(to, values)) << name_of(to);
  }
  // Between the two narrow types: by way of fp32, where nothing is lost.
  const auto bf16 = store(DType::kBf16, values);
  std::vector<std::byte> out(values.size() * 2);
  convert(DType::kBf16, bf16.data(), DType::kF16, out.data(), std::ssize(values));
  for (float& value : values) value = bf16_to_float(float_to_bf16(value));
  EXPECT_TRUE(out == store(DType::kF16, values));
}

TEST(Convert, EveryLengthAndAlignmentGivesTheSame) {
  std::vector<float> values;
  for (int i = 0; i < 80; ++i) values.push_back(static_cast<float>(i) * 0.37F - 11.0F);
  for (const DType from : kAll) {
    for (const DType to : kAll) {
      for (std::size_t n = 0; n <= values.size(); ++n) {
        const auto in = store(from, values);
        const auto size = static_cast<std::size_t>(size_of(to));
        std::vector<std::byte> whole(values.size() * size);
        convert(from, in.data(), to, whole.data(), std::ssize(values));
        std::vector<std::byte> shifted_in(in.size() + 1);
        std::copy(in.begin(), in.end(), shifted_in.begin() + 1);
        std::vector<std::byte> out(n * size + 2, std::byte{0x5a});
        convert(from, shifted_in.data() + 1, to, out.data() + 1, static_cast<std::int64_t>(n));
        ASSERT_TRUE(std::equal(out.begin() + 1, out.end() - 1, whole.begin())) << n;
        ASSERT_TRUE(out.front() == std::byte{0x5a} && out.back() == std::byte{0x5a}) << n;
      }
    }
  }
}

TEST(Convert, TheSameTypeKeepsItsBits) {
  const std::uint16_t bits[] = {0x7fff, 0xff81, 0x0001};  // payloads of NaNs too
  std::uint16_t out[3] = {};
  convert(DType::kBf16, reinterpret_cast<const std::byte*>(bits), DType::kBf16,
          reinterpret_cast<std::byte*>(out), 3);
  EXPECT_EQ(std::memcmp(bits, out, sizeof bits), 0);
  convert(DType::kF32, nullptr, DType::kF32, nullptr, 0);
}

TEST(ReadAs, ASliceComesInTheWantedType) {
  for (const DType from : kAll) {
    const OneMatrix source(from, 6, 7);
    for (const DType to : kAll) {
      std::vector<float> expected;
      for (int r = 2; r < 5; ++r) {
        for (int c = 1; c < 4; ++c) expected.push_back(static_cast<float>(7 * r + c));
      }
      std::vector<std::byte> out(9 * static_cast<std::size_t>(size_of(to)));
      read_as(source, "m", {2, 5}, {1, 4}, to, out.data());
      EXPECT_EQ(out, store(to, expected));
      std::vector<float> floats(9);
      read_as_float(source, "m", {2, 5}, {1, 4}, floats.data());
      EXPECT_EQ(floats, expected);
    }
  }
}

TEST(ReadAs, AStoredFp32IsRoundedOnceToTheWantedType) {
  const OneMatrix source(DType::kF32, 1, 1, 1.0F + 0x1p-8F + 0x1p-20F);  // just over a tie
  std::uint16_t out = 0;
  read_as(source, "m", {0, 1}, {0, 1}, DType::kBf16, reinterpret_cast<std::byte*>(&out));
  EXPECT_EQ(out, 0x3f81);
}

TEST(ReadAs, ALargeMatrixIsReadInPiecesOfWholeRows) {
  const std::int64_t cols = 100'000;
  const OneMatrix source(DType::kBf16, 3, cols);
  std::vector<float> out(static_cast<std::size_t>(3 * cols));
  read_as_float(source, "m", {0, 3}, {0, cols}, out.data());
  EXPECT_EQ(source.reads, (std::vector<Range>{{0, 2}, {2, 3}}));
  for (const std::int64_t i : {std::int64_t{0}, cols - 1, cols, 2 * cols, 3 * cols - 1}) {
    EXPECT_EQ(out[static_cast<std::size_t>(i)],
              bf16_to_float(float_to_bf16(static_cast<float>(i))));
  }
}

TEST(ReadAs, NothingIsReadForAnEmptySlice) {
  const OneMatrix source(DType::kBf16, 6, 7);
  read_as_float(source, "m", {3, 3}, {0, 7}, nullptr);
  read_as_float(source, "m", {0, 6}, {2, 2}, nullptr);
}

TEST(ReadAs, AMissingTensorIsAnErrorThatSaysWhere) {
  const OneMatrix source(DType::kBf16, 6, 7);
  float out = 0;
  try {
    read_as_float(source, "q", {0, 1}, {0, 1}, &out);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
    EXPECT_NE(std::string(error.what()).find("'q' in a test"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace gatefold
