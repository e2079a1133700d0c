#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

#include "runtime/dtype.h"
#include "runtime/fp32_math.h"
#include "runtime/routing.h"

/// What the device does for mixtures of experts, once more: one value after the other, by the words
/// of runtime/routing.h and runtime/expert_rows.h.
namespace gatefold::testing {

inline std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

inline std::uint32_t step(std::uint32_t& state) {
  return (state = state * 1664525U + 1013904223U) >> 8;
}

/// Many magnitudes, so that any other order has other bits.
inline std::vector<float> fractions(std::int64_t n, std::uint32_t seed) {
  std::vector<float> values(as_size(n));
  for (float& value : values) {
    const std::uint32_t bits = step(seed);
    value =
        (static_cast<float>(bits & 0xffffU) - 32768.0F) * (bits % 5U == 0 ? 0x1p-20F : 0x1p-14F);
  }
  return values;
}

inline std::vector<float> integers(std::int64_t n, std::uint32_t seed) {
  std::vector<float> values(as_size(n));
  for (float& value : values) value = static_cast<float>(step(seed) % 9U) - 4.0F;
  return values;
}

inline float plain_lane_sum(const std::vector<float>& values) {
  float lanes[32] = {};
  for (std::size_t i = 0; i < values.size(); ++i) lanes[i % 32] = lanes[i % 32] + values[i];
  for (std::size_t half = 16; half > 0; half /= 2) {
    for (std::size_t l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
  }
  return lanes[0];
}

struct PlainChoice {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

inline std::vector<float> plain_softmax(const std::vector<float>& logits, bool by_lanes) {
  float max = -std::numeric_limits<float>::infinity();
  for (const float logit : logits) {
    if (logit > max) max = logit;
  }
  std::vector<float> values;
  for (const float logit : logits) values.push_back(exp_fp32(logit - max));
  float sum = values[0];
  for (std::size_t i = 1; i < values.size(); ++i) sum = sum + values[i];
  if (by_lanes) sum = plain_lane_sum(values);
  for (float& value : values) value = value / sum;
  return values;
}

/// Places of `values`, the largest first; of equals the first, NaN as -inf.
inline std::vector<std::size_t> in_order(std::vector<float> values) {
  std::vector<std::size_t> places(values.size());
  for (std::size_t i = 0; i < places.size(); ++i) {
    places[i] = i;
    if (values[i] != values[i]) values[i] = -std::numeric_limits<float>::infinity();
  }
  std::stable_sort(places.begin(), places.end(),
                   [&](std::size_t a, std::size_t b) { return values[a] > values[b]; });
  return places;
}

inline void plain_group_limit(const RouteRule& rule, std::vector<float>& choice) {
  const std::size_t size = as_size(rule.experts / rule.groups);
  std::vector<float> judged;
  for (std::size_t first = 0; first < choice.size(); first += size) {
    std::vector<float> group(choice.begin() + static_cast<std::ptrdiff_t>(first),
                             choice.begin() + static_cast<std::ptrdiff_t>(first + size));
    for (float& value : group) {
      if (value != value) value = -std::numeric_limits<float>::infinity();
    }
    std::sort(group.rbegin(), group.rend());
    const bool two = rule.group_score == GroupScore::kTwoBest && size > 1;
    judged.push_back(two ? group[0] + group[1] : group[0]);
  }
  const std::vector<std::size_t> order = in_order(judged);
  for (std::size_t i = as_size(rule.kept_groups); i < order.size(); ++i) {
    std::fill_n(choice.begin() + static_cast<std::ptrdiff_t>(order[i] * size), size,
                -std::numeric_limits<float>::infinity());
  }
}

/// Weights of a sparse mixer's experts, each by what is left once those before it are gone.
inline std::vector<float> plain_mixer(const RouteRule& rule, const std::vector<float>& logits,
                                      const std::vector<std::int32_t>& ids) {
  std::vector<float> weights;
  std::vector<bool> gone(logits.size());
  for (const std::int32_t id : ids) {
    const float chosen = logits[as_size(id)];
    std::vector<float> terms;
    for (std::size_t e = 0; e < logits.size(); ++e) {
      const float size = std::abs(logits[e]);
      const bool far = (chosen - logits[e]) / (size > chosen ? size : chosen) > rule.margin;
      terms.push_back(gone[e] || far ? 0.0F : exp_fp32(logits[e] - chosen));
    }
    weights.push_back(exp_fp32(chosen - chosen) / plain_lane_sum(terms));
    gone[as_size(id)] = true;
  }
  return weights;
}

inline PlainChoice plain_choice(const RouteRule& rule, const std::vector<float>& logits,
                                const std::vector<float>& correction) {
  std::vector<float> scores = logits;
  if (rule.score == Score::kSoftmax) scores = plain_softmax(logits, true);
  if (rule.score == Score::kSigmoid) {
    for (float& score : scores) score = sigmoid_fp32(score);
  }
  if (rule.score == Score::kSqrtSoftplus) {
    for (float& score : scores) score = sqrt_softplus_fp32(score);
  }
  std::vector<float> choice = scores;
  for (std::size_t e = 0; e < correction.size(); ++e) choice[e] = scores[e] + correction[e];
  if (rule.groups > 1) plain_group_limit(rule, choice);

  PlainChoice result;
  std::vector<float> chosen;
  for (const std::size_t id : in_order(choice)) {
    if (std::ssize(result.ids) == rule.top_k) break;
    result.ids.push_back(static_cast<std::int32_t>(id));
    result.weights.push_back(scores[id]);
    chosen.push_back(logits[id]);
  }
  if (rule.score == Score::kSoftmaxOfChosen) result.weights = plain_softmax(chosen, false);
  if (rule.score == Score::kSigmoidOfChosen) {
    for (std::size_t i = 0; i < chosen.size(); ++i) result.weights[i] = sigmoid_fp32(chosen[i]);
  }
  if (rule.score == Score::kSparseMixer) result.weights = plain_mixer(rule, logits, result.ids);
  float sum = result.weights[0];
  for (std::size_t i = 1; i < chosen.size(); ++i) sum = sum + result.weights[i];
  for (float& weight : result.weights) {
    if (rule.normalize) weight = weight / (sum + rule.epsilon);
    if (rule.scaling != 1.0F) weight = weight * rule.scaling;
    weight = canonical_nan(weight);
  }
  return result;
}

struct PlainScores {
  std::vector<float> scores;
  float log_sum = 0.0F;
};

/// P and the log-sum of one token.
inline PlainScores plain_scores(Score score, const std::vector<float>& logits) {
  PlainScores plain{plain_softmax(logits, true), 0.0F};
  float max = -std::numeric_limits<float>::infinity();
  for (const float logit : logits) {
    if (logit > max) max = logit;
  }
  std::vector<float> terms;
  for (const float logit : logits) terms.push_back(exp_fp32(logit - max));
  plain.log_sum = canonical_nan(max + log_fp32(plain_lane_sum(terms)));
  const bool root = score == Score::kSqrtSoftplus;
  if (root || score == Score::kSigmoid || score == Score::kSigmoidOfChosen) {
    for (std::size_t e = 0; e < logits.size(); ++e) {
      plain.scores[e] = root ? sqrt_softplus_fp32(logits[e]) : sigmoid_fp32(logits[e]);
    }
    const float sum = plain_lane_sum(plain.scores) + 1e-20F;
    for (float& one : plain.scores) one = one / sum;
  }
  for (float& one : plain.scores) one = canonical_nan(one);
  return plain;
}

/// Rules of well-known models and odd ones.
inline std::vector<RouteRule> testing_rules() {
  std::vector<RouteRule> rules;
  const Score scores[] = {Score::kSoftmax,         Score::kSoftmaxOfChosen, Score::kSigmoid,
                          Score::kSigmoidOfChosen, Score::kSqrtSoftplus,    Score::kSparseMixer};
  for (const Score score : scores) {
    for (const std::int64_t experts : {std::int64_t{1}, std::int64_t{4}, std::int64_t{5},
                                       std::int64_t{60}, std::int64_t{64}, kMaxExperts}) {
      for (const std::int64_t k : {std::int64_t{1}, std::int64_t{2}, std::int64_t{8}, experts}) {
        if (k > experts || k > kMaxTopK) continue;
        rules.push_back({.experts = experts, .top_k = k, .score = score, .margin = 0.5F});
      }
    }
    for (const GroupScore judge : {GroupScore::kBest, GroupScore::kTwoBest}) {
      rules.push_back({64, 6, score, 8, 3, judge, true, 1e-20F, 2.5F});
      rules.push_back({60, 8, score, 60, 9, judge, true, 0.0F, 1.0F});
      rules.push_back({12, 4, score, 3, 1, judge, false, 0.0F, 0.5F});
    }
    rules.push_back({kMaxExperts, 32, score, 4, 3, GroupScore::kTwoBest, true, 1e-20F, 1.0F});
  }
  return rules;
}

/// Rows of logits: any, with ties, all alike, with NaN, with infinities, all NaN, zeros of both
/// signs, far apart.
inline std::vector<float> testing_logits(std::int64_t experts, std::uint32_t seed) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr std::int64_t kRows = 9;
  std::vector<float> logits = fractions(kRows * experts, seed);
  for (std::int64_t e = 0; e < experts; ++e) {
    const auto row = [&](std::int64_t r) -> float& { return logits[as_size(r * experts + e)]; };
    row(1) = static_cast<float>(step(seed) % 4U);
    row(2) = 0.5F;
    if (step(seed) % 5U == 0) row(3) = step(seed) % 2U == 0 ? kNan : -kNan;
    if (step(seed) % 3U == 0) row(4) = -kInf;
    if (e == experts / 2) row(5) = kInf;
    row(6) = kNan;
    row(7) = step(seed) % 2U == 0 ? 0.0F : -0.0F;
    row(8) *= 100.0F;
  }
  return logits;
}

}  // namespace gatefold::testing
