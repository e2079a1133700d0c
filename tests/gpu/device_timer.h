#pragma once
// Time by the device's own clock, and how samples become one number.

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace gatefold_speed {

inline void require(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "gpu_speed: CUDA: %s\n", cudaGetErrorString(status));
  std::exit(70);
}
inline void require(cublasStatus_t status) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::fprintf(stderr, "gpu_speed: cuBLASLt: %s\n", cublasLtGetStatusString(status));
  std::exit(70);
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// The median of a[i] ÷ b[i], which were measured side by side: drift cancels.
inline double median_ratio(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < a.size(); ++i) ratios.push_back(a[i] / b[i]);
  return median(ratios);
}

class DeviceTimer {
 public:
  explicit DeviceTimer(cudaStream_t stream) : stream_(stream) {
    require(cudaEventCreate(&begin_));
    require(cudaEventCreate(&end_));
  }
  ~DeviceTimer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  DeviceTimer(const DeviceTimer&) = delete;
  DeviceTimer& operator=(const DeviceTimer&) = delete;

  cudaStream_t stream() const { return stream_; }

  /// From the start of the stream's work to its end, gaps between launches included.
  template <typename Work>
  double seconds(const Work& work) {
    require(cudaEventRecord(begin_, stream_));
    work();
    require(cudaEventRecord(end_, stream_));
    require(cudaEventSynchronize(end_));
    float milliseconds = 0;
    require(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

}  // namespace gatefold_speed
