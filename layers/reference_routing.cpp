#include "layers/reference_routing.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

namespace gatefold::reference {
namespace {

bool chosen_by_logits(const RouteRule& rule) {
  return rule.score == Score::kSoftmaxOfChosen || rule.score == Score::kSigmoidOfChosen ||
         rule.score == Score::kSparseMixer;
}

bool ordered(const RouteRule& rule) { return rule.score == Score::kSparseMixer; }

/// NaN counts as the worst.
double rank_value(double value) { return std::isnan(value) ? -kInfinity : value; }

/// The n largest values' indices, the largest first; of equals the lowest index.
std::vector<std::int32_t> largest(std::span<const double> values, std::int64_t n) {
  std::vector<std::int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return values[static_cast<std::size_t>(a)] > values[static_cast<std::size_t>(b)];
  });
  order.resize(static_cast<std::size_t>(n));
  return order;
}

/// What the experts of one group, none of them NaN, make it worth.
double group_value(GroupScore score, std::vector<double> values) {
  std::sort(values.begin(), values.end(), std::greater<>());
  if (score == GroupScore::kBest || values.size() == 1) return values[0];
  return values[0] + values[1];
}

std::vector<double> group_values(const RouteRule& rule, std::span<const double> values) {
  const std::int64_t size = rule.experts / rule.groups;
  std::vector<double> worth;  // [groups]
  for (auto first = values.begin(); first != values.end(); first += size) {
    worth.push_back(rank_value(group_value(rule.group_score, {first, first + size})));
  }
  return worth;
}

/// Between what values a computed score may lie.
struct Reach {
  std::vector<double> low;
  std::vector<double> high;
};

Reach reach_of(std::span<const Number> numbers) {
  Reach reach;
  for (const Number& number : numbers) {
    const double error = number.likely();
    const bool known = std::isfinite(number.value) && std::isfinite(error);
    reach.low.push_back(known ? number.value - error : -kInfinity);
    reach.high.push_back(known ? number.value + error : kInfinity);
  }
  return reach;
}

Reach group_reach(const RouteRule& rule, const Reach& experts) {
  Reach reach{group_values(rule, experts.low), group_values(rule, experts.high)};
  if (rule.group_score == GroupScore::kBest) return reach;
  const auto rounding = [](double sum) { return 2 * kUnit * std::abs(sum) + kFlushed; };
  for (double& low : reach.low) low = std::isfinite(low) ? low - rounding(low) : -kInfinity;
  for (double& high : reach.high) high = std::isfinite(high) ? high + rounding(high) : kInfinity;
  return reach;
}

enum class Group {
  kChosen,    // an expert of it is chosen: it was kept
  kHarmless,  // it may have been kept: none of its experts has to be among the chosen
  kHarmful,   // it can't have been kept
};

std::vector<Group> classify(const RouteRule& rule, const Reach& reach,
                            std::span<const std::int32_t> ids) {
  const std::int64_t size = rule.experts / rule.groups;
  double lowest = kInfinity;  // what the lowest of the chosen may reach
  std::vector<bool> chosen(static_cast<std::size_t>(rule.experts));
  for (const std::int32_t id : ids) {
    lowest = std::min(lowest, reach.high[static_cast<std::size_t>(id)]);
    chosen[static_cast<std::size_t>(id)] = true;
  }
  std::vector<Group> groups(static_cast<std::size_t>(rule.groups), Group::kHarmless);
  for (const std::int32_t id : ids) groups[static_cast<std::size_t>(id / size)] = Group::kChosen;
  for (std::size_t e = 0; e < chosen.size(); ++e) {
    if (!chosen[e] && reach.low[e] > lowest) {
      groups[e / static_cast<std::size_t>(size)] = Group::kHarmful;
    }
  }
  return groups;
}

/// Whether the groups with chosen experts, filled up with harmless ones, can be the best.
bool may_keep(const RouteRule& rule, const Reach& reach, std::span<const Group> groups,
              double threshold) {
  std::int64_t possible = 0;
  std::int64_t forced = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const bool chosen = groups[g] == Group::kChosen;
    const bool above = reach.low[g] > threshold;
    const bool reaches = reach.high[g] >= threshold;
    if ((chosen && !reaches) || (above && groups[g] == Group::kHarmful)) return false;
    if (chosen || above) ++forced;
    if (reaches && groups[g] != Group::kHarmful) ++possible;
  }
  return forced <= rule.kept_groups && possible >= rule.kept_groups;
}

/// exp(l - max) / sum: a factor of at most exp(±(d + sum s_i * (exp(d_i) - 1))) off, d_i being the
/// errors of logits and of their differences to the largest.
class Softmax {
 public:
  explicit Softmax(std::span<const Number> logits);

  Number of(const Number& logit) const;

 private:
  double value(const Number& logit) const { return std::exp(logit.value - top_) / sum_; }
  double exponent(const Number& logit, double error) const {
    return error + kUnit * (std::abs(logit.value - top_) + 2 * reach_);
  }

  double count_;
  double top_ = -kInfinity;
  double reach_ = 0;  // the largest certain error
  double sum_ = 0;
  double mean_certain_ = 0;
  double mean_likely_ = 0;
};

Softmax::Softmax(std::span<const Number> logits) : count_(static_cast<double>(logits.size())) {
  for (const Number& logit : logits) {
    top_ = std::max(top_, logit.value);
    reach_ = std::max(reach_, logit.certain);
  }
  for (const Number& logit : logits) sum_ += std::exp(logit.value - top_);
  for (const Number& logit : logits) {
    mean_certain_ += value(logit) * std::expm1(exponent(logit, logit.certain));
    mean_likely_ += value(logit) * std::expm1(exponent(logit, kSpreads * logit.spread));
  }
}

Number Softmax::of(const Number& logit) const {
  const double s = value(logit);
  if (!std::isfinite(s) || !std::isfinite(reach_)) return {s, kInfinity, kInfinity};
  const auto carried = [&](double error, double mean, double rounding) {
    const double factor = std::expm1(exponent(logit, error) + mean);
    const double moved = s * (factor + 2 * kActivationUnits * kUnit + rounding);
    return (moved < 1 ? moved : 1.0) + kFlushed;  // s and what is computed are at most 1
  };
  return {s, carried(logit.certain, mean_certain_, gamma(count_)),
          carried(kSpreads * logit.spread, mean_likely_, kSpreads * kUnit * std::sqrt(count_)) /
              kSpreads};
}

std::vector<Number> softmax(std::span<const Number> logits) {
  const Softmax softmax(logits);
  std::vector<Number> result;
  for (const Number& logit : logits) result.push_back(softmax.of(logit));
  return result;
}

std::vector<Number> sigmoids(std::span<const Number> logits) {
  std::vector<Number> result;
  for (const Number& logit : logits) result.push_back(sigmoid_of(logit));
  return result;
}

std::vector<Number> sqrt_softpluses(std::span<const Number> logits) {
  std::vector<Number> result;
  for (const Number& logit : logits) result.push_back(sqrt_softplus_of(logit));
  return result;
}

std::vector<Number> scored(const RouteRule& rule, std::span<const Number> logits) {
  if (rule.score == Score::kSigmoid) return sigmoids(logits);
  if (rule.score == Score::kSqrtSoftplus) return sqrt_softpluses(logits);
  return softmax(logits);
}

/// Experts that a sparse mixer may weigh `chosen` against, those before it being gone.
struct Mixed {
  std::vector<Number> own;    // by the values as they are, `chosen` first
  std::vector<Number> least;  // where every expert that may be too far is
  std::vector<Number> most;   // where none of those is
};

Mixed mixed_with(const RouteRule& rule, std::span<const Number> logits,
                 const std::vector<bool>& gone, std::size_t chosen) {
  const Number& best = logits[chosen];
  Mixed mixed{{best}, {best}, {best}};
  for (std::size_t e = 0; e < logits.size(); ++e) {
    if (gone[e] || e == chosen) continue;
    const Number& logit = logits[e];
    Number size = logit;
    size.value = std::max(std::abs(logit.value), best.value);
    size.certain = std::max(logit.certain, best.certain);
    size.spread = std::max(logit.spread, best.spread);
    const Number negative{-logit.value, logit.certain, logit.spread};
    const Number distance = quotient(sum_of(std::array{best, negative}), size);
    const double error = distance.likely();
    const double margin = rule.margin;
    if (!(distance.value > margin)) mixed.own.push_back(logit);
    if (distance.value + error <= margin) mixed.least.push_back(logit);
    if (!(distance.value - error > margin)) mixed.most.push_back(logit);
  }
  return mixed;
}

std::vector<Number> mixer_weights(const RouteRule& rule, std::span<const Number> logits,
                                  std::span<const std::int32_t> ids) {
  std::vector<Number> result;
  std::vector<bool> gone(logits.size());
  for (const std::int32_t id : ids) {
    const auto chosen = static_cast<std::size_t>(id);
    const Mixed mixed = mixed_with(rule, logits, gone, chosen);
    const Number weight = Softmax(mixed.own).of(logits[chosen]);
    Number reached = weight;
    for (const std::vector<Number>* other : {&mixed.least, &mixed.most}) {
      const Number bound = Softmax(*other).of(logits[chosen]);
      const double off = std::abs(bound.value - weight.value);
      reached.certain = std::max(reached.certain, off + bound.certain);
      reached.spread = std::max(reached.spread, off / kSpreads + bound.spread);
    }
    result.push_back(reached);
    gone[chosen] = true;
  }
  return result;
}

/// Whether none of them has to come before one that stands before it.
bool may_stand_so(const Reach& reach, std::span<const std::int32_t> ids) {
  double lowest = kInfinity;  // what those before may be as low as
  for (const std::int32_t id : ids) {
    const auto e = static_cast<std::size_t>(id);
    if (reach.low[e] > lowest) return false;
    lowest = std::min(lowest, reach.high[e]);
  }
  return true;
}

std::vector<Number> picked(std::span<const Number> all, std::span<const std::int32_t> ids) {
  std::vector<Number> result;
  for (const std::int32_t id : ids) result.push_back(all[static_cast<std::size_t>(id)]);
  return result;
}

}  // namespace

ScoredToken score_token(const RouteRule& rule, std::vector<Number> logits,
                        std::span<const double> correction) {
  ScoredToken token{std::move(logits), {}, {}};
  if (chosen_by_logits(rule)) {
    token.scores = token.logits;
  } else {
    token.scores = scored(rule, token.logits);
  }
  token.choice = token.scores;
  for (std::size_t e = 0; e < correction.size(); ++e) {
    token.choice[e] = sum_of(std::array{token.scores[e], Number{correction[e], 0, 0}});
  }
  return token;
}

std::vector<std::int32_t> choose_experts(const RouteRule& rule, std::span<const Number> choice) {
  std::vector<double> values;  // [E]
  for (const Number& c : choice) values.push_back(rank_value(c.value));
  if (rule.groups > 1) {
    std::vector<bool> kept(static_cast<std::size_t>(rule.groups));
    for (const std::int32_t g : largest(group_values(rule, values), rule.kept_groups)) {
      kept[static_cast<std::size_t>(g)] = true;
    }
    const auto size = static_cast<std::size_t>(rule.experts / rule.groups);
    for (std::size_t e = 0; e < values.size(); ++e) {
      if (!kept[e / size]) values[e] = -kInfinity;
    }
  }
  return largest(values, rule.top_k);
}

bool well_formed(const RouteRule& rule, std::span<const std::int32_t> ids) {
  std::vector<bool> seen(static_cast<std::size_t>(rule.experts));
  for (const std::int32_t id : ids) {
    if (id < 0 || id >= rule.experts || seen[static_cast<std::size_t>(id)]) return false;
    seen[static_cast<std::size_t>(id)] = true;
  }
  return static_cast<std::int64_t>(ids.size()) == rule.top_k;
}

bool same_choice(const RouteRule& rule, std::span<const std::int32_t> a,
                 std::span<const std::int32_t> b) {
  if (ordered(rule)) return std::equal(a.begin(), a.end(), b.begin(), b.end());
  return std::is_permutation(a.begin(), a.end(), b.begin(), b.end());
}

bool may_choose(const RouteRule& rule, std::span<const Number> choice,
                std::span<const std::int32_t> ids) {
  const Reach experts = reach_of(choice);
  if (ordered(rule) && !may_stand_so(experts, ids)) return false;
  const std::vector<Group> groups = classify(rule, experts, ids);
  const std::int64_t size = rule.experts / rule.groups;
  for (const std::int32_t id : ids) {
    if (groups[static_cast<std::size_t>(id / size)] == Group::kHarmful) return false;
  }
  const Reach reach = group_reach(rule, experts);
  // The lowest that a kept group reaches is one of reach.high: one that suits is enough.
  return std::any_of(reach.high.begin(), reach.high.end(),
                     [&](double threshold) { return may_keep(rule, reach, groups, threshold); });
}

std::vector<Number> routing_weights(const RouteRule& rule, const ScoredToken& token,
                                    std::span<const std::int32_t> ids) {
  std::vector<Number> weights = picked(token.scores, ids);  // [k]
  if (rule.score == Score::kSoftmaxOfChosen) weights = softmax(weights);
  if (rule.score == Score::kSigmoidOfChosen) weights = sigmoids(weights);
  if (rule.score == Score::kSparseMixer) weights = mixer_weights(rule, token.logits, ids);
  if (rule.normalize) {
    std::vector<Number> terms = weights;
    terms.push_back({rule.epsilon, 0, 0});
    const Number sum = sum_of(terms);
    for (Number& weight : weights) weight = quotient(weight, sum);
  }
  if (rule.scaling != 1.0F) {
    for (Number& weight : weights) weight = product(weight, {rule.scaling, 0, 0});
  }
  return weights;
}

}  // namespace gatefold::reference
