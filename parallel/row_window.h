#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/count_matrix.h"
#include "parallel/exchange_shape.h"
#include "parallel/node_plan.h"
#include "parallel/shared_window.h"
#include "parallel/step_indices.h"
#include "runtime/device.h"

namespace gatefold {

/// Brings rows to their experts' ranks and sums home through memory that the ranks of a node share:
/// a home copies its rows there once, and experts read them in place; homes read the roots of their
/// trees where experts have added them up. A row crosses the network once to another node, and lies
/// in the memory of a rank there; roots travel to homes elsewhere by message. See TokenExchange.
class RowWindow {
 public:
  /// world, device and map must outlive it. The device's memory is the host's.
  RowWindow(Communicator& world, Device& device, const ExchangeShape& shape, const NodeMap& map)
      : world_(world), device_(device), shape_(shape), map_(map) {}

  /// Gives the step that the counts are of its place in memory.
  void lay_out(const CountMatrix& counts, std::int64_t top_k);
  /// For the step that has been laid out. The same on all ranks.
  bool has_room() const { return most_bytes_ <= room(); }
  /// Makes room for it. False on all ranks where one can't share so much. Collective.
  bool allocate();
  /// Bytes of each rank's segment.
  std::int64_t room() const { return window_ == nullptr ? 0 : window_->bytes(); }

  /// `arrivals`: of every source. Collective.
  void exchange_choices(const CountMatrix& counts, const DispatchPlan& to_nodes, const Choices& own,
                        std::vector<Arrival>& arrivals);
  /// Where the roots of own rows will be: [etp, all], from root_base() on.
  void find_roots(const CountMatrix& counts, const CombinePlan& plan,
                  std::vector<std::int32_t>& roots) const;
  std::byte* indices() const { return own() + own_layout().indices; }

  /// Collective.
  void dispatch(const CountMatrix& counts, const DispatchPlan& to_nodes, const StepIndices& indices,
                const std::byte* x);
  /// Then rows lie here, row_stride() elements apart: they count in pieces, not in rows.
  const std::byte* rows() const { return base(); }
  std::int64_t row_stride() const { return kPiece / size_of(shape_.dtype); }

  float* sums() const { return reinterpret_cast<float*>(own() + own_layout().sums); }
  /// Collective.
  void return_sums(const CountMatrix& counts);
  const float* root_base() const { return reinterpret_cast<const float*>(base()); }

 private:
  /// What lies where in a rank's segment.
  struct Layout {
    std::int64_t rows = 0;      // [held rows, row_pitch()]: own ones, then those from other nodes
    std::int64_t records = 0;   // [held rows] their ids and weights
    std::int64_t sums = 0;      // [sums, own share of H] fp32
    std::int64_t returned = 0;  // [roots from other nodes, share] fp32, for each member of a group
    std::int64_t sent = 0;      // [rows to other nodes, row_pitch()]
    std::int64_t sent_records = 0;
    std::int64_t indices = 0;
    std::int64_t bytes = 0;
  };
  Layout layout(const CountMatrix& counts, int rank, std::int64_t held, std::int64_t sent) const;
  const Layout& own_layout() const { return layouts_[static_cast<std::size_t>(world_.rank())]; }
  /// A row's bytes, padded: so that all rows of a node begin at whole pieces from its first one.
  std::int64_t row_pitch() const { return round_up(shape_.row_bytes(), kPiece); }
  std::byte* own() const { return window_->segment(world_.rank()); }
  /// The node's first segment.
  std::byte* base() const { return window_->segment(window_->ranks().front()); }
  std::int64_t pieces_before(int rank) const { return (window_->segment(rank) - base()) / kPiece; }
  /// Rows, or records of `bytes`, between nodes: packed ones to each node's gateway, and what comes
  /// to this rank behind its own.
  void exchange_between_nodes(const CountMatrix& counts, const DispatchPlan& to_nodes,
                              std::byte* packed, std::byte* held, std::int64_t bytes);

  Communicator& world_;
  Device& device_;
  ExchangeShape shape_;
  const NodeMap& map_;
  std::unique_ptr<SharedWindow> window_;
  std::vector<Layout> layouts_;  // [world]
  std::int64_t most_bytes_ = 0;
  std::int64_t top_k_ = 0;
  std::vector<Transfer> sends_;
  std::vector<Transfer> receives_;
};

}  // namespace gatefold
