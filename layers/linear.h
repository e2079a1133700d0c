#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "layers/weights.h"
#include "parallel/tree_sum.h"

/// Linear layers y = x Wᵀ + b sharded over a tensor-parallel group. Weights are cut along one side
/// into canonical blocks; a rank owns a contiguous run of whole blocks.
///
///                         weight [out, in]   what happens to the data
///   ColumnParallel        cut along out      all of x → own columns of y
///   MergedColumnParallel  cut along out      the same for gate and up at once, activated
///   RowParallel           cut along in       own columns of x → all of y, summed over the group
///   Replicated            not shared out     all of x → all of y
///
/// Rows, where said, may be scattered: rank r of the group holds even_part(rows, tp, r).
/// A forward() is collective, but for Replicated's, and throws Error 64, 71 on every rank.
namespace gatefold {

struct RowCount {
  std::int64_t local = 0;   // of this tensor-parallel group
  std::int64_t global = 0;  // of the batch
};

/// Throws Error 64 unless 0 <= local <= global. The same on all ranks of a group, as its rows are.
void check_rows(const RowCount& rows);
/// Rows per tile: canonical, or all rows at once for whole GEMMs. Throws as check_rows() does.
std::int64_t tile_height(const Device& device, GemmKernel kernel, const RowCount& rows);
/// The tile heights that batches of up to these row counts have (whole GEMMs: of just this many).
std::vector<std::int64_t> tile_heights(const Device& device, GemmKernel kernel,
                                       const RowCount& rows);

/// Gathers scattered rows: in [own rows, row_bytes] → out [rows, row_bytes]. Collective.
void gather_rows(const Place& place, const std::byte* in, std::int64_t rows, std::int64_t row_bytes,
                 std::byte* out);

/// gate and up in one weight per block, each half cut by itself; or one ungated matrix.
class MergedColumnParallelLinear {
 public:
  /// Throws Error 64, 65, 66, 71. `source` must outlive a streamed layer.
  MergedColumnParallelLinear(WeightTensors tensors, const Activation& activation,
                             const TensorSource& source, const Place& place,
                             const LinearOptions& options);

  /// Makes forward_block() free of allocation for tiles of this height.
  void reserve(std::int64_t tile_rows);
  std::size_t blocks() const { return weights_.count(); }
  WeightShape shape(std::size_t i) const { return weights_.shape(i); }
  GemmKernel kernel() const { return weights_.kernel(); }
  const BlockPlan& plan() const { return plan_; }
  /// h = round(act(x W_gateᵀ + b_gate) · (x W_upᵀ + b_up)) for owned block i.
  /// x: [rows, in] in tiles; h: tiles of shape(i).padded_outputs() columns.
  void forward_block(std::size_t i, const Tiles& x, const Tiles& h);
  void let_go() { weights_.let_go(); }

 private:
  Activation activation_;
  Place place_;
  DType dtype_;
  BlockPlan plan_;
  BlockWeights weights_;
};

/// y = x Wᵀ + b with the outputs cut: every rank gets its own columns, or all with gather_output.
class ColumnParallelLinear {
 public:
  enum class Output { kParallel, kGathered };
  ColumnParallelLinear(WeightTensors tensors, const TensorSource& source, const Place& place,
                       const LinearOptions& options, Output output = Output::kParallel,
                       Rows input_rows = Rows::kReplicated);

  /// Columns of y on this rank: the whole width where gathered.
  Range output_columns() const;
  /// x [rows, in] (own rows where scattered) → y [rows, output_columns().size()].
  void forward(const std::byte* x, const RowCount& rows, std::byte* y);

 private:
  Range own_columns(int rank) const;
  void reserve_agreed(std::int64_t rows, std::int64_t height);
  void gather_columns(std::int64_t rows, const std::byte* own, std::byte* y);

  std::int64_t outputs_;
  std::int64_t inputs_;
  Place place_;
  DType dtype_;
  Output output_;
  Rows input_rows_;
  MergedColumnParallelLinear linear_;
  Buffer x_tiles_, h_tiles_, gathered_x_, own_y_, gathered_y_;
};

/// y = x Wᵀ + b with the inputs cut; partial products are summed over the group, the bias is added
/// once, after the sum, and one rounding ends it.
class RowParallelLinear {
 public:
  enum class Input { kParallel, kWhole };
  RowParallelLinear(WeightTensors tensors, const TensorSource& source, const Place& place,
                    const LinearOptions& options, Input input = Input::kParallel,
                    Rows output_rows = Rows::kReplicated);

  /// x [rows, own columns], or [rows, in] for Input::kWhole → y [rows, out], or own rows of it.
  void forward(const std::byte* x, const RowCount& rows, std::byte* y);

  // The steps of forward(), for a layer that makes its inputs block by block.
  /// Bytes that reserve() allocates where ranks don't share memory.
  std::int64_t workspace_bytes(std::int64_t rows) const;
  /// The part of reserve() in which peers take part: before all that may fail on one rank alone.
  void share(std::int64_t rows);
  /// Makes the steps free of allocation for `rows` rows in tiles of `tile_rows`. Collective.
  void reserve(std::int64_t rows, std::int64_t tile_rows);
  WeightShape shape(std::size_t i) const { return weights_.shape(i); }
  void begin(std::int64_t rows);
  /// Adds h W_bᵀ for owned block i; blocks come in order, each once.
  void add_block(std::size_t i, const Tiles& h);
  void finish(std::byte* y);

 private:
  std::int64_t outputs_;
  Place place_;
  DType dtype_;
  DType output_dtype_;
  Input input_;
  Rows output_rows_;
  BlockPlan plan_;
  BlockWeights weights_;
  MergePlan merge_plan_;
  TreeSum tree_sum_;
  Buffer bias_, h_tiles_;
  Partials partials_;
  int height_ = 0;
};

/// y = x Wᵀ + b, the same on every rank, without communication; in one block, whatever the options.
/// On GPUs call choose_kernel() for that block over all ranks first: alone each chooses by itself.
class ReplicatedLinear {
 public:
  ReplicatedLinear(WeightTensors tensors, const TensorSource& source, Device& device,
                   const LinearOptions& options);
  /// x [rows, in] → y [rows, out].
  void forward(const std::byte* x, const RowCount& rows, std::byte* y);

 private:
  std::unique_ptr<Communicator> alone_;
  ColumnParallelLinear linear_;
};

}  // namespace gatefold
