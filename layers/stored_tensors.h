#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layers/ffn_spec.h"
#include "layers/moe_spec.h"

namespace gatefold {

enum class TensorRole {
  kWeight,
  kBias,
  kSwishBeta,
  kRouter,
  kRouterBias,
  kCorrectionBias,
  kSharedGate,  // which scales a shared expert, token by token
};

/// One tensor of a layer as a file holds it.
struct StoredTensor {
  std::string name;
  std::vector<std::int64_t> shape;  // as stored: [in, out] where transposed; [] for a beta
  TensorRole role = TensorRole::kWeight;
  std::int64_t fan_in = 1;  // of a weight or a router: inputs per output
};

/// The tensors of `spec`, each once (a fused one whole), weights first.
std::vector<StoredTensor> stored_tensors(const FfnSpec& spec);

/// The same of a mixture: router, experts in order, shared experts; a stack of experts once.
std::vector<StoredTensor> stored_tensors(const MoeSpec& spec);

}  // namespace gatefold
