#include "runtime/canonical.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace gatefold {
namespace {

using ::testing::ElementsAre;

using Term = std::string;

/// Runs a plan on names instead of numbers; "(a+b)" is a merge, so the string is the whole order.
std::vector<Term> evaluate(const MergePlan& plan, const std::vector<Term>& leaves) {
  EXPECT_EQ(plan.merges.size(), leaves.size());
  std::vector<Term> stack;
  int depth = 0;
  for (std::size_t i = 0; i < leaves.size() && i < plan.merges.size(); ++i) {
    stack.push_back(leaves[i]);
    depth = std::max(depth, static_cast<int>(stack.size()));
    for (int m = 0; m < plan.merges[i]; ++m) {
      if (stack.size() < 2) {
        ADD_FAILURE() << "a merge of fewer than two values, at leaf " << i;
        return stack;
      }
      const Term upper = std::exchange(stack.back(), "");
      stack.pop_back();
      stack.back() = "(" + stack.back() + "+" + upper + ")";
    }
  }
  EXPECT_EQ(plan.depth, depth);
  EXPECT_EQ(plan.roots, static_cast<int>(stack.size()));
  return stack;
}

std::vector<Term> names(const std::vector<std::int64_t>& blocks) {
  std::vector<Term> terms;
  for (const std::int64_t block : blocks) terms.push_back(std::to_string(block));
  return terms;
}

/// What a world of one computes.
Term alone(const SumTree& tree, std::int64_t count) {
  const Range all{0, count};
  const std::vector<Term> roots = evaluate(tree.local_plan(all), names(tree.leaves(all)));
  EXPECT_EQ(roots.size(), 1U);
  return roots.empty() ? "" : roots.front();
}

/// What the ranks that own `runs` compute together.
Term together(const SumTree& tree, const std::vector<Range>& runs) {
  std::vector<Term> roots;
  for (const Range run : runs) {
    for (Term& root : evaluate(tree.local_plan(run), names(tree.leaves(run)))) {
      roots.push_back(std::move(root));
    }
  }
  const std::vector<Term> sum = evaluate(tree.global_plan(runs), roots);
  EXPECT_EQ(sum.size(), 1U);
  return sum.empty() ? "" : sum.front();
}

/// The tree by its definition, independently of plans: a node [first, first + width) is the sum of
/// its halves, or its only half that has a block.
Term by_definition(std::int64_t first, std::int64_t width, const std::vector<bool>& present) {
  if (first >= static_cast<std::int64_t>(present.size())) return "";
  if (width == 1) return present[static_cast<std::size_t>(first)] ? std::to_string(first) : "";
  const Term lower = by_definition(first, width / 2, present);
  const Term upper = by_definition(first + width / 2, width / 2, present);
  if (lower.empty() || upper.empty()) return lower + upper;
  return "(" + lower + "+" + upper + ")";
}

/// Every way to cut [0, count) into contiguous non-empty runs; bit i of `cuts` cuts after block i.
std::vector<Range> runs_of(std::int64_t count, unsigned cuts) {
  std::vector<Range> runs;
  std::int64_t begin = 0;
  for (std::int64_t block = 0; block < count; ++block) {
    if (((cuts >> block) & 1U) == 0 && block + 1 < count) continue;
    runs.push_back({begin, block + 1});
    begin = block + 1;
  }
  return runs;
}

TEST(TileRows, FollowTheTableOfTheRule) {
  const std::vector<std::array<std::int64_t, 3>> table{
      {0, 1, 1},     {1, 1, 1},     {2, 4, 16},       {4, 4, 16},    {5, 8, 16},    {8, 8, 16},
      {9, 12, 16},   {16, 16, 16},  {17, 20, 32},     {32, 32, 32},  {33, 36, 48},  {48, 48, 48},
      {49, 52, 64},  {64, 64, 64},  {65, 36, 48},     {72, 36, 48},  {73, 40, 48},  {80, 40, 48},
      {97, 52, 64},  {128, 64, 64}, {129, 44, 48},    {144, 48, 48}, {145, 52, 64}, {192, 64, 64},
      {193, 52, 64}, {257, 52, 64}, {1 << 20, 64, 64}};
  for (const auto& [rows, height, with_amx] : table) {
    EXPECT_EQ(tile_rows(rows), height) << rows << " rows";
    EXPECT_EQ(tile_rows(rows, kAmxTileHeights), with_amx) << rows << " rows";
  }
}

TEST(TileRows, AreTheFewestTilesOfAtMost64RowsAndAMultipleOfTheirStep) {
  const std::pair<std::span<const std::int64_t>, std::int64_t> rules[] = {{kCpuTileHeights, 4},
                                                                          {kAmxTileHeights, 16}};
  for (const auto& [heights, step] : rules) {
    for (std::int64_t rows = 2; rows <= 4096; ++rows) {
      const std::int64_t height = tile_rows(rows, heights);
      const std::int64_t tiles = ceil_div(rows, 64);
      ASSERT_EQ(height % step, 0) << rows;
      ASSERT_LE(height, 64) << rows;
      ASSERT_GE(tiles * height, rows) << rows;
      ASSERT_LT(tiles * (height - step), rows) << rows << " rows would fit lower tiles";
    }
  }
}

TEST(Blocks, CutTheWidthIntoContiguousPartsThatDifferByOneColumnAtMost) {
  for (const std::int64_t width : {1, 3, 6, 7, 8, 40, 100, 768, 53248}) {
    for (std::int64_t count = 1; count <= 17; ++count) {
      const Blocks blocks{width, count};
      std::int64_t next = 0;
      for (std::int64_t b = 0; b < count; ++b) {
        const Range columns = blocks.columns(b);
        EXPECT_EQ(columns.begin, next);
        EXPECT_EQ(columns.begin, b * width / count);
        EXPECT_GE(columns.size(), width / count);
        EXPECT_LE(columns.size(), ceil_div(width, count));
        next = columns.end;
      }
      EXPECT_EQ(next, width);
    }
  }
}

TEST(Blocks, ColumnsOfARunAreThoseOfItsBlocks) {
  const Blocks blocks{100, 7};
  EXPECT_EQ(blocks.columns(Range{2, 5}), (Range{blocks.columns(2).begin, blocks.columns(4).end}));
  EXPECT_EQ(blocks.columns(Range{0, 7}), (Range{0, 100}));
  EXPECT_TRUE(blocks.columns(Range{3, 3}).empty());
}

TEST(Blocks, MoreBlocksThanColumnsLeaveSomeEmpty) {
  const Blocks blocks{3, 8};  // 0 0 1 0 0 1 0 1 columns
  std::vector<std::int64_t> sizes;
  for (std::int64_t b = 0; b < 8; ++b) sizes.push_back(blocks.columns(b).size());
  EXPECT_THAT(sizes, ElementsAre(0, 0, 1, 0, 0, 1, 0, 1));
  EXPECT_THAT(SumTree(blocks).leaves({0, 8}), ElementsAre(2, 5, 7));
  EXPECT_THAT(SumTree(blocks).leaves({3, 7}), ElementsAre(5));
  EXPECT_THAT(SumTree(blocks).leaves({3, 5}), ElementsAre());
}

TEST(OwnedBlocks, AreRunsThatCoverAllBlocksAndNoneIsEmptyUpToOneRankABlock) {
  for (std::int64_t blocks = 1; blocks <= 16; ++blocks) {
    for (std::int64_t ranks = 1; ranks <= blocks; ++ranks) {
      std::int64_t next = 0;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const Range run = owned_blocks(blocks, ranks, rank);
        EXPECT_EQ(run.begin, next);
        EXPECT_FALSE(run.empty());
        next = run.end;
      }
      EXPECT_EQ(next, blocks);
    }
  }
}

TEST(SumTree, IsTheTreeOfTheRuleForOneToSixteenBlocks) {
  const std::vector<Term> expected{
      "0",
      "(0+1)",
      "((0+1)+2)",
      "((0+1)+(2+3))",
      "(((0+1)+(2+3))+4)",
      "(((0+1)+(2+3))+(4+5))",
      "(((0+1)+(2+3))+((4+5)+6))",
      "(((0+1)+(2+3))+((4+5)+(6+7)))",
      "((((0+1)+(2+3))+((4+5)+(6+7)))+8)",
      "((((0+1)+(2+3))+((4+5)+(6+7)))+(8+9))",
      "((((0+1)+(2+3))+((4+5)+(6+7)))+((8+9)+10))",
      "((((0+1)+(2+3))+((4+5)+(6+7)))+((8+9)+(10+11)))",
      "((((0+1)+(2+3))+((4+5)+(6+7)))+(((8+9)+(10+11))+12))",
      "((((0+1)+(2+3))+((4+5)+(6+7)))+(((8+9)+(10+11))+(12+13)))",
      "((((0+1)+(2+3))+((4+5)+(6+7)))+(((8+9)+(10+11))+((12+13)+14)))",
      "((((0+1)+(2+3))+((4+5)+(6+7)))+(((8+9)+(10+11))+((12+13)+(14+15))))"};
  for (std::int64_t count = 1; count <= 16; ++count) {
    EXPECT_EQ(alone(SumTree({100 * count, count}), count),
              expected[static_cast<std::size_t>(count - 1)]);
  }
}

TEST(SumTree, LeavesEmptyBlocksOutOfItsNodes) {
  EXPECT_EQ(alone(SumTree({3, 8}), 8), "(2+(5+7))");
  EXPECT_EQ(alone(SumTree({1, 8}), 8), "7");
  EXPECT_EQ(alone(SumTree({2, 7}), 7), "(3+6)");
  EXPECT_EQ(alone(SumTree({6, 8}), 8), "((1+(2+3))+(5+(6+7)))");
}

TEST(SumTree, EveryPartitionIntoRunsMakesTheTreeOfOneRank) {
  for (std::int64_t count = 1; count <= 8; ++count) {
    for (std::int64_t width = 1; width <= 2 * count; ++width) {
      const Blocks blocks{width, count};
      const SumTree tree(blocks);
      std::vector<bool> present;
      for (std::int64_t b = 0; b < count; ++b) present.push_back(!blocks.columns(b).empty());
      const Term expected = by_definition(0, 16, present);
      EXPECT_EQ(alone(tree, count), expected);
      for (unsigned cuts = 0; cuts < (1U << (count - 1)); ++cuts) {
        const std::vector<Range> runs = runs_of(count, cuts);
        EXPECT_EQ(together(tree, runs), expected)
            << "width " << width << ", " << count << " blocks, cuts " << cuts;
      }
    }
  }
}

TEST(SumTree, EveryRankCountMakesTheTreeOfOneRankWhereBlocksAreMany) {
  for (std::int64_t count = 9; count <= 20; ++count) {
    for (const std::int64_t width : {count / 2, 100 * count}) {
      const SumTree tree({width, count});
      const Term expected = alone(tree, count);
      for (std::int64_t ranks = 1; ranks <= count; ++ranks) {
        std::vector<Range> runs;
        for (std::int64_t r = 0; r < ranks; ++r) runs.push_back(owned_blocks(count, ranks, r));
        EXPECT_EQ(together(tree, runs), expected) << count << " blocks, " << ranks << " ranks";
      }
    }
  }
}

TEST(SumTree, RunsThatAreEmptyShipNothing) {
  const SumTree tree({800, 8});
  EXPECT_EQ(tree.local_plan({3, 3}).roots, 0);
  EXPECT_EQ(together(tree, {{0, 0}, {0, 3}, {3, 3}, {3, 8}, {8, 8}}), alone(tree, 8));
  // A run of blocks without columns has no root either.
  const SumTree narrow({1, 8});
  EXPECT_EQ(narrow.local_plan({0, 4}).roots, 0);
  EXPECT_EQ(together(narrow, {{0, 4}, {4, 8}}), "7");
}

TEST(SumTree, AnAlignedPowerOfTwoShipsOneRootAndOthersAFew) {
  const SumTree tree({800, 8});
  const auto roots = [&tree](Range run) { return tree.local_plan(run).roots; };
  EXPECT_EQ(roots({0, 8}), 1);
  EXPECT_EQ(roots({4, 8}), 1);
  EXPECT_EQ(roots({2, 4}), 1);
  EXPECT_EQ(roots({5, 6}), 1);
  EXPECT_EQ(roots({2, 5}), 2);  // 2+3, 4
  EXPECT_EQ(roots({1, 7}), 4);  // 1, 2+3, 4+5, 6
  EXPECT_EQ(roots({1, 8}), 3);  // 1, 2+3, (4+5)+(6+7)
}

TEST(SumTree, NeedsAsManySlotsAsTheTreeIsHigh) {
  for (std::int64_t count = 1; count <= 64; ++count) {
    int level = 0;
    while ((std::int64_t{1} << level) < count) ++level;
    EXPECT_LE(SumTree({count, count}).local_plan({0, count}).depth, level + 1) << count;
  }
}

}  // namespace
}  // namespace gatefold
