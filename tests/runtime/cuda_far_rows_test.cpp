// Indices above 2^31. The memory between the rows costs nothing on the stand-in, and a few GiB on a
// GPU.
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

}  // namespace
}  // namespace gatefold
