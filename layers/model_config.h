#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "layers/ffn_spec.h"
#include "layers/moe_config.h"
#include "layers/moe_spec.h"
#include "layers/quantization.h"
#include "runtime/dtype.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// A Hugging Face config.json, read as far as feed-forward layers need it.
struct ModelConfig {
  std::string path;        // of the file, for messages
  std::string model_type;  // of the text model, a row of the family table
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;  // of dense layers
  std::int64_t num_layers = 0;
  std::vector<std::int64_t> stacks;  // of each stack, where there are several (encoder, decoder)
  std::optional<MoeConfig> moe;      // of families with mixtures of experts
  std::int64_t vocab_size = 0;       // 0 where the config doesn't say; only for shares of the whole
  DType dtype = DType::kF32;         // dtype or torch_dtype; f32 where neither is there
  Activation activation;
  bool bias = false;
  bool swish_beta = false;  // the layer has a learnable beta tensor
  std::optional<Quantization> quantization;
  // The whole config.json with the overrides applied, keys sorted: equal on all ranks, or an
  // error. Reads back, without overrides, as this same config.
  std::string canonical_text;

  bool is_moe(std::int64_t layer) const;

  /// Layer `layer`'s FFN with the family's canonical tensor names.
  /// Throws Error 64 where the model has no such layer, or a mixture of experts there.
  FfnSpec layer_spec(std::int64_t layer) const;
  /// The same of a mixture of experts, as moe->spelling has it. Throws Error 64 where the layer is
  /// none.
  MoeSpec moe_spec(std::int64_t layer) const;
};

/// Reads config.json at `path` and applies `overrides` (key=value of --set; values parsed as JSON,
/// else taken as a string; keys apply to text_config where the config nests it; null makes a field
/// absent). Throws Error 66 (can't be opened), 65 (not JSON; a field missing, mistyped, not
/// positive, or absurd; unknown model_type, activation, dtype, scoring_func or topk_method, with
/// the known ones; more experts for a token than there are, or groups that don't fit them; experts
/// in a dense family), 64 (the same where an override is to blame; an override of a field that is
/// not read).
ModelConfig read_model_config(
    const std::string& path,
    const std::vector<std::pair<std::string, std::string>>& overrides = {});

/// The same from checked JSON text, which `path` stands for in messages.
ModelConfig parse_model_config(
    const std::string& text, const std::string& path,
    const std::vector<std::pair<std::string, std::string>>& overrides = {});

/// layer_spec(layer) with the names as they are spelled in `source` (base models drop or add a
/// prefix), and checked against it: every tensor there with the shape that the config says.
/// A bias, gate or beta that the config denies but the source has is an error, so is the reverse,
/// and so is a tensor that is there with two prefixes. Throws Error 65 naming the tensor, what was
/// expected and what was found.
FfnSpec resolve_layer(const ModelConfig& config, std::int64_t layer, const TensorSource& source);

/// The same for a mixture of experts: moe_spec(layer) as `source` spells and stores it, each expert
/// by itself or all in one tensor, whichever of the family's ways is there.
MoeSpec resolve_moe(const ModelConfig& config, std::int64_t layer, const TensorSource& source);

}  // namespace gatefold
