#pragma once

// What the stand-in libcudart.so.13 offers beyond CUDA's own calls: to kernels compiled by g++
// (device_shim.h), and to the other stand-ins. C names that begin with "cuda", so that the version
// script which exports CUDA's calls exports these too.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

/// One CUDA thread, as its kernel sees it.
struct FakeThread {
  uint3 thread;
  uint3 block;
  dim3 block_size;
  dim3 grid_size;
  unsigned lane;
};

/// One kernel: its mangled name, and what a launch does with the arguments. A launch copies them,
/// since it is asynchronous.
struct FakeKernel {
  const char* mangled_name;
  void* (*copy_arguments)(void** arguments);
  void (*run)(const void* copied);  // one thread
  void (*free_arguments)(void* copied);
};

enum class FakeVote { kNone, kCount, kAnd, kOr };

extern "C" {
// For kernels.
const FakeThread* cudaFakeThread();
/// The block's dynamic shared memory, 0xFF at the block's start.
void* cudaFakeDynamicShared();
/// __syncthreads and its siblings: the result of the vote.
int cudaFakeBlockBarrier(FakeVote vote, int predicate, const char* file, int line);
/// Waits for the mask's lanes; values[lane] of those is what each gave. Returns the lanes that
/// came: the mask without threads that have ended.
unsigned cudaFakeWarpBarrier(unsigned mask, std::uint64_t value, std::uint64_t values[32],
                             const char* file, int line);
/// Ends the kernel with cudaErrorLaunchFailure and says why.
void cudaFakeTrap(const char* why, const char* file, int line);
void cudaFakeRegisterKernel(const FakeKernel* kernel);

// For other stand-ins. They put work on a stream by cudaLaunchHostFunc; the function may touch
// device memory and may block.
/// 1 if all the bytes are inside one live device allocation.
int cudaFakeIsDeviceRange(const void* pointer, std::size_t bytes);
/// The device that owns the pointer, or -1.
int cudaFakeDeviceOf(const void* pointer);
/// 1 if GATEFOLD_FAKE_GPU_FAIL asks for this call of `point` ("gemm:3@1": the third on rank 1).
/// Each call counts.
int cudaFakeFault(const char* point);
/// GATEFOLD_FAKE_GPU_<name>, "8,1:0": 8, but 0 on rank 1.
long long cudaFakeSetting(const char* name, long long fallback);
/// The rank that the launcher gave this process; 0 if none.
int cudaFakeRank();
/// Breaks the current device for good, as an asynchronous error does: every later call returns it.
void cudaFakeBreak(cudaError_t error, const char* why);
}
