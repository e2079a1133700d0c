// What a process is told that can't get hold of its GPU, or loses it. Each test runs alone, in an
// environment in which the stand-ins fail: see tests/fake_gpu/product.cmake.
#include <gmock/gmock.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/device.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

void expect_error(const std::function<void()>& run, ExitCode code,
                  const ::testing::Matcher<std::string>& text) {
  try {
    run();
    ADD_FAILURE() << "went on";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(std::string(error.what()), text);
  }
}

void expect_no_device(ExitCode code, const ::testing::Matcher<std::string>& text) {
  expect_error([] { make_cuda_device(0); }, code, text);
}

TEST(CudaSetUp, NoDevice) {
  EXPECT_EQ(visible_cuda_devices().count, 0);
  expect_no_device(ExitCode::kUnavailable, AllOf(HasSubstr("no CUDA device (no CUDA-capable"),
                                                 HasSubstr("CUDA_VISIBLE_DEVICES")));
}

TEST(CudaSetUp, OldDriver) {
  expect_no_device(ExitCode::kUnavailable,
                   AllOf(HasSubstr("CUDA driver version is insufficient"), HasSubstr(": 12.4, not"),
                         HasSubstr("whose driver must be for CUDA 13 or later")));
}

TEST(CudaSetUp, NoDriver) {
  expect_no_device(ExitCode::kUnavailable, HasSubstr(": there is no driver); look at nvidia-smi"));
}

TEST(CudaSetUp, OldGpu) {
  EXPECT_EQ(visible_cuda_devices().count, 0);  // so that --device auto takes the CPU
  expect_no_device(ExitCode::kUnavailable,
                   AllOf(HasSubstr("GPU 0 is of compute capability 7.5"), HasSubstr("and later")));
}

TEST(CudaSetUp, NoCublas) {
  expect_no_device(ExitCode::kUnavailable,
                   AllOf(HasSubstr("cuBLASLt can't be used"), HasSubstr("driver's version")));
}

TEST(CudaSetUp, NoMemoryForTheWorkspace) {
  expect_no_device(ExitCode::kOutOfMemory, HasSubstr("33554432 bytes of GPU memory could not be "
                                                     "had (16777216 of 16777216 are free)"));
}

TEST(CudaSetUp, NoPinnedMemory) {
  const auto device = make_cuda_device(0);
  expect_error(
      [&] {
        device->allocate_weight({64, 64, false}, DType::kBf16, GemmKernel::kPlain);
      },
      ExitCode::kOutOfMemory, HasSubstr("8388608 bytes of pinned host memory"));
  // And goes on as if nothing had been.
  device->allocate_weight({64, 64, false}, DType::kBf16, GemmKernel::kPlain);
  device->synchronize();
}

TEST(CudaSetUp, NoMemoryForAStep) {
  const auto device = make_cuda_device(0);
  const WeightShape shape{4096, 64, false};
  expect_error([&] { device->prepare(shape, DType::kF32, GemmKernel::kPlain, 4096); },
               ExitCode::kOutOfMemory, HasSubstr("67108864 bytes of GPU memory could not be had"));
}

TEST(CudaSetUp, NoAlgorithm) {
  const auto device = make_cuda_device(0);
  const WeightShape shape{192, 64, false};
  expect_error([&] { device->prepare(shape, DType::kBf16, GemmKernel::kLibraryWhole, 33); },
               ExitCode::kBackend,
               HasSubstr("cuBLASLt has no algorithm for 33 x 192 x 64 in bf16 (rows, columns,"));
  // The canonical tiles have another kernel to go to.
  device->pin_gemms({&shape, 1}, DType::kBf16, device->choose_gemms({&shape, 1}, DType::kBf16));
  EXPECT_FALSE(device->self_check(shape, DType::kBf16).rows);
}

TEST(CudaSetUp, LostDevice) {
  auto device = make_cuda_device(0);
  const Buffer outlives = device->allocate(64);
  const Buffer pinned = device->allocate_host(64);
  device->copy_rows(outlives.data(), 32, outlives.data(), 32, 1, 32);
  for (int i = 0; i < 2; ++i) {
    expect_error([&] { device->synchronize(); }, ExitCode::kBackend,
                 HasSubstr("the GPU's work failed (cudaErrorLaunchFailure"));
  }
  expect_error([&] { device->allocate(64); }, ExitCode::kBackend, HasSubstr("failed"));
  device.reset();
}

}  // namespace
}  // namespace gatefold
