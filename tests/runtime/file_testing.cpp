#include "tests/runtime/file_testing.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <fstream>
#include <iterator>

namespace gatefold {

namespace fs = std::filesystem;

IoFaults& io_faults() {
  static IoFaults faults;
  return faults;
}

TestFolder::TestFolder(const std::string& name)
    : folder_(fs::path(testing::TempDir()) / fmt::format("gatefold-{}-{}", name, ::getpid())) {
  fs::create_directories(folder_);
}

TestFolder::~TestFolder() {
  io_faults() = {};
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

std::string TestFolder::path(const std::string& name) const { return (folder_ / name).string(); }

std::string TestFolder::put(std::string_view text, const std::string& name) const {
  std::ofstream(path(name), std::ios::binary) << text;
  return path(name);
}

std::vector<std::string> TestFolder::listing() const {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

std::string error_of(ExitCode code, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), testing::HasSubstr("; ")) << "no remedy";
    EXPECT_LT(std::strlen(error.what()), 1000U);
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

std::string little_endian(std::uint64_t value) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &value, 8);
  return bytes;
}

std::string safetensors_text(std::string_view json, std::string_view data) {
  return little_endian(json.size()) + std::string(json) + std::string(data);
}

std::string tensor_entry(const std::string& dtype, const std::string& shape,
                         const std::string& offsets, const std::string& name) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape,
                     offsets);
}

std::string header_json(const std::vector<std::string>& entries) {
  std::string json = "{";
  for (const std::string& entry : entries) {
    if (json.size() > 1) json += ',';
    json += entry;
  }
  json += '}';
  return json;
}

std::string file_contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::span<const std::byte> as_byte_span(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

namespace {

bool interrupted() {
  if (io_faults().interruptions == 0) return false;
  --io_faults().interruptions;
  errno = EINTR;
  return true;
}

bool failed(int error) {
  if (error != 0) errno = error;
  return error != 0;
}

std::size_t shortened(std::size_t n) {
  return io_faults().at_most > 0 ? std::min(n, io_faults().at_most) : n;
}

}  // namespace
}  // namespace gatefold

extern "C" int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const bool makes = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  const auto mode = makes ? va_arg(rest, mode_t) : mode_t{0};
  va_end(rest);
  if ((flags & O_TMPFILE) == O_TMPFILE && gatefold::io_faults().names_alone) {
    errno = EOPNOTSUPP;
    return -1;
  }
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}
extern "C" ssize_t pread(int fd, void* out, size_t n, off_t offset) {
  using namespace gatefold;
  if (interrupted() || failed(io_faults().read_error)) return -1;
  io_faults().reads.emplace_back(offset, n);
  return syscall(SYS_pread64, fd, out, shortened(n), offset);
}

extern "C" ssize_t write(int fd, const void* bytes, size_t n) {
  using namespace gatefold;
  if (interrupted()) return -1;
  if (io_faults().write_error != 0 && io_faults().writes_before-- <= 0) {
    return failed(io_faults().write_error) ? -1 : 0;
  }
  return syscall(SYS_write, fd, bytes, shortened(n));
}

extern "C" int fsync(int fd) {
  if (gatefold::failed(gatefold::io_faults().sync_error)) return -1;
  return static_cast<int>(syscall(SYS_fsync, fd));
}

extern "C" int close(int fd) {
  const auto result = static_cast<int>(syscall(SYS_close, fd));
  return gatefold::failed(gatefold::io_faults().close_error) ? -1 : result;
}
