#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>

#include "parallel/communicator.h"

namespace gatefold {

struct MpiOptions {
  double timeout_seconds = 300;  // without any progress in one wait
  Progress* progress = nullptr;  // must outlive the communicator; null: one of its own
  /// Larger messages go in pieces of this many bytes: 4 … 2^31-1, because MPI counts are ints.
  std::int64_t max_message_bytes = std::int64_t{1} << 30;
  WithinNode within_node = WithinNode::kSharedMemory;
  /// Ranks of one host share memory if their numbers here are equal, too: for ranks in containers
  /// of their own, and for tests.
  int node = 0;
};

/// A communicator over a duplicate of the caller's: the caller has initialised MPI and keeps
/// `comm`; the duplicate is freed with the object, which must go before MPI_Finalize.
/// Collective over `comm`. Throws Error 64 for a message size out of range, 70.
std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm comm, const MpiOptions& options = {});

}  // namespace gatefold
