#pragma once

// Kernels with one fault each, which the stand-in must find.

#include <cstdint>

namespace misuse {

inline __global__ void one_branch_waits(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
    out[threadIdx.x] = 1;
  } else {
    __syncthreads();
  }
}

inline __global__ void some_leave_early(int* out) {
  if (threadIdx.x >= 48) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

inline __global__ void lane_outside_its_mask(int* out) {
  out[threadIdx.x] = __shfl_sync(0x0000ffffU, 1, 0);
}

inline __global__ void no_barrier(int* out, int step) {
  __shared__ int values[64];
  values[threadIdx.x] = 1;
  const unsigned other = threadIdx.x + static_cast<unsigned>(step);
  out[threadIdx.x] = other < 64 ? values[other] : 0;  // poison if that one hasn't run
}

inline __global__ void trap_at(int* out, unsigned thread) {
  out[threadIdx.x] = 1;
  if (threadIdx.x == thread) __trap();
}

inline __global__ void write_past_shared(int* out, unsigned count) {
  DYNAMIC_SHARED(int, values);
  for (unsigned i = 0; i < count; ++i) values[i] = 1;
  out[threadIdx.x] = values[0];
}

inline __global__ void fill(int* out, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    out[i] = 1;  // the line that the sanitizer names
  }
}

inline __global__ void copy_four(const float* in, float* out) {
  *reinterpret_cast<float4*>(out) = *reinterpret_cast<const float4*>(in);
}

}  // namespace misuse
