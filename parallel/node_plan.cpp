#include "parallel/node_plan.h"

#include <algorithm>

namespace gatefold {
namespace {

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

NodeMap::NodeMap(std::span<const int> lowest_neighbour) {
  std::vector<int> lowest;  // [nodes]
  for (int rank = 0; rank < static_cast<int>(lowest_neighbour.size()); ++rank) {
    const int first = lowest_neighbour[index(rank)];
    const auto known = std::ranges::find(lowest, first);
    node_.push_back(static_cast<int>(known - lowest.begin()));
    if (known == lowest.end()) {
      lowest.push_back(first);
      members_.emplace_back();
    }
    std::vector<int>& members = members_[index(node_.back())];
    place_.push_back(static_cast<int>(members.size()));
    members.push_back(rank);
  }
}

int NodeMap::gateway(int source, int node) const {
  const std::span<const int> there = members(node);
  return there[index(place_[index(source)]) % there.size()];
}

void NodeDispatch::make(const NodeMap& map, int home, const ExpertPlacement& placement, int etp,
                        const Choices& tokens, bool all) {
  std::vector<std::vector<std::int32_t>> rows(index(map.nodes()));
  const auto send = [&](std::int32_t token, int first_rank, int last_rank) {
    for (int rank = first_rank; rank < last_rank; ++rank) {
      std::vector<std::int32_t>& there = rows[index(map.node(rank))];
      if (map.neighbours(rank, home) || (!there.empty() && there.back() == token)) continue;
      there.push_back(token);
    }
  };
  for (std::int64_t t = 0; map.nodes() > 1 && t < tokens.rows; ++t) {
    const auto token = static_cast<std::int32_t>(t);
    if (all) {
      send(token, 0, map.ranks());
      continue;
    }
    for_groups(placement, tokens.ids_of(t),
               [&](int group) { send(token, group * etp, (group + 1) * etp); });
  }
  plan.rows.clear();
  plan.begin.assign(1, 0);
  for (const std::vector<std::int32_t>& there : rows) {
    plan.rows.insert(plan.rows.end(), there.begin(), there.end());
    plan.begin.push_back(std::ssize(plan.rows));
  }
}

std::vector<HeldRows> held_rows(const NodeMap& map, int node,
                                std::span<const std::int64_t> own_rows,
                                std::span<const std::int64_t> came) {
  std::vector<HeldRows> held;
  std::vector<std::int64_t> next(own_rows.begin(), own_rows.end());
  for (int source = 0; source < map.ranks(); ++source) {
    if (map.node(source) == node) {
      held.push_back({source, 0, own_rows[index(source)]});
      continue;
    }
    const int holder = map.gateway(source, node);
    held.push_back({holder, next[index(holder)], came[index(source)]});
    next[index(holder)] += came[index(source)];
  }
  return held;
}

}  // namespace gatefold
