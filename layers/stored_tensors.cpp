#include "layers/stored_tensors.h"

#include <optional>
#include <set>
#include <utility>

namespace gatefold {
namespace {

// Tensors by first mention, each once.
class TensorList {
 public:
  void add(const TensorRef& ref, TensorRole role, std::int64_t fan_in) {
    if (!seen_.insert(ref.name).second) return;
    tensors_.push_back(
        {.name = ref.name, .shape = ref.stored_shape, .role = role, .fan_in = fan_in});
  }
  void add(const std::optional<TensorRef>& ref, TensorRole role) {
    if (ref) add(*ref, role, 1);
  }
  void add(const FfnSpec& spec) {
    if (spec.gate) add(*spec.gate, TensorRole::kWeight, spec.hidden_size);
    add(spec.up, TensorRole::kWeight, spec.hidden_size);
    add(spec.down, TensorRole::kWeight, spec.intermediate_size);
    for (const auto* bias : {&spec.gate_bias, &spec.up_bias, &spec.down_bias}) {
      add(*bias, TensorRole::kBias);
    }
    if (spec.swish_beta) add(TensorRef{*spec.swish_beta}, TensorRole::kSwishBeta, 1);
  }
  std::vector<StoredTensor> take() { return std::move(tensors_); }

 private:
  std::vector<StoredTensor> tensors_;
  std::set<std::string> seen_;
};

}  // namespace

std::vector<StoredTensor> stored_tensors(const FfnSpec& spec) {
  TensorList list;
  list.add(spec);
  return list.take();
}

std::vector<StoredTensor> stored_tensors(const MoeSpec& spec) {
  TensorList list;
  list.add(spec.router, TensorRole::kRouter, spec.hidden_size);
  list.add(spec.router_bias, TensorRole::kRouterBias);
  list.add(spec.correction_bias, TensorRole::kCorrectionBias);
  for (const FfnSpec& expert : spec.experts) list.add(expert);
  for (const FfnSpec& expert : spec.shared) list.add(expert);
  if (spec.shared_gate) list.add(*spec.shared_gate, TensorRole::kSharedGate, spec.hidden_size);
  return list.take();
}

}  // namespace gatefold
