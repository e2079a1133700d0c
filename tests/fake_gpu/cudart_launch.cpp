// The stand-in libcudart: kernels, found by their mangled names in libraries that g++ compiled, and
// launches.
#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <vector>

#include "tests/fake_gpu/cudart.h"
#include "tests/fake_gpu/fake_cudart.h"
#include "tests/fake_gpu/fibers.h"
#include "tests/fake_gpu/settings.h"

namespace gatefold_fake {
namespace {

constexpr std::size_t kShared = 48 << 10;
constexpr std::size_t kSharedOnRequest = 227 << 10;

/// What nvcc registered: the launch stub of a kernel.
struct Stub {
  std::string mangled_name;
  const FakeKernel* kernel = nullptr;  // once looked for
  std::size_t most_dynamic_shared = kShared;
};

struct Configuration {
  dim3 grid;
  dim3 block;
  std::size_t shared = 0;
  cudaStream_t stream = nullptr;
};

std::mutex& mutex = *new std::mutex;
auto& stubs = *new std::map<const void*, Stub>;
auto& kernels = *new std::map<std::string, const FakeKernel*>;
thread_local std::vector<Configuration> configurations;
// The last <<<…>>> of this thread that nobody has asked cudaGetLastError about.
thread_local const Stub* unchecked = nullptr;

void load_libraries() {
  static std::once_flag once;
  std::call_once(once, [] {
    const char* list = std::getenv("GATEFOLD_FAKE_GPU_KERNELS");
    std::istringstream names(list == nullptr ? "" : list);
    for (std::string name; std::getline(names, name, ':');) {
      if (dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) complain(dlerror());
    }
  });
}

/// The kernel's body, or null.
const FakeKernel* find_kernel(Stub& stub) {
  load_libraries();
  const std::lock_guard lock(mutex);
  if (stub.kernel == nullptr) {
    const auto found = kernels.find(stub.mangled_name);
    if (found != kernels.end()) stub.kernel = found->second;
  }
  return stub.kernel;
}

Stub* find_stub(const void* function) {
  const std::lock_guard lock(mutex);
  const auto found = stubs.find(function);
  return found == stubs.end() ? nullptr : &found->second;
}

bool launchable(const Configuration& how) {
  const dim3& g = how.grid;
  const dim3& b = how.block;
  return g.x >= 1 && g.y >= 1 && g.z >= 1 && g.x <= 0x7fffffffU && g.y <= 65535 && g.z <= 65535 &&
         b.x >= 1 && b.y >= 1 && b.z >= 1 && b.x <= 1024 && b.y <= 1024 && b.z <= 64 &&
         std::uint64_t{b.x} * b.y * b.z <= 1024;
}

std::uint64_t next_seed() {
  static std::uint64_t launches = 0;
  const std::lock_guard lock(mutex);
  return static_cast<std::uint64_t>(setting("SEED", 1)) * 0x9e3779b97f4a7c15U + ++launches;
}

cudaError_t launch(Stub* stub, const Configuration& how, void** arguments) {
  if (stub == nullptr) return failed(cudaErrorInvalidDeviceFunction);
  const auto stream = find_stream(how.stream);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (!launchable(how)) return failed(cudaErrorInvalidConfiguration);
  if (how.shared > stub->most_dynamic_shared) return failed(cudaErrorInvalidValue);
  const FakeKernel* kernel = find_kernel(*stub);
  if (kernel == nullptr) {
    return failed(cudaErrorInvalidDeviceFunction,
                  "no library in GATEFOLD_FAKE_GPU_KERNELS has the kernel " + stub->mangled_name);
  }
  const int device = device_of(*stream);
  if (fault("launch")) {
    enqueue(stream, [=] {
      break_device(device, cudaErrorLaunchFailure, stub->mangled_name + " fails, as asked");
    });
    return cudaSuccess;
  }
  if (fault("hang")) {
    enqueue(stream, [] { std::this_thread::sleep_for(std::chrono::hours(24)); });
    return cudaSuccess;
  }
  const std::shared_ptr<void> copied(kernel->copy_arguments(arguments), kernel->free_arguments);
  const std::uint64_t seed = next_seed();
  enqueue(stream, [=] {
    const std::string failure =
        run_grid({kernel, copied.get(), how.grid, how.block, how.shared, seed});
    if (failure.empty()) return;
    break_device(device, cudaErrorLaunchFailure, stub->mangled_name + ": " + failure);
  });
  return cudaSuccess;
}

}  // namespace

void launch_was_checked() { unchecked = nullptr; }

}  // namespace gatefold_fake

using namespace gatefold_fake;

void cudaFakeRegisterKernel(const FakeKernel* kernel) {
  const std::lock_guard lock(mutex);
  if (!kernels.emplace(kernel->mangled_name, kernel).second) {
    complain(std::string("two libraries have the kernel ") + kernel->mangled_name);
    std::_Exit(64);
  }
}

// What nvcc's host code calls.
extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void**, const char* stub, char*, const char* mangled_name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  const std::lock_guard lock(mutex);
  stubs[stub].mangled_name = mangled_name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared,
                                     CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  if (configurations.empty()) return failed(cudaErrorInvalidConfiguration);
  const Configuration how = configurations.back();
  configurations.pop_back();
  *grid = how.grid;
  *block = how.block;
  *shared = how.shared;
  *static_cast<cudaStream_t*>(stream) = how.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = reinterpret_cast<cudaKernel_t>(find_stub(stub));
  return *kernel == nullptr ? failed(cudaErrorInvalidDeviceFunction) : cudaSuccess;
}

// On the way of <<<…>>> the caller sees no status: it has to ask cudaGetLastError.
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               std::size_t shared, cudaStream_t stream) {
  FAKE_BEGIN();
  if (unchecked != nullptr) {
    break_device(current_device(), cudaErrorLaunchFailure,
                 "no cudaGetLastError after the launch of " + unchecked->mangled_name);
    return begin_call();
  }
  auto* stub = reinterpret_cast<Stub*>(kernel);
  unchecked = stub;
  return launch(stub, {grid, block, shared, stream}, arguments);
}

}  // extern "C"

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             std::size_t shared, cudaStream_t stream) {
  FAKE_BEGIN();
  return launch(find_stub(function), {grid, block, shared, stream}, arguments);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  FAKE_BEGIN();
  return launch(find_stub(function),
                {config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream},
                arguments);
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  FAKE_BEGIN();
  Stub* stub = find_stub(function);
  if (stub == nullptr) return failed(cudaErrorInvalidDeviceFunction);
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<std::size_t>(value) > kSharedOnRequest) {
    return failed(cudaErrorInvalidValue);
  }
  stub->most_dynamic_shared = static_cast<std::size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  FAKE_BEGIN();
  const Stub* stub = find_stub(function);
  if (stub == nullptr) return failed(cudaErrorInvalidDeviceFunction);
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = static_cast<int>(stub->most_dynamic_shared);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                   const void* function,
                                                                   int block_size, std::size_t,
                                                                   unsigned) {
  FAKE_BEGIN();
  if (find_stub(function) == nullptr) return failed(cudaErrorInvalidDeviceFunction);
  if (block_size < 1 || block_size > 1024) return failed(cudaErrorInvalidValue);
  *blocks = 2048 / block_size;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function,
                                                          int block_size, std::size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size,
                                                                shared, 0);
}
