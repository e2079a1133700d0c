// A layer's device and communicator over what someone else's CUDA program has already.
#include <gatefold/parallel/mpi_interop.h>
#include <gatefold/parallel/nccl_interop.h>
#include <gatefold/runtime/cuda_interop.h>
#include <gatefold/runtime/error.h>
#include <mpi.h>

#include <cstdio>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int status = 0;
  try {
    const cudaStream_t stream = cudaStreamPerThread;
    const auto device = gatefold::make_cuda_device_on(stream);
    const auto world = gatefold::make_mpi_communicator(MPI_COMM_WORLD);
    const auto tp = gatefold::make_nccl_communicator(*world, gatefold::cuda_stream(*device));
    std::printf("%s, %s\n", device->description().c_str(), tp->description().c_str());
  } catch (const gatefold::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    status = static_cast<int>(error.code());
  }
  MPI_Finalize();
  return status;
}
