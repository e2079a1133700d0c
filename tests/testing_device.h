#pragma once

#include <cstdlib>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/device_communicator.h"
#include "parallel/session.h"
#include "runtime/device.h"
#include "tests/runtime/counting_device.h"

/// What tests compute on comes from outside, so that one program tests every device:
/// GATEFOLD_TEST_DEVICE=cpu (if unset) or cuda, and GATEFOLD_TEST_COMM=mpi (if unset) or nccl for
/// what moves a GPU's tensors.
namespace gatefold::testing {

/// Whether the variable has the second of its two values; unset is the first.
inline bool chosen(const char* variable, std::string_view first, std::string_view second) {
  const char* text = std::getenv(variable);
  const std::string_view value = text == nullptr ? first : text;
  if (value != first && value != second) throw std::invalid_argument(variable);
  return value == second;
}
inline bool on_cuda() { return chosen("GATEFOLD_TEST_DEVICE", "cpu", "cuda"); }
inline CommKind testing_comm() {
  return chosen("GATEFOLD_TEST_COMM", "mpi", "nccl") ? CommKind::kNccl : CommKind::kMpi;
}

/// Whether the GPU is a stand-in: it allocates on the host where a GPU doesn't, and it is slow.
inline bool on_stand_in(const Device& device) {
  return device.description().find("FakeGPU") != std::string::npos;
}

/// Checks the GEMMs of a shape once in a process: stand-ins take long, and find the same each time.
class CheckedOnce final : public CountingDevice {
 public:
  using CountingDevice::CountingDevice;
  SelfCheck self_check(const WeightShape& shape, DType storage) override {
    static std::map<std::tuple<std::int64_t, std::int64_t, bool, DType>, SelfCheck> found;
    const auto key = std::make_tuple(shape.outputs, shape.inputs, shape.gated, storage);
    const auto known = found.find(key);
    if (known != found.end()) return known->second;
    return found[key] = CountingDevice::self_check(shape, storage);
  }
};

/// The device under test; `threads` are a CPU's.
inline std::unique_ptr<Device> testing_device(int threads = 1) {
  if (!on_cuda()) return make_cpu_device(threads);
  std::unique_ptr<Device> device = make_cuda_device(launched_rank());
  if (!on_stand_in(*device)) return device;
  return std::make_unique<CheckedOnce>(std::move(device));
}

/// The device itself: NCCL wants its stream.
inline Device& innermost(Device& device) {
  const auto* around = dynamic_cast<const CountingDevice*>(&device);
  return around == nullptr ? device : innermost(around->counted());
}

/// The ranks of a group for tensors of a device, both of which must outlive it. Collective.
class DeviceGroup {
 public:
  DeviceGroup(Communicator& group, Device& device)
      : own_(make_device_communicator(group, innermost(device),
                                      group.size() == 1 ? CommKind::kMpi : testing_comm(), 60)),
        group_(own_ ? *own_ : group) {}
  Communicator* get() const { return &group_; }

 private:
  std::unique_ptr<Communicator> own_;
  Communicator& group_;
};

/// Values where a layer finds them: in the device's memory, which is a vector of just this size
/// where the host can read it, so that sanitizers see a step beyond.
template <typename T>
class OnDevice {
 public:
  OnDevice(Device& device, std::vector<T> values) : device_(&device), values_(std::move(values)) {
    if (device.in_host_memory() || values_.empty()) return;
    memory_ = device.allocate(bytes());
    device.upload(memory_.data(), reinterpret_cast<const std::byte*>(values_.data()), bytes());
  }

  T* data() { return memory_.bytes() > 0 ? memory_.template as<T>() : values_.data(); }
  /// What is there now.
  std::vector<T> get() const {
    std::vector<T> values = values_;
    if (memory_.bytes() > 0) {
      device_->download(reinterpret_cast<std::byte*>(values.data()), memory_.data(), bytes());
    } else {
      device_->synchronize();
    }
    return values;
  }

 private:
  std::int64_t bytes() const { return static_cast<std::int64_t>(values_.size() * sizeof(T)); }

  Device* device_;
  std::vector<T> values_;
  Buffer memory_;
};

}  // namespace gatefold::testing
