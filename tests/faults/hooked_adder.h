#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "tests/runtime/counting_device.h"

namespace gatefold {

/// A device that has its roots looked at, and put in another order, just before it adds them:
/// between the fences of a sum in shared memory.
class HookedAdder final : public testing::CountingDevice {
 public:
  using Hook = std::function<void(std::vector<const float*>& roots)>;

  HookedAdder(Device& device, Hook hook)
      : testing::CountingDevice(device), hook_(std::move(hook)) {}

  void sum_roots(const RootSum& sum) override {
    std::vector<const float*> roots(sum.roots.begin(), sum.roots.end());
    hook_(roots);
    RootSum hooked = sum;
    hooked.roots = roots;
    testing::CountingDevice::sum_roots(hooked);
  }

 private:
  Hook hook_;
};

}  // namespace gatefold
