#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "parallel/progress.h"

namespace gatefold {

/// Memory that the ranks of a group have in common where they share a node: a segment for each of
/// them, behind each other in the order of their ranks. Made by Communicator::share().
///
///   w.segment(w.own())   written by this rank, first touched by it too
///   w.fence("a sum")     all ranks of the node are here, and see what each wrote before
///   w.segment(peer)      read by this one, until it arrives at the next fence
///
/// A fence is a count in a cache line of each rank: no call into a library while the peers are
/// awake. Its wait spins first, then gives the core away, then sleeps.
class SharedWindow {
 public:
  static constexpr std::int64_t kLine = 64;

  /// What a window lies in and whom it waits for.
  struct Parts {
    std::byte* counts = nullptr;    // a line for each rank of the node, zero
    std::byte* segments = nullptr;  // the first one
    std::int64_t segment_bytes = 0;
    int group_size = 0;
    int own = 0;                   // this rank's number in the group
    std::vector<int> ranks;        // the group's ranks on this node, ascending
    std::vector<int> world_ranks;  // the same as numbered in the job, for messages
    double timeout_seconds = 0;
    Progress* progress = nullptr;
    std::function<void()> move_messages;  // what a wait has to keep going meanwhile
    std::shared_ptr<void> memory;         // keeps it there
  };
  explicit SharedWindow(Parts parts);
  SharedWindow(const SharedWindow&) = delete;
  SharedWindow& operator=(const SharedWindow&) = delete;

  /// Of each segment: what was asked for, in whole pages.
  std::int64_t bytes() const { return parts_.segment_bytes; }
  int own() const { return parts_.own; }
  /// The group's ranks on this node, ascending; the first one's segment is the first.
  std::span<const int> ranks() const { return parts_.ranks; }
  /// Null for a rank of another node.
  std::byte* segment(int rank) const { return segments_[static_cast<std::size_t>(rank)]; }

  /// Collective over the node. Throws NoAnswerError where a rank doesn't come.
  void fence(const char* what) { await(arrive(), what); }
  /// A fence in two halves, with work between them: this rank has come so far …
  std::uint64_t arrive();
  std::uint64_t arrivals() const { return arrivals_; }
  /// … and so have all others, if they have arrived as often: what they wrote before is there to
  /// read, and what they read before may be overwritten.
  void await(std::uint64_t arrivals, const char* what) {
    if (!all_arrived(arrivals)) wait_for(arrivals, what);
  }

 private:
  using Count = std::atomic<std::uint64_t>;
  static_assert(Count::is_always_lock_free);

  /// Each in a line of its own.
  Count& count(std::size_t node_rank) const {
    return *reinterpret_cast<Count*>(parts_.counts + static_cast<std::int64_t>(node_rank) * kLine);
  }
  bool all_arrived(std::uint64_t arrivals) const;
  void wait_for(std::uint64_t arrivals, const char* what);
  [[noreturn]] void give_up(std::uint64_t arrivals, const char* what);

  Parts parts_;
  std::vector<std::byte*> segments_;  // of each rank of the group
  std::size_t node_rank_ = 0;
  std::uint64_t arrivals_ = 0;
};

}  // namespace gatefold
