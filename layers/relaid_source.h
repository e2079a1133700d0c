#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "layers/model_config.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// One mixture of experts in two of its family's layouts.
struct RelaidLayer {
  MoeSpec here;   // as it is to be seen
  MoeSpec there;  // as the source has it
};

/// A model whose experts lie in another of its family's layouts: other tensors, the same values.
class RelaidSource final : public TensorSource {
 public:
  /// `source` has the tensors of each layer's `there`. Throws Error 65 where what becomes one
  /// tensor is stored in several types.
  RelaidSource(std::unique_ptr<TensorSource> source, const std::vector<RelaidLayer>& layers);
  /// `source` has the layers' tensors as `config` spells them without its moe->spelling, in the
  /// family's canonical way.
  RelaidSource(const ModelConfig& config, std::unique_ptr<TensorSource> source,
               const std::vector<std::int64_t>& layers);

  std::optional<TensorInfo> find(const std::string& name) const override;
  void read(const std::string& name, Range rows, Range cols, std::byte* out) const override;
  std::string description() const override { return source_->description(); }

  /// The mixtures' tensors in name order; all others are as in the source.
  std::map<std::string, TensorInfo> relaid() const;
  /// Whether it is read by columns of the source's tensors: the more of it at a time, the better.
  bool is_turned(const std::string& name) const;
  /// The source's tensors that they are made of.
  const std::set<std::string>& used() const { return used_; }

 private:
  /// A matrix [out, in] of `size`, or a vector as [out, 1], in both layouts.
  struct Run {
    TensorRef here, there;
    Extent size;
  };
  static bool is_turned(const Run& run) {
    return run.size.columns > 1 && run.here.transposed != run.there.transposed;
  }
  struct Tensor {
    TensorInfo info;
    std::vector<Run> runs;
  };
  /// What of `run` lies in rows x cols of its tensor, into `out`, which holds those.
  void read_run(const Run& run, Range rows, Range cols, std::int64_t element, std::byte* out) const;
  void add(const TensorRef& here, const TensorRef& there, Extent size);
  void add_layer(const MoeSpec& here, const MoeSpec& there);

  std::unique_ptr<TensorSource> source_;
  std::map<std::string, Tensor> tensors_;  // of mixtures
  std::set<std::string> used_;
};

}  // namespace gatefold
