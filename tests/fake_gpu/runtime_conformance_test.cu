// What the host side of CUDA promises, on a GPU and on the stand-in.
#include <atomic>
#include <cstddef>
#include <cstring>
#include <future>
#include <string>
#include <vector>

#define DYNAMIC_SHARED(T, name)                            \
  extern __shared__ __align__(16) unsigned char name##_[]; \
  T* name = reinterpret_cast<T*>(name##_)

#include "tests/fake_gpu/conformance.h"
#include "tests/fake_gpu/conformance_kernels.cuh"

namespace conformance {
namespace {

class OwnStream {
 public:
  explicit OwnStream(unsigned flags = cudaStreamNonBlocking) {
    EXPECT_CUDA(cudaStreamCreateWithFlags(&stream_, flags));
  }
  ~OwnStream() { EXPECT_CUDA(cudaStreamDestroy(stream_)); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Holds a stream up until open().
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    EXPECT_CUDA(cudaLaunchHostFunc(
        stream, [](void* gate) { static_cast<Gate*>(gate)->opened_.get_future().wait(); }, this));
  }
  void open() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

cudaError_t query_and_forget(cudaStream_t stream) {
  const cudaError_t status = cudaStreamQuery(stream);
  static_cast<void>(cudaGetLastError());  // "not ready" counts as an error
  return status;
}

TEST(Streams, AQueryTellsTheTruth) {
  const OwnStream stream;
  EXPECT_CUDA(cudaStreamQuery(stream));
  Gate gate(stream);
  EXPECT_EQ(cudaErrorNotReady, query_and_forget(stream));
  gate.open();
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_CUDA(cudaStreamQuery(stream));
}

TEST(Streams, KeepTheirOrder) {
  const OwnStream stream;
  constexpr int kCount = 1000;
  const DeviceArray<int> array(kCount);
  Gate gate(stream);
  set_all<<<4, 256, 0, stream>>>(array.data(), kCount, 40);
  ASSERT_CUDA(cudaGetLastError());
  for (int i = 0; i < 5; ++i) {
    add_one<<<4, 256, 0, stream>>>(array.data(), kCount);
    ASSERT_CUDA(cudaGetLastError());
  }
  gate.open();
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(std::vector<int>(kCount, 45), array.values());
}

TEST(Streams, OneWaitsForAnothersEvent) {
  const OwnStream first;
  const OwnStream second;
  const DeviceArray<int> array(std::vector<int>{0});
  cudaEvent_t event = nullptr;
  ASSERT_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  EXPECT_CUDA(cudaStreamWaitEvent(second, event, 0));  // never recorded: nothing to wait for
  Gate gate(first);
  set_all<<<1, 1, 0, first>>>(array.data(), 1, 10);
  ASSERT_CUDA(cudaGetLastError());
  EXPECT_CUDA(cudaEventRecord(event, first));
  EXPECT_CUDA(cudaStreamWaitEvent(second, event, 0));
  add_one<<<1, 1, 0, second>>>(array.data(), 1);
  ASSERT_CUDA(cudaGetLastError());
  EXPECT_EQ(cudaErrorNotReady, query_and_forget(second));
  EXPECT_EQ(cudaErrorNotReady, cudaEventQuery(event));
  static_cast<void>(cudaGetLastError());
  gate.open();
  EXPECT_CUDA(cudaStreamSynchronize(second));
  EXPECT_CUDA(cudaEventQuery(event));
  EXPECT_EQ(std::vector<int>{11}, array.values());
  EXPECT_CUDA(cudaEventDestroy(event));
}

TEST(Streams, AWaitIsForTheRecordBeforeIt) {
  const OwnStream first;
  const OwnStream second;
  cudaEvent_t event = nullptr;
  ASSERT_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  EXPECT_CUDA(cudaEventRecord(event, first));
  Gate gate(first);
  EXPECT_CUDA(cudaStreamWaitEvent(second, event, 0));
  EXPECT_CUDA(cudaEventRecord(event, first));
  EXPECT_CUDA(cudaStreamSynchronize(second));  // though the second record waits at the gate
  gate.open();
  EXPECT_CUDA(cudaEventSynchronize(event));
  EXPECT_CUDA(cudaEventDestroy(event));
}

TEST(Streams, TheDefaultOneWaitsForBlockingStreamsOnly) {
  const OwnStream apart(cudaStreamNonBlocking);
  const OwnStream along(cudaStreamDefault);
  const DeviceArray<int> array(std::vector<int>{0});
  Gate gate(along);
  set_all<<<1, 1, 0, along>>>(array.data(), 1, 10);
  ASSERT_CUDA(cudaGetLastError());
  add_one<<<1, 1>>>(array.data(), 1);
  ASSERT_CUDA(cudaGetLastError());
  EXPECT_CUDA(cudaStreamSynchronize(apart));
  EXPECT_EQ(cudaErrorNotReady, query_and_forget(nullptr));
  gate.open();
  EXPECT_CUDA(cudaStreamSynchronize(nullptr));
  EXPECT_EQ(std::vector<int>{11}, array.values());
}

TEST(Streams, EventsTellTime) {
  const OwnStream stream;
  cudaEvent_t from = nullptr;
  cudaEvent_t to = nullptr;
  ASSERT_CUDA(cudaEventCreate(&from));
  ASSERT_CUDA(cudaEventCreate(&to));
  float milliseconds = -1.0F;
  EXPECT_EQ(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&milliseconds, from, to));
  static_cast<void>(cudaGetLastError());
  EXPECT_CUDA(cudaEventRecord(from, stream));
  EXPECT_CUDA(cudaEventRecord(to, stream));
  EXPECT_CUDA(cudaEventSynchronize(to));
  EXPECT_CUDA(cudaEventElapsedTime(&milliseconds, from, to));
  EXPECT_GE(milliseconds, 0.0F);
  EXPECT_CUDA(cudaEventDestroy(from));
  EXPECT_CUDA(cudaEventDestroy(to));
}

TEST(Copies, GoEveryWay) {
  const std::vector<int> values{1, 2, 3, 4, 5, 6, 7};
  const DeviceArray<int> first(values);
  const DeviceArray<int> second(values.size());
  EXPECT_CUDA(cudaMemcpy(second.data(), first.data(), 28, cudaMemcpyDeviceToDevice));
  EXPECT_EQ(values, second.values());
  EXPECT_CUDA(cudaMemset(second.data() + 2, 0, 8));
  EXPECT_CUDA(cudaMemcpy(second.data(), values.data() + 3, 4, cudaMemcpyDefault));
  EXPECT_EQ((std::vector<int>{4, 2, 0, 0, 5, 6, 7}), second.values());
  EXPECT_CUDA(cudaMemcpy(nullptr, nullptr, 0, cudaMemcpyHostToDevice));
}

TEST(Copies, KeepPitches) {
  std::vector<int> values(24);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int>(i);
  const DeviceArray<int> array(std::vector<int>(12, -1));
  // 3 rows of 2, from rows of 8 to rows of 4.
  EXPECT_CUDA(
      cudaMemcpy2D(array.data() + 1, 16, values.data() + 5, 32, 8, 3, cudaMemcpyHostToDevice));
  EXPECT_EQ((std::vector<int>{-1, 5, 6, -1, -1, 13, 14, -1, -1, 21, 22, -1}), array.values());
  EXPECT_EQ(cudaErrorInvalidPitchValue,
            cudaMemcpy2D(array.data(), 4, values.data(), 32, 8, 3, cudaMemcpyHostToDevice));
  EXPECT_EQ(cudaErrorInvalidPitchValue, cudaGetLastError());
  EXPECT_CUDA(cudaGetLastError());
}

TEST(Copies, PageableMemoryIsFreeAtOnceAndPinnedIsNot) {
  const OwnStream stream;
  const DeviceArray<int> array(2);
  int* pinned = nullptr;
  ASSERT_CUDA(cudaMallocHost(reinterpret_cast<void**>(&pinned), sizeof(int)));
  int pageable = 1;
  EXPECT_CUDA(
      cudaMemcpyAsync(array.data(), &pageable, sizeof(int), cudaMemcpyHostToDevice, stream));
  pageable = 2;
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  Gate gate(stream);
  *pinned = 3;
  EXPECT_CUDA(
      cudaMemcpyAsync(array.data() + 1, pinned, sizeof(int), cudaMemcpyHostToDevice, stream));
  *pinned = 4;
  gate.open();
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ((std::vector<int>{1, 4}), array.values());
  EXPECT_CUDA(cudaFreeHost(pinned));
}

TEST(Memory, PointersSayWhatTheyAre) {
  const DeviceArray<int> array(4);
  int* pinned = nullptr;
  ASSERT_CUDA(cudaMallocHost(reinterpret_cast<void**>(&pinned), sizeof(int)));
  int local = 0;
  const auto type = [](const void* pointer) {
    cudaPointerAttributes attributes{};
    EXPECT_CUDA(cudaPointerGetAttributes(&attributes, pointer));
    return attributes.type;
  };
  EXPECT_EQ(cudaMemoryTypeDevice, type(array.data() + 3));
  EXPECT_EQ(cudaMemoryTypeHost, type(pinned));
  EXPECT_EQ(cudaMemoryTypeUnregistered, type(&local));
  EXPECT_CUDA(cudaFreeHost(pinned));
}

TEST(Memory, IsAlignedAndCounted) {
  void* pointer = nullptr;
  EXPECT_EQ(cudaErrorMemoryAllocation, cudaMalloc(&pointer, std::size_t{1} << 60));
  EXPECT_EQ(cudaErrorMemoryAllocation, cudaGetLastError());
  EXPECT_CUDA(cudaGetLastError());
  std::size_t before = 0;
  std::size_t total = 0;
  EXPECT_CUDA(cudaMemGetInfo(&before, &total));
  EXPECT_LE(before, total);
  const DeviceArray<char> array(std::size_t{64} << 20);
  EXPECT_EQ(0U, reinterpret_cast<std::uintptr_t>(array.data()) % 256);
  std::size_t after = 0;
  EXPECT_CUDA(cudaMemGetInfo(&after, &total));
  EXPECT_LT(after, before);
  EXPECT_CUDA(cudaFree(nullptr));
  EXPECT_CUDA(cudaFreeHost(nullptr));
}

TEST(Memory, WhatIsNotAnAllocationIsNotFreed) {
  const DeviceArray<int> array(4);
  EXPECT_EQ(cudaErrorInvalidValue, cudaFree(array.data() + 1));
  EXPECT_EQ(cudaErrorInvalidValue, cudaGetLastError());
  EXPECT_CUDA(cudaGetLastError());
}

TEST(Devices, DescribeThemselves) {
  int count = 0;
  ASSERT_CUDA(cudaGetDeviceCount(&count));
  ASSERT_GE(count, 1);
  cudaDeviceProp prop{};
  ASSERT_CUDA(cudaGetDeviceProperties(&prop, 0));
  EXPECT_EQ(32, prop.warpSize);
  EXPECT_EQ(1024, prop.maxThreadsPerBlock);
  EXPECT_GE(prop.major, 8);
  char id[32] = {};
  ASSERT_CUDA(cudaDeviceGetPCIBusId(id, sizeof(id), 0));
  EXPECT_EQ(12U, std::string(id).size()) << id;
  int major = 0;
  EXPECT_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  EXPECT_EQ(prop.major, major);
  EXPECT_EQ(cudaErrorInvalidDevice, cudaSetDevice(count));
  EXPECT_EQ(cudaErrorInvalidDevice, cudaGetLastError());
  EXPECT_STREQ("cudaErrorInvalidDevice", cudaGetErrorName(cudaErrorInvalidDevice));
}

}  // namespace
}  // namespace conformance
