// Plans of dispatch and combine, run on sums written out as text: whoever owns which experts, each
// token's sum must read the same.
#include "parallel/expert_plan.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

namespace gatefold {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// By the definition: all possible ids of `level` bits from `first` on, absent ones left out.
std::string written_out(const std::vector<std::int32_t>& ids, std::int32_t first, int level) {
  const auto has = [&](std::int32_t id) { return std::ranges::binary_search(ids, id); };
  if (level == 0) return has(first) ? std::to_string(first) : "";
  const std::string lower = written_out(ids, first, level - 1);
  const std::string upper = written_out(ids, first + (1 << (level - 1)), level - 1);
  if (lower.empty() || upper.empty()) return lower + upper;
  return "(" + lower + "+" + upper + ")";
}

/// k different experts for each token, and weights that tell which they belong to.
Choices random_choices(std::int64_t tokens, std::int64_t experts, std::int64_t k, unsigned seed) {
  std::mt19937 random(seed);
  Choices choices;
  choices.resize(tokens, k);
  std::vector<std::int32_t> all(as_size(experts));
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::iota(all.begin(), all.end(), 0);
    std::ranges::shuffle(all, random);
    std::ranges::sort(all.begin(), all.begin() + k);
    for (std::int64_t i = 0; i < k; ++i) {
      const auto at = as_size(t * k + i);
      choices.ids[at] = all[as_size(i)];
      choices.weights[at] = static_cast<float>(t * 1000 + all[as_size(i)]);
    }
  }
  return choices;
}

/// Of every third choice nothing is left; of token 0 nothing at all.
void drop_some(Choices& choices) {
  for (std::int64_t t = 0; t < choices.rows; ++t) {
    auto at = as_size(t * choices.top_k);
    for (auto i = at; i < as_size((t + 1) * choices.top_k); ++i) {
      if (t == 0 || (i + as_size(t)) % 3 == 0) continue;
      choices.weights[at] = choices.weights[i];
      choices.ids[at++] = choices.ids[i];
    }
    for (; at < as_size((t + 1) * choices.top_k); ++at) choices.ids[at] = Choices::kDropped;
  }
}

struct Plans {
  std::vector<DispatchPlan> dispatch;                   // of each home
  std::vector<CombinePlan> combine;                     // of each home
  std::vector<ExpertPlan> experts;                      // of each group
  std::vector<std::vector<std::int64_t>> token_of_row;  // of each group's received rows
};

/// What homes say of a group before any row moves is what the group then finds.
void expect_foretold(const Plans& plans, int group) {
  GroupCounts all;
  for (std::size_t h = 0; h < plans.combine.size(); ++h) {
    const GroupCounts& one = plans.combine[h].counts[as_size(group)];
    EXPECT_EQ(one.rows, plans.dispatch[h].count(group));
    EXPECT_EQ(one.roots, plans.experts[as_size(group)].roots_of_source[h]);
    all.expert_rows += one.expert_rows;
    all.roots += one.roots;
    all.sums += one.sums;
  }
  const ExpertPlan& plan = plans.experts[as_size(group)];
  EXPECT_EQ(all.expert_rows, std::ssize(plan.rows));
  EXPECT_EQ(all.expert_rows - all.roots, std::ssize(plan.merges));
  EXPECT_EQ(all.sums, plan.sums);
}

/// The plans of all homes and groups, rows moved as a dispatcher would.
Plans make_plans(const ExpertPlacement& placement, const Choices& all,
                 const std::vector<Range>& homes) {
  Plans plans;
  for (const Range home : homes) {
    const Choices own = all.part(home);
    plans.dispatch.emplace_back().make(placement, own);
    plans.combine.emplace_back().make(placement, own);
  }
  for (int g = 0; g < placement.groups; ++g) {
    Choices received;
    std::vector<std::int64_t> counts;
    std::vector<std::int64_t>& tokens = plans.token_of_row.emplace_back();
    for (std::size_t h = 0; h < homes.size(); ++h) {
      const DispatchPlan& plan = plans.dispatch[h];
      counts.push_back(plan.count(g));
      for (std::int64_t i = 0; i < plan.count(g); ++i) {
        tokens.push_back(homes[h].begin + plan.rows[as_size(plan.begin[as_size(g)] + i)]);
      }
    }
    received.resize(static_cast<std::int64_t>(tokens.size()), all.top_k);
    for (std::size_t r = 0; r < tokens.size(); ++r) {
      const Choices row = all.part({tokens[r], tokens[r] + 1});
      std::ranges::copy(row.ids, received.ids.begin() + static_cast<std::ptrdiff_t>(r) * all.top_k);
      std::ranges::copy(row.weights,
                        received.weights.begin() + static_cast<std::ptrdiff_t>(r) * all.top_k);
    }
    plans.experts.emplace_back().make(placement, g, received, counts);
    expect_foretold(plans, g);
  }
  return plans;
}

/// What a group adds up, as text. Each value is written once and used once.
std::vector<std::string> run_experts(const ExpertPlacement& placement, int group,
                                     const ExpertPlan& plan,
                                     const std::vector<std::int64_t>& token_of_row) {
  std::vector<std::string> sums(as_size(plan.sums));
  const Range own = placement.owned(group);
  for (std::int64_t e = 0; e < own.size(); ++e) {
    for (auto i = as_size(plan.begin[as_size(e)]); i < as_size(plan.begin[as_size(e) + 1]); ++i) {
      const std::int64_t token = token_of_row[as_size(plan.rows[i])];
      EXPECT_EQ(plan.weights[i], static_cast<float>(token * 1000 + own.begin + e));
      std::string p = std::to_string(own.begin + e);
      for (auto m = as_size(plan.merge_begin[i]); m < as_size(plan.merge_begin[i + 1]); ++m) {
        std::string& lower = sums[as_size(plan.merges[m])];
        EXPECT_NE(lower, "") << "a value that isn't there yet, or was used before";
        p = "(" + lower + "+" + p + ")";
        lower.clear();
      }
      EXPECT_EQ(sums[as_size(plan.targets[i])], "") << "a value that nobody has used yet is lost";
      sums[as_size(plan.targets[i])] = p;
    }
  }
  return sums;
}

/// Every token's sum after all groups have sent their roots home.
std::vector<std::string> run_all(const ExpertPlacement& placement, const Plans& plans,
                                 const std::vector<Range>& homes) {
  std::vector<std::vector<std::string>> sums;
  std::vector<std::size_t> sent(as_size(placement.groups));
  for (int g = 0; g < placement.groups; ++g) {
    const auto& plan = plans.experts[as_size(g)];
    sums.push_back(run_experts(placement, g, plan, plans.token_of_row[as_size(g)]));
    const auto roots =
        std::accumulate(plan.roots_of_source.begin(), plan.roots_of_source.end(), std::int64_t{0});
    const auto working = std::span(sums.back()).subspan(as_size(roots));
    EXPECT_THAT(working, Each("")) << "left in working space";
  }
  std::vector<std::string> tokens;
  for (std::size_t h = 0; h < homes.size(); ++h) {
    const CombinePlan& plan = plans.combine[h];
    std::vector<std::vector<std::string>> came(as_size(placement.groups));
    for (int g = 0; g < placement.groups; ++g) {
      const std::int64_t roots = plans.experts[as_size(g)].roots_of_source[h];
      EXPECT_EQ(roots, plan.counts[as_size(g)].roots);
      for (std::int64_t r = 0; r < roots; ++r) {
        came[as_size(g)].push_back(sums[as_size(g)][sent[as_size(g)]++]);
      }
    }
    for (std::int64_t t = 0; t < homes[h].size(); ++t) {
      std::vector<std::string> stack;
      for (auto i = as_size(plan.begin[as_size(t)]); i < as_size(plan.begin[as_size(t) + 1]); ++i) {
        stack.push_back(came[as_size(plan.group_of[i])][as_size(plan.number[i])]);
        for (int m = 0; m < plan.merges[i]; ++m) {
          const std::string upper = stack.back();
          stack.pop_back();
          stack.back() = "(" + stack.back() + "+" + upper + ")";
        }
      }
      stack.resize(std::max<std::size_t>(1, stack.size()));  // nothing for a token without experts
      tokens.push_back(stack.size() == 1 ? stack.front() : "not one value");
    }
  }
  return tokens;
}

/// Whoever owns which experts, and is home to which tokens.
void expect_written_out(const Choices& all, std::int64_t experts) {
  std::vector<std::string> expected;
  for (std::int64_t t = 0; t < all.rows; ++t) {
    const auto ids = all.ids_of(t);
    expected.push_back(written_out({ids.begin(), ids.end()}, 0, 10));
  }
  for (const int groups : {1, 2, 3, 4, 5, 7, 8}) {
    for (const std::vector<Range>& homes :
         {std::vector<Range>{{0, 23}}, std::vector<Range>{{0, 0}, {0, 9}, {9, 9}, {9, 23}}}) {
      const ExpertPlacement placement{experts, groups};
      const Plans plans = make_plans(placement, all, homes);
      EXPECT_EQ(run_all(placement, plans, homes), expected)
          << experts << " experts, " << all.top_k << " a token, " << groups << " groups";
    }
  }
}

TEST(ExpertPlan, EveryTokensSumReadsAsTheDefinitionWhoeverOwnsWhichExpertsAndWhateverIsDropped) {
  struct Size {
    std::int64_t experts, k;
  };
  for (const Size size : {Size{4, 2}, Size{5, 5}, Size{8, 3}, Size{60, 4}, Size{64, 8}, Size{3, 1},
                          Size{128, 32}, Size{1, 1}}) {
    Choices all = random_choices(23, size.experts, size.k, 7);
    expect_written_out(all, size.experts);
    drop_some(all);
    expect_written_out(all, size.experts);
  }
}

TEST(ExpertPlan, ARowGoesOnceToAGroupHoweverManyOfItsExpertsLiveThere) {
  Choices two;
  two.resize(2, 3);
  two.ids = {0, 1, 7, 4, 5, 6};
  DispatchPlan plan;
  plan.make({8, 2}, two);
  EXPECT_THAT(plan.begin, ElementsAre(0, 1, 3));
  EXPECT_THAT(plan.rows, ElementsAre(0, 0, 1));
}

std::vector<std::int64_t> roots_of(const CombinePlan& plan) {
  std::vector<std::int64_t> roots;
  for (const GroupCounts& counts : plan.counts) roots.push_back(counts.roots);
  return roots;
}

TEST(ExpertPlan, AGroupThatOwnsAllBelowANodeSendsOneRootForIt) {
  Choices one;
  one.resize(1, 4);
  one.ids = {0, 3, 4, 7};
  CombinePlan plan;
  plan.make({8, 2}, one);
  EXPECT_THAT(roots_of(plan), ElementsAre(1, 1));
  EXPECT_THAT(plan.merges, ElementsAre(0, 1));
  plan.make({8, 3}, one);  // 0-1, 2-4, 5-7: 3 and 4 lie in two halves
  EXPECT_THAT(roots_of(plan), ElementsAre(1, 2, 1));
  EXPECT_THAT(plan.merges, ElementsAre(0, 1, 0, 2));
}

TEST(ExpertPlan, WorkingSpaceIsNeededForWhatWaitsBelowAMergeOnly) {
  Choices one;
  one.resize(1, 8);
  std::iota(one.ids.begin(), one.ids.end(), 0);
  ExpertPlan plan;
  const std::vector<std::int64_t> rows{1};
  plan.make({8, 1}, 0, one, rows);
  EXPECT_EQ(plan.sums, 1 + 2);  // of ((0+1)+(2+3))+((4+5)+(6+7)) at most 2 wait above the first
  EXPECT_THAT(plan.roots_of_source, ElementsAre(1));
}

TEST(ExpertPlan, EveryExpertHasTheOwnerThatItsRunBelongsTo) {
  for (const std::int64_t experts : {1, 4, 5, 60, 1024}) {
    for (const int groups : {1, 2, 3, 7, 8}) {
      const ExpertPlacement placement{experts, groups};
      for (std::int64_t e = 0; e < experts; ++e) {
        EXPECT_TRUE(placement.owned(placement.owner(e)).contains(e)) << e << " of " << experts;
      }
    }
  }
}

}  // namespace
}  // namespace gatefold
