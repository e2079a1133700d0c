#pragma once

// What kernels may rely on. nvcc and g++ compile these alike; DYNAMIC_SHARED comes from the
// includer.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace conformance {

struct Parameters {
  std::int64_t count;
  float factor;
  char odd;
};

template <int kTimes, typename T>
__global__ void scale(T* values, Parameters parameters) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t first = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (std::int64_t i = first; i < parameters.count; i += stride) {
    values[i] = static_cast<T>(values[i] * parameters.factor * kTimes);
  }
}

/// out [gridDim.z * blockDim.z, gridDim.y * blockDim.y, gridDim.x * blockDim.x] = the place's
/// index.
inline __global__ void number_places(std::int64_t* out) {
  const std::int64_t x = blockIdx.x * blockDim.x + threadIdx.x;
  const std::int64_t y = blockIdx.y * blockDim.y + threadIdx.y;
  const std::int64_t z = blockIdx.z * blockDim.z + threadIdx.z;
  const std::int64_t at = (z * gridDim.y * blockDim.y + y) * gridDim.x * blockDim.x + x;
  out[at] = at;
}

/// sums[block] = the block's values' sum, by a tree in shared memory. blockDim.x: a power of two.
inline __global__ void block_sums(const int* values, int* sums) {
  DYNAMIC_SHARED(int, tree);
  __shared__ int first;
  tree[threadIdx.x] = values[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) tree[threadIdx.x] += tree[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) first = tree[0];
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1) sums[blockIdx.x] = first;
}

/// out [7, blockDim.x]: one row for each way of shuffling.
inline __global__ void shuffles(int* out) {
  constexpr unsigned kAll = 0xffffffffU;
  const int mine = static_cast<int>(threadIdx.x) * 10;
  const unsigned n = blockDim.x;
  out[threadIdx.x] = __shfl_xor_sync(kAll, mine, 1);
  out[n + threadIdx.x] = __shfl_down_sync(kAll, mine, 4);
  out[2 * n + threadIdx.x] = __shfl_up_sync(kAll, mine, 3);
  out[3 * n + threadIdx.x] = __shfl_sync(kAll, mine, 5);
  out[4 * n + threadIdx.x] = __shfl_sync(kAll, mine, 9, 8);
  out[5 * n + threadIdx.x] = __shfl_down_sync(kAll, mine, 4, 8);
  out[6 * n + threadIdx.x] = static_cast<int>(__shfl_xor_sync(kAll, 0.5 * mine, 16));
}

/// out [7]: votes of one warp whose lanes give lane % 3 == 0, and of a block.
inline __global__ void votes(unsigned* out) {
  constexpr unsigned kAll = 0xffffffffU;
  const int third = threadIdx.x % 3 == 0 ? 1 : 0;
  const unsigned ballot = __ballot_sync(kAll, third);
  const int any = __any_sync(kAll, third);
  const int all = __all_sync(kAll, third);
  const int count = __syncthreads_count(third);
  const int every = __syncthreads_and(1);
  const int some = __syncthreads_or(threadIdx.x == 40 ? 1 : 0);
  const int not_every = __syncthreads_and(threadIdx.x == 40 ? 0 : 1);
  if (threadIdx.x != 0) return;
  out[0] = ballot;
  out[1] = any != 0 ? 1U : 0U;
  out[2] = all != 0 ? 1U : 0U;
  out[3] = static_cast<unsigned>(count);
  out[4] = every != 0 ? 1U : 0U;
  out[5] = some != 0 ? 1U : 0U;
  out[6] = not_every != 0 ? 1U : 0U;
}

/// Half of the warp passes values at its own pace: sums [2] by odd and even lanes.
inline __global__ void half_warps(int* sums) {
  const bool odd = threadIdx.x % 2 == 1;
  const unsigned mask = odd ? 0xaaaaaaaaU : 0x55555555U;
  int sum = static_cast<int>(threadIdx.x);
  if (odd) {
    for (int step = 2; step < 32; step *= 2) sum += __shfl_xor_sync(mask, sum, step);
  } else {
    for (int step = 16; step > 1; step /= 2) sum += __shfl_xor_sync(mask, sum, step);
  }
  __syncwarp();
  if (threadIdx.x < 2) sums[threadIdx.x] = sum;
}

/// counters [6]: add, float add, max, min, compare and swap, 64 bits.
inline __global__ void atomics(int* counters, float* float_sum, unsigned long long* big) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(&counters[0], i);
  atomicMax(&counters[1], i);
  atomicMin(&counters[2], i);
  int seen = counters[3];
  int expected = 0;
  do {
    expected = seen;
    seen = atomicCAS(&counters[3], expected, expected + 2);
  } while (seen != expected);
  atomicAdd(float_sum, 1.0F);
  atomicAdd(big, 0x100000001ULL);
}

/// Bits of the nearest bf16 and fp16.
inline __global__ void round_values(const float* values, int count, std::uint16_t* as_bf16,
                                    std::uint16_t* as_fp16) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    as_bf16[i] = __bfloat16_as_ushort(__float2bfloat16_rn(values[i]));
    as_fp16[i] = __half_as_ushort(__float2half_rn(values[i]));
  }
}

/// out = a * b + c, rounded twice and once.
inline __global__ void contraction(float a, float b, float c, float* out) {
  out[0] = __fadd_rn(__fmul_rn(a, b), c);
  out[1] = __fmaf_rn(a, b, c);
}

inline __global__ void set_all(int* values, int count, int value) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) values[i] = value;
}

inline __global__ void add_one(int* values, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) values[i] += 1;
}

}  // namespace conformance
