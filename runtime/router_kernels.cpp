#include "runtime/router_kernels.h"

#include <algorithm>
#include <cstring>

#include "runtime/column_math.h"
#include "runtime/routing_math.h"
#include "runtime/tensor_layout.h"

namespace gatefold {
namespace {

/// Columns at a time, so that eight rows of them are in L1 beside a few outputs' weights.
constexpr std::int64_t kStep = 512;

// Lanes side by side that are one register of an instruction set.
using Four = float __attribute__((vector_size(16)));
using Eight = float __attribute__((vector_size(32)));
using Sixteen = float __attribute__((vector_size(64)));

/// What one step has: x widened, lanes of each row and output.
struct LogitStep {
  alignas(64) float x[kLogitRows * kStep];
  alignas(64) float lanes[kLogitRows * kLogitOutputs * kSumLanes];

  float* lanes_of(std::int64_t row, std::int64_t output) {
    return lanes + (row * kLogitOutputs + output) * kSumLanes;
  }
};

/// `columns`, a multiple of 32, of kRows rows and kOutputs outputs, a register of lanes at a time.
template <typename Vector, int kRows, int kOutputs>
[[gnu::always_inline]] inline void add_products(LogitStep& step, std::int64_t row,
                                                std::int64_t output, const float* w,
                                                std::int64_t stride, std::int64_t columns) {
  constexpr auto kWidth = static_cast<std::int64_t>(sizeof(Vector) / sizeof(float));
  const float* x = step.x + row * kStep;
  for (std::int64_t lane = 0; lane < kSumLanes; lane += kWidth) {
    Vector sum[static_cast<std::size_t>(kRows)][static_cast<std::size_t>(kOutputs)];
    for (int r = 0; r < kRows; ++r) {
      for (int o = 0; o < kOutputs; ++o) {
        std::memcpy(&sum[r][o], step.lanes_of(row + r, output + o) + lane, sizeof(Vector));
      }
    }
    for (std::int64_t c = lane; c < columns; c += kSumLanes) {
      Vector weight[static_cast<std::size_t>(kOutputs)];
      for (int o = 0; o < kOutputs; ++o)
        std::memcpy(&weight[o], w + o * stride + c, sizeof(Vector));
      for (int r = 0; r < kRows; ++r) {
        Vector value;
        std::memcpy(&value, x + r * kStep + c, sizeof(Vector));
        for (int o = 0; o < kOutputs; ++o) sum[r][o] += value * weight[o];
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int o = 0; o < kOutputs; ++o) {
        std::memcpy(step.lanes_of(row + r, output + o) + lane, &sum[r][o], sizeof(Vector));
      }
    }
  }
}

/// The columns of a row after its last 32.
[[gnu::always_inline]] inline void add_last_products(const float* x, const float* w,
                                                     std::int64_t columns, float* lanes) {
  for (std::int64_t c = 0; c < columns; ++c) lanes[c] += x[c] * w[c];
}

/// Of all rows and outputs of a step, `columns` columns from `w` on.
template <typename Vector>
[[gnu::always_inline]] inline void add_columns(LogitStep& step, std::int64_t rows,
                                               std::int64_t outputs, const float* w,
                                               std::int64_t stride, std::int64_t columns) {
  // As many sums as registers, but for some for the operands.
  constexpr int kOutputs = sizeof(Vector) == sizeof(Sixteen) ? 4 : 2;
  constexpr int kRows = 4;
  const std::int64_t whole = columns / kSumLanes * kSumLanes;
  const auto add_rows = [&]<int kWide>(std::int64_t output) __attribute__((always_inline)) {
    std::int64_t row = 0;
    const float* from = w + output * stride;
    for (; row + kRows <= rows; row += kRows) {
      add_products<Vector, kRows, kWide>(step, row, output, from, stride, whole);
    }
    for (; row < rows; ++row) {
      add_products<Vector, 1, kWide>(step, row, output, from, stride, whole);
    }
  };
  std::int64_t output = 0;
  for (; output + kOutputs <= outputs; output += kOutputs) {
    add_rows.template operator()<kOutputs>(output);
  }
  for (; output < outputs; ++output) add_rows.template operator()<1>(output);
  if (whole == columns) return;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t o = 0; o < outputs; ++o) {
      add_last_products(step.x + row * kStep + whole, w + o * stride + whole, columns - whole,
                        step.lanes_of(row, o));
    }
  }
}

template <DType kDType>
[[gnu::always_inline]] inline void widen(const std::byte* in, std::int64_t first, std::int64_t n,
                                         float* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = widened<kDType>(in, first + i);
}

template <typename Vector>
[[gnu::always_inline]] inline void sum_step(const LogitRows& io, std::int64_t first_row,
                                            std::int64_t first_output) {
  LogitStep step;
  const std::int64_t rows = std::min(kLogitRows, io.rows - first_row);
  const std::int64_t outputs = std::min(kLogitOutputs, io.outputs - first_output);
  std::memset(step.lanes, 0, sizeof(step.lanes));
  for (std::int64_t first = 0; first < io.hidden; first += kStep) {
    const std::int64_t columns = std::min(kStep, io.hidden - first);
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t at = (first_row + row) * io.hidden + first;
      float* to = step.x + row * kStep;
      switch (io.model) {
        case DType::kF32: widen<DType::kF32>(io.x, at, columns, to); break;
        case DType::kBf16: widen<DType::kBf16>(io.x, at, columns, to); break;
        case DType::kF16: widen<DType::kF16>(io.x, at, columns, to); break;
      }
    }
    add_columns<Vector>(step, rows, outputs, io.weight + first_output * io.hidden + first,
                        io.hidden, columns);
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t o = 0; o < outputs; ++o) {
      float lanes[kSumLanes];
      std::memcpy(lanes, step.lanes_of(row, o), sizeof(lanes));
      fold_lanes(lanes);
      const std::int64_t output = first_output + o;
      const float logit = io.bias == nullptr ? lanes[0] : lanes[0] + io.bias[output];
      io.logits[(first_row + row) * io.outputs + output] = canonical_nan(logit);
    }
  }
}

/// What is known of a token while its experts are chosen.
struct TokenScores {
  SoftmaxRow softmax;
  alignas(64) float values[kMaxExperts];  // terms of the softmax, then scores
  alignas(64) std::int64_t keys[kMaxExperts];
  alignas(64) std::int64_t group_keys[kMaxExperts];
};

[[gnu::always_inline]] inline float max_logit(const float* logits, std::int64_t count) {
  float lane[kSumLanes];
  std::fill_n(lane, kSumLanes, -std::numeric_limits<float>::infinity());
  std::int64_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
    for (int l = 0; l < kSumLanes; ++l) lane[l] = larger_logit(lane[l], logits[i + l]);
  }
  for (; i < count; ++i) lane[0] = larger_logit(lane[0], logits[i]);
  for (int l = 1; l < kSumLanes; ++l) lane[0] = larger_logit(lane[0], lane[l]);
  return lane[0];
}

[[gnu::always_inline]] inline float sum_by_lanes(const float* values, std::int64_t count) {
  float lane[kSumLanes] = {};
  std::int64_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
    for (int l = 0; l < kSumLanes; ++l) lane[l] += values[i + l];
  }
  for (int l = 0; i + l < count; ++l) lane[l] += values[i + l];
  fold_lanes(lane);
  return lane[0];
}

/// The largest key, and no longer a candidate.
[[gnu::always_inline]] inline std::int64_t take_best(std::int64_t* keys, std::int64_t count) {
  std::int64_t best = kTakenKey;
  for (std::int64_t i = 0; i < count; ++i) best = larger(best, keys[i]);
  keys[id_of_key(best)] = kTakenKey;
  return best;
}

/// Experts of all but the best groups come after all others.
[[gnu::always_inline]] inline void keep_groups(const RouteRule& rule, TokenScores& token) {
  const std::int64_t size = rule.experts / rule.groups;
  for (std::int64_t group = 0; group < rule.groups; ++group) {
    const std::int64_t* keys = token.keys + group * size;
    std::int64_t best = kTakenKey;
    std::int64_t second = kTakenKey;
    for (std::int64_t i = 0; i < size; ++i) {
      second = larger(second, smaller(best, keys[i]));
      best = larger(best, keys[i]);
    }
    token.group_keys[group] = choice_key(
        judge_group(rule.group_score, choice_of_key(best), choice_of_key(second), size > 1), group);
  }
  for (std::int64_t i = 0; i < rule.kept_groups; ++i) take_best(token.group_keys, rule.groups);
  for (std::int64_t group = 0; group < rule.groups; ++group) {
    if (token.group_keys[group] == kTakenKey) continue;
    for (std::int64_t id = group * size; id < (group + 1) * size; ++id) {
      token.keys[id] = choice_key(-std::numeric_limits<float>::infinity(), id);
    }
  }
}

template <Score kScore>
[[gnu::always_inline]] inline void score_all(const RouteRule& rule, const float* logits,
                                             const float* correction, TokenScores& token) {
  const std::int64_t experts = rule.experts;
  if constexpr (kScore == Score::kSoftmax) {
    const float max = max_logit(logits, experts);
    for (std::int64_t e = 0; e < experts; ++e) token.values[e] = softmax_term(logits[e], max);
    token.softmax = {max, sum_by_lanes(token.values, experts)};
  }
  const SoftmaxRow softmax = token.softmax;
  for (std::int64_t e = 0; e < experts; ++e) {
    token.values[e] = score_of<kScore>(logits[e], softmax);
  }
  if (correction != nullptr) {
    for (std::int64_t e = 0; e < experts; ++e) token.values[e] += correction[e];
  }
  for (std::int64_t e = 0; e < experts; ++e) token.keys[e] = choice_key(token.values[e], e);
}

/// Of expert `id`, which was taken last: see RouteRule.
[[gnu::always_inline]] inline SoftmaxRow mixer_row(const RouteRule& rule, const float* logits,
                                                   std::int64_t id, TokenScores& token) {
  for (std::int64_t e = 0; e < rule.experts; ++e) {
    const bool before = token.keys[e] == kTakenKey && e != id;
    token.values[e] = select(before, 0.0F, mixer_term(logits[e], logits[id], rule.margin));
  }
  return {logits[id], sum_by_lanes(token.values, rule.experts)};
}

template <Score kScore>
[[gnu::always_inline]] inline void choose(const RouteRule& rule, const float* logits,
                                          const float* correction, std::int32_t* ids,
                                          float* weights) {
  TokenScores token;
  score_all<kScore>(rule, logits, correction, token);
  if (rule.groups > 1) keep_groups(rule, token);
  const std::int64_t k = rule.top_k;
  float chosen[kMaxTopK];  // logits
  SoftmaxRow rows[kMaxTopK];
  for (std::int64_t i = 0; i < k; ++i) {
    const std::int64_t id = id_of_key(take_best(token.keys, rule.experts));
    ids[i] = static_cast<std::int32_t>(id);
    chosen[i] = logits[id];
    if constexpr (kScore == Score::kSparseMixer) rows[i] = mixer_row(rule, logits, id, token);
  }
  if constexpr (kScore == Score::kSoftmaxOfChosen) {
    const float max = max_logit(chosen, k);
    float terms[kMaxTopK];
    for (std::int64_t i = 0; i < k; ++i) terms[i] = softmax_term(chosen[i], max);
    token.softmax = {max, sum_of_chosen(terms, k)};
  }
  float first[kMaxTopK];
  for (std::int64_t i = 0; i < k; ++i) {
    const SoftmaxRow& row = kScore == Score::kSparseMixer ? rows[i] : token.softmax;
    first[i] = first_weight<kScore>(chosen[i], row);
  }
  const float sum = sum_of_chosen(first, k);
  for (std::int64_t i = 0; i < k; ++i) weights[i] = final_weight(rule, first[i], sum);
}

[[gnu::always_inline]] inline void choose_any(const RouteRule& rule, const float* logits,
                                              const float* correction, std::int32_t* ids,
                                              float* weights) {
  switch (rule.score) {
    case Score::kSoftmax: return choose<Score::kSoftmax>(rule, logits, correction, ids, weights);
    case Score::kSoftmaxOfChosen:
      return choose<Score::kSoftmaxOfChosen>(rule, logits, correction, ids, weights);
    case Score::kSigmoid: return choose<Score::kSigmoid>(rule, logits, correction, ids, weights);
    case Score::kSigmoidOfChosen:
      return choose<Score::kSigmoidOfChosen>(rule, logits, correction, ids, weights);
    case Score::kSqrtSoftplus:
      return choose<Score::kSqrtSoftplus>(rule, logits, correction, ids, weights);
    case Score::kSparseMixer:
      return choose<Score::kSparseMixer>(rule, logits, correction, ids, weights);
  }
}

template <Score kScore>
[[gnu::always_inline]] inline void score_logits(std::int64_t experts, const float* logits,
                                                float* scores, float* of_all) {
  const float max = max_logit(logits, experts);
  for (std::int64_t e = 0; e < experts; ++e) scores[e] = softmax_term(logits[e], max);
  const SoftmaxRow softmax{max, sum_by_lanes(scores, experts)};
  for (std::int64_t e = 0; e < experts; ++e) scores[e] = first_weight<kScore>(logits[e], softmax);
  float sum = 1.0F;  // dividing by it changes nothing
  if constexpr (!kSumsToOne<kScore>) sum = sum_by_lanes(scores, experts) + kScoreEpsilon;
  for (std::int64_t e = 0; e < experts; ++e) scores[e] = canonical_nan(scores[e] / sum);
  *of_all = log_sum(softmax);
}

[[gnu::always_inline]] inline void score_any(Score score, std::int64_t experts, const float* logits,
                                             float* scores, float* of_all) {
  switch (score) {
    case Score::kSoftmax: return score_logits<Score::kSoftmax>(experts, logits, scores, of_all);
    case Score::kSoftmaxOfChosen:
      return score_logits<Score::kSoftmaxOfChosen>(experts, logits, scores, of_all);
    case Score::kSigmoid: return score_logits<Score::kSigmoid>(experts, logits, scores, of_all);
    case Score::kSigmoidOfChosen:
      return score_logits<Score::kSigmoidOfChosen>(experts, logits, scores, of_all);
    case Score::kSqrtSoftplus:
      return score_logits<Score::kSqrtSoftplus>(experts, logits, scores, of_all);
    case Score::kSparseMixer:
      return score_logits<Score::kSparseMixer>(experts, logits, scores, of_all);
  }
}

// One body, compiled for each instruction set: see activation.cpp.
[[gnu::flatten]] void sum_sse2(const LogitRows& io, std::int64_t row, std::int64_t output) {
  sum_step<Four>(io, row, output);
}
[[gnu::flatten, gnu::target("avx2")]] void sum_avx2(const LogitRows& io, std::int64_t row,
                                                    std::int64_t output) {
  sum_step<Eight>(io, row, output);
}
[[gnu::flatten, gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]] void
sum_avx512(const LogitRows& io, std::int64_t row, std::int64_t output) {
  sum_step<Sixteen>(io, row, output);
}

[[gnu::flatten]] void choose_sse2(const RouteRule& rule, const float* logits,
                                  const float* correction, std::int32_t* ids, float* weights) {
  choose_any(rule, logits, correction, ids, weights);
}
[[gnu::flatten, gnu::target("avx2")]] void choose_avx2(const RouteRule& rule, const float* logits,
                                                       const float* correction, std::int32_t* ids,
                                                       float* weights) {
  choose_any(rule, logits, correction, ids, weights);
}
[[gnu::flatten, gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]] void choose_avx512(
    const RouteRule& rule, const float* logits, const float* correction, std::int32_t* ids,
    float* weights) {
  choose_any(rule, logits, correction, ids, weights);
}

[[gnu::flatten]] void score_sse2(Score score, std::int64_t experts, const float* logits,
                                 float* scores, float* of_all) {
  score_any(score, experts, logits, scores, of_all);
}
[[gnu::flatten, gnu::target("avx2")]] void score_avx2(Score score, std::int64_t experts,
                                                      const float* logits, float* scores,
                                                      float* of_all) {
  score_any(score, experts, logits, scores, of_all);
}
[[gnu::flatten, gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]] void score_avx512(
    Score score, std::int64_t experts, const float* logits, float* scores, float* of_all) {
  score_any(score, experts, logits, scores, of_all);
}

}  // namespace

void sum_logits(const LogitRows& io, std::int64_t first_row, std::int64_t first_output,
                VectorIsa isa) {
  switch (isa) {
    case VectorIsa::kAvx512: return sum_avx512(io, first_row, first_output);
    case VectorIsa::kAvx2: return sum_avx2(io, first_row, first_output);
    case VectorIsa::kSse2: return sum_sse2(io, first_row, first_output);
  }
}

void choose_for_token(const RouteRule& rule, const float* logits, const float* correction,
                      std::int32_t* ids, float* weights, VectorIsa isa) {
  switch (isa) {
    case VectorIsa::kAvx512: return choose_avx512(rule, logits, correction, ids, weights);
    case VectorIsa::kAvx2: return choose_avx2(rule, logits, correction, ids, weights);
    case VectorIsa::kSse2: return choose_sse2(rule, logits, correction, ids, weights);
  }
}

void score_token(Score score, std::int64_t experts, const float* logits, float* scores,
                 float* log_sum, VectorIsa isa) {
  switch (isa) {
    case VectorIsa::kAvx512: return score_avx512(score, experts, logits, scores, log_sum);
    case VectorIsa::kAvx2: return score_avx2(score, experts, logits, scores, log_sum);
    case VectorIsa::kSse2: return score_sse2(score, experts, logits, scores, log_sum);
  }
}

}  // namespace gatefold
