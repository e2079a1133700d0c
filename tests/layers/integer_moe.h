// A mixture of experts whose every sum is exact, and routings for it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "one_device.h"

namespace gatefold::testing {

/// Small integers, whose sums are exact in whatever order.
inline std::vector<float> integers(std::int64_t n, std::int64_t salt, std::int64_t range) {
  std::vector<float> values(as_size(n));
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t hash = (i * 2654435761 + salt * 40503) % 1000003;
    values[as_size(i)] = static_cast<float>(hash % (2 * range + 1) - range);
  }
  return values;
}

/// Ungated experts with integers for weights and no activation.
class IntegerMoe {
 public:
  IntegerMoe(std::int64_t hidden, std::int64_t intermediate, std::int64_t experts,
             std::int64_t top_k, bool shared)
      : moe_({.hidden = hidden,
              .intermediate = intermediate,
              .experts = experts,
              .top_k = top_k,
              .shared = shared ? 1 : 0}) {
    for (FfnSpec& expert : moe_.spec.experts) make_integer(expert);
    for (FfnSpec& one : moe_.spec.shared) make_integer(one);
  }

  const MemoryMoe& moe() const { return moe_; }

  /// The sum over a token's experts, as plain loops have it, but for choices that aren't `kept`.
  std::vector<float> expected(const std::vector<float>& x, const Choices& given,
                              const std::vector<std::uint8_t>& kept = {}) const {
    const std::int64_t h = moe_.spec.hidden_size;
    std::vector<float> y(x.size());
    for (std::int64_t t = 0; t < given.rows; ++t) {
      const float* row = x.data() + t * h;
      float* sum = y.data() + t * h;
      for (std::int64_t i = 0; i < given.top_k; ++i) {
        if (!kept.empty() && kept[as_size(t * given.top_k + i)] == 0) continue;
        add(moe_.spec.experts[as_size(given.ids_of(t)[as_size(i)])], row,
            given.weight(t, as_size(i)), sum);
      }
      for (const FfnSpec& one : moe_.spec.shared) add(one, row, 1.0F, sum);
    }
    return y;
  }

 private:
  void make_integer(FfnSpec& ffn) {
    ffn.activation.kind = ActivationKind::kIdentity;
    ffn.activation.gated = false;
    ffn.gate.reset();
    const std::int64_t n = ffn.hidden_size * ffn.intermediate_size;
    moe_.source.set(ffn.up.name, {ffn.intermediate_size, ffn.hidden_size}, integers(n, ++salt_, 2));
    moe_.source.set(ffn.down.name, {ffn.hidden_size, ffn.intermediate_size},
                    integers(n, ++salt_, 2));
    ffn.down_bias.emplace().name = ffn.down.name + "_bias";
    moe_.source.set(ffn.down_bias->name, {ffn.hidden_size}, integers(ffn.hidden_size, ++salt_, 3));
  }

  std::vector<float> values(const TensorRef& ref, std::int64_t rows, std::int64_t columns) const {
    std::vector<float> all(as_size(rows * columns));
    read_as_float(moe_.source, ref.name, {0, rows}, {0, columns}, all.data());
    return all;
  }

  void add(const FfnSpec& ffn, const float* x, float weight, float* y) const {
    const std::int64_t h = ffn.hidden_size;
    const std::int64_t n = ffn.intermediate_size;
    const auto up = values(ffn.up, n, h);
    const auto down = values(ffn.down, h, n);
    const auto bias = values(*ffn.down_bias, 1, h);
    std::vector<float> inner(as_size(n));
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t j = 0; j < h; ++j) inner[as_size(i)] += up[as_size(i * h + j)] * x[j];
    }
    for (std::int64_t j = 0; j < h; ++j) {
      float sum = bias[as_size(j)];
      for (std::int64_t i = 0; i < n; ++i) sum += down[as_size(j * n + i)] * inner[as_size(i)];
      y[j] += weight * sum;
    }
  }

  MemoryMoe moe_;
  std::int64_t salt_ = 0;
};

/// Token t's experts: k of them, spread; with `one`, all tokens go to the first k.
inline Choices given_choices(std::int64_t tokens, std::int64_t experts, std::int64_t k, bool one) {
  Choices given;
  given.resize(tokens, k);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int64_t expert = one ? i : (t * 7 + i * 3 + t / 5) % experts;
      given.ids[as_size(t * k + i)] = static_cast<std::int32_t>(expert);
      given.weights[as_size(t * k + i)] = static_cast<float>((t + 2 * i) % 4 - 1);
    }
  }
  return given;
}

}  // namespace gatefold::testing
