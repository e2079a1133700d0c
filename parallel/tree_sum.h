#pragma once

#include <cstdint>
#include <vector>

#include "parallel/communicator.h"
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
class TreeSum {
 public:
  /// Up to this many bytes of roots over all ranks, one exchange takes less time than two smaller
  /// ones that wait for each other.
  static constexpr std::int64_t kOneShotBytes = 128 << 10;

  /// columns: H. runs: the blocks of each rank of `comm`, in order.
  TreeSum(Communicator& comm, Device& device, const SumTree& tree, std::vector<Range> runs,
          std::int64_t columns, std::int64_t one_shot_bytes = kOneShotBytes);

  std::int64_t workspace_bytes(std::int64_t rows, DType dtype) const {
    return received_bytes(rows) + gathered_bytes(rows, dtype);
  }
  /// Allocates for up to `rows` rows of `dtype`.
  void reserve(std::int64_t rows, DType dtype);

  /// own: this rank's roots in slots 0 … n-1 (its local plan's), layout [groups][rows][64].
  /// bias [columns] fp32 or null, added once. out: [rows, columns] in `dtype`, or this rank's rows
  /// of it for kScattered. rows is the same on all ranks of the group.
  void sum(const Partials& own, const float* bias, DType dtype, Rows where, std::byte* out);
  /// The same with the library's own all-reduce: own has one root, dense in any layout.
  void sum_by_library(const Partials& own, const float* bias, DType dtype, Rows where,
                      std::byte* out);

 private:
  struct Slice {
    Range groups;
    Range rows;
  };
  std::int64_t all_roots_bytes(std::int64_t rows) const;
  bool one_shot(std::int64_t rows) const { return all_roots_bytes(rows) <= one_shot_bytes_; }
  std::int64_t received_bytes(std::int64_t rows) const;
  std::int64_t gathered_bytes(std::int64_t rows, DType dtype) const;
  Slice slice_of(int rank, std::int64_t rows, Rows where) const;
  void exchange_roots(const Partials& own, Rows where);
  void add_slice(const MergePlan& plan, const float* bias, DType dtype, const Slice& slice,
                 std::byte* out, std::int64_t out_row_stride, std::int64_t out_group_stride);
  std::int64_t groups() const { return ceil_div(columns_, kGroup); }

  Communicator& comm_;
  Device& device_;
  std::vector<Range> runs_;
  std::vector<int> root_counts_;  // per rank
  MergePlan plan_;
  std::int64_t columns_;
  std::int64_t one_shot_bytes_;

  Buffer received_;  // roots of the other ranks for this rank's slice
  Buffer gathered_;  // [groups][rows][64] of the output dtype
  std::vector<const float*> roots_;
  std::vector<Transfer> sends_;
  std::vector<Transfer> receives_;
  std::vector<std::int64_t> parts_;
  std::int64_t root_row_stride_ = kGroup;
  std::int64_t root_group_stride_ = 0;
};

}  // namespace gatefold
