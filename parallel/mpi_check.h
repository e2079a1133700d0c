#pragma once

#include <mpi.h>

namespace gatefold {

/// Throws Error 70 with MPI's own text where `status` isn't MPI_SUCCESS. `call` names the call.
void check(int status, const char* call);

}  // namespace gatefold
