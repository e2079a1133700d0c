#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "parallel/communicator.h"
#include "runtime/range.h"

namespace gatefold {

/// world = tp x dp for dense layers, and for experts = etp x ep: in both, the ranks of a group are
/// neighbours. Those of a tensor-parallel group share their tokens.
class Grid {
 public:
  /// ep 0: there are no experts. Collective over `world`. Throws Error 64 unless tp and ep divide
  /// the world.
  Grid(Communicator& world, std::int64_t tp, std::int64_t ep = 0);

  Communicator& world() const { return *world_; }
  Communicator& tp() const { return *tp_; }
  std::int64_t dp_size() const { return world_->size() / tp_->size(); }
  std::int64_t dp_index() const { return world_->rank() / tp_->size(); }
  /// The ranks that share this one's experts. Only where ep is given.
  Communicator& etp() const { return *etp_; }
  std::int64_t ep() const { return etp_ == nullptr ? 0 : world_->size() / etp_->size(); }

 private:
  Communicator* world_;
  std::unique_ptr<Communicator> tp_;
  std::unique_ptr<Communicator> etp_;
};

/// The largest divisor of `ranks` up to `most`.
std::int64_t largest_divisor(std::int64_t ranks, std::int64_t most);

/// How many tokens each dp group holds, in global order: `split` if given, else as even as can be.
/// Throws Error 64 where `split` hasn't `groups` entries, has a negative one, or doesn't sum to
/// `tokens`.
std::vector<Range> split_tokens(std::int64_t tokens, std::int64_t groups,
                                const std::vector<std::int64_t>& split = {});

}  // namespace gatefold
