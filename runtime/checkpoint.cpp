#include "runtime/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "runtime/error.h"
#include "runtime/hash.h"
#include "runtime/json_file.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kIndexName = "model.safetensors.index.json";
constexpr std::string_view kSingleName = "model.safetensors";
constexpr std::string_view kSuffix = ".safetensors";
constexpr std::string_view kIndexRemedy = "download or write the index again";
constexpr JsonRules kIndexRules{
    .max_bytes = 100'000'000, .max_depth = 16, .kind = "an index", .remedy = kIndexRemedy};

struct Index {
  std::map<std::string, std::string> weight_map;  // tensor → file name
  std::optional<std::uint64_t> total_size;        // bytes, where it is a whole number
};

[[noreturn]] void fail(ExitCode code, const std::string& where, const std::string& problem,
                       std::string_view remedy) {
  throw Error(code, fmt::format("{}: {}; {}", where, problem, remedy));
}

[[noreturn]] void fail_index(const std::string& where, const std::string& problem) {
  fail(ExitCode::kData, where, problem, kIndexRemedy);
}

bool is_plain_file_name(std::string_view name) {
  if (name.empty() || name == "." || name.find("..") != name.npos) return false;
  return std::none_of(name.begin(), name.end(),
                      [](char c) { return c == '/' || static_cast<unsigned char>(c) < 0x20; });
}

Index read_index(const fs::path& path) {
  const std::string where = path.string();
  const json document = json::parse(read_json_text(where, kIndexRules));
  const auto map = document.is_object() ? document.find("weight_map") : document.end();
  if (map == document.end() || !map->is_object()) {
    fail_index(where, "no object 'weight_map' (it says which file holds which tensor)");
  }
  Index index;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string()) {
      fail_index(where, fmt::format("tensor {} is mapped to {} (a file name is needed)",
                                    quoted_name(tensor), quoted_name(file.dump().substr(0, 80))));
    }
    const auto& name = file.get_ref<const std::string&>();
    if (!is_plain_file_name(name)) {
      fail_index(where,
                 fmt::format("tensor {} is mapped to {} (not a plain file name: it could lie "
                             "outside the directory)",
                             quoted_name(tensor), quoted_name(name)));
    }
    if (!name.ends_with(kSuffix)) {
      fail_index(where,
                 fmt::format("tensor {} is mapped to {} (not the name of a safetensors file)",
                             quoted_name(tensor), quoted_name(name)));
    }
    index.weight_map.emplace(tensor, name);
  }
  if (index.weight_map.empty()) fail_index(where, "'weight_map' is empty (no tensor to load)");

  const auto metadata = document.find("metadata");
  if (metadata == document.end()) return index;
  if (!metadata->is_object()) fail_index(where, "'metadata' is no object");
  const auto total = metadata->find("total_size");
  if (total != metadata->end() && total->is_number_unsigned()) {
    index.total_size = total->get<std::uint64_t>();
  }
  return index;
}

struct ShardName {
  std::string_view set;    // "model" of model-00001-of-00003.safetensors
  std::string_view count;  // "00003"
};

std::optional<ShardName> parse_shard_name(std::string_view name) {
  const auto of = name.rfind("-of-");
  if (!name.ends_with(kSuffix) || of == name.npos || of == 0) return std::nullopt;
  const auto number = name.rfind('-', of - 1);
  if (number == name.npos) return std::nullopt;
  return ShardName{name.substr(0, number),
                   name.substr(of + 4, name.size() - kSuffix.size() - of - 4)};
}

/// Throws where file names count to different totals: an index pieced together from two revisions.
void check_one_set(const std::vector<std::string>& names, const std::string& where) {
  std::map<std::string_view, std::string_view> seen;  // set → the first name of it
  for (const std::string& name : names) {
    const auto shard = parse_shard_name(name);
    if (!shard) continue;
    const auto [first, added] = seen.emplace(shard->set, name);
    if (!added && parse_shard_name(first->second)->count != shard->count) {
      fail_index(where, fmt::format("names {} and {} (shards of two different sets)",
                                    quoted_name(first->second), quoted_name(name)));
    }
  }
}

std::vector<std::string> indexed_names(const Index& index, const fs::path& directory) {
  std::set<std::string> names;
  for (const auto& [tensor, file] : index.weight_map) names.insert(file);
  std::string missing;
  for (const std::string& name : names) {
    std::error_code error;
    if (!fs::exists(directory / name, error)) missing += (missing.empty() ? "" : ", ") + name;
  }
  if (!missing.empty()) {
    fail(ExitCode::kNoInput, (directory / kIndexName).string(),
         fmt::format("names files that are missing: {} (their tensors would be unset)", missing),
         "download them too");
  }
  return {names.begin(), names.end()};
}

/// The one file of a directory without an index.
std::string single_name(const fs::path& directory) {
  std::error_code error;
  if (fs::exists(fs::symlink_status(directory / kSingleName, error))) {
    return std::string(kSingleName);
  }
  std::vector<std::string> found;
  fs::directory_iterator entry(directory, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.ends_with(kSuffix) && !name.starts_with('.')) found.push_back(name);
  }
  if (error) {
    fail(ExitCode::kNoInput, directory.string(),
         fmt::format("cannot be listed ({})", error.message()), "make it a readable directory");
  }
  if (found.empty()) {
    fail(ExitCode::kNoInput, directory.string(), "no *.safetensors file in it (no weights to load)",
         "give the directory of a downloaded model");
  }
  if (found.size() > 1) {
    fail(ExitCode::kData, directory.string(),
         fmt::format("{} *.safetensors files, no {} (which of them make up the model isn't said)",
                     found.size(), kIndexName),
         fmt::format("add the index, or name the one that counts {}", kSingleName));
  }
  return found.front();
}

}  // namespace

Checkpoint::Checkpoint(const std::string& directory) : directory_(directory) {
  const fs::path root = directory;
  std::error_code error;
  const fs::file_status status = fs::status(root, error);
  if (!fs::is_directory(status)) {
    const std::string why = fs::exists(status) ? "not a directory" : error.message();
    fail(ExitCode::kNoInput, directory.empty() ? "''" : directory,
         fmt::format("cannot be opened ({})", why), "give the directory of a model");
  }
  // A dangling link counts as an index: loading something else instead would be a silent choice.
  const fs::path index_path = root / kIndexName;
  const fs::file_status index_status = fs::symlink_status(index_path, error);
  if (index_status.type() == fs::file_type::not_found) {
    open({single_name(root)});
    return;
  }
  if (!fs::exists(index_status)) {
    fail(ExitCode::kNoInput, index_path.string(),
         fmt::format("cannot be read ({})", error.message()), "make it a readable file");
  }
  const Index index = read_index(index_path);
  const std::vector<std::string> names = indexed_names(index, root);
  check_one_set(names, index_path.string());
  open(names);
  apply_index(index.weight_map);

  std::uint64_t bytes = 0;
  for (const auto& [tensor, file] : tensor_file_) {
    const auto entry = files_[file].header().tensors.find(tensor);
    bytes += entry->second.end - entry->second.begin;
  }
  if (index.total_size.value_or(bytes) != bytes) {
    size_note_ = fmt::format(", {} bytes where its index says {}", bytes, *index.total_size);
  }
}

void Checkpoint::open(const std::vector<std::string>& names) {
  files_.reserve(names.size());
  for (const std::string& name : names) {
    const SafetensorsFile& file = files_.emplace_back((fs::path(directory_) / name).string());
    for (const auto& [tensor, entry] : file.header().tensors) {
      const auto [first, added] = tensor_file_.emplace(tensor, files_.size() - 1);
      if (added) continue;
      fail(ExitCode::kData, directory_,
           fmt::format("tensor {} is in {} and in {} (which one counts isn't said)",
                       quoted_name(tensor), files_[first->second].path(), file.path()),
           "download the model again");
    }
  }
}

void Checkpoint::apply_index(const std::map<std::string, std::string>& weight_map) {
  const std::string where = (fs::path(directory_) / kIndexName).string();
  TensorFile listed;
  for (const auto& [tensor, file] : weight_map) {
    const std::string path = (fs::path(directory_) / file).string();
    auto found = tensor_file_.extract(tensor);
    if (found.empty()) {
      fail_index(where,
                 fmt::format("maps tensor {} to {} (the file is there, but the tensor is not "
                             "in it)",
                             quoted_name(tensor), path));
    }
    if (files_[found.mapped()].path() != path) {
      fail_index(where, fmt::format("maps tensor {} to {} (the file is there, but the tensor is in "
                                    "{})",
                                    quoted_name(tensor), path, files_[found.mapped()].path()));
    }
    listed.insert(std::move(found));
  }
  unlisted_ = std::exchange(tensor_file_, std::move(listed));
}

const SafetensorsFile& Checkpoint::file_of(const std::string& name) const {
  const auto found = tensor_file_.find(name);
  if (found == tensor_file_.end()) {
    fail(ExitCode::kData, directory_,
         fmt::format("no tensor {} (no index or header lists it)", quoted_name(name)),
         "check that config.json and the files belong together");
  }
  return files_[found->second];
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : tensor_file_) names.push_back(name);
  return names;
}

const SafetensorsEntry* Checkpoint::stored(const std::string& name) const {
  if (const auto hidden = unlisted_.find(name); hidden != unlisted_.end()) {
    fail_index((fs::path(directory_) / kIndexName).string(),
               fmt::format("does not list tensor {} (it is in {}: index and files disagree)",
                           quoted_name(name), files_[hidden->second].path()));
  }
  const auto found = tensor_file_.find(name);
  if (found == tensor_file_.end()) return nullptr;
  return &files_[found->second].header().tensors.find(name)->second;
}

std::map<std::string, SafetensorsEntry> Checkpoint::entries() const {
  for (const auto& [name, file] : unlisted_) static_cast<void>(stored(name));
  std::map<std::string, SafetensorsEntry> all;
  for (const auto& [name, file] : tensor_file_) all.emplace(name, *stored(name));
  return all;
}

std::optional<TensorInfo> Checkpoint::find(const std::string& name) const {
  const SafetensorsEntry* entry = stored(name);
  if (entry == nullptr) return std::nullopt;
  const auto dtype = dtype_from_safetensors(entry->dtype);
  if (!dtype) {
    fail(ExitCode::kData, file_of(name).path(),
         fmt::format("tensor {} is stored as {} (only F32, BF16 and F16 can be loaded)",
                     quoted_name(name), entry->dtype),
         "convert the model to one of them");
  }
  return TensorInfo{.dtype = *dtype, .shape = entry->shape};
}

void Checkpoint::read(const std::string& name, Range rows, Range cols, std::byte* out) const {
  const auto info = find(name);
  const SafetensorsFile& file = file_of(name);
  const Extent extent = extent_of(info->shape);
  if (!rows.within(extent.rows) || !cols.within(extent.columns)) {
    fail(
        ExitCode::kData, file.path(),
        fmt::format("rows [{}, {}) and columns [{}, {}) of tensor {} (it is [{}, {}])", rows.begin,
                    rows.end, cols.begin, cols.end, quoted_name(name), extent.rows, extent.columns),
        "check that config.json and the files belong together");
  }

  const std::int64_t element = size_of(info->dtype);
  read_bytes(name, extent.columns * element, rows, {cols.begin * element, cols.end * element}, out);
}

void Checkpoint::read_bytes(const std::string& name, std::int64_t row_bytes, Range rows, Range cols,
                            std::byte* out) const {
  const SafetensorsFile& file = file_of(name);
  // Whole rows lie behind one another: one segment. Else each row is one.
  const bool whole = cols.size() == row_bytes;
  const std::int64_t segments = whole ? 1 : rows.size();
  const std::int64_t bytes = cols.size() * (whole ? rows.size() : 1);
  for (std::int64_t i = 0; i < segments; ++i) {
    const std::int64_t first = (rows.begin + i) * row_bytes + cols.begin;
    file.read(name, static_cast<std::uint64_t>(first),
              {out + i * bytes, static_cast<std::size_t>(bytes)});
  }
}

std::string Checkpoint::description() const {
  const auto count = [](std::size_t n) { return static_cast<std::int64_t>(n); };
  return fmt::format("{} ({} in {}{})", directory_, counted(count(tensor_file_.size()), "tensor"),
                     counted(count(files_.size()), "file"), size_note_);
}

std::uint64_t Checkpoint::header_hash() const {
  Fnv1a hash;
  for (const SafetensorsFile& file : files_) hash.add_number(file.header_hash());
  return hash.value();
}

}  // namespace gatefold
