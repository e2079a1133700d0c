#pragma once

#include <cstdint>

namespace gatefold {

/// The most experts a layer may have, and the most of them that a token may go to.
inline constexpr std::int64_t kMaxExperts = 2048;
inline constexpr std::int64_t kMaxTopK = 32;

/// What the weights of a token's experts are made of.
enum class Score {
  kSoftmax,          // of all logits (Mixtral, Qwen, DeepSeek-V2, Switch)
  kSoftmaxOfChosen,  // experts are chosen by their logits; of the chosen ones' (GPT-OSS)
  kSigmoid,          // of each logit (DeepSeek-V3, GLM-4.5)
  kSigmoidOfChosen,  // the same, but experts are chosen by their logits (Llama-4)
  kSqrtSoftplus,     // sqrt(log(1 + exp(l))) of each logit (Megatron's sqrtsoftplus)
  kSparseMixer,      // experts are chosen by their logits; each against those near it (Phi-3.5-MoE)
};

/// What a group of experts is judged by, where only the best groups' experts may be chosen.
enum class GroupScore {
  kBest,     // its best expert (DeepSeek-V2)
  kTwoBest,  // the sum of its two best (DeepSeek-V3), or its only one
};

/// How logits become experts and weights, all in fp32, each step rounded once:
///   score    s = softmax(l), sigmoid(l), sqrt(softplus(l)), or l itself where chosen by logits.
///            softmax is exp(l - max) / sum, the sum by 32 lanes over the experts as in LogitRows,
///            max the largest l that isn't NaN
///   choice   c = s, plus the correction bias where there is one
///   groups   where there are several: experts of all but the kept_groups best groups of E / groups
///            neighbours get c = -inf; of equal groups the lowest stays, NaN counts as -inf
///   top-k    the k largest c, the largest first; of equals (-0 equals +0) the lowest id; NaN
///            counts as -inf, in groups too. So ids are k different ones, whatever the logits are
///   weight   w = s of the chosen, or softmax or sigmoid of the chosen ones' logits; never c. Of a
///            sparse mixer: softmax(l) at the chosen one of all experts but those chosen before it
///            and those with (l_chosen - l) / max(|l|, l_chosen) > margin, which is
///            1 / (sum of exp(l - l_chosen)), the sum by lanes.
///            normalize: w / (sum of w + epsilon); then w * scaling where that isn't 1.
///            Sums over the chosen go in the order in which they were chosen. NaN has one pattern.
struct RouteRule {
  std::int64_t experts = 0;  // E
  std::int64_t top_k = 0;    // k
  Score score = Score::kSoftmax;
  std::int64_t groups = 1;
  std::int64_t kept_groups = 1;
  GroupScore group_score = GroupScore::kBest;
  bool normalize = false;
  float epsilon = 0.0F;
  float scaling = 1.0F;
  float margin = 0.0F;  // of a sparse mixer
};

/// What balance losses and z-loss take of all of a token's logits, whichever experts it goes to and
/// without a correction bias, all in fp32 as above:
///   log-sum  max + log(sum of exp(l - max)), the sum by lanes
///   P        softmax(l) where weights are softmaxes; else s / (sum of s + 1e-20), the sum by
///   lanes.
///            Of a token 1 in sum. NaN has one pattern.
struct ScoredLogits {
  Score score = Score::kSoftmax;
  std::int64_t experts = 0;
  const float* logits = nullptr;  // [rows, E]
  std::int64_t rows = 0;
  float* scores = nullptr;    // [rows, E] P
  float* log_sums = nullptr;  // [rows]
};

/// Throws Error 65 for numbers that can't be: more experts than there may be, groups of several
/// sizes.
void check(const RouteRule& rule);

}  // namespace gatefold
