#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "runtime/file_descriptor.h"

namespace gatefold {

enum class TemporaryKind { kFile, kDirectory };

/// A path that must not outlive its owner, nor a process that
/// remove_temporaries() ends. Removing a directory takes that it is empty.
class TemporaryPath {
 public:
  TemporaryPath() = default;
  /// Of what is there, or is going to be.
  TemporaryPath(std::string path, TemporaryKind kind);
  ~TemporaryPath();
  TemporaryPath(TemporaryPath&& other) noexcept;
  TemporaryPath& operator=(TemporaryPath&& other) noexcept;

  const std::string& path() const { return path_; }
  /// It stays, or was never made.
  void release() noexcept;

 private:
  std::string path_;  // empty: none
  TemporaryKind kind_ = TemporaryKind::kFile;
};

/// Removes every TemporaryPath of the process: files, then directories. For any
/// thread that ends the process without destructors: one that wants to make or
/// release another waits for that end.
void remove_temporaries() noexcept;

/// A new directory beside `target`, under a hidden name. Throws Error 74 naming
/// `target`.
TemporaryPath make_temporary_directory(const std::string& target);

/// A file that is written beside `path` and becomes it at the end, or goes
/// away. Until then it has no name, so that nothing is left of it however the
/// process ends, or a hidden one where the file system knows none without. A
/// device, pipe or directory is never replaced, and a symbolic link stays: the
/// file that it leads to is replaced.
class OutputFile {
 public:
  /// Throws Error 74 where no file can be made or `path` can't be replaced.
  explicit OutputFile(const std::string& path);

  /// The path that keep() replaces, links followed.
  const std::string& path() const { return target_; }
  /// Throws Error 74.
  void write(std::span<const std::byte> bytes);
  /// Flushes to disk and renames. Throws Error 74.
  void keep();

 private:
  std::string target_;
  FileDescriptor fd_;
  TemporaryPath temporary_;  // empty while the file has no name
};

/// Error 74.
[[noreturn]] void fail_output(const std::string& path, std::string_view why,
                              std::string_view remedy = "choose another path or free some space");

}  // namespace gatefold
