#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "parallel/communicator.h"
#include "runtime/range.h"

namespace gatefold {

/// world = tp x dp: the ranks of a tensor-parallel group are neighbours, and share their tokens.
class Grid {
 public:
  /// Collective over `world`. Throws Error 64 unless tp divides the world.
  Grid(Communicator& world, std::int64_t tp);

  Communicator& world() const { return *world_; }
  Communicator& tp() const { return *tp_; }
  std::int64_t dp_size() const { return world_->size() / tp_->size(); }
  std::int64_t dp_index() const { return world_->rank() / tp_->size(); }

 private:
  Communicator* world_;
  std::unique_ptr<Communicator> tp_;
};

/// How many tokens each dp group holds, in global order: `split` if given, else as even as can be.
/// Throws Error 64 where `split` hasn't `groups` entries, has a negative one, or doesn't sum to
/// `tokens`.
std::vector<Range> split_tokens(std::int64_t tokens, std::int64_t groups,
                                const std::vector<std::int64_t>& split = {});

}  // namespace gatefold
