#pragma once

#include <mpi.h>

#include <memory>

#include "parallel/communicator.h"

namespace gatefold {

struct MpiOptions {
  double timeout_seconds = 300;  // without any progress in one wait
  Progress* progress = nullptr;  // must outlive the communicator; null: one of its own
};

/// A communicator over a duplicate of the caller's: the caller has initialised MPI and keeps
/// `comm`; the duplicate is freed with the object, which must go before MPI_Finalize.
/// Collective over `comm`. Throws Error 70.
std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm comm, const MpiOptions& options = {});

}  // namespace gatefold
