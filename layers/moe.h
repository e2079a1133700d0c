#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "layers/dropper.h"
#include "layers/experts.h"
#include "layers/mlp.h"
#include "layers/moe_spec.h"
#include "layers/router.h"
#include "layers/saved_for_backward.h"

namespace gatefold {

/// Where a mixture of experts runs: all ranks, this rank's group for dense layers and shared
/// experts, and its group for experts. world = tp x dp = etp x ep; in both, ranks of a group are
/// neighbours. All three are for tensors of the device.
struct MoePlace {
  Device* device = nullptr;
  Communicator* world = nullptr;
  Communicator* tp = nullptr;
  Communicator* etp = nullptr;

  int ep() const { return world->size() / etp->size(); }
};

struct MoeOptions {
  LinearOptions linear;            // blocks: of shared experts
  std::int64_t expert_blocks = 0;  // V of experts; 0: default_expert_blocks()
  Dispatcher dispatcher = Dispatcher::kAllToAll;
};

/// The distinct block shapes of a layer's experts and shared experts: what choose_kernel() takes.
std::vector<WeightShape> moe_shapes(const MoeSpec& spec, const MoeOptions& options);

/// Throws Error 65 where a routing isn't of so many rows, or has ids that leave [0, E) or repeat.
void check_choices(const Choices& given, const RouteRule& rule, std::int64_t rows);

/// One mixture-of-experts layer: route → dispatch → experts → combine, plus the shared experts.
/// The bits of y, ids and weights don't depend on the ranks, on who owns which expert, nor on the
/// dispatcher.
class Moe {
 public:
  /// Loads this rank's experts from `source` (which must outlive a streamed layer). Collective over
  /// place.world. Throws Error 64 (a spec whose parts don't fit among others), 65, 66, 71 on every
  /// rank.
  Moe(const MoeSpec& spec, const TensorSource& source, const MoePlace& place,
      const MoeOptions& options);

  /// Room for steps of up to these row counts, but for what depends on the routing: that grows in
  /// forward(), agreed over all ranks.
  void reserve(const RowCount& rows);

  /// x [rows.local, H] of this tp group → y [rows.local, H], dense, in the options' dtype. The host
  /// waits for the routing: how many rows go where depends on it. Throws Error 64, 70, 71 on every
  /// rank. Collective over place.world.
  void forward(const std::byte* x, const RowCount& rows, std::byte* y) {
    step(x, rows, y, nullptr);
  }
  /// The same y, bit for bit, and what a backward pass needs. The batch is sequences of
  /// `sequence_length` tokens, one behind the other; 0: one sequence. Throws Error 64 where they
  /// aren't whole.
  void forward(const std::byte* x, const RowCount& rows, std::byte* y, std::int64_t sequence_length,
               SavedForBackward& saved);
  /// The next forward() takes this routing of its rows, in any order of experts, instead of its
  /// router's; it throws Error 65 on every rank where an expert isn't there, or twice, and 64 where
  /// only some ranks were given one. A capacity drops of it what it would of a router's.
  void replay(Choices given) { replayed_ = std::move(given); }
  void wait();

  /// What the router adds to scores when it chooses: see Router, and update_correction_bias().
  std::vector<float> correction_bias() const { return router_->correction_bias(); }
  void set_correction_bias(std::span<const float> bias) { router_->set_correction_bias(bias); }

  /// Rows of x, of this group's, that this rank routes and adds up.
  Range home(std::int64_t group_rows) const;
  /// What the last forward() chose for them, in the order of choice, the best first.
  const Choices& routing() const { return routing_; }
  /// [home rows, k] of them, 1 for what was kept, 0 for what spec.capacity has dropped; empty
  /// without a capacity.
  std::span<const std::uint8_t> kept() const;
  /// What the last forward() moved, and how much all ranks have dropped.
  const ExchangeCounts& counts() const { return exchange_.counts(); }
  std::int64_t expert_rows(std::int64_t own_expert) const { return exchange_.rows(own_expert); }

 private:
  void step(const std::byte* x, const RowCount& rows, std::byte* y, SavedForBackward* saved);
  void save(const std::byte* x, const RowCount& rows, bool given, SavedForBackward& saved);
  void sum_losses(const LoadShape& shape, SavedForBackward& saved);
  void route(const std::byte* x, const RowCount& rows);
  void drop(const RowCount& rows, SavedForBackward* saved, std::exception_ptr& failed);
  void run_experts(const std::byte* x, const RowCount& rows, std::byte* y);
  void add_shared(const std::byte* x, const RowCount& rows);

  std::int64_t hidden_;
  BalanceTerms balance_;
  MoePlace place_;
  MoeOptions options_;
  std::optional<Router> router_;
  std::optional<Dropper> dropper_;
  Buffer shared_gate_;  // fp32 [1, H], may be empty
  TokenExchange exchange_;
  std::optional<Experts> experts_;  // there once the constructor is done
  std::vector<Mlp> shared_;

  RowCount reserved_{-1, -1};
  std::optional<Choices> replayed_;
  Choices routing_;
  Choices ascending_;
  Buffer gate_logits_;               // fp32 [home rows]
  std::vector<Buffer> shared_rows_;  // fp32 [home rows, H] of each shared expert
  std::vector<SharedRows> shared_views_;
  std::vector<std::int64_t> parts_;
};

}  // namespace gatefold
