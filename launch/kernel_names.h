#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "launch/report.h"

namespace gatefold {

/// The kernels that layers use, for the report's header.
class KernelNames {
 public:
  void add(std::int64_t layer, const std::string& name) { layers_[name].push_back(layer); }
  /// "NAME", with the layers where they don't all have the same.
  std::string text() const;
  /// That as the fact "kernel".
  void state(Report& report) const { report.fact("kernel", text()); }

 private:
  std::map<std::string, std::vector<std::int64_t>> layers_;
};

}  // namespace gatefold
