#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "launch/job.h"
#include "launch/model_folder.h"
#include "layers/seeded_source.h"
#include "parallel/agreement.h"
#include "runtime/error.h"
#include "runtime/quoted_name.h"
#include "runtime/safetensors.h"

namespace gatefold {
namespace {

/// Of a tensor in memory at a time, but at least one row.
constexpr std::int64_t kStagingBytes = 4 << 20;

std::vector<FolderTensor> list_tensors(const Job& job) {
  const SeededSource seeded(job.config(), job.options().seed);
  std::vector<FolderTensor> tensors;
  for (const std::int64_t layer : job.layers()) {
    for (const auto& [name, info] : seeded.layer_tensors(layer)) {
      const std::int64_t elements = std::accumulate(info.shape.begin(), info.shape.end(),
                                                    std::int64_t{1}, std::multiplies<>());
      // What isn't of the model's dtype (a correction bias) keeps its own.
      const DType dtype = info.dtype == job.config().dtype ? job.dtype() : info.dtype;
      tensors.push_back(
          {name, std::string(safetensors_name(dtype)), info.shape, elements * size_of(dtype)});
    }
  }
  return tensors;
}

void write_shard(const Job& job, TemporaryDirectory& folder, const FolderShard& shard,
                 const std::function<void()>& beat) {
  std::vector<SafetensorsWriter::Tensor> header;
  for (const FolderTensor& tensor : shard.tensors) {
    header.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  SafetensorsWriter writer(folder.file(shard.file), header, {{"format", "pt"}});
  std::vector<std::byte> staged;
  for (const FolderTensor& tensor : shard.tensors) {
    const auto [rows, columns] = extent_of(tensor.shape);
    const DType dtype = *dtype_from_safetensors(tensor.dtype);
    const std::int64_t row_bytes = columns * size_of(dtype);
    const std::int64_t step = std::max<std::int64_t>(1, kStagingBytes / row_bytes);
    for (std::int64_t row = 0; row < rows; row += step) {
      const Range part{row, std::min(row + step, rows)};
      staged.resize(static_cast<std::size_t>(part.size() * row_bytes));
      read_as(job.source(), tensor.name, part, {0, columns}, dtype, staged.data());
      writer.append(staged);
      beat();
    }
  }
  writer.finish();
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

void write_model(const Job& job, const std::vector<FolderShard>& shards,
                 const std::function<void()>& beat) {
  TemporaryDirectory folder(new_directory(job.options().output));
  for (const FolderShard& shard : shards) write_shard(job, folder, shard, beat);
  if (shards.size() > 1) {
    write_file(folder.file(kIndexFile), index_text(shards));
  }
  write_file(folder.file("config.json"), config_text(job));
  folder.keep();
}

void describe(const Job& job, const std::vector<FolderShard>& shards, Report& report) {
  report.columns({{"file", "", "file"}, {"tensors", "", "tensors"}, {"size", "B", "bytes"}});
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;
  for (const FolderShard& shard : shards) {
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
  std::vector<FolderShard> shards;
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
