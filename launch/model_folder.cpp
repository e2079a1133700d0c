#include "launch/model_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "runtime/error.h"
#include "runtime/file_descriptor.h"
#include "runtime/quoted_name.h"
#include "runtime/tensor_source.h"

namespace gatefold {

namespace fs = std::filesystem;

std::int64_t elements_of(const std::vector<std::int64_t>& shape) {
  const Extent extent = extent_of(shape);
  return extent.rows * extent.columns;
}

SafetensorsHead FolderShard::head(const std::string& path,
                                  const std::map<std::string, std::string>& metadata) const {
  std::vector<SafetensorsWriter::Tensor> header;
  for (const FolderTensor& tensor : tensors) {
    header.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  return safetensors_head(path, header, metadata);
}

std::vector<FolderShard> make_shards(std::vector<FolderTensor> tensors, std::int64_t count) {
  const auto left = [&](std::size_t i) { return static_cast<std::int64_t>(tensors.size() - i); };
  if (count > left(0)) {
    throw Error(ExitCode::kUsage,
                fmt::format("--shards {} is more than {} (a file holds whole tensors); use "
                            "--shards {} or less",
                            count, counted(left(0), "tensor"), tensors.size()));
  }
  std::int64_t rest = 0;
  for (const FolderTensor& tensor : tensors) rest += tensor.bytes;
  std::vector<FolderShard> shards(static_cast<std::size_t>(count));
  std::size_t next = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    FolderShard& shard = shards[static_cast<std::size_t>(i)];
    shard.file = count == 1 ? "model.safetensors"
                            : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, count);
    const std::int64_t files_after = count - i - 1;
    const std::int64_t share = rest / (files_after + 1);
    // At least one tensor, and one for each file to come; half of a tensor over the share at most.
    while (left(next) > files_after && (files_after == 0 || shard.tensors.empty() ||
                                        shard.bytes + tensors[next].bytes / 2 <= share)) {
      shard.bytes += tensors[next].bytes;
      shard.tensors.push_back(std::move(tensors[next++]));
    }
    rest -= shard.bytes;
  }
  return shards;
}

std::string index_text(const std::vector<FolderShard>& shards) {
  nlohmann::json index;  // keys sorted, as transformers writes them
  std::int64_t total = 0;
  for (const FolderShard& shard : shards) {
    total += shard.bytes;
    for (const FolderTensor& tensor : shard.tensors) index["weight_map"][tensor.name] = shard.file;
  }
  index["metadata"]["total_size"] = total;
  return index.dump(2) + '\n';
}

std::string new_directory(const std::string& path) {
  std::error_code error;
  std::string target = fs::absolute(path, error).lexically_normal().string();
  if (target.size() > 1 && target.ends_with('/')) target.pop_back();
  const fs::file_status status = fs::status(target, error);
  if (status.type() == fs::file_type::not_found) {
    if (fs::is_symlink(fs::symlink_status(target, error))) {
      fail_output(path, "a symbolic link to nowhere");
    }
    return target;
  }
  if (!fs::is_directory(status)) fail_output(path, "it is there and is no directory");
  const bool empty = fs::is_empty(target, error);
  if (error) fail_output(path, error.message());
  if (!empty) fail_output(path, "the directory isn't empty");
  return fs::canonical(target, error).string();
}

TemporaryDirectory::TemporaryDirectory(const std::string& target)
    : target_(target), directory_(make_temporary_directory(target)) {}

TemporaryDirectory::TemporaryDirectory(const std::string& target, const std::string& path)
    : target_(target), directory_(path, TemporaryKind::kDirectory) {}

std::string TemporaryDirectory::file(const std::string& name) {
  return files_.emplace_back(path() + '/' + name, TemporaryKind::kFile).path();
}

void TemporaryDirectory::drop(const std::string& name) {
  std::erase_if(files_, [path = path() + '/' + name](auto& file) { return file.path() == path; });
}

void TemporaryDirectory::keep() {
  // Replaces an empty directory, and no other.
  if (std::rename(path().c_str(), target_.c_str()) != 0) {
    fail_output(target_, errno_text(errno));
  }
  release();
  // Best effort: makes the rename itself durable, where the file system can.
  const FileDescriptor parent(
      ::open(fs::path(target_).parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ::fsync(parent.get());
}

void TemporaryDirectory::release() noexcept {
  directory_.release();
  for (TemporaryPath& file : files_) file.release();
}

}  // namespace gatefold
