// What a capacity drops, in plain loops over all tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "layers/capacity.h"
#include "one_device.h"
#include "parallel/expert_plan.h"

namespace gatefold::testing {

using Kept = std::vector<std::uint8_t>;

/// By the definition: an expert's rows in token order, or sorted by weight; the first C stay.
inline Kept plainly_kept(const Choices& all, const Capacity& capacity, std::int64_t experts) {
  Kept kept(all.ids.size(), 0);
  const std::int64_t length = capacity.sequence_length > 0 ? capacity.sequence_length : all.rows;
  for (std::int64_t first = 0; first < all.rows; first += length) {
    for (std::int32_t e = 0; e < experts; ++e) {
      std::vector<std::size_t> rows;
      for (auto i = as_size(first * all.top_k); i < as_size((first + length) * all.top_k); ++i) {
        if (all.ids[i] == e) rows.push_back(i);
      }
      if (capacity.drop == DropBy::kProbability) {
        const auto worth = [&all](std::size_t i) {
          const float w = all.weights[i];
          return std::isnan(w) ? -std::numeric_limits<float>::infinity() : w;
        };
        std::ranges::stable_sort(rows, [&](auto a, auto b) { return worth(a) > worth(b); });
      }
      const std::int64_t most = capacity_rows(capacity, length, experts, all.top_k);
      for (std::int64_t i = 0; i < std::min<std::int64_t>(most, std::ssize(rows)); ++i) {
        kept[rows[as_size(i)]] = 1;
      }
    }
  }
  return kept;
}

}  // namespace gatefold::testing
