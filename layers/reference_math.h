#pragma once

#include <algorithm>
#include <limits>
#include <span>

#include "runtime/activation.h"
#include "runtime/dtype.h"

/// Numbers with the errors that an honest fp32 runtime may make in them: the formulas of
/// layers/reference.h. Shared by the float64 references only.
namespace gatefold::reference {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kUnit = 0x1p-24;                // u: fp32's unit roundoff
inline constexpr double kF32Overflow = 0x1.ffffffp127;  // rounds to infinity from here on
inline constexpr double kFlushed = 0x1p-100;
inline constexpr double kSpreads = 8.0;
inline constexpr double kActivationUnits = 8.0;

struct Number {
  double value = 0;
  double certain = 0;
  double spread = 0;

  double likely() const { return std::min(certain, kSpreads * spread); }
};

struct Rounding {
  double unit;      // u_d
  double smallest;  // half the smallest step
  double overflow;  // rounds to infinity from here on
};

Rounding rounding_of(DType dtype);
double gamma(double roundings);
double sigmoid(double z);

Number rounded(DType dtype, const Number& number);
Number product(const Number& a, const Number& b);
Number activated(const Activation& activation, const Number& z);
/// a / b; unbounded where b may be 0.
Number quotient(const Number& a, const Number& b);
/// Their sum, in any order; their errors may depend on each other.
Number sum_of(std::span<const Number> terms);
/// 1 / (1 + exp(-z)): its slope stays within s * (1 - s) * exp(error).
Number sigmoid_of(const Number& z);
/// sqrt(log(1 + exp(z))): its logarithm's slope, sigmoid(z) / (2 log(1 + exp(z))), falls with z.
Number sqrt_softplus_of(const Number& z);
Number gated_value(const Activation& activation, const Number& gate, const Number& up);

/// How far y may be off: `sum` as likely, then y's own rounding in full.
double output_bound(DType dtype, const Number& sum);

}  // namespace gatefold::reference
