#include "parallel/nccl_communicator.h"
#include "parallel/versions.h"
#include "runtime/error.h"

namespace gatefold {

std::string nccl_version() { return ""; }

std::string nccl_obstacle(Communicator&, const Device&) { return "this build has no NCCL"; }

std::unique_ptr<Communicator> make_nccl_communicator(Communicator&, const Device&, double) {
  throw Error(ExitCode::kUnavailable,
              "no NCCL communicator (this build has no NCCL); configure one with "
              "-DGATEFOLD_NCCL=ON, or let MPI move the data");
}

}  // namespace gatefold
