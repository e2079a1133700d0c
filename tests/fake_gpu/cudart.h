#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

// The parts of the stand-in libcudart, and what they share.

namespace gatefold_fake {

// cudart_device.cpp

/// What every call begins with: the sticky error of the current device, or no usable device.
cudaError_t begin_call();
/// Remembers the error for cudaGetLastError; `why` goes to stderr if there is something to say.
cudaError_t failed(cudaError_t error, const std::string& why = "");
int current_device();
/// For the calling thread, unchecked.
void adopt_device(int device);
int device_count();
/// Sticky: every later call on this device returns it.
void break_device(int device, cudaError_t error, const std::string& why);
cudaError_t broken(int device);

// cudart_stream.cpp

class Stream;
/// The stream of a handle, 0 being the default one of the current device; null if there is none.
std::shared_ptr<Stream> find_stream(cudaStream_t handle);
/// Runs `work` after all that the stream has; nothing of it once the device is broken.
void enqueue(const std::shared_ptr<Stream>& stream, std::function<void()> work);
/// Blocks until all that the stream has by now is done.
void finish(const std::shared_ptr<Stream>& stream);
void finish_device(int device);
int device_of(const Stream& stream);
/// Whether the calling thread is inside a function of cudaLaunchHostFunc.
bool in_host_function();

// cudart_launch.cpp

/// cudaGetLastError was asked: the last launch of this thread counts as checked.
void launch_was_checked();

// cudart_memory.cpp

/// Between the two a thread may touch device memory, which is closed to the host otherwise.
void open_memory();
void close_memory();
/// Overwritten guards of the device's allocations break it.
void check_guards(int device);

}  // namespace gatefold_fake

/// Every entry point: `return` what a broken or missing device answers.
#define FAKE_BEGIN()                                                                   \
  do {                                                                                 \
    if (const cudaError_t begun = gatefold_fake::begin_call(); begun != cudaSuccess) { \
      return begun;                                                                    \
    }                                                                                  \
  } while (false)
