#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <vector>

#include "runtime/safetensors.h"
#include "tests/runtime/file_testing.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using Writer = SafetensorsWriter;

class SafetensorsWriting : public testing::Test, protected TestFolder {
 protected:
  SafetensorsWriting() : TestFolder("safetensors-writer") {}
};

constexpr std::string_view kData = "0123456789abcdef";

std::string read_tensor(const SafetensorsFile& file, const std::string& name, std::size_t bytes) {
  std::string out(bytes, '?');
  file.read(name, 0, std::as_writable_bytes(std::span(out)));
  return out;
}

const std::vector<Writer::Tensor> kTwo = {{"w", "BF16", {2, 3}}, {"b \"\\\n", "F32", {}}};

void write_two(const std::string& path) {
  Writer writer(path, kTwo, {{"format", "pt"}});
  writer.append(as_byte_span(kData.substr(0, 5)));
  writer.append(as_byte_span(kData.substr(5)));
  writer.finish();
}

TEST_F(SafetensorsWriting, WhatIsWrittenReadsBack) {
  write_two(path());
  EXPECT_THAT(listing(), testing::ElementsAre("x.safetensors"));
  const SafetensorsFile file(path());
  EXPECT_EQ(file.header().metadata, (std::map<std::string, std::string>{{"format", "pt"}}));
  EXPECT_EQ(file.header().data_start % 8, 0U);
  EXPECT_EQ(file.header().tensors.at("w").shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(read_tensor(file, "w", 12), kData.substr(0, 12));
  EXPECT_EQ(read_tensor(file, "b \"\\\n", 4), kData.substr(12));
  write_two(path());  // over the old one
  SafetensorsFile{path()};
}

TEST_F(SafetensorsWriting, FilesWithoutTensorsOrBytesCanBeWritten) {
  Writer(path("none"), {}).finish();
  EXPECT_TRUE(SafetensorsFile(path("none")).header().tensors.empty());
  Writer(path("empty"), {{"e", "I64", {0, 3}}}).finish();
  EXPECT_EQ(SafetensorsFile(path("empty")).header().tensors.at("e").shape.size(), 2U);
}

TEST_F(SafetensorsWriting, InterruptedAndShortWritesAreCarriedOn) {
  io_faults().at_most = 1;
  io_faults().interruptions = 3;
  write_two(path());
  io_faults() = {};
  EXPECT_EQ(read_tensor(SafetensorsFile(path()), "w", 12), kData.substr(0, 12));
}

TEST_F(SafetensorsWriting, AFullDiskIsAnOutputErrorAndLeavesTheOldFile) {
  put("old");
  for (int writes = 0; writes < 3; ++writes) {  // length and header, two appends
    SCOPED_TRACE(writes);
    io_faults().write_error = ENOSPC;
    io_faults().writes_before = writes;
    EXPECT_THAT(error_of(ExitCode::kOutput, [&] { write_two(path()); }),
                HasSubstr(path() + " (No space left on device)"));
    io_faults() = {};
    EXPECT_THAT(listing(), testing::ElementsAre("x.safetensors"));
    EXPECT_EQ(file_contents(path()), "old");
  }
}

TEST_F(SafetensorsWriting, ErrorsOfFlushAndCloseAreOutputErrors) {
  put("old");
  io_faults().sync_error = EIO;
  EXPECT_THAT(error_of(ExitCode::kOutput, [&] { write_two(path()); }),
              HasSubstr("Input/output error"));
  io_faults() = {};
  io_faults().close_error = EDQUOT;
  EXPECT_THAT(error_of(ExitCode::kOutput, [&] { write_two(path()); }),
              HasSubstr("Disk quota exceeded"));
  io_faults() = {};
  EXPECT_THAT(listing(), testing::ElementsAre("x.safetensors"));
  EXPECT_EQ(file_contents(path()), "old");
}

TEST_F(SafetensorsWriting, AFileSizeLimitIsAnOutputErrorWithNothingLeftBehind) {
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 4096, .rlim_max = old.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string text = error_of(ExitCode::kOutput, [&] {
    Writer writer(path(), {{"a", "U8", {1 << 20}}});
    writer.append(as_byte_span(std::string(1 << 20, 'x')));
  });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_THAT(text, HasSubstr("File too large"));
  EXPECT_THAT(listing(), testing::IsEmpty());
}

/// A node of /dev/full's device. Root gets one of its own: should the writer ever replace its
/// target, this test must not cost the machine its devices. Others can't replace the real one.
std::string full_device(const std::string& own) {
  if (::geteuid() != 0) return "/dev/full";
  return ::mknod(own.c_str(), S_IFCHR | 0666, ::makedev(1, 7)) == 0 ? own : "";
}

TEST_F(SafetensorsWriting, ADeviceIsAnOutputErrorAndStays) {
  const std::string device = full_device(path("device"));
  if (device.empty()) GTEST_SKIP() << "no device can be made here";
  fs::create_symlink(device, path("link"));
  const std::size_t before = listing().size();
  for (const std::string& name : {device, path("link")}) {
    EXPECT_THAT(error_of(ExitCode::kOutput, [&] { write_two(name); }),
                HasSubstr(fmt::format("cannot write {}", name)));
  }
  EXPECT_EQ(listing().size(), before);
  EXPECT_TRUE(fs::is_character_file(device));
  EXPECT_TRUE(fs::is_symlink(path("link")));
}

TEST_F(SafetensorsWriting, TargetsThatAreNoFilesAreOutputErrorsAndStay) {
  fs::create_directory(path("directory"));
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  fs::create_symlink(path("nowhere"), path("dangling"));
  put("", "file");
  const std::size_t before = listing().size();
  for (const std::string& name :
       {std::string(), path("directory"), path("directory/"), path("fifo"), path("dangling"),
        path("missing/x"), path("file/x"), path(std::string(300, 'n'))}) {
    SCOPED_TRACE(name);
    EXPECT_THAT(
        error_of(ExitCode::kOutput, [&] { write_two(name); }),
        HasSubstr(fmt::format("cannot write {}", name.empty() ? "''" : name.substr(0, 100))));
  }
  EXPECT_EQ(listing().size(), before);
  EXPECT_TRUE(fs::is_fifo(path("fifo")));
  EXPECT_TRUE(fs::is_symlink(path("dangling")));
}

TEST_F(SafetensorsWriting, WritingThroughALinkReplacesWhatItLeadsTo) {
  fs::create_directory(path("far"));
  put("old", "far/real");
  fs::create_symlink(path("far/real"), path("link"));
  write_two(path("link"));
  EXPECT_TRUE(fs::is_symlink(path("link")));
  SafetensorsFile{path("far/real")};
}

TEST_F(SafetensorsWriting, ATargetThatBecomesADirectoryIsAnOutputError) {
  Writer writer(path(), {});
  fs::create_directory(path());
  EXPECT_THAT(error_of(ExitCode::kOutput, [&] { writer.finish(); }), HasSubstr("directory"));
}

TEST_F(SafetensorsWriting, AnUnfinishedWriterLeavesNothing) {
  {
    Writer writer(path(), kTwo);
    EXPECT_FALSE(fs::exists(path()));
  }
  EXPECT_THAT(listing(), testing::IsEmpty());
}

TEST_F(SafetensorsWriting, TemporaryFilesDoNotCollide) {
  put("somebody's", fmt::format(".gatefold-{}-0.tmp", ::getpid()));
  {
    Writer first(path(), {});
    Writer second(path(), {});
    first.finish();
    second.finish();
  }
  EXPECT_EQ(listing().size(), 2U);
  EXPECT_EQ(file_contents(path(fmt::format(".gatefold-{}-0.tmp", ::getpid()))), "somebody's");
}

TEST_F(SafetensorsWriting, TheWrongNumberOfBytesIsAnOutputError) {
  Writer writer(path(), kTwo);
  writer.append(as_byte_span(kData.substr(0, 15)));
  EXPECT_THAT(error_of(ExitCode::kOutput, [&] { writer.finish(); }),
              HasSubstr("15 bytes of data, 16 were announced"));
  EXPECT_THAT(error_of(ExitCode::kOutput, [&] { writer.append(as_byte_span("xy")); }),
              HasSubstr("17 bytes of data, 16 were announced"));
  writer.append(as_byte_span("f"));
  writer.finish();
  EXPECT_EQ(read_tensor(SafetensorsFile(path()), "w", 12), kData.substr(0, 12));
}

TEST_F(SafetensorsWriting, TensorsThatNoReaderTakesAreNotWritten) {
  const std::vector<std::pair<std::vector<Writer::Tensor>, std::string>> cases = {
      {{{"a", "F32", {-1}}}, "no size"},
      {{{"a", "F31", {1}}}, "no size"},
      {{{"a", "F4", {1}}}, "no size"},
      {{{"a", "F32", {std::int64_t{1} << 62}}}, "no size"},
      {{{"a", "U8", {INT64_MAX}}, {"b", "U8", {1}}}, "no size"},
      {{{"a", "U8", {1}}, {"a", "U8", {1}}}, "'a' is taken"},
      {{{"__metadata__", "U8", {1}}}, "'__metadata__' is taken"},
      {{{"\xff", "U8", {1}}}, "not UTF-8"},
  };
  for (const auto& [tensors, message] : cases) {
    EXPECT_THAT(error_of(ExitCode::kOutput, [&, &t = tensors] { Writer(path(), t); }),
                HasSubstr(message));
  }
  EXPECT_THAT(error_of(ExitCode::kOutput,
                       [&] {
                         Writer(path(), {}, {{"k", "\xff"}});
                       }),
              HasSubstr("not UTF-8"));
  EXPECT_THAT(listing(), testing::IsEmpty());
}

TEST_F(SafetensorsWriting, WrittenFilesHaveTheUsualPermissions) {
  write_two(path());
  std::ofstream(path("plain")) << "x";
  EXPECT_EQ(fs::status(path()).permissions(), fs::status(path("plain")).permissions());
}

}  // namespace
}  // namespace gatefold
