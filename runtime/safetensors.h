#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/dtype.h"
#include "runtime/file_descriptor.h"
#include "runtime/output_file.h"
#include "runtime/quoted_name.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// One entry of a safetensors header. `dtype` keeps the file's spelling ("BF16"), because files
/// hold types that no layer computes in.
struct SafetensorsEntry {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  // bytes, from the start of the data section
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::uint64_t data_start = 0;  // 8 + header length
  std::map<std::string, SafetensorsEntry, std::less<>> tensors;
  std::map<std::string, std::string> metadata;
};

/// Parses the JSON header (without the 8 length bytes) of a file with `data_bytes` bytes behind
/// it. Pure: this is what the fuzzer runs. Throws Error 65 naming `where` and the tensor.
/// Checks what the format demands: tensors tile the data exactly (no hole, no overlap, nothing
/// beyond either end), shape times element size equals the range (checked arithmetic), keys are
/// unique, the nesting is shallow.
SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                           const std::string& where);

/// An open safetensors file. Reads with pread: a file that shrinks after opening is an Error 65,
/// never a SIGBUS.
class SafetensorsFile {
 public:
  /// Throws Error 66 where the path can't be opened or isn't a regular file, 65 where it is
  /// malformed.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return path_; }
  const SafetensorsHeader& header() const { return header_; }
  /// FNV-1a of the raw header bytes and the file size: what ranks compare.
  std::uint64_t header_hash() const { return header_hash_; }

  /// Reads `out.size()` bytes at `offset` from the start of tensor `name`'s data. Throws Error 65
  /// where the file has no such tensor or bytes (any more), 66 where reading fails.
  void read(const std::string& name, std::uint64_t offset, std::span<std::byte> out) const;

 private:
  void read_header();
  void read_at(std::uint64_t offset, std::span<std::byte> out) const;

  std::string path_;
  FileDescriptor fd_;
  std::uint64_t file_bytes_ = 0;
  std::uint64_t header_hash_ = 0;
  SafetensorsHeader header_;
};

/// Writes a safetensors file: tensors in the given order, streamed chunk by chunk into a temporary
/// file beside `path`, renamed on finish(); the destructor removes an unfinished one.
class SafetensorsWriter {
 public:
  struct Tensor {
    std::string name;
    std::string dtype;  // "F32", "BF16", "F16", "I64", …
    std::vector<std::int64_t> shape;
  };
  /// Throws Error 74 where it can't be written; a device, pipe or directory is never replaced, and
  /// a symbolic link stays: the file that it leads to is replaced.
  SafetensorsWriter(const std::string& path, const std::vector<Tensor>& tensors,
                    const std::map<std::string, std::string>& metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// Appends the next bytes of the data section; all tensors' bytes in order, nothing else.
  /// Throws Error 74.
  void append(std::span<const std::byte> bytes);
  /// Checks that exactly the announced bytes came, flushes to disk, renames. Throws Error 74.
  void finish();

 private:
  OutputFile file_;
  std::uint64_t expected_ = 0;
  std::uint64_t written_ = 0;
};

/// What stands before the data of a file: eight bytes of length, then the header.
struct SafetensorsHead {
  std::string text;
  std::uint64_t data_bytes = 0;
};
/// Of the file at `path` that has these tensors behind each other. Throws Error 74 where no file
/// can: a name twice, no size for a shape, text that isn't UTF-8, more header than is readable.
SafetensorsHead safetensors_head(const std::string& path,
                                 const std::vector<SafetensorsWriter::Tensor>& tensors,
                                 const std::map<std::string, std::string>& metadata = {});

/// The file's spelling of a dtype: "F32", "BF16", "F16"; and back (nothing for other types).
std::string_view safetensors_name(DType dtype);
std::optional<DType> dtype_from_safetensors(std::string_view name);
/// Of an element of any type that files may hold; nothing for others.
std::optional<std::uint64_t> stored_bits(std::string_view stored_type);

}  // namespace gatefold
