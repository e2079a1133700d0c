// The stand-in libcudart: devices, their properties, and errors.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>
#include <vector>

#include "tests/fake_gpu/cudart.h"
#include "tests/fake_gpu/fake_cudart.h"
#include "tests/fake_gpu/settings.h"

namespace gatefold_fake {
namespace {

constexpr int kMostDevices = 64;
constexpr int kRuntimeVersion = CUDART_VERSION;
constexpr std::size_t kDefaultMemory = std::size_t{64} << 30;

std::array<std::atomic<cudaError_t>, kMostDevices> broken_devices{};
thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

/// The machine's devices that CUDA_VISIBLE_DEVICES leaves, in its order: up to the first bad entry.
std::vector<int> visible_devices() {
  const auto machine = std::clamp<int>(static_cast<int>(setting("DEVICES", 8)), 0, kMostDevices);
  std::vector<int> devices;
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) {
    for (int i = 0; i < machine; ++i) devices.push_back(i);
    return devices;
  }
  std::istringstream list(visible);
  for (std::string item; std::getline(list, item, ',');) {
    char* end = nullptr;
    const long index = std::strtol(item.c_str(), &end, 10);
    if (item.empty() || *end != '\0' || index < 0 || index >= machine) break;
    devices.push_back(static_cast<int>(index));
  }
  return devices;
}

const std::vector<int>& devices() {
  static const auto& list = *new std::vector<int>(visible_devices());
  return list;
}

cudaError_t usable() {
  static const auto driver = setting("DRIVER", kRuntimeVersion);
  if (driver < kRuntimeVersion / 1000 * 1000) return cudaErrorInsufficientDriver;
  return devices().empty() ? cudaErrorNoDevice : cudaSuccess;
}

int pci_bus(int device) { return 0x10 + devices()[static_cast<std::size_t>(device)]; }
int capability() {
  static const auto value = static_cast<int>(setting("CAPABILITY", 90));
  return value;
}
std::size_t memory_size() {
  static const auto bytes =
      static_cast<std::size_t>(setting("MEMORY", static_cast<long long>(kDefaultMemory)));
  return bytes;
}

cudaDeviceProp properties(int device) {
  cudaDeviceProp prop{};
  std::snprintf(prop.name, sizeof(prop.name), "FakeGPU");
  std::memset(prop.uuid.bytes, 0x47, sizeof(prop.uuid.bytes));
  prop.uuid.bytes[15] = static_cast<char>(pci_bus(device));
  prop.totalGlobalMem = memory_size();
  prop.sharedMemPerBlock = 48 << 10;
  prop.sharedMemPerBlockOptin = 227 << 10;
  prop.sharedMemPerMultiprocessor = 228 << 10;
  prop.reservedSharedMemPerBlock = 1 << 10;
  prop.regsPerBlock = prop.regsPerMultiprocessor = 65536;
  prop.warpSize = 32;
  prop.memPitch = 0x7fffffff;
  prop.maxThreadsPerBlock = 1024;
  prop.maxThreadsDim[0] = prop.maxThreadsDim[1] = 1024;
  prop.maxThreadsDim[2] = 64;
  prop.maxGridSize[0] = 0x7fffffff;
  prop.maxGridSize[1] = prop.maxGridSize[2] = 65535;
  prop.totalConstMem = 65536;
  prop.major = capability() / 10;
  prop.minor = capability() % 10;
  prop.textureAlignment = 512;
  prop.multiProcessorCount = 4;
  prop.maxThreadsPerMultiProcessor = 2048;
  prop.maxBlocksPerMultiProcessor = 32;
  prop.concurrentKernels = 1;
  prop.pciBusID = pci_bus(device);
  prop.asyncEngineCount = 2;
  prop.unifiedAddressing = 1;
  prop.streamPrioritiesSupported = 1;
  prop.l2CacheSize = 1 << 20;
  prop.hostRegisterSupported = 1;
  return prop;
}

}  // namespace

int current_device() { return current; }
void adopt_device(int device) { current = device; }
int device_count() { return static_cast<int>(devices().size()); }
cudaError_t broken(int device) { return broken_devices[static_cast<std::size_t>(device)]; }

void break_device(int device, cudaError_t error, const std::string& why) {
  cudaError_t none = cudaSuccess;
  auto& mine = broken_devices[static_cast<std::size_t>(device)];
  if (mine.compare_exchange_strong(none, error)) complain(why);
}

cudaError_t failed(cudaError_t error, const std::string& why) {
  if (!why.empty()) complain(why);
  last_error = error;
  return error;
}

cudaError_t begin_call() {
  if (in_host_function()) {
    return failed(cudaErrorNotPermitted, "a host function on a stream calls CUDA");
  }
  if (const cudaError_t error = usable(); error != cudaSuccess) return failed(error);
  if (const cudaError_t error = broken(current); error != cudaSuccess) return failed(error);
  return cudaSuccess;
}

}  // namespace gatefold_fake

using namespace gatefold_fake;

void cudaFakeBreak(cudaError_t error, const char* why) { break_device(current, error, why); }

cudaError_t cudaGetLastError() {
  launch_was_checked();
  if (const cudaError_t error = broken(current); error != cudaSuccess) return error;
  return std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  launch_was_checked();
  if (const cudaError_t error = broken(current); error != cudaSuccess) return error;
  return last_error;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (const cudaError_t error = usable(); error != cudaSuccess) return failed(error);
  *count = device_count();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t error = usable(); error != cudaSuccess) return failed(error);
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
  current = device;
  return begin_call();
}
cudaError_t cudaGetDevice(int* device) {
  if (const cudaError_t error = usable(); error != cudaSuccess) return failed(error);
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) {
  FAKE_BEGIN();
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
  *prop = properties(device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  FAKE_BEGIN();
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
  const cudaDeviceProp prop = properties(device);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = prop.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: *value = prop.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimY: *value = prop.maxThreadsDim[1]; break;
    case cudaDevAttrMaxBlockDimZ: *value = prop.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = prop.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = prop.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = prop.maxGridSize[2]; break;
    case cudaDevAttrWarpSize: *value = prop.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = prop.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = prop.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = prop.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = prop.minor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(prop.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(prop.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrL2CacheSize: *value = prop.l2CacheSize; break;
    case cudaDevAttrPciBusId: *value = prop.pciBusID; break;
    case cudaDevAttrPciDeviceId: *value = prop.pciDeviceID; break;
    case cudaDevAttrPciDomainId: *value = prop.pciDomainID; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    default:
      return failed(cudaErrorInvalidValue, "cudaDeviceGetAttribute: attribute " +
                                               std::to_string(attribute) + " is not simulated");
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  FAKE_BEGIN();
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
  if (text == nullptr || length < 13) return failed(cudaErrorInvalidValue);
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02X:00.0",
                static_cast<unsigned>(pci_bus(device)));
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  FAKE_BEGIN();
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  FAKE_BEGIN();
  finish_device(current);
  check_guards(current);
  return begin_call();
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kRuntimeVersion;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = static_cast<int>(setting("DRIVER", kRuntimeVersion));
  return cudaSuccess;
}

namespace {
struct ErrorText {
  cudaError_t error;
  const char* name;
  const char* text;
};
// NVIDIA's names; the words are ours.
#define FAKE_ERROR(name, text) \
  ErrorText { name, #name, text }
constexpr ErrorText kErrors[] = {
    FAKE_ERROR(cudaSuccess, "no error"),
    FAKE_ERROR(cudaErrorInvalidValue, "invalid argument"),
    FAKE_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    FAKE_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    FAKE_ERROR(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    FAKE_ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    FAKE_ERROR(cudaErrorInsufficientDriver,
               "CUDA driver version is insufficient for CUDA runtime version"),
    FAKE_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    FAKE_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    FAKE_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    FAKE_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    FAKE_ERROR(cudaErrorNotReady, "device not ready"),
    FAKE_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    FAKE_ERROR(cudaErrorHostMemoryAlreadyRegistered, "host memory is already registered"),
    FAKE_ERROR(cudaErrorHostMemoryNotRegistered, "host memory is not registered"),
    FAKE_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    FAKE_ERROR(cudaErrorNotPermitted, "operation not permitted"),
    FAKE_ERROR(cudaErrorNotSupported, "operation not supported"),
    FAKE_ERROR(cudaErrorUnknown, "unknown error"),
};
}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
  for (const ErrorText& one : kErrors) {
    if (one.error == error) return one.name;
  }
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
  for (const ErrorText& one : kErrors) {
    if (one.error == error) return one.text;
  }
  return "unrecognized error code";
}
