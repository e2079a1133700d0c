#pragma once

#include <optional>

#include "layers/model_config.h"

namespace gatefold {

/// All parameters of the model that this config describes, embeddings, attention and norms too;
/// nothing where the config or the family doesn't allow an honest count.
std::optional<double> model_parameters(const ModelConfig& config);

}  // namespace gatefold
