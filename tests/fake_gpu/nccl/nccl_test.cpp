// What the program counts on NCCL to do; true of NCCL itself and of the stand-in.
#include <cuda_bf16.h>

#include "tests/fake_gpu/nccl/mpi_group.h"

namespace fake_nccl_testing {
namespace {

using Floats = std::vector<float>;

float value_of(int rank, std::size_t i) {
  return static_cast<float>((rank + 1) * static_cast<int>(i % 100));
}

Floats values_of(int rank, std::size_t count, std::size_t first = 0) {
  Floats values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = value_of(rank, first + i);
  return values;
}

/// Larger than the stand-in's rings, and odd.
constexpr std::size_t kCounts[] = {0, 1, 257, 70001};

TEST_P(NcclTest, AllReduceAddsIntegersExactlyInPlaceAndNot) {
  for (const std::size_t count : kCounts) {
    const OnDevice<float> in(values_of(rank(), count));
    const OnDevice<float> out(Floats(count, -1));
    Floats sums(count);
    for (std::size_t i = 0; i < count; ++i) {
      for (int r = 0; r < size(); ++r) sums[i] += value_of(r, i);
    }
    EXPECT_TRUE(accepted(
        ncclAllReduce(in.data(), out.data(), count, ncclFloat32, ncclSum, comm_, stream_)));
    EXPECT_EQ(finish(comm_, stream_), ncclSuccess);
    EXPECT_EQ(out.get(), sums);
    EXPECT_TRUE(
        accepted(ncclAllReduce(in.data(), in.data(), count, ncclFloat32, ncclSum, comm_, stream_)));
    EXPECT_EQ(finish(comm_, stream_), ncclSuccess);
    EXPECT_EQ(in.get(), sums);
  }
}

TEST_P(NcclTest, AllReduceKnowsBfloat16AndIntegersAndTheMaximum) {
  std::vector<__nv_bfloat16> halves(33, __float2bfloat16(static_cast<float>(rank() + 1)));
  const OnDevice<__nv_bfloat16> half(halves);
  const OnDevice<std::int64_t> whole(
      std::vector<std::int64_t>(5, std::int64_t{1} << (40 + rank())));
  ncclGroupStart();
  ncclAllReduce(half.data(), half.data(), 33, ncclBfloat16, ncclSum, comm_, stream_);
  ncclAllReduce(whole.data(), whole.data(), 5, ncclInt64, ncclMax, comm_, stream_);
  EXPECT_TRUE(accepted(ncclGroupEnd()));
  EXPECT_EQ(finish(comm_, stream_), ncclSuccess);
  EXPECT_EQ(__bfloat162float(half.get()[32]), static_cast<float>(size() * (size() + 1) / 2));
  EXPECT_EQ(whole.get(), std::vector<std::int64_t>(5, std::int64_t{1} << (39 + size())));
}

TEST_P(NcclTest, BroadcastComesFromEachRoot) {
  for (int root = 0; root < size(); ++root) {
    for (const std::size_t count : kCounts) {
      const OnDevice<float> data(values_of(rank(), count));
      EXPECT_TRUE(accepted(
          ncclBroadcast(data.data(), data.data(), count, ncclFloat32, root, comm_, stream_)));
      EXPECT_EQ(finish(comm_, stream_), ncclSuccess);
      EXPECT_EQ(data.get(), values_of(root, count));
    }
  }
}

TEST_P(NcclTest, ReduceGivesTheSumToTheRootOnly) {
  for (int root = 0; root < size(); ++root) {
    const OnDevice<float> in(Floats(9, static_cast<float>(rank() + 1)));
    const OnDevice<float> out(Floats(9, -1));
    EXPECT_TRUE(
        accepted(ncclReduce(in.data(), out.data(), 9, ncclFloat32, ncclSum, root, comm_, stream_)));
    EXPECT_EQ(finish(comm_, stream_), ncclSuccess);
    const auto sum = static_cast<float>(size() * (size() + 1) / 2);
    EXPECT_EQ(out.get(), Floats(9, rank() == root ? sum : -1));
  }
}

TEST_P(NcclTest, AllGatherPutsPartsInRankOrder) {
  for (const std::size_t count : kCounts) {
    Floats expected;
    for (int r = 0; r < size(); ++r) {
      const Floats part = values_of(r, count);
      expected.insert(expected.end(), part.begin(), part.end());
    }
    const OnDevice<float> in(values_of(rank(), count));
    const OnDevice<float> out(Floats(ranks() * count, -1));
    EXPECT_TRUE(accepted(ncclAllGather(in.data(), out.data(), count, ncclFloat32, comm_, stream_)));
    EXPECT_EQ(finish(comm_, stream_), ncclSuccess);
    EXPECT_EQ(out.get(), expected);
  }
}

TEST_P(NcclTest, ReduceScatterIsHalfAnAllReduce) {
  for (const std::size_t count : kCounts) {
    const OnDevice<float> in(values_of(rank(), ranks() * count));
    const OnDevice<float> out(Floats(count, -1));
    Floats expected(count);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t at = static_cast<std::size_t>(rank()) * count + i;
      for (int r = 0; r < size(); ++r) expected[i] += value_of(r, at);
    }
    EXPECT_TRUE(accepted(
        ncclReduceScatter(in.data(), out.data(), count, ncclFloat32, ncclSum, comm_, stream_)));
    EXPECT_EQ(finish(comm_, stream_), ncclSuccess);
    EXPECT_EQ(out.get(), expected);
  }
}

TEST_P(NcclTest, AGroupOfMessagesIsAnAllToAllOfAnySizesTheOwnIncluded) {
  const auto count_of = [](int from, int to) {
    return static_cast<std::size_t>((from * 7 + to * 3) % 4 * 20011);
  };
  std::vector<std::unique_ptr<OnDevice<float>>> sends;
  std::vector<std::unique_ptr<OnDevice<float>>> receives;
  ncclGroupStart();
  for (int peer = 0; peer < size(); ++peer) {
    const std::size_t out = count_of(rank(), peer);
    const std::size_t in = count_of(peer, rank());
    sends.push_back(
        std::make_unique<OnDevice<float>>(values_of(rank(), out, static_cast<std::size_t>(peer))));
    receives.push_back(std::make_unique<OnDevice<float>>(Floats(in, -1)));
    ncclSend(sends.back()->data(), out, ncclFloat32, peer, comm_, stream_);
    ncclRecv(receives.back()->data(), in, ncclFloat32, peer, comm_, stream_);
  }
  EXPECT_TRUE(accepted(ncclGroupEnd()));
  EXPECT_EQ(finish(comm_, stream_), ncclSuccess);
  for (int peer = 0; peer < size(); ++peer) {
    EXPECT_EQ(receives[static_cast<std::size_t>(peer)]->get(),
              values_of(peer, count_of(peer, rank()), static_cast<std::size_t>(rank())));
  }
}

TEST_P(NcclTest, SeveralMessagesBetweenTwoRanksKeepTheirOrder) {
  const int next = (rank() + 1) % size();
  const int last = (rank() + size() - 1) % size();
  const OnDevice<float> out({1, 2, 3});
  const OnDevice<float> in(Floats(3, -1));
  ncclGroupStart();
  for (std::size_t i = 0; i < 3; ++i) {
    ncclSend(out.data() + i, 1, ncclFloat32, next, comm_, stream_);
    ncclRecv(in.data() + 2 - i, 1, ncclFloat32, last, comm_, stream_);
  }
  EXPECT_TRUE(accepted(ncclGroupEnd()));
  EXPECT_EQ(finish(comm_, stream_), ncclSuccess);
  EXPECT_EQ(in.get(), Floats({3, 2, 1}));
}

TEST_P(NcclTest, ACallReturnsBeforeItsPeersComeAndItsStreamSaysSo) {
  if (size() < 2) GTEST_SKIP() << "one rank has no peers";
  const OnDevice<float> data(Floats(4, 1));
  if (rank() == 0) {
    EXPECT_TRUE(
        accepted(ncclAllReduce(data.data(), data.data(), 4, ncclFloat32, ncclSum, comm_, stream_)));
    EXPECT_EQ(settle(comm_), ncclSuccess);
    EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank() != 0) {
    EXPECT_TRUE(
        accepted(ncclAllReduce(data.data(), data.data(), 4, ncclFloat32, ncclSum, comm_, stream_)));
  }
  EXPECT_EQ(finish(comm_, stream_), ncclSuccess);
  EXPECT_EQ(data.get(), Floats(4, static_cast<float>(size())));
}

TEST_P(NcclTest, OperationsFollowTheirStream) {
  const std::vector<float> ones(100000, 1);
  const OnDevice<float> data(Floats(ones.size(), 0));
  EXPECT_EQ(cudaMemcpyAsync(data.data(), ones.data(), ones.size() * sizeof(float),
                            cudaMemcpyHostToDevice, stream_),
            cudaSuccess);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(accepted(ncclAllReduce(data.data(), data.data(), ones.size(), ncclFloat32, ncclSum,
                                       comm_, stream_)));
    EXPECT_EQ(settle(comm_), ncclSuccess);
  }
  EXPECT_EQ(finish(comm_, stream_), ncclSuccess);
  EXPECT_EQ(data.get(), Floats(ones.size(), static_cast<float>(size() * size() * size())));
}

TEST_P(NcclTest, SplitsByColourAndOrdersByKey) {
  for (int round = 0; round < 3; ++round) {
    const int colour = rank() % 2 == 0 ? 5 : round == 1 ? NCCL_SPLIT_NOCOLOR : 6;
    ncclComm_t part = nullptr;
    EXPECT_TRUE(accepted(ncclCommSplit(comm_, colour, -rank(), &part, nullptr)));
    EXPECT_EQ(settle(comm_), ncclSuccess);
    EXPECT_EQ(part == nullptr, colour == NCCL_SPLIT_NOCOLOR);
    if (part == nullptr) continue;
    EXPECT_EQ(settle(part), ncclSuccess);
    int part_rank = -1;
    int part_size = -1;
    EXPECT_EQ(ncclCommUserRank(part, &part_rank), ncclSuccess);
    EXPECT_EQ(ncclCommCount(part, &part_size), ncclSuccess);
    EXPECT_EQ(part_size, (size() + 1 - rank() % 2) / 2);
    EXPECT_EQ(part_rank, part_size - 1 - rank() / 2);
    const OnDevice<float> sum(Floats(3, static_cast<float>(rank())));
    EXPECT_TRUE(
        accepted(ncclAllReduce(sum.data(), sum.data(), 3, ncclFloat32, ncclSum, part, stream_)));
    EXPECT_EQ(finish(part, stream_), ncclSuccess);
    const int members = part_size * (rank() % 2) + part_size * (part_size - 1);
    EXPECT_EQ(sum.get(), Floats(3, static_cast<float>(members)));
    EXPECT_TRUE(accepted(ncclCommFinalize(part)));
    EXPECT_EQ(settle(part), ncclSuccess);
    EXPECT_EQ(ncclCommDestroy(part), ncclSuccess);
  }
}

TEST_P(NcclTest, FinalizesAndIsDestroyed) {
  const OnDevice<float> data(Floats(4, 1));
  EXPECT_TRUE(
      accepted(ncclAllReduce(data.data(), data.data(), 4, ncclFloat32, ncclSum, comm_, stream_)));
  EXPECT_EQ(settle(comm_), ncclSuccess);
  EXPECT_TRUE(accepted(ncclCommFinalize(comm_)));
  EXPECT_EQ(settle(comm_), ncclSuccess);
  EXPECT_EQ(ncclCommDestroy(comm_), ncclSuccess);
  comm_ = nullptr;
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(data.get(), Floats(4, static_cast<float>(size())));
}

INSTANTIATE_TEST_SUITE_P(Calls, NcclTest, ::testing::Values(1, 0), [](const auto& test) {
  return std::string(test.param != 0 ? "blocking" : "not_blocking");
});

TEST(Nccl, AnAbortEndsAnOperationThatWaitsForItsPeer) {
  const World world;
  ncclComm_t comm = nullptr;
  const ncclUniqueId id = world.make_id();
  EXPECT_TRUE(accepted(start(&comm, world.size, id, world.rank, 0)));
  EXPECT_EQ(settle(comm), ncclSuccess);
  Stream stream;
  const OnDevice<float> data(Floats(4, 1));
  if (world.rank == 0 && world.size > 1) {
    EXPECT_TRUE(
        accepted(ncclAllReduce(data.data(), data.data(), 4, ncclFloat32, ncclSum, comm, stream)));
    EXPECT_EQ(finish(comm, stream, 0.5), ncclInProgress);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
}

TEST(Nccl, SaysWhichVersionItIs) {
  int version = 0;
  EXPECT_EQ(ncclGetVersion(&version), ncclSuccess);
  EXPECT_GE(version, 22800);
  EXPECT_STRNE(ncclGetErrorString(ncclRemoteError), ncclGetErrorString(ncclSuccess));
}

}  // namespace
}  // namespace fake_nccl_testing
