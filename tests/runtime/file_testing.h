#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/error.h"

// What the tests of files share. Linking file_testing.cpp puts its open, pread, write, fsync and
// close before libc's, so that faults which no test can cause for real can be had.
namespace gatefold {

/// What those calls do to the code under test; the default is nothing.
struct IoFaults {
  int interruptions = 0;    // this many calls fail with EINTR first
  std::size_t at_most = 0;  // bytes that one call moves, 0 for any number
  int read_error = 0;       // errno of every pread
  int write_error = 0;      // errno of every write once `writes_before` went through
  int writes_before = 0;
  int sync_error = 0;
  int close_error = 0;
  bool names_alone = false;                          // the file system has no files without a name
  std::vector<std::pair<off_t, std::size_t>> reads;  // offset and size of every pread
};
IoFaults& io_faults();

/// A folder of one test process, removed with all it holds, as the faults are.
class TestFolder {
 public:
  explicit TestFolder(const std::string& name);
  ~TestFolder();
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  std::string path(const std::string& name = "x.safetensors") const;
  /// Writes the file; its path.
  std::string put(std::string_view text, const std::string& name = "x.safetensors") const;
  std::vector<std::string> listing() const;

 private:
  std::filesystem::path folder_;
};

/// Runs `action`, which must throw an Error of that code with a remedy; its message.
std::string error_of(ExitCode code, const std::function<void()>& action);

std::string little_endian(std::uint64_t value);
/// A whole safetensors file.
std::string safetensors_text(std::string_view json, std::string_view data);
/// A header entry, `"name":{…}`.
std::string tensor_entry(const std::string& dtype, const std::string& shape,
                         const std::string& offsets, const std::string& name = "a");
/// Entries between braces.
std::string header_json(const std::vector<std::string>& entries);
std::string file_contents(const std::string& path);
std::span<const std::byte> as_byte_span(std::string_view text);

}  // namespace gatefold
