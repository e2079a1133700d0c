#include "launch/kernel_names.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "launch/options.h"

namespace gatefold {

std::string KernelNames::text() const {
  std::vector<std::string> parts;
  for (const auto& [name, layers] : layers_) {
    parts.push_back(layers_.size() == 1 ? name
                                        : fmt::format("{} (layers {})", name, layer_text(layers)));
  }
  return fmt::format("{}", fmt::join(parts, "; "));
}

}  // namespace gatefold
