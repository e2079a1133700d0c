#include "layers/reference_math.h"

#include <cmath>
#include <numbers>

namespace gatefold::reference {
namespace {

double activate(const Activation& activation, double z) {
  switch (activation.kind) {
    case ActivationKind::kIdentity: return z;
    case ActivationKind::kRelu: return z < 0 ? 0 : z;  // a NaN stays one
    case ActivationKind::kRelu2: return z < 0 ? 0 : z * z;
    case ActivationKind::kSilu: return z * sigmoid(double{activation.beta} * z);
    case ActivationKind::kGeluExact: return 0.5 * z * std::erfc(-z / std::numbers::sqrt2);
    case ActivationKind::kGeluTanh: {
      const double inner = std::sqrt(2 / std::numbers::pi) * (z + 0.044715 * z * z * z);
      return 0.5 * z * (1 + std::tanh(inner));
    }
    case ActivationKind::kQuickGelu: return z * sigmoid(1.702 * z);
    case ActivationKind::kClampedSwiglu: return z * sigmoid(double{activation.alpha} * z);
  }
  return std::numeric_limits<double>::quiet_NaN();
}

/// The steepest slope within |z| <= reach.
double lipschitz(ActivationKind kind, double reach) {
  switch (kind) {
    case ActivationKind::kIdentity:
    case ActivationKind::kRelu: return 1;
    case ActivationKind::kRelu2: return 2 * reach;
    case ActivationKind::kSilu:
    case ActivationKind::kQuickGelu:
    case ActivationKind::kClampedSwiglu: return 1.1;  // s(w) + w s'(w) <= 1.09984, w = beta z
    case ActivationKind::kGeluExact:
    case ActivationKind::kGeluTanh: return 1.13;  // 1.12891 and 1.12900
  }
  return kInfinity;
}

/// Clamping moves no two numbers apart, so errors stay.
Number clamped(Number z, double low, double high) {
  if (z.value > high) z.value = high;
  if (z.value < low) z.value = low;
  return z;
}

Number plus_one(Number z) {
  z.value += 1;
  z.certain += kUnit * (std::abs(z.value) + z.certain);
  z.spread += kUnit * (std::abs(z.value) + z.likely());
  return z;
}

}  // namespace

Rounding rounding_of(DType dtype) {
  switch (dtype) {
    case DType::kBf16: return {0x1p-8, 0, 0x1.ffp127};
    case DType::kF16: return {0x1p-11, 0x1p-25, 65520};
    case DType::kF32: break;
  }
  return {kUnit, 0, kF32Overflow};
}

double gamma(double roundings) { return roundings * kUnit / (1 - roundings * kUnit); }

Number rounded(DType dtype, const Number& number) {
  const Rounding rounding = rounding_of(dtype);
  const double size = std::abs(number.value);
  if (!(size + number.likely() < rounding.overflow)) return {number.value, kInfinity, kInfinity};
  return {number.value,
          number.certain + rounding.unit * (size + number.certain) + rounding.smallest + kFlushed,
          number.spread + rounding.unit * (size + number.likely()) + rounding.smallest + kFlushed};
}

Number product(const Number& a, const Number& b) {
  const double value = a.value * b.value;
  const double rounding = kUnit * std::abs(value) + kFlushed;
  const auto carried = [&](double error_a, double error_b, double reach_b) {
    return error_a * (std::abs(b.value) + reach_b) + std::abs(a.value) * error_b + rounding;
  };
  return {value, carried(a.certain, b.certain, b.certain), carried(a.spread, b.spread, b.likely())};
}

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

Number quotient(const Number& a, const Number& b) {
  const double value = a.value / b.value;
  const auto carried = [&](double error_a, double error_b) {
    const double least = std::abs(b.value) - error_b;
    const double error = (error_a + std::abs(value) * error_b) / least;
    return least > 0 ? error + kUnit * (std::abs(value) + error) + kFlushed : kInfinity;
  };
  const double spread = carried(a.likely(), b.likely()) / kSpreads;
  return {value, carried(a.certain, b.certain), spread + kUnit * std::abs(value) + kFlushed};
}

Number sum_of(std::span<const Number> terms) {
  Number sum;
  double size = 0;
  double reach = 0;
  for (const Number& term : terms) {
    sum.value += term.value;
    sum.certain += term.certain;
    sum.spread += term.spread;
    size += std::abs(term.value);
    reach += term.likely();
  }
  const auto roundings = static_cast<double>(terms.size()) - 1;
  sum.certain += gamma(roundings) * (size + sum.certain) + kFlushed;
  sum.spread += kUnit * std::sqrt(roundings) * (size + reach) + kFlushed;
  return sum;
}

Number sigmoid_of(const Number& z) {
  const double s = sigmoid(z.value);
  const auto carried = [&](double error) {
    if (!std::isfinite(z.value) || !std::isfinite(error)) return kInfinity;
    const double slope = s < 1 ? s * (1 - s) * std::expm1(error) : 0;
    return std::min(slope, 1.0) + kActivationUnits * kUnit * s + kFlushed;
  };
  return {s, carried(z.certain), carried(kSpreads * z.spread) / kSpreads};
}

Number sqrt_softplus_of(const Number& z) {
  const auto softplus = [](double x) {
    return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
  };
  const double s = std::sqrt(softplus(z.value));
  const auto carried = [&](double error) {
    if (!std::isfinite(z.value) || !std::isfinite(error)) return kInfinity;
    const double lowest = z.value - error;
    const double sum = softplus(lowest);
    const double slope = sum > 0 ? sigmoid(lowest) / (2 * sum) : 0.5;  // 1/2 where both underflow
    return s * std::expm1(slope * error) + kActivationUnits * kUnit * s + kFlushed;
  };
  return {s, carried(z.certain), carried(kSpreads * z.spread) / kSpreads};
}

Number activated(const Activation& activation, const Number& z) {
  const auto carried = [&](double error, double reach) {
    const double largest = activation.kind == ActivationKind::kRelu2 ? reach * reach : reach;
    return lipschitz(activation.kind, reach) * error + kActivationUnits * kUnit * largest +
           kFlushed;
  };
  const double size = std::abs(z.value);
  return {activate(activation, z.value), carried(z.certain, size + z.certain),
          carried(z.spread, size + z.likely())};
}

Number gated_value(const Activation& activation, const Number& gate, const Number& up) {
  if (activation.kind != ActivationKind::kClampedSwiglu) {
    return product(activated(activation, gate), up);
  }
  const double limit = activation.limit;
  return product(activated(activation, clamped(gate, -kInfinity, limit)),
                 plus_one(clamped(up, -limit, limit)));
}

double output_bound(DType dtype, const Number& sum) {
  const Rounding rounding = rounding_of(dtype);
  const double reach = std::abs(sum.value) + sum.likely();
  if (!(reach < rounding.overflow)) return kInfinity;  // NaN, too
  return sum.likely() + rounding.unit * reach + rounding.smallest + kFlushed;
}

}  // namespace gatefold::reference
