#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "layers/ffn_spec.h"
#include "runtime/error.h"
#include "runtime/tensor_source.h"

namespace gatefold::testing {

/// Tensors that a test wrote down itself, held as fp32.
class MemorySource : public TensorSource {
 public:
  void set(const std::string& name, std::vector<std::int64_t> shape, std::vector<float> values) {
    tensors_[name] = {std::move(shape), std::move(values)};
  }
  float& at(const std::string& name, std::int64_t index) {
    return tensors_.at(name).values.at(static_cast<std::size_t>(index));
  }

  std::optional<TensorInfo> find(const std::string& name) const override {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) return std::nullopt;
    return TensorInfo{DType::kF32, found->second.shape};
  }
  void read(const std::string& name, Range rows, Range cols, std::byte* out) const override {
    const Tensor& tensor = tensors_.at(name);
    const std::int64_t width = tensor.shape.empty() ? 1 : tensor.shape.back();
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
      const float* from = tensor.values.data() + r * width + cols.begin;
      const auto* bytes = reinterpret_cast<const std::byte*>(from);
      out = std::copy_n(bytes, static_cast<std::size_t>(cols.size()) * sizeof(float), out);
    }
  }
  std::string description() const override { return "memory"; }

 private:
  struct Tensor {
    std::vector<std::int64_t> shape;
    std::vector<float> values;
  };
  std::map<std::string, Tensor> tensors_;
};

/// Random but fixed values: a small generator of the test's own.
inline std::vector<float> noise(std::int64_t n, std::uint64_t seed, float scale) {
  std::vector<float> values(static_cast<std::size_t>(n));
  std::uint64_t state = seed * 0x9e3779b97f4a7c15U + 1;
  for (float& value : values) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    value = (static_cast<float>(state >> 40) * 0x1p-23F - 1.0F) * scale;
  }
  return values;
}

struct FfnShape {
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  bool gated = true;
  bool bias = false;
};

/// A spec and the tensors it names, filled with noise.
struct MemoryFfn {
  FfnSpec spec;
  MemorySource source;

  explicit MemoryFfn(const FfnShape& shape, std::uint64_t seed = 1) {
    const std::int64_t h = shape.hidden;
    const std::int64_t i = shape.intermediate;
    spec.hidden_size = h;
    spec.intermediate_size = i;
    spec.activation.gated = shape.gated;
    const float in_scale = 1.7F / std::sqrt(static_cast<float>(h));
    const float out_scale = 1.7F / std::sqrt(static_cast<float>(i));
    spec.up = {"up", false, {i, h}};
    spec.down = {"down", false, {h, i}};
    source.set("up", {i, h}, noise(i * h, seed + 1, in_scale));
    source.set("down", {h, i}, noise(h * i, seed + 2, out_scale));
    if (shape.gated) {
      spec.gate = TensorRef{"gate", false, {i, h}};
      source.set("gate", {i, h}, noise(i * h, seed + 3, in_scale));
    }
    if (!shape.bias) return;
    spec.up_bias = TensorRef{"up_bias", false, {i}};
    spec.down_bias = TensorRef{"down_bias", false, {h}};
    source.set("up_bias", {i}, noise(i, seed + 4, 0.5F));
    source.set("down_bias", {h}, noise(h, seed + 5, 0.5F));
    if (shape.gated) {
      spec.gate_bias = TensorRef{"gate_bias", false, {i}};
      source.set("gate_bias", {i}, noise(i, seed + 6, 0.5F));
    }
  }
};

/// fp32 values as a dense tensor in `dtype`.
inline std::vector<std::byte> in_dtype(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * static_cast<std::size_t>(size_of(dtype)));
  convert(DType::kF32, reinterpret_cast<const std::byte*>(values.data()), dtype, bytes.data(),
          static_cast<std::int64_t>(values.size()));
  return bytes;
}

inline std::vector<float> as_floats(const std::vector<std::byte>& bytes, DType dtype) {
  std::vector<float> values(bytes.size() / static_cast<std::size_t>(size_of(dtype)));
  convert(dtype, bytes.data(), DType::kF32, reinterpret_cast<std::byte*>(values.data()),
          static_cast<std::int64_t>(values.size()));
  return values;
}

}  // namespace gatefold::testing
