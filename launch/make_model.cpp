#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "launch/job.h"
#include "launch/model_folder.h"
#include "layers/model_files.h"
#include "layers/quantization.h"
#include "layers/seeded_source.h"
#include "layers/stored_tensors.h"
#include "parallel/agreement.h"
#include "runtime/block_quantiser.h"
#include "runtime/error.h"
#include "runtime/quoted_name.h"
#include "runtime/safetensors.h"

namespace gatefold {
namespace {

using Json = nlohmann::json;  // by name, as canonical_text is

/// Of a tensor in memory at a time, but at least one row.
constexpr std::int64_t kStagingBytes = 4 << 20;

FolderTensor folder_tensor(const SafetensorsWriter::Tensor& tensor) {
  const auto bits = static_cast<std::int64_t>(stored_bits(tensor.dtype).value());
  return {tensor.name, tensor.dtype, tensor.shape, elements_of(tensor.shape) * bits / 8};
}

Quantization quantization_of(const Job& job) {
  const BlockFormat format = job.options().quantised.value();
  const std::string method(quant_method(format));
  const auto& said = job.config().quantization;
  return said && said->method == method ? *said : Quantization{.method = method};
}

/// Matrices of experts and of dense layers; MXFP4 is for stacks of them alone.
bool is_quantised(const StoredTensor& tensor, BlockFormat format) {
  return tensor.role == TensorRole::kWeight &&
         (format == BlockFormat::kF8E4M3 || tensor.shape.size() > 2);
}

/// The tensors to write, and how those of them that are quantised come about.
class Weights {
 public:
  /// Throws Error 64 for a type that the family, or a weight of these sizes, can't have.
  explicit Weights(const Job& job) : job_(job) {
    if (const auto format = job.options().quantised) quantise(*format);
    const SeededSource seeded(job.config(), job.options().seed);
    for (const std::int64_t layer : job.layers()) {
      for (const auto& [name, info] : seeded.layer_tensors(layer)) add(name, info);
    }
  }

  const std::vector<FolderTensor>& tensors() const { return tensors_; }
  std::int64_t quantised() const { return static_cast<std::int64_t>(quantisers_.size()); }
  /// Writes `tensor`, the next one in their order, in pieces.
  void write(const FolderTensor& tensor, const BlockQuantiser::Sink& write);

 private:
  void quantise(BlockFormat format);
  void add(const std::string& name, const TensorInfo& info);
  void write_plain(const FolderTensor& tensor, const BlockQuantiser::Sink& write) const;

  const Job& job_;
  std::map<std::string, BlockQuantiser> quantisers_;  // by plain name
  std::map<std::string, std::string> codes_;          // their plain names
  std::vector<FolderTensor> tensors_;
  std::vector<std::byte> scales_;  // of the codes that were written last
};

void Weights::quantise(BlockFormat format) {
  const ModelConfig& config = job_.config();
  if (!may_have(config, format)) {
    throw Error(ExitCode::kUsage,
                fmt::format("--dtype {} of a {} model (only gpt_oss has such weights: how others' "
                            "lie isn't said); use f8_e4m3 or a plain type",
                            name_of(format), config.model_type));
  }
  if (format == BlockFormat::kMxfp4 && layout_of(config) == ExpertLayout::kPerExpert) {
    throw Error(ExitCode::kUsage,
                fmt::format("--dtype {} with --layout {} (only stacks have such weights); leave "
                            "--layout out",
                            name_of(format), name_of(layout_of(config))));
  }
  const Quantization sizes = quantization_of(job_);
  for (const std::int64_t layer : job_.layers()) {
    for (const StoredTensor& tensor : config.is_moe(layer)
                                          ? stored_tensors(config.moe_spec(layer))
                                          : stored_tensors(config.layer_spec(layer))) {
      if (!is_quantised(tensor, format)) continue;
      quantisers_.emplace(tensor.name, BlockQuantiser(job_.source(), tensor.name, format,
                                                      {sizes.block_rows, sizes.block_columns}));
    }
  }
}

void Weights::add(const std::string& name, const TensorInfo& info) {
  if (const auto found = quantisers_.find(name); found != quantisers_.end()) {
    tensors_.push_back(folder_tensor(found->second.codes()));
    codes_.emplace(tensors_.back().name, name);
    tensors_.push_back(folder_tensor(found->second.scales()));  // right behind: see write()
    return;
  }
  // What isn't of the model's dtype (a correction bias) keeps its own.
  const DType dtype = info.dtype == job_.config().dtype ? job_.dtype() : info.dtype;
  tensors_.push_back(folder_tensor({name, std::string(safetensors_name(dtype)), info.shape}));
}

void Weights::write(const FolderTensor& tensor, const BlockQuantiser::Sink& write) {
  if (const auto codes = codes_.find(tensor.name); codes != codes_.end()) {
    scales_ = quantisers_.at(codes->second).write(write);
  } else if (!scales_.empty()) {
    write(std::exchange(scales_, {}));
  } else {
    write_plain(tensor, write);
  }
}

void Weights::write_plain(const FolderTensor& tensor, const BlockQuantiser::Sink& write) const {
  const auto [rows, columns] = extent_of(tensor.shape);
  const DType dtype = *dtype_from_safetensors(tensor.dtype);
  const std::int64_t row_bytes = columns * size_of(dtype);
  const std::int64_t step = std::max<std::int64_t>(1, kStagingBytes / row_bytes);
  std::vector<std::byte> staged;
  for (std::int64_t row = 0; row < rows; row += step) {
    const Range part{row, std::min(row + step, rows)};
    staged.resize(static_cast<std::size_t>(part.size() * row_bytes));
    read_as(job_.source(), tensor.name, part, {0, columns}, dtype, staged.data());
    write(staged);
  }
}

void write_shard(Weights& weights, TemporaryDirectory& folder, const FolderShard& shard,
                 const std::function<void()>& beat) {
  std::vector<SafetensorsWriter::Tensor> header;
  for (const FolderTensor& tensor : shard.tensors) {
    header.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  SafetensorsWriter writer(folder.file(shard.file), header, {{"format", "pt"}});
  for (const FolderTensor& tensor : shard.tensors) {
    weights.write(tensor, [&](std::span<const std::byte> bytes) {
      writer.append(bytes);
      beat();
    });
  }
  writer.finish();
}

/// As published models have it.
Json quantization_json(const Job& job) {
  const Quantization is = quantization_of(job);
  Json json{{"quant_method", is.method}};
  if (job.options().quantised != BlockFormat::kF8E4M3) return json;
  json["activation_scheme"] = "dynamic";
  json["fmt"] = "e4m3";
  json["weight_block_size"] = {is.block_rows, is.block_columns};
  return json;
}

/// The config as it was resolved, saying what the files have: this dtype, and which weights are
/// quantised.
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
  const std::string text =
      (as_it_is ? config : read_model_config(config.path, changes)).canonical_text;
  if (!job.options().quantised) return text + '\n';
  Json json = Json::parse(text);
  json[kQuantizationKey] = quantization_json(job);
  return json.dump(2) + '\n';
}

void write_model(const Job& job, Weights& weights, const std::vector<FolderShard>& shards,
                 const std::function<void()>& beat) {
  TemporaryDirectory folder(new_directory(job.options().output));
  for (const FolderShard& shard : shards) write_shard(weights, folder, shard, beat);
  if (shards.size() > 1) {
    write_file(folder.file(kIndexFile), index_text(shards));
  }
  write_file(folder.file("config.json"), config_text(job));
  folder.keep();
}

void describe(const Job& job, const Weights& weights, const std::vector<FolderShard>& shards,
              Report& report) {
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
  const auto format = job.options().quantised;
  const std::string weights_in = format ? fmt::format(" and {}", name_of(*format)) : std::string();
  report.note(fmt::format(
      "{}{}: {} of {}, {} of {}{}", job.options().dry_run ? "dry run, nothing is written to " : "",
      job.options().output, counted(tensors, "tensor"), counted(layers, "layer"),
      human(static_cast<double>(bytes), "B"), name_of(job.dtype()), weights_in));
  if (format) {
    report.note(fmt::format("{} as {}: codes, and a power of two for each block",
                            counted(weights.quantised(), "weight"), name_of(*format)));
  }
  if (!job.options().layers.empty()) {
    report.note(fmt::format("its config names {}: read it with --layers",
                            counted(job.config().num_layers, "layer")));
  }
}

}  // namespace

int make_model(Job& job) {
  Report report = job.report();
  std::optional<Weights> weights;
  std::vector<FolderShard> shards;
  run_agreed(job.world(), [&] {
    weights.emplace(job);
    shards = make_shards(weights->tensors(), job.options().shards);
    if (job.world().rank() == 0) new_directory(job.options().output);
  });
  if (!job.options().dry_run) {
    job.world().progress().enter("writing the model");
    while_root_works(job.world(), 0, [&](const std::function<void()>& beat) {
      write_model(job, *weights, shards, beat);
    });
  }
  describe(job, *weights, shards, report);
  publish(job, report);
  return static_cast<int>(ExitCode::kOk);
}

}  // namespace gatefold
