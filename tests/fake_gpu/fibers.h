#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/fake_gpu/fake_cudart.h"

// A block's threads as fibers of the calling thread: one runs until it waits at a barrier, then
// another. The order is shuffled by a seed.

namespace gatefold_fake {

struct Launch {
  const FakeKernel* kernel = nullptr;
  const void* arguments = nullptr;
  dim3 grid;
  dim3 block;
  std::size_t dynamic_shared = 0;
  std::uint64_t seed = 0;
};

/// Runs all blocks on the calling thread. Empty, or what the kernel did wrong.
std::string run_grid(const Launch& launch);

}  // namespace gatefold_fake
