#include "layers/layer.h"

#include "layers/kernel_choice.h"

namespace gatefold {

std::vector<WeightShape> layer_shapes(const LayerSpec& spec, const MoeOptions& options) {
  if (const auto* moe = std::get_if<MoeSpec>(&spec)) return moe_shapes(*moe, options);
  return ffn_shapes(std::get<FfnSpec>(spec), options.linear.blocks);
}

Layer::Layer(const LayerSpec& spec, const TensorSource& source, const MoePlace& place,
             const MoeOptions& options)
    : layer_(make(spec, source, place, options)) {}

Layer::Either Layer::make(const LayerSpec& spec, const TensorSource& source, const MoePlace& place,
                          const MoeOptions& options) {
  if (const auto* moe = std::get_if<MoeSpec>(&spec)) {
    return Either(std::in_place_type<Moe>, *moe, source, place, options);
  }
  return Either(std::in_place_type<Mlp>, std::get<FfnSpec>(spec), source,
                Place{place.device, place.tp}, MlpOptions{.linear = options.linear});
}

}  // namespace gatefold
