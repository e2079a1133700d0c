#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "runtime/cuda_values.cuh"
#include "runtime/dtype.h"
#include "runtime/expert_rows.h"
#include "runtime/routing_math.h"
#include "runtime/tensor_layout.h"

// Kernels of mixtures of experts: each gives the bits that the CPU device gives.

namespace gatefold::cuda {

constexpr unsigned kAllLanes = 0xffffffffU;

/// Rows of `width` units: row index[i] of `in` as far as `used` and `in_rows` go, zeros beyond.
struct RowGather {
  const std::byte* in;
  std::byte* out;
  const std::int32_t* index;  // [in_rows]
  std::int64_t rows, in_rows;
  std::int64_t used, width, in_stride;  // units
};

template <typename Unit>
__global__ void __launch_bounds__(kThreads) gather_rows(RowGather gather) {
  const auto* in = reinterpret_cast<const Unit*>(gather.in);
  auto* out = reinterpret_cast<Unit*>(gather.out);
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * blockDim.x * kInFlight + threadIdx.x;
  for (std::int64_t row = blockIdx.y; row < gather.rows; row += gridDim.y) {
    const bool inside = row < gather.in_rows;
    const std::int64_t used = inside ? gather.used : 0;
    const Unit* from = in + (inside ? gather.index[row] * gather.in_stride : 0);
    Unit values[kInFlight];
    for (int i = 0; i < kInFlight; ++i) {
      const std::int64_t unit = first + static_cast<std::int64_t>(i) * blockDim.x;
      values[i] = unit < used ? from[unit] : Unit{};
    }
    for (int i = 0; i < kInFlight; ++i) {
      const std::int64_t unit = first + static_cast<std::int64_t>(i) * blockDim.x;
      if (unit < gather.width) out[row * gather.width + unit] = values[i];
    }
  }
}

/// Eight values of any type, widened; `from` is 16-byte aligned.
template <DType kDType>
__device__ inline void load_widened(const Stored<kDType>* from, float (&to)[kEight]) {
  constexpr int kWords = static_cast<int>(sizeof(Stored<kDType>) * kEight / sizeof(uint4));
  alignas(16) Stored<kDType> packed[kEight];
  for (int i = 0; i < kWords; ++i) {
    reinterpret_cast<uint4*>(packed)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  for (int i = 0; i < kEight; ++i) to[i] = widened<kDType>(packed[i]);
}

/// The same from any address: `left` of them, and zeros.
template <DType kDType>
__device__ inline void load_any(const Stored<kDType>* from, std::int64_t left,
                                float (&to)[kEight]) {
  if (left >= kEight && aligned16(from)) return load_widened<kDType>(from, to);
  for (int i = 0; i < kEight; ++i) to[i] = i < left ? widened<kDType>(from[i]) : 0.0F;
}

/// Rows of tiles: round(scale * row) in the dtype that x has, too, and zeros.
struct RowScale {
  const std::byte* x;
  std::byte* out;
  const std::int32_t* index;  // may be null
  const float* scale;
  std::int64_t rows, in_rows;
  std::int64_t columns, width, in_stride;  // elements; width is a multiple of 64
};

template <DType kDType>
__global__ void __launch_bounds__(kThreads) scale_rows(RowScale tile) {
  const auto* x = reinterpret_cast<const Stored<kDType>*>(tile.x);
  auto* out = reinterpret_cast<Stored<kDType>*>(tile.out);
  const std::int64_t column = place_in_row() * kEight;
  if (column >= tile.width) return;
  for (std::int64_t row = blockIdx.y; row < tile.rows; row += gridDim.y) {
    float values[kEight] = {};
    const std::int64_t left = row < tile.in_rows ? tile.columns - column : 0;
    if (left > 0) {
      const std::int64_t from = tile.index == nullptr ? row : tile.index[row];
      load_any<kDType>(x + from * tile.in_stride + column, left, values);
      const float scale = tile.scale[row];
      for (int i = 0; i < kEight; ++i) {
        if (i < left) values[i] = __fmul_rn(scale, values[i]);
      }
    }
    store_eight<kDType>(values, out + row * tile.width + column);
  }
}

/// Four threads have the 32 lanes of kOwn rows and outputs each, eight lanes a thread. Of few rows
/// they have one, and more columns on their way.
constexpr int kTeam = 4;
constexpr int kLanesOfThread = kSumLanes / kTeam;
static_assert(kLanesOfThread == kEight);
constexpr int kLogitThreads = 128;
constexpr int kTeams = kLogitThreads / kTeam;
/// Teams of a block that have the same outputs, each with its own rows.
constexpr int row_teams(int own) { return own == 1 ? 1 : 4; }
/// Rows and outputs that a block has.
constexpr std::int64_t block_rows(int own) { return row_teams(own) * own; }
constexpr std::int64_t block_outputs(int own) { return kTeams / row_teams(own) * own; }

/// The team's 32 lanes folded by halves; all its threads get the sum.
__device__ inline float fold_team(float (&lane)[kEight]) {
  for (int threads = kTeam / 2; threads > 0; threads /= 2) {
    for (int i = 0; i < kEight; ++i) {
      lane[i] = __fadd_rn(lane[i], __shfl_xor_sync(kAllLanes, lane[i], threads));
    }
  }
  for (int half = kEight / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] = __fadd_rn(lane[i], lane[i + half]);
  }
  return lane[0];
}

/// Rows that start at 16 bytes are read by vectors, others one by one. A column that isn't there
/// adds +0, which changes no lane: lanes start from +0 and so never are -0.
template <DType kDType, bool kAligned>
__device__ inline void load_columns(const Stored<kDType>* from, std::int64_t left,
                                    float (&to)[kEight]) {
  if constexpr (kAligned) {
    if (left >= kEight) return load_widened<kDType>(from, to);
    for (float& value : to) value = 0.0F;
  } else {
    for (int i = 0; i < kEight; ++i) to[i] = i < left ? widened<kDType>(from[i]) : 0.0F;
  }
}

/// What a thread adds up: its lanes of the team's rows and outputs.
template <DType kDType, int kOwn>
struct TeamLogits {
  const Stored<kDType>* x[kOwn];
  const float* weight[kOwn];
  float lanes[kOwn][kOwn][kEight];
};

/// kSteps times 32 columns of the team from `column` on, of which there are `left`, or all.
template <bool kAligned, int kSteps, bool kAll, DType kDType, int kOwn>
__device__ inline void add_columns(TeamLogits<kDType, kOwn>& team, std::int64_t column,
                                   std::int64_t left) {
  float values[kSteps][kOwn][kEight];
  float weights[kSteps][kOwn][kEight];
  for (int s = 0; s < kSteps; ++s) {
    const std::int64_t at = column + s * kSumLanes;
    const std::int64_t there = kAll ? kEight : left - s * kSumLanes;
    for (int i = 0; i < kOwn; ++i) {
      load_columns<kDType, kAligned>(team.x[i] + at, there, values[s][i]);
      load_columns<DType::kF32, kAligned>(team.weight[i] + at, there, weights[s][i]);
    }
  }
  for (int s = 0; s < kSteps; ++s) {
    for (int r = 0; r < kOwn; ++r) {
      for (int o = 0; o < kOwn; ++o) {
        for (int i = 0; i < kEight; ++i) {
          float& lane = team.lanes[r][o][i];
          lane = __fadd_rn(lane, __fmul_rn(values[s][r][i], weights[s][o][i]));
        }
      }
    }
  }
}

template <DType kDType, int kOwn, bool kAligned>
__global__ void __launch_bounds__(kLogitThreads) router_logits(LogitRows io) {
  constexpr int kSteps = kOwn == 1 ? kInFlight : 1;
  constexpr std::int64_t kStepColumns = kSteps * kSumLanes;
  const auto* x = reinterpret_cast<const Stored<kDType>*>(io.x);
  const int place = static_cast<int>(threadIdx.x) / kTeam;
  const int first_lane = static_cast<int>(threadIdx.x) % kTeam * kLanesOfThread;
  const std::int64_t output =
      static_cast<std::int64_t>(blockIdx.x) * block_outputs(kOwn) + place / row_teams(kOwn) * kOwn;
  for (std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * block_rows(kOwn);
       first_row < io.rows; first_row += static_cast<std::int64_t>(gridDim.y) * block_rows(kOwn)) {
    const std::int64_t row = first_row + place % row_teams(kOwn) * kOwn;
    TeamLogits<kDType, kOwn> team{};
    for (int i = 0; i < kOwn; ++i) {  // those that aren't there do the last one's work again
      team.x[i] = x + smaller(row + i, io.rows - 1) * io.hidden;
      team.weight[i] = io.weight + smaller(output + i, io.outputs - 1) * io.hidden;
    }
    std::int64_t column = first_lane;
    for (; column + kStepColumns - kSumLanes + kEight <= io.hidden; column += kStepColumns) {
      add_columns<kAligned, kSteps, true>(team, column, kEight);
    }
    for (; column < io.hidden; column += kSumLanes) {
      add_columns<kAligned, 1, false>(team, column, io.hidden - column);
    }
    for (int r = 0; r < kOwn; ++r) {
      for (int o = 0; o < kOwn; ++o) {
        float logit = fold_team(team.lanes[r][o]);
        if (first_lane != 0 || row + r >= io.rows || output + o >= io.outputs) continue;
        if (io.bias != nullptr) logit = __fadd_rn(logit, io.bias[output + o]);
        io.logits[(row + r) * io.outputs + output + o] = canonical_nan(logit);
      }
    }
  }
}

/// A warp per token; its lanes share out the experts, lane l has l, l + 32, …
struct ExpertChoice {
  RouteRule rule;
  const float* logits;      // [rows, E]
  const float* correction;  // [E], may be null
  std::int64_t rows;
  std::int32_t* ids;  // [rows, k]
  float* weights;     // [rows, k]
};
constexpr int kWarp = 32;
static_assert(kWarp == kSumLanes && kMaxTopK <= kWarp);
constexpr int kMostWarps = 4;

__device__ inline float warp_max(float value) {
  for (int half = kWarp / 2; half > 0; half /= 2) {
    value = larger_logit(value, __shfl_xor_sync(kAllLanes, value, half));
  }
  return value;
}
/// Folded by halves: each lane gets what fold_lanes() leaves in the first.
__device__ inline float warp_sum(float value) {
  for (int half = kWarp / 2; half > 0; half /= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(kAllLanes, value, half));
  }
  return value;
}

/// The largest key, and no longer a candidate. A lane reads and takes none but its own.
__device__ inline std::int64_t take_best(std::int64_t* keys, std::int64_t count, int lane) {
  std::int64_t best = kTakenKey;
  for (std::int64_t i = lane; i < count; i += kWarp) best = larger(best, keys[i]);
  for (int half = kWarp / 2; half > 0; half /= 2) {
    best = larger(best, __shfl_xor_sync(kAllLanes, best, half));
  }
  const std::int64_t id = id_of_key(best);
  if (id % kWarp == lane) keys[id] = kTakenKey;
  return id;
}

/// Experts of all but the best groups come after all others.
__device__ inline void keep_groups(const RouteRule& rule, std::int64_t* keys,
                                   std::int64_t* group_keys, int lane) {
  const std::int64_t size = rule.experts / rule.groups;
  __syncwarp();  // a group's experts are other lanes'
  for (std::int64_t group = lane; group < rule.groups; group += kWarp) {
    std::int64_t best = kTakenKey;
    std::int64_t second = kTakenKey;
    for (std::int64_t id = group * size; id < (group + 1) * size; ++id) {
      second = larger(second, smaller(best, keys[id]));
      best = larger(best, keys[id]);
    }
    group_keys[group] = choice_key(
        judge_group(rule.group_score, choice_of_key(best), choice_of_key(second), size > 1), group);
  }
  for (std::int64_t i = 0; i < rule.kept_groups; ++i) take_best(group_keys, rule.groups, lane);
  __syncwarp();
  for (std::int64_t id = lane; id < rule.experts; id += kWarp) {
    if (group_keys[id / size] == kTakenKey) continue;
    keys[id] = choice_key(-std::numeric_limits<float>::infinity(), id);
  }
}

/// Of all logits of a token, each lane with its share of them.
__device__ inline SoftmaxRow softmax_of_warp(const float* logits, std::int64_t experts, int lane) {
  float max = -std::numeric_limits<float>::infinity();
  for (std::int64_t e = lane; e < experts; e += kWarp) max = larger_logit(max, logits[e]);
  max = warp_max(max);
  float sum = 0.0F;
  for (std::int64_t e = lane; e < experts; e += kWarp) {
    sum = __fadd_rn(sum, softmax_term(logits[e], max));
  }
  return {max, warp_sum(sum)};
}

/// Of expert `id`, which was taken last: see RouteRule. A lane reads keys of none but its own.
__device__ inline SoftmaxRow mixer_row_of_warp(const RouteRule& rule, const float* logits,
                                               const std::int64_t* keys, std::int64_t id,
                                               int lane) {
  float sum = 0.0F;
  for (std::int64_t e = lane; e < rule.experts; e += kWarp) {
    const bool before = keys[e] == kTakenKey && e != id;
    sum = __fadd_rn(sum, before ? 0.0F : mixer_term(logits[e], logits[id], rule.margin));
  }
  return {logits[id], warp_sum(sum)};
}

template <Score kScore>
__global__ void __launch_bounds__(kMostWarps* kWarp) choose_experts(ExpertChoice io) {
  DYNAMIC_SHARED(std::int64_t, all_keys);  // [warp][experts + groups]
  __shared__ float all_chosen[kMostWarps][kWarp];
  const RouteRule& rule = io.rule;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto warps = static_cast<std::int64_t>(blockDim.x) / kWarp;
  std::int64_t* keys = all_keys + warp * (rule.experts + rule.groups);
  float* chosen = all_chosen[warp];
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  for (std::int64_t row = blockIdx.x * warps + warp; row < io.rows; row += gridDim.x * warps) {
    const float* logits = io.logits + row * rule.experts;
    SoftmaxRow softmax;
    if constexpr (kScore == Score::kSoftmax) {
      softmax = softmax_of_warp(logits, rule.experts, lane);
    }
    for (std::int64_t e = lane; e < rule.experts; e += kWarp) {
      float choice = score_of<kScore>(logits[e], softmax);
      if (io.correction != nullptr) choice = __fadd_rn(choice, io.correction[e]);
      keys[e] = choice_key(choice, e);
    }
    if (rule.groups > 1) keep_groups(rule, keys, keys + rule.experts, lane);
    std::int64_t own = 0;  // the lane's of the chosen
    for (std::int64_t i = 0; i < rule.top_k; ++i) {
      const std::int64_t id = take_best(keys, rule.experts, lane);
      if (i == lane) own = id;
      if constexpr (kScore == Score::kSparseMixer) {
        const SoftmaxRow row = mixer_row_of_warp(rule, logits, keys, id, lane);
        if (i == lane) softmax = row;
      }
    }
    const bool has_one = lane < rule.top_k;
    const float logit = has_one ? logits[own] : kLowest;
    if constexpr (kScore == Score::kSoftmaxOfChosen) {
      softmax.max = warp_max(logit);
      chosen[lane] = has_one ? softmax_term(logit, softmax.max) : 0.0F;
      __syncwarp();
      softmax.sum = sum_of_chosen(chosen, rule.top_k);
      __syncwarp();
    }
    const float weight = has_one ? first_weight<kScore>(logit, softmax) : 0.0F;
    chosen[lane] = weight;
    __syncwarp();
    const float sum = sum_of_chosen(chosen, rule.top_k);
    __syncwarp();  // before the next token's
    if (!has_one) continue;
    io.ids[row * rule.top_k + lane] = static_cast<std::int32_t>(own);
    io.weights[row * rule.top_k + lane] = final_weight(rule, weight, sum);
  }
}

/// See ScoredLogits.
template <Score kScore>
__global__ void __launch_bounds__(kMostWarps* kWarp) score_logits(ScoredLogits io) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto warps = static_cast<std::int64_t>(blockDim.x) / kWarp;
  for (std::int64_t row = blockIdx.x * warps + warp; row < io.rows; row += gridDim.x * warps) {
    const float* logits = io.logits + row * io.experts;
    const SoftmaxRow softmax = softmax_of_warp(logits, io.experts, lane);
    float sum = 1.0F;  // dividing by it changes nothing
    if constexpr (!kSumsToOne<kScore>) {
      sum = 0.0F;
      for (std::int64_t e = lane; e < io.experts; e += kWarp) {
        sum = __fadd_rn(sum, first_weight<kScore>(logits[e], softmax));
      }
      sum = __fadd_rn(warp_sum(sum), kScoreEpsilon);
    }
    float* scores = io.scores + row * io.experts;
    for (std::int64_t e = lane; e < io.experts; e += kWarp) {
      scores[e] = canonical_nan(__fdiv_rn(first_weight<kScore>(logits[e], softmax), sum));
    }
    if (lane == 0) io.log_sums[row] = log_sum(softmax);
  }
}

__device__ inline float4 times(float factor, const float4& a) {
  return {__fmul_rn(factor, a.x), __fmul_rn(factor, a.y), __fmul_rn(factor, a.z),
          __fmul_rn(factor, a.w)};
}
__device__ inline Eight times(float factor, const Eight& a) {
  return {times(factor, a.low), times(factor, a.high)};
}

/// See WeighedRows.
__global__ void __launch_bounds__(kThreads) weigh_rows(WeighedRows io) {
  const std::int64_t column = place_in_row() * kEight;
  const std::int64_t width = io.groups * kGroup;
  if (column >= width) return;
  const float* rows = io.rows + column / kGroup * io.group_stride + column % kGroup;
  float* sums = io.sums + column;
  Eight bias{};
  if (io.bias != nullptr) bias = load_eight(io.bias + column);
  for (std::int64_t row = blockIdx.y; row < io.count; row += gridDim.y) {
    Eight p = load_eight(rows + row * kGroup);
    // x + 0 changes no bits but those of -0, so an expert without a bias skips it.
    if (io.bias != nullptr) p = add(p, bias);
    if (io.weights != nullptr) p = times(io.weights[row], p);
    const std::int32_t end = io.merge_begin[row + 1];
    for (std::int32_t m = io.merge_begin[row]; m < end; ++m) {
      p = add(load_eight(sums + io.merges[m] * width), p);
    }
    auto* to = reinterpret_cast<float4*>(sums + io.targets[row] * width);
    to[0] = p.low;
    to[1] = p.high;
  }
}

/// See CombinedRows. The shared experts travel as kernel arguments.
struct CombineShape {
  const float* sums;
  const std::int32_t* begin;
  const std::int32_t* roots;
  const std::int32_t* merges;
  std::int64_t tokens, root_stride, first_column, columns, row_stride;
  std::byte* y;
};
struct SharedList {
  SharedRows rows[kMaxShared];
  int count;
};
constexpr int kCombineThreads = 128;
constexpr int kOpenBelow = static_cast<int>(kMaxOpenSums) - 1;

/// The roots of a token in tree order. What lies below the top is in `below`:
/// [slot][half][thread].
__device__ inline Eight add_token_roots(const CombineShape& io, std::int64_t token,
                                        std::int64_t column, float4* below) {
  const auto slot = [&](int height, int half) -> float4& {
    return below[(height * 2 + half) * kCombineThreads + static_cast<int>(threadIdx.x)];
  };
  const std::int32_t begin = io.begin[token];
  const std::int32_t end = io.begin[token + 1];
  Eight top{};
  int height = 0;  // values below the top
  for (std::int32_t first = begin; first < end; first += kInFlight) {
    Eight values[kInFlight];
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i < end)
        values[i] = load_eight(io.sums + io.roots[first + i] * io.root_stride + column);
    }
    for (int i = 0; i < kInFlight && first + i < end; ++i) {
      if (first + i > begin) {
        slot(height, 0) = top.low;
        slot(height, 1) = top.high;
        ++height;
      }
      top = values[i];
      for (std::int32_t m = io.merges[first + i]; m > 0; --m) {
        --height;
        top = add(Eight{slot(height, 0), slot(height, 1)}, top);
      }
    }
  }
  return top;
}

template <DType kDType>
__global__ void __launch_bounds__(kCombineThreads)
    combine_rows(CombineShape io, SharedList shared) {
  DYNAMIC_SHARED(float4, below);
  const std::int64_t column = place_in_row() * kEight;
  const std::int64_t left = io.columns - column;
  if (left <= 0) return;
  for (std::int64_t token = blockIdx.y; token < io.tokens; token += gridDim.y) {
    float values[kEight];
    unpack(add_token_roots(io, token, column, below), values);
    const std::int64_t in_row = token * io.row_stride + io.first_column + column;
    for (int j = 0; j < shared.count; ++j) {
      const SharedRows& one = shared.rows[j];
      float row[kEight];
      load_any<DType::kF32>(one.rows + in_row, left, row);
      const bool gated = one.gate_logits != nullptr;
      const float gate = gated ? sigmoid_fp32(one.gate_logits[token]) : 0.0F;
      for (int i = 0; i < kEight; ++i) {
        values[i] = __fadd_rn(values[i], gated ? __fmul_rn(gate, row[i]) : row[i]);
      }
    }
    auto* y = reinterpret_cast<Stored<kDType>*>(io.y) + in_row;
    if (left >= kEight && aligned16(y)) {
      store_eight<kDType>(values, y);
    } else {
      for (int i = 0; i < kEight; ++i) {
        if (i < left) y[i] = rounded<kDType>(values[i]);
      }
    }
  }
}

}  // namespace gatefold::cuda
