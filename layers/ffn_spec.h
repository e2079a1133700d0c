#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/activation.h"

namespace gatefold {

/// Where a logical matrix [out, in] (or a vector [out]) lies in a checkpoint: a part of a tensor
/// that TensorSource::read sees as [product of all dimensions but the last, last].
///   as it is     (r, c) is at [row_offset + r * row_step, column_offset + c]
///   transposed   (r, c) is at [column_offset + c, row_offset + r * row_step]
/// A vector is the transposed matrix [out, 1]: of biases [E, out] that of expert e has
/// column_offset e.
struct TensorRef {
  std::string name;
  bool transposed = false;                      // stored [in, out], as GPT-2's Conv1D
  std::vector<std::int64_t> stored_shape = {};  // of the whole tensor; empty: just this matrix
  std::int64_t row_offset = 0;  // inside a fused or stacked tensor (up in phi3's gate_up_proj)
  std::int64_t row_step = 1;    // 2 where gate and up alternate (GPT-OSS)
  std::int64_t column_offset = 0;
};

/// One dense feed-forward layer: what it computes and where its weights lie.
struct FfnSpec {
  std::int64_t layer = 0;
  std::int64_t hidden_size = 0;        // H
  std::int64_t intermediate_size = 0;  // I
  Activation activation;

  std::optional<TensorRef> gate;          // [I, H], gated layers only
  TensorRef up;                           // [I, H]
  TensorRef down;                         // [H, I]
  std::optional<TensorRef> gate_bias;     // [I]
  std::optional<TensorRef> up_bias;       // [I]
  std::optional<TensorRef> down_bias;     // [H]
  std::optional<std::string> swish_beta;  // scalar, read at load into activation.beta

  bool gated() const { return activation.gated; }
  std::int64_t parameters() const {
    const std::int64_t matrices = gated() ? 3 : 2;
    const std::int64_t biases = (gate_bias ? intermediate_size : 0) +
                                (up_bias ? intermediate_size : 0) + (down_bias ? hidden_size : 0);
    return matrices * hidden_size * intermediate_size + biases + (swish_beta ? 1 : 0);
  }
};

}  // namespace gatefold
