#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "parallel/communicator.h"
#include "parallel/shared_window.h"

namespace gatefold {

/// Where the ranks of a node leave for each other what they add up together. Each has a segment:
///
///   stack      slots x [groups][rows][64] fp32, its roots in the first slots
///   finished   its slice of the sum, [groups of a slice][rows][64] of up to four bytes a value
///   stack      another one, for few rows
///
/// Sums of few rows take the two stacks in turns, so that the fence at which all have written the
/// roots of one sum is also the one after which nobody reads those of the sum before.
class RootsWindow {
 public:
  struct Shape {
    int slots = 1;  // the most that a rank of the group uses
    std::int64_t groups = 0;
    std::int64_t slice_groups = 0;
    std::int64_t few_rows = 0;
  };
  explicit RootsWindow(const Shape& shape) : shape_(shape) {}

  /// Room for up to `rows` rows, where the group's ranks share a node that has it. Collective.
  void share(Communicator& comm, std::int64_t rows);
  bool exists() const { return window_ != nullptr; }
  /// Whether all ranks of a group of this size are on the node.
  bool whole(int ranks) const { return exists() && std::ssize(window_->ranks()) == ranks; }
  bool has(int rank) const { return exists() && window_->segment(rank) != nullptr; }

  /// This rank's stack for the next sum, of as many rows; waits until no peer reads it any more.
  float* begin(std::int64_t rows);
  /// The roots are in the stack: waits until all ranks' are.
  void publish();
  /// A rank's stack of this sum.
  float* stack(int rank) const { return reinterpret_cast<float*>(at(rank, stacks_[current_])); }
  /// This rank has read the stacks. Not needed where a fence of the same sum follows.
  void done();

  std::byte* finished(int rank) const { return at(rank, finished_); }
  /// All ranks' slices are finished.
  void fence() { window_->fence("the sum of a node's ranks"); }

 private:
  std::int64_t stack_bytes(std::int64_t rows) const;
  std::byte* at(int rank, std::int64_t offset) const { return window_->segment(rank) + offset; }

  Shape shape_;
  std::unique_ptr<SharedWindow> window_;
  std::int64_t asked_rows_ = 0;
  std::int64_t finished_ = 0;  // offsets in a segment
  std::array<std::int64_t, 2> stacks_{};
  std::array<std::uint64_t, 2> unread_{};  // arrivals after which nobody reads the stack
  std::size_t current_ = 0;
  bool takes_turns_ = false;
};

}  // namespace gatefold
