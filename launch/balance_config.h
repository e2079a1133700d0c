#pragma once

namespace gatefold {

/// What balance takes where no model is given: DeepSeek-V3's router, made small.
inline constexpr const char* kBalanceConfig = R"({
  "model_type": "deepseek_v3", "hidden_size": 32, "intermediate_size": 32,
  "moe_intermediate_size": 8, "num_hidden_layers": 1, "first_k_dense_replace": 0,
  "n_routed_experts": 64, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8,
  "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": true,
  "routed_scaling_factor": 2.5, "hidden_act": "silu", "torch_dtype": "float32"
})";

}  // namespace gatefold
