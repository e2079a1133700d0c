#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/expert_plan.h"
#include "runtime/dtype.h"
#include "runtime/range.h"
#include "runtime/routing.h"
#include "runtime/safetensors.h"

namespace gatefold {

/// Input tokens, the same on every rank.
struct TokenBatch {
  std::vector<std::byte> x;  // [tokens, hidden] in `dtype`
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  std::vector<std::int64_t> shape;  // of x and y in files; rank 0: [B, S, H] where --input has it
  DType dtype = DType::kF32;
  std::string description;
  std::vector<std::int64_t> nan_rows;

  /// Rows as fp32, [rows.size(), hidden].
  std::vector<float> as_float(Range rows) const;
  const std::byte* row(std::int64_t index) const { return x.data() + index * row_bytes(); }
  std::int64_t row_bytes() const { return hidden * size_of(dtype); }
};

/// Fills x with the seed's tokens.
void make_tokens(std::uint64_t seed, TokenBatch& batch);
void find_nan_rows(TokenBatch& batch);

/// A file of --input: tensor `x` [T, H] or [B, S, H], and, to replay a routing, `topk_ids` [T, k]
/// (I32 or I64) and `topk_weights` [T, k] (F32).
class TokenFile {
 public:
  /// Throws Error 65, 66.
  TokenFile(const std::string& path, std::int64_t hidden);

  std::int64_t tokens() const { return tokens_; }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  /// Throws Error 64 where x is [B, S, H] with another S than `given`; 0: none is.
  void check_sequences(const std::string& path, std::int64_t given) const;
  /// Fills x, rounded to the batch's dtype. Throws Error 65.
  void read(TokenBatch& batch) const;
  /// The routing; no rows where there is none. Throws Error 65 where it isn't one of this layer.
  Choices routing(const RouteRule& rule) const;

 private:
  SafetensorsFile file_;
  DType stored_ = DType::kF32;
  std::vector<std::int64_t> shape_;
  std::int64_t tokens_ = 0;
};

}  // namespace gatefold
