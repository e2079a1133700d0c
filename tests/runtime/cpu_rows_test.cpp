// What the CPU device does to rows beside multiplying them: tiles, sums of roots, layouts, memory.
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/tensor_source.h"

namespace gatefold {
namespace {

constexpr std::byte kPoison{0xff};  // NaN in every element type

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// Values that all three element types hold, different for each index.
std::vector<std::byte> counting(std::int64_t n, DType dtype) {
  std::vector<float> values(as_size(n));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 199) - 99.0F;
  std::vector<std::byte> bytes(as_size(n * size_of(dtype)));
  convert(DType::kF32, reinterpret_cast<const std::byte*>(values.data()), dtype, bytes.data(), n);
  return bytes;
}

std::vector<float> as_floats(const std::byte* data, std::int64_t n, DType dtype) {
  std::vector<float> values(as_size(n));
  convert(dtype, data, DType::kF32, reinterpret_cast<std::byte*>(values.data()), n);
  return values;
}

class CpuRows : public ::testing::TestWithParam<int> {
 protected:
  std::unique_ptr<Device> device_ = make_cpu_device(GetParam());
};

TEST_P(CpuRows, GoIntoTilesWithZerosAroundAndComeBack) {
  for (const DType model : {DType::kF32, DType::kBf16, DType::kF16}) {
    const DType storage = device_->storage(model);
    for (const std::int64_t columns : {1, 63, 64, 100}) {
      for (const std::int64_t rows : {1, 15, 16, 17, 65}) {
        const std::int64_t stride = columns + 5;
        const std::vector<std::byte> x = counting(rows * stride, model);
        const std::int64_t width = round_up(columns, kInnerStep);
        Tiles tiles{nullptr, rows, tile_rows(rows, device_->tile_heights()), width};
        const std::int64_t elements = tiles.padded_rows() * width;
        std::vector<std::byte> memory(as_size(elements * size_of(storage)) + 64, kPoison);
        tiles.data = memory.data();
        device_->tile_rows({.data = x.data(), .stride = stride}, model, columns, tiles);

        const std::vector<float> in = as_floats(x.data(), rows * stride, model);
        const std::vector<float> out = as_floats(memory.data(), elements, storage);
        for (std::int64_t i = 0; i < elements; ++i) {
          const std::int64_t r = i / width;
          const std::int64_t c = i % width;
          const bool used = r < rows && c < columns;
          ASSERT_EQ(out[as_size(i)], used ? in[as_size(r * stride + c)] : 0.0F)
              << "row " << r << ", column " << c << " of " << rows << "x" << columns;
        }
        EXPECT_TRUE(
            std::all_of(memory.end() - 64, memory.end(), [](std::byte b) { return b == kPoison; }));

        std::vector<std::byte> back(x.size(), kPoison);
        device_->untile_rows(tiles, model, columns, back.data(), stride);
        const std::int64_t element = size_of(model);
        for (std::int64_t r = 0; r < rows; ++r) {
          const auto from = r * stride * element;
          const auto gap = from + columns * element;
          EXPECT_TRUE(std::equal(back.begin() + from, back.begin() + gap, x.begin() + from));
          EXPECT_TRUE(std::all_of(back.begin() + gap, back.begin() + from + stride * element,
                                  [](std::byte b) { return b == kPoison; }));
        }
      }
    }
  }
}

TEST_P(CpuRows, GroupsComeBackAsRowsForAnyWidth) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const std::int64_t columns : {1, 64, 65, 200}) {
      for (const std::int64_t rows : {0, 1, 7}) {
        const std::int64_t groups = ceil_div(columns, kGroup);
        const std::vector<std::byte> in = counting(groups * rows * kGroup, dtype);
        std::vector<std::byte> out(as_size(rows * columns * size_of(dtype)) + 64, kPoison);
        device_->ungroup(in.data(), dtype, rows, columns, out.data());
        const std::vector<float> grouped = as_floats(in.data(), groups * rows * kGroup, dtype);
        const std::vector<float> plain = as_floats(out.data(), rows * columns, dtype);
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t c = 0; c < columns; ++c) {
            ASSERT_EQ(plain[as_size(r * columns + c)],
                      grouped[as_size((c / kGroup * rows + r) * kGroup + c % kGroup)]);
          }
        }
        EXPECT_TRUE(
            std::all_of(out.end() - 64, out.end(), [](std::byte b) { return b == kPoison; }));
      }
    }
  }
}

/// A sum of roots with made-up values, its inputs, and the same by a plain loop.
struct RootProblem {
  std::int64_t rows;
  std::int64_t columns;
  MergePlan plan;
  bool by_rows;  // strides of whole rows instead of groups
  bool bias;
  DType dtype;
};

void expect_sum_of_roots(Device& device, const RootProblem& p) {
  const std::int64_t groups = ceil_div(p.columns, kGroup);
  const std::int64_t n = groups * p.rows * kGroup;
  std::vector<std::vector<float>> roots;
  std::vector<const float*> pointers;
  for (std::size_t root = 0; root < p.plan.merges.size(); ++root) {
    std::vector<float>& values = roots.emplace_back(as_size(n));
    for (std::size_t i = 0; i < values.size(); ++i) {
      // 1e8, -1e8 and small ones: any other order gives other bits.
      const auto kind = (i + root) % 3;
      values[i] = kind == 0 ? 1e8F : kind == 1 ? -1e8F : 1.0F + 0.37F * static_cast<float>(i % 7);
    }
    pointers.push_back(values.data());
  }
  std::vector<float> bias(as_size(p.columns), 0.25F);
  for (std::size_t i = 0; i < bias.size(); ++i) bias[i] += static_cast<float>(i);
  std::vector<std::byte> out(as_size(p.rows * p.columns * size_of(p.dtype)) + 64, kPoison);

  RootSum sum;
  sum.roots = pointers;
  sum.plan = &p.plan;
  sum.groups = groups;
  sum.rows = p.rows;
  sum.row_stride = p.by_rows ? groups * kGroup : kGroup;
  sum.group_stride = p.by_rows ? kGroup : p.rows * kGroup;
  sum.bias = p.bias ? bias.data() : nullptr;
  sum.columns = p.columns;
  sum.dtype = p.dtype;
  sum.out = out.data();
  sum.out_row_stride = p.columns;
  sum.out_group_stride = kGroup;
  device.sum_roots(sum);

  const std::vector<float> got = as_floats(out.data(), p.rows * p.columns, p.dtype);
  for (std::int64_t r = 0; r < p.rows; ++r) {
    for (std::int64_t c = 0; c < p.columns; ++c) {
      const std::int64_t at = c / kGroup * sum.group_stride + r * sum.row_stride + c % kGroup;
      std::vector<float> stack;
      for (std::size_t root = 0; root < roots.size(); ++root) {
        stack.push_back(roots[root][as_size(at)]);
        for (int m = 0; m < p.plan.merges[root]; ++m) {
          const float upper = stack.back();
          stack.pop_back();
          stack.back() = stack.back() + upper;
        }
      }
      const float value = p.bias ? stack.front() + bias[as_size(c)] : stack.front();
      ASSERT_EQ(std::bit_cast<std::uint32_t>(got[as_size(r * p.columns + c)]),
                std::bit_cast<std::uint32_t>(round_to(p.dtype, value)))
          << p.plan.merges.size() << " roots, row " << r << ", column " << c;
    }
  }
  EXPECT_TRUE(std::all_of(out.end() - 64, out.end(), [](std::byte b) { return b == kPoison; }));
}

TEST_P(CpuRows, RootsAddUpInTheOrderOfThePlan) {
  const std::vector<MergePlan> plans{{{0}, 1, 1},
                                     {{0, 1}, 2, 1},
                                     {{0, 1, 1}, 2, 1},
                                     {{0, 0, 2}, 3, 1},
                                     {{0, 1, 0, 2, 0, 1, 0, 3}, 4, 1}};
  for (const MergePlan& plan : plans) {
    for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
      for (const bool bias : {false, true}) {
        for (const bool by_rows : {false, true}) {
          for (const std::int64_t columns : {1, 64, 130}) {
            expect_sum_of_roots(*device_, {5, columns, plan, by_rows, bias, dtype});
          }
        }
      }
    }
  }
  expect_sum_of_roots(*device_, {0, 100, plans[1], false, true, DType::kF32});
  expect_sum_of_roots(*device_, {130, 100, plans[4], false, true, DType::kBf16});
}

TEST_P(CpuRows, EveryNanOfASumHasOnePattern) {
  const float quiet = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> first(64, std::bit_cast<float>(0xffc12345U));
  const std::vector<float> second(64, quiet);
  const std::vector<const float*> roots{first.data(), second.data()};
  const MergePlan plan{{0, 1}, 2, 1};
  std::vector<std::uint32_t> out(64);
  RootSum sum;
  sum.roots = roots;
  sum.plan = &plan;
  sum.groups = 1;
  sum.rows = 1;
  sum.columns = 64;
  sum.out = reinterpret_cast<std::byte*>(out.data());
  sum.out_row_stride = 64;
  device_->sum_roots(sum);
  EXPECT_THAT(out, ::testing::Each(0x7fc00000U));
}

TEST_P(CpuRows, TheSelfCheckSaysTheSameOnEveryThreadCount) {
  const auto one = make_cpu_device(1);
  for (const DType model : {DType::kF32, DType::kBf16}) {
    const DType storage = device_->storage(model);
    for (const WeightShape& shape : {WeightShape{64, 64, false}, WeightShape{100, 4096, true}}) {
      const SelfCheck mine = device_->self_check(shape, storage);
      const SelfCheck other = one->self_check(shape, storage);
      EXPECT_EQ(mine.rows, other.rows);
      EXPECT_EQ(mine.fingerprint, other.fingerprint);
      EXPECT_EQ(mine.kernel, other.kernel);
      EXPECT_TRUE(!mine.rows || mine.kernel.starts_with("brg:")) << mine.kernel;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, CpuRows, ::testing::Values(1, 2, 3));

TEST(CpuMemory, IsAlignedAndKnowsItsSize) {
  const auto device = make_cpu_device(1);
  for (const std::int64_t bytes : {0, 1, 255, 256, 1000, 5 << 20}) {
    const Buffer buffer = device->allocate(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 256, 0U);
    EXPECT_EQ(buffer.bytes(), bytes);
    std::memset(buffer.data(), 1, as_size(bytes));
  }
}

TEST(CpuMemory, ThatCannotBeHadIsError71WithTheBytesWanted) {
  const auto device = make_cpu_device(1);
  try {
    device->allocate(std::int64_t{1} << 60);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kOutOfMemory);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("1152921504606846976"));
  }
}

TEST(CpuMemory, ThatLinuxWouldPromiseButDoesNotHaveIsRefused) {
  const auto device = make_cpu_device(1);
  const std::int64_t machine = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  try {
    device->allocate(machine + (2 << 20));
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kOutOfMemory);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("this machine has"));
  }
}

TEST(CpuMemory, WeightsStartAsZeros) {
  const auto device = make_cpu_device(2);
  const WeightShape shape{100, 70, true};
  const Weight weight = device->allocate_weight(shape, DType::kF32, GemmKernel::kPlain);
  EXPECT_EQ(weight.data.bytes(), 4 * 64 * 128 * 4);  // 128 padded outputs in groups of 32
  const std::byte* data = weight.data.data();
  EXPECT_TRUE(
      std::all_of(data, data + weight.data.bytes(), [](std::byte b) { return b == std::byte{0}; }));
}

}  // namespace
}  // namespace gatefold
