#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/expert_plan.h"

namespace gatefold {

/// The memory that a rank has, or needs, for a step, in bytes.
struct StepRoom {
  std::int64_t device = 0;
  std::int64_t host = 0;
  std::int64_t staged = 0;  // that a communicator copies through

  bool covers(const StepRoom& need) const {
    return device >= need.device && host >= need.host && staged >= need.staged;
  }
};

/// What a rank says of a step of a mixture of experts before any of its rows moves.
struct RankCounts {
  bool failed = false;       // it can't take part; the others are to fail like it
  bool given = false;        // its routing was given to it; so is that of all ranks, or of none
  std::int64_t rows = 0;     // its tokens
  std::int64_t dropped = 0;  // of their choices
  StepRoom room;             // that it has
  std::vector<GroupCounts> groups;
  std::vector<std::int64_t> nodes;  // rows that go to each other node
};

/// What all ranks say of a step. Every rank sees the same and comes to the same conclusions: who
/// fails, who needs how much memory, where everything will lie.
class CountMatrix {
 public:
  /// `world` must outlive it. Collective.
  CountMatrix(Communicator& world, const ExpertPlacement& placement, int nodes);

  /// Throws, on every rank alike, what a rank has failed in (`failure` is this one's, if
  /// own.failed); Error 70 where ranks see different things or what one says contradicts itself, 64
  /// for more rows than can be numbered, and where some routings are given and some aren't.
  /// Collective.
  void exchange(const RankCounts& own, std::int64_t top_k, const std::exception_ptr& failure);
  /// Throws on every rank alike where one has failed: the error of the lowest. Collective.
  void agree(const std::exception_ptr& failure);

  std::int64_t rows(int source) const { return value(source, kRows); }
  StepRoom room(int source) const {
    return {value(source, kRoom), value(source, kRoom + 1), value(source, kRoom + 2)};
  }
  GroupCounts of(int source, int group) const;
  std::int64_t to_node(int source, int node) const { return value(source, first_node() + node); }
  /// Of all sources, and of a source over all groups.
  const GroupCounts& for_group(int group) const {
    return for_group_[static_cast<std::size_t>(group)];
  }
  const GroupCounts& of_source(int source) const {
    return of_source_[static_cast<std::size_t>(source)];
  }
  std::int64_t all_rows() const { return all_rows_; }
  std::int64_t all_dropped() const { return all_dropped_; }

 private:
  // A rank's numbers, then four for each group, then one for each node.
  static constexpr int kStatus = 0, kRows = 1, kRoom = 2, kDropped = 5, kGroups = 6;
  static constexpr int kOfGroup = 4;
  static constexpr std::int64_t kFailed = 1, kGiven = 2;  // bits of the status
  int first_node() const { return kGroups + kOfGroup * placement_.groups; }
  std::int64_t width() const { return first_node() + nodes_; }
  std::int64_t value(int source, int at) const {
    return values_[static_cast<std::size_t>(source * width() + at)];
  }
  bool right(int source, std::int64_t top_k) const;
  void check_given() const;
  void add_up();
  void check(std::int64_t top_k) const;

  Communicator& world_;
  ExpertPlacement placement_;
  int nodes_;
  std::vector<std::int64_t> values_;  // [world, width]
  std::vector<GroupCounts> for_group_;
  std::vector<GroupCounts> of_source_;
  std::int64_t all_rows_ = 0;
  std::int64_t all_dropped_ = 0;
};

/// Part r of `values`, all of one size, comes from rank r. Throws Error 70, on every rank alike,
/// where they aren't the same then. Collective.
void gather_alike(Communicator& world, std::span<std::int64_t> values, const char* what);

/// The text of an Error 70 about a step in which the ranks don't agree.
[[nodiscard]] std::string contradiction(const std::string& what);

}  // namespace gatefold
