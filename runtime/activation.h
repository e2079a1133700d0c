#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/dtype.h"
#include "runtime/vector_isa.h"

namespace gatefold {

/// How a layer's hidden values come from its gate and up projections.
enum class ActivationKind {
  kIdentity,  // bilinear GLU, or a plain linear layer
  kRelu,
  kRelu2,          // relu(z)^2
  kSilu,           // z * sigmoid(beta * z); beta = 1 is SwiGLU's, other values Swish's
  kGeluExact,      // z * Phi(z)
  kGeluTanh,       // the tanh approximation
  kQuickGelu,      // z * sigmoid(1.702 z)
  kClampedSwiglu,  // GPT-OSS: g = min(gate, limit); u = clamp(up, -limit, limit);
                   // (u + 1) * g * sigmoid(alpha g)
};

/// beta and alpha finite, limit > 0.
struct Activation {
  ActivationKind kind = ActivationKind::kSilu;
  bool gated = true;     // h = act(gate) * up; else h = act(up)
  float beta = 1.0F;     // kSilu
  float alpha = 1.702F;  // kClampedSwiglu
  float limit = 7.0F;    // kClampedSwiglu
};

/// The names that Hugging Face configs use, and "linear", "identity", "none", "bilinear",
/// "clamped_swiglu"; nothing for any other name.
std::optional<ActivationKind> activation_from_name(std::string_view name);
/// The most usual of them: "silu", "gelu_pytorch_tanh".
std::string_view activation_name(ActivationKind kind);
/// All of those names, comma-separated, for messages.
std::string activation_names();

/// c comes in groups of 64 columns. Gated: 32 gates, then their 32 ups, giving 32 outputs;
/// ungated: 64 columns giving 64 outputs. h gets all `groups` groups' outputs: the first `valid`
/// columns rounded once to the model dtype (one NaN), those after it +0, whatever c holds there.
struct ActivationRows {
  const float* c = nullptr;  // [rows][ld]
  std::int64_t rows = 0;
  std::int64_t ld = 0;  // elements, at least 64 * groups
  std::int64_t groups = 0;
  const float* bias = nullptr;  // [64 * groups] as c's columns, added in fp32 first; may be null
  std::byte* h = nullptr;       // [rows][h_ld] in `storage`; must not overlap c
  std::int64_t h_ld = 0;        // elements
  std::int64_t valid = 0;       // output columns
  DType model = DType::kF32;
  DType storage = DType::kF32;  // `model`, or f32 for a model dtype kept widened
};

/// Runs on the calling thread. Throws Error 65 for a beta, alpha or limit out of range, Error 70
/// where `storage` is neither `model` nor f32.
void activate_rows(const Activation& act, const ActivationRows& io, VectorIsa isa = vector_isa());

}  // namespace gatefold
