// What benchmarks calculate with.
#include "launch/timing.h"

#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "runtime/phases.h"

namespace gatefold {
namespace {

TEST(Quantile, IsAValueThatOccurred) {
  const std::vector<double> values = {4, 1, 3, 2, 10};
  EXPECT_EQ(median(values), 3);
  EXPECT_EQ(quantile(values, 0), 1);
  EXPECT_EQ(quantile(values, 0.9), 10);
  EXPECT_EQ(median_ratio({2, 30, 4}, {1, 10, 4}), 2);
  const std::vector<double> ten = {10, 9, 8, 7, 6, 5, 4, 3, 2, 1};
  EXPECT_EQ(quantile(ten, 0), 1);
  EXPECT_EQ(quantile(ten, 0.25), 3);
  EXPECT_EQ(quantile(ten, 0.9), 9);
  EXPECT_EQ(quantile(ten, 1), 10);
  EXPECT_EQ(quantile({7}, 0.9), 7);
}

TEST(MiddlePasses, LeaveOutAQuarterOnEachSide) {
  EXPECT_THAT(middle_passes({5, 1, 100, 3, 4, 2, 0, 6}), ::testing::ElementsAre(5, 3, 4, 0));
  EXPECT_THAT(middle_passes({7}), ::testing::ElementsAre(0));
  EXPECT_THAT(middle_passes({7, 3}), ::testing::ElementsAre(1, 0));
  EXPECT_THAT(middle_passes({}), ::testing::IsEmpty());
}

void sleep_ms(int n) { std::this_thread::sleep_for(std::chrono::milliseconds(n)); }

TEST(RangeTimes, CountARangeWithoutTheRangesWithinIt) {
  const auto device = make_cpu_device(1);
  RangeTimes ranges(*device);
  const double start = now();
  {
    Phases outer(*device);
    outer.enter("outer");
    sleep_ms(20);
    {
      Phases inner(*device);
      inner.enter("inner");
      sleep_ms(30);
    }
    outer.enter("last");
    sleep_ms(5);
  }
  const double all = now() - start;
  const auto& seconds = ranges.seconds();
  ASSERT_EQ(seconds.size(), 3);
  EXPECT_STREQ(seconds[0].name, "outer");
  EXPECT_STREQ(seconds[1].name, "inner");
  EXPECT_STREQ(seconds[2].name, "last");
  EXPECT_GE(seconds[0].seconds, 0.020);
  EXPECT_GE(seconds[1].seconds, 0.030);
  EXPECT_GE(seconds[2].seconds, 0.005);
  EXPECT_LE(seconds[0].seconds + seconds[1].seconds + seconds[2].seconds, all);
}

TEST(RangeTimes, AddUpWhatHasOneNameAndForgetWhenTold) {
  const auto device = make_cpu_device(1);
  RangeTimes ranges(*device);
  Phases phases(*device);
  phases.enter("a");
  phases.enter("b");
  phases.enter("a");
  EXPECT_EQ(ranges.seconds().size(), 2);
  ranges.clear();
  phases.enter("c");  // ends the second a
  ASSERT_EQ(ranges.seconds().size(), 2);
  EXPECT_STREQ(ranges.seconds()[0].name, "a");
  EXPECT_STREQ(ranges.seconds()[1].name, "c");
}

}  // namespace
}  // namespace gatefold
