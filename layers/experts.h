#pragma once

#include <cstdint>
#include <vector>

#include "layers/linear.h"
#include "layers/moe_spec.h"
#include "parallel/token_exchange.h"

namespace gatefold {

/// V of an expert's width I: the largest power of two up to min(8, I / 192), at least 1. Narrower
/// blocks cost time.
std::int64_t default_expert_blocks(std::int64_t intermediate_size);

/// The experts of one group of ranks, each cut into blocks over the group's ranks (place.tp, the
/// expert tensor parallel group). Rows come and sums go by a TokenExchange.
class Experts {
 public:
  /// `own`: which of the layer's experts. options.blocks is V, options.kernel is set. Collective
  /// over place.tp. Throws Error 64, 65, 66, 71.
  Experts(const MoeSpec& spec, Range own, const TensorSource& source, const Place& place,
          const LinearOptions& options);

  /// Room for steps in which no expert has more than `rows` rows. Collective.
  void reserve(std::int64_t rows);
  /// The part of reserve() in which peers take part: before all that may fail on one rank alone.
  void share(std::int64_t rows);
  /// Every own expert on the rows that it has, in order, weighed and added up; then as many
  /// zeros as there are fewer than `padded_rows`, which nobody adds up. Collective.
  void forward(TokenExchange& exchange, std::int64_t padded_rows = 0);

 private:
  struct Expert {
    MergedColumnParallelLinear gate_up;
    BlockWeights down;
    Buffer down_bias;  // fp32 [H], padded to whole groups; empty if there is none
  };
  Expert load(const FfnSpec& spec, const TensorSource& source) const;
  void run(std::int64_t own_expert, TokenExchange& exchange, std::int64_t padded_rows);
  void multiply_zeros(Expert& expert, std::int64_t rows);
  /// `chunk` says which rows there are and how they are tiled.
  Partials multiply(Expert& expert, const InputRows& rows, const Tiles& chunk);
  Partials multiply_tiles(Expert& expert, const Tiles& x);
  std::int64_t most_padded_rows(std::int64_t rows) const;

  std::int64_t hidden_;
  bool weigh_inputs_;
  Place place_;
  LinearOptions options_;
  BlockPlan plan_;
  MergePlan merge_plan_;
  TreeSum tree_sum_;
  std::vector<Expert> experts_;
  std::int64_t widest_block_ = 0;
  std::int64_t reserved_ = 0;
  Buffer x_tiles_;
  Buffer h_tiles_;
};

}  // namespace gatefold
