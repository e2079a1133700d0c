#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/count_matrix.h"
#include "parallel/exchange_shape.h"
#include "parallel/expert_plan.h"
#include "parallel/node_plan.h"
#include "parallel/row_messages.h"
#include "parallel/row_window.h"
#include "parallel/step_indices.h"
#include "runtime/device.h"
#include "runtime/expert_rows.h"

namespace gatefold {

/// What one step has moved, in rows of H values, beside the copies within a rank.
struct ExchangeCounts {
  std::int64_t sent = 0;           // rows of tokens, from this rank to others or for them to read
  std::int64_t sent_to_hosts = 0;  // rows of them that went to other hosts
  std::int64_t once_a_host = 0;    // the same if a row goes once to each other host
  std::int64_t received = 0;       // rows of tokens that this rank's experts work on
  std::int64_t returned = 0;       // roots, from this rank to others
  std::int64_t dropped = 0;        // choices of all ranks' tokens, by a capacity
};

/// Brings tokens to their experts and sums home, over world = etp x ep ranks: rank r is number
/// r % etp of group r / etp, which owns a contiguous run of experts. Each rank is home to some
/// tokens; homes are in global token order. The ranks of a group that owns any of a row's experts
/// get it; back come the roots of its tree, from each rank of the group the columns that are this
/// rank's share. Ranks of one host read each other's memory where they can, a row then goes once to
/// each other host; else it goes once to each rank.
///
///   plan()      count matrix, checked; memory; ids and weights to the experts' ranks
///   dispatch()  x [own rows, H] → rows of this group's experts
///   … each own expert, in order: input() → output() …
///   combine()   sums → y [own rows, H]
class TokenExchange {
 public:
  /// `etp`: ranks of a group. world and device must outlive it. Collective.
  TokenExchange(Communicator& world, Device& device, const ExpertPlacement& placement, int etp,
                std::int64_t hidden, DType dtype, Dispatcher dispatcher);

  /// Plans a step for these tokens of this rank, ids ascending, dropped ones behind them. Allocates
  /// what is missing. Throws, on every rank alike, Error 64 for more rows than can be numbered, 70
  /// where what the ranks tell each other contradicts itself, and 71. Collective. `failed`: what
  /// this rank has failed in before, and all are to throw; then it has no tokens. `given`: the
  /// routing isn't a router's, which goes for all ranks or for none; else Error 64.
  void plan(const Choices& own, const std::exception_ptr& failed = nullptr, bool given = false);
  /// x [own rows, H] stays in use until combine(). Collective.
  void dispatch(const std::byte* x);

  std::int64_t own_experts() const { return shape_.placement.owned(group()).size(); }
  /// Rows of one of this group's experts, over all ranks.
  std::int64_t rows(std::int64_t own_expert) const { return experts_.count(own_expert); }
  /// Its rows from `first` on. `weigh`: times their routing weights.
  InputRows input(std::int64_t own_expert, std::int64_t first, bool weigh) const;
  /// What adds `count` finished rows from `first` on to the sums; the caller fills in the rows.
  WeighedRows output(std::int64_t own_expert, std::int64_t first, std::int64_t count,
                     bool weigh) const;
  /// This rank's share of H, in groups of 64 columns.
  Range own_groups() const { return shape_.share(shape_.member(world_.rank())); }

  /// y [own rows, H] = the sums of all experts, and the shared rows. Collective.
  void combine(std::span<const SharedRows> shared, std::byte* y);

  const ExchangeCounts& counts() const { return moved_; }
  /// Of the last plan().
  void copy_map(RowMap& map) const;

 private:
  int group() const { return shape_.group(world_.rank()); }
  RankCounts own_counts(const Choices& own, bool failed, bool given) const;
  void make_room(std::int64_t top_k);
  void keep_received_choices(std::int64_t top_k);
  void check_received_counts() const;
  void upload_indices();
  void count_moved_rows(const Choices& own);

  Communicator& world_;
  Device& device_;
  ExchangeShape shape_;
  NodeMap map_;
  CountMatrix counts_;
  RowMessages messages_;
  std::optional<RowWindow> window_;  // instead, where ranks share memory

  DispatchPlan dispatch_;
  NodeDispatch to_nodes_;
  CombinePlan combine_;
  ExpertPlan experts_;
  std::vector<Arrival> arrivals_;  // [world]
  Choices received_choices_;
  std::vector<std::int64_t> rows_of_source_;  // [world] received
  std::vector<std::int64_t> row_at_;          // where each received row lies
  std::vector<std::int32_t> roots_;           // [etp, roots of own rows]
  StepIndices indices_;
  ExchangeCounts moved_;
};

}  // namespace gatefold
