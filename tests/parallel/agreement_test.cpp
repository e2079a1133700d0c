// A fault on one rank must end all ranks with one code and one text.
#include "parallel/agreement.h"

#include <gmock/gmock.h>
#include <mpi.h>

#include <chrono>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "parallel/mpi_interop.h"

namespace gatefold {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

struct Thrown {
  ExitCode code;
  std::string text;
};

std::optional<Thrown> thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return Thrown{error.code(), error.what()};
  }
  return std::nullopt;
}

class Agreement : public ::testing::Test {
 protected:
  void SetUp() override { comm_ = make_mpi_communicator(MPI_COMM_WORLD); }

  /// Every rank sees this error, and can go on working together after it.
  void expect_everywhere(const std::optional<Thrown>& thrown, ExitCode code,
                         const std::string& text) {
    EXPECT_TRUE(thrown.has_value());
    if (thrown) {
      EXPECT_EQ(thrown->code, code);
      EXPECT_EQ(thrown->text, text);
    }
    EXPECT_TRUE(all_true(*comm_, true)) << "still usable";
  }
  /// The text with the name of who failed, which a lone rank leaves out.
  std::string named(int rank, const std::string& text) const {
    return comm_->size() == 1 ? text : "rank " + std::to_string(rank) + ": " + text;
  }
  int rank() const { return comm_->rank(); }
  int size() const { return comm_->size(); }
  std::unique_ptr<Communicator> comm_;
};

TEST_F(Agreement, NoErrorIsNone) {
  int calls = 0;
  EXPECT_FALSE(thrown_by([&] { run_agreed(*comm_, [&calls] { ++calls; }); }));
  EXPECT_EQ(calls, 1);
}

TEST_F(Agreement, AnErrorOnAnyOneRankIsThrownOnAllWithItsCodeAndText) {
  for (int failing = 0; failing < size(); ++failing) {
    for (const ExitCode code : {ExitCode::kUsage, ExitCode::kData, ExitCode::kNoInput}) {
      const auto thrown = thrown_by([&] {
        run_agreed(*comm_, [&] {
          if (rank() == failing) throw Error(code, "tensor 'x' is short (a reason); do this");
        });
      });
      expect_everywhere(thrown, code, named(failing, "tensor 'x' is short (a reason); do this"));
    }
  }
}

TEST_F(Agreement, OfSeveralErrorsTheLowestRanksWins) {
  for (int lowest = 0; lowest < size(); ++lowest) {
    const auto thrown = thrown_by([&] {
      run_agreed(*comm_, [&] {
        if (rank() < lowest) return;
        // Other codes, other lengths.
        const std::string text(static_cast<std::size_t>(1 + 1000 * rank()),
                               static_cast<char>('a' + rank()));
        throw Error(rank() == lowest ? ExitCode::kOutput : ExitCode::kData, text);
      });
    });
    const std::string text(static_cast<std::size_t>(1 + 1000 * lowest),
                           static_cast<char>('a' + lowest));
    expect_everywhere(thrown, ExitCode::kOutput, named(lowest, text));
  }
}

TEST_F(Agreement, WhoOnlyWaitedForAnotherIsHeardLast) {
  for (int failing = 0; failing < size(); ++failing) {
    const auto thrown = thrown_by([&] {
      run_agreed(*comm_, [&] {
        if (rank() == failing) throw Error(ExitCode::kBackend, "the reason");
        throw Error(ExitCode::kTimeout, "a peer is lost");
      });
    });
    expect_everywhere(thrown, ExitCode::kBackend, named(failing, "the reason"));
  }
  const auto thrown = thrown_by(
      [&] { run_agreed(*comm_, [] { throw Error(ExitCode::kTimeout, "all are lost"); }); });
  expect_everywhere(thrown, ExitCode::kTimeout, named(0, "all are lost"));
}

/// Its peers may be those who are lost: waiting for them again takes another deadline.
TEST_F(Agreement, NobodyIsAskedAfterAWaitInVain) {
  EXPECT_THROW(run_agreed(*comm_, [] { throw NoAnswerError("no answer"); }), NoAnswerError);
  if (size() == 1) return;
  const auto impatient = make_mpi_communicator(MPI_COMM_WORLD, {1, nullptr});
  const auto begin = steady_clock::now();
  if (rank() == 0) {
    EXPECT_THROW(run_agreed(*impatient,
                            [&] {
                              std::byte none{};
                              const Transfer receive{1, &none, 1};
                              impatient->exchange({}, {&receive, 1});
                            }),
                 NoAnswerError);
    EXPECT_LT(steady_clock::now() - begin, milliseconds(1900));
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST_F(Agreement, AGroupsRankHasTheNumberThatTheWholeJobKnows) {
  const auto half = comm_->split(rank() % 2);
  const auto thrown = thrown_by([&] {
    run_agreed(*half, [&] {
      if (half->rank() == half->size() - 1) throw Error(ExitCode::kData, "the reason");
    });
  });
  const int last = rank() + 2 * (half->size() - 1 - half->rank());
  const std::string text = "rank " + std::to_string(last) + ": the reason";
  expect_everywhere(thrown, ExitCode::kData, half->size() == 1 ? "the reason" : text);
}

TEST_F(Agreement, ATextThatNamesItsRankIsNotPrefixedAgain) {
  const auto thrown =
      thrown_by([&] { run_agreed(*comm_, [] { throw Error(ExitCode::kData, "rank 0 has x"); }); });
  expect_everywhere(thrown, ExitCode::kData, "rank 0 has x");
}

TEST_F(Agreement, AnEmptyTextIsAnErrorToo) {
  const auto thrown =
      thrown_by([&] { run_agreed(*comm_, [] { throw Error(ExitCode::kData, ""); }); });
  expect_everywhere(thrown, ExitCode::kData, named(0, ""));
}

TEST_F(Agreement, RunningOutOfMemoryOnOneRankIsError71OnAll) {
  const int last = size() - 1;
  const auto thrown = thrown_by([&] {
    run_agreed(*comm_, [&] {
      if (rank() == last) throw std::bad_alloc();
    });
  });
  expect_everywhere(thrown, ExitCode::kOutOfMemory,
                    named(last, "out of memory; use more ranks or fewer tokens"));
}

TEST_F(Agreement, AnyOtherExceptionOnOneRankEndsAllRanksToo) {
  const int last = size() - 1;
  const auto thrown = thrown_by([&] {
    run_agreed(*comm_, [&] {
      if (rank() == last) throw std::length_error("vector too long");
    });
  });
  ASSERT_TRUE(thrown.has_value());  // the same on all ranks, or they would be stuck above
  EXPECT_EQ(thrown->code, ExitCode::kBackend);
  EXPECT_THAT(thrown->text, ::testing::HasSubstr("vector too long"));
  EXPECT_TRUE(all_true(*comm_, true));
}

TEST_F(Agreement, AStepMayBeCollectiveItself) {
  std::vector<int> values(static_cast<std::size_t>(size()));
  run_agreed(*comm_, [&] {
    values[static_cast<std::size_t>(rank())] = rank();
    all_gather<int>(*comm_, values);
  });
  for (int r = 0; r < size(); ++r) EXPECT_EQ(values[static_cast<std::size_t>(r)], r);
}

TEST_F(Agreement, AllTrueIsFalseWhereItIsFalseOnAnyRank) {
  EXPECT_TRUE(all_true(*comm_, true));
  EXPECT_FALSE(all_true(*comm_, false));
  for (int r = 0; r < size(); ++r) {
    EXPECT_FALSE(all_true(*comm_, rank() != r)) << r;
    EXPECT_EQ(all_true(*comm_, rank() == r), size() == 1) << r;
  }
}

TEST_F(Agreement, EqualValuesPassWhateverTheyAre) {
  for (const std::string& value : {std::string(), std::string("17"), std::string(5000, 'x')}) {
    EXPECT_FALSE(thrown_by([&] { require_equal(*comm_, "a value", value); }));
  }
}

TEST_F(Agreement, AnUnequalValueNamesBothValuesAndWhoHasThem) {
  for (int other = 1; other < size(); ++other) {
    // All from `other` on differ; the first of them is named.
    const std::string mine =
        rank() < other ? "4096 tokens" : "17 tokens of " + comm_->description();
    const auto thrown = thrown_by([&] { require_equal(*comm_, "the input", mine); });
    expect_everywhere(thrown, ExitCode::kUsage,
                      "rank " + std::to_string(other) + " has the input 17 tokens of " +
                          comm_->description() +
                          ", rank 0 has 4096 tokens (all ranks must have the same); start all "
                          "ranks with the same arguments and files");
  }
}

TEST_F(Agreement, AnUnequalValueHasTheCodeThatTheCallerGave) {
  if (size() == 1) return;
  const auto thrown =
      thrown_by([&] { require_equal(*comm_, "a hash", rank() == 0 ? "" : "aa", ExitCode::kData); });
  ASSERT_TRUE(thrown.has_value());
  EXPECT_EQ(thrown->code, ExitCode::kData);
  // A beginning of the other's value is not equal to it.
  EXPECT_TRUE(thrown_by([&] { require_equal(*comm_, "a hash", rank() == 0 ? "aab" : "aa"); }));
  EXPECT_TRUE(thrown_by([&] { require_equal(*comm_, "a hash", rank() == 0 ? "aa" : "aab"); }));
}

TEST_F(Agreement, OnlyTheRootWorksAndTheOthersWaitForItsEnd) {
  for (int root = 0; root < size(); ++root) {
    int calls = 0;
    std::int64_t end = 0;  // by the clock that ranks of one machine share
    while_root_works(*comm_, root, [&](const std::function<void()>& beat) {
      ++calls;
      for (int i = 0; i < 5; ++i) {
        std::this_thread::sleep_for(milliseconds(10));
        beat();
      }
      end = steady_clock::now().time_since_epoch().count();
    });
    const std::int64_t left = steady_clock::now().time_since_epoch().count();
    EXPECT_EQ(calls, rank() == root ? 1 : 0);
    comm_->broadcast(reinterpret_cast<std::byte*>(&end), sizeof(end), root);
    EXPECT_GE(left, end);
  }
}

TEST_F(Agreement, ARootThatFailsEndsAllRanksWithItsError) {
  for (int root = 0; root < size(); ++root) {
    const auto thrown = thrown_by([&] {
      while_root_works(*comm_, root, [](const std::function<void()>& beat) {
        beat();
        throw Error(ExitCode::kVerificationFailed, "row 3 differs");
      });
    });
    expect_everywhere(thrown, ExitCode::kVerificationFailed, named(root, "row 3 differs"));
  }
}

TEST_F(Agreement, ARootThatRunsOutOfMemoryEndsAllRanks) {
  const auto thrown = thrown_by([&] {
    while_root_works(*comm_, 0, [](const std::function<void()>&) { throw std::bad_alloc(); });
  });
  expect_everywhere(thrown, ExitCode::kOutOfMemory,
                    named(0, "out of memory; use more ranks or fewer tokens"));
}

TEST_F(Agreement, ARootThatShowsSignsOfLifeMayTakeLongerThanTheTimeout) {
  MpiOptions options;
  options.timeout_seconds = 2;
  const auto impatient = make_mpi_communicator(MPI_COMM_WORLD, options);
  const auto start = steady_clock::now();
  const std::uint64_t ticks = impatient->progress().ticks();
  while_root_works(*impatient, 0, [&](const std::function<void()>& beat) {
    while (steady_clock::now() - start < milliseconds(3000)) {
      std::this_thread::sleep_for(milliseconds(20));
      beat();
    }
  });
  EXPECT_GT(impatient->progress().ticks(), ticks + 1) << "the watchdog must see life as well";
}

}  // namespace
}  // namespace gatefold
