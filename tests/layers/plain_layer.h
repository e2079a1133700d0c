#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "layers/reference.h"

namespace gatefold::plain_layer {

constexpr std::array kDTypes = {DType::kF32, DType::kBf16, DType::kF16};

inline std::size_t at(std::int64_t row, std::int64_t width, std::int64_t column) {
  return static_cast<std::size_t>(row * width + column);
}

/// Tensors in memory; values are rounded to the type that they are stored in.
class TypedSource : public TensorSource {
 public:
  void add(const std::string& name, DType stored, std::vector<std::int64_t> shape,
           const std::vector<float>& values) {
    tensors_[name] = {{stored, std::move(shape)}, values};
  }

  std::optional<TensorInfo> find(const std::string& name) const override {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) return std::nullopt;
    return found->second.info;
  }

  void read(const std::string& name, Range rows, Range cols, std::byte* out) const override {
    const Tensor& tensor = tensors_.at(name);
    read_.insert(name);
    largest_read_ = std::max(largest_read_, rows.size() * cols.size() * size_of(tensor.info.dtype));
    const std::int64_t width = tensor.info.shape.empty() ? 1 : tensor.info.shape.back();
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
      for (std::int64_t c = cols.begin; c < cols.end; ++c) {
        out = store(tensor.info.dtype, tensor.values.at(at(r, width, c)), out);
      }
    }
  }

  std::string description() const override { return "the test's memory"; }
  std::int64_t largest_read() const { return largest_read_; }  // bytes
  bool was_read(const std::string& name) const { return read_.contains(name); }

 private:
  struct Tensor {
    TensorInfo info;
    std::vector<float> values;
  };

  static std::byte* store(DType dtype, float value, std::byte* out) {
    const std::uint16_t half = dtype == DType::kF16 ? float_to_f16(value) : float_to_bf16(value);
    const auto n = static_cast<std::size_t>(size_of(dtype));
    if (dtype == DType::kF32) {
      std::memcpy(out, &value, n);
    } else {
      std::memcpy(out, &half, n);
    }
    return out + n;
  }

  std::map<std::string, Tensor> tensors_;
  mutable std::int64_t largest_read_ = 0;
  mutable std::set<std::string> read_;
};

/// A layer with its weights at hand, [out, in] as ever.
struct Layer {
  std::int64_t hidden = 0;
  std::int64_t width = 0;
  Activation activation;
  std::vector<float> gate, up;                       // [I, H]
  std::vector<float> down;                           // [H, I]
  std::vector<float> gate_bias, up_bias, down_bias;  // [I], [I], [H]; empty: none
};

inline FfnSpec spec_of(const Layer& layer) {
  FfnSpec spec;
  spec.hidden_size = layer.hidden;
  spec.intermediate_size = layer.width;
  spec.activation = layer.activation;
  if (layer.activation.gated) spec.gate = TensorRef{"gate"};
  spec.up.name = "up";
  spec.down.name = "down";
  if (!layer.gate_bias.empty()) spec.gate_bias = TensorRef{"gate.bias"};
  if (!layer.up_bias.empty()) spec.up_bias = TensorRef{"up.bias"};
  if (!layer.down_bias.empty()) spec.down_bias = TensorRef{"down.bias"};
  return spec;
}

inline TypedSource source_of(const Layer& layer, DType stored) {
  TypedSource source;
  const std::int64_t h = layer.hidden;
  const std::int64_t i = layer.width;
  if (!layer.gate.empty()) source.add("gate", stored, {i, h}, layer.gate);
  source.add("up", stored, {i, h}, layer.up);
  source.add("down", stored, {h, i}, layer.down);
  if (!layer.gate_bias.empty()) source.add("gate.bias", stored, {i}, layer.gate_bias);
  if (!layer.up_bias.empty()) source.add("up.bias", stored, {i}, layer.up_bias);
  if (!layer.down_bias.empty()) source.add("down.bias", stored, {h}, layer.down_bias);
  return source;
}

inline ReferenceResult reference_of(const Layer& layer, DType dtype, const std::vector<float>& x) {
  const auto tokens = static_cast<std::int64_t>(x.size()) / layer.hidden;
  return reference_ffn(spec_of(layer), source_of(layer, dtype), dtype, x, tokens);
}

class Random {
 public:
  explicit Random(std::uint32_t seed) : state_(seed) {}

  /// Uniform with standard deviation 1.
  float next() {
    state_ = state_ * 1664525U + 1013904223U;
    return (static_cast<float>(state_ >> 8) * 0x1p-23F - 1) * 1.7320508F;
  }

  std::vector<float> values(std::int64_t n, double deviation, DType dtype) {
    std::vector<float> out(static_cast<std::size_t>(n));
    for (float& value : out) value = round_to(dtype, next() * static_cast<float>(deviation));
    return out;
  }

 private:
  std::uint32_t state_;
};

enum class Bias { kNone, kAll };

inline Layer random_layer(Random& random, std::int64_t hidden, std::int64_t width,
                          Activation activation, Bias bias, DType dtype) {
  Layer layer{hidden, width, activation, {}, {}, {}, {}, {}, {}};
  const double in = 1 / std::sqrt(static_cast<double>(hidden));
  if (activation.gated) layer.gate = random.values(width * hidden, in, dtype);
  layer.up = random.values(width * hidden, in, dtype);
  layer.down = random.values(hidden * width, 1 / std::sqrt(static_cast<double>(width)), dtype);
  if (bias == Bias::kNone) return layer;
  if (activation.gated) layer.gate_bias = random.values(width, 0.5, dtype);
  layer.up_bias = random.values(width, 0.5, dtype);
  layer.down_bias = random.values(hidden, 0.5, dtype);
  return layer;
}

inline Activation gated(ActivationKind kind) { return {.kind = kind, .gated = true}; }
inline Activation plain(ActivationKind kind) { return {.kind = kind, .gated = false}; }

struct Known {
  Activation activation;
  double first;   // act(-1.5)
  double second;  // act(2)
};

inline const std::array kKnown = {
    Known{{.kind = ActivationKind::kIdentity}, -1.5, 2},
    Known{{.kind = ActivationKind::kRelu}, 0, 2},
    Known{{.kind = ActivationKind::kRelu2}, 0, 4},
    Known{{.kind = ActivationKind::kSilu}, -0.2736382857095345, 1.7615941559557646},
    Known{{.kind = ActivationKind::kSilu, .beta = 0.5F}, -0.48123195123691054, 1.4621171572600098},
    Known{{.kind = ActivationKind::kGeluExact}, -0.10021080190328713, 1.9544997361036416},
    Known{{.kind = ActivationKind::kGeluTanh}, -0.10042842301976707, 1.954597694087775},
    Known{{.kind = ActivationKind::kQuickGelu}, -0.10833780155292341, 1.9356586231442083}};

/// One token x = [1, 0, …]; gate[i][0] = i+1, up[i][0] = 10(i+1), down[0][i] = 1.
inline Layer fixture_d() {
  Layer layer{16, 4, gated(ActivationKind::kSilu), {}, {}, {}, {}, {}, {}};
  layer.gate.resize(64);
  layer.up.resize(64);
  layer.down.resize(64);
  for (std::int64_t i = 0; i < 4; ++i) {
    layer.gate[at(i, 16, 0)] = static_cast<float>(i + 1);
    layer.up[at(i, 16, 0)] = static_cast<float>(10 * (i + 1));
    layer.down[at(0, 4, i)] = 1;
  }
  return layer;
}

inline std::vector<float> first_unit(std::int64_t n) {
  std::vector<float> x(static_cast<std::size_t>(n));
  x[0] = 1;
  return x;
}

}  // namespace gatefold::plain_layer
