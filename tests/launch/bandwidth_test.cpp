// The formulas that bandwidths are reported by, against numbers worked out by hand.
#include "launch/bandwidth.h"

#include <gtest/gtest.h>

#include <cmath>

namespace gatefold {
namespace {

TEST(Bandwidth, OfAGigabyteInTenMillisecondsIsAHundredGigabytesASecond) {
  const double alg = algorithm_bandwidth(1e9, 0.010);
  EXPECT_DOUBLE_EQ(alg * 1e-9, 100);
  EXPECT_DOUBLE_EQ(alg * all_reduce_share(2) * 1e-9, 100);
  EXPECT_DOUBLE_EQ(alg * all_reduce_share(4) * 1e-9, 150);
  EXPECT_DOUBLE_EQ(alg * all_reduce_share(8) * 1e-9, 175);
  EXPECT_DOUBLE_EQ(alg * all_to_all_share(2) * 1e-9, 50);
  EXPECT_DOUBLE_EQ(alg * all_to_all_share(4) * 1e-9, 75);
  EXPECT_DOUBLE_EQ(alg * all_to_all_share(8) * 1e-9, 87.5);
}

TEST(Bandwidth, OfOneRankOrOfNoTimeIsAPlainZero) {
  for (const double zero :
       {all_reduce_share(1), all_to_all_share(1), all_reduce_share(0), all_to_all_share(0),
        algorithm_bandwidth(1e9, 0), algorithm_bandwidth(0, 0), algorithm_bandwidth(0, 1)}) {
    EXPECT_EQ(zero, 0);
    EXPECT_FALSE(std::signbit(zero));
  }
}

}  // namespace
}  // namespace gatefold
