#include "runtime/output_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <vector>

#include "tests/runtime/file_testing.h"

namespace gatefold {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

class OutputFiles : public testing::Test, protected TestFolder {
 protected:
  OutputFiles() : TestFolder("output-file") {}
};

extern "C" void end_by_signal(int) {
  remove_temporaries();
  _exit(143);
}

/// Runs `work` in a child whose SIGTERM handler is as the program's; its exit code.
int in_child(const std::function<void()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGTERM, end_by_signal);
    work();
    _exit(1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_F(OutputFiles, AFileIsThereOnceItIsKept) {
  {
    OutputFile file(path("a"));
    file.write(as_byte_span("one "));
    file.write(as_byte_span("two"));
    EXPECT_THAT(listing(), testing::Not(testing::Contains("a")));
    file.keep();
  }
  EXPECT_THAT(listing(), ElementsAre("a"));
  EXPECT_EQ(file_contents(path("a")), "one two");
}

TEST_F(OutputFiles, ASignalInTheMiddleLeavesTheOldFileAndNothingElse) {
  put("old", "a");
  EXPECT_EQ(in_child([&] {
              OutputFile file(path("a"));
              OutputFile other(path("b"));
              file.write(as_byte_span("new"));
              std::raise(SIGTERM);
            }),
            143);
  EXPECT_THAT(listing(), ElementsAre("a"));
  EXPECT_EQ(file_contents(path("a")), "old");
}

TEST_F(OutputFiles, ASignalRemovesADirectoryWithTheFilesInIt) {
  EXPECT_EQ(in_child([&] {
              const Temporary folder = make_temporary(path("made"), TemporaryKind::kDirectory);
              std::vector<TemporaryPath> files;
              for (int i = 0; i < 300; ++i) {
                const std::string name = folder.path.path() + '/' + std::to_string(i);
                files.emplace_back(name, TemporaryKind::kFile);
                OutputFile file(name);
                if (i < 299) file.keep();
                if (i == 299) std::raise(SIGTERM);
              }
            }),
            143);
  EXPECT_THAT(listing(), IsEmpty());
}

TEST_F(OutputFiles, ASignalLeavesWhatWasKeptOrBelongsToOthers) {
  EXPECT_EQ(in_child([&] {
              OutputFile(path("kept")).keep();
              const std::string taken = path(".gatefold-" + std::to_string(::getpid()) + "-0.tmp");
              put("somebody's", taken.substr(taken.rfind('/') + 1));
              OutputFile file(path("a"));
              std::raise(SIGTERM);
            }),
            143);
  EXPECT_EQ(listing().size(), 2U);
}

TEST_F(OutputFiles, MorePathsThanAreRememberedAreStillRemovedByTheirOwners) {
  {
    std::vector<TemporaryPath> files;
    for (int i = 0; i < 1500; ++i) {
      files.emplace_back(put("x", std::to_string(i)), TemporaryKind::kFile);
    }
    files.front().release();
  }
  EXPECT_THAT(listing(), ElementsAre("0"));
}

}  // namespace
}  // namespace gatefold
