// Indices above 2^31. The memory between the rows costs nothing on the stand-in, and up to 16 GiB
// on a GPU.
#include <gmock/gmock.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/canonical.h"
#include "runtime/device.h"

namespace gatefold {
namespace {

constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 64;

TEST(CudaFarRows, AreCopiedByteByByte) {
  const auto device = make_cuda_device(0);
  // Odd places, so that a unit of the copy is a byte.
  const Buffer far = device->allocate(kFar + 8);
  const std::vector<std::byte> values{std::byte{1}, std::byte{2}, std::byte{3},
                                      std::byte{4}, std::byte{5}, std::byte{6}};
  const Buffer near = device->allocate(std::ssize(values));
  device->upload(near.data(), values.data(), std::ssize(values));
  device->copy_rows(far.data() + 1, kFar + 1, near.data(), 3, 2, 3);
  const Buffer back = device->allocate(std::ssize(values));
  device->copy_rows(back.data(), 3, far.data() + 1, kFar + 1, 2, 3);
  std::vector<std::byte> found(values.size());
  device->download(found.data(), back.data(), std::ssize(values));
  EXPECT_EQ(values, found);
}

TEST(CudaFarRows, AreSummed) {
  const auto device = make_cuda_device(0);
  const auto row_bytes = kGroup * std::int64_t{sizeof(float)};
  const Buffer far = device->allocate(kFar * std::int64_t{sizeof(float)} + row_bytes);
  std::vector<float> values(static_cast<std::size_t>(2 * kGroup));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
  device->upload(far.data(), bytes, row_bytes);
  device->upload(far.data() + kFar * std::int64_t{sizeof(float)}, bytes + row_bytes, row_bytes);
  const Buffer out = device->allocate(2 * row_bytes);
  const MergePlan plan = SumTree({1, 1}).global_plan(std::array{Range{0, 1}});
  const std::array<const float*, 1> roots{far.as<float>()};
  device->sum_roots({.roots = roots,
                     .plan = &plan,
                     .groups = 1,
                     .rows = 2,
                     .row_stride = kFar,
                     .group_stride = kGroup,
                     .columns = kGroup,
                     .dtype = DType::kF32,
                     .out = out.data(),
                     .out_row_stride = kGroup,
                     .out_group_stride = kGroup});
  std::vector<float> found(values.size());
  device->download(reinterpret_cast<std::byte*>(found.data()), out.data(), 2 * row_bytes);
  EXPECT_EQ(values, found);
}

/// A grid has 65535 rows at most, and its threads go round again.
constexpr std::int64_t kManyRows = 65535 + 3;

TEST(CudaFarRows, AreCopiedWhereThereAreMoreThanAGridHas) {
  const auto device = make_cuda_device(0);
  std::vector<std::byte> values(static_cast<std::size_t>(kManyRows));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::byte>(i % 251);
  const Buffer in = device->allocate(kManyRows);
  const Buffer out = device->allocate(kManyRows);
  device->upload(in.data(), values.data(), kManyRows);
  device->copy_rows(out.data(), 1, in.data(), 1, kManyRows, 1);
  std::vector<std::byte> found(values.size());
  device->download(found.data(), out.data(), kManyRows);
  EXPECT_TRUE(values == found);
}

/// One product of an integer weight w [64, 1] and two rows, merged onto slots that lie as far apart
/// as their rows.
TEST(CudaFarRows, AreMerged) {
  const auto device = make_cuda_device(0);
  const WeightShape shape{kGroup, 1, false};
  Weight weight = device->allocate_weight(shape, DType::kF32, GemmKernel::kPlain);
  std::vector<float> values(static_cast<std::size_t>(kGroup));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i + 1);
  device->store_rows(weight, 0, kGroup, reinterpret_cast<const std::byte*>(values.data()));
  const std::array<float, 2> tokens{2, 3};
  const Buffer x = device->allocate(sizeof(tokens));
  device->upload(x.data(), reinterpret_cast<const std::byte*>(tokens.data()), sizeof(tokens));
  Tiles h{nullptr, 2, tile_rows(2, device->tile_heights()), shape.padded_inputs()};
  const Buffer tiles = device->allocate(h.padded_rows() * h.width * std::int64_t{sizeof(float)});
  h.data = tiles.data();
  device->tile_rows({.data = x.data(), .stride = 1}, DType::kF32, 1, h);
  device->prepare(shape, DType::kF32, GemmKernel::kPlain, h.tile_rows);

  const std::int64_t slot = kFar + kGroup;
  const Buffer far = device->allocate((kFar + slot + kGroup) * std::int64_t{sizeof(float)});
  const Partials stack{far.as<float>(), 2, 1, kFar, kGroup, slot};
  device->gemm_merge(weight, h, stack, 0, 0);
  device->gemm_merge(weight, h, stack, 1, 0);
  device->gemm_merge(weight, h, stack, 2, 2);
  const auto at = [&](std::int64_t row, std::int64_t index) {
    std::vector<float> found(values.size());
    device->download(reinterpret_cast<std::byte*>(found.data()),
                     far.data() + (row * kFar + index * slot) * std::int64_t{sizeof(float)},
                     kGroup * std::int64_t{sizeof(float)});
    return found;
  };
  for (const std::int64_t row : {0, 1}) {
    for (const std::int64_t index : {0, 1}) {
      const float times = tokens[static_cast<std::size_t>(row)] * (index == 0 ? 3.0F : 1.0F);
      std::vector<float> expected = values;
      for (float& value : expected) value *= times;
      EXPECT_EQ(expected, at(row, index)) << "row " << row << " of slot " << index;
    }
  }
}

/// Memory of the device with these values.
template <typename T>
Buffer uploaded(Device& device, const std::vector<T>& values) {
  const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(T));
  Buffer buffer = device.allocate(bytes);
  device.upload(buffer.data(), reinterpret_cast<const std::byte*>(values.data()), bytes);
  return buffer;
}

std::vector<float> group_at(Device& device, const float* from) {
  std::vector<float> found(static_cast<std::size_t>(kGroup));
  device.download(reinterpret_cast<std::byte*>(found.data()),
                  reinterpret_cast<const std::byte*>(from), kGroup * std::int64_t{sizeof(float)});
  return found;
}

/// 1, 2, 3 … times `factor`.
std::vector<float> counted(float factor) {
  std::vector<float> values(static_cast<std::size_t>(kGroup));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = factor * static_cast<float>(i + 1);
  return values;
}

/// Row 1 of two that lie far apart, to row 1 of two that lie side by side.
TEST(CudaFarRows, AreGatheredAndTiled) {
  const auto device = make_cuda_device(0);
  const std::int64_t row_bytes = kGroup * std::int64_t{sizeof(float)};
  const Buffer far = device->allocate(kFar * std::int64_t{sizeof(float)} + row_bytes);
  const std::vector<float> values = counted(1);
  device->upload(far.data() + kFar * std::int64_t{sizeof(float)},
                 reinterpret_cast<const std::byte*>(values.data()), row_bytes);
  const Buffer one = uploaded(*device, std::vector<std::int32_t>{1});
  const Buffer scale = uploaded(*device, std::vector<float>{2});
  Tiles tiles{nullptr, 1, tile_rows(1, device->tile_heights()), kGroup};
  const Buffer out = device->allocate(tiles.padded_rows() * row_bytes);
  tiles.data = out.data();
  for (const float* by : {static_cast<const float*>(nullptr), scale.as<const float>()}) {
    device->tile_rows({far.data(), kFar, one.as<std::int32_t>(), by}, DType::kF32, kGroup, tiles);
    EXPECT_EQ(group_at(*device, out.as<float>()), counted(by == nullptr ? 1 : 2));
  }
}

TEST(CudaFarRows, AreGatheredByteByByteFromFarDown) {
  const auto device = make_cuda_device(0);
  constexpr std::int32_t kRow = 1 << 26;
  constexpr std::int64_t kBytes = 33;  // odd, so that a unit of the copy is a byte
  const Buffer far = device->allocate((std::int64_t{kRow} + 1) * kBytes);
  std::vector<std::byte> values(static_cast<std::size_t>(kBytes));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::byte(i + 1);
  device->upload(far.data() + kRow * kBytes, values.data(), kBytes);
  const Buffer index = uploaded(*device, std::vector<std::int32_t>{kRow});
  const Buffer out = device->allocate(kBytes);
  device->gather_rows(out.data(), far.data(), index.as<std::int32_t>(), 1, kBytes);
  std::vector<std::byte> found(values.size());
  device->download(found.data(), out.data(), kBytes);
  EXPECT_EQ(found, values);
}

/// One row of an expert onto sums that lie far down, and the token that has them.
TEST(CudaFarRows, AreWeighedAndCombined) {
  const auto device = make_cuda_device(0);
  constexpr std::int32_t kRow = 1 << 25;  // of 64 sums
  const Buffer sums =
      device->allocate((std::int64_t{kRow} + 3) * kGroup * std::int64_t{sizeof(float)});
  const auto row_of_sums = [&](std::int64_t row) { return sums.as<float>() + row * kGroup; };
  const std::vector<float> before = counted(10);
  device->upload(reinterpret_cast<std::byte*>(row_of_sums(kRow)),
                 reinterpret_cast<const std::byte*>(before.data()),
                 kGroup * std::int64_t{sizeof(float)});
  const Buffer rows = uploaded(*device, counted(1));
  const Buffer begin = uploaded(*device, std::vector<std::int32_t>{0, 1});
  const Buffer merges = uploaded(*device, std::vector<std::int32_t>{kRow});
  const Buffer targets = uploaded(*device, std::vector<std::int32_t>{kRow + 1});
  device->weigh_rows({.rows = rows.as<float>(),
                      .count = 1,
                      .groups = 1,
                      .group_stride = kGroup,
                      .merge_begin = begin.as<std::int32_t>(),
                      .merges = merges.as<std::int32_t>(),
                      .targets = targets.as<std::int32_t>(),
                      .sums = sums.as<float>()});
  EXPECT_EQ(group_at(*device, row_of_sums(kRow + 1)), counted(11));

  const Buffer two = uploaded(*device, std::vector<std::int32_t>{0, 2});
  const Buffer roots = uploaded(*device, std::vector<std::int32_t>{kRow, kRow + 1});
  const Buffer plan = uploaded(*device, std::vector<std::int32_t>{0, 1});
  const Buffer y = device->allocate(kGroup * std::int64_t{sizeof(float)});
  device->combine_rows({.sums = sums.as<float>(),
                        .begin = two.as<std::int32_t>(),
                        .roots = roots.as<std::int32_t>(),
                        .merges = plan.as<std::int32_t>(),
                        .tokens = 1,
                        .groups = 1,
                        .columns = kGroup,
                        .row_stride = kGroup,
                        .y = y.data()});
  EXPECT_EQ(group_at(*device, y.as<float>()), counted(21));
}

}  // namespace
}  // namespace gatefold
