#include "launch/conversion.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "layers/config_document.h"
#include "layers/model_families.h"
#include "layers/model_files.h"
#include "layers/moe_config.h"
#include "layers/quantization.h"
#include "runtime/canonical.h"
#include "runtime/dequantised_source.h"
#include "runtime/error.h"
#include "runtime/tensor_source.h"
#include "runtime/vector_isa.h"

namespace gatefold {
namespace {

using Json = nlohmann::ordered_json;  // what isn't changed stays where it is

constexpr std::string_view kTorchNames[] = {"float32", "bfloat16", "float16"};

std::string config_path(const std::string& model) { return model + "/config.json"; }

/// Routers choose by scores that bf16 can't tell apart: families keep this in fp32.
bool keeps_type(std::string_view name) { return name.ends_with(".e_score_correction_bias"); }

/// The prefix that `router`, the whole name of a layer's tensor, begins with.
std::string_view prefix_of(const ModelConfig& config, std::int64_t layer,
                           const std::string& router) {
  for (const std::string_view prefix : family_of(config).prefixes) {
    if (router.starts_with(layer_path(config, layer, prefix))) return prefix;
  }
  return "";
}

using Entries = std::map<std::string, SafetensorsEntry>;

/// Whether anything of the layer is there: make-model --layers leaves others out.
bool holds_layer(const ModelConfig& config, std::int64_t layer, const Entries& entries) {
  return std::ranges::any_of(family_of(config).prefixes, [&](std::string_view prefix) {
    const std::string path = layer_path(config, layer, prefix);
    const auto first = entries.lower_bound(path);
    return first != entries.end() && first->first.starts_with(path);
  });
}

/// Says `dtype` wherever the config or a model within it says one.
void set_dtype(Json& config, DType dtype) {
  const std::string_view name = kTorchNames[static_cast<std::size_t>(dtype)];
  bool said = false;
  const auto set = [&](Json& object) {
    for (const char* key : {"torch_dtype", "dtype"}) {
      const auto field = object.find(key);
      if (field == object.end()) continue;
      *field = name;
      said = true;
    }
  };
  set(config);
  for (Json& field : config) {
    if (field.is_object()) set(field);
  }
  if (!said) config["torch_dtype"] = name;  // both versions of transformers know it
}

bool is_infinite(std::uint16_t f16) { return (f16 & 0x7fffU) == 0x7c00U; }

/// Counted in the values' own width for as long as that holds it: wider sums take a third of the
/// time of a conversion.
GATEFOLD_CLONES std::int64_t count_infinite(const std::uint16_t* bits, std::int64_t n) {
  constexpr std::int64_t kRun = 1 << 12;
  std::int64_t found = 0;
  for (std::int64_t first = 0; first < n; first += kRun) {
    const std::int64_t end = std::min(first + kRun, n);
    std::uint16_t some = 0;
    for (std::int64_t i = first; i < end; ++i) {
      some = static_cast<std::uint16_t>(some + (is_infinite(bits[i]) ? 1 : 0));
    }
    found += some;
  }
  return found;
}

/// Of n f16 values that `in` became, the infinite ones that were finite.
std::int64_t count_overflows(DType from, const std::byte* in, const std::byte* out,
                             std::int64_t n) {
  const auto* bits = reinterpret_cast<const std::uint16_t*>(out);
  std::int64_t found = count_infinite(bits, n);
  if (found == 0) return 0;
  std::vector<float> values;
  values.resize(static_cast<std::size_t>(n));
  convert(from, in, DType::kF32, reinterpret_cast<std::byte*>(values.data()), n);
  for (std::int64_t i = 0; i < n; ++i) {
    found -= is_infinite(bits[i]) && std::isinf(values[static_cast<std::size_t>(i)]) ? 1 : 0;
  }
  return found;
}

}  // namespace

/// What is read, and what becomes of it.
struct Conversion::Stage {
  std::vector<std::byte> in, out;
};

Conversion::Conversion(const Options& options)
    : config_(read_model_config(config_path(options.model))),
      checkpoint_(options.model),
      dtype_(options.dtype) {
  if (options.layout || dtype_) open_source(options);
  if (options.layout) relay(*options.layout);
  plan(options);
}

/// The weights as layers read them; with --dtype quantised ones, too.
void Conversion::open_source(const Options& options) {
  ModelFiles files = open_model_files(options.model, config_);
  source_ = std::move(files.source);
  quantised_ = files.plain->quantised();
  if (quantised_.empty() || dtype_) return;
  throw Error(ExitCode::kUsage,
              fmt::format("--layout of a model with quantised weights, such as {} (they would lose "
                          "their scales); add --dtype bf16",
                          quantised_.begin()->first));
}

void Conversion::relay(ExpertLayout layout) {
  const ExpertNames& names = family_of(config_).moe->names[spelling_of(config_, layout)];
  const Entries entries = checkpoint_.entries();
  std::vector<RelaidLayer> layers;
  for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
    if (!config_.is_moe(layer) || !holds_layer(config_, layer, entries)) continue;
    MoeSpec there = resolve_moe(config_, layer, *source_);
    const std::string_view prefix = prefix_of(config_, layer, there.router.name);
    MoeSpec here = moe_under_prefix(config_, layer, prefix, names);
    const TensorRef& to = here.experts.front().up;
    const TensorRef& from = there.experts.front().up;
    if (to.name == from.name && to.transposed == from.transposed) continue;  // it lies so
    layers.push_back({std::move(here), std::move(there)});
  }
  relaid_layers_ = static_cast<std::int64_t>(layers.size());
  auto relaid = std::make_unique<RelaidSource>(std::move(source_), layers);
  relaid_ = relaid.get();
  source_ = std::move(relaid);
}

/// Tensors that are read through source_, and the checkpoint's that they are made of.
std::map<std::string, TensorInfo> Conversion::made_tensors(std::set<std::string>& used) const {
  std::map<std::string, TensorInfo> made;
  if (relaid_ != nullptr) {
    made = relaid_->relaid();
    used = relaid_->used();
  }
  for (const auto& [name, parts] : quantised_) {
    if (!used.contains(name)) made.emplace(name, *source_->find(name));
    used.insert(parts.begin(), parts.end());
  }
  return made;
}

Conversion::Planned Conversion::planned(FolderTensor tensor, bool made) {
  const auto from = dtype_from_safetensors(tensor.dtype);
  const bool converts = dtype_ && from && from != dtype_ && !keeps_type(tensor.name);
  if (dtype_ && !converts && from != dtype_) ++kept_;
  if (converts) {
    tensor.dtype = safetensors_name(*dtype_);
    tensor.bytes = elements_of(tensor.shape) * size_of(*dtype_);
  }
  const bool turned = relaid_ != nullptr && relaid_->is_turned(tensor.name);
  return {std::move(tensor), made, converts ? from : std::nullopt,
          turned ? kTurnedPieceBytes : kPieceBytes};
}

void Conversion::plan(const Options& options) {
  std::map<std::string, Planned> tensors;
  std::set<std::string> used;
  for (const auto& [name, info] : made_tensors(used)) {
    const std::string stored(safetensors_name(info.dtype));
    const std::int64_t bytes = elements_of(info.shape) * size_of(info.dtype);
    tensors.emplace(name, planned({name, stored, info.shape, bytes}, true));
  }
  for (const auto& [name, entry] : checkpoint_.entries()) {
    if (used.contains(name)) continue;
    const auto bytes = static_cast<std::int64_t>(entry.end - entry.begin);
    tensors.emplace(name, planned({name, entry.dtype, entry.shape, bytes}, false));
  }
  std::vector<FolderTensor> in_order;
  for (const auto& [name, one] : tensors) in_order.push_back(one.tensor);
  shards_ = make_shards(std::move(in_order), options.shards);
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    std::ranges::stable_sort(shards_[i].tensors, std::greater(), [](const FolderTensor& tensor) {
      return stored_bits(tensor.dtype).value_or(0);
    });
    std::int64_t offset = 0;
    for (const FolderTensor& tensor : shards_[i].tensors) {
      const Planned& one = tensors.at(tensor.name);
      places_.push_back(
          {&tensor, i, offset, bytes_ + offset, one.made, one.stored, one.piece_bytes});
      offset += tensor.bytes;
    }
    bytes_ += offset;
  }
}

std::map<std::string, std::string> Conversion::metadata() const {
  std::map<std::string, std::string> all;
  for (const SafetensorsFile& file : checkpoint_.files()) {
    all.insert(file.header().metadata.begin(), file.header().metadata.end());
  }
  return all;
}

std::string Conversion::config_text() const {
  const std::string text = ConfigDocument::read(config_.path);
  if (!dtype_) return text;
  Json config = Json::parse(text);
  set_dtype(config, *dtype_);
  config.erase(kQuantizationKey);  // loaders would look for scales
  for (Json& field : config) {
    if (field.is_object()) field.erase(kQuantizationKey);
  }
  return config.dump(2) + '\n';
}

/// Units [begin, end) of the tensor as it is stored now, `unit` bytes each.
void Conversion::read(const Place& place, std::int64_t unit, Range units, std::byte* out) const {
  const std::string& name = place.tensor->name;
  if (!place.made) {
    return checkpoint_.read_bytes(name, 1, {units.begin * unit, units.end * unit}, {0, 1}, out);
  }
  const std::int64_t columns = extent_of(place.tensor->shape).columns;
  while (!units.empty()) {
    const std::int64_t row = units.begin / columns;
    const std::int64_t column = units.begin % columns;
    // The rest of a row, or as many whole ones as there are.
    const bool whole = column == 0 && units.size() >= columns;
    const std::int64_t rows = whole ? units.size() / columns : 1;
    const std::int64_t width = whole ? columns : std::min(columns - column, units.size());
    source_->read(name, {row, row + rows}, {column, column + width}, out);
    out += rows * width * unit;
    units.begin += rows * width;
  }
}

std::int64_t Conversion::make(const Place& place, Range bytes, Stage& stage,
                              const Write& write) const {
  // What isn't converted goes byte for byte, as far as whole elements aren't asked for.
  const std::optional<DType> known = dtype_from_safetensors(place.tensor->dtype);
  const std::int64_t unit = known ? size_of(*known) : 1;
  const std::int64_t stored = place.stored ? size_of(*place.stored) : unit;
  const Range units{ceil_div(bytes.begin, unit), ceil_div(bytes.end, unit)};
  const std::int64_t step = place.piece_bytes / std::max(unit, stored);
  const auto room = [](std::vector<std::byte>& buffer, std::int64_t size) {
    if (std::ssize(buffer) < size) buffer.resize(static_cast<std::size_t>(size));
    return buffer.data();
  };
  std::int64_t overflows = 0;
  for (std::int64_t first = units.begin; first < units.end; first += step) {
    const Range part{first, std::min(first + step, units.end)};
    std::byte* const in = room(stage.in, part.size() * stored);
    read(place, stored, part, in);
    const std::byte* made = in;
    if (place.stored) {
      std::byte* const out = room(stage.out, part.size() * unit);
      convert(*place.stored, in, *dtype_, out, part.size());
      made = out;
      if (dtype_ == DType::kF16) {
        overflows += count_overflows(*place.stored, in, made, part.size());
      }
    }
    write(place.shard, place.offset + part.begin * unit,
          {made, static_cast<std::size_t>(part.size() * unit)});
  }
  return overflows;
}

std::int64_t Conversion::make(Range part, const Write& write) const {
  Stage stage;
  std::int64_t overflows = 0;
  auto place = std::ranges::upper_bound(places_, part.begin, {}, &Place::begin);
  if (place != places_.begin()) --place;
  for (; place != places_.end() && place->begin < part.end; ++place) {
    const Range own{std::max<std::int64_t>(part.begin - place->begin, 0),
                    std::min(part.end - place->begin, place->tensor->bytes)};
    if (!own.empty()) overflows += make(*place, own, stage, write);
  }
  return overflows;
}

}  // namespace gatefold
