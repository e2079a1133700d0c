#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "runtime/device.h"

namespace gatefold {

/// A device whose work goes to the caller's stream of the current GPU; the stream must outlive it.
/// Throws Error 69 where the machine has no GPU.
std::unique_ptr<Device> make_cuda_device_on(cudaStream_t stream);

/// The stream of a CUDA device's work. Throws Error 70 for another device.
cudaStream_t cuda_stream(const Device& device);

}  // namespace gatefold
