#pragma once
#include <string>
namespace gatefold {
/// How a layer's hidden values come from its gate and up projections.
enum class ActivationKind {
  kIdentity,  // bilinear GLU, or a plain linear layer
  kRelu,
  kRelu2,      // relu(z)^2
  kSilu,       // z * sigmoid(beta * z); beta = 1 is SwiGLU's, other values Swish's
  kGeluExact,  // z * Phi(z)
  kGeluTanh,   // the tanh approximation
  kQuickGelu,  // z * sigmoid(1.702 z)
  kClampedSwiglu,  // GPT-OSS: g = min(gate, limit); u = clamp(up, -limit, limit); (u + 1) * g * sigmoid(alpha g)
};

struct Activation {
  ActivationKind kind = ActivationKind::kSilu;
  bool gated = true;    // h = act(gate) * up; else h = act(up)
  float beta = 1.0F;    // kSilu
  float alpha = 1.702F; // kClampedSwiglu
  float limit = 7.0F;   // kClampedSwiglu
};
}
