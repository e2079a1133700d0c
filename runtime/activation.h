#pragma once

#include <bit>
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
/// All of those names, comma-separated, for messages.
std::string activation_names();

// The maths. fp32, one IEEE rounding per +, -, *, /; selects instead of branches; no call into
// libm: a loop over these has the same bits in every vector width, in its scalar tail and on a
// GPU. Compile with -ffp-contract=off (nvcc: -fmad=false --expt-relaxed-constexpr).
//
// Largest errors found against the exact function of the fp32 input, in units of the result's last
// place, from the largest input to the last subnormal result: exp 1.0, sigmoid and silu 2.5,
// gelu_exact 6. Where sigmoid's argument t is itself rounded and negative: 2 (1 + |t|) for Swishes
// with beta != 1, quick GELU and clamped SwiGLU, 2.7 (1 + |t|) for tanh GELU, about what half a
// unit of z's last place makes. After rounding to bf16 one result in 10^5 differs.
//
// Infinities and NaN give what the formulas give: act(NaN) = NaN, act(inf) = inf, and act(-inf) is
// 0 for ReLU but NaN wherever it means -inf * 0. act(0) = 0 for every kind.

constexpr float select(bool condition, float a, float b) {
  return std::bit_cast<float>(
      select(condition, std::bit_cast<std::uint32_t>(a), std::bit_cast<std::uint32_t>(b)));
}

/// Unlike std::min and std::max these take values, which compilers fold to one instruction.
template <typename Integer>
constexpr Integer smaller(Integer a, Integer b) {
  return a < b ? a : b;
}
template <typename Integer>
constexpr Integer larger(Integer a, Integer b) {
  return a > b ? a : b;
}

constexpr bool sign_bit(float value) { return std::bit_cast<std::int32_t>(value) < 0; }

/// value * 2^exponent, where value and result are normal.
constexpr float add_exponent(float value, std::int32_t exponent) {
  return std::bit_cast<float>(std::bit_cast<std::int32_t>(value) + (exponent << 23));
}

/// 2^exponent for -127 < exponent < 128, and 0 for -127.
constexpr float power_of_two(std::int32_t exponent) {
  return std::bit_cast<float>((exponent + 127) << 23);
}

/// exp(x) = significand * 2^exponent, with a significand in [0.7, 1.42].
struct ExpParts {
  float significand;
  std::int32_t exponent;
};

/// exp(x - correction) for |x| <= 157.5, where |exponent| is 227 at most, or NaN; |correction| is
/// below 0.01.
constexpr ExpParts exp_parts(float x, float correction) {
  constexpr float kLog2E = 0x1.715476p0F;
  constexpr float kLn2High = 0x1.62e4p-1F;  // 16 bits, so that n * kLn2High is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20F;
  constexpr float kRounder = 0x1.8p23F;  // adding it leaves an integer in the low bits
  const float shifted = x * kLog2E + kRounder;
  const float n = shifted - kRounder;
  const float r = ((x - n * kLn2High) - n * kLn2Low) - correction;
  float p = 0x1.6a2408p-10F;
  p = p * r + 0x1.1239fep-7F;
  p = p * r + 0x1.5558f2p-5F;
  p = p * r + 0x1.555492p-3F;
  p = p * r + 0x1.fffffcp-2F;
  p = ((p * r) * r + r) + 1.0F;
  return {p, std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kRounder)};
}

/// Into [low, high], low < 0 < high, by comparing bits: one instruction each. NaN gives a bound.
constexpr float bound_by_bits(float x, float low, float high) {
  const std::int32_t capped =
      smaller(std::bit_cast<std::int32_t>(x), std::bit_cast<std::int32_t>(high));
  return std::bit_cast<float>(
      smaller(static_cast<std::uint32_t>(capped), std::bit_cast<std::uint32_t>(low)));
}

constexpr float exp_fp32(float x) {
  const ExpParts e = exp_parts(bound_by_bits(x, -105.0F, 89.0F), 0.0F);
  const std::int32_t normal = smaller(larger(e.exponent, -125), 127);
  const float scaled = add_exponent(e.significand, normal) * power_of_two(e.exponent - normal);
  return select(x != x, x, scaled);
}

/// z / (1 + exp(x)), that is z * sigmoid(-x), for x that is NaN only where z is. Where exp(x) would
/// overflow both summands are scaled by a power of two, so that results keep their precision down
/// to the last subnormal; from x = 157 on the scale, and with it the sigmoid, is 0.
constexpr float over_one_plus_exp(float z, float x) {
  const ExpParts e = exp_parts(bound_by_bits(x, -69.0F, 157.5F), 0.0F);
  const std::int32_t bounded = smaller(e.exponent, 100);
  const float scale = power_of_two(bounded - e.exponent);
  return z / (scale + add_exponent(e.significand, bounded)) * scale;
}

constexpr float sigmoid_fp32(float t) { return over_one_plus_exp(select(t != t, t, 1.0F), -t); }

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

// The same over whole rows.

inline constexpr std::int64_t kActivationGroup = 64;  // columns of c that belong together

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
