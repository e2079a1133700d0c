// What all ranks multiply with, given what each rank's self-check found.
#include "layers/kernel_choice.h"

#include <gmock/gmock.h>
#include <mpi.h>

#include <functional>
#include <string>
#include <vector>

#include "parallel/mpi_interop.h"
#include "runtime/error.h"
#include "tests/runtime/counting_device.h"
#include "tests/testing_device.h"

namespace gatefold {
namespace {

using ::testing::HasSubstr;

/// A device whose self-check finds what the test says.
class CheckedDevice final : public testing::CountingDevice {
 public:
  using Finding = std::function<SelfCheck(const WeightShape&)>;
  explicit CheckedDevice(Finding finding)
      : CountingDevice(testing::testing_device()), finding_(std::move(finding)) {}
  SelfCheck self_check(const WeightShape& shape, DType) override { return finding_(shape); }

 private:
  Finding finding_;
};

/// A device whose library would choose what the test says.
class ChoosingDevice final : public testing::CountingDevice {
 public:
  using Bytes = std::vector<std::byte>;
  explicit ChoosingDevice(std::function<Bytes()> choose)
      : CountingDevice(make_cpu_device(1)), choose_(std::move(choose)) {}
  Bytes choose_gemms(std::span<const WeightShape>, DType) override { return choose_(); }
  void pin_gemms(std::span<const WeightShape> shapes, DType,
                 std::span<const std::byte> choices) override {
    shapes_ = shapes.size();
    pinned_.assign(choices.begin(), choices.end());
  }
  SelfCheck self_check(const WeightShape&, DType) override {
    return {true, true, "some kernel", static_cast<std::uint64_t>(pinned_.size())};
  }
  std::size_t shapes() const { return shapes_; }
  const Bytes& pinned() const { return pinned_; }

 private:
  std::function<Bytes()> choose_;
  std::size_t shapes_ = 0;
  Bytes pinned_;
};

const std::vector<WeightShape> kShapes = {{64, 32, true}, {32, 64, false}, {96, 32, true}};

class ChooseKernel : public ::testing::Test {
 protected:
  KernelChoice choose(const CheckedDevice::Finding& finding, bool trust_library = true) {
    CheckedDevice device(finding);
    return choose_kernel(*comm_, device, DType::kF32, kShapes, trust_library);
  }
  bool last_rank() const { return comm_->rank() + 1 == comm_->size(); }

  std::unique_ptr<Communicator> comm_ = make_mpi_communicator(MPI_COMM_WORLD);
};

TEST_F(ChooseKernel, ALibraryThatPassesOnEveryRankIsUsed) {
  const KernelChoice choice = choose([](const WeightShape&) {
    return SelfCheck{true, true, "some kernel", 7};
  });
  EXPECT_EQ(choice.kernel, GemmKernel::kLibraryTiles);
  EXPECT_EQ(choice.name, "some kernel");
}

TEST_F(ChooseKernel, OneFailedShapeOnOneRankTakesTheLibraryFromAll) {
  for (const WeightShape& failing : kShapes) {
    const KernelChoice choice = choose([&](const WeightShape& shape) {
      return SelfCheck{!(last_rank() && shape == failing), true, "some kernel", 7};
    });
    EXPECT_EQ(choice.kernel, GemmKernel::kPlain);
    EXPECT_THAT(choice.name, HasSubstr("failed the self-check"));
  }
}

TEST_F(ChooseKernel, OneShapeWithTheWrongColumnsOnOneRankLeavesOneWidthToAll) {
  for (const WeightShape& failing : kShapes) {
    const KernelChoice choice = choose([&](const WeightShape& shape) {
      return SelfCheck{true, !(last_rank() && shape == failing), "some kernel", 7};
    });
    EXPECT_EQ(choice.kernel, GemmKernel::kLibraryPanels);
    EXPECT_EQ(choice.name, "some kernel, panels of one width");
  }
}

TEST_F(ChooseKernel, ARankThatDoesNotTrustTheLibraryTakesItFromAll) {
  const KernelChoice choice = choose(
      [](const WeightShape&) {
        return SelfCheck{true, true, "some kernel", 7};
      },
      !last_rank());
  EXPECT_EQ(choice.kernel, GemmKernel::kPlain);
}

TEST_F(ChooseKernel, NoKernelAtAllIsNamedAsThat) {
  const KernelChoice choice = choose([](const WeightShape&) { return SelfCheck{}; });
  EXPECT_EQ(choice.kernel, GemmKernel::kPlain);
  EXPECT_THAT(choice.name, HasSubstr("no GEMM that runs on every rank"));
}

TEST_F(ChooseKernel, EveryRankRunsWhatRank0sLibraryWouldChoose) {
  // Another number of bytes on each rank, so that none can take its own for rank 0's.
  const auto own = [&] {
    return ChoosingDevice::Bytes(static_cast<std::size_t>(7 + comm_->rank()),
                                 std::byte(comm_->rank()));
  };
  ChoosingDevice device(own);
  choose_kernel(*comm_, device, DType::kF32, kShapes);
  EXPECT_EQ(device.shapes(), kShapes.size());
  EXPECT_EQ(device.pinned(), ChoosingDevice::Bytes(7, std::byte{0}));
}

TEST_F(ChooseKernel, ALibraryThatFailsToChooseEndsAllRanks) {
  ChoosingDevice device(
      []() -> ChoosingDevice::Bytes { throw Error(ExitCode::kBackend, "no choice (planted)"); });
  try {
    choose_kernel(*comm_, device, DType::kF32, kShapes);
    ADD_FAILURE() << "went on";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kBackend);
    EXPECT_THAT(error.what(), HasSubstr("no choice (planted)"));
  }
}

TEST_F(ChooseKernel, RanksThatGotOtherBitsOfAnyShapeMustNotMix) {
  for (const WeightShape& other : kShapes) {
    const auto ends_with = [&] {
      try {
        choose([&](const WeightShape& shape) {
          return SelfCheck{true, true, "some kernel", last_rank() && shape == other ? 8U : 7U};
        });
      } catch (const Error& error) {
        return std::string(error.what());
      }
      return std::string("no error");
    };
    EXPECT_THAT(ends_with(), HasSubstr(comm_->size() == 1 ? "no error" : "self-check results"));
  }
}

}  // namespace
}  // namespace gatefold
