// More rows than a GPU's grid has: its threads have to go round again.
#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/canonical.h"
#include "runtime/device.h"
#include "tests/testing_device.h"

namespace gatefold {
namespace {

using testing::testing_device;

constexpr std::int64_t kRows = 65535 + 3;

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// Small integers that tell rows apart.
float value(std::int64_t row) { return static_cast<float>(row % 1021 - 500); }

/// [rows, 64]: value(row) times 1, 2, … 64.
std::vector<float> groups(std::int64_t rows, float times = 1.0F) {
  std::vector<float> all(as_size(rows * kGroup));
  for (std::int64_t i = 0; i < rows * kGroup; ++i) {
    all[as_size(i)] = times * value(i / kGroup) * static_cast<float>(i % kGroup + 1);
  }
  return all;
}

std::vector<std::int32_t> counted(std::int64_t n) {
  std::vector<std::int32_t> numbers(as_size(n));
  for (std::int64_t i = 0; i < n; ++i) numbers[as_size(i)] = static_cast<std::int32_t>(i);
  return numbers;
}

std::vector<std::int32_t> backwards(std::int64_t n) {
  std::vector<std::int32_t> numbers = counted(n);
  std::ranges::reverse(numbers);
  return numbers;
}

Buffer room(Device& device, std::int64_t values) { return device.allocate(values * 4); }

template <typename T>
Buffer uploaded(Device& device, const std::vector<T>& values) {
  Buffer buffer = room(device, std::ssize(values));
  device.upload(buffer.data(), reinterpret_cast<const std::byte*>(values.data()), buffer.bytes());
  return buffer;
}

std::vector<float> downloaded(Device& device, const Buffer& buffer, std::int64_t values) {
  std::vector<float> found(as_size(values));
  device.download(reinterpret_cast<std::byte*>(found.data()), buffer.data(), values * 4);
  return found;
}

/// Of a matrix [outputs, 1] whose values are those of its rows.
Weight column(Device& device, std::int64_t outputs) {
  std::vector<float> values(as_size(outputs));
  for (std::int64_t i = 0; i < outputs; ++i) values[as_size(i)] = value(i + 501);
  Weight weight = device.allocate_weight({outputs, 1, false}, DType::kF32, GemmKernel::kPlain);
  device.store_rows(weight, 0, outputs, reinterpret_cast<const std::byte*>(values.data()));
  return weight;
}

/// Rows of one value, in tiles of `height` rows.
struct Column {
  Column(Device& device, const std::vector<float>& values, std::int64_t height, std::int64_t width)
      : x(uploaded(device, values)),
        memory(room(device, round_up(std::ssize(values), height) * width)),
        tiles{memory.data(), std::ssize(values), height, width} {
    device.tile_rows({.data = x.data(), .stride = 1}, DType::kF32, 1, tiles);
  }

  Buffer x;
  Buffer memory;
  Tiles tiles;
};

TEST(ManyRows, OfAWeightArePacked) {
  const auto device = testing_device();
  const Weight weight = column(*device, kRows);
  const Column one(*device, {1}, device->tile_heights().front(), weight.shape.padded_inputs());
  device->prepare(weight.shape, DType::kF32, GemmKernel::kPlain, one.tiles.tile_rows);
  const Buffer sums = room(*device, round_up(kRows, kGroup));
  const std::int64_t count = ceil_div(kRows, kGroup);
  device->gemm_merge(weight, one.tiles, {sums.as<float>(), 1, count, kGroup, kGroup, 0}, 0, 0);
  const std::vector<float> found = downloaded(*device, sums, kRows);
  for (std::int64_t i = 0; i < kRows; ++i) ASSERT_EQ(found[as_size(i)], value(i + 501)) << i;
}

TEST(ManyRows, AreActivatedMergedAndSummed) {
  const auto device = testing_device();
  const Weight weight = column(*device, kGroup);  // 1, 2, … 64
  std::vector<float> values(as_size(kRows));
  for (std::int64_t t = 0; t < kRows; ++t) values[as_size(t)] = value(t);
  const Column x(*device, values, kRows, weight.shape.padded_inputs());
  device->prepare(weight.shape, DType::kF32, GemmKernel::kPlain, kRows);
  const Buffer h = room(*device, kRows * kGroup);
  const Activation identity{.kind = ActivationKind::kIdentity, .gated = false};
  device->gemm_activation(weight, nullptr, identity, DType::kF32, x.tiles,
                          {h.data(), kRows, kRows, kGroup});
  EXPECT_TRUE(downloaded(*device, h, kRows * kGroup) == groups(kRows));

  // The same product onto the first.
  const Buffer stack = uploaded(*device, groups(kRows));
  const Partials partials{stack.as<float>(), kRows, 1, kGroup, kRows * kGroup, kRows * kGroup};
  device->gemm_merge(weight, x.tiles, partials, 1, 1);
  const Buffer y = room(*device, kRows * kGroup);
  const MergePlan plan = SumTree({1, 1}).global_plan(std::array{Range{0, 1}});
  const std::array<const float*, 1> roots{stack.as<float>()};
  device->sum_roots({.roots = roots,
                     .plan = &plan,
                     .groups = 1,
                     .rows = kRows,
                     .row_stride = kGroup,
                     .group_stride = kGroup * kRows,
                     .columns = kGroup,
                     .dtype = DType::kF32,
                     .out = y.data(),
                     .out_row_stride = kGroup,
                     .out_group_stride = kGroup});
  EXPECT_TRUE(downloaded(*device, y, kRows * kGroup) == groups(kRows, 2.0F));
}

TEST(ManyRows, AreGatheredWeighedAndCombined) {
  const auto device = testing_device();
  const Buffer x = uploaded(*device, groups(kRows));
  const Buffer turned = uploaded(*device, backwards(kRows));
  const Buffer back = room(*device, kRows * kGroup);
  device->gather_rows(back.data(), x.data(), turned.as<std::int32_t>(), kRows, kGroup * 4);
  // And to where they were, doubled.
  const Buffer twice = uploaded(*device, std::vector<float>(as_size(kRows), 2.0F));
  const Buffer tiled = room(*device, kRows * kGroup);
  device->tile_rows({back.data(), kGroup, turned.as<std::int32_t>(), twice.as<float>()},
                    DType::kF32, kGroup, {tiled.data(), kRows, kRows, kGroup});
  const Buffer begin = uploaded(*device, counted(kRows + 1));
  const Buffer none = uploaded(*device, std::vector<std::int32_t>(as_size(kRows + 1)));
  const Buffer sums = room(*device, kRows * kGroup);
  device->weigh_rows({.rows = tiled.as<float>(),
                      .count = kRows,
                      .groups = 1,
                      .group_stride = kRows * kGroup,
                      .weights = twice.as<float>(),
                      .merge_begin = none.as<std::int32_t>(),
                      .merges = none.as<std::int32_t>(),
                      .targets = turned.as<std::int32_t>(),
                      .sums = sums.as<float>()});
  const Buffer y = room(*device, kRows * kGroup);
  device->combine_rows({.sums = sums.as<float>(),
                        .begin = begin.as<std::int32_t>(),
                        .roots = turned.as<std::int32_t>(),
                        .merges = none.as<std::int32_t>(),
                        .tokens = kRows,
                        .groups = 1,
                        .columns = kGroup,
                        .row_stride = kGroup,
                        .y = y.data()});
  EXPECT_TRUE(downloaded(*device, y, kRows * kGroup) == groups(kRows, 4.0F));
}

}  // namespace
}  // namespace gatefold
