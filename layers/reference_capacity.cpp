#include "layers/reference_capacity.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace gatefold {
namespace {

struct Row {
  std::size_t choice = 0;
  double worth = 0;
};

double most_rows(const Capacity& capacity, double tokens, double experts, double top_k) {
  if (capacity.factor == 0) return static_cast<double>(capacity.rows);
  return std::ceil(tokens * top_k / experts * capacity.factor);
}

}  // namespace

std::vector<std::uint8_t> reference_kept(const Capacity& capacity, std::int64_t experts,
                                         std::int64_t top_k, std::span<const std::int32_t> ids,
                                         std::span<const double> weights) {
  std::vector<std::uint8_t> kept(ids.size());
  const std::size_t whole = capacity.sequence_length > 0
                                ? static_cast<std::size_t>(capacity.sequence_length * top_k)
                                : ids.size();
  const double tokens = static_cast<double>(whole) / static_cast<double>(top_k);
  const double most =
      most_rows(capacity, tokens, static_cast<double>(experts), static_cast<double>(top_k));
  for (std::size_t first = 0; first < ids.size(); first += whole) {
    std::vector<std::vector<Row>> rows(static_cast<std::size_t>(experts));
    for (std::size_t i = first; i < std::min(ids.size(), first + whole); ++i) {
      const bool by_weight = capacity.drop == DropBy::kProbability;
      double worth = by_weight ? weights[i] : 0.0;
      if (std::isnan(worth)) worth = -std::numeric_limits<double>::infinity();
      rows[static_cast<std::size_t>(ids[i])].push_back({i, worth});
    }
    for (std::vector<Row>& of_expert : rows) {
      std::stable_sort(of_expert.begin(), of_expert.end(),
                       [](const Row& a, const Row& b) { return a.worth > b.worth; });
      for (std::size_t i = 0; i < of_expert.size() && static_cast<double>(i) < most; ++i) {
        kept[of_expert[i].choice] = 1;
      }
    }
  }
  return kept;
}

}  // namespace gatefold
