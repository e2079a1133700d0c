#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace gatefold {

inline constexpr std::string_view kQuantizationKey = "quantization_config";

/// What quantization_config says of a model's files. Which tensors are quantised the files say.
struct Quantization {
  std::string method;             // quant_method: "fp8", "mxfp4", …; empty where it isn't there
  std::int64_t block_rows = 128;  // weight_block_size, of fp8
  std::int64_t block_columns = 128;
};

}  // namespace gatefold
