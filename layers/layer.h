#pragma once

#include <variant>
#include <vector>

#include "layers/mlp.h"
#include "layers/moe.h"

namespace gatefold {

/// What a layer of either kind computes, and where its weights lie.
using LayerSpec = std::variant<FfnSpec, MoeSpec>;

inline bool is_moe(const LayerSpec& spec) { return std::holds_alternative<MoeSpec>(spec); }
inline std::int64_t hidden_size(const LayerSpec& spec) {
  return std::visit([](const auto& one) { return one.hidden_size; }, spec);
}

/// The distinct block shapes of a layer, over all ranks: what its kernel is chosen for.
std::vector<WeightShape> layer_shapes(const LayerSpec& spec, const MoeOptions& options);

/// A dense layer or a mixture of experts, for those who don't mind which.
class Layer {
 public:
  /// See Mlp, which takes place.tp and options.linear only, and Moe.
  Layer(const LayerSpec& spec, const TensorSource& source, const MoePlace& place,
        const MoeOptions& options);

  void reserve(const RowCount& rows) {
    std::visit([&](auto& layer) { layer.reserve(rows); }, layer_);
  }
  /// x [rows.local, H] → y [rows.local, H]. Collective.
  void forward(const std::byte* x, const RowCount& rows, std::byte* y) {
    std::visit([&](auto& layer) { layer.forward(x, rows, y); }, layer_);
  }
  void wait() {
    std::visit([](auto& layer) { layer.wait(); }, layer_);
  }
  /// Null for a dense layer.
  Moe* moe() { return std::get_if<Moe>(&layer_); }
  const Moe* moe() const { return std::get_if<Moe>(&layer_); }

 private:
  using Either = std::variant<Mlp, Moe>;
  static Either make(const LayerSpec& spec, const TensorSource& source, const MoePlace& place,
                     const MoeOptions& options);
  Either layer_;
};

}  // namespace gatefold
