#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/range.h"
#include "runtime/routing.h"

/// Which rows go where in a mixture of experts, as arithmetic on indices: no data moves here.
///
/// A token's sum is a tree over the ids of its experts, split by the highest bit in which they
/// differ; ids that it doesn't use are no nodes. A group of ranks that owns all experts below a
/// node makes the node's sum; the largest such nodes are roots, which travel to the token's home,
/// where the rest of the tree is added. So the order of additions depends on the token's ids alone.
namespace gatefold {

/// Experts in contiguous runs over groups of ranks: group g owns even_part(experts, groups, g).
struct ExpertPlacement {
  std::int64_t experts = 0;
  int groups = 1;  // ep

  Range owned(int group) const { return even_part(experts, groups, group); }
  int owner(std::int64_t expert) const {
    return static_cast<int>(((expert + 1) * groups - 1) / experts);
  }
};

/// The experts of some tokens, in ascending order for each, with their weights. Host memory.
struct Choices {
  /// Stands behind a row's ids for those that a capacity has dropped.
  static constexpr std::int32_t kDropped = -1;

  std::int64_t rows = 0;
  std::int64_t top_k = 0;
  std::vector<std::int32_t> ids;  // [rows, top_k]
  std::vector<float> weights;     // [rows, top_k]

  void resize(std::int64_t new_rows, std::int64_t new_top_k);
  /// These rows of them.
  Choices part(Range part_rows) const;
  /// Of what isn't dropped.
  std::span<const std::int32_t> ids_of(std::int64_t row) const {
    const std::int32_t* first = ids.data() + row * top_k;
    std::int64_t count = top_k;
    while (count > 0 && first[count - 1] == kDropped) --count;
    return {first, static_cast<std::size_t>(count)};
  }
  float weight(std::int64_t row, std::size_t choice) const {
    return weights[static_cast<std::size_t>(row * top_k) + choice];
  }
};

/// Calls visit(group) for each group that owns one of the ascending ids, once.
template <typename Visit>
void for_groups(const ExpertPlacement& placement, std::span<const std::int32_t> ids,
                const Visit& visit) {
  int last = -1;
  for (const std::int32_t id : ids) {
    const int owner = placement.owner(id);
    if (owner != last) visit(owner);
    last = owner;
  }
}

/// What happens after a leaf of a token's tree is pushed.
struct LeafMerges {
  std::uint8_t own = 0;    // merges by the group that owns the leaf
  bool ends_root = false;  // then what is on top is a root
  std::uint8_t home = 0;   // merges at home after that root
};

/// Fills `leaves` [ids.size()] for a token with these ascending ids.
void merge_experts(const ExpertPlacement& placement, std::span<const std::int32_t> ids,
                   std::span<LeafMerges> leaves);

/// Which of a home's tokens go to which group: each once, in order, however many of the group's
/// experts it has.
struct DispatchPlan {
  std::vector<std::int32_t> rows;   // of group 0, then of group 1, …
  std::vector<std::int64_t> begin;  // [groups + 1], into rows

  void make(const ExpertPlacement& placement, const Choices& tokens);
  std::int64_t count(int group) const {
    return begin[static_cast<std::size_t>(group) + 1] - begin[static_cast<std::size_t>(group)];
  }
};

/// What a home and a group of ranks have to do with each other in a step.
struct GroupCounts {
  std::int64_t rows = 0;         // that go to the group
  std::int64_t expert_rows = 0;  // a row for each of its experts that is there
  std::int64_t roots = 0;        // that come back
  std::int64_t sums = 0;         // rows of the group's sums that they take: roots, working space
};

/// How a home adds up the roots that come back: group by group, each in the order of tokens and, of
/// one token, of its tree. See CombinedRows.
struct CombinePlan {
  std::vector<GroupCounts> counts;     // [groups]
  std::vector<std::int32_t> begin;     // [tokens + 1]
  std::vector<std::int32_t> group_of;  // [all roots] where each comes from
  std::vector<std::int32_t> number;    // [all roots] of what comes from there, in order
  std::vector<std::int32_t> merges;    // [all roots]

  void make(const ExpertPlacement& placement, const Choices& tokens);
};

/// How a step permuted rows: what brings gradients back the same way. Host memory.
struct RowMap {
  // At home: its rows that went to group 0, then those to group 1, ...
  std::vector<std::int32_t> sent;
  std::vector<std::int64_t> sent_begin;  // [groups + 1], into sent
  // At the experts: what came, home by home, in the order in which each has sent it.
  std::vector<std::int64_t> rows_of_source;  // [world]
  std::vector<std::int64_t> expert_begin;    // [own experts + 1], into the two below
  std::vector<std::int32_t> received;        // [rows of experts] which of the rows that came
  std::vector<float> weights;                // [rows of experts]
};

/// What a group does with the rows that it received: for each of its experts, in order, the rows in
/// global token order, and where their weighed outputs are added up. See WeighedRows.
struct ExpertPlan {
  std::vector<std::int64_t> begin;  // [own experts + 1], into the four below
  std::vector<std::int32_t> rows;   // received row
  std::vector<float> weights;
  std::vector<std::int32_t> targets;          // row of the sums
  std::vector<std::int32_t> merge_begin;      // [rows + 1]
  std::vector<std::int32_t> merges;           // rows of the sums
  std::vector<std::int64_t> roots_of_source;  // [sources] which stand first among the sums
  std::int64_t sums = 0;                      // rows of the sums: roots, then working space

  /// `received`: the choices of all rows that came, source by source, rows_of_source[s] of each;
  /// every one of them has an expert of `group`.
  void make(const ExpertPlacement& placement, int group, const Choices& received,
            std::span<const std::int64_t> rows_of_source);
  std::int64_t count(std::int64_t own_expert) const {
    return begin[static_cast<std::size_t>(own_expert) + 1] -
           begin[static_cast<std::size_t>(own_expert)];
  }
};

}  // namespace gatefold
