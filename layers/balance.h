#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "layers/balance_terms.h"
#include "parallel/communicator.h"

/// How evenly a router spreads tokens over experts: what training adds to its loss, or corrects by
/// a bias. Every number is the same, bit for bit, however tokens lie on ranks: counts are integers,
/// and fp32 sums go by a tree over a sequence's tokens.
namespace gatefold {

/// What the numbers are about: `sequences` of `length` tokens each, numbered one behind the other.
struct LoadShape {
  std::int64_t sequences = 0;
  std::int64_t length = 0;
  std::int64_t experts = 0;  // E
  std::int64_t top_k = 0;    // k

  std::int64_t tokens() const { return sequences * length; }
};

/// Neighbouring tokens of the batch and what a router made of them.
struct ScoredTokens {
  std::int64_t first = 0;  // number of the first one in the batch
  std::int64_t rows = 0;
  const float* scores = nullptr;      // [rows, E], of each token 1 in sum: P
  const float* log_sums = nullptr;    // [rows] log of the sum of exp(logits); null: 0
  const std::int32_t* ids = nullptr;  // [rows, k], the best first
};

/// Over the tokens of a sequence, or of several.
struct LoadSums {
  std::int64_t tokens = 0;
  std::vector<std::int64_t> chosen;  // [E] tokens that go to it: c
  std::vector<std::int64_t> best;    // [E] tokens whose first choice it is
  std::vector<float> scores;         // [E] sum of P
  float squares = 0.0F;              // sum of log_sums²
};

/// Of each sequence, the same on all ranks. `own` is this rank's run of the batch's tokens; runs
/// follow each other in the order of ranks. Throws, on every rank alike, Error 64 where they aren't
/// the batch. Collective.
std::vector<LoadSums> sum_loads(Communicator& world, const LoadShape& shape,
                                const ScoredTokens& own);
/// Of all sequences together, by a tree over them.
LoadSums whole_batch(std::span<const LoadSums> sequences);

struct NamedBalanceLoss {
  BalanceLoss loss;
  std::string_view name;
};
inline constexpr NamedBalanceLoss kBalanceLosses[] = {{BalanceLoss::kMegatron, "megatron"},
                                                      {BalanceLoss::kTransformers, "transformers"},
                                                      {BalanceLoss::kSwitch, "switch"}};

/// Without a coefficient (alpha); 0 where there are no tokens.
double balance_loss(BalanceLoss loss, const LoadSums& sums, std::int64_t top_k);
/// What it is where every expert gets as many tokens and as much of P: 1, or k.
double loss_at_balance(BalanceLoss loss, std::int64_t top_k);
/// The mean of the sequences' own losses: DeepSeek's seq_aux.
double mean_sequence_loss(BalanceLoss loss, std::span<const LoadSums> sequences,
                          std::int64_t top_k);
/// The mean of log_sums² over tokens: keeps logits small.
double z_loss(const LoadSums& sums);

/// Both terms, times their coefficients, of all of a step's sequences.
double weighed_losses(const BalanceTerms& terms, std::span<const LoadSums> sequences,
                      std::int64_t top_k);

/// The most tokens of an expert ÷ the mean of all; 0 where there are none.
double busiest_expert(const LoadSums& sums);
/// One step of balancing without a loss (DeepSeek-V3): bias_e += rate · sign(mean of c - c_e), the
/// sign of integers, so 0 where an expert has just the mean. bias [E].
void update_correction_bias(const LoadSums& batch, float rate, std::span<float> bias);

}  // namespace gatefold
