// What a machine is measured by does the work that it is said to do.
#include "launch/machine.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "runtime/memory_stream.h"
#include "tests/testing_device.h"

namespace gatefold {
namespace {

TEST(MemoryStream, ReadsEveryWordOnceForAnySizeAndAnyNumberOfThreads) {
  for (const std::int64_t words : {0, 1, 31, 33, 8191, 8192, 8193, 100000}) {
    std::vector<std::uint64_t> memory(static_cast<std::size_t>(words) + 1, ~std::uint64_t{0});
    auto* bytes = reinterpret_cast<std::byte*>(memory.data());
    for (const int threads : {1, 2, 3}) {
      touch_memory(bytes, words * 8, threads);
      EXPECT_EQ(xor_words(bytes, words * 8, threads), 0U);
      EXPECT_EQ(memory.back(), ~std::uint64_t{0}) << "beyond the end";
      std::uint64_t expected = 0;
      for (std::size_t i = 0; i + 1 < memory.size(); ++i) {
        memory[i] = i * 0x9e3779b97f4a7c15U + 1;
        expected ^= memory[i];
      }
      EXPECT_EQ(xor_words(bytes, words * 8, threads), expected) << words << " words";
    }
  }
}

TEST(Loads, SayWhatTheirPassesDo) {
  const auto device = testing::testing_device(2);
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    const Load gemm = gemm_load(*device, dtype, 64);
    gemm.pass();
    EXPECT_EQ(gemm.work, 2.0 * 64 * 64 * 64);
    EXPECT_TRUE(gemm.how.starts_with(name_of(dtype))) << gemm.how;
  }
  const std::int64_t bytes = 4 << 20;
  const Load read = read_load(*device, bytes, 2);
  read.pass();
  EXPECT_GE(read.work, static_cast<double>(bytes));
  EXPECT_LE(read.work, 1.07 * static_cast<double>(bytes));
  const Load copy = copy_load(*device, bytes);
  copy.pass();
  EXPECT_EQ(copy.work, static_cast<double>(bytes));
  for (const CopyWay way : {CopyWay::kToDevice, CopyWay::kToHost}) {
    const Load moved = host_copy_load(*device, bytes, way);
    moved.pass();
    EXPECT_EQ(moved.work, static_cast<double>(bytes));
  }
}

TEST(Schedule, TimesAMillisecondAsOftenAsFitsButThreeTimes) {
  const auto is = [](const Schedule& plan, std::int64_t times, std::int64_t passes) {
    return plan.times == times && plan.passes == passes;
  };
  EXPECT_TRUE(is(schedule(0.010, 20, 0.5), 20, 1));
  EXPECT_TRUE(is(schedule(0.050, 20, 0.5), 10, 1));
  EXPECT_TRUE(is(schedule(1.0, 20, 0.5), 3, 1));
  EXPECT_TRUE(is(schedule(1.0, 2, 0.5), 2, 1));
  EXPECT_TRUE(is(schedule(1.0, 1, 0.5), 1, 1));
  EXPECT_TRUE(is(schedule(0.25e-3, 20, 0.5), 20, 4));
  EXPECT_TRUE(is(schedule(0, 20, 0.5), 20, 1000)) << "a clock that stood still";
}

TEST(Passes, AreTwoBeforeThoseThatCount) {
  int passes = 0;
  const Load slow{"", 1, [&passes] {
                    ++passes;
                    std::this_thread::sleep_for(std::chrono::milliseconds(2));
                  }};
  const std::vector<double> seconds = time_passes(slow, 4, 100);
  EXPECT_EQ(seconds.size(), 4U);
  EXPECT_EQ(passes, 6);
  for (const double one : seconds) EXPECT_GE(one, 0.002);
}

}  // namespace
}  // namespace gatefold
