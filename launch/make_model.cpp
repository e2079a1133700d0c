#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <system_error>

#include "launch/job.h"
#include "layers/seeded_source.h"
#include "parallel/agreement.h"
#include "runtime/error.h"
#include "runtime/output_file.h"
#include "runtime/quoted_name.h"
#include "runtime/safetensors.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

/// Of a tensor in memory at a time, but at least one row.
constexpr std::int64_t kStagingBytes = 4 << 20;

struct NamedTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::int64_t bytes = 0;
};

struct Shard {
  std::string file;
  std::vector<NamedTensor> tensors;
  std::int64_t bytes = 0;
};

/// Where the directory will lie; refuses one that holds anything.
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

/// A directory beside `target` that becomes it, or goes away with the files in it.
class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::string& target)
      : target_(target), directory_(make_temporary_directory(target)) {}

  /// The path of a file that is going to be in it.
  std::string file(const std::string& name) {
    return files_.emplace_back(directory_.path() + '/' + name, TemporaryKind::kFile).path();
  }
  void keep() {
    // Replaces an empty directory, and no other.
    if (std::rename(directory_.path().c_str(), target_.c_str()) != 0) {
      fail_output(target_, errno_text(errno));
    }
    directory_.release();
    for (TemporaryPath& file : files_) file.release();
  }

 private:
  std::string target_;
  TemporaryPath directory_;
  std::vector<TemporaryPath> files_;  // removed before the directory is
};

std::vector<NamedTensor> list_tensors(const Job& job) {
  const SeededSource seeded(job.config(), job.options().seed);
  std::vector<NamedTensor> tensors;
  for (const std::int64_t layer : job.layers()) {
    for (const auto& [name, info] : seeded.layer_tensors(layer)) {
      const std::int64_t elements = std::accumulate(info.shape.begin(), info.shape.end(),
                                                    std::int64_t{1}, std::multiplies<>());
      // What isn't of the model's dtype (a correction bias) keeps its own.
      const DType dtype = info.dtype == job.config().dtype ? job.dtype() : info.dtype;
      tensors.push_back({name, dtype, info.shape, elements * size_of(dtype)});
    }
  }
  return tensors;
}

/// Spreads the tensors over `count` files in their order, each ending where its share of the bytes
/// does, as near as whole tensors allow. Throws Error 64 for more files than tensors.
std::vector<Shard> make_shards(std::vector<NamedTensor> tensors, std::int64_t count) {
  const auto left = [&](std::size_t i) { return static_cast<std::int64_t>(tensors.size() - i); };
  if (count > left(0)) {
    throw Error(ExitCode::kUsage,
                fmt::format("--shards {} is more than {} (a file holds whole tensors); use "
                            "--shards {} or less",
                            count, counted(left(0), "tensor"), tensors.size()));
  }
  std::int64_t rest = 0;
  for (const NamedTensor& tensor : tensors) rest += tensor.bytes;
  std::vector<Shard> shards(static_cast<std::size_t>(count));
  std::size_t next = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    Shard& shard = shards[static_cast<std::size_t>(i)];
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

void write_shard(const Job& job, TemporaryDirectory& folder, const Shard& shard,
                 const std::function<void()>& beat) {
  std::vector<SafetensorsWriter::Tensor> header;
  for (const NamedTensor& tensor : shard.tensors) {
    header.push_back({tensor.name, std::string(safetensors_name(tensor.dtype)), tensor.shape});
  }
  SafetensorsWriter writer(folder.file(shard.file), header, {{"format", "pt"}});
  std::vector<std::byte> staged;
  for (const NamedTensor& tensor : shard.tensors) {
    const auto [rows, columns] = extent_of(tensor.shape);
    const std::int64_t row_bytes = columns * size_of(tensor.dtype);
    const std::int64_t step = std::max<std::int64_t>(1, kStagingBytes / row_bytes);
    for (std::int64_t row = 0; row < rows; row += step) {
      const Range part{row, std::min(row + step, rows)};
      staged.resize(static_cast<std::size_t>(part.size() * row_bytes));
      read_as(job.source(), tensor.name, part, {0, columns}, tensor.dtype, staged.data());
      writer.append(staged);
      beat();
    }
  }
  writer.finish();
}

/// model.safetensors.index.json
std::string index_text(const std::vector<Shard>& shards) {
  nlohmann::ordered_json index;
  std::int64_t total = 0;
  for (const Shard& shard : shards) total += shard.bytes;
  index["metadata"]["total_size"] = total;
  for (const Shard& shard : shards) {
    for (const NamedTensor& tensor : shard.tensors) index["weight_map"][tensor.name] = shard.file;
  }
  return index.dump(2) + '\n';
}

/// The config as it was resolved, saying what the files have: this dtype, and nothing quantised.
std::string config_text(const Job& job) {
  static constexpr std::string_view kNames[] = {"float32", "bfloat16", "float16"};
  const ModelConfig& config = job.config();
  auto changes = job.options().set;
  if (config.quantization) changes.emplace_back(kQuantizationKey, "null");
  if (job.dtype() != config.dtype) {
    const std::string name(kNames[static_cast<std::size_t>(job.dtype())]);
    // The older spelling first: setting it takes the newer one away.
    if (config.canonical_text.find("\"torch_dtype\"") != std::string::npos) {
      changes.emplace_back("torch_dtype", name);
    }
    changes.emplace_back("dtype", name);
  }
  const bool as_it_is = changes.size() == job.options().set.size();
  return (as_it_is ? config : read_model_config(config.path, changes)).canonical_text + '\n';
}

void write_model(const Job& job, const std::vector<Shard>& shards,
                 const std::function<void()>& beat) {
  TemporaryDirectory folder(new_directory(job.options().output));
  for (const Shard& shard : shards) write_shard(job, folder, shard, beat);
  if (shards.size() > 1) {
    write_file(folder.file("model.safetensors.index.json"), index_text(shards));
  }
  write_file(folder.file("config.json"), config_text(job));
  folder.keep();
}

void describe(const Job& job, const std::vector<Shard>& shards, Report& report) {
  report.columns({{"file", "", "file"}, {"tensors", "", "tensors"}, {"size", "B", "bytes"}});
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;
  for (const Shard& shard : shards) {
    report.row({Cell::of(shard.file),
                Cell::of(static_cast<double>(shard.tensors.size()),
                         fmt::format("{}", shard.tensors.size())),
                Cell::of(static_cast<double>(shard.bytes), fmt::format("{}", shard.bytes))});
    tensors += static_cast<std::int64_t>(shard.tensors.size());
    bytes += shard.bytes;
  }
  const auto layers = static_cast<std::int64_t>(job.layers().size());
  report.note(fmt::format(
      "{}{}: {} of {}, {} of {}", job.options().dry_run ? "dry run, nothing is written to " : "",
      job.options().output, counted(tensors, "tensor"), counted(layers, "layer"),
      human(static_cast<double>(bytes), "B"), name_of(job.dtype())));
  if (!job.options().layers.empty()) {
    report.note(fmt::format("its config names {}: read it with --layers",
                            counted(job.config().num_layers, "layer")));
  }
}

}  // namespace

int make_model(Job& job) {
  Report report = job.report();
  std::vector<Shard> shards;
  run_agreed(job.world(), [&] {
    shards = make_shards(list_tensors(job), job.options().shards);
    if (job.world().rank() == 0) new_directory(job.options().output);
  });
  if (!job.options().dry_run) {
    job.world().progress().enter("writing the model");
    while_root_works(job.world(), 0,
                     [&](const std::function<void()>& beat) { write_model(job, shards, beat); });
  }
  describe(job, shards, report);
  publish(job, report);
  return static_cast<int>(ExitCode::kOk);
}

}  // namespace gatefold
