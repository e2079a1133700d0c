#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "layers/ffn_spec.h"
#include "layers/reference.h"
#include "layers/reference_math.h"
#include "runtime/dtype.h"
#include "runtime/range.h"
#include "runtime/tensor_source.h"

/// Layers of the float64 references: weights stream from their source, sums carry errors.
namespace gatefold::reference {

inline constexpr std::int64_t kLanes = 2;

/// What a dot product multiplies weights with: rows of numbers, each row padded with zeros to whole
/// segments of lanes. Error arrays are empty where the numbers are exact.
class Operand {
 public:
  Operand(std::int64_t rows, std::int64_t width, bool exact)
      : width_(width), stride_(round_up(width, kLanes)) {
    const auto size = static_cast<std::size_t>(rows * stride_);
    value_.resize(size);
    if (exact) return;
    certain_.resize(size);
    spread_.resize(size);
    shared_.resize(size);
  }

  void set(std::int64_t row, std::int64_t column, const Number& number) {
    const std::size_t i = index(row, column);
    value_[i] = number.value;
    if (exact()) return;
    certain_[i] = number.certain;
    spread_[i] = number.spread;
    shared_[i] = std::copysign(number.likely(), number.value);
  }

  std::int64_t width() const { return width_; }
  bool exact() const { return certain_.empty(); }
  const double* value(std::int64_t row, std::int64_t column) const {
    return &value_[index(row, column)];
  }
  const double* certain(std::int64_t row, std::int64_t column) const {
    return &certain_[index(row, column)];
  }
  const double* spread(std::int64_t row, std::int64_t column) const {
    return &spread_[index(row, column)];
  }
  const double* shared(std::int64_t row, std::int64_t column) const {
    return &shared_[index(row, column)];
  }

 private:
  std::size_t index(std::int64_t row, std::int64_t column) const {
    return static_cast<std::size_t>(row * stride_ + column);
  }

  std::int64_t width_;
  std::int64_t stride_;
  std::vector<double> value_;    // [rows, stride]
  std::vector<double> certain_;  // [rows, stride]
  std::vector<double> spread_;   // [rows, stride]
  std::vector<double> shared_;   // [rows, stride] likely(), with the value's sign
};

/// The sums that one dot product w·v and its bound are made of.
struct DotSums {
  double value = 0;           // sum w*v
  double magnitude = 0;       // sum |w*v|
  double squares = 0;         // sum (w*v)^2
  double largest = 0;         // the largest |value| on the way
  double certain = 0;         // sum |w| * certain_v
  double spread_squares = 0;  // sum (w * spread_v)^2
  double shared = 0;          // sum w * likely_v * sign(v)
  double common = 0;          // sum likely_w * |v|, of weights whose errors depend on each other

  void add_terms(const double* w, const double* v, std::int64_t n);
  void add_errors(const double* w, const double* certain_v, const double* spread_v,
                  const double* shared_v, std::int64_t n);
  void add_bias(double bias);
  void add_number(const Number& v);  // w = 1
  void add_weighed(const Number& w, const Number& v);
};

Number dot_result(const DotSums& sums, std::int64_t terms);

/// x [rows, width], which is exact.
Operand input_of(std::span<const float> x, std::int64_t rows, std::int64_t width);

/// A bias [out], or zeros where there is none, rounded to `dtype`.
std::vector<double> read_bias(const TensorSource& source, const std::optional<TensorRef>& ref,
                              DType dtype, std::int64_t out);

/// W x + b [tokens, out], weights rounded to `dtype`, some rows of W [out, x.width()] at a time.
std::vector<Number> linear_output(const TensorSource& source, const TensorRef& weight,
                                  const std::optional<TensorRef>& bias, DType dtype,
                                  std::int64_t out, const Operand& x, std::int64_t tokens,
                                  const ReferenceOptions& options);

/// y of dense FFN `spec` for x [tokens, H], before its rounding, some columns at a time:
/// body(columns, y [tokens, columns.size()]).
void for_each_output(const FfnSpec& spec, const TensorSource& source, DType dtype, const Operand& x,
                     std::int64_t tokens, const ReferenceOptions& options,
                     const std::function<void(Range, const std::vector<Number>&)>& body);

/// Throws Error 65 where `spec` contradicts itself.
void check_spec(const FfnSpec& spec);

}  // namespace gatefold::reference
