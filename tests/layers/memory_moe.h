#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "layers/moe_spec.h"
#include "memory_source.h"

namespace gatefold::testing {

struct MoeShape {
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;  // of an expert
  std::int64_t experts = 0;
  std::int64_t top_k = 0;
  bool bias = false;        // of router and experts
  std::int64_t shared = 0;  // how many shared experts, of twice the width
  bool shared_gate = false;
  bool correction = false;  // a correction bias
  WeightOn weight_on = WeightOn::kOutput;
};

/// A mixture of experts and the tensors it names, filled with noise.
struct MemoryMoe {
  MoeSpec spec;
  MemorySource source;

  explicit MemoryMoe(const MoeShape& shape, std::uint64_t seed = 1) : seed_(seed * 100000) {
    spec.hidden_size = shape.hidden;
    spec.weight_on = shape.weight_on;
    spec.route.experts = shape.experts;
    spec.route.top_k = shape.top_k;
    const float scale = 4.0F / std::sqrt(static_cast<float>(shape.hidden));
    spec.router = add("router", {shape.experts, shape.hidden}, scale);
    if (shape.bias) spec.router_bias = add("router_bias", {shape.experts}, 0.5F);
    if (shape.correction) {
      spec.route.score = Score::kSigmoid;
      spec.correction_bias = add("correction", {shape.experts}, 0.1F);
    }
    for (std::int64_t e = 0; e < shape.experts; ++e) {
      spec.experts.push_back(
          ffn("expert" + std::to_string(e), shape.hidden, shape.intermediate, shape.bias));
    }
    for (std::int64_t s = 0; s < shape.shared; ++s) {
      spec.shared.push_back(
          ffn("shared" + std::to_string(s), shape.hidden, 2 * shape.intermediate, false));
    }
    if (shape.shared_gate) spec.shared_gate = add("shared_gate", {1, shape.hidden}, scale);
  }

 private:
  TensorRef add(const std::string& name, const std::vector<std::int64_t>& shape, float scale) {
    std::int64_t n = 1;
    for (const std::int64_t extent : shape) n *= extent;
    source.set(name, shape, noise(n, ++seed_, scale));
    TensorRef ref;
    ref.name = name;
    ref.stored_shape = shape;
    return ref;
  }

  FfnSpec ffn(const std::string& name, std::int64_t h, std::int64_t i, bool bias) {
    FfnSpec made;
    made.hidden_size = h;
    made.intermediate_size = i;
    made.activation.gated = true;
    const float in_scale = 1.7F / std::sqrt(static_cast<float>(h));
    made.gate = add(name + ".gate", {i, h}, in_scale);
    made.up = add(name + ".up", {i, h}, in_scale);
    made.down = add(name + ".down", {h, i}, 1.7F / std::sqrt(static_cast<float>(i)));
    if (!bias) return made;
    made.gate_bias = add(name + ".gate_bias", {i}, 0.5F);
    made.up_bias = add(name + ".up_bias", {i}, 0.5F);
    made.down_bias = add(name + ".down_bias", {h}, 0.5F);
    return made;
  }

  std::uint64_t seed_;
};

}  // namespace gatefold::testing
