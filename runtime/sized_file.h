#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "runtime/file_descriptor.h"

namespace gatefold {

/// A file whose size is known before what is in it, so that several processes may write parts of
/// it, each at its place. Who makes it sees to it that it goes away again or gets its name.
class SizedFile {
 public:
  /// A new file of `bytes` bytes, with its room on the disk where the file system can promise that:
  /// a full disk shows before hours of work. `shown` is what messages call it. Throws Error 74.
  static SizedFile make(const std::string& path, std::uint64_t bytes, const std::string& shown);
  /// One that another process has made. Throws Error 74.
  static SizedFile open(const std::string& path, const std::string& shown);

  /// Throws Error 74.
  void write(std::uint64_t offset, std::span<const std::byte> bytes) const;
  /// Brings to the disk what this node wrote. Throws Error 74.
  void flush() const;

 private:
  SizedFile(FileDescriptor fd, std::string shown);

  FileDescriptor fd_;
  std::string shown_;
};

}  // namespace gatefold
