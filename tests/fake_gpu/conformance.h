#pragma once

// What conformance tests of kernels and of the runtime share.

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#define ASSERT_CUDA(call) ASSERT_EQ(cudaSuccess, call)
#define EXPECT_CUDA(call) EXPECT_EQ(cudaSuccess, call)

namespace conformance {

/// Device memory for `count` values.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    EXPECT_CUDA(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T)));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    EXPECT_CUDA(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
    EXPECT_CUDA(cudaDeviceSynchronize());  // pageable memory may still be on its way
  }
  ~DeviceArray() { EXPECT_CUDA(cudaFree(data_)); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> result(count_);
    EXPECT_CUDA(cudaMemcpy(result.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return result;
  }

 private:
  std::size_t count_;
  T* data_ = nullptr;
};

}  // namespace conformance
