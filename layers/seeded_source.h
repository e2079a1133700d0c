#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "layers/model_config.h"
#include "layers/stored_tensors.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// Weights made in memory from a seed for any config: each value is a function of (seed, tensor
/// name, stored row, stored column) only, by integer arithmetic and one fp32 multiply (a beta: and
/// one add), so it doesn't depend on who asks for which slice, nor on the machine.
/// With u = the sum of four uniforms, centred, of variance 1, so |u| <= sqrt(12): a weight is
/// u / sqrt(fan_in), a router's 4 u / sqrt(H), a bias u / 2, a learnable beta 1 + u / 4 (always
/// positive), all rounded to the config's dtype; a correction bias is 0.1 u / sqrt(12), in fp32 as
/// published ones are.
class SeededSource : public TensorSource {
 public:
  SeededSource(const ModelConfig& config, std::uint64_t seed);

  std::optional<TensorInfo> find(const std::string& name) const override;
  /// `out` must be aligned to the element. Throws Error 65 for a name or a rectangle that isn't
  /// there.
  void read(const std::string& name, Range rows, Range cols, std::byte* out) const override;
  std::string description() const override;

  /// The tensors of layer `index` as (name, info), weights first: what make-model writes.
  std::vector<std::pair<std::string, TensorInfo>> layer_tensors(std::int64_t index) const;

 private:
  struct Entry {
    TensorInfo info;
    float scale = 1.0F;
    float offset = 0.0F;
  };
  struct Layer {
    std::vector<std::string> names;
    std::map<std::string, Entry> entries;
  };
  Entry entry_of(const StoredTensor& tensor) const;
  const Layer& layer(std::int64_t index) const;
  const Entry* find_entry(const std::string& name) const;
  const Entry& entry(const std::string& name) const;

  ModelConfig config_;
  std::uint64_t seed_;
  std::map<std::string, std::int64_t> paths_;  // what a layer's names start with
  // Made when they are asked for: a mixture of experts has hundreds of tensors a layer.
  mutable std::mutex mutex_;
  mutable std::map<std::int64_t, Layer> layers_;
};

/// Seeded input x [tokens.size(), hidden] of variance 1 for global token indices `tokens`, rounded
/// to `dtype` (widened back to fp32): the values of a token don't depend on how tokens are split.
void seeded_tokens(std::uint64_t seed, Range tokens, std::int64_t hidden, DType dtype, float* out);

}  // namespace gatefold
