#include "launch/expert_load.h"

#include <gmock/gmock.h>

namespace gatefold {
namespace {

using ::testing::ElementsAre;

TEST(ExpertLoad, EvenLoadHasTheMostEntropyAndOneForAllNone) {
  const ExpertRows even(8, 3);
  EXPECT_EQ(max_over_mean(even), 1.0);
  EXPECT_EQ(entropy_bits(even), 3.0);
  EXPECT_EQ(entropy_share(even), 1.0);
  EXPECT_EQ(experts_without(even), 0);
  const ExpertRows one = {0, 0, 5, 0};
  EXPECT_EQ(max_over_mean(one), 4.0);
  EXPECT_EQ(entropy_bits(one), 0.0);
  EXPECT_EQ(entropy_share(one), 0.0);
  EXPECT_EQ(experts_without(one), 3);
  EXPECT_EQ(entropy_share({7}), 1.0);
}

TEST(ExpertLoad, HalvesAndQuartersGiveWholeBits) {
  const ExpertRows rows = {4, 2, 1, 1};
  EXPECT_EQ(entropy_bits(rows), 1.75);
  EXPECT_EQ(entropy_share(rows), 0.875);
  EXPECT_EQ(max_over_mean(rows), 2.0);
}

TEST(ExpertLoad, EachExpertHasALineAndOnlyAnIdleOneNoBar) {
  EXPECT_THAT(load_histogram({1000, 0, 1}),
              ElementsAre("  expert 0              1000  " + std::string(40, '#'),
                          "  expert 1                 0", "  expert 2                 1  #"));
  EXPECT_EQ(load_histogram(ExpertRows(64, 1)).size(), 64U);
}

TEST(ExpertLoad, ManyExpertsShareLines) {
  ExpertRows rows(100, 1);
  rows[99] = 2;
  const std::vector<std::string> lines = load_histogram(rows);
  ASSERT_EQ(lines.size(), 25U);
  EXPECT_EQ(lines.front(), "  experts 0-3              4  " + std::string(32, '#'));
  EXPECT_EQ(lines.back(), "  experts 96-99            5  " + std::string(40, '#'));
  // 65 experts: 21 lines of three and one of two.
  EXPECT_EQ(load_histogram(ExpertRows(65, 1)).back(),
            "  experts 63-64            2  " + std::string(27, '#'));
}

TEST(ExpertLoad, NoTokenAtAllDrawsNoBar) {
  EXPECT_THAT(load_histogram({0, 0}),
              ElementsAre("  expert 0                 0", "  expert 1                 0"));
}

}  // namespace
}  // namespace gatefold
