#include "layers/reference.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <string>

#include "runtime/error.h"
#include "runtime/range.h"

namespace gatefold {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kUnit = 0x1p-24;                // u: fp32's unit roundoff
constexpr double kF32Overflow = 0x1.ffffffp127;  // rounds to infinity from here on
constexpr double kFlushed = 0x1p-100;
constexpr double kSpreads = 8.0;
constexpr double kActivationUnits = 8.0;

constexpr std::int64_t kSegment = 128;  // terms between two looks at a partial sum
constexpr std::int64_t kLanes = 2;
static_assert(kSegment % kLanes == 0);

// ---- numbers and their errors: the formulas of reference.h ----

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

// ---- activations ----

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

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

Number gated_value(const Activation& activation, const Number& gate, const Number& up) {
  if (activation.kind != ActivationKind::kClampedSwiglu) {
    return product(activated(activation, gate), up);
  }
  const double limit = activation.limit;
  return product(activated(activation, clamped(gate, -kInfinity, limit)),
                 plus_one(clamped(up, -limit, limit)));
}

// ---- dot products ----

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

/// Independent sums side by side: without them no compiler may reorder a sum into vectors.
using Lanes = double __attribute__((vector_size(kLanes * sizeof(double))));

Lanes load(const double* first) {
  Lanes lanes;
  std::memcpy(&lanes, first, sizeof lanes);
  return lanes;
}

Lanes magnitude_of(const Lanes& lanes) {
  using Bits = std::int64_t __attribute__((vector_size(sizeof(Lanes))));
  return std::bit_cast<Lanes>(std::bit_cast<Bits>(lanes) &
                              std::numeric_limits<std::int64_t>::max());
}

double total(const Lanes& lanes) {
  double sum = 0;
  for (std::int64_t lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}

/// The sums that one dot product and its bound are made of.
struct DotSums {
  double value = 0;           // sum w*v
  double magnitude = 0;       // sum |w*v|
  double squares = 0;         // sum (w*v)^2
  double largest = 0;         // the largest |value| on the way
  double certain = 0;         // sum |w| * certain_v
  double spread_squares = 0;  // sum (w * spread_v)^2
  double shared = 0;          // sum w * likely_v * sign(v)

  void add_terms(const double* w, const double* v, std::int64_t n);
  void add_errors(const double* w, const double* certain_v, const double* spread_v,
                  const double* shared_v, std::int64_t n);
  void add_bias(double bias);
};

// In both, n is a multiple of kLanes.
void DotSums::add_terms(const double* w, const double* v, std::int64_t n) {
  Lanes values{};
  Lanes magnitudes{};
  Lanes squared{};
  for (std::int64_t k = 0; k < n; k += kLanes) {
    const Lanes terms = load(w + k) * load(v + k);
    values += terms;
    magnitudes += magnitude_of(terms);
    squared += terms * terms;
  }
  value += total(values);
  magnitude += total(magnitudes);
  squares += total(squared);
  largest = std::max(largest, std::abs(value));
}

void DotSums::add_errors(const double* w, const double* certain_v, const double* spread_v,
                         const double* shared_v, std::int64_t n) {
  Lanes certains{};
  Lanes spreads{};
  Lanes shares{};
  for (std::int64_t k = 0; k < n; k += kLanes) {
    const Lanes weights = load(w + k);
    const Lanes scaled = weights * load(spread_v + k);
    certains += magnitude_of(weights) * load(certain_v + k);
    spreads += scaled * scaled;
    shares += weights * load(shared_v + k);
  }
  certain += total(certains);
  spread_squares += total(spreads);
  shared += total(shares);
}

void DotSums::add_bias(double bias) {
  value += bias;
  magnitude += std::abs(bias);
  squares += bias * bias;
  largest = std::max(largest, std::abs(value));
}

Number dot_result(const DotSums& sums, std::int64_t terms) {
  if (!(sums.magnitude < kF32Overflow)) return {sums.value, kInfinity, kInfinity};
  const double n = static_cast<double>(terms);
  const double root = std::sqrt(sums.squares);  // Q
  const double partial = root > 0 ? sums.largest * sums.largest / root : 0;
  const double rounding = kUnit * std::sqrt(n) * (root + partial);
  return {sums.value, sums.certain + gamma(n + 1) * (sums.magnitude + sums.certain) + kFlushed,
          std::hypot(rounding, std::sqrt(sums.spread_squares)) + std::abs(sums.shared) / kSpreads +
              kFlushed};
}

// ---- weights ----

[[noreturn]] void fail(const TensorSource& source, const TensorRef& ref, const std::string& problem,
                       const std::string& why) {
  throw Error(ExitCode::kData, fmt::format("tensor {} {} ({}); check {}", ref.name, problem, why,
                                           source.description()));
}

/// The stored type, after the shape was checked: logical rows [out, in], or [out] where in is 0.
DType checked_type(const TensorSource& source, const TensorRef& ref, std::int64_t out,
                   std::int64_t in) {
  const std::optional<TensorInfo> info = source.find(ref.name);
  if (!info) fail(source, ref, "is missing", "the layer's output depends on it");
  std::vector<std::int64_t> shape = info->shape;
  if (ref.transposed) std::reverse(shape.begin(), shape.end());
  const bool right_rank = shape.size() == (in > 0 ? 2U : 1U);
  if (!right_rank || (in > 0 && shape[1] != in) || ref.row_offset < 0 ||
      shape[0] - ref.row_offset < out || (ref.stored_rows > 0 && shape[0] != ref.stored_rows)) {
    fail(source, ref, fmt::format("has shape [{}]", fmt::join(info->shape, ", ")),
         fmt::format("rows {} to {} of width {} are needed", ref.row_offset, ref.row_offset + out,
                     in));
  }
  return info->dtype;
}

/// Some rows of a weight matrix, as stored.
struct WeightChunk {
  DType stored = DType::kF32;
  std::int64_t row_step = 0;     // elements from one logical row to the next
  std::int64_t column_step = 0;  // elements from one logical column to the next
  std::vector<std::byte> bytes;
};

WeightChunk read_rows(const TensorSource& source, const TensorRef& ref, DType stored, Range rows,
                      std::int64_t in) {
  WeightChunk chunk{
      stored, ref.transposed ? 1 : in, ref.transposed ? rows.size() : 1,
      std::vector<std::byte>(static_cast<std::size_t>(rows.size() * in * size_of(stored)))};
  const Range stored_rows{ref.row_offset + rows.begin, ref.row_offset + rows.end};
  const Range columns{0, in};
  source.read(ref.name, ref.transposed ? columns : stored_rows,
              ref.transposed ? stored_rows : columns, chunk.bytes.data());
  return chunk;
}

template <typename Element, typename Widen>
void widen_each(const std::byte* first, std::int64_t step, std::int64_t n, Widen widen,
                float* out) {
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(Element));
  std::array<Element, kSegment> elements;
  if (step == 1) {
    std::memcpy(elements.data(), first, static_cast<std::size_t>(n * kSize));
  } else {
    for (std::int64_t k = 0; k < n; ++k) {
      std::memcpy(elements.data() + k, first + k * step * kSize, sizeof(Element));
    }
  }
  for (std::int64_t k = 0; k < n; ++k) out[k] = widen(elements[static_cast<std::size_t>(k)]);
}

/// n <= kSegment elements, `step` apart, as fp32.
void widen(DType stored, const std::byte* first, std::int64_t step, std::int64_t n, float* out) {
  const auto same = [](float value) { return value; };
  switch (stored) {
    case DType::kBf16: return widen_each<std::uint16_t>(first, step, n, bf16_to_float, out);
    case DType::kF16: return widen_each<std::uint16_t>(first, step, n, f16_to_float, out);
    case DType::kF32: return widen_each<float>(first, step, n, same, out);
  }
}

using Segment = std::array<double, kSegment>;

/// n <= kSegment elements from `first`, `step` apart, rounded to `dtype`; zeros behind them.
void load_segment(DType stored, DType dtype, const std::byte* first, std::int64_t step,
                  std::int64_t n, Segment& out) {
  std::array<float, kSegment> values;
  widen(stored, first, step, n, values.data());
  std::fill(values.begin() + n, values.end(), 0.0F);
  if (stored != dtype) {
    for (float& value : values) value = round_to(dtype, value);
  }
  std::copy(values.begin(), values.end(), out.begin());
}

std::vector<double> read_bias(const TensorSource& source, const std::optional<TensorRef>& ref,
                              DType dtype, std::int64_t out) {
  std::vector<double> bias;  // [out]
  if (!ref) return std::vector<double>(static_cast<std::size_t>(out));
  const DType stored = checked_type(source, *ref, out, 0);
  std::vector<std::byte> bytes(static_cast<std::size_t>(out * size_of(stored)));
  source.read(ref->name, {0, 1}, {ref->row_offset, ref->row_offset + out}, bytes.data());
  for (std::int64_t k = 0; k < out; k += kSegment) {
    Segment segment;
    const std::int64_t n = std::min(kSegment, out - k);
    load_segment(stored, dtype, bytes.data() + k * size_of(stored), 1, n, segment);
    bias.insert(bias.end(), segment.begin(), segment.begin() + n);
  }
  return bias;
}

float read_scalar(const TensorSource& source, const std::string& name) {
  const TensorRef ref{name};
  const std::optional<TensorInfo> info = source.find(name);
  if (!info) fail(source, ref, "is missing", "the activation depends on it");
  std::array<std::byte, sizeof(float)> bytes{};
  source.read(name, {0, 1}, {0, 1}, bytes.data());
  float value = 0;
  widen(info->dtype, bytes.data(), 1, 1, &value);
  return value;
}

// ---- the layer ----

/// One linear layer, y = W v + b: reads and multiplies a range of W's rows at a time.
class Linear {
 public:
  Linear(const TensorSource& source, const TensorRef& weight, const std::optional<TensorRef>& bias,
         DType dtype, std::int64_t out, std::int64_t in)
      : source_(source),
        weight_(weight),
        dtype_(dtype),
        stored_(checked_type(source, weight, out, in)),
        in_(in),
        bias_(read_bias(source, bias, dtype, out)) {}

  std::int64_t row_bytes() const { return in_ * size_of(stored_); }

  /// [tokens, rows.size()]
  std::vector<Number> apply(Range rows, const Operand& input, std::int64_t tokens) const;

 private:
  void add_segment(const WeightChunk& chunk, Range rows, Range columns, const Operand& input,
                   std::int64_t tokens, std::vector<DotSums>& sums) const;

  const TensorSource& source_;
  const TensorRef& weight_;
  DType dtype_;
  DType stored_;
  std::int64_t in_;
  std::vector<double> bias_;  // [out]
};

std::vector<Number> Linear::apply(Range rows, const Operand& input, std::int64_t tokens) const {
  const WeightChunk chunk = read_rows(source_, weight_, stored_, rows, in_);
  std::vector<DotSums> sums(static_cast<std::size_t>(tokens * rows.size()));
  for (std::int64_t k = 0; k < in_; k += kSegment) {
    add_segment(chunk, rows, {k, std::min(in_, k + kSegment)}, input, tokens, sums);
  }
  std::vector<Number> result(sums.size());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const auto row = i % static_cast<std::size_t>(rows.size());
    sums[i].add_bias(bias_[static_cast<std::size_t>(rows.begin) + row]);
    result[i] = dot_result(sums[i], in_ + 1);
  }
  return result;
}

void Linear::add_segment(const WeightChunk& chunk, Range rows, Range columns, const Operand& input,
                         std::int64_t tokens, std::vector<DotSums>& sums) const {
  Segment w;
  const std::int64_t k = columns.begin;
  const std::int64_t n = round_up(columns.size(), kLanes);
  for (std::int64_t row = 0; row < rows.size(); ++row) {
    const std::int64_t first = row * chunk.row_step + k * chunk.column_step;
    load_segment(stored_, dtype_, chunk.bytes.data() + first * size_of(stored_), chunk.column_step,
                 columns.size(), w);
    for (std::int64_t t = 0; t < tokens; ++t) {
      DotSums& sum = sums[static_cast<std::size_t>(t * rows.size() + row)];
      sum.add_terms(w.data(), input.value(t, k), n);
      if (input.exact()) continue;
      sum.add_errors(w.data(), input.certain(t, k), input.spread(t, k), input.shared(t, k), n);
    }
  }
}

template <typename Body>
void for_each_chunk(std::int64_t rows, std::int64_t row_bytes, const ReferenceOptions& options,
                    Body body) {
  const std::int64_t step = std::max<std::int64_t>(1, options.chunk_bytes / row_bytes);
  for (std::int64_t row = 0; row < rows; row += step) body(Range{row, std::min(rows, row + step)});
}

Operand input_of(std::span<const float> x, std::int64_t tokens, std::int64_t width) {
  Operand input(tokens, width, true);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t k = 0; k < width; ++k) {
      input.set(t, k, {double{x[static_cast<std::size_t>(t * width + k)]}, 0, 0});
    }
  }
  return input;
}

/// h [tokens, I], before the runtime's rounding to `dtype` but with the error that it makes.
Operand hidden_of(const FfnSpec& spec, const Activation& activation, const TensorSource& source,
                  DType dtype, const Operand& x, std::int64_t tokens,
                  const ReferenceOptions& options) {
  const std::int64_t hidden = spec.hidden_size;
  const std::int64_t width = spec.intermediate_size;
  const Linear up(source, spec.up, spec.up_bias, dtype, width, hidden);
  std::optional<Linear> gate;
  if (spec.gated()) gate.emplace(source, *spec.gate, spec.gate_bias, dtype, width, hidden);

  Operand h(tokens, width, false);
  const std::int64_t row_bytes = std::max(up.row_bytes(), gate ? gate->row_bytes() : 0);
  for_each_chunk(width, row_bytes, options, [&](Range rows) {
    const std::vector<Number> ups = up.apply(rows, x, tokens);
    const std::vector<Number> gates = gate ? gate->apply(rows, x, tokens) : std::vector<Number>{};
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t i = 0; i < rows.size(); ++i) {
        const auto at = static_cast<std::size_t>(t * rows.size() + i);
        const Number value =
            gate ? gated_value(activation, gates[at], ups[at]) : activated(activation, ups[at]);
        h.set(t, rows.begin + i, rounded(dtype, value));
      }
    }
  });
  return h;
}

/// How far y may be off: `sum` as likely, then y's own rounding in full.
double output_bound(DType dtype, const Number& sum) {
  const Rounding rounding = rounding_of(dtype);
  const double reach = std::abs(sum.value) + sum.likely();
  if (!(reach < rounding.overflow)) return kInfinity;  // NaN, too
  return sum.likely() + rounding.unit * reach + rounding.smallest + kFlushed;
}

void check_arguments(const FfnSpec& spec, std::span<const float> x, std::int64_t tokens) {
  if (tokens < 0 || static_cast<std::int64_t>(x.size()) != tokens * spec.hidden_size) {
    throw Error(ExitCode::kData,
                fmt::format("reference input has {} values ({} tokens of width {} were promised); "
                            "pass x as [tokens, hidden_size]",
                            x.size(), tokens, spec.hidden_size));
  }
  const bool needs_gate = spec.gated() || spec.activation.kind == ActivationKind::kClampedSwiglu;
  if (spec.gated() != spec.gate.has_value() || needs_gate != spec.gated()) {
    throw Error(
        ExitCode::kData,
        fmt::format("layer {} says gated = {} and {} a gate tensor (the activation can't be "
                    "computed); describe the layer as one or the other",
                    spec.layer, spec.gated(), spec.gate ? "names" : "lacks"));
  }
}

}  // namespace

ReferenceResult reference_ffn(const FfnSpec& spec, const TensorSource& source, DType dtype,
                              std::span<const float> x, std::int64_t tokens,
                              const ReferenceOptions& options) {
  check_arguments(spec, x, tokens);
  Activation activation = spec.activation;
  if (spec.swish_beta) activation.beta = read_scalar(source, *spec.swish_beta);

  const std::int64_t hidden = spec.hidden_size;
  const std::int64_t width = spec.intermediate_size;
  const Operand h =
      hidden_of(spec, activation, source, dtype, input_of(x, tokens, hidden), tokens, options);
  const Linear down(source, spec.down, spec.down_bias, dtype, hidden, width);
  ReferenceResult result{std::vector<double>(x.size()), std::vector<double>(x.size())};
  for_each_chunk(hidden, down.row_bytes(), options, [&](Range rows) {
    const std::vector<Number> sums = down.apply(rows, h, tokens);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t j = 0; j < rows.size(); ++j) {
        const Number& sum = sums[static_cast<std::size_t>(t * rows.size() + j)];
        const auto at = static_cast<std::size_t>(t * hidden + rows.begin + j);
        result.y[at] = sum.value;
        result.bound[at] = output_bound(dtype, sum);
      }
    }
  });
  return result;
}

}  // namespace gatefold
