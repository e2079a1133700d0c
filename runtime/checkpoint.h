#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "runtime/safetensors.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// A directory of safetensors files as a TensorSource: model.safetensors.index.json with its shards
/// where there is an index, else model.safetensors, else the one *.safetensors file there is.
/// Opening reads headers only. Rows of a 2-D tensor are read with one pread where whole rows are
/// asked for, else with one pread per row segment: just the bytes asked for.
class Checkpoint : public TensorSource {
 public:
  /// Throws Error 66: directory missing or unreadable, no safetensors in it, index names a missing
  /// file; 65: malformed index or file, path outside the directory, tensor not in the file the
  /// index names, tensor in two files, shards of two sets, several files and no index. An index's
  /// total_size is only for information: a wrong one is shown by description().
  explicit Checkpoint(const std::string& directory);

  /// Throws Error 65 also for a tensor that a file holds but the index doesn't list.
  std::optional<TensorInfo> find(const std::string& name) const override;
  void read(const std::string& name, Range rows, Range cols, std::byte* out) const override;
  std::string description() const override;

  /// All tensors' names, sorted.
  std::vector<std::string> names() const;
  /// As a file holds it, of whatever type; null where there is none. Throws Error 65 for a tensor
  /// that the index doesn't list.
  const SafetensorsEntry* stored(const std::string& name) const;
  /// All tensors as files hold them. Throws Error 65 for one that the index doesn't list.
  std::map<std::string, SafetensorsEntry> entries() const;
  const std::vector<SafetensorsFile>& files() const { return files_; }
  /// Reads bytes `cols` of rows of a tensor of any type, seen as [its bytes / row_bytes,
  /// row_bytes], dense into `out` [rows.size(), cols.size()]. Throws Error 65 or 66 where there is
  /// no such tensor or not as many bytes.
  void read_bytes(const std::string& name, std::int64_t row_bytes, Range rows, Range cols,
                  std::byte* out) const;

  /// Over all files' header hashes, in name order: equal on ranks that see the same headers.
  std::uint64_t header_hash() const;

 private:
  // tensor → index into files_
  using TensorFile = std::map<std::string, std::size_t, std::less<>>;

  void open(const std::vector<std::string>& names);
  void apply_index(const std::map<std::string, std::string>& weight_map);
  const SafetensorsFile& file_of(const std::string& name) const;

  std::string directory_;
  std::vector<SafetensorsFile> files_;  // in name order
  TensorFile tensor_file_;
  TensorFile unlisted_;  // in a file, but the index doesn't say so
  std::string size_note_;
};

}  // namespace gatefold
