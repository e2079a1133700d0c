#pragma once

#include <string>

namespace gatefold {

// What --version says of this layer; none of it needs MPI to be initialised.

/// "Open MPI v4.1.4".
std::string mpi_version();
/// "2.28.9"; empty where it isn't built in.
std::string nccl_version();

}  // namespace gatefold
