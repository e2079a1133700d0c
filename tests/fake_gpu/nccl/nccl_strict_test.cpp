// Where NCCL would hang, or move the wrong bytes, the stand-in says what is wrong and who did it.
#include <gmock/gmock.h>

#include "tests/fake_gpu/nccl/mpi_group.h"

namespace fake_nccl_testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using Floats = std::vector<float>;

class Strict : public NcclTest {
 protected:
  void SetUp() override {
    if (!on_stand_in()) GTEST_SKIP() << "NCCL itself hangs here";
    if (size() < 2) GTEST_SKIP() << "one rank has no peers";
    open(0);
  }
  int other() const { return rank() == 0 ? 1 : 0; }
  /// What each rank gives is refused on all, with the two named.
  void expect_refused(ncclResult_t call) {
    EXPECT_TRUE(accepted(call));
    EXPECT_EQ(finish(comm_, stream_), ncclInvalidUsage);
    EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady) << "a failed operation doesn't complete";
    const std::string why = ncclGetLastError(comm_);
    if (why.find("another rank") == std::string::npos) {
      EXPECT_THAT(why, AllOf(HasSubstr("rank 0"), ContainsRegex("rank [12]")));
    }
    EXPECT_EQ(ncclAllReduce(a_.data(), a_.data(), 1, ncclFloat32, ncclSum, comm_, stream_),
              ncclInvalidUsage);
    EXPECT_EQ(ncclCommDestroy(comm_), ncclInvalidUsage) << "only an abort ends it";
    // To a rank that hasn't looked yet, one that aborts is a lost peer.
    MPI_Barrier(MPI_COMM_WORLD);
    EXPECT_EQ(ncclCommAbort(comm_), ncclSuccess);
    comm_ = nullptr;
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }

  OnDevice<float> a_{Floats(16, 1)};
  OnDevice<float> b_{Floats(16, 1)};
};

TEST_F(Strict, CountsThatDiffer) {
  expect_refused(ncclAllReduce(a_.data(), a_.data(), rank() == 0 ? 8 : 16, ncclFloat32, ncclSum,
                               comm_, stream_));
}

TEST_F(Strict, TypesThatDifferThoughTheBytesAreTheSame) {
  expect_refused(ncclAllReduce(a_.data(), a_.data(), 8, rank() == 0 ? ncclFloat32 : ncclInt32,
                               ncclSum, comm_, stream_));
}

TEST_F(Strict, OperatorsThatDiffer) {
  expect_refused(ncclAllReduce(a_.data(), a_.data(), 8, ncclFloat32,
                               rank() == 0 ? ncclSum : ncclMax, comm_, stream_));
}

TEST_F(Strict, RootsThatDiffer) {
  expect_refused(
      ncclBroadcast(a_.data(), a_.data(), 8, ncclFloat32, rank() == 0 ? 0 : 1, comm_, stream_));
}

TEST_F(Strict, CollectivesThatDiffer) {
  expect_refused(rank() == 0
                     ? ncclAllReduce(a_.data(), a_.data(), 4, ncclFloat32, ncclSum, comm_, stream_)
                     : ncclBroadcast(a_.data(), a_.data(), 4, ncclFloat32, 0, comm_, stream_));
}

TEST_F(Strict, AMessageOfAnotherLengthThanItsReceive) {
  expect_refused(rank() == 0 ? ncclSend(a_.data(), 8, ncclFloat32, 1, comm_, stream_)
                             : ncclRecv(a_.data(), 7, ncclFloat32, 0, comm_, stream_));
}

TEST_F(Strict, AMessageThatMeetsACollective) {
  expect_refused(
      rank() == 0 ? ncclRecv(a_.data(), 8, ncclFloat32, 1, comm_, stream_)
                  : ncclAllReduce(a_.data(), a_.data(), 8, ncclFloat32, ncclSum, comm_, stream_));
}

TEST_F(Strict, AMessageToItselfThatNobodyReceives) {
  EXPECT_EQ(ncclSend(a_.data(), 4, ncclFloat32, rank(), comm_, stream_), ncclInvalidUsage);
}

TEST_F(Strict, TwoThatSendAndThenReceiveWaitForEachOther) {
  const OnDevice<float> large(Floats(1 << 20, 1));
  ncclSend(large.data(), 1 << 20, ncclFloat32, (rank() + 1) % size(), comm_, stream_);
  EXPECT_EQ(settle(comm_), ncclSuccess);
  ncclRecv(large.data(), 1 << 20, ncclFloat32, (rank() + size() - 1) % size(), comm_, stream_);
  EXPECT_EQ(finish(comm_, stream_, 0.3), ncclInProgress);
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_EQ(ncclCommAbort(comm_), ncclSuccess);  // before the memory goes, which waits for all work
  comm_ = nullptr;
}

TEST_F(Strict, AnEmptyMessageThatOnlyOneSideKnowsOf) {
  if (rank() == 0) {
    EXPECT_TRUE(accepted(ncclSend(nullptr, 0, ncclFloat32, 1, comm_, stream_)));
    EXPECT_EQ(finish(comm_, stream_, 0.3), ncclInProgress);
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST_F(Strict, HostMemory) {
  Floats host(8);
  EXPECT_EQ(ncclAllReduce(host.data(), a_.data(), 8, ncclFloat32, ncclSum, comm_, stream_),
            ncclInvalidArgument);
  EXPECT_EQ(ncclRecv(host.data(), 8, ncclFloat32, other(), comm_, stream_), ncclInvalidArgument);
  EXPECT_EQ(ncclSend(nullptr, 8, ncclFloat32, other(), comm_, stream_), ncclInvalidArgument);
}

TEST_F(Strict, MemoryPastItsEnd) {
  EXPECT_EQ(ncclSend(a_.data() + 9, 8, ncclFloat32, other(), comm_, stream_), ncclInvalidArgument);
  EXPECT_EQ(ncclAllGather(a_.data(), b_.data(), 16, ncclFloat32, comm_, stream_),
            ncclInvalidArgument);
}

TEST_F(Strict, RanksTypesAndOperatorsThatThereAreNot) {
  EXPECT_EQ(ncclSend(a_.data(), 1, ncclFloat32, size(), comm_, stream_), ncclInvalidArgument);
  EXPECT_EQ(ncclSend(a_.data(), 1, ncclNumTypes, other(), comm_, stream_), ncclInvalidArgument);
  EXPECT_EQ(ncclAllReduce(a_.data(), a_.data(), 1, ncclFloat32, ncclAvg, comm_, stream_),
            ncclInvalidUsage);
}

TEST_F(Strict, OneStreamForEachGroup) {
  const Stream second;
  ncclGroupStart();
  ncclSend(a_.data(), 1, ncclFloat32, other(), comm_, stream_);
  EXPECT_EQ(ncclRecv(b_.data(), 1, ncclFloat32, other(), comm_, second), ncclInvalidUsage);
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage) << "an end without a start";
}

TEST_F(Strict, ACallBeforeTheLastOneIsThrough) {
  EXPECT_EQ(ncclAllReduce(a_.data(), a_.data(), 1, ncclFloat32, ncclSum, comm_, stream_),
            ncclInProgress);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaSuccess) << "nothing is on the stream yet";
  EXPECT_EQ(ncclAllReduce(a_.data(), a_.data(), 1, ncclFloat32, ncclSum, comm_, stream_),
            ncclInvalidArgument);
  EXPECT_EQ(finish(comm_, stream_), ncclSuccess);
}

TEST_F(Strict, ACallIsThroughWithTheSecondPoll) {
  EXPECT_EQ(ncclAllReduce(a_.data(), a_.data(), 1, ncclFloat32, ncclSum, comm_, stream_),
            ncclInProgress);
  ncclResult_t state = ncclSuccess;
  EXPECT_EQ(ncclCommGetAsyncError(comm_, &state), ncclSuccess);
  EXPECT_EQ(state, ncclInProgress);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaSuccess) << "nothing is on the stream yet";
  EXPECT_EQ(ncclCommGetAsyncError(comm_, &state), ncclSuccess);
  EXPECT_EQ(state, ncclSuccess);
  EXPECT_EQ(finish(comm_, stream_), ncclSuccess);
  EXPECT_EQ(a_.get()[0], static_cast<float>(size()));
}

TEST_F(Strict, ARankThatJoinsTwice) {
  const ncclUniqueId id = world_.make_id();
  ncclComm_t first = nullptr;
  const int twin = rank() == 1 ? 0 : rank();  // rank 1 takes rank 0's place
  EXPECT_TRUE(accepted(start(&first, size(), id, twin, 0)));
  EXPECT_EQ(settle(first), ncclInvalidUsage);
  EXPECT_EQ(ncclCommAbort(first), ncclSuccess);
}

TEST_F(Strict, GroupSizesThatDiffer) {
  const ncclUniqueId id = world_.make_id();
  ncclComm_t comm = nullptr;
  EXPECT_TRUE(accepted(start(&comm, rank() == 0 ? size() + 1 : size(), id, rank(), 0)));
  EXPECT_EQ(settle(comm), ncclInvalidUsage);
  EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
}

TEST_F(Strict, OneGpuForTwoRanks) {
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  unsetenv("NCCL_HOSTID");
  const ncclUniqueId id = world_.make_id();
  ncclComm_t comm = nullptr;
  EXPECT_TRUE(accepted(start(&comm, size(), id, rank(), 0)));
  EXPECT_EQ(settle(comm), ncclInvalidUsage);
  EXPECT_THAT(ncclGetLastError(comm), AllOf(HasSubstr("Duplicate GPU"), HasSubstr("rank 0")));
  EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
}

TEST_F(Strict, AnIdThatIsNone) {
  ncclComm_t comm = nullptr;
  EXPECT_TRUE(accepted(start(&comm, size(), ncclUniqueId{}, rank(), 0)));
  EXPECT_EQ(settle(comm), ncclInvalidArgument);
  EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
  ncclConfig_t blank{};
  EXPECT_EQ(ncclCommInitRankConfig(&comm, 1, world_.make_id(), 0, &blank), ncclInvalidArgument);
}

}  // namespace
}  // namespace fake_nccl_testing
