// The stand-in libcudart: device memory is host memory full of 0xFF, between guards that are looked
// at whenever the host waits. Every range that a call names must lie in one allocation.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "tests/fake_gpu/cudart.h"
#include "tests/fake_gpu/fake_cudart.h"
#include "tests/fake_gpu/settings.h"

namespace gatefold_fake {
namespace {

constexpr std::size_t kAlignment = 512;
constexpr int kPoison = 0xFF;
constexpr unsigned char kGuard = 0xA5;
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kGuardBytes = 0;  // the sanitizer has its own, which it looks at always
#else
constexpr std::size_t kGuardBytes = kAlignment;
#endif

// From this size on memory is mapped and not filled: pages that nobody touches cost nothing, so
// that a test can have indices above 2^31.
constexpr std::size_t kSparse = std::size_t{1} << 30;

struct Allocation {
  std::size_t bytes = 0;
  int device = -1;          // -1: pinned host memory
  bool registered = false;  // the program's own
};

std::mutex& mutex = *new std::mutex;
auto& allocations = *new std::map<std::uintptr_t, Allocation>;
std::size_t used(int device) {
  std::size_t total = 0;
  for (const auto& [begin, one] : allocations) total += one.device == device ? one.bytes : 0;
  return total;
}

std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

// Device memory can be closed to the host while no stream works, which takes pages of its own (the
// sanitizer knows malloc's) and a lot of time.
bool closes() {
  static const bool value = kGuardBytes > 0 && setting("CLOSED", 0) != 0;
  return value;
}
int users = 0;                                    // under the lock
std::atomic<std::uintptr_t> lowest{UINTPTR_MAX};  // of all device memory ever
std::atomic<std::uintptr_t> highest{0};

void protect(std::uintptr_t begin, std::size_t bytes, int access) {
  mprotect(reinterpret_cast<void*>(begin - kGuardBytes), bytes + 2 * kGuardBytes, access);
}
void protect_all(int access) {
  for (const auto& [begin, one] : allocations) {
    if (one.device >= 0) protect(begin, one.bytes, access);
  }
}

/// Says what it was, and ends the process.
void on_segfault(int signal, siginfo_t* info, void*) {
  constexpr char kText[] = "FAKE GPU: the host reads or writes device memory by its pointer\n";
  const std::uintptr_t at = address(info->si_addr);
  if (info->si_code == SEGV_ACCERR && at >= lowest && at < highest) {
    [[maybe_unused]] const auto written = write(STDERR_FILENO, kText, sizeof(kText) - 1);
  }
  ::signal(signal, SIG_DFL);
  raise(signal);
}
void watch(std::uintptr_t begin, std::size_t bytes) {
  lowest = std::min(lowest.load(), begin);
  highest = std::max(highest.load(), begin + bytes);
  static const bool once = [] {
    struct sigaction action = {};
    action.sa_sigaction = on_segfault;
    action.sa_flags = SA_SIGINFO;
    return sigaction(SIGSEGV, &action, nullptr) == 0;
  }();
  (void)once;
}

struct Found {
  std::uintptr_t begin = 0;
  Allocation allocation;
};
/// The allocation that has the first byte; one past the end counts, so that a range can be named.
std::optional<Found> find(const void* pointer) {
  const std::lock_guard lock(mutex);
  auto after = allocations.upper_bound(address(pointer));
  if (after == allocations.begin()) return std::nullopt;
  const auto& [begin, one] = *--after;
  if (address(pointer) >= begin + std::max<std::size_t>(one.bytes, 1)) return std::nullopt;
  return Found{begin, one};
}

bool inside(const Found& found, const void* pointer, std::size_t bytes) {
  return bytes <= found.begin + found.allocation.bytes - address(pointer);
}

bool whole(std::uintptr_t begin, const Allocation& one) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(begin);
  const auto intact = [](unsigned char byte) { return byte == kGuard; };
  return std::all_of(bytes - kGuardBytes, bytes, intact) &&
         std::all_of(bytes + one.bytes, bytes + one.bytes + kGuardBytes, intact);
}

bool is_mapped(std::size_t bytes, bool device) { return bytes >= kSparse || (closes() && device); }
void* map_or_allocate(std::size_t bytes, bool device) {
  if (is_mapped(bytes, device)) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
  }
  void* memory = nullptr;
  return posix_memalign(&memory, kAlignment, bytes) == 0 ? memory : nullptr;
}
void unmap_or_free(void* memory, std::size_t bytes, bool device) {
  if (is_mapped(bytes, device)) {
    munmap(memory, bytes);
  } else {
    std::free(memory);
  }
}
void poison(void* memory, std::size_t bytes) {
  if (bytes < kSparse) std::memset(memory, kPoison, bytes);
}

cudaError_t allocate(void** pointer, std::size_t bytes, int device) {
  void* memory = map_or_allocate(bytes + 2 * kGuardBytes, device >= 0);
  if (memory == nullptr) return failed(cudaErrorMemoryAllocation);
  auto* begin = static_cast<unsigned char*>(memory) + kGuardBytes;
  poison(memory, bytes + 2 * kGuardBytes);
  std::memset(begin - kGuardBytes, kGuard, kGuardBytes);
  std::memset(begin + bytes, kGuard, kGuardBytes);
  const std::lock_guard lock(mutex);
  allocations[address(begin)] = {bytes, device, false};
  if (closes() && device >= 0) {
    watch(address(begin), bytes);
    if (users == 0) protect(address(begin), bytes, PROT_NONE);
  }
  *pointer = begin;
  return cudaSuccess;
}

cudaError_t release(void* pointer, bool host, const char* call) {
  if (pointer == nullptr) return cudaSuccess;
  const auto found = find(pointer);
  if (!found || found->begin != address(pointer) || (found->allocation.device < 0) != host ||
      found->allocation.registered) {
    return failed(cudaErrorInvalidValue,
                  std::string(call) + ": not the start of a live allocation of this kind");
  }
  const int device = host ? current_device() : found->allocation.device;
  finish_device(device);
  check_guards(device);
  {
    const std::lock_guard lock(mutex);
    allocations.erase(found->begin);
    if (closes() && !host) protect(found->begin, found->allocation.bytes, PROT_READ | PROT_WRITE);
  }
  const std::size_t bytes = found->allocation.bytes + 2 * kGuardBytes;
  unsigned char* memory = static_cast<unsigned char*>(pointer) - kGuardBytes;
  poison(memory, bytes);
  unmap_or_free(memory, bytes, !host);
  return begin_call();
}

/// One end of a copy: where it is, and that its range is inside.
struct End {
  bool device = false;
  bool pinned = false;
  bool whole = true;
};
End look(const void* pointer, std::size_t bytes) {
  const auto found = find(pointer);
  if (!found) return {};
  const bool device = found->allocation.device >= 0;
  return {device, !device, inside(*found, pointer, bytes)};
}

struct Copy {
  void* to = nullptr;
  std::size_t to_pitch = 0;
  const void* from = nullptr;
  std::size_t from_pitch = 0;
  std::size_t width = 0;
  std::size_t height = 0;
  cudaMemcpyKind kind = cudaMemcpyDefault;

  std::size_t extent(std::size_t pitch) const { return pitch * (height - 1) + width; }
  void run() const {
    for (std::size_t row = 0; row < height; ++row) {
      std::memmove(static_cast<char*>(to) + row * to_pitch,
                   static_cast<const char*>(from) + row * from_pitch, width);
    }
  }
};

/// `wait`: the blocking form of the call.
cudaError_t copy(Copy job, cudaStream_t handle, bool wait, const char* call) {
  FAKE_BEGIN();
  if (job.width == 0 || job.height == 0) return cudaSuccess;
  if (job.width > job.to_pitch || job.width > job.from_pitch) {
    return failed(cudaErrorInvalidPitchValue);
  }
  const auto stream = find_stream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  const End to = look(job.to, job.extent(job.to_pitch));
  const End from = look(job.from, job.extent(job.from_pitch));
  const bool right_way =
      job.kind == cudaMemcpyDefault ||
      (to.device == (job.kind == cudaMemcpyHostToDevice || job.kind == cudaMemcpyDeviceToDevice) &&
       from.device == (job.kind == cudaMemcpyDeviceToHost || job.kind == cudaMemcpyDeviceToDevice));
  if (!right_way) {
    return failed(cudaErrorInvalidValue, std::string(call) + ": the direction isn't the pointers'");
  }
  if (!to.whole || !from.whole) {
    return failed(cudaErrorInvalidValue, std::string(call) + ": " +
                                             std::string(to.whole ? "source" : "destination") +
                                             " leaves its allocation");
  }
  // As in CUDA: pageable sources are staged before the call returns, to pageable memory it waits.
  std::shared_ptr<std::vector<char>> staged;
  if (!from.device && !from.pinned && !wait) {
    staged = std::make_shared<std::vector<char>>(job.width * job.height);
    Copy stage = job;
    stage.to = staged->data();
    stage.to_pitch = job.width;
    stage.run();
    job.from = staged->data();
    job.from_pitch = job.width;
  }
  std::function<void()> work = [job, staged] { job.run(); };
  if (fault("copy")) {
    work = [device = device_of(*stream)] {
      break_device(device, cudaErrorIllegalAddress, "a copy fails, as asked");
    };
  }
  enqueue(stream, std::move(work));
  if (wait || (!to.device && !to.pinned)) {
    finish(stream);
    return begin_call();
  }
  return cudaSuccess;
}

cudaError_t fill(void* pointer, int value, std::size_t bytes, cudaStream_t handle) {
  FAKE_BEGIN();
  if (bytes == 0) return cudaSuccess;
  const End end = look(pointer, bytes);
  if (!end.device || !end.whole) {
    return failed(cudaErrorInvalidValue, "cudaMemset: not inside one device allocation");
  }
  const auto stream = find_stream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  enqueue(stream, [=] { std::memset(pointer, value, bytes); });
  return cudaSuccess;
}

}  // namespace

void open_memory() {
  if (!closes()) return;
  const std::lock_guard lock(mutex);
  if (users++ == 0) protect_all(PROT_READ | PROT_WRITE);
}
void close_memory() {
  if (!closes()) return;
  const std::lock_guard lock(mutex);
  if (--users == 0) protect_all(PROT_NONE);
}

void check_guards(int device) {
  std::string where;
  open_memory();
  {
    const std::lock_guard lock(mutex);
    for (const auto& [begin, one] : allocations) {
      if (one.device == device && !whole(begin, one)) {
        where = "something wrote beside a device allocation of " + std::to_string(one.bytes) +
                " bytes (the sanitized stand-ins say what)";
      }
    }
  }
  close_memory();
  if (!where.empty()) break_device(device, cudaErrorIllegalAddress, where);
}

}  // namespace gatefold_fake

using namespace gatefold_fake;

int cudaFakeIsDeviceRange(const void* pointer, std::size_t bytes) {
  const End end = look(pointer, bytes);
  return end.device && end.whole ? 1 : 0;
}
int cudaFakeDeviceOf(const void* pointer) {
  const auto found = find(pointer);
  return found ? found->allocation.device : -1;
}

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  FAKE_BEGIN();
  if (pointer == nullptr) return failed(cudaErrorInvalidValue);
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (fault("malloc")) return failed(cudaErrorMemoryAllocation);
  std::size_t unused = 0;
  std::size_t total = 0;
  if (const cudaError_t error = cudaMemGetInfo(&unused, &total); error != cudaSuccess) return error;
  if (bytes > unused) return failed(cudaErrorMemoryAllocation);
  return allocate(pointer, bytes, current_device());
}
cudaError_t cudaFree(void* pointer) {
  FAKE_BEGIN();
  return release(pointer, false, "cudaFree");
}

cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  FAKE_BEGIN();
  if (pointer == nullptr) return failed(cudaErrorInvalidValue);
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (fault("host_malloc")) return failed(cudaErrorMemoryAllocation);
  return allocate(pointer, bytes, -1);
}
cudaError_t cudaMallocHost(void** pointer, std::size_t bytes) {
  return cudaHostAlloc(pointer, bytes, 0);
}
cudaError_t cudaFreeHost(void* pointer) {
  FAKE_BEGIN();
  return release(pointer, true, "cudaFreeHost");
}

cudaError_t cudaHostRegister(void* pointer, std::size_t bytes, unsigned) {
  FAKE_BEGIN();
  if (pointer == nullptr || bytes == 0) return failed(cudaErrorInvalidValue);
  if (find(pointer)) return failed(cudaErrorHostMemoryAlreadyRegistered);
  const std::lock_guard lock(mutex);
  allocations[address(pointer)] = {bytes, -1, true};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  FAKE_BEGIN();
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(address(pointer));
  if (found == allocations.end() || !found->second.registered) {
    return failed(cudaErrorHostMemoryNotRegistered);
  }
  allocations.erase(found);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* unused, std::size_t* total) {
  FAKE_BEGIN();
  cudaDeviceProp prop{};
  if (const cudaError_t error = cudaGetDeviceProperties(&prop, current_device())) return error;
  const std::lock_guard lock(mutex);
  *total = prop.totalGlobalMem;
  *unused = *total - used(current_device());
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  FAKE_BEGIN();
  *attributes = {};
  attributes->device = -2;
  const auto found = find(pointer);
  if (!found) return cudaSuccess;
  auto* mutable_pointer = const_cast<void*>(pointer);
  const bool device = found->allocation.device >= 0;
  attributes->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = device ? found->allocation.device : current_device();
  attributes->devicePointer = mutable_pointer;
  attributes->hostPointer = device ? nullptr : mutable_pointer;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copy({to, bytes, from, bytes, bytes, 1, kind}, stream, false, "cudaMemcpyAsync");
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return copy({to, bytes, from, bytes, bytes, 1, kind}, nullptr, true, "cudaMemcpy");
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  return copy({to, to_pitch, from, from_pitch, width, height, kind}, stream, false,
              "cudaMemcpy2DAsync");
}
cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                         std::size_t width, std::size_t height, cudaMemcpyKind kind) {
  return copy({to, to_pitch, from, from_pitch, width, height, kind}, nullptr, true, "cudaMemcpy2D");
}
cudaError_t cudaMemsetAsync(void* pointer, int value, std::size_t bytes, cudaStream_t stream) {
  return fill(pointer, value, bytes, stream);
}
cudaError_t cudaMemset(void* pointer, int value, std::size_t bytes) {
  return fill(pointer, value, bytes, nullptr);
}
