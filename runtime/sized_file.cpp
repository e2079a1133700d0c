#include "runtime/sized_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "runtime/output_file.h"

namespace gatefold {
namespace {

/// 0 or an errno.
int reserve(int fd, off_t bytes) {
  if (bytes == 0) return 0;
  // Not posix_fallocate, which writes every block where the file system can't promise any.
  while (::fallocate(fd, 0, 0, bytes) != 0) {
    if (errno == EINTR) continue;
    if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
    return ::ftruncate(fd, bytes) == 0 ? 0 : errno;
  }
  return 0;
}

}  // namespace

SizedFile::SizedFile(FileDescriptor fd, std::string shown)
    : fd_(std::move(fd)), shown_(std::move(shown)) {
  if (fd_.get() < 0) fail_output(shown_, errno_text(errno));
}

SizedFile SizedFile::make(const std::string& path, std::uint64_t bytes, const std::string& shown) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  SizedFile file(FileDescriptor(::open(path.c_str(), kFlags, 0666)), shown);
  const int error = reserve(file.fd_.get(), static_cast<off_t>(bytes));
  if (error != 0) fail_output(shown, fmt::format("{} for {} bytes", errno_text(error), bytes));
  return file;
}

SizedFile SizedFile::open(const std::string& path, const std::string& shown) {
  FileDescriptor fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (fd.get() < 0 && errno == ENOENT) {
    fail_output(shown, "another rank made it, and it isn't there",
                "choose a path that all nodes share");
  }
  return {std::move(fd), shown};
}

void SizedFile::write(std::uint64_t offset, std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t wrote =
        ::pwrite(fd_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) fail_output(shown_, errno_text(wrote < 0 ? errno : ENOSPC));
    bytes = bytes.subspan(static_cast<std::size_t>(wrote));
    offset += static_cast<std::uint64_t>(wrote);
  }
}

void SizedFile::flush() const {
  if (::fsync(fd_.get()) != 0) fail_output(shown_, errno_text(errno));
}

}  // namespace gatefold
