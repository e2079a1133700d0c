#include "runtime/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <set>
#include <utility>

#include "runtime/error.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

constinit std::mutex temporaries_mutex;

/// All of the process, files before directories. Never destroyed, since any
/// thread may end it.
std::set<std::pair<TemporaryKind, std::string>>& temporaries() {
  static auto* const all = new std::set<std::pair<TemporaryKind, std::string>>;
  return *all;
}

void remove(const std::string& path, TemporaryKind kind) noexcept {
  if (kind == TemporaryKind::kFile) {
    ::unlink(path.c_str());
  } else {
    ::rmdir(path.c_str());
  }
}

/// What it is, where only a regular file can be replaced.
std::string_view kind_of(fs::file_type type) {
  switch (type) {
    case fs::file_type::directory: return "a directory";
    case fs::file_type::fifo: return "a pipe";
    case fs::file_type::socket: return "a socket";
    default: return "a device";
  }
}

/// Where a rename must go so that a symbolic link stays; refuses what it would
/// destroy.
std::string rename_target(const std::string& path) {
  if (fs::path(path).filename().empty()) fail_output(path, "not a file name");
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  const bool missing = status.type() == fs::file_type::not_found;
  if (!missing && !fs::status_known(status)) fail_output(path, error.message());
  if (!missing && !fs::is_regular_file(status)) {
    fail_output(path,
                fmt::format("it is {}, and a finished file takes the place of a regular one",
                            kind_of(status.type())),
                "name a file");
  }
  if (!fs::is_symlink(fs::symlink_status(path, error))) return path;
  const std::string target = fs::canonical(path, error).string();
  if (error) fail_output(path, "a symbolic link to nowhere: " + error.message());
  return target;
}

std::string descriptor_path(int fd) { return fmt::format("/proc/self/fd/{}", fd); }

/// A file without a name that a link can give one, or -1.
int open_unnamed(const fs::path& folder) {
  constexpr int kFlags = O_WRONLY | O_TMPFILE | O_CLOEXEC;
  const int fd = ::open(folder.empty() ? "." : folder.c_str(), kFlags, 0666);
  if (fd < 0 || ::access(descriptor_path(fd).c_str(), F_OK) == 0) return fd;
  ::close(fd);  // there is no /proc
  return -1;
}

void require_replaceable(const std::string& target) {
  // A rename asks for no right to what it replaces.
  if (::faccessat(AT_FDCWD, target.c_str(), W_OK, AT_EACCESS) != 0 && errno != ENOENT &&
      errno != ENOTDIR) {
    fail_output(target, errno_text(errno), "choose another path or make it writable");
  }
}

/// Calls make(name), false where it fails with an errno, with names beside
/// `target` until one is free, and remembers it at once, so that there is no
/// moment in which nobody would remove it.
template <typename Make>
TemporaryPath make_beside(const std::string& target, TemporaryKind kind, const Make& make) {
  const fs::path folder = fs::path(target).parent_path();
  // A name can be taken by a process of the same number on another node, or one
  // that was killed.
  for (int attempt = 0; attempt < 1000; ++attempt) {
    const std::string name =
        (folder / fmt::format(".gatefold-{}-{}.tmp", ::getpid(), attempt)).string();
    std::unique_lock lock(temporaries_mutex);
    if (make(name.c_str())) {
      temporaries().emplace(kind, name);
      lock.unlock();
      return TemporaryPath(name, kind);
    }
    if (errno != EEXIST) fail_output(target, errno_text(errno));
  }
  fail_output(target, "no free name for a temporary file beside it");
}

}  // namespace

TemporaryPath::TemporaryPath(std::string path, TemporaryKind kind)
    : path_(std::move(path)), kind_(kind) {
  const std::lock_guard lock(temporaries_mutex);
  temporaries().emplace(kind_, path_);
}

TemporaryPath::~TemporaryPath() {
  if (path_.empty()) return;
  remove(path_, kind_);
  release();
}

TemporaryPath::TemporaryPath(TemporaryPath&& other) noexcept
    : path_(std::exchange(other.path_, {})), kind_(other.kind_) {}

TemporaryPath& TemporaryPath::operator=(TemporaryPath&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(kind_, other.kind_);
  return *this;
}

void TemporaryPath::release() noexcept {
  const std::lock_guard lock(temporaries_mutex);
  temporaries().erase({kind_, std::exchange(path_, {})});
}

void remove_temporaries() noexcept {
  temporaries_mutex.lock();  // for good: nothing must be made after this
  for (const auto& [kind, path] : temporaries()) remove(path, kind);
}

TemporaryPath make_temporary_directory(const std::string& target) {
  require_replaceable(target);
  return make_beside(target, TemporaryKind::kDirectory,
                     [](const char* name) { return ::mkdir(name, 0777) == 0; });
}

OutputFile::OutputFile(const std::string& path) : target_(rename_target(path)) {
  require_replaceable(target_);
  fd_.reset(open_unnamed(fs::path(target_).parent_path()));
  if (fd_.get() >= 0) return;
  temporary_ = make_beside(target_, TemporaryKind::kFile, [this](const char* name) {
    fd_.reset(::open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    return fd_.get() >= 0;
  });
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t wrote = ::write(fd_.get(), bytes.data(), bytes.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) fail_output(target_, errno_text(wrote < 0 ? errno : ENOSPC));
    bytes = bytes.subspan(static_cast<std::size_t>(wrote));
  }
}

void OutputFile::keep() {
  // Some file systems report a full disk only at fsync or close.
  if (::fsync(fd_.get()) != 0) fail_output(target_, errno_text(errno));
  if (temporary_.path().empty()) {
    // For the moment that it takes to rename it: a link replaces nothing.
    const std::string unnamed = descriptor_path(fd_.get());
    temporary_ = make_beside(target_, TemporaryKind::kFile, [&](const char* name) {
      return ::linkat(AT_FDCWD, unnamed.c_str(), AT_FDCWD, name, AT_SYMLINK_FOLLOW) == 0;
    });
  }
  if (::close(fd_.release()) != 0) fail_output(target_, errno_text(errno));
  if (std::rename(temporary_.path().c_str(), target_.c_str()) != 0) {
    fail_output(target_, errno_text(errno));
  }
  temporary_.release();

  // Best effort: makes the rename itself durable, where the file system can.
  const fs::path folder = fs::path(target_).parent_path();
  const FileDescriptor folder_fd(
      ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ::fsync(folder_fd.get());
}

void fail_output(const std::string& path, std::string_view why, std::string_view remedy) {
  throw Error(ExitCode::kOutput,
              fmt::format("cannot write {} ({}); {}", path.empty() ? "''" : path, why, remedy));
}

}  // namespace gatefold
