#pragma once

#include <optional>

#include "layers/model_config.h"

namespace gatefold {

/// Parameters of a model, embeddings, attention and norms too.
struct ModelTotal {
  double all = 0;
  double active = 0;  // what one token meets: k of E experts
};

/// Of the model that this config describes; nothing where the config or the family doesn't allow an
/// honest count.
std::optional<ModelTotal> model_parameters(const ModelConfig& config);

}  // namespace gatefold
