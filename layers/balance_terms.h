#pragma once

namespace gatefold {

/// The ways in which well-known codebases normalise what is always E * sum_e f_e * P_e, with P_e
/// the mean of P over tokens.
enum class BalanceLoss {
  kMegatron,      // f = c / (k T): Megatron-LM, DeepSeek
  kTransformers,  // f = c / T: transformers' load_balancing_loss_func, minimind
  kSwitch,        // f = first choices / T: Switch Transformers
};

/// What training adds to its loss for a layer's router. A coefficient of 0: nothing.
struct BalanceTerms {
  BalanceLoss loss = BalanceLoss::kMegatron;
  double coefficient = 0;
  bool per_sequence = false;  // the mean of the sequences' own losses, else one of all tokens
  double z_coefficient = 0;
};

}  // namespace gatefold
