// A job whose ranks meet at three barriers over NCCL, and end as the program ends on an error.
// `job kill R`: rank R is killed before the second barrier; `job stop R`: it stops there.
#include <cuda_runtime_api.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "parallel/agreement.h"
#include "parallel/nccl_interop.h"
#include "parallel/session.h"

namespace gatefold {
namespace {

constexpr double kTimeout = 3;

void meet(Communicator& world, int signal, int victim) {
  cudaSetDevice(world.rank());
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  NcclOptions options;
  options.timeout_seconds = kTimeout - 1;
  options.grace_seconds = 1;
  const auto comm = make_nccl_communicator(world, stream, options);
  for (int i = 0; i < 3; ++i) {
    world.progress().enter("the test's barriers");
    if (i == 1 && world.rank() == victim) {
      print_error("planted");
      raise(signal);
    }
    comm->barrier();
  }
}

int run(int argc, char** argv) {
  Session session(&argc, &argv, kTimeout);
  session.start();
  Communicator& world = session.world();
  const int signal = argc > 1 && std::strcmp(argv[1], "kill") == 0 ? SIGKILL : SIGSTOP;
  try {
    meet(world, signal, argc > 2 ? std::atoi(argv[2]) : -1);
  } catch (const Error& error) {
    const int code = static_cast<int>(error.code());
    print_error("[rank " + std::to_string(world.rank()) + "] gatefold: " + error.what());
    if (dynamic_cast<const AgreedError*>(&error) != nullptr) return code;
    Session::abort_job(code);
  }
  if (world.rank() == 0) std::puts("all have met");
  return 0;
}

}  // namespace
}  // namespace gatefold

int main(int argc, char** argv) { return gatefold::run(argc, argv); }
