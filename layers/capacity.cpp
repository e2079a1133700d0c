#include "layers/capacity.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "runtime/error.h"
#include "runtime/quoted_name.h"

namespace gatefold {

void check(const Capacity& capacity) {
  const auto fail = [](const std::string& problem) {
    throw Error(ExitCode::kUsage,
                problem +
                    " (an expert takes a whole number of rows, by a factor or as they are); "
                    "give a factor above 0, or a number of rows from 1 on");
  };
  if (!std::isfinite(capacity.factor) || capacity.factor < 0) {
    fail(fmt::format("a capacity factor of {}", capacity.factor));
  }
  if (capacity.rows < 0) fail(fmt::format("a capacity of {} rows", capacity.rows));
  if ((capacity.factor > 0) == (capacity.rows > 0)) {
    fail(capacity.rows > 0 ? fmt::format("a capacity factor of {} and a capacity of {} rows",
                                         capacity.factor, capacity.rows)
                           : std::string("a capacity of nothing"));
  }
  if (capacity.sequence_length < 0) {
    throw Error(ExitCode::kUsage,
                fmt::format("a capacity for sequences of {} tokens (they have at least one); give "
                            "their length, or 0 for one capacity for all tokens",
                            capacity.sequence_length));
  }
}

std::int64_t capacity_rows(const Capacity& capacity, std::int64_t tokens, std::int64_t experts,
                           std::int64_t top_k) {
  if (capacity.factor == 0) return std::min(capacity.rows, tokens);
  const double mean = static_cast<double>(tokens * top_k) / static_cast<double>(experts);
  const double rows = std::ceil(mean * capacity.factor);
  return rows < static_cast<double>(tokens) ? static_cast<std::int64_t>(rows) : tokens;
}

std::string_view name_of(DropBy drop) {
  return drop == DropBy::kPosition ? "position" : "probability";
}

std::string text_of(const Capacity& capacity) {
  const std::string most = capacity.factor > 0
                               ? fmt::format("{} x the mean rows of an expert", capacity.factor)
                               : counted(capacity.rows, "row") + " of an expert";
  const std::string scope = capacity.sequence_length > 0
                                ? fmt::format(" in each {} tokens", capacity.sequence_length)
                                : std::string();
  return fmt::format("{}{}, by {}{}", most, scope, name_of(capacity.drop),
                     capacity.pad ? ", padded" : "");
}

}  // namespace gatefold
