#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace gatefold {

/// Owns an open file descriptor, or none (-1).
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  ~FileDescriptor() { reset(-1); }
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&&) = delete;

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd);  // closes the one held

 private:
  int fd_;
};

/// A regular file open for reading, or why there is none: a directory, device or pipe isn't one,
/// and a pipe isn't waited for.
struct OpenedFile {
  FileDescriptor fd;
  std::string problem;  // empty where fd is open
};
OpenedFile open_regular_file(const std::string& path);

/// Bytes, by the file system; 0 where it doesn't say.
std::uint64_t size_of_file(int fd);

/// errno in words.
std::string errno_text(int error);

}  // namespace gatefold
