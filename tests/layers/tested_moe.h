#pragma once

#include <gtest/gtest.h>
#include <mpi.h>

#include <memory>
#include <string>
#include <vector>

#include "layers/moe.h"
#include "memory_moe.h"
#include "parallel/grid.h"
#include "parallel/mpi_interop.h"
#include "tests/testing_device.h"

namespace gatefold::testing {

/// A layer over a grid, on a device of its own. The kernel is chosen by the grid's world.
class TestedMoe {
 public:
  TestedMoe(const MemoryMoe& moe, const Grid& grid, const MoeOptions& options, int threads = 1)
      : TestedMoe(moe.spec, moe.source, grid, options, threads) {}
  TestedMoe(const MoeSpec& spec, const TensorSource& source, const Grid& grid,
            const MoeOptions& options, int threads = 1)
      : grid_(grid),
        device_(testing_device(threads)),
        world_(grid.world(), *device_),
        tp_(grid.tp(), *device_),
        etp_(grid.etp(), *device_),
        dtype_(options.linear.dtype),
        hidden_(spec.hidden_size),
        moe_(spec, source, {device_.get(), world_.get(), tp_.get(), etp_.get()}, options) {}

  /// y of this tp group's tokens, which are `own` of all of x.
  std::vector<std::byte> forward(const std::vector<std::byte>& x, Range own,
                                 const Choices* given = nullptr) {
    const std::int64_t row = hidden_ * size_of(dtype_);
    const std::vector<std::byte> mine(x.begin() + own.begin * row, x.begin() + own.end * row);
    OnDevice<std::byte> in(*device_, mine);
    OnDevice<std::byte> out(*device_, std::vector<std::byte>(mine.size(), std::byte{0xab}));
    const RowCount rows{own.size(), static_cast<std::int64_t>(x.size()) / row};
    if (given != nullptr) moe_.replay(*given);
    moe_.forward(in.data(), rows, out.data());
    moe_.wait();
    return out.get();
  }
  /// The training form of it.
  std::vector<std::byte> forward_training(const std::vector<std::byte>& x, Range own,
                                          std::int64_t sequence_length, SavedForBackward& saved,
                                          const Choices* given = nullptr) {
    const std::int64_t row = hidden_ * size_of(dtype_);
    const std::vector<std::byte> mine(x.begin() + own.begin * row, x.begin() + own.end * row);
    OnDevice<std::byte> in(*device_, mine);
    OnDevice<std::byte> out(*device_, std::vector<std::byte>(mine.size(), std::byte{0xab}));
    if (given != nullptr) moe_.replay(*given);
    moe_.forward(in.data(), {own.size(), static_cast<std::int64_t>(x.size()) / row}, out.data(),
                 sequence_length, saved);
    moe_.wait();
    return out.get();
  }
  /// What is in the first bytes of a buffer of its device.
  template <typename T>
  std::vector<T> read(const Buffer& buffer, std::int64_t count) const {
    std::vector<T> values(static_cast<std::size_t>(count));
    if (count == 0) return values;
    device_->download(reinterpret_cast<std::byte*>(values.data()), buffer.data(),
                      count * static_cast<std::int64_t>(sizeof(T)));
    return values;
  }
  void set_correction_bias(const std::vector<float>& bias) { moe_.set_correction_bias(bias); }
  const Moe& moe() const { return moe_; }

 private:
  const Grid& grid_;
  std::unique_ptr<Device> device_;
  DeviceGroup world_;
  DeviceGroup tp_;
  DeviceGroup etp_;
  DType dtype_;
  std::int64_t hidden_;
  Moe moe_;
};

inline MoeOptions options_for(DType dtype, Dispatcher dispatcher = Dispatcher::kAllToAll,
                              std::int64_t expert_blocks = 4) {
  MoeOptions options;
  options.linear.dtype = dtype;
  options.expert_blocks = expert_blocks;
  options.dispatcher = dispatcher;
  return options;
}

/// Of all grids of this world.
class MoeTest : public ::testing::Test {
 protected:
  /// Calls check(grid) for every grid of a world.
  template <typename Check>
  void for_every_grid(const Check& check, std::int64_t most_etp = 4) {
    for_every_grid_of(*world_, check, most_etp);
  }
  template <typename Check>
  static void for_every_grid_of(Communicator& world, const Check& check,
                                std::int64_t most_etp = 4) {
    const std::int64_t size = world.size();
    for (std::int64_t tp = 1; tp <= size; ++tp) {
      for (std::int64_t ep = 1; ep <= size; ++ep) {
        if (size % tp != 0 || size % ep != 0 || size / ep > most_etp) continue;
        check(Grid(world, tp, ep));
      }
    }
  }
  std::unique_ptr<Communicator> world_ = make_mpi_communicator(MPI_COMM_WORLD);
};

inline std::string name_of(const Grid& grid) {
  return "tp " + std::to_string(grid.tp().size()) + ", ep " + std::to_string(grid.ep());
}

}  // namespace gatefold::testing
