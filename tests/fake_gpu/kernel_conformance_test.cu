// What a kernel may rely on, on a GPU and on the stand-in.
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#define DYNAMIC_SHARED(T, name)                            \
  extern __shared__ __align__(16) unsigned char name##_[]; \
  T* name = reinterpret_cast<T*>(name##_)

#include "tests/fake_gpu/conformance.h"
#include "tests/fake_gpu/conformance_kernels.cuh"

namespace conformance {
namespace {

std::vector<int> range(int count) {
  std::vector<int> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

TEST(Kernels, TakeTheirArgumentsAndVisitEachIndexOnce) {
  for (const int count : {1, 31, 257, 1000}) {
    std::vector<float> values(static_cast<std::size_t>(count));
    std::iota(values.begin(), values.end(), 0.0F);
    const DeviceArray<float> array(values);
    scale<4, float><<<3, 64>>>(array.data(), {count, 0.5F, 'x'});
    ASSERT_CUDA(cudaGetLastError());
    for (float& value : values) value *= 2.0F;
    EXPECT_EQ(values, array.values()) << count;
  }
}

TEST(Kernels, ArgumentsAreCopiedAtTheLaunch) {
  const DeviceArray<double> array(std::vector<double>{3.0});
  Parameters parameters{1, 2.0F, 'x'};
  scale<1, double><<<1, 1>>>(array.data(), parameters);
  parameters.factor = 100.0F;
  ASSERT_CUDA(cudaGetLastError());
  EXPECT_EQ(std::vector<double>{6.0}, array.values());
}

TEST(Kernels, HaveThreeDimensions) {
  const dim3 grid(3, 2, 2);
  const dim3 block(5, 3, 2);
  const std::size_t count = 3 * 2 * 2 * 5 * 3 * 2;
  const DeviceArray<std::int64_t> array(count);
  number_places<<<grid, block>>>(array.data());
  ASSERT_CUDA(cudaGetLastError());
  std::vector<std::int64_t> expected(count);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(expected, array.values());
}

TEST(Kernels, ABarrierOfTheBlockOrdersSharedMemory) {
  for (const unsigned threads : {1U, 2U, 32U, 64U, 256U, 1024U}) {
    const unsigned blocks = 5;
    const DeviceArray<int> values(range(static_cast<int>(blocks * threads)));
    const DeviceArray<int> sums(blocks);
    block_sums<<<blocks, threads, threads * sizeof(int)>>>(values.data(), sums.data());
    ASSERT_CUDA(cudaGetLastError());
    const auto found = sums.values();
    for (unsigned b = 0; b < blocks; ++b) {
      const unsigned first = b * threads;
      EXPECT_EQ(static_cast<int>(threads * first + threads * (threads - 1) / 2), found[b]);
    }
  }
}

TEST(Kernels, ShufflesTakeFromTheLaneTheyName) {
  constexpr int kThreads = 64;
  const DeviceArray<int> array(7 * kThreads);
  shuffles<<<1, kThreads>>>(array.data());
  ASSERT_CUDA(cudaGetLastError());
  const auto out = array.values();
  const auto at = [&](int row, int i) { return out[static_cast<std::size_t>(row * kThreads + i)]; };
  for (int i = 0; i < kThreads; ++i) {
    const int warp = i & ~31;
    const int lane = i & 31;
    const int part = i & ~7;
    EXPECT_EQ(10 * (i ^ 1), at(0, i));
    EXPECT_EQ(10 * (lane + 4 < 32 ? i + 4 : i), at(1, i));
    EXPECT_EQ(10 * (lane >= 3 ? i - 3 : i), at(2, i));
    EXPECT_EQ(10 * (warp + 5), at(3, i));
    EXPECT_EQ(10 * (part + 1), at(4, i));
    EXPECT_EQ(10 * (i % 8 + 4 < 8 ? i + 4 : i), at(5, i));
    EXPECT_EQ(5 * (i ^ 16), at(6, i));
  }
}

TEST(Kernels, Vote) {
  const DeviceArray<unsigned> array(7);
  votes<<<1, 64>>>(array.data());
  ASSERT_CUDA(cudaGetLastError());
  EXPECT_EQ((std::vector<unsigned>{0x49249249U, 1, 0, 22, 1, 1, 0}), array.values());
}

TEST(Kernels, HalvesOfAWarpMeetAtBarriersOfTheirOwn) {
  const DeviceArray<int> sums(2);
  half_warps<<<1, 32>>>(sums.data());
  ASSERT_CUDA(cudaGetLastError());
  EXPECT_EQ((std::vector<int>{240, 256}), sums.values());
}

TEST(Kernels, AtomicsLoseNothing) {
  const int count = 6 * 128;
  const DeviceArray<int> counters(std::vector<int>{0, -1, count, 0});
  const DeviceArray<float> sum(std::vector<float>{0.0F});
  const DeviceArray<unsigned long long> big(std::vector<unsigned long long>{0});
  atomics<<<6, 128>>>(counters.data(), sum.data(), big.data());
  ASSERT_CUDA(cudaGetLastError());
  EXPECT_EQ((std::vector<int>{count * (count - 1) / 2, count - 1, 0, 2 * count}),
            counters.values());
  EXPECT_EQ(std::vector<float>{count}, sum.values());
  EXPECT_EQ(std::vector<unsigned long long>{0x100000001ULL * count}, big.values());
}

TEST(Kernels, RoundToNearestEven) {
  struct Case {
    float value;
    std::uint16_t bf16;
    std::uint16_t fp16;
  };
  const Case cases[] = {
      {1.0F, 0x3f80, 0x3c00},
      {-0.0F, 0x8000, 0x8000},
      {0x1.01p0F, 0x3f80, 0x3c04},      // bf16: a tie, to even
      {0x1.03p0F, 0x3f82, 0x3c0c},      // a tie, up
      {0x1.010002p0F, 0x3f81, 0x3c04},  // just above the tie
      {65504.0F, 0x4780, 0x7bff},
      {65520.0F, 0x4780, 0x7c00},  // fp16: infinity
      {0x1p-25F, 0x3300, 0x0000},  // fp16: a tie with zero
      {0x1p-133F, 0x0001, 0x0000},
      {3.4e38F, 0x7f80, 0x7c00},
      {std::numeric_limits<float>::infinity(), 0x7f80, 0x7c00},
  };
  std::vector<float> values;
  std::vector<std::uint16_t> as_bf16;
  std::vector<std::uint16_t> as_fp16;
  for (const Case& one : cases) {
    values.push_back(one.value);
    as_bf16.push_back(one.bf16);
    as_fp16.push_back(one.fp16);
  }
  const DeviceArray<float> in(values);
  const DeviceArray<std::uint16_t> bf16(values.size());
  const DeviceArray<std::uint16_t> fp16(values.size());
  round_values<<<1, 32>>>(in.data(), static_cast<int>(values.size()), bf16.data(), fp16.data());
  ASSERT_CUDA(cudaGetLastError());
  EXPECT_EQ(as_bf16, bf16.values());
  EXPECT_EQ(as_fp16, fp16.values());
}

TEST(Kernels, RoundEachStepThatSaysSo) {
  const float a = 0x1.000002p0F;
  const DeviceArray<float> out(2);
  contraction<<<1, 1>>>(a, a, -0x1.000004p0F, out.data());
  ASSERT_CUDA(cudaGetLastError());
  EXPECT_EQ((std::vector<float>{0.0F, 0x1p-46F}), out.values());
}

TEST(Kernels, ABadLaunchIsRefusedAndForgotten) {
  const DeviceArray<int> array(std::vector<int>{7});
  const auto launch = [&](dim3 grid, dim3 block, std::size_t shared) {
    set_all<<<grid, block, shared>>>(array.data(), 1, 8);
    return cudaGetLastError();
  };
  EXPECT_EQ(cudaErrorInvalidConfiguration, launch(0, 32, 0));
  EXPECT_EQ(cudaErrorInvalidConfiguration, launch(1, 0, 0));
  EXPECT_EQ(cudaErrorInvalidConfiguration, launch(1, 1025, 0));
  EXPECT_EQ(cudaErrorInvalidConfiguration, launch(1, dim3(1, 1, 65), 0));
  EXPECT_EQ(cudaErrorInvalidConfiguration, launch(dim3(1, 65536), 1, 0));
  EXPECT_EQ(cudaErrorInvalidValue, launch(1, 1, (48 << 10) + 1));
  EXPECT_CUDA(cudaGetLastError());
  EXPECT_EQ(std::vector<int>{7}, array.values());
  EXPECT_EQ(cudaSuccess, launch(1, 1, 48 << 10));
  EXPECT_EQ(std::vector<int>{8}, array.values());
}

TEST(Kernels, GetMoreSharedMemoryWhenAsked) {
  const DeviceArray<int> values(range(1024));
  const DeviceArray<int> sums(1);
  const int bytes = 64 << 10;
  EXPECT_CUDA(cudaFuncSetAttribute(block_sums, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  block_sums<<<1, 1024, bytes>>>(values.data(), sums.data());
  ASSERT_CUDA(cudaGetLastError());
  EXPECT_EQ(std::vector<int>{1023 * 512}, sums.values());
}

}  // namespace
}  // namespace conformance
