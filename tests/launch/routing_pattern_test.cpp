// Where --routing sends tokens.
#include "launch/routing_pattern.h"

#include <gmock/gmock.h>

#include <cmath>
#include <set>
#include <vector>

#include "launch/expert_load.h"
#include "runtime/hash.h"

namespace gatefold {
namespace {

constexpr RoutingPattern kUniform{RoutingKind::kUniform, 0};
constexpr RoutingPattern kOneHot{RoutingKind::kOneHot, 0};
constexpr RoutingPattern zipf(double exponent) { return {RoutingKind::kZipf, exponent}; }

RouteRule rule_of(std::int64_t experts, std::int64_t top_k) {
  RouteRule rule;
  rule.experts = experts;
  rule.top_k = top_k;
  return rule;
}

ExpertRows load_of(const Choices& choices, std::int64_t experts) {
  ExpertRows rows(static_cast<std::size_t>(experts));
  for (const std::int32_t id : choices.ids) ++rows.at(static_cast<std::size_t>(id));
  return rows;
}

std::uint64_t fingerprint_of(const Choices& choices) {
  Fnv1a hash;
  for (const std::int32_t id : choices.ids) hash.add_unit(static_cast<std::uint64_t>(id));
  return hash.value();
}

TEST(RoutingPattern, GivesATokenDifferentExpertsAndAllTheSameWeight) {
  for (const RoutingPattern& pattern : {kUniform, zipf(0.5), zipf(1), zipf(16), kOneHot}) {
    for (const auto& [experts, top_k] :
         {std::pair{1, 1}, {2, 1}, {5, 5}, {8, 2}, {60, 4}, {1024, 32}}) {
      const Choices choices = patterned_choices(pattern, 3, rule_of(experts, top_k), {0, 50});
      ASSERT_EQ(choices.rows, 50);
      ASSERT_EQ(std::ssize(choices.ids), 50 * top_k);
      for (std::int64_t row = 0; row < 50; ++row) {
        const auto ids = choices.ids_of(row);
        const std::set<std::int32_t> different(ids.begin(), ids.end());
        EXPECT_EQ(std::ssize(different), top_k) << text_of(pattern);
        EXPECT_GE(*different.begin(), 0);
        EXPECT_LT(*different.rbegin(), experts);
      }
      for (const float weight : choices.weights) {
        EXPECT_EQ(weight, 1.0F / static_cast<float>(top_k));
      }
    }
  }
}

TEST(RoutingPattern, IsTheSameForATokenHoweverTokensAreSplit) {
  for (const RoutingPattern& pattern : {kUniform, zipf(1.3), kOneHot}) {
    const RouteRule rule = rule_of(12, 3);
    const Choices whole = patterned_choices(pattern, 7, rule, {0, 101});
    for (const std::int64_t parts : {2, 3, 7, 200}) {
      std::vector<std::int32_t> ids;
      for (std::int64_t p = 0; p < parts; ++p) {
        const Choices part = patterned_choices(pattern, 7, rule, even_part(101, parts, p));
        ids.insert(ids.end(), part.ids.begin(), part.ids.end());
      }
      EXPECT_EQ(ids, whole.ids) << text_of(pattern);
    }
    const Choices other = patterned_choices(pattern, 8, rule, {0, 101});
    EXPECT_NE(other.ids, whole.ids) << "another seed";
  }
}

TEST(RoutingPattern, OneHotSendsAllTokensToTheSameExperts) {
  const Choices choices = patterned_choices(kOneHot, 0, rule_of(16, 4), {0, 100});
  const ExpertRows rows = load_of(choices, 16);
  EXPECT_EQ(experts_without(rows), 12);
  EXPECT_EQ(max_over_mean(rows), 4);  // E / k
  EXPECT_EQ(entropy_bits(rows), 2);   // log2 k
}

/// Five standard deviations of a count of `draws` that each hit with `share`.
double bound(double draws, double share) { return 5 * std::sqrt(draws * share * (1 - share)); }

TEST(RoutingPattern, UniformIsAsEvenAsChance) {
  constexpr std::int64_t kTokens = 20000;
  const ExpertRows rows = load_of(patterned_choices(kUniform, 1, rule_of(10, 3), {0, kTokens}), 10);
  for (const std::int64_t one : rows)
    EXPECT_NEAR(static_cast<double>(one), kTokens * 0.3, bound(kTokens, 0.3));
  EXPECT_EQ(patterned_choices(zipf(0), 1, rule_of(10, 3), {0, 50}).ids,
            patterned_choices(kUniform, 1, rule_of(10, 3), {0, 50}).ids);
}

TEST(RoutingPattern, ZipfFollowsItsWeightsOneExpertAfterTheOther) {
  constexpr std::int64_t kTokens = 40000;
  constexpr std::int64_t kExperts = 6;
  const RoutingPattern pattern = zipf(1.5);
  const Choices choices = patterned_choices(pattern, 5, rule_of(kExperts, 2), {0, kTokens});
  // The seed's order is what one-hot takes from the front of.
  const Choices order = patterned_choices(kOneHot, 5, rule_of(kExperts, kExperts), {0, 1});
  const auto weight = [&](std::size_t place) {
    return std::pow(static_cast<double>(place + 1), -1.5);
  };
  double total = 0;
  for (std::size_t p = 0; p < kExperts; ++p) total += weight(p);
  for (std::size_t first = 0; first < kExperts; ++first) {
    for (std::size_t second = 0; second < kExperts; ++second) {
      if (first == second) continue;
      std::int64_t count = 0;
      for (std::int64_t row = 0; row < kTokens; ++row) {
        const auto ids = choices.ids_of(row);
        count += ids[0] == order.ids[first] && ids[1] == order.ids[second] ? 1 : 0;
      }
      const double share = weight(first) / total * weight(second) / (total - weight(first));
      EXPECT_NEAR(static_cast<double>(count), kTokens * share, bound(kTokens, share))
          << first << ", " << second;
    }
  }
}

TEST(RoutingPattern, HasTheBitsThatItHadOnOtherMachines) {
  const RouteRule rule = rule_of(64, 6);
  EXPECT_EQ(fingerprint_of(patterned_choices(kUniform, 0, rule, {0, 500})), 7016776550712486430U);
  EXPECT_EQ(fingerprint_of(patterned_choices(zipf(1.1), 0, rule, {0, 500})), 4305918682513102488U);
  EXPECT_EQ(fingerprint_of(patterned_choices(kOneHot, 0, rule, {0, 500})), 17503192986588397925U);
}

}  // namespace
}  // namespace gatefold
