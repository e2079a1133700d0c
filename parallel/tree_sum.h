#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/roots_window.h"
#include "runtime/canonical.h"
#include "runtime/device.h"

namespace gatefold {

/// Where the rows of a sum end up.
enum class Rows {
  kReplicated,  // every rank of the group has all rows
  kScattered,   // rank r has rows even_part(rows, tp, r)
};

/// The canonical sum over a tensor-parallel group: each rank brings the roots of its own blocks'
/// trees, all get the one sum in tree order. In two halves, a reduce-scatter and an all-gather.
///
///   reduce_scatter   rank 0   rank 1            all_gather   rank 0   rank 1
///   before            A0 B0    A1 B1            before         A        B
///   after              A        B               after         A B      A B
///
/// where A, B are slices of columns (or of rows, for kScattered, which stops after the first half).
///
/// Small sums are made in one shot: every rank gets all roots and adds for itself. No bit differs.
///
/// Roots of ranks on this rank's node are read where they lie, in a stack that they share; the
/// others' come by messages, as do all where there is no shared memory.
class TreeSum {
 public:
  /// Up to this many bytes of roots over all ranks, one exchange takes less time than two smaller
  /// ones that wait for each other.
  static constexpr std::int64_t kOneShotBytes = 128 << 10;
  /// Where all ranks share memory, one shot has each rank read more of what others wrote, and two
  /// halves have one more fence: which takes as long as reading so many bytes.
  static constexpr std::int64_t kFenceBytes = 5 << 10;
  /// In two halves a rank also writes its slice where the others have read the one before, and
  /// takes its lines back from their caches: as long as reading so many times as much, where all
  /// roots of a sum, of at most so many bytes, are in caches.
  static constexpr std::int64_t kTakeBack = 2;
  static constexpr std::int64_t kCachedRoots = 4 << 20;

  /// columns: H. runs: the blocks of each rank of `comm`, in order. one_shot_bytes: up to which a
  /// sum is made in one shot, in place of what these constants say.
  TreeSum(Communicator& comm, Device& device, const SumTree& tree, std::vector<Range> runs,
          std::int64_t columns, std::optional<std::int64_t> one_shot_bytes = std::nullopt,
          WithinNode within = WithinNode::kSharedMemory);

  /// Without shared memory.
  std::int64_t workspace_bytes(std::int64_t rows, DType dtype) const {
    return stack_bytes(rows) + received_bytes(rows) + gathered_bytes(rows, dtype);
  }
  /// Room for up to `rows` rows in memory that ranks share, if they can. Collective, and before all
  /// that may fail on one rank alone.
  void share(std::int64_t rows);
  /// Allocates for up to `rows` rows of `dtype`, and shares. Collective.
  void reserve(std::int64_t rows, DType dtype);

  /// Where a layer may put the roots of its next sum, so that nobody has to copy them: slots for
  /// its local plan, [groups][rows][64] each.
  Partials stack(std::int64_t rows);
  /// Bytes that sum() of `rows` rows would send from this rank to others if all went by messages,
  /// to ranks of its node too. Needs no reserve().
  std::int64_t bytes_to_others(std::int64_t rows, DType dtype, Rows where) const;

  /// own: this rank's roots in slots 0 … n-1 (its local plan's), layout [groups][rows][64].
  /// bias [columns] fp32 or null, added once. out: [rows, columns] in `dtype`, or this rank's rows
  /// of it for kScattered. rows is the same on all ranks of the group.
  void sum(const Partials& own, const float* bias, DType dtype, Rows where, std::byte* out);
  /// The same with the library's own all-reduce or reduce-scatter: own has one root, dense (for
  /// kScattered: row by row).
  void sum_by_library(const Partials& own, const float* bias, DType dtype, Rows where,
                      std::byte* out);
  /// The first half alone, for columns: this rank's groups, even_part(groups, tp, r), of the sum in
  /// fp32, without bias or rounding. Valid until the next call. For sums made with one_shot_bytes 0
  /// and reserved as f32.
  Partials sum_own_groups(const Partials& own);

 private:
  struct Slice {
    Range groups;
    Range rows;
  };
  std::int64_t slot_bytes(std::int64_t rows) const {
    return groups() * rows * kGroup * size_of(DType::kF32);
  }
  std::int64_t all_roots_bytes(std::int64_t rows) const;
  /// Where some roots come by messages.
  std::int64_t one_shot_bytes() const { return one_shot_bytes_.value_or(kOneShotBytes); }
  bool one_shot(std::int64_t rows, DType dtype) const;
  std::int64_t stack_bytes(std::int64_t rows) const;
  std::int64_t received_bytes(std::int64_t rows) const;
  std::int64_t gathered_bytes(std::int64_t rows, DType dtype) const;
  std::int64_t sent_bytes(std::int64_t rows) const;
  Slice slice_of(int rank, std::int64_t rows, Rows where) const;
  /// Whether roots of some ranks come by messages.
  bool has_far_ranks() const { return !window_.whole(comm_.size()); }
  bool is_near(int rank) const { return rank == comm_.rank() || window_.has(rank); }
  const float* near_root(const Partials& own, int rank, int root, const Slice& slice) const;
  Partials in_stack(const Partials& own);
  void exchange_roots(const Partials& own, Rows where);
  void list_roots(const Partials& own, const Slice& mine, bool cut);
  void list_sends(const Partials& own, Rows where);
  void copy_near_roots(const Partials& own, const Slice& mine);
  void add_slice(const MergePlan& plan, const float* bias, DType dtype, const Slice& slice,
                 std::byte* out, std::int64_t out_row_stride, std::int64_t out_group_stride);
  void gather_slices(std::int64_t rows, DType dtype, std::byte* out);
  std::int64_t width_of(const Slice& slice) const;
  void share_slices(std::int64_t rows, DType dtype, std::byte* out);
  std::int64_t groups() const { return ceil_div(columns_, kGroup); }
  int own_roots() const { return root_counts_[static_cast<std::size_t>(comm_.rank())]; }

  Communicator& comm_;
  Device& device_;
  std::vector<Range> runs_;
  std::vector<int> root_counts_;  // per rank
  int slots_ = 1;                 // of this rank's stack
  MergePlan plan_;
  std::int64_t columns_;
  std::optional<std::int64_t> one_shot_bytes_;
  WithinNode within_;
  bool whole_ = false;  // each rank adds up all of this sum

  RootsWindow window_;
  Buffer stack_;            // [slots][groups][rows][64] fp32, where the window has none
  float* begun_ = nullptr;  // the stack that has been asked for
  Buffer received_;         // roots of ranks elsewhere for this rank's slice
  Buffer gathered_;         // [groups][rows][64] of the output dtype, or slices of ranks elsewhere
  std::vector<const float*> roots_;
  std::vector<Transfer> sends_;
  std::vector<Transfer> receives_;
  std::vector<std::int64_t> parts_;
  std::int64_t root_row_stride_ = kGroup;
  std::int64_t root_group_stride_ = 0;
};

}  // namespace gatefold
