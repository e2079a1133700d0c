#include "launch/routing_pattern.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include "launch/option_values.h"
#include "runtime/hash.h"

namespace gatefold {
namespace {

/// Of a weight 1: finer than any count of tokens shows.
constexpr double kUnit = 0x1p40;
constexpr double kMostExponent = 16;

/// Numbers that a token, or the order of the experts, draws one after the other.
class Draws {
 public:
  Draws(std::uint64_t seed, std::string_view what, std::uint64_t number)
      : key_(SplitMix64::mix(SplitMix64::mix(seed ^ Fnv1a().add(what).value()) +
                             (number + 1) * SplitMix64::kGamma)) {}

  /// In [0, end); end is far below 2^64, so that all of them are equally likely.
  std::uint64_t below(std::uint64_t end) {
    __extension__ using Wide = unsigned __int128;
    const std::uint64_t draw = SplitMix64::mix(key_ + ++drawn_ * SplitMix64::kGamma);
    return static_cast<std::uint64_t>((Wide{draw} * end) >> 64);
  }

 private:
  std::uint64_t key_;
  std::uint64_t drawn_ = 0;
};

/// The experts in the seed's order, the busiest first (Fisher and Yates).
std::vector<std::int32_t> seeded_order(std::uint64_t seed, std::int64_t experts) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(experts));
  std::iota(order.begin(), order.end(), 0);
  Draws draws(seed, "the order of the experts", static_cast<std::uint64_t>(experts));
  for (std::size_t left = order.size(); left > 1; --left) {
    std::swap(order[left - 1], order[draws.below(left)]);
  }
  return order;
}

/// base^exponent by products and square roots, which are rounded alike everywhere; pow() isn't.
double power(double base, double exponent) {
  double result = 1;
  for (; exponent >= 1; exponent -= 1) result *= base;
  double root = base;
  for (int bit = 0; bit < 52 && exponent > 0; ++bit) {
    root = std::sqrt(root);
    exponent *= 2;
    if (exponent < 1) continue;
    result *= root;
    exponent -= 1;
  }
  return result;
}

/// Of the experts in the seed's order; none is 0, so that every one can be drawn.
std::vector<std::uint64_t> weights_of(const RoutingPattern& pattern, std::int64_t experts) {
  std::vector<std::uint64_t> weights;
  for (std::int64_t rank = 1; rank <= experts; ++rank) {
    const double share = pattern.kind == RoutingKind::kZipf
                             ? 1 / power(static_cast<double>(rank), pattern.exponent)
                             : 1.0;
    weights.push_back(static_cast<std::uint64_t>(std::max(1.0, std::floor(kUnit * share))));
  }
  return weights;
}

/// Draws places, each different, by what is left of the weights. `taken` [E] is all false again
/// afterwards.
void draw(Draws draws, const std::vector<std::uint64_t>& weights, std::uint64_t total,
          std::vector<bool>& taken, std::span<std::int32_t> places) {
  for (std::int32_t& chosen : places) {
    std::uint64_t left = draws.below(total);
    std::size_t place = 0;
    for (; taken[place] || left >= weights[place]; ++place) {
      if (!taken[place]) left -= weights[place];
    }
    taken[place] = true;
    total -= weights[place];
    chosen = static_cast<std::int32_t>(place);
  }
  for (const std::int32_t place : places) taken[static_cast<std::size_t>(place)] = false;
}

}  // namespace

RoutingPattern parse_routing(std::string_view name, std::string_view value) {
  constexpr std::string_view kZipf = "zipf:";
  if (value == "router") return {RoutingKind::kRouter, 0};
  if (value == "uniform") return {RoutingKind::kUniform, 0};
  if (value == "one-hot") return {RoutingKind::kOneHot, 0};
  if (value == "file") return {RoutingKind::kFile, 0};
  if (value.starts_with(kZipf)) {
    return {RoutingKind::kZipf,
            parse_number<double>(name, value, value.substr(kZipf.size()), 0, kMostExponent)};
  }
  if (value.find(',') != std::string_view::npos) {
    refuse_value(fmt::format("{} is a list (all points of a benchmark have one routing); give one",
                             shown_value(name, value)));
  }
  refuse_value(fmt::format(
      "{} is unknown (valid: router, uniform, zipf:S, one-hot, file); choose one of these{}",
      shown_value(name, value), value == "zipf" ? ", such as zipf:1.2" : ""));
}

std::string text_of(const RoutingPattern& pattern) {
  switch (pattern.kind) {
    case RoutingKind::kRouter: return "router";
    case RoutingKind::kUniform: return "uniform";
    case RoutingKind::kZipf: return fmt::format("zipf:{}", pattern.exponent);
    case RoutingKind::kOneHot: return "one-hot";
    case RoutingKind::kFile: return "file";
  }
  return "?";
}

Choices patterned_choices(const RoutingPattern& pattern, std::uint64_t seed, const RouteRule& rule,
                          Range tokens) {
  const std::vector<std::int32_t> order = seeded_order(seed, rule.experts);
  const std::vector<std::uint64_t> weights = weights_of(pattern, rule.experts);
  const std::uint64_t total = std::accumulate(weights.begin(), weights.end(), std::uint64_t{0});
  Choices choices;
  choices.resize(tokens.size(), rule.top_k);
  std::ranges::fill(choices.weights, 1.0F / static_cast<float>(rule.top_k));
  const auto k = static_cast<std::size_t>(rule.top_k);
  std::vector<bool> taken(weights.size());
  for (std::int64_t token = tokens.begin; token < tokens.end; ++token) {
    const auto ids =
        std::span(choices.ids).subspan(static_cast<std::size_t>(token - tokens.begin) * k, k);
    std::iota(ids.begin(), ids.end(), 0);
    if (pattern.kind != RoutingKind::kOneHot) {
      draw(Draws(seed, "experts of a token", static_cast<std::uint64_t>(token)), weights, total,
           taken, ids);
    }
    for (std::int32_t& id : ids) id = order[static_cast<std::size_t>(id)];
  }
  return choices;
}

}  // namespace gatefold
