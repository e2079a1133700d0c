#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "layers/capacity.h"
#include "parallel/communicator.h"
#include "parallel/expert_plan.h"
#include "runtime/range.h"

namespace gatefold {

/// Finds what a capacity drops, over all ranks. They tell each other counts, and the routing
/// weights of experts with too many rows where those count: every split of tokens over ranks leads
/// to the same.
class Dropper {
 public:
  /// `world` must outlive it. Throws Error 64 as check() does.
  Dropper(Communicator& world, const Capacity& capacity, std::int64_t experts);

  /// `own`: the choices of this rank's tokens; ranks have theirs in global token order, `tokens` in
  /// all. `failed`: this rank, with no choices, can't go on; then nothing is dropped on any.
  /// Throws, on every rank alike, Error 64 where the ranks' tokens aren't `tokens` or no whole
  /// sequences, 70, 71. Collective.
  void decide(const Choices& own, std::int64_t tokens, bool failed);

  /// [rows, k] of what decide() was given: 1 for what is kept, 0 for what is dropped.
  const std::vector<std::uint8_t>& kept() const { return kept_; }
  /// Rows that every expert multiplies in this step, where they pad; else 0.
  std::int64_t padded_rows() const { return padded_rows_; }

 private:
  using OfExperts = std::vector<std::int64_t>;  // [E]
  /// A sequence that a rank's tokens begin or end in.
  struct Edge {
    OfExperts rows;    // of all ranks
    OfExperts before;  // of the ranks before this one
    int ranks = 0;     // with tokens of it
  };

  bool gather_rows(std::int64_t rows, std::int64_t tokens, bool failed);
  void gather_edges(const Choices& own);
  void gather_weights(const Choices& own);
  OfExperts lowest_keys(const Choices& own, std::int64_t sequence) const;
  void keep(const Choices& own, std::int64_t sequence);

  /// The sequences, one or two, that a rank's tokens begin and end in.
  std::vector<std::int64_t> edges_of(int rank) const;
  const std::int64_t* edge_rows(int rank, std::size_t edge) const;
  /// Own rows of a sequence.
  Range own_rows(std::int64_t sequence) const;
  /// Calls visit(rank, sequence, expert, rows) for what weights_ holds, in order.
  template <typename Visit>
  void for_shared(const Visit& visit) const;

  Communicator& world_;
  Capacity capacity_;
  std::int64_t experts_;
  std::int64_t length_ = 1;  // tokens of a sequence
  std::int64_t most_ = 0;    // C
  std::int64_t padded_rows_ = 0;
  std::vector<std::int64_t> begin_;      // [world + 1] the ranks' first tokens
  std::vector<std::int64_t> edge_rows_;  // [world, 2, E]
  std::map<std::int64_t, Edge> edges_;   // by sequence
  std::vector<float> weights_;           // of experts with too many rows, see for_shared()
  std::vector<std::uint8_t> kept_;
};

}  // namespace gatefold
