#pragma once

#include <bit>
#include <cstdint>

#include "runtime/activation.h"
#include "runtime/fp32_math.h"

// The activations of one value, for host and device (see runtime/fp32_math.h).
//
// Largest errors found against the exact function of the fp32 input, in units of the result's last
// place, from the largest input to the last subnormal result: silu 2.5, gelu_exact 6. Where
// sigmoid's argument t is itself rounded and negative: 2 (1 + |t|) for Swishes with beta != 1,
// quick GELU and clamped SwiGLU, 2.7 (1 + |t|) for tanh GELU, about what half a unit of z's last
// place makes. After rounding to bf16 one result in 10^5 differs.
//
// Infinities and NaN give what the formulas give: act(NaN) = NaN, act(inf) = inf, and act(-inf) is
// 0 for ReLU but NaN wherever it means -inf * 0. act(0) = 0 for every kind.

namespace gatefold {

/// z * Phi(z), with Phi(-x) = exp(-x^2/2) * M(x); M(x) = erfcx(x/sqrt(2))/2 is a rational minimax
/// fit on [0, 14.5] of relative error 1.5e-8. The square's low half goes into the exponential.
constexpr float gelu_exact(float z) {
  const bool negative = sign_bit(z);
  const float magnitude = std::bit_cast<float>(std::bit_cast<std::uint32_t>(z) & 0x7fffffffU);
  const float x = bound_by_bits(magnitude, -1.0F, 17.745F);  // exp's argument: down to -157.44
  const float high = std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0xfffff000U);
  const float low = (x + high) * (x - high);  // x^2 = high^2 + low, high^2 exact
  const ExpParts e = exp_parts(-0.5F * (high * high), 0.5F * low);
  const std::int32_t bounded = larger(e.exponent, -100);
  const float rest = power_of_two(e.exponent - bounded);
  const float square = x * x;
  const float p = ((0x1.988594p-2F * square + 0x1.1d7b4ep4F) * square + 0x1.86bc1cp5F) +
                  (0x1.f9871cp1F * square + 0x1.55ee8ap5F) * x;
  const float q = ((square + 0x1.6dadd6p5F) * square + 0x1.46d8bap7F) * x +
                  ((0x1.3cd02ap3F * square + 0x1.d4f19p6F) * square + 0x1.86bc1cp6F);
  const float tail = add_exponent(e.significand, bounded) * (p / q);
  return z * select(negative, tail, 1.0F - tail) * select(negative, rest, 1.0F);
}

/// 0.5 z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))), which is z * sigmoid of twice that argument.
constexpr float gelu_tanh(float z) {
  constexpr double kMinusTwoRootTwoOverPi = -1.5957691216057308;
  constexpr auto kLinear = static_cast<float>(kMinusTwoRootTwoOverPi);
  constexpr auto kCubic = static_cast<float>(kMinusTwoRootTwoOverPi * 0.044715);
  return over_one_plus_exp(z, z * (kLinear + kCubic * (z * z)));
}

// NaN passes through these three.
constexpr float relu(float z) { return select(z <= 0.0F, 0.0F, z); }
constexpr float clamp_above(float value, float limit) {
  return select(value > limit, limit, value);
}
constexpr float clamp_below(float value, float limit) {
  return select(value < limit, limit, value);
}

/// act(z), the kind known when compiling.
template <ActivationKind kKind>
constexpr float activate(const Activation& act, float z) {
  if constexpr (kKind == ActivationKind::kRelu) return relu(z);
  if constexpr (kKind == ActivationKind::kRelu2) return relu(z) * relu(z);
  if constexpr (kKind == ActivationKind::kSilu) return over_one_plus_exp(z, -act.beta * z);
  if constexpr (kKind == ActivationKind::kGeluExact) return gelu_exact(z);
  if constexpr (kKind == ActivationKind::kGeluTanh) return gelu_tanh(z);
  if constexpr (kKind == ActivationKind::kQuickGelu) return over_one_plus_exp(z, -1.702F * z);
  if constexpr (kKind == ActivationKind::kClampedSwiglu) {
    const float g = clamp_above(z, act.limit);
    return over_one_plus_exp(g, -act.alpha * g);
  }
  return z;
}

/// h of a gated layer, before its rounding to the model dtype.
template <ActivationKind kKind>
constexpr float gate_times_up(const Activation& act, float gate, float up) {
  float factor = up;
  if constexpr (kKind == ActivationKind::kClampedSwiglu) {
    factor = clamp_below(clamp_above(up, act.limit), -act.limit) + 1.0F;
  }
  return activate<kKind>(act, gate) * factor;
}

/// Calls visit.operator()<kind>(): the one place where a kind becomes a template argument.
template <typename Visitor>
constexpr auto with_kind(ActivationKind kind, Visitor visit) {
  switch (kind) {
    case ActivationKind::kRelu: return visit.template operator()<ActivationKind::kRelu>();
    case ActivationKind::kRelu2: return visit.template operator()<ActivationKind::kRelu2>();
    case ActivationKind::kSilu: return visit.template operator()<ActivationKind::kSilu>();
    case ActivationKind::kGeluExact: return visit.template operator()<ActivationKind::kGeluExact>();
    case ActivationKind::kGeluTanh: return visit.template operator()<ActivationKind::kGeluTanh>();
    case ActivationKind::kQuickGelu: return visit.template operator()<ActivationKind::kQuickGelu>();
    case ActivationKind::kClampedSwiglu:
      return visit.template operator()<ActivationKind::kClampedSwiglu>();
    case ActivationKind::kIdentity: break;
  }
  return visit.template operator()<ActivationKind::kIdentity>();
}

/// h of an ungated layer, before its rounding to the model dtype.
constexpr float activate(const Activation& act, float z) {
  return with_kind(act.kind, [&]<ActivationKind kKind>() { return activate<kKind>(act, z); });
}

constexpr float gate_times_up(const Activation& act, float gate, float up) {
  return with_kind(act.kind,
                   [&]<ActivationKind kKind>() { return gate_times_up<kKind>(act, gate, up); });
}

}  // namespace gatefold
