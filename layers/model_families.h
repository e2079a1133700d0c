#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "layers/ffn_spec.h"

namespace gatefold {

struct ModelConfig;

/// How a family stores the matrices [out, in] that the maths asks for. Keyed on model_type, never
/// guessed from shapes: a square matrix has no orientation to read.
enum class WeightLayout {
  kSeparate,     // gate [I, H], up [I, H], down [H, I]
  kFusedGateUp,  // one tensor [2I, H], gate rows first, then up rows; down [H, I]
  kTransposed,   // up [H, I], down [I, H]: GPT-2's Conv1D, y = x W + b
};

/// What intermediate_size is where the config leaves it out.
enum class IntermediateDefault {
  kRequired,
  kFourTimesHidden,
  kLadder,  // ungated 4 H; gated 8/3 H rounded up to a multiple of 8, about as many parameters
};

/// A yes or no that a family fixes (no key) or leaves to a config field.
struct FamilySwitch {
  std::string_view key = {};
  bool otherwise = false;  // without a key, or where the field is absent
};
inline constexpr FamilySwitch kNever{};
inline constexpr FamilySwitch kAlways{.key = {}, .otherwise = true};

/// One row of the family table: all that Gatefold knows about a model_type. Module names carry {}
/// for the layer number and neither prefix nor `.weight`.
struct ModelFamily {
  std::vector<std::string_view> model_types = {};

  // Which config fields say what.
  std::string_view hidden_size_key = "hidden_size";
  std::string_view intermediate_size_key = "intermediate_size";
  IntermediateDefault intermediate_default = IntermediateDefault::kRequired;
  std::string_view num_layers_key = "num_hidden_layers";
  std::int64_t default_num_layers = 0;  // 0: the field is required
  std::string_view activation_key = "hidden_act";
  std::string_view default_activation = "silu";
  // A field that others, or older configs, have in its place: it may only repeat the default.
  std::string_view legacy_activation_key = {};
  FamilySwitch gated = kAlways;
  FamilySwitch bias = kNever;
  FamilySwitch swish_beta = kNever;
  std::string_view clamp_limit_key = {};  // of a clamped SwiGLU; empty: GPT-OSS's own numbers
  std::string_view clamp_alpha_key = {};
  // What else is read, to count the parameters of the whole model.
  std::vector<std::string_view> whole_model_keys = {};

  // Where the tensors lie. Fused: gate and up name the same module. Ungated: gate is unused.
  WeightLayout layout = WeightLayout::kSeparate;
  std::string_view gate = "layers.{}.mlp.gate_proj";
  std::string_view up = "layers.{}.mlp.up_proj";
  std::string_view down = "layers.{}.mlp.down_proj";
  std::string_view beta = {};  // the learnable beta's whole name, where the family has one
  // What may stand before a module name; the first is the canonical one.
  std::vector<std::string_view> prefixes = {"model.", ""};
};

/// The table. A new dense family is one more row here and nothing else.
const std::vector<ModelFamily>& model_families();

/// The row of `model_type`; null where no row has it.
const ModelFamily* find_family(std::string_view model_type);

/// All known model_types, comma-separated, for messages.
std::string known_model_types();

/// True for model_types that are always mixtures of experts.
bool is_moe_model_type(std::string_view model_type);

/// Config fields whose positive value makes a model a mixture of experts.
const std::vector<std::string_view>& expert_count_keys();

/// The row of `config`. Throws Error 65 where there is none.
const ModelFamily& family_of(const ModelConfig& config);

/// `pattern` behind `prefix`, its {} replaced by the layer number.
std::string layer_name(std::string_view prefix, std::string_view pattern, std::int64_t layer);

/// What the row of `config` makes of layer `layer`, with names that start with `prefix`.
/// Throws Error 64 where the model has no such layer.
FfnSpec layer_under_prefix(const ModelConfig& config, std::int64_t layer, std::string_view prefix);

enum class TensorRole { kWeight, kBias, kSwishBeta };

/// One tensor of a layer as a file holds it.
struct StoredTensor {
  std::string name;
  std::vector<std::int64_t> shape;  // as stored: [in, out] where transposed; [] for a beta
  TensorRole role = TensorRole::kWeight;
  std::int64_t fan_in = 1;  // of a weight: inputs per output
};

/// The tensors of `spec`, each once (a fused one whole), weights first.
std::vector<StoredTensor> stored_tensors(const FfnSpec& spec);

}  // namespace gatefold
