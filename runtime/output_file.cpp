#include "runtime/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "runtime/error.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

enum class SlotState : int { kFree, kTaken, kFile, kDirectory };

struct Slot {
  std::atomic<SlotState> state{SlotState::kFree};
  std::array<char, 1024> path{};
};
static_assert(std::atomic<SlotState>::is_always_lock_free, "a signal handler reads it");

// Static, because a signal handler gets no argument and may not allocate. A model has a few hundred
// files at most.
constinit std::array<Slot, 1024> slots{};

int take_slot(const std::string& path, TemporaryKind kind) {
  if (path.size() >= slots[0].path.size()) return -1;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    SlotState expected = SlotState::kFree;
    if (!slots[i].state.compare_exchange_strong(expected, SlotState::kTaken)) continue;
    *std::copy(path.begin(), path.end(), slots[i].path.begin()) = '\0';
    slots[i].state = kind == TemporaryKind::kFile ? SlotState::kFile : SlotState::kDirectory;
    return static_cast<int>(i);
  }
  return -1;
}

void free_slot(int slot) noexcept {
  if (slot >= 0) slots[static_cast<std::size_t>(slot)].state = SlotState::kFree;
}

/// Where a rename must go so that a symbolic link stays; refuses what it would destroy.
std::string rename_target(const std::string& path) {
  if (fs::path(path).filename().empty()) fail_output(path, "not a file name");
  std::error_code error;
  std::string target = path;
  if (fs::is_symlink(fs::symlink_status(path, error))) {
    target = fs::canonical(path, error).string();
    if (error) fail_output(path, "a symbolic link to nowhere: " + error.message());
  }
  const fs::file_status status = fs::status(target, error);
  if (status.type() == fs::file_type::not_found) return target;
  if (!fs::status_known(status)) fail_output(path, error.message());
  if (!fs::is_regular_file(status)) {
    fail_output(path, "a directory, device or pipe: only a regular file is replaced");
  }
  return target;
}

/// The descriptor, or 0 for a directory; -1 with errno.
int make(const std::string& path, TemporaryKind kind) {
  if (kind == TemporaryKind::kDirectory) return ::mkdir(path.c_str(), 0777);
  return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
}

}  // namespace

TemporaryPath::TemporaryPath(std::string path, TemporaryKind kind)
    : path_(std::move(path)), kind_(kind), slot_(take_slot(path_, kind)) {}

TemporaryPath::~TemporaryPath() {
  if (path_.empty()) return;
  if (kind_ == TemporaryKind::kFile) {
    ::unlink(path_.c_str());
  } else {
    ::rmdir(path_.c_str());
  }
  free_slot(slot_);
}

TemporaryPath::TemporaryPath(TemporaryPath&& other) noexcept
    : path_(std::exchange(other.path_, {})),
      kind_(other.kind_),
      slot_(std::exchange(other.slot_, -1)) {}

TemporaryPath& TemporaryPath::operator=(TemporaryPath&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(kind_, other.kind_);
  std::swap(slot_, other.slot_);
  return *this;
}

void TemporaryPath::release() noexcept {
  path_.clear();
  free_slot(std::exchange(slot_, -1));
}

void remove_temporaries() noexcept {
  for (const Slot& slot : slots) {
    if (slot.state == SlotState::kFile) ::unlink(slot.path.data());
  }
  for (const Slot& slot : slots) {
    if (slot.state == SlotState::kDirectory) ::rmdir(slot.path.data());
  }
}

Temporary make_temporary(const std::string& target, TemporaryKind kind) {
  const fs::path folder = fs::path(target).parent_path();
  // A name can be taken by a process of the same number on another node, or one that was killed.
  for (int attempt = 0; attempt < 1000; ++attempt) {
    const std::string name =
        (folder / fmt::format(".gatefold-{}-{}.tmp", ::getpid(), attempt)).string();
    struct stat status {};
    if (::lstat(name.c_str(), &status) == 0) continue;
    TemporaryPath path(name, kind);
    const int fd = make(name, kind);
    if (fd >= 0) return {std::move(path), FileDescriptor(kind == TemporaryKind::kFile ? fd : -1)};
    path.release();  // not made here, so not to be removed
    if (errno != EEXIST) fail_output(target, errno_text(errno));
  }
  fail_output(target, "no free name for a temporary file beside it");
}

OutputFile::OutputFile(const std::string& path)
    : target_(rename_target(path)), temporary_(make_temporary(target_, TemporaryKind::kFile)) {}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t wrote = ::write(temporary_.fd.get(), bytes.data(), bytes.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) fail_output(target_, errno_text(wrote < 0 ? errno : ENOSPC));
    bytes = bytes.subspan(static_cast<std::size_t>(wrote));
  }
}

void OutputFile::keep() {
  // Some file systems report a full disk only at fsync or close.
  if (::fsync(temporary_.fd.get()) != 0) fail_output(target_, errno_text(errno));
  if (::close(temporary_.fd.release()) != 0) fail_output(target_, errno_text(errno));
  if (std::rename(temporary_.path.path().c_str(), target_.c_str()) != 0) {
    fail_output(target_, errno_text(errno));
  }
  temporary_.path.release();

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
