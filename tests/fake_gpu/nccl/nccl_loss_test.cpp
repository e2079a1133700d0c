// Ranks that die, and the faults that can be planted. Each rank is a child of the test's process,
// which itself touches neither CUDA nor NCCL, so no MPI ends them before they are through.
#include <sys/wait.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <functional>

#include "tests/fake_gpu/nccl/nccl_testing.h"

namespace fake_nccl_testing {
namespace {

using Floats = std::vector<float>;

/// What rank `rank` of `size` does with its communicator, an id of which all have.
using Role = std::function<int(int rank, const ncclUniqueId& id)>;

[[noreturn]] void play(int rank, int size, const std::array<int, 2>& pipe, const char* plant,
                       const Role& role) {
  alarm(30);
  setenv("OMPI_COMM_WORLD_RANK", std::to_string(rank).c_str(), 1);
  setenv("GATEFOLD_FAKE_GPU_FAIL", plant, 1);
  take_gpu(rank, size);
  ncclUniqueId id{};
  if (rank == 0) {
    if (ncclGetUniqueId(&id) != ncclSuccess) _exit(90);
    for (int r = 1; r < size; ++r) {
      if (write(pipe[1], &id, sizeof(id)) != sizeof(id)) _exit(91);
    }
  } else if (read(pipe[0], &id, sizeof(id)) != sizeof(id)) {
    _exit(92);
  }
  const int code = role(rank, id);
  _exit(::testing::Test::HasFailure() ? 99 : code);
}

/// The ranks' exit codes; minus the signal where one ended it.
std::vector<int> run(int size, const char* plant, const Role& role) {
  std::array<int, 2> pipe{};
  EXPECT_EQ(::pipe(pipe.data()), 0);
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = fork();
    if (child == 0) play(rank, size, pipe, plant, role);
    children.push_back(child);
  }
  std::vector<int> codes;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  close(pipe[0]);
  close(pipe[1]);
  return codes;
}

struct Member {
  Member(int rank, int size, const ncclUniqueId& id) {
    EXPECT_TRUE(accepted(start(&comm, size, id, rank, 0)));
    state = settle(comm, 5);
  }
  ncclResult_t all_reduce(double seconds = 5) {
    const ncclResult_t given =
        ncclAllReduce(data.data(), data.data(), 8, ncclFloat32, ncclSum, comm, stream);
    return accepted(given) ? finish(comm, stream, seconds) : given;
  }
  ncclComm_t comm = nullptr;
  ncclResult_t state = ncclInProgress;
  Stream stream;
  OnDevice<float> data{Floats(8, 1)};
};

class NcclLoss : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!on_stand_in()) GTEST_SKIP() << "faults are planted in the stand-in only";
  }
};

TEST_F(NcclLoss, SurvivorsOfAKilledRankGetARemoteErrorAndNothingStaysBehind) {
  const auto files = [] {
    return std::distance(std::filesystem::directory_iterator("/dev/shm"),
                         std::filesystem::directory_iterator());
  };
  const auto before = files();
  const auto begin = Clock::now();
  const std::vector<int> codes = run(3, "", [](int rank, const ncclUniqueId& id) {
    Member member(rank, 3, id);
    EXPECT_EQ(member.all_reduce(), ncclSuccess);
    if (rank == 1) raise(SIGKILL);
    EXPECT_EQ(member.all_reduce(), ncclRemoteError);
    EXPECT_EQ(cudaStreamQuery(member.stream), cudaErrorNotReady);
    EXPECT_EQ(ncclCommAbort(member.comm), ncclSuccess);
    EXPECT_EQ(cudaStreamSynchronize(member.stream), cudaSuccess);
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>({0, -SIGKILL, 0}));
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(30));
  EXPECT_EQ(files(), before);
}

TEST_F(NcclLoss, ARankKilledAfterItJoinedEndsTheOthersStart) {
  const std::vector<int> codes = run(3, "", [](int rank, const ncclUniqueId& id) {
    if (rank == 2) raise(SIGKILL);  // never joins
    ncclComm_t comm = nullptr;
    EXPECT_TRUE(accepted(start(&comm, 3, id, rank, 0)));
    if (rank == 1) {
      settle(comm, 0.2);
      raise(SIGKILL);
    }
    EXPECT_EQ(settle(comm, 5), ncclRemoteError);
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>({0, -SIGKILL, -SIGKILL}));
}

TEST_F(NcclLoss, AnIdDiesWithItsMaker) {
  const std::vector<int> codes = run(2, "", [](int rank, const ncclUniqueId& id) {
    if (rank == 0) raise(SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_EQ(Member(rank, 2, id).state, ncclRemoteError);
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>({-SIGKILL, 0}));
}

TEST_F(NcclLoss, AnAbortIsALossToThePeers) {
  const std::vector<int> codes = run(2, "", [](int rank, const ncclUniqueId& id) {
    Member member(rank, 2, id);
    if (rank == 1) {
      EXPECT_EQ(member.all_reduce(), ncclRemoteError);
    }
    EXPECT_EQ(ncclCommAbort(member.comm), ncclSuccess);
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>({0, 0}));
}

TEST_F(NcclLoss, ADeathCanBeSilent) {
  setenv("GATEFOLD_FAKE_GPU_SILENT_DEATH", "1", 1);
  const std::vector<int> codes = run(2, "", [](int rank, const ncclUniqueId& id) {
    Member member(rank, 2, id);
    if (rank == 1) raise(SIGKILL);
    EXPECT_EQ(member.all_reduce(0.5), ncclInProgress);
    EXPECT_EQ(ncclCommAbort(member.comm), ncclSuccess);
    return 0;
  });
  unsetenv("GATEFOLD_FAKE_GPU_SILENT_DEATH");
  EXPECT_EQ(codes, std::vector<int>({0, -SIGKILL}));
}

TEST_F(NcclLoss, TheSecondLaunchOfRankOneFailsAndNeverCompletes) {
  const std::vector<int> codes = run(2, "nccl_fail:2@1", [](int rank, const ncclUniqueId& id) {
    Member member(rank, 2, id);
    EXPECT_EQ(member.all_reduce(), ncclSuccess);
    EXPECT_EQ(member.all_reduce(0.5), rank == 1 ? ncclSystemError : ncclInProgress);
    EXPECT_EQ(cudaStreamQuery(member.stream), cudaErrorNotReady);
    std::this_thread::sleep_for(std::chrono::milliseconds(900));
    EXPECT_EQ(ncclCommAbort(member.comm), ncclSuccess);
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>({0, 0}));
}

TEST_F(NcclLoss, ALaunchStallsAndNobodySaysWhy) {
  const std::vector<int> codes = run(2, "nccl_stall:1@0", [](int rank, const ncclUniqueId& id) {
    Member member(rank, 2, id);
    EXPECT_EQ(member.all_reduce(0.5), ncclInProgress);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_EQ(ncclCommAbort(member.comm), ncclSuccess);
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>({0, 0}));
}

TEST_F(NcclLoss, ACallIsRefused) {
  const std::vector<int> codes = run(2, "nccl_refuse:1@0", [](int rank, const ncclUniqueId& id) {
    Member member(rank, 2, id);
    EXPECT_EQ(member.all_reduce(), rank == 0 ? ncclInternalError : ncclRemoteError);
    EXPECT_EQ(ncclCommAbort(member.comm), ncclSuccess);
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>({0, 0}));
}

TEST_F(NcclLoss, ARankNeverJoinsAndAnAbortEndsTheWait) {
  const std::vector<int> codes = run(2, "nccl_init:1@1", [](int rank, const ncclUniqueId& id) {
    ncclComm_t comm = nullptr;
    EXPECT_TRUE(accepted(start(&comm, 2, id, rank, 0)));
    EXPECT_EQ(settle(comm, 0.5), ncclInProgress);
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>({0, 0}));
}

TEST_F(NcclLoss, AnAbortThatBlocks) {
  const std::vector<int> codes = run(1, "nccl_abort:1@0", [](int rank, const ncclUniqueId& id) {
    const Member member(rank, 1, id);
    std::thread([&] { ncclCommAbort(member.comm), _exit(1); }).detach();
    std::this_thread::sleep_for(std::chrono::milliseconds(1300));
    return 7;
  });
  EXPECT_EQ(codes, std::vector<int>({7}));
}

TEST_F(NcclLoss, AnAbortUnderAnotherThreadsCallEndsTheProcess) {
  const std::vector<int> codes = run(2, "", [](int rank, const ncclUniqueId& id) {
    ncclComm_t comm = nullptr;
    EXPECT_EQ(start(&comm, 2, id, rank, 1), ncclSuccess);
    if (rank == 0) {
      std::thread([comm] { ncclCommFinalize(comm); }).detach();  // waits for its peer
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      ncclCommAbort(comm);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>({-SIGABRT, 0}));
}

TEST_F(NcclLoss, RefusesToWorkWithoutTheRigsVariable) {
  const std::vector<int> codes = run(1, "", [](int, const ncclUniqueId&) {
    unsetenv("GATEFOLD_FAKE_GPU");
    ncclUniqueId id{};
    EXPECT_EQ(ncclGetUniqueId(&id), ncclSystemError);
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>({0}));
}

}  // namespace
}  // namespace fake_nccl_testing
