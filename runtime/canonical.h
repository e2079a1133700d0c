#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/range.h"

/// The canonical rule's arithmetic on indices: blocks of the intermediate width, row tiles, and
/// the summation tree. Everything here is a function of the global problem only.
namespace gatefold {

/// The intermediate width I cut into V blocks; block b is [b*I/V, (b+1)*I/V). A block may be empty.
struct Blocks {
  std::int64_t width = 0;  // I
  std::int64_t count = 0;  // V

  Range columns(std::int64_t block) const { return even_part(width, count, block); }
  /// The columns of a contiguous run of blocks.
  Range columns(Range run) const { return {run.begin * width / count, run.end * width / count}; }
};

/// The run of blocks that rank `rank` of `ranks` owns. ranks <= blocks.
constexpr Range owned_blocks(std::int64_t blocks, std::int64_t ranks, std::int64_t rank) {
  return even_part(blocks, ranks, rank);
}

/// What tiles of a CPU may have.
constexpr std::array<std::int64_t, 17> kCpuTileHeights{1,  4,  8,  12, 16, 20, 24, 28, 32,
                                                       36, 40, 44, 48, 52, 56, 60, 64};
/// The same with AMX, whose registers have 16 rows: fewer take as long.
constexpr std::array<std::int64_t, 5> kAmxTileHeights{1, 16, 32, 48, 64};

/// Rows per tile for `rows` rows in all ranks together: as few tiles as the largest of `heights`
/// allows, and for as many the smallest height that does. The heights, ascending, are the device's.
std::int64_t tile_rows(std::int64_t rows, std::span<const std::int64_t> heights = kCpuTileHeights);

/// A postfix program over a sequence of leaves: after leaf i is pushed, merges[i] times the two top
/// values of the stack are replaced by (lower + upper). What is left are the roots, in order.
struct MergePlan {
  std::vector<int> merges;  // one entry per leaf
  int depth = 0;            // the most values on the stack at once
  int roots = 0;            // values left at the end
};

/// The fixed binary tree on block indices 0 … V-1, split by the highest differing bit, with empty
/// blocks left out: for V = 8 ((0+1)+(2+3))+((4+5)+(6+7)).
class SumTree {
 public:
  explicit SumTree(const Blocks& blocks);

  /// The non-empty blocks of `run`, in order: the leaves of local_plan(run).
  std::vector<std::int64_t> leaves(Range run) const;
  /// Merges every tree node whose blocks all lie in `run`; the roots are what its owner ships.
  MergePlan local_plan(Range run) const;
  /// Merges the roots of all runs (contiguous, in order, covering all blocks) into one value.
  MergePlan global_plan(std::span<const Range> runs) const;

 private:
  struct Node {
    std::int64_t first;
    int level;  // covers [first, first + 2^level)
  };
  bool present(Node node) const;
  bool inside(Node node, Range run) const;
  void collect_roots(Node node, Range run, std::vector<Node>& roots) const;
  Node whole() const;

  template <typename IsLeaf>
  int visit(Node node, const IsLeaf& is_leaf, MergePlan& plan) const;
  template <typename IsLeaf>
  MergePlan plan_for(std::span<const Node> nodes, const IsLeaf& is_leaf) const;

  Blocks blocks_;
};

}  // namespace gatefold
