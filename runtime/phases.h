#pragma once

#include "runtime/device.h"

namespace gatefold {

/// Names the phases of a computation for the device's profiler: one lasts until the next begins or
/// this object ends. A phase that has phases of its own, of another object, contains them.
class Phases {
 public:
  explicit Phases(Device& device) : device_(device) {}
  ~Phases() { leave(); }
  Phases(const Phases&) = delete;
  Phases& operator=(const Phases&) = delete;

  /// `name`: a string literal.
  void enter(const char* name) {
    leave();
    device_.begin_range(name);
    if (device_.range_observer()) device_.range_observer()(name);
    inside_ = true;
  }

 private:
  void leave() {
    if (inside_) device_.end_range();
    if (inside_ && device_.range_observer()) device_.range_observer()(nullptr);
    inside_ = false;
  }

  Device& device_;
  bool inside_ = false;
};

}  // namespace gatefold
