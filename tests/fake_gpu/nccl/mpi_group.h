#pragma once
// A communicator over all of MPI's ranks, for a test.

#include <mpi.h>

#include "tests/fake_gpu/nccl/nccl_testing.h"

namespace fake_nccl_testing {

struct World {
  World() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    take_gpu(rank, size);
  }
  ncclUniqueId make_id() const {
    ncclUniqueId id{};
    if (rank == 0) {
      EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    }
    MPI_Bcast(&id, sizeof(id), MPI_BYTE, 0, MPI_COMM_WORLD);
    return id;
  }
  int rank = 0;
  int size = 0;
};

/// Blocking calls or not, for tests that both must pass. Aborted unless the test destroys it.
class NcclTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { open(GetParam()); }
  void TearDown() override {
    if (comm_ != nullptr) {
      EXPECT_EQ(ncclCommAbort(comm_), ncclSuccess);
    }
  }
  void open(int blocking) {
    const ncclUniqueId id = world_.make_id();
    EXPECT_TRUE(accepted(start(&comm_, world_.size, id, world_.rank, blocking)));
    EXPECT_EQ(settle(comm_), ncclSuccess);
  }
  int rank() const { return world_.rank; }
  int size() const { return world_.size; }
  std::size_t ranks() const { return static_cast<std::size_t>(world_.size); }

  World world_;
  Stream stream_;
  ncclComm_t comm_ = nullptr;
};

}  // namespace fake_nccl_testing
