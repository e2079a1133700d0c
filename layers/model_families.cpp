#include "layers/model_families.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "layers/model_config.h"
#include "runtime/error.h"

namespace gatefold {

const std::vector<ModelFamily>& model_families() {
  // Wrappers of a text model (vision-language checkpoints, say) put its modules one level deeper.
  static const std::vector<std::string_view> text_prefixes = {"model.", "", "model.language_model.",
                                                              "language_model.model."};
  static const std::vector<std::string_view> decoder_keys = {
      "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias",
      "tie_word_embeddings"};
  static constexpr FamilySwitch norm_topk_prob{.key = "norm_topk_prob", .otherwise = false};
  static constexpr FamilySwitch norm_topk_prob_by_default{.key = "norm_topk_prob",
                                                          .otherwise = true};
  static constexpr FamilySwitch use_moe{.key = "use_moe", .otherwise = false};
  static constexpr float kDeepSeekEpsilon = 1e-20F;
  // As the newer transformers save any family that stores its experts one by one elsewhere.
  static constexpr ExpertNames stacked{.layout = ExpertLayout::kStacked,
                                       .gate = "mlp.experts.gate_up_proj",
                                       .up = "mlp.experts.gate_up_proj",
                                       .down = "mlp.experts.down_proj"};
  static const std::vector<ModelFamily> families = {
      {.model_types = {"llama"},
       .bias = {.key = "mlp_bias", .otherwise = false},
       .whole_model_keys = decoder_keys,
       .prefixes = text_prefixes},
      {.model_types = {"mistral", "qwen2", "qwen3"},
       .whole_model_keys = decoder_keys,
       .prefixes = text_prefixes},
      {.model_types = {"qwen3_5", "qwen3_5_text"},
       .prefixes = {"model.language_model.", "model.", "", "language_model.model."}},
      {.model_types = {"gemma3_text"},
       .activation_key = "hidden_activation",
       .default_activation = "gelu_pytorch_tanh",
       .legacy_activation_key = "hidden_act",
       .whole_model_keys = decoder_keys,
       .prefixes = text_prefixes},
      {.model_types = {"phi3"},
       .whole_model_keys = decoder_keys,
       .gate = "mlp.gate_up_proj",
       .up = "mlp.gate_up_proj"},
      {.model_types = {"glm4"},
       .gate = "mlp.gate_up_proj",
       .up = "mlp.gate_up_proj",
       .prefixes = text_prefixes},
      {.model_types = {"opt"},
       .intermediate_size_key = "ffn_dim",
       .activation_key = "activation_function",
       .default_activation = "relu",
       .gated = kNever,
       .bias = {.key = "enable_bias", .otherwise = true},
       .gate = {},
       .up = "fc1",
       .down = "fc2",
       .prefixes = {"model.decoder.", "decoder.", ""}},
      {.model_types = {"gpt2"},
       .hidden_size_key = "n_embd",
       .intermediate_size_key = "n_inner",
       .intermediate_default = IntermediateDefault::kFourTimesHidden,
       .activation_key = "activation_function",
       .default_activation = "gelu_new",
       .gated = kNever,
       .bias = kAlways,
       .whole_model_keys = {"n_positions"},
       .layout = WeightLayout::kTransposed,
       .stacks = {{.path = "h.{}.", .num_layers_key = "n_layer"}},
       .gate = {},
       .up = "mlp.c_fc",
       .down = "mlp.c_proj",
       .prefixes = {"transformer.", ""}},
      {.model_types = {"bert"},
       .default_activation = "gelu",
       .gated = kNever,
       .bias = kAlways,
       .stacks = {{.path = "encoder.layer.{}."}},
       .gate = {},
       .up = "intermediate.dense",
       .down = "output.dense",
       .prefixes = {"bert.", ""}},
      {.model_types = {"gatefold_ffn"},
       .intermediate_default = IntermediateDefault::kLadder,
       .activation_key = "activation",
       .legacy_activation_key = "hidden_act",
       .gated = {.key = "gated", .otherwise = false},
       .bias = {.key = "bias", .otherwise = false},
       .swish_beta = {.key = "swish_beta", .otherwise = false},
       .clamp_limit_key = "swiglu_limit",
       .clamp_alpha_key = "swiglu_alpha",
       .stacks = {{.default_num_layers = 1}},
       .beta = "mlp.swish_beta"},
      {.model_types = {"mixtral"},
       .whole_model_keys = decoder_keys,
       .prefixes = text_prefixes,
       .moe = MoeFamily{.experts_keys = {"num_local_experts", "num_experts"},
                        .intermediate_size_key = "intermediate_size",
                        .normalize = kAlways,
                        .names = {{.router = "block_sparse_moe.gate",
                                   .gate = "block_sparse_moe.experts.{}.w1",
                                   .up = "block_sparse_moe.experts.{}.w3",
                                   .down = "block_sparse_moe.experts.{}.w2"},
                                  stacked}}},
      {.model_types = {"phimoe"},
       .whole_model_keys = decoder_keys,
       .prefixes = text_prefixes,
       .moe = MoeFamily{.experts_keys = {"num_local_experts", "num_experts"},
                        .default_top_k = 2,
                        .intermediate_size_key = "intermediate_size",
                        .score = Score::kSparseMixer,
                        .half_margin_key = "router_jitter_noise",
                        .default_half_margin = 0.01,
                        .names = {{.router = "block_sparse_moe.gate",
                                   .gate = "block_sparse_moe.experts.{}.w1",
                                   .up = "block_sparse_moe.experts.{}.w3",
                                   .down = "block_sparse_moe.experts.{}.w2"},
                                  {.layout = ExpertLayout::kStacked,
                                   .router = "mlp.router",
                                   .gate = stacked.gate,
                                   .up = stacked.up,
                                   .down = stacked.down}}}},
      {.model_types = {"qwen2_moe"},
       .whole_model_keys = decoder_keys,
       .stacks = {{.moe_step_key = "decoder_sparse_step"}},
       .prefixes = text_prefixes,
       .moe = MoeFamily{.dense_list_key = "mlp_only_layers",
                        .normalize = norm_topk_prob,
                        .shared_width = SharedWidth::kOfItsOwn,
                        .shared_key = "shared_expert_intermediate_size",
                        .shared = "mlp.shared_expert",
                        .shared_gate = "mlp.shared_expert_gate",
                        .names = {{}, stacked}}},
      {.model_types = {"qwen3_moe"},
       .whole_model_keys = decoder_keys,
       .stacks = {{.moe_step_key = "decoder_sparse_step"}},
       .prefixes = text_prefixes,
       .moe = MoeFamily{.dense_list_key = "mlp_only_layers",
                        .normalize = norm_topk_prob,
                        .names = {{}, stacked}}},
      {.model_types = {"qwen3_next"},
       .stacks = {{.moe_step_key = "decoder_sparse_step"}},
       .prefixes = text_prefixes,
       .moe = MoeFamily{.dense_list_key = "mlp_only_layers",
                        .normalize = norm_topk_prob_by_default,
                        .shared_width = SharedWidth::kOfItsOwn,
                        .shared_key = "shared_expert_intermediate_size",
                        .shared = "mlp.shared_expert",
                        .shared_gate = "mlp.shared_expert_gate",
                        .names = {{}, stacked}}},
      {.model_types = {"qwen3_5_moe", "qwen3_5_moe_text"},
       .prefixes = {"model.language_model.", "model.", "", "language_model.model."},
       .moe = MoeFamily{.normalize = kAlways,
                        .shared_width = SharedWidth::kOfItsOwn,
                        .shared_key = "shared_expert_intermediate_size",
                        .shared = "mlp.shared_expert",
                        .shared_gate = "mlp.shared_expert_gate",
                        .names = {stacked, {}}}},
      {.model_types = {"qwen3_vl_moe", "qwen3_vl_moe_text"},
       .stacks = {{.moe_step_key = "decoder_sparse_step"}},
       .prefixes = {"model.language_model.", "model.", "", "language_model.model."},
       .moe = MoeFamily{.dense_list_key = "mlp_only_layers",
                        .normalize = kAlways,
                        .names = {{.layout = ExpertLayout::kStackedTransposed,
                                   .gate = stacked.gate,
                                   .up = stacked.up,
                                   .down = stacked.down},
                                  stacked,
                                  {}}}},
      {.model_types = {"olmoe"},
       .prefixes = text_prefixes,
       .moe = MoeFamily{.intermediate_size_key = "intermediate_size",
                        .normalize = norm_topk_prob,
                        .names = {{}, stacked}}},
      {.model_types = {"deepseek_v2"},
       .bias = {.key = "mlp_bias", .otherwise = false},
       .stacks = {{.moe_step_key = "moe_layer_freq"}},
       .prefixes = text_prefixes,
       .moe = MoeFamily{.every = EveryStep::kFirst,
                        .first_key = "first_k_dense_replace",
                        .experts_keys = {"n_routed_experts", "num_local_experts"},
                        .score_key = "scoring_func",
                        .method_key = "topk_method",
                        .normalize = norm_topk_prob,
                        .epsilon = kDeepSeekEpsilon,
                        .scaling_key = "routed_scaling_factor",
                        .shared_width = SharedWidth::kSeveralExperts,
                        .shared_key = "n_shared_experts",
                        .shared = "mlp.shared_experts",
                        .names = {{}, stacked},
                        .loss = kDeepSeekLoss}},
      {.model_types = {"deepseek"},
       .stacks = {{.moe_step_key = "moe_layer_freq"}},
       .prefixes = text_prefixes,
       .moe = MoeFamily{.every = EveryStep::kFirst,
                        .first_key = "first_k_dense_replace",
                        .experts_keys = {"n_routed_experts"},
                        .score_key = "scoring_func",
                        .normalize = norm_topk_prob,
                        .normalize_one = false,
                        .epsilon = kDeepSeekEpsilon,
                        .shared_width = SharedWidth::kSeveralExperts,
                        .shared_key = "n_shared_experts",
                        .shared = "mlp.shared_experts",
                        .names = {{}, stacked},
                        .loss = kDeepSeekLoss}},
      {.model_types = {"deepseek_v3", "kimi_k2"},
       .stacks = {{.moe_step_key = "moe_layer_freq"}},
       .prefixes = text_prefixes,
       .moe = MoeFamily{.every = EveryStep::kFirst,
                        .first_key = "first_k_dense_replace",
                        .default_first = 3,
                        .experts_keys = {"n_routed_experts", "num_local_experts"},
                        .score = Score::kSigmoid,
                        .score_key = "scoring_func",
                        .method = TopKMethod::kNoAuxTc,
                        .method_key = "topk_method",
                        .default_groups = 8,
                        .default_kept_groups = 4,
                        .normalize = norm_topk_prob_by_default,
                        .epsilon = kDeepSeekEpsilon,
                        .scaling_key = "routed_scaling_factor",
                        .default_scaling = 2.5F,
                        .shared_width = SharedWidth::kSeveralExperts,
                        .shared_key = "n_shared_experts",
                        .default_shared = 1,
                        .shared = "mlp.shared_experts",
                        .names = {{}, stacked},
                        .loss = kDeepSeekLoss}},
      {.model_types = {"glm4_moe"},
       .prefixes = text_prefixes,
       .moe = MoeFamily{.first_key = "first_k_dense_replace",
                        .default_first = 1,
                        .experts_keys = {"n_routed_experts", "num_local_experts"},
                        .score = Score::kSigmoid,
                        .method = TopKMethod::kNoAuxTc,
                        .normalize = norm_topk_prob_by_default,
                        .epsilon = kDeepSeekEpsilon,
                        .scaling_key = "routed_scaling_factor",
                        .shared_width = SharedWidth::kSeveralExperts,
                        .shared_key = "n_shared_experts",
                        .default_shared = 1,
                        .shared = "mlp.shared_experts",
                        .names = {{}, stacked},
                        .loss = kDeepSeekLoss}},
      {.model_types = {"gpt_oss"},
       .activation_key = {},  // hidden_act is there and means nothing
       .default_activation = "clamped_swiglu",
       .bias = kAlways,
       .clamp_limit_key = "swiglu_limit",
       .clamp_alpha_key = "swiglu_alpha",
       .prefixes = text_prefixes,
       .moe = MoeFamily{.experts_keys = {"num_local_experts", "num_experts"},
                        .intermediate_size_key = "intermediate_size",
                        .score = Score::kSoftmaxOfChosen,
                        .router_bias = kAlways,
                        .expert_bias = kAlways,
                        .names = {{.layout = ExpertLayout::kStackedAlternating,
                                   .router = "mlp.router",
                                   .gate = stacked.gate,
                                   .up = stacked.up,
                                   .down = stacked.down},
                                  {.router = "mlp.router"}}}},
      // What residual_multiplier multiplies is behind the layer.
      {.model_types = {"granitemoe", "granitemoeshared"},
       .prefixes = text_prefixes,
       .moe = MoeFamily{.experts_keys = {"num_local_experts", "num_experts"},
                        .intermediate_size_key = "intermediate_size",
                        .score = Score::kSoftmaxOfChosen,
                        .shared_width = SharedWidth::kOfItsOwnIfAny,
                        .shared_key = "shared_intermediate_size",
                        .shared = "shared_mlp",
                        .shared_names = {.gate = ".input_linear",
                                         .up = ".input_linear",
                                         .down = ".output_linear"},
                        .names = {{.layout = ExpertLayout::kStacked,
                                   .router = "block_sparse_moe.router.layer",
                                   .gate = "block_sparse_moe.input_linear.weight",
                                   .up = "block_sparse_moe.input_linear.weight",
                                   .down = "block_sparse_moe.output_linear.weight"},
                                  {.layout = ExpertLayout::kStacked,
                                   .router = "block_sparse_moe.router",
                                   .gate = "block_sparse_moe.experts.gate_up_proj",
                                   .up = "block_sparse_moe.experts.gate_up_proj",
                                   .down = "block_sparse_moe.experts.down_proj"},
                                  {.router = "block_sparse_moe.router.layer",
                                   .gate = "block_sparse_moe.experts.{}.gate_proj",
                                   .up = "block_sparse_moe.experts.{}.up_proj",
                                   .down = "block_sparse_moe.experts.{}.down_proj"}}}},
      {.model_types = {"llama4", "llama4_text"},
       .intermediate_size_key = "intermediate_size_mlp",
       .default_intermediate = 16384,
       .stacks = {{.moe_step_key = "interleave_moe_layer_step"}},
       .gate = "feed_forward.gate_proj",
       .up = "feed_forward.up_proj",
       .down = "feed_forward.down_proj",
       .prefixes = {"language_model.model.", "model.", "", "model.language_model."},
       .moe = MoeFamily{.list_key = "moe_layers",
                        .experts_keys = {"num_local_experts", "num_experts"},
                        .default_top_k = 1,
                        .intermediate_size_key = "intermediate_size",
                        .score = Score::kSigmoidOfChosen,
                        .weight_on = WeightOn::kInput,
                        .shared_width = SharedWidth::kOneExpert,
                        .shared = "feed_forward.shared_expert",
                        .names = {{.layout = ExpertLayout::kStackedTransposed,
                                   .router = "feed_forward.router",
                                   .gate = "feed_forward.experts.gate_up_proj",
                                   .up = "feed_forward.experts.gate_up_proj",
                                   .down = "feed_forward.experts.down_proj"},
                                  {.router = "feed_forward.router",
                                   .gate = "feed_forward.experts.{}.gate_proj",
                                   .up = "feed_forward.experts.{}.up_proj",
                                   .down = "feed_forward.experts.{}.down_proj"}}}},
      {.model_types = {"minimind"},
       .older_type = "minimind2",
       .older_key = "n_routed_experts",
       .moe = MoeFamily{.enabled = use_moe,
                        .experts_keys = {"num_experts"},
                        .default_top_k = 1,
                        .otherwise_intermediate_size_key = "intermediate_size",
                        .normalize = norm_topk_prob_by_default,
                        .epsilon = kDeepSeekEpsilon,
                        .names = {{}, stacked}}},
      {.model_types = {"minimind2"},
       .moe = MoeFamily{.enabled = use_moe,
                        .experts_keys = {"n_routed_experts"},
                        .default_top_k = 2,
                        .intermediate_size_key = "intermediate_size",
                        .score_key = "scoring_func",
                        .normalize = norm_topk_prob_by_default,
                        .normalize_one = false,
                        .epsilon = kDeepSeekEpsilon,
                        .shared_width = SharedWidth::kListOfOneExpert,
                        .shared_key = "n_shared_experts",
                        .default_shared = 1,
                        .shared = "mlp.shared_experts.{}",
                        .names = {{}, stacked},
                        .loss = kDeepSeekLoss}},
      // Layers are the encoder's blocks and then the decoder's.
      {.model_types = {"switch_transformers"},
       .hidden_size_key = "d_model",
       .intermediate_size_key = "d_ff",
       .default_intermediate = 2048,
       .activation_key = "dense_act_fn",
       .default_activation = "relu",
       .legacy_activation_key = "feed_forward_proj",
       .gated = kNever,
       .stacks = {{.path = "encoder.block.{}.layer.1.",
                   .num_layers_key = "num_layers",
                   .moe_step_key = "encoder_sparse_step",
                   .moe_count_key = "num_sparse_encoder_layers"},
                  {.path = "decoder.block.{}.layer.2.",
                   .num_layers_key = "num_decoder_layers",
                   .moe_step_key = "decoder_sparse_step",
                   .moe_count_key = "num_sparse_decoder_layers"}},
       .gate = {},
       .up = "mlp.wi",
       .down = "mlp.wo",
       .prefixes = {""},
       .moe = MoeFamily{.every = EveryStep::kSecond,
                        .experts_keys = {"num_experts"},
                        .top_k_key = {},
                        .default_top_k = 1,
                        .intermediate_size_key = "d_ff",
                        .router_bias = {.key = "router_bias", .otherwise = false},
                        .capacity_key = "expert_capacity",
                        .default_capacity = 64,
                        .names = {{.router = "mlp.router.classifier",
                                   .gate = {},
                                   .up = "mlp.experts.expert_{}.wi",
                                   .down = "mlp.experts.expert_{}.wo"}},
                        .loss = {.loss = BalanceLoss::kSwitch,
                                 .z_coefficient = "router_z_loss_coef"}}},
  };
  return families;
}

const ModelFamily* find_family(std::string_view model_type) {
  for (const ModelFamily& family : model_families()) {
    if (std::ranges::find(family.model_types, model_type) != family.model_types.end()) {
      return &family;
    }
  }
  return nullptr;
}

std::string known_model_types() {
  std::string names;
  for (const ModelFamily& family : model_families()) {
    for (const std::string_view type : family.model_types) {
      names.append(names.empty() ? "" : ", ").append(type);
    }
  }
  return names;
}

const std::vector<std::string_view>& expert_count_keys() {
  static const std::vector<std::string_view> keys = {"num_experts", "num_local_experts",
                                                     "n_routed_experts"};
  return keys;
}

const ModelFamily& family_of(const ModelConfig& config) {
  const ModelFamily* family = find_family(config.model_type);
  if (family == nullptr) {
    throw Error(ExitCode::kData, fmt::format("{}: unknown model_type \"{}\" (known: {}); check it",
                                             config.path, config.model_type, known_model_types()));
  }
  return *family;
}

std::string layer_path(const ModelConfig& config, std::int64_t layer, std::string_view prefix) {
  if (layer < 0 || layer >= config.num_layers) {
    throw Error(ExitCode::kUsage,
                fmt::format("layer {} doesn't exist ({} has layers 0 to {}); choose another", layer,
                            config.path, config.num_layers - 1));
  }
  std::size_t stack = 0;
  while (stack + 1 < config.stacks.size() && layer >= config.stacks[stack]) {
    layer -= config.stacks[stack++];
  }
  const std::string_view path = family_of(config).stacks[stack].path;
  const std::size_t hole = path.find("{}");
  return fmt::format("{}{}{}{}", prefix, path.substr(0, hole), layer, path.substr(hole + 2));
}

FfnSpec layer_under_prefix(const ModelConfig& config, std::int64_t layer, std::string_view prefix) {
  const std::string path = layer_path(config, layer, prefix);
  if (config.is_moe(layer)) {
    throw Error(ExitCode::kUsage,
                fmt::format("layer {} is a mixture of experts (a dense one is wanted); choose "
                            "another",
                            layer));
  }
  const ModelFamily& family = family_of(config);
  const auto name = [&](std::string_view module) { return path + std::string(module); };
  FfnSpec spec =
      ffn_of_modules(config, layer, config.intermediate_size,
                     {name(family.gate), name(family.up), name(family.down), config.bias});
  if (config.swish_beta) spec.swish_beta = name(family.beta);
  return spec;
}

FfnSpec ffn_of_modules(const ModelConfig& config, std::int64_t layer, std::int64_t inner,
                       const FfnModules& modules) {
  const ModelFamily& family = family_of(config);
  const std::int64_t hidden = config.hidden_size;
  const bool gated = config.activation.gated;
  const bool transposed = family.layout == WeightLayout::kTransposed;
  const std::int64_t fused = gated && modules.gate == modules.up ? inner : 0;
  const auto matrix = [&](const std::string& module, std::int64_t offset, std::int64_t rows,
                          std::int64_t columns) {
    TensorRef ref{.name = module + ".weight",
                  .transposed = transposed,
                  .stored_shape = {rows, columns},
                  .row_offset = offset};
    if (transposed) std::swap(ref.stored_shape[0], ref.stored_shape[1]);
    return ref;
  };
  const auto vector = [&](const std::string& module, std::int64_t offset, std::int64_t size) {
    return TensorRef{.name = module + ".bias", .stored_shape = {size}, .row_offset = offset};
  };

  FfnSpec spec;
  spec.layer = layer;
  spec.hidden_size = hidden;
  spec.intermediate_size = inner;
  spec.activation = config.activation;
  if (gated) spec.gate = matrix(modules.gate, 0, inner + fused, hidden);
  spec.up = matrix(modules.up, fused, inner + fused, hidden);
  spec.down = matrix(modules.down, 0, hidden, inner);
  if (!modules.bias) return spec;
  if (gated) spec.gate_bias = vector(modules.gate, 0, inner + fused);
  spec.up_bias = vector(modules.up, fused, inner + fused);
  spec.down_bias = vector(modules.down, 0, hidden);
  return spec;
}

}  // namespace gatefold
