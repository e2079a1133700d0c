#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layers/model_config.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// A model whose experts lie in another of its family's layouts: other tensors, the same values.
class RelaidSource final : public TensorSource {
 public:
  /// `source` has the layers' tensors as `config` spells them without its moe->spelling, in the
  /// family's canonical way; no family with two has biases on its experts, nor a transposed one but
  /// for its canonical one.
  RelaidSource(const ModelConfig& config, std::unique_ptr<TensorSource> source,
               const std::vector<std::int64_t>& layers);

  std::optional<TensorInfo> find(const std::string& name) const override;
  void read(const std::string& name, Range rows, Range cols, std::byte* out) const override;
  std::string description() const override { return source_->description(); }

 private:
  /// Whole rows of a tensor, which are rows from `first` on of one of the source's, or, turned,
  /// columns from `first` on, of which `first_row` is the first element.
  struct Run {
    Range rows;
    std::string name;
    std::int64_t first = 0;
    bool turned = false;
    std::int64_t first_row = 0;
  };
  struct Tensor {
    TensorInfo info;
    std::vector<Run> runs;
  };
  void read_turned(const Run& run, Range rows, Range cols, std::byte* out) const;
  void add(const TensorRef& here, const TensorRef& there, std::int64_t rows);
  void add_layer(const MoeSpec& here, const MoeSpec& there);

  std::unique_ptr<TensorSource> source_;
  std::map<std::string, Tensor> tensors_;  // of mixtures; others are as in the source
};

}  // namespace gatefold
