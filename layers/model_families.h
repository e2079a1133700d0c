#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "layers/family_switch.h"
#include "layers/ffn_spec.h"
#include "layers/moe_family.h"

namespace gatefold {

struct ModelConfig;

/// How a family stores the matrices [out, in] that the maths asks for. Keyed on model_type, never
/// guessed from shapes: a square matrix has no orientation to read.
enum class WeightLayout {
  kAsIs,        // gate [I, H], up [I, H], or both in one [2I, H]; down [H, I]
  kTransposed,  // up [H, I], down [I, H]: GPT-2's Conv1D, y = x W + b
};

/// What intermediate_size is where the config leaves it out.
enum class IntermediateDefault {
  kRequired,
  kFourTimesHidden,
  kLadder,  // ungated 4 H; gated 8/3 H rounded up to a multiple of 8, about as many parameters
};

/// Layers behind one another whose names count from 0; an encoder and a decoder are two.
struct LayerStack {
  std::string_view path = "layers.{}.";  // what stands before a module name, {} for the number
  std::string_view num_layers_key = "num_hidden_layers";
  std::int64_t default_num_layers = 0;  // 0: the field is required, or says what the stack before
  // Every how many layers one is a mixture of experts; else how many of them are.
  std::string_view moe_step_key = {};
  std::string_view moe_count_key = {};
};

/// One row of the family table: all that Gatefold knows about a model_type. Module names are those
/// within the layer, without `.weight`.
struct ModelFamily {
  std::vector<std::string_view> model_types = {};
  // Another row's model_type whose files say this one's: they are those that have this field.
  std::string_view older_type = {};
  std::string_view older_key = {};

  // Which config fields say what.
  std::string_view hidden_size_key = "hidden_size";
  std::string_view intermediate_size_key = "intermediate_size";
  IntermediateDefault intermediate_default = IntermediateDefault::kRequired;
  std::int64_t default_intermediate = 0;  // of kRequired; 0: the field is, where a layer is dense
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

  // Where the tensors lie. Gate and up of one name are one tensor, gate rows first. Ungated: gate
  // is unused.
  WeightLayout layout = WeightLayout::kAsIs;
  std::vector<LayerStack> stacks = {{}};  // layers are numbered through all of them
  std::string_view gate = "mlp.gate_proj";
  std::string_view up = "mlp.up_proj";
  std::string_view down = "mlp.down_proj";
  std::string_view beta = {};  // the learnable beta's whole name, where the family has one
  // What may stand before a module name; the first is the canonical one.
  std::vector<std::string_view> prefixes = {"model.", ""};

  std::optional<MoeFamily> moe = {};  // of families with mixtures of experts
};

/// The table. A new family is one more row here and nothing else.
const std::vector<ModelFamily>& model_families();

/// The row of `model_type`; null where no row has it.
const ModelFamily* find_family(std::string_view model_type);

/// All known model_types, comma-separated, for messages.
std::string known_model_types();

/// Config fields whose positive value makes a model a mixture of experts.
const std::vector<std::string_view>& expert_count_keys();

/// The row of `config`. Throws Error 65 where there is none.
const ModelFamily& family_of(const ModelConfig& config);

/// What all of a layer's names start with: "model.layers.3.".
/// Throws Error 64 where the model has no such layer.
std::string layer_path(const ModelConfig& config, std::int64_t layer, std::string_view prefix);

/// What the row of `config` makes of layer `layer`, with names that start with `prefix`.
/// Throws Error 64 where the model has no such layer, or a mixture of experts there.
FfnSpec layer_under_prefix(const ModelConfig& config, std::int64_t layer, std::string_view prefix);

/// Whole names of an MLP's modules, without `.weight`; gate is unused in ungated ones. Gate and up
/// of one name are one tensor [2I, H], gate rows first.
struct FfnModules {
  std::string gate, up, down;
  bool bias = false;  // of each
};

/// An MLP of `layer` of width `inner` as the row of `config` stores one.
FfnSpec ffn_of_modules(const ModelConfig& config, std::int64_t layer, std::int64_t inner,
                       const FfnModules& modules);

}  // namespace gatefold
