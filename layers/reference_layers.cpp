#include "layers/reference_layers.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cstring>

#include "runtime/error.h"

namespace gatefold::reference {
namespace {

constexpr std::int64_t kSegment = 128;  // terms between two looks at a partial sum
static_assert(kSegment % kLanes == 0);

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

[[noreturn]] void fail(const TensorSource& source, const TensorRef& ref, const std::string& problem,
                       const std::string& why) {
  throw Error(ExitCode::kData, fmt::format("tensor {} {} ({}); check {}", ref.name, problem, why,
                                           source.description()));
}

std::int64_t row_end(const TensorRef& ref, std::int64_t rows) {
  return ref.row_offset + (rows - 1) * ref.row_step + 1;
}

/// Whether a tensor of this shape holds logical rows [out, in], or a vector [out] where in is 0.
bool holds(const std::vector<std::int64_t>& shape, const TensorRef& ref, std::int64_t out,
           std::int64_t in) {
  const std::size_t rank = in > 0 ? 2 : 1;
  const bool alone = ref.stored_shape.empty();
  if (alone ? shape.size() != rank : shape != ref.stored_shape || shape.size() < rank) return false;
  // As the source sees it: all dimensions but the last are one.
  std::int64_t height = 1;
  for (std::size_t i = 0; i + 1 < shape.size(); ++i) height *= shape[i];
  const bool lying = ref.transposed || in == 0;
  const std::int64_t rows = lying ? shape.back() : height;
  const std::int64_t columns = lying ? height : shape.back();
  const std::int64_t column_end = ref.column_offset + std::max<std::int64_t>(in, 1);
  return ref.row_offset >= 0 && ref.column_offset >= 0 && ref.row_step > 0 &&
         row_end(ref, out) <= rows && column_end <= columns && (!alone || in == 0 || columns == in);
}

/// The stored type, after the shape was checked: logical rows [out, in], or [out] where in is 0.
DType checked_type(const TensorSource& source, const TensorRef& ref, std::int64_t out,
                   std::int64_t in) {
  const std::optional<TensorInfo> info = source.find(ref.name);
  if (!info) fail(source, ref, "is missing", "the layer's output depends on it");
  if (!holds(info->shape, ref, out, in)) {
    fail(
        source, ref, fmt::format("has shape [{}]", fmt::join(info->shape, ", ")),
        fmt::format("rows {} to {} of width {} are needed", ref.row_offset, row_end(ref, out), in));
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

/// From the first to the last of these rows, those of others between them too.
Range stored_rows_of(const TensorRef& ref, Range rows) {
  return {ref.row_offset + rows.begin * ref.row_step,
          ref.row_offset + (rows.end - 1) * ref.row_step + 1};
}

WeightChunk read_rows(const TensorSource& source, const TensorRef& ref, DType stored, Range rows,
                      std::int64_t in) {
  const Range stored_rows = stored_rows_of(ref, rows);
  WeightChunk chunk{
      stored, ref.row_step * (ref.transposed ? 1 : in), ref.transposed ? stored_rows.size() : 1,
      std::vector<std::byte>(static_cast<std::size_t>(stored_rows.size() * in * size_of(stored)))};
  const Range columns{ref.column_offset, ref.column_offset + in};
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

}  // namespace

std::vector<double> read_bias(const TensorSource& source, const std::optional<TensorRef>& ref,
                              DType dtype, std::int64_t out) {
  std::vector<double> bias;  // [out]
  if (!ref) return std::vector<double>(static_cast<std::size_t>(out));
  const DType stored = checked_type(source, *ref, out, 0);
  const Range elements = stored_rows_of(*ref, {0, out});
  std::vector<std::byte> bytes(static_cast<std::size_t>(elements.size() * size_of(stored)));
  source.read(ref->name, {ref->column_offset, ref->column_offset + 1}, elements, bytes.data());
  for (std::int64_t k = 0; k < out; k += kSegment) {
    Segment segment;
    const std::int64_t n = std::min(kSegment, out - k);
    load_segment(stored, dtype, bytes.data() + k * ref->row_step * size_of(stored), ref->row_step,
                 n, segment);
    bias.insert(bias.end(), segment.begin(), segment.begin() + n);
  }
  return bias;
}

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

void DotSums::add_number(const Number& v) {
  add_bias(v.value);
  certain += v.certain;
  spread_squares += v.spread * v.spread;
  shared += std::copysign(v.likely(), v.value);
}

void DotSums::add_weighed(const Number& w, const Number& v) {
  const double own = product({w.value, 0, 0}, v).spread;
  const Number both = product(w, v);
  add_number({both.value, both.certain, own});
  common += w.likely() * (std::abs(v.value) + v.likely());
}

Number dot_result(const DotSums& sums, std::int64_t terms) {
  if (!(sums.magnitude < kF32Overflow)) return {sums.value, kInfinity, kInfinity};
  const double n = static_cast<double>(terms);
  const double root = std::sqrt(sums.squares);  // Q
  const double partial = root > 0 ? sums.largest * sums.largest / root : 0;
  const double rounding = kUnit * std::sqrt(n) * (root + partial);
  return {sums.value, sums.certain + gamma(n + 1) * (sums.magnitude + sums.certain) + kFlushed,
          std::hypot(rounding, std::sqrt(sums.spread_squares)) +
              (std::abs(sums.shared) + sums.common) / kSpreads + kFlushed};
}

namespace {

/// One linear layer, y = W v + b: reads and multiplies a range of W's rows at a time.
class Linear {
 public:
  Linear(const TensorSource& source, const TensorRef& weight, const std::optional<TensorRef>& bias,
         DType dtype, std::int64_t out, std::int64_t in);

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

Linear::Linear(const TensorSource& source, const TensorRef& weight,
               const std::optional<TensorRef>& bias, DType dtype, std::int64_t out, std::int64_t in)
    : source_(source),
      weight_(weight),
      dtype_(dtype),
      stored_(checked_type(source, weight, out, in)),
      in_(in),
      bias_(read_bias(source, bias, dtype, out)) {}

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

/// Calls body(Range) for so many rows at a time as fit options.chunk_bytes, at least one.
template <typename Body>
void for_each_chunk(std::int64_t rows, std::int64_t row_bytes, const ReferenceOptions& options,
                    Body body) {
  const std::int64_t step = std::max<std::int64_t>(1, options.chunk_bytes / row_bytes);
  for (std::int64_t row = 0; row < rows; row += step) body(Range{row, std::min(rows, row + step)});
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

}  // namespace

Operand input_of(std::span<const float> x, std::int64_t rows, std::int64_t width) {
  Operand input(rows, width, true);
  for (std::int64_t t = 0; t < rows; ++t) {
    for (std::int64_t k = 0; k < width; ++k) {
      input.set(t, k, {double{x[static_cast<std::size_t>(t * width + k)]}, 0, 0});
    }
  }
  return input;
}

std::vector<Number> linear_output(const TensorSource& source, const TensorRef& weight,
                                  const std::optional<TensorRef>& bias, DType dtype,
                                  std::int64_t out, const Operand& x, std::int64_t tokens,
                                  const ReferenceOptions& options) {
  const Linear linear(source, weight, bias, dtype, out, x.width());
  std::vector<Number> result(static_cast<std::size_t>(tokens * out));
  for_each_chunk(out, linear.row_bytes(), options, [&](Range rows) {
    const std::vector<Number> part = linear.apply(rows, x, tokens);
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::copy_n(part.begin() + t * rows.size(), rows.size(),
                  result.begin() + t * out + rows.begin);
    }
  });
  return result;
}

void check_spec(const FfnSpec& spec) {
  const bool needs_gate = spec.gated() || spec.activation.kind == ActivationKind::kClampedSwiglu;
  if (spec.gated() != spec.gate.has_value() || needs_gate != spec.gated()) {
    throw Error(
        ExitCode::kData,
        fmt::format("layer {} says gated = {} and {} a gate tensor (the activation can't be "
                    "computed); describe the layer as one or the other",
                    spec.layer, spec.gated(), spec.gate ? "names" : "lacks"));
  }
}

void for_each_output(const FfnSpec& spec, const TensorSource& source, DType dtype, const Operand& x,
                     std::int64_t tokens, const ReferenceOptions& options,
                     const std::function<void(Range, const std::vector<Number>&)>& body) {
  Activation activation = spec.activation;
  if (spec.swish_beta) activation.beta = read_scalar(source, *spec.swish_beta);
  const Operand h = hidden_of(spec, activation, source, dtype, x, tokens, options);
  const Linear down(source, spec.down, spec.down_bias, dtype, spec.hidden_size,
                    spec.intermediate_size);
  for_each_chunk(spec.hidden_size, down.row_bytes(), options,
                 [&](Range columns) { body(columns, down.apply(columns, h, tokens)); });
}

}  // namespace gatefold::reference
