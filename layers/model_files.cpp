#include "layers/model_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "layers/config_document.h"
#include "layers/model_families.h"
#include "runtime/checkpoint.h"
#include "runtime/dequantised_source.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

/// A quant_method, and how its weights lie in files that have some; others in them are plain.
struct Method {
  std::string_view name;
  BlockFormat format;
};
constexpr std::array<Method, 2> kMethods = {
    {{"fp8", BlockFormat::kF8E4M3}, {"mxfp4", BlockFormat::kMxfp4}}};

void check_method(const ModelConfig& config) {
  if (!config.quantization) return;
  const std::string& method = config.quantization->method;
  if (std::ranges::find(kMethods, method, &Method::name) != kMethods.end()) return;
  const std::string found =
      method.empty() ? "no quant_method" : fmt::format("quant_method {}", shown(method));
  throw Error(ExitCode::kData,
              fmt::format("{}: {} has {} (only fp8 in blocks and mxfp4 can be read); convert the "
                          "model to bf16, or, if its tensors are plain, --set {}=null",
                          config.path, kQuantizationKey, found, kQuantizationKey));
}

void check_formats(const ModelConfig& config, const DequantisedSource& source) {
  for (const Method& method : kMethods) {
    if (source.count(method.format) == 0) continue;
    if (config.quantization && config.quantization->method != method.name) {
      throw Error(ExitCode::kData,
                  fmt::format("{}: {} has quant_method {}, and there are weights in {}: {}; check "
                              "that config.json and the files belong together",
                              config.path, kQuantizationKey, shown(config.quantization->method),
                              method.name, source.description()));
    }
    if (!may_have(config, method.format)) {
      throw Error(ExitCode::kData,
                  fmt::format("{}: a {} model with weights in MXFP4 (only gpt_oss has them: how "
                              "others' lie isn't said): {}; convert the model to bf16",
                              config.path, config.model_type, source.description()));
    }
  }
}

}  // namespace

std::string_view quant_method(BlockFormat format) {
  return std::ranges::find(kMethods, format, &Method::format)->name;
}

bool may_have(const ModelConfig& config, BlockFormat format) {
  if (format != BlockFormat::kMxfp4) return true;
  // Whose experts lie as MXFP4's weights are read: a square matrix wouldn't tell.
  const ModelFamily& family = family_of(config);
  return family.moe && std::ranges::any_of(family.moe->names, [](const ExpertNames& names) {
           return names.layout == ExpertLayout::kStackedAlternating;
         });
}

ModelFiles open_model_files(const std::string& directory, const ModelConfig& config) {
  check_method(config);
  auto checkpoint = std::make_unique<Checkpoint>(directory);
  const std::uint64_t hash = checkpoint->header_hash();
  const Quantization sizes = config.quantization.value_or(Quantization{});
  auto source = std::make_unique<DequantisedSource>(
      std::move(checkpoint), BlockSize{sizes.block_rows, sizes.block_columns});
  check_formats(config, *source);
  const DequantisedSource* const plain = source.get();
  return {std::move(source), hash, plain};
}

}  // namespace gatefold
