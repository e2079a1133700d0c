#include "runtime/file_descriptor.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace gatefold {

void FileDescriptor::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

OpenedFile open_regular_file(const std::string& path) {
  // Without O_NONBLOCK opening a FIFO would wait for a writer.
  OpenedFile file{
      FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)), ""};
  struct stat status {};
  if (file.fd.get() < 0 || ::fstat(file.fd.get(), &status) != 0) {
    file.problem = errno_text(errno);
  } else if (S_ISDIR(status.st_mode)) {
    file.problem = "a directory, not a regular file";
  } else if (!S_ISREG(status.st_mode)) {
    file.problem = "not a regular file";
  }
  return file;
}

std::uint64_t size_of_file(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 ? static_cast<std::uint64_t>(status.st_size) : 0;
}

std::string errno_text(int error) { return std::generic_category().message(error); }

}  // namespace gatefold
