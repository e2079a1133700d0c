#pragma once

// With this header included first (g++ -include), g++ compiles the .cuh files that nvcc compiles
// for a GPU. Conventions of those kernels: they live in a named namespace, take their dynamic
// shared memory by DYNAMIC_SHARED(type, name), and use no inline PTX, no wmma and no TMA. No thread
// returns before a __syncthreads() of its block.
//
// A library of kernels ends in lines like FAKE_KERNEL(scale<4, float>);

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "tests/fake_gpu/fake_cudart.h"

#undef __shared__
#define __shared__ static thread_local  // one thread of the host runs a whole block
#define DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(cudaFakeDynamicShared())

#define threadIdx (cudaFakeThread()->thread)
#define blockIdx (cudaFakeThread()->block)
#define blockDim (cudaFakeThread()->block_size)
#define gridDim (cudaFakeThread()->grid_size)
#define warpSize 32
#define __launch_bounds__(...)

#define __syncthreads() static_cast<void>(FAKE_VOTE(kNone, 0))
#define __syncthreads_count(predicate) FAKE_VOTE(kCount, predicate)
#define __syncthreads_and(predicate) FAKE_VOTE(kAnd, predicate)
#define __syncthreads_or(predicate) FAKE_VOTE(kOr, predicate)
#define FAKE_VOTE(vote, predicate) \
  cudaFakeBlockBarrier(FakeVote::vote, (predicate) != 0, __FILE__, __LINE__)

#define __syncwarp(...) gatefold_fake::sync_warp(__FILE__, __LINE__ __VA_OPT__(, ) __VA_ARGS__)
#define __ballot_sync(...) gatefold_fake::ballot(__FILE__, __LINE__, __VA_ARGS__)
#define __any_sync(...) (gatefold_fake::ballot(__FILE__, __LINE__, __VA_ARGS__) != 0)
#define __all_sync(...) gatefold_fake::all(__FILE__, __LINE__, __VA_ARGS__)
#define __shfl_sync(...) gatefold_fake::shuffle(__FILE__, __LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) gatefold_fake::shuffle_xor(__FILE__, __LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) gatefold_fake::shuffle_up(__FILE__, __LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) gatefold_fake::shuffle_down(__FILE__, __LINE__, __VA_ARGS__)
#define __reduce_add_sync(...) gatefold_fake::reduce_add(__FILE__, __LINE__, __VA_ARGS__)
#define __trap() cudaFakeTrap("__trap()", __FILE__, __LINE__)

namespace gatefold_fake {

inline void sync_warp(const char* file, int line, unsigned mask = 0xffffffffU) {
  std::uint64_t values[32];
  cudaFakeWarpBarrier(mask, 0, values, file, line);
}

inline unsigned ballot(const char* file, int line, unsigned mask, int predicate) {
  std::uint64_t values[32];
  const unsigned came =
      cudaFakeWarpBarrier(mask, static_cast<std::uint64_t>(predicate != 0), values, file, line);
  unsigned result = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((came >> lane & 1U) != 0 && values[lane] != 0) result |= 1U << lane;
  }
  return result;
}

inline int all(const char* file, int line, unsigned mask, int predicate) {
  return static_cast<int>(ballot(file, line, mask, predicate == 0 ? 1 : 0) == 0);
}

template <typename T>
T shuffle_from(const char* file, int line, unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t) && std::is_trivially_copyable_v<T>);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  std::uint64_t values[32];
  const unsigned came = cudaFakeWarpBarrier(mask, bits, values, file, line);
  if ((came >> source & 1) == 0) {
    cudaFakeTrap("shuffle from a lane that takes no part", file, line);
  }
  std::memcpy(&value, &values[source], sizeof(T));
  return value;
}

inline int segment_start(int width) {
  return static_cast<int>(cudaFakeThread()->lane) & ~(width - 1);
}

template <typename T>
T shuffle(const char* file, int line, unsigned mask, T value, int source, int width = 32) {
  return shuffle_from(file, line, mask, value, segment_start(width) + (source & (width - 1)));
}

// A source outside the segment gives the lane its own value back, as on the device.
template <typename T>
T shuffle_within(const char* file, int line, unsigned mask, T value, int source, int width) {
  const int start = segment_start(width);
  const bool inside = source >= start && source < start + width;
  const int lane = static_cast<int>(cudaFakeThread()->lane);
  return shuffle_from(file, line, mask, value, inside ? source : lane);
}
template <typename T>
T shuffle_xor(const char* file, int line, unsigned mask, T value, int lanes, int width = 32) {
  const int lane = static_cast<int>(cudaFakeThread()->lane);
  return shuffle_within(file, line, mask, value, lane ^ lanes, width);
}
template <typename T>
T shuffle_up(const char* file, int line, unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = static_cast<int>(cudaFakeThread()->lane);
  return shuffle_within(file, line, mask, value, lane - static_cast<int>(delta), width);
}
template <typename T>
T shuffle_down(const char* file, int line, unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = static_cast<int>(cudaFakeThread()->lane);
  return shuffle_within(file, line, mask, value, lane + static_cast<int>(delta), width);
}

template <typename T>
T reduce_add(const char* file, int line, unsigned mask, T value) {
  static_assert(sizeof(T) == 4 && std::is_integral_v<T>);
  std::uint64_t values[32];
  const unsigned came = cudaFakeWarpBarrier(mask, static_cast<unsigned>(value), values, file, line);
  unsigned sum = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((came >> lane & 1U) != 0) sum += static_cast<unsigned>(values[lane]);
  }
  return static_cast<T>(sum);
}

/// *address = change(*address), all or nothing; the value before. Streams are threads of the host.
template <typename T, typename Change>
T atomic_change(T* address, Change change) {
  using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t,
                                  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>>;
  static_assert(sizeof(T) == sizeof(Bits));
  auto* bits = reinterpret_cast<Bits*>(address);
  Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (true) {
    const T after = change(std::bit_cast<T>(before));
    if (__atomic_compare_exchange_n(bits, &before, std::bit_cast<Bits>(after), false,
                                    __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      return std::bit_cast<T>(before);
    }
  }
}

/// The symbol's own name, so that no string can be mistyped. Link with -Bsymbolic, or the program's
/// launch stub of the same name is found instead.
inline const char* mangled_name(void* function, const char* text) {
  Dl_info info{};
  if (dladdr(function, &info) == 0 || info.dli_saddr != function) {
    std::fprintf(stderr, "FAKE GPU: %s has no symbol (kernels need a named namespace)\n", text);
    std::abort();
  }
  return info.dli_sname;
}

template <typename Pointer, Pointer kernel>
struct Launcher;
template <typename... A, void (*kernel)(A...)>
struct Launcher<void (*)(A...), kernel> {
  using Copies = std::tuple<std::remove_cv_t<A>...>;

  static void* copy(void** arguments) {
    return [&]<std::size_t... i>(std::index_sequence<i...>) {
      return new Copies(*static_cast<const std::remove_cv_t<A>*>(arguments[i])...);
    }
    (std::index_sequence_for<A...>{});
  }
  static void run(const void* copied) { std::apply(kernel, *static_cast<const Copies*>(copied)); }
  static void free(void* copied) { delete static_cast<Copies*>(copied); }
};

template <auto kernel>
bool register_kernel(const char* text) {
  using One = Launcher<decltype(kernel), kernel>;
  static const FakeKernel entry{mangled_name(reinterpret_cast<void*>(kernel), text), One::copy,
                                One::run, One::free};
  cudaFakeRegisterKernel(&entry);
  return true;
}

}  // namespace gatefold_fake

#define FAKE_JOIN_(a, b) a##b
#define FAKE_JOIN(a, b) FAKE_JOIN_(a, b)
#define FAKE_KERNEL(...)                                               \
  [[maybe_unused]] static const bool FAKE_JOIN(kernel_, __COUNTER__) = \
      gatefold_fake::register_kernel<&__VA_ARGS__>(#__VA_ARGS__)

#include "tests/fake_gpu/device_functions.h"
