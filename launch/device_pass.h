#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layers/mlp.h"
#include "runtime/device.h"

namespace gatefold {

/// x and y of one layer in device memory: what lies between its forward() and the host.
class DevicePass {
 public:
  /// Allocates both, copies x [rows.local, H] from the host and fills y with ones, a NaN in every
  /// dtype. Throws Error 71.
  DevicePass(Device& device, const std::byte* host_x, const RowCount& rows, std::int64_t row_bytes);

  /// Returns when y is there. Allocates nothing where `layer`, an Mlp, Moe or Layer, has reserved
  /// its rows. Collective over the layer's group.
  template <typename AnyLayer>
  void forward(AnyLayer& layer) {
    layer.forward(x_.data(), rows_, y_.data());
    layer.wait();
  }
  /// y [rows.local, H] on the host.
  std::vector<std::byte> y() const;

 private:
  Device& device_;
  RowCount rows_;
  Buffer x_;
  Buffer y_;
};

}  // namespace gatefold
