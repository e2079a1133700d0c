#include "launch/device_pass.h"

namespace gatefold {

DevicePass::DevicePass(Device& device, const std::byte* host_x, const RowCount& rows,
                       std::int64_t row_bytes)
    : device_(device), rows_(rows) {
  const std::int64_t bytes = rows.local * row_bytes;
  x_ = device.allocate(bytes);
  y_ = device.allocate(bytes);
  if (bytes == 0) return;
  device.upload(x_.data(), host_x, bytes);
  device.fill(y_.data(), std::byte{0xff}, bytes);
}

std::vector<std::byte> DevicePass::y() const {
  std::vector<std::byte> host(static_cast<std::size_t>(y_.bytes()));
  if (!host.empty()) device_.download(host.data(), y_.data(), y_.bytes());
  return host;
}

}  // namespace gatefold
