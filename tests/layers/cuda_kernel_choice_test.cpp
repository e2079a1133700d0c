// Ranks whose GPU libraries would choose differently, by the stand-ins' settings. On a GPU, where
// nobody reads those, all of them choose alike.
#include <gmock/gmock.h>
#include <mpi.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layers/kernel_choice.h"
#include "parallel/mpi_interop.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

using ::testing::HasSubstr;

const std::vector<WeightShape> kShapes = {{64, 64, false}};

/// Sets a variable of this rank's environment for a test.
class Setting {
 public:
  Setting(std::string name, const std::string& value) : name_(std::move(name)) {
    setenv(name_.c_str(), value.c_str(), 1);
  }
  ~Setting() { unsetenv(name_.c_str()); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  std::string name_;
};

class CudaKernelChoice : public ::testing::Test {
 protected:
  bool last_rank() const { return comm_->rank() + 1 == comm_->size(); }
  KernelChoice choose(DType dtype) { return choose_kernel(*comm_, *device_, dtype, kShapes); }

  std::unique_ptr<Communicator> comm_ = make_mpi_communicator(MPI_COMM_WORLD);
  std::unique_ptr<Device> device_ = make_cuda_device(comm_->rank());
};

TEST_F(CudaKernelChoice, RanksThatWouldChooseDifferentlyGetTheSameBits) {
  const Setting ranking("GATEFOLD_FAKE_GPU_GEMM_RANKING", std::to_string(comm_->rank()));
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    // Ends in an error where two ranks have other bits.
    const KernelChoice choice = choose(dtype);
    EXPECT_EQ(choice.kernel, GemmKernel::kLibraryTiles);
    EXPECT_THAT(choice.name, HasSubstr("cuBLASLt algorithm"));
  }
}

TEST_F(CudaKernelChoice, AGroupsLaterChoiceLeavesWhatAllRanksAgreedOn) {
  const Setting ranking("GATEFOLD_FAKE_GPU_GEMM_RANKING", std::to_string(comm_->rank()));
  choose(DType::kBf16);
  const auto agreed = device_->choose_gemms(kShapes, DType::kBf16);
  const auto alone = make_self_communicator();
  choose_kernel(*alone, *device_, DType::kBf16, kShapes);
  EXPECT_EQ(device_->choose_gemms(kShapes, DType::kBf16), agreed);
}

TEST_F(CudaKernelChoice, AChoiceThatOneRankCannotRunLeavesThePlainKernelToAll) {
  if (std::getenv("GATEFOLD_FAKE_GPU") == nullptr) {
    GTEST_SKIP() << "only a stand-in refuses a shape when asked";
  }
  std::optional<Setting> refused;
  if (last_rank()) refused.emplace("GATEFOLD_FAKE_GPU_GEMM_UNSUPPORTED", "64x256x64");
  const KernelChoice choice = choose(DType::kBf16);
  EXPECT_EQ(choice.kernel, GemmKernel::kPlain);
  EXPECT_THAT(choice.name, HasSubstr("no GEMM that runs on every rank"));
}

TEST_F(CudaKernelChoice, ADemandForTf32OnOneRankEndsAllButOnlyInF32) {
  std::optional<Setting> demand;
  if (last_rank()) demand.emplace("NVIDIA_TF32_OVERRIDE", "1");
  EXPECT_EQ(choose(DType::kBf16).kernel, GemmKernel::kLibraryTiles);
  try {
    choose(DType::kF32);
    ADD_FAILURE() << "went on";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_THAT(error.what(), HasSubstr("NVIDIA_TF32_OVERRIDE is 1"));
  }
}

}  // namespace
}  // namespace gatefold
