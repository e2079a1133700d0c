#pragma once
// What the tests of NCCL, real or stand-in, start from: one GPU a rank, or one for all.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace fake_nccl_testing {

using Clock = std::chrono::steady_clock;

inline bool on_stand_in() {
  const char* rig = std::getenv("GATEFOLD_FAKE_GPU");
  return rig != nullptr && std::strcmp(rig, "1") == 0;
}

/// Every rank its own GPU; where there are too few, ranks share one as hosts of their own, which
/// NCCL allows over sockets.
inline void take_gpu(int rank, int size) {
  int count = 0;
  ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(rank % count), cudaSuccess);
  if (count >= size) return;
  setenv("NCCL_HOSTID", ("rank" + std::to_string(rank)).c_str(), 1);
  for (const auto& [name, value] :
       {std::pair{"NCCL_SOCKET_IFNAME", "lo"}, std::pair{"NCCL_NET", "Socket"},
        std::pair{"NCCL_IB_DISABLE", "1"}, std::pair{"NCCL_MNNVL_ENABLE", "0"},
        std::pair{"NCCL_NVLS_ENABLE", "0"}, std::pair{"NCCL_MAX_CTAS", "2"},
        std::pair{"NCCL_RAS_ENABLE", "0"}}) {
    setenv(name, value, 0);
  }
}

/// Device memory with the values of a vector.
template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) : count_(values.size()) {
    EXPECT_EQ(cudaMalloc(&data_, std::max<std::size_t>(count_, 1) * sizeof(T)), cudaSuccess);
    set(values);
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  T* data() const { return static_cast<T*>(data_); }
  void set(const std::vector<T>& values) {
    EXPECT_EQ(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // pageable memory may still be on its way
  }
  std::vector<T> get() const {
    std::vector<T> values(count_);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return values;
  }

 private:
  std::size_t count_;
  void* data_ = nullptr;
};

class Stream {
 public:
  Stream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Until a call that doesn't block has come through; ncclInProgress where it doesn't.
inline ncclResult_t settle(ncclComm_t comm, double seconds = 20) {
  ncclResult_t state = ncclInProgress;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (state == ncclInProgress && Clock::now() < end) {
    EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return state;
}

/// Until the stream is empty or the communicator has failed; ncclInProgress where neither comes.
inline ncclResult_t finish(ncclComm_t comm, cudaStream_t stream, double seconds = 20) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  const ncclResult_t settled = settle(comm, seconds);
  if (settled != ncclSuccess) return settled;
  while (Clock::now() < end) {
    if (cudaStreamQuery(stream) == cudaSuccess) return ncclSuccess;
    ncclResult_t state = ncclSuccess;
    EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    if (state != ncclSuccess) return state;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return ncclInProgress;
}

inline bool accepted(ncclResult_t result) {
  return result == ncclSuccess || result == ncclInProgress;
}

inline ncclResult_t start(ncclComm_t* comm, int size, const ncclUniqueId& id, int rank,
                          int blocking) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = blocking;
  return ncclCommInitRankConfig(comm, size, id, rank, &config);
}

}  // namespace fake_nccl_testing
