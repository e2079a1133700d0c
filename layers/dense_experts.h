#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "layers/model_config.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// How the neurons of a dense layer become those of E experts.
enum class DenseInto {
  kParts,   // expert e has I / E neighbours of them: y is E times less, since each weighs 1 / E
  kCopies,  // each has all: y is the same
};

struct DenseExperts {
  DenseInto into = DenseInto::kParts;
  std::int64_t experts = 0;  // E
};

/// The config of the qwen3_moe model whose layers are `dense`'s made into experts: k is E for parts
/// and 1 for copies, unless `overrides` (num_experts_per_tok, norm_topk_prob and no other) say
/// otherwise. Throws Error 64 for an override of another field and for parts that aren't equal,
/// 65 for a layer that this family can't say: without a gate, with biases, a learnable beta or
/// clamps.
ModelConfig experts_config(const ModelConfig& dense, const DenseExperts& how, DType dtype,
                           const std::vector<std::pair<std::string, std::string>>& overrides);

/// The tensors of such a model, read out of a dense one's as they are asked for. Routers are zeros:
/// all experts are equally good, and ties go to the lowest ids.
class DenseExpertsSource final : public TensorSource {
 public:
  /// `source` must outlive this. Throws as resolve_layer(), and Error 64 for a layer that is no
  /// dense one.
  DenseExpertsSource(const ModelConfig& dense, const TensorSource& source, const DenseExperts& how,
                     const ModelConfig& made, const std::vector<std::int64_t>& layers);

  std::optional<TensorInfo> find(const std::string& name) const override;
  void read(const std::string& name, Range rows, Range cols, std::byte* out) const override;
  std::string description() const override;

 private:
  struct Part {
    std::string name;  // of the dense tensor; empty: zeros
    TensorInfo info;
    std::int64_t first_row = 0;
    std::int64_t first_column = 0;
  };
  void add(const std::string& name, const TensorRef& ref, Range rows, Range columns);

  const TensorSource& source_;
  DenseExperts how_;
  std::map<std::string, Part> parts_;
};

}  // namespace gatefold
