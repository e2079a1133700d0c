#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "runtime/output_file.h"
#include "runtime/safetensors.h"

/// A directory of a model as it is written: the files that weights are spread over, and how the
/// whole comes to be there at once or not at all.
namespace gatefold {

std::int64_t elements_of(const std::vector<std::int64_t>& shape);

/// A tensor that is to be written.
struct FolderTensor {
  std::string name;
  std::string dtype;  // as files spell it: "BF16"
  std::vector<std::int64_t> shape;
  std::int64_t bytes = 0;
};

/// One file of weights.
struct FolderShard {
  std::string file;
  std::vector<FolderTensor> tensors;
  std::int64_t bytes = 0;  // of the tensors

  /// What stands before them; `path` is for messages. Throws Error 74.
  SafetensorsHead head(const std::string& path,
                       const std::map<std::string, std::string>& metadata) const;
};

/// Spreads the tensors over `count` files in their order, each ending where its share of the bytes
/// does, as near as whole tensors allow. Throws Error 64 for more files than tensors.
std::vector<FolderShard> make_shards(std::vector<FolderTensor> tensors, std::int64_t count);

inline constexpr const char* kIndexFile = "model.safetensors.index.json";
/// The text of that.
std::string index_text(const std::vector<FolderShard>& shards);

/// Where the directory `path` will lie. Throws Error 74 for one that holds anything.
std::string new_directory(const std::string& path);

/// A directory beside `target` that becomes it, or goes away with the files in it.
class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::string& target);
  /// The one at `path` that another rank has made: whoever ends last has removed it.
  TemporaryDirectory(const std::string& target, const std::string& path);

  const std::string& path() const { return directory_.path(); }
  /// The path of a file that is going to be in it.
  std::string file(const std::string& name);
  /// Where it is going to lie: for messages.
  std::string shown(const std::string& name) const { return target_ + '/' + name; }
  /// Removes a file of it again.
  void drop(const std::string& name);
  /// Gives it its name. Throws Error 74.
  void keep();
  /// It has its name, or is another rank's to remove.
  void release() noexcept;

 private:
  std::string target_;
  TemporaryPath directory_;
  std::vector<TemporaryPath> files_;  // removed before the directory is
};

}  // namespace gatefold
