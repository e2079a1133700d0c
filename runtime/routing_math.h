#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "runtime/fp32_math.h"
#include "runtime/routing.h"

// The steps of routing on single values, for host and device (see runtime/fp32_math.h): what they
// mean is said in runtime/routing.h and, of the lanes, in runtime/expert_rows.h.

namespace gatefold {

/// Lanes that a sum over columns, or over experts, goes by.
inline constexpr int kSumLanes = 32;

/// The lanes' sum, by halves, in lane[0].
constexpr void fold_lanes(float (&lane)[kSumLanes]) {
  for (int half = kSumLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] = lane[i] + lane[i + half];
  }
}

/// Larger for what is chosen first: a larger choice, or an equal one of a lower id. NaN counts as
/// -inf, and -0 equals +0.
constexpr std::int64_t choice_key(float choice, std::int64_t id) {
  const float number = select(choice != choice, -std::numeric_limits<float>::infinity(), choice);
  const auto bits = std::bit_cast<std::int32_t>(number + 0.0F);  // -0 becomes +0
  const std::int32_t ordered = bits ^ ((bits >> 31) & 0x7fffffff);
  return (std::int64_t{ordered} << 32) | (0xffffffffLL - id);
}
constexpr std::int64_t id_of_key(std::int64_t key) { return 0xffffffffLL - (key & 0xffffffffLL); }
constexpr float choice_of_key(std::int64_t key) {
  const auto ordered = static_cast<std::int32_t>(key >> 32);
  return std::bit_cast<float>(ordered ^ ((ordered >> 31) & 0x7fffffff));
}
/// Below every key: of what has been chosen already.
inline constexpr std::int64_t kTakenKey = std::numeric_limits<std::int64_t>::min();

/// What a group of experts is judged by, given the best two of its choices; a group of one expert
/// has no second.
constexpr float judge_group(GroupScore score, float best, float second, bool has_second) {
  return score == GroupScore::kTwoBest && has_second ? best + second : best;
}

/// What a softmax divides by: of all experts' logits, or of the chosen ones'.
struct SoftmaxRow {
  float max = 0.0F;
  float sum = 1.0F;
};
constexpr float softmax_term(float logit, float max) { return exp_fp32(logit - max); }

/// NaN is left out of a row's maximum; the sum has it.
constexpr float larger_logit(float max, float logit) { return select(logit > max, logit, max); }

/// What an expert of a sparse mixer adds to the sum of one that is chosen before it, or itself.
constexpr float mixer_term(float logit, float chosen, float margin) {
  const float size = select(logit < 0.0F, -logit, logit);
  const float distance = (chosen - logit) / larger_logit(chosen, size);
  return select(distance > margin, 0.0F, softmax_term(logit, chosen));
}

/// s of one expert.
template <Score kScore>
constexpr float score_of(float logit, const SoftmaxRow& row) {
  if constexpr (kScore == Score::kSoftmax) return softmax_term(logit, row.max) / row.sum;
  if constexpr (kScore == Score::kSigmoid) return sigmoid_fp32(logit);
  if constexpr (kScore == Score::kSqrtSoftplus) return sqrt_softplus_fp32(logit);
  return logit;
}

/// Whether s of all experts is 1 in sum as it is.
template <Score kScore>
inline constexpr bool kSumsToOne =
    kScore == Score::kSoftmax || kScore == Score::kSoftmaxOfChosen || kScore == Score::kSparseMixer;

/// w of a chosen expert, before it is normalized; `row` is of all experts for kSoftmax, of the
/// chosen ones for kSoftmaxOfChosen, and the expert's own for kSparseMixer.
template <Score kScore>
constexpr float first_weight(float logit, const SoftmaxRow& row) {
  if constexpr (kSumsToOne<kScore>) {
    return softmax_term(logit, row.max) / row.sum;
  }
  if constexpr (kScore == Score::kSqrtSoftplus) return sqrt_softplus_fp32(logit);
  return sigmoid_fp32(logit);
}

/// What P divides by, where s isn't, so that no scores of 0 give NaN.
inline constexpr float kScoreEpsilon = 1e-20F;

constexpr float log_sum(const SoftmaxRow& row) {
  return canonical_nan(row.max + log_fp32(row.sum));
}

/// In the order in which the experts were chosen.
constexpr float sum_of_chosen(const float* values, std::int64_t count) {
  float sum = values[0];
  for (std::int64_t i = 1; i < count; ++i) sum = sum + values[i];
  return sum;
}

/// `sum` is of all the token's weights.
constexpr float final_weight(const RouteRule& rule, float weight, float sum) {
  float w = weight;
  if (rule.normalize) w = w / (sum + rule.epsilon);
  if (rule.scaling != 1.0F) w = w * rule.scaling;
  return canonical_nan(w);
}

/// Calls visit.operator()<score>(): the one place where a score becomes a template argument.
template <typename Visitor>
constexpr void with_score(Score score, Visitor visit) {
  switch (score) {
    case Score::kSoftmax: return visit.template operator()<Score::kSoftmax>();
    case Score::kSoftmaxOfChosen: return visit.template operator()<Score::kSoftmaxOfChosen>();
    case Score::kSigmoid: return visit.template operator()<Score::kSigmoid>();
    case Score::kSigmoidOfChosen: return visit.template operator()<Score::kSigmoidOfChosen>();
    case Score::kSqrtSoftplus: return visit.template operator()<Score::kSqrtSoftplus>();
    case Score::kSparseMixer: return visit.template operator()<Score::kSparseMixer>();
  }
}

}  // namespace gatefold
