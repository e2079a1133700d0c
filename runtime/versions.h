#pragma once

#include <string>

namespace gatefold {

// What --version says of this layer; none of it needs a GPU.

/// "2.6.3 (AVX-512 BF16)"; empty where it isn't built in.
std::string onednn_version();
/// "toolkit 13.0, runtime 13.0, cuBLASLt 13.1.0, compute 8.0, 9.0, 10.0": the last, what GPUs the
/// kernels were compiled for. Empty where it isn't built in.
std::string cuda_version();
/// The GPUs that this process sees, "2 x NVIDIA H200, 139 GiB, compute 9.0; driver for CUDA 13.0".
/// Empty where there are none.
std::string cuda_found();

}  // namespace gatefold
