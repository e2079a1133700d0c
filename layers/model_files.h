#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "layers/model_config.h"
#include "runtime/block_format.h"
#include "runtime/tensor_source.h"

namespace gatefold {

class DequantisedSource;

/// A model's weights, as its layers read them.
struct ModelFiles {
  std::unique_ptr<TensorSource> source;
  std::uint64_t header_hash = 0;             // Checkpoint's
  const DequantisedSource* plain = nullptr;  // the source: which of its weights are quantised
};

/// What quantization_config calls it: "fp8", "mxfp4".
std::string_view quant_method(BlockFormat format);

/// Whether a model of this family can have weights in `format`.
bool may_have(const ModelConfig& config, BlockFormat format);

/// Opens the safetensors files in `directory`, whose config.json `config` is; quantised weights are
/// read as plain ones. Throws as Checkpoint does, and Error 65 where the config names a
/// quant_method whose tensors can't be read, or another one than the files have.
ModelFiles open_model_files(const std::string& directory, const ModelConfig& config);

}  // namespace gatefold
