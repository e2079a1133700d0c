#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/expert_plan.h"

/// Which ranks share a node's memory, and who takes in what comes from other nodes, as arithmetic
/// on indices: no data moves here. A row crosses the network once to a node, to one rank there, in
/// whose memory all ranks of the node read it.
namespace gatefold {

class NodeMap {
 public:
  /// lowest_neighbour [ranks]: the lowest rank on each one's node. Nodes are numbered in that
  /// order.
  explicit NodeMap(std::span<const int> lowest_neighbour);

  int nodes() const { return static_cast<int>(members_.size()); }
  int ranks() const { return static_cast<int>(node_.size()); }
  int node(int rank) const { return node_[static_cast<std::size_t>(rank)]; }
  bool neighbours(int a, int b) const { return node(a) == node(b); }
  /// Its ranks, ascending.
  std::span<const int> members(int node) const { return members_[static_cast<std::size_t>(node)]; }
  /// The rank of another node that takes in the source's rows: at the same place, so that each has
  /// its share of the work.
  int gateway(int source, int node) const;

 private:
  std::vector<int> node_;   // [ranks]
  std::vector<int> place_;  // [ranks] among the node's
  std::vector<std::vector<int>> members_;
};

/// Which of a home's tokens go to which other node, each once, in order: those with an expert
/// there, or all. rows and begin count nodes, not groups; there are none for the home's own node.
/// Group g is the ranks g * etp … (g + 1) * etp - 1.
struct NodeDispatch {
  DispatchPlan plan;

  void make(const NodeMap& map, int home, const ExpertPlacement& placement, int etp,
            const Choices& tokens, bool all);
};

/// Where the rows of one source lie for the ranks of a node.
struct HeldRows {
  int holder = 0;          // who has them
  std::int64_t first = 0;  // of the rows that the holder has
  std::int64_t count = 0;
};

/// For every source. own_rows [ranks]; came [ranks]: rows of sources elsewhere that came to `node`.
/// A rank has its own rows first, then those that came to it, by source.
std::vector<HeldRows> held_rows(const NodeMap& map, int node,
                                std::span<const std::int64_t> own_rows,
                                std::span<const std::int64_t> came);

}  // namespace gatefold
