// What a process promises when it is told to end, stands still or gives up: each in a child process
// of its own, a world of one.
#include "parallel/session.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "runtime/error.h"
#include "runtime/output_file.h"

namespace gatefold {
namespace {

using ::testing::ExitedWithCode;
using ::testing::KilledBySignal;

constexpr const char* kVariables[] = {
    "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS",
    "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"};

class Launched : public ::testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }
  static void clear() {
    for (const char* name : kVariables) ::unsetenv(name);
  }
};

TEST_F(Launched, WithoutALauncherThereIsNoCountAndRank0) {
  EXPECT_EQ(launched_processes(), 0);
  EXPECT_EQ(launched_rank(), 0);
}

TEST_F(Launched, EachLauncherIsHeardAndTheFirstOneCounts) {
  int number = 10;
  // From the last to the first: each that is added takes over.
  for (const char* name : {"SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"}) {
    ::setenv(name, std::to_string(++number).c_str(), 1);
    EXPECT_EQ(launched_processes(), number) << name;
  }
  for (const char* name : {"SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"}) {
    ::setenv(name, std::to_string(++number).c_str(), 1);
    EXPECT_EQ(launched_rank(), number) << name;
  }
}

TEST_F(Launched, WhatABatchShellHasTooCountsForNothing) {
  ::setenv("SLURM_NTASKS", "4", 1);
  EXPECT_EQ(launched_processes(), 0);
}

class SessionDeathTest : public Launched {
 protected:
  void SetUp() override {
    Launched::SetUp();
    // Whatever a shell's & or nohup lets this test ignore.
    for (const int signal : {SIGHUP, SIGINT, SIGTERM}) std::signal(signal, SIG_DFL);
    ::setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    ::setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    folder_ = std::filesystem::path(::testing::TempDir()) /
              ("gatefold_session_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override {
    // The child left no temporary file, nor one under the name that was asked for.
    EXPECT_TRUE(std::filesystem::is_empty(folder_));
    std::filesystem::remove_all(folder_);
    Launched::TearDown();
  }

  static std::unique_ptr<Session> started(double timeout_seconds = 100) {
    auto session = std::make_unique<Session>(nullptr, nullptr, timeout_seconds);
    session->start();
    return session;
  }
  std::string file() const { return (folder_ / "y").string(); }

 private:
  std::filesystem::path folder_;
};

void sleep_for(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

/// Sends `signal` to this process and gives it time to take effect.
void get(int signal) {
  ::kill(::getpid(), signal);
  sleep_for(10000);
  std::_Exit(0);
}

TEST_F(SessionDeathTest, AProcessThatIsToldToEndSaysWhatItWasDoingAndCleansUp) {
  const std::pair<int, std::string> signals[] = {
      {SIGHUP, "hung up"}, {SIGINT, "interrupted"}, {SIGTERM, "terminated"}};
  for (const auto& [signal, word] : signals) {
    EXPECT_EXIT(
        {
          const auto session = started();
          const OutputFile unfinished(file());
          session->world().progress().enter("the work of this test");
          get(signal);
        },
        ExitedWithCode(128 + signal),
        "^\\[rank 0\\] " + word + " while in: the work of this test\n$");
  }
}

TEST_F(SessionDeathTest, WhatTheProcessWasStartedToIgnoreEndsNothing) {
  EXPECT_EXIT(
      {
        std::signal(SIGHUP, SIG_IGN);
        const auto session = started();
        ::kill(::getpid(), SIGHUP);
        sleep_for(500);  // longer than a look of the watchdog
        get(SIGTERM);
      },
      ExitedWithCode(143), "terminated");
}

TEST_F(SessionDeathTest, AfterItsEndMpiIsOverAndASignalDoesWhatItDid) {
  EXPECT_EXIT(
      {
        started().reset();
        int over = 0;
        MPI_Finalized(&over);
        std::_Exit(over);
      },
      ExitedWithCode(1), "");
  EXPECT_EXIT(
      {
        started().reset();
        get(SIGTERM);
      },
      KilledBySignal(SIGTERM), "^$");
}

TEST_F(SessionDeathTest, AProcessThatStandsStillEndsTheJobAndOneThatWorksDoesNot) {
  EXPECT_EXIT(
      {
        const auto session = started(0.1);
        const OutputFile unfinished(file());
        Progress& progress = session->world().progress();
        progress.enter("slow work");
        for (int i = 0; i < 5; ++i) {  // longer than a watchdog waits, and slower than it looks
          sleep_for(500);
          progress.tick();
        }
        progress.enter("no work");
        sleep_for(10000);
        std::_Exit(0);
      },
      ExitedWithCode(75), "\\[rank 0\\] gatefold: no progress for 0.1 s in no work ");
}

/// Standard error becomes a full pipe, as where a pager waits for its reader. After MPI's start,
/// whose own daemon could never end with it.
void fill_standard_error() {
  int ends[2];
  if (::pipe(ends) != 0 || ::fcntl(ends[1], F_SETFL, O_NONBLOCK) != 0) std::_Exit(2);
  while (::write(ends[1], "x", 1) == 1) {
  }
  ::fcntl(ends[1], F_SETFL, 0);
  ::dup2(ends[1], STDERR_FILENO);
}

TEST_F(SessionDeathTest, AStandardErrorThatNobodyReadsKeepsNoProcessAlive) {
  EXPECT_EXIT(
      {
        const auto session = started();
        fill_standard_error();
        const OutputFile unfinished(file());
        get(SIGTERM);
      },
      ExitedWithCode(143), "");
  EXPECT_EXIT(
      {
        const auto session = started(0.1);
        fill_standard_error();
        sleep_for(12000);
        std::_Exit(0);
      },
      ExitedWithCode(75), "");
}

TEST_F(SessionDeathTest, AJobIsAbortedWithItsCodeBeforeMpiAndWithIt) {
  EXPECT_EXIT(
      {
        const OutputFile unfinished(file());
        Session::abort_job(71);
      },
      ExitedWithCode(71), "");
  EXPECT_EXIT(
      {
        const auto session = started();
        const OutputFile unfinished(file());
        Session::abort_job(71);
      },
      ExitedWithCode(71), "");
}

TEST_F(SessionDeathTest, OneOfSeveralThatFindsItselfAloneIsAnError) {
  const auto start_as_one_of = [](const char* processes) {
    ::setenv("SLURM_STEP_NUM_TASKS", processes, 1);
    try {
      started();
    } catch (const Error& error) {
      print_error(error.what());
      std::_Exit(static_cast<int>(error.code()));
    }
    std::_Exit(0);
  };
  EXPECT_EXIT(start_as_one_of("2"), ExitedWithCode(64), "started 2 processes but .* a world of 1 ");
  EXPECT_EXIT(start_as_one_of("1"), ExitedWithCode(0), "");
}

}  // namespace
}  // namespace gatefold
