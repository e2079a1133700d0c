#pragma once

#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <functional>
#include <memory>

#include "layers/weights.h"
#include "parallel/mpi_interop.h"
#include "tests/testing_device.h"

namespace gatefold::testing {

/// What tests of one layer on groups of ranks start from.
class GroupTest : public ::testing::Test {
 protected:
  /// Calls check(place) on the first tp ranks, for every tp up to `most`.
  void for_every_group(std::int64_t most, const std::function<void(const Place&)>& check) {
    for (int tp = 1; tp <= std::min<std::int64_t>(world_->size(), most); ++tp) {
      const auto group = world_->split(world_->rank() < tp ? 0 : 1);
      if (world_->rank() >= tp) continue;
      const DeviceGroup on_device(*group, *device_);
      check({device_.get(), on_device.get()});
    }
  }
  Place alone() const { return {device_.get(), device_self_.get()}; }
  Place all() const { return {device_.get(), device_world_.get()}; }

  std::unique_ptr<Communicator> world_ = make_mpi_communicator(MPI_COMM_WORLD);
  std::unique_ptr<Communicator> self_ = make_self_communicator();
  std::unique_ptr<Device> device_ = testing_device();

 private:
  DeviceGroup device_self_{*self_, *device_};
  DeviceGroup device_world_{*world_, *device_};
};

}  // namespace gatefold::testing
