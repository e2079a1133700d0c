#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace gatefold {

/// A rank's sign of life: the phase it is in and a count that grows as work gets done. Deadlines
/// measure the lack of progress, not the length of a phase.
class Progress {
 public:
  /// `phase` must outlive this object: a string literal.
  void enter(const char* phase) {
    phase_.store(phase, std::memory_order_relaxed);
    tick();
  }
  void tick() { ticks_.fetch_add(1, std::memory_order_relaxed); }

  const char* phase() const { return phase_.load(std::memory_order_relaxed); }
  std::uint64_t ticks() const { return ticks_.load(std::memory_order_relaxed); }

  /// How missing() finds out; before ranks wait for each other.
  void set_roll_call(std::function<std::vector<int>()> call) { roll_call_ = std::move(call); }
  /// The job's ranks that are lost, in the world's numbers; none where nobody can tell. Takes a
  /// second at most.
  std::vector<int> missing() const { return roll_call_ ? roll_call_() : std::vector<int>(); }

 private:
  std::atomic<const char*> phase_{"start"};
  std::atomic<std::uint64_t> ticks_{0};
  std::function<std::vector<int>()> roll_call_;
};

}  // namespace gatefold
