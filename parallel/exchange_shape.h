#pragma once

#include <cstdint>
#include <vector>

#include "parallel/expert_plan.h"
#include "runtime/dtype.h"
#include "runtime/range.h"
#include "runtime/tensor_layout.h"

namespace gatefold {

/// How rows get to the ranks of their experts. No bit depends on it.
enum class Dispatcher {
  kAllToAll,   // each row to the ranks that need it (all-to-all-v)
  kAllGather,  // all rows to all ranks, which pick theirs: for few tokens, or experts everywhere
};

/// What all steps of an exchange of tokens have in common. World = etp x ep ranks: rank r is member
/// r % etp of group r / etp, and has that member's share of a group's sums.
struct ExchangeShape {
  ExpertPlacement placement;
  int etp = 1;
  std::int64_t hidden = 0;
  DType dtype = DType::kF32;
  Dispatcher dispatcher = Dispatcher::kAllToAll;

  int group(int rank) const { return rank / etp; }
  int member(int rank) const { return rank % etp; }
  bool all_to_all() const { return dispatcher == Dispatcher::kAllToAll; }
  /// In groups of 64 columns.
  Range share(int member) const { return even_part(ceil_div(hidden, kGroup), etp, member); }
  std::int64_t row_bytes() const { return hidden * size_of(dtype); }
  /// Of a row of sums.
  std::int64_t sum_bytes(int member) const {
    return share(member).size() * kGroup * size_of(DType::kF32);
  }
  /// A token's ids and weights as they travel: [top_k] int32, [top_k] fp32.
  static std::int64_t record_bytes(std::int64_t top_k) { return top_k * 8; }
};

/// What lies where in a rank's memory for a step begins at whole pieces: so do rows of sums, so
/// that a root is found by its number of pieces.
inline constexpr std::int64_t kPiece = kGroup * size_of(DType::kF32);
class Pieces {
 public:
  /// Where it begins.
  std::int64_t add(std::int64_t bytes) {
    const std::int64_t at = end_;
    end_ = round_up(end_ + bytes, kPiece);
    return at;
  }
  std::int64_t bytes() const { return end_; }

 private:
  std::int64_t end_ = 0;
};

/// The rows of one source that a rank may look at, after an exchange of ids and weights.
struct Arrival {
  const std::byte* records = nullptr;  // [count], host
  std::int64_t count = 0;
  std::int64_t first_row = 0;  // where the first one's row lies, as InputRows counts
  std::int64_t row_step = 1;   // from one to the next
};

}  // namespace gatefold
