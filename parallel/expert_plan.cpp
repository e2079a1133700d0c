#include "parallel/expert_plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>

namespace gatefold {
namespace {

using Leaves = std::array<LeafMerges, static_cast<std::size_t>(kMaxTopK)>;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

/// One token's tree: leaves first … last - 1, whose top node is part of a root or not.
class TokenTree {
 public:
  TokenTree(const ExpertPlacement& placement, std::span<const std::int32_t> ids,
            std::span<LeafMerges> leaves)
      : ids_(ids), leaves_(leaves) {
    for (std::size_t i = 0; i < ids.size(); ++i) owners_[i] = placement.owner(ids[i]);
  }

  void visit(std::size_t first, std::size_t last, bool inside_root) {
    const bool owned = inside_root || owners_[first] == owners_[last - 1];
    if (last - first > 1) {
      const std::size_t middle = split(first, last);
      visit(first, middle, owned);
      visit(middle, last, owned);
      ++(owned ? leaves_[last - 1].own : leaves_[last - 1].home);
    }
    if (owned && !inside_root) leaves_[last - 1].ends_root = true;
  }

 private:
  /// The first id with the highest bit in which the ids differ.
  std::size_t split(std::size_t first, std::size_t last) const {
    const auto differ = static_cast<std::uint32_t>(ids_[first] ^ ids_[last - 1]);
    const auto bit = static_cast<std::int32_t>(std::bit_floor(differ));
    std::size_t middle = first + 1;
    while ((ids_[middle] & bit) == 0) ++middle;
    return middle;
  }

  std::span<const std::int32_t> ids_;
  std::span<LeafMerges> leaves_;
  std::array<int, static_cast<std::size_t>(kMaxTopK)> owners_;  // of the ids
};

/// counts[i] of each part → where each begins, and the end of the last.
void begins(std::span<const std::int64_t> counts, std::vector<std::int64_t>& begin) {
  begin.assign(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), begin.begin() + 1);
}

/// How many values wait on the stack of a root's leaves, below the first of them.
struct RootDepth {
  int height = 0;
  int most = 0;

  void push(const LeafMerges& leaf) {
    most = std::max(most, height - leaf.own);
    height += 1 - leaf.own;
  }
};

/// A leaf of a received row's tree that this group computes.
struct OwnLeaf {
  std::int64_t row;     // received
  std::int64_t expert;  // own, counted from 0
  std::size_t choice;   // which of the row's
  std::int64_t root;    // of all that this group sends back, in order
  std::int64_t deeper;  // values that wait deeper than a root's first, of the roots before
  int height;           // values of this root on the stack below the leaf
  int merges;           // then
  bool ends_root;
};

/// All of them, row by row; returns how many values wait below a root's first.
std::int64_t find_own_leaves(const ExpertPlacement& placement, int group, const Choices& received,
                             std::vector<OwnLeaf>& found) {
  const Range own = placement.owned(group);
  std::int64_t root = 0;
  std::int64_t deeper = 0;
  Leaves leaves;
  found.clear();
  for (std::int64_t row = 0; row < received.rows; ++row) {
    const auto ids = received.ids_of(row);
    merge_experts(placement, ids, std::span(leaves).first(ids.size()));
    RootDepth depth;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (!own.contains(ids[i])) continue;
      found.push_back({row, ids[i] - own.begin, i, root, deeper, depth.height, leaves[i].own,
                       leaves[i].ends_root});
      depth.push(leaves[i]);
      if (!leaves[i].ends_root) continue;
      ++root;
      deeper += depth.most;
      depth = {};
    }
  }
  return deeper;
}

}  // namespace

void Choices::resize(std::int64_t new_rows, std::int64_t new_top_k) {
  rows = new_rows;
  top_k = new_top_k;
  ids.resize(index(rows * top_k));
  weights.resize(index(rows * top_k));
}

Choices Choices::part(Range part_rows) const {
  Choices part;
  part.resize(part_rows.size(), top_k);
  const auto first = static_cast<std::ptrdiff_t>(part_rows.begin * top_k);
  std::copy_n(ids.begin() + first, part.ids.size(), part.ids.begin());
  std::copy_n(weights.begin() + first, part.weights.size(), part.weights.begin());
  return part;
}

void merge_experts(const ExpertPlacement& placement, std::span<const std::int32_t> ids,
                   std::span<LeafMerges> leaves) {
  std::ranges::fill(leaves, LeafMerges{});
  if (!ids.empty()) TokenTree(placement, ids, leaves).visit(0, ids.size(), false);
}

void DispatchPlan::make(const ExpertPlacement& placement, const Choices& tokens) {
  std::vector<std::int64_t> next(index(placement.groups));
  for (std::int64_t t = 0; t < tokens.rows; ++t) {
    for_groups(placement, tokens.ids_of(t), [&](int group) { ++next[index(group)]; });
  }
  begins(next, begin);
  std::copy(begin.begin(), begin.end() - 1, next.begin());
  rows.resize(index(begin.back()));
  for (std::int64_t t = 0; t < tokens.rows; ++t) {
    for_groups(placement, tokens.ids_of(t), [&](int group) {
      rows[index(next[index(group)]++)] = static_cast<std::int32_t>(t);
    });
  }
}

void CombinePlan::make(const ExpertPlacement& placement, const Choices& tokens) {
  counts.assign(index(placement.groups), {});
  begin.assign(1, 0);
  group_of.clear();
  number.clear();
  merges.clear();
  Leaves leaves;
  for (std::int64_t t = 0; t < tokens.rows; ++t) {
    const auto ids = tokens.ids_of(t);
    merge_experts(placement, ids, std::span(leaves).first(ids.size()));
    for_groups(placement, ids, [&](int group) { ++counts[index(group)].rows; });
    RootDepth depth;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const int group = placement.owner(ids[i]);
      GroupCounts& of = counts[index(group)];
      ++of.expert_rows;
      depth.push(leaves[i]);
      if (!leaves[i].ends_root) continue;
      group_of.push_back(group);
      number.push_back(static_cast<std::int32_t>(of.roots++));
      merges.push_back(leaves[i].home);
      of.sums += 1 + depth.most;
      depth = {};
    }
    begin.push_back(static_cast<std::int32_t>(merges.size()));
  }
}

void ExpertPlan::make(const ExpertPlacement& placement, int group, const Choices& received,
                      std::span<const std::int64_t> rows_of_source) {
  std::vector<std::int64_t> next(index(placement.owned(group).size()));
  std::vector<std::int64_t> roots_before(1, 0);  // … received row, roots of the rows before it
  std::vector<OwnLeaf> leaves;
  const std::int64_t deeper = find_own_leaves(placement, group, received, leaves);
  for (const OwnLeaf& leaf : leaves) {
    ++next[index(leaf.expert)];
    roots_before.resize(index(leaf.row) + 2, roots_before.back());
    if (leaf.ends_root) ++roots_before.back();
  }
  roots_before.resize(index(received.rows) + 1, roots_before.back());

  roots_of_source.clear();
  std::int64_t row = 0;
  for (const std::int64_t count : rows_of_source) {
    roots_of_source.push_back(roots_before[index(row + count)] - roots_before[index(row)]);
    row += count;
  }
  const std::int64_t all_roots = roots_before.back();
  sums = all_roots + deeper;

  begins(next, begin);
  const auto n = index(begin.back());
  rows.resize(n);
  weights.resize(n);
  targets.resize(n);
  merge_begin.assign(n + 1, 0);
  std::copy(begin.begin(), begin.end() - 1, next.begin());
  for (const OwnLeaf& leaf : leaves) {
    const auto at = index(next[index(leaf.expert)]++);
    rows[at] = static_cast<std::int32_t>(leaf.row);
    weights[at] = received.weight(leaf.row, leaf.choice);
    merge_begin[at + 1] = leaf.merges;
  }
  std::partial_sum(merge_begin.begin(), merge_begin.end(), merge_begin.begin());

  merges.resize(index(merge_begin.back()));
  std::copy(begin.begin(), begin.end() - 1, next.begin());
  for (const OwnLeaf& leaf : leaves) {
    const auto at = index(next[index(leaf.expert)]++);
    // The lowest value of a root's stack lies where the root will, the others behind all roots.
    const auto slot = [&](int height) {
      return static_cast<std::int32_t>(height == 0 ? leaf.root
                                                   : all_roots + leaf.deeper + height - 1);
    };
    for (int m = 1; m <= leaf.merges; ++m) {
      merges[index(merge_begin[at] + m - 1)] = slot(leaf.height - m);
    }
    targets[at] = slot(leaf.height - leaf.merges);
  }
}

}  // namespace gatefold
