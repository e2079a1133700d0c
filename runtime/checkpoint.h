#pragma once

#include <cstdint>
#include <map>
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
  /// index names, tensor in two files.
  explicit Checkpoint(const std::string& directory);

  std::optional<TensorInfo> find(const std::string& name) const override;
  void read(const std::string& name, Range rows, Range cols, std::byte* out) const override;
  std::string description() const override;

  /// Over all files' header hashes, in name order: equal on ranks that see the same headers.
  std::uint64_t header_hash() const;

 private:
  const SafetensorsFile& file_of(const std::string& name) const;

  std::string directory_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t, std::less<>> tensor_file_;  // tensor → index into files_
};

}  // namespace gatefold
