#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace gatefold {

/// Which rows an expert keeps where more are sent to it than it takes.
enum class DropBy {
  kPosition,     // the first ones, in global token order (Switch; Megatron's "position")
  kProbability,  // those of the largest routing weights, of equal ones the first; NaN is least
};

/// How many rows an expert takes. What it doesn't take is dropped: the expert isn't computed for
/// that token, whose other weights stay as they are, so that a token of which all is dropped gets
/// its shared experts alone, or exactly 0. What counts are the tokens of all ranks, never those of
/// one, or who is dropped would depend on how tokens are split.
struct Capacity {
  double factor = 0.0;    // C = ceil(T k / E * factor), quotient and product rounded in float64
  std::int64_t rows = 0;  // C, where there is no factor
  DropBy drop = DropBy::kPosition;
  /// T, of each sequence by itself; 0: all tokens of the step are one.
  std::int64_t sequence_length = 0;
  /// Every expert multiplies as many rows as it could have, the missing ones zeros. No bit depends
  /// on it: tiles are as high as the rows that it has ask for.
  bool pad = false;
};

/// Throws Error 64 for a factor or numbers that can't be.
void check(const Capacity& capacity);
/// C for T = `tokens`, clamped to them.
std::int64_t capacity_rows(const Capacity& capacity, std::int64_t tokens, std::int64_t experts,
                           std::int64_t top_k);
/// "position", "probability"
std::string_view name_of(DropBy drop);
/// "1.25 x the mean rows of an expert, by position", and all the rest that it says.
std::string text_of(const Capacity& capacity);

}  // namespace gatefold
