#include "layers/model_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "layers/config_document.h"
#include "runtime/checkpoint.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

/// Those whose checkpoints may hold plain tensors, too: what is quantised the files say.
constexpr std::array<std::string_view, 2> kMethods = {"fp8", "mxfp4"};

void check_method(const ModelConfig& config) {
  if (!config.quantization) return;
  const std::string& method = config.quantization->method;
  if (std::ranges::find(kMethods, method) != kMethods.end()) return;
  const std::string found =
      method.empty() ? "no quant_method" : fmt::format("quant_method {}", shown(method));
  throw Error(ExitCode::kData,
              fmt::format("{}: {} has {} (only fp8 in blocks and mxfp4 can be read); convert the "
                          "model to bf16, or, if its tensors are plain, --set {}=null",
                          config.path, kQuantizationKey, found, kQuantizationKey));
}

}  // namespace

ModelFiles open_model_files(const std::string& directory, const ModelConfig& config) {
  check_method(config);
  auto checkpoint = std::make_unique<Checkpoint>(directory);
  const std::uint64_t hash = checkpoint->header_hash();
  return {std::move(checkpoint), hash};
}

}  // namespace gatefold
