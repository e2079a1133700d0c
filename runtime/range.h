#pragma once

#include <cstdint>

namespace gatefold {

/// Half-open interval [begin, end) of rows, columns, blocks or tokens.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  constexpr std::int64_t size() const { return end - begin; }
  constexpr bool empty() const { return end <= begin; }
  constexpr bool contains(std::int64_t i) const { return i >= begin && i < end; }
  constexpr bool within(std::int64_t size) const {
    return begin >= 0 && begin <= end && end <= size;
  }
  friend constexpr bool operator==(const Range&, const Range&) = default;
};

/// Part `index` of `total` cut into `parts`: [index*total/parts, (index+1)*total/parts).
constexpr Range even_part(std::int64_t total, std::int64_t parts, std::int64_t index) {
  return {index * total / parts, (index + 1) * total / parts};
}

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

}  // namespace gatefold
