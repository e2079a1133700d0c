// Is there a GPU? Exit 0, or 77 with the reason.
#include <cuda_runtime_api.h>

#include <cstdio>

int main() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaSuccess && devices > 0) return 0;
  std::printf("skipped: no GPU (%s)\n",
              error == cudaSuccess ? "no device" : cudaGetErrorString(error));
  return 77;
}
