#pragma once

#include <cstdint>

#include "layers/ffn_spec.h"
#include "layers/linear.h"

namespace gatefold {

struct MlpOptions {
  LinearOptions linear;
  /// Scattered: rank r of the tensor-parallel group brings, or gets, even_part(rows, tp, r).
  Rows input_rows = Rows::kReplicated;
  Rows output_rows = Rows::kReplicated;
};

/// One dense feed-forward layer, y = down(act(gate(x)) · up(x)), over a tensor-parallel group.
class Mlp {
 public:
  /// Loads this rank's blocks from `source` (which must outlive a streamed layer). Collective over
  /// place.tp: all its ranks go on, or all throw the same Error (64, 65, 66, 71). With several
  /// tensor-parallel groups, call choose_kernel() over all their ranks first and hand its kernel in
  /// the options, so that no group uses another kernel than the rest.
  Mlp(const FfnSpec& spec, const TensorSource& source, const Place& place,
      const MlpOptions& options);

  /// Bytes of working memory that forward() needs for `rows` or fewer, beside the weights and what
  /// the device keeps for its GEMMs; ranks of a node that share memory have some of it there.
  std::int64_t workspace_bytes(const RowCount& rows) const;
  /// Allocates them: after this, forward() with no more rows, neither local nor global, allocates
  /// nothing on the device (whole GEMMs: with just as many). On all ranks of the group alike;
  /// whoever calls it agrees on whether it failed. Collective.
  void reserve(const RowCount& rows);
  /// The part of reserve() in which peers take part: before all that may fail on one rank alone.
  void share(const RowCount& rows);

  /// x [rows.local, H] → y [rows.local, H], dense, in the options' dtype (scattered: this rank's
  /// rows of them). rows.global is the row count of the whole batch over all groups. Reserves what
  /// hasn't been. Throws on every rank Error 64 unless 0 <= local <= global, and 71. Collective.
  void forward(const std::byte* x, const RowCount& rows, std::byte* y);
  /// Until y is there: forward() leaves work behind on the device's stream. Throws Error 75 where
  /// a peer doesn't answer.
  void wait();

 private:
  /// `chunk` says how many rows there are and how they are tiled.
  void forward_chunk(const std::byte* x, const Tiles& chunk, std::byte* y);
  bool has_room(const RowCount& rows) const;
  void reserve_agreed(const RowCount& rows);
  std::int64_t chunk_rows(const RowCount& rows) const;
  std::int64_t most_rows(const RowCount& rows) const;
  std::int64_t most_padded_rows(const RowCount& rows) const;
  std::int64_t gathered_bytes(const RowCount& rows) const;
  std::int64_t widest_block() const;

  std::int64_t hidden_;
  Place place_;
  MlpOptions options_;
  MergedColumnParallelLinear gate_up_;
  RowParallelLinear down_;
  RowCount reserved_{-1, -1};
  Buffer gathered_x_;
  Buffer x_tiles_;
  Buffer h_tiles_;
};

}  // namespace gatefold
