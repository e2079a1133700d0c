#include "runtime/canonical.h"

#include <algorithm>

namespace gatefold {
namespace {

void measure(MergePlan& plan) {
  int height = 0;
  for (const int merges : plan.merges) {
    plan.depth = std::max(plan.depth, ++height);
    height -= merges;
  }
  plan.roots = height;
}

}  // namespace

std::int64_t tile_rows(std::int64_t rows, std::span<const std::int64_t> heights) {
  const std::int64_t tiles = std::max<std::int64_t>(1, ceil_div(rows, heights.back()));
  return *std::ranges::lower_bound(heights, ceil_div(rows, tiles));
}

SumTree::SumTree(const Blocks& blocks) : blocks_(blocks) {}

SumTree::Node SumTree::whole() const {
  int level = 0;
  while ((std::int64_t{1} << level) < blocks_.count) ++level;
  return {0, level};
}

bool SumTree::present(Node node) const {
  const std::int64_t end = std::min(node.first + (std::int64_t{1} << node.level), blocks_.count);
  for (std::int64_t block = node.first; block < end; ++block) {
    if (!blocks_.columns(block).empty()) return true;
  }
  return false;
}

bool SumTree::inside(Node node, Range run) const {
  const std::int64_t end = std::min(node.first + (std::int64_t{1} << node.level), blocks_.count);
  for (std::int64_t block = node.first; block < end; ++block) {
    if (!blocks_.columns(block).empty() && !run.contains(block)) return false;
  }
  return true;
}

void SumTree::collect_roots(Node node, Range run, std::vector<Node>& roots) const {
  if (!present(node)) return;
  if (inside(node, run)) {
    roots.push_back(node);
    return;
  }
  if (node.level == 0) return;
  const int level = node.level - 1;
  collect_roots({node.first, level}, run, roots);
  collect_roots({node.first + (std::int64_t{1} << level), level}, run, roots);
}

/// Appends the node's leaves to the plan; returns 1 if the node holds a value, 0 if it is empty.
template <typename IsLeaf>
int SumTree::visit(Node node, const IsLeaf& is_leaf, MergePlan& plan) const {
  if (!present(node)) return 0;
  if (is_leaf(node)) {
    plan.merges.push_back(0);
    return 1;
  }
  const int level = node.level - 1;
  const int lower = visit({node.first, level}, is_leaf, plan);
  const int upper = visit({node.first + (std::int64_t{1} << level), level}, is_leaf, plan);
  if (lower + upper == 2) ++plan.merges.back();
  return 1;
}

template <typename IsLeaf>
MergePlan SumTree::plan_for(std::span<const Node> nodes, const IsLeaf& is_leaf) const {
  MergePlan plan;
  for (const Node node : nodes) visit(node, is_leaf, plan);
  measure(plan);
  return plan;
}

std::vector<std::int64_t> SumTree::leaves(Range run) const {
  std::vector<std::int64_t> blocks;
  for (std::int64_t block = run.begin; block < run.end; ++block) {
    if (!blocks_.columns(block).empty()) blocks.push_back(block);
  }
  return blocks;
}

MergePlan SumTree::local_plan(Range run) const {
  std::vector<Node> roots;
  collect_roots(whole(), run, roots);
  return plan_for(roots, [](Node node) { return node.level == 0; });
}

MergePlan SumTree::global_plan(std::span<const Range> runs) const {
  std::vector<Node> roots;
  for (const Range run : runs) collect_roots(whole(), run, roots);
  const auto is_root = [&roots](Node node) {
    return std::any_of(roots.begin(), roots.end(), [node](Node root) {
      return root.first == node.first && root.level == node.level;
    });
  };
  const Node top[] = {whole()};
  return plan_for(top, is_root);
}

}  // namespace gatefold
