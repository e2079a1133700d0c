#include "runtime/output_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <thread>
#include <vector>

#include "tests/runtime/file_testing.h"

namespace gatefold {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

/// With and without a file system that knows files without a name.
class OutputFiles : public testing::TestWithParam<bool>, protected TestFolder {
 protected:
  OutputFiles() : TestFolder("output-file") { io_faults().names_alone = GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(FileSystem, OutputFiles, testing::Values(false, true),
                         [](const auto& test) { return test.param ? "NamesAlone" : "Unnamed"; });

[[noreturn]] void end_process() {
  remove_temporaries();
  _exit(143);
}

/// Runs `work`, which ends the process, in a child; its exit code.
int in_child(const std::function<void()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    work();
    _exit(1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_P(OutputFiles, AFileIsThereOnceItIsKept) {
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

TEST_P(OutputFiles, AnEndInTheMiddleLeavesTheOldFileAndNothingElse) {
  put("old", "a");
  EXPECT_EQ(in_child([&] {
              OutputFile file(path("a"));
              OutputFile other(path("b"));
              file.write(as_byte_span("new"));
              end_process();
            }),
            143);
  EXPECT_THAT(listing(), ElementsAre("a"));
  EXPECT_EQ(file_contents(path("a")), "old");
}

TEST_P(OutputFiles, AKilledProcessLeavesNothingWhereFilesNeedNoName) {
  const int unnamed = ::open(path(".").c_str(), O_WRONLY | O_TMPFILE, 0600);
  if (unnamed < 0) GTEST_SKIP() << "the file system gives every file a name";
  ::close(unnamed);
  put("old", "a");
  EXPECT_EQ(in_child([&] {
              OutputFile file(path("a"));
              file.write(as_byte_span("new"));
              ::raise(SIGKILL);
            }),
            -1);
  EXPECT_THAT(listing(), ElementsAre("a"));
  EXPECT_EQ(file_contents(path("a")), "old");
}

TEST_P(OutputFiles, AnEndRemovesADirectoryWithTheFilesInIt) {
  EXPECT_EQ(in_child([&] {
              const TemporaryPath folder = make_temporary_directory(path("made"));
              std::vector<TemporaryPath> files;
              for (int i = 0; i < 300; ++i) {
                const std::string name = folder.path() + '/' + std::to_string(i);
                files.emplace_back(name, TemporaryKind::kFile);
                OutputFile file(name);
                if (i < 299) file.keep();
                if (i == 299) end_process();
              }
            }),
            143);
  EXPECT_THAT(listing(), IsEmpty());
}

TEST_P(OutputFiles, AnEndLeavesWhatWasKeptOrBelongsToOthers) {
  EXPECT_EQ(in_child([&] {
              OutputFile(path("kept")).keep();
              const std::string taken = path(".gatefold-" + std::to_string(::getpid()) + "-0.tmp");
              put("somebody's", taken.substr(taken.rfind('/') + 1));
              OutputFile file(path("a"));
              end_process();
            }),
            143);
  EXPECT_EQ(listing().size(), 2U);
}

TEST_P(OutputFiles, NothingIsMadeWhileTheProcessEnds) {
  EXPECT_EQ(in_child([&] {
              const OutputFile file(path("a"));
              remove_temporaries();
              std::thread([&] {
                const OutputFile late(path("b"));
                std::this_thread::sleep_for(std::chrono::seconds(10));
              }).detach();
              std::this_thread::sleep_for(std::chrono::milliseconds(100));
              _exit(listing().empty() ? 143 : 1);
            }),
            143);
  EXPECT_THAT(listing(), IsEmpty());
}

TEST_P(OutputFiles, AFileThatMayNotBeWrittenIsNotReplacedEither) {
  put("old", "a");
  ::chmod(path("a").c_str(), 0400);
  ::mkdir(path("b").c_str(), 0500);
  ::chmod(path(".").c_str(), 0777);
  // Root may write anything.
  const bool root = ::geteuid() == 0;
  if (root) {
    ASSERT_EQ(::seteuid(65534), 0);
  }
  const std::string file = error_of(ExitCode::kOutput, [&] { OutputFile(path("a")).keep(); });
  const std::string folder =
      error_of(ExitCode::kOutput, [&] { make_temporary_directory(path("b")); });
  if (root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  EXPECT_THAT(file, HasSubstr("Permission denied"));
  EXPECT_THAT(folder, HasSubstr("Permission denied"));
  EXPECT_EQ(file_contents(path("a")), "old");
}

TEST_P(OutputFiles, WhatIsNoFileIsSaidPlainly) {
  ::mkdir(path("folder").c_str(), 0700);
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  const auto error = [](const std::string& to) {
    return error_of(ExitCode::kOutput, [&] { const OutputFile file(to); });
  };
  EXPECT_THAT(error(path("folder")), HasSubstr("it is a directory"));
  EXPECT_THAT(error(path("pipe")), HasSubstr("it is a pipe"));
  EXPECT_THAT(error(put("x", "file") + "/x"), HasSubstr("Not a directory"));
}

}  // namespace
}  // namespace gatefold
