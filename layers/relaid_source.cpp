#include "layers/relaid_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/error.h"

namespace gatefold {

namespace {

std::vector<RelaidLayer> from_canonical(const ModelConfig& config,
                                        const std::vector<std::int64_t>& layers) {
  ModelConfig canonical = config;
  canonical.moe->spelling = 0;
  std::vector<RelaidLayer> relaid;
  for (const std::int64_t layer : layers) {
    if (!config.is_moe(layer)) continue;
    relaid.push_back({config.moe_spec(layer), canonical.moe_spec(layer)});
  }
  return relaid;
}

}  // namespace

RelaidSource::RelaidSource(std::unique_ptr<TensorSource> source,
                           const std::vector<RelaidLayer>& layers)
    : source_(std::move(source)) {
  for (const auto& [here, there] : layers) add_layer(here, there);
}

RelaidSource::RelaidSource(const ModelConfig& config, std::unique_ptr<TensorSource> source,
                           const std::vector<std::int64_t>& layers)
    : RelaidSource(std::move(source), from_canonical(config, layers)) {}

void RelaidSource::add_layer(const MoeSpec& here, const MoeSpec& there) {
  const std::int64_t hidden = here.hidden_size;
  const std::int64_t inner = here.intermediate_size();
  add(here.router, there.router, here.route.experts);
  if (here.router_bias) add(*here.router_bias, *there.router_bias, 1);
  if (here.correction_bias) add(*here.correction_bias, *there.correction_bias, 1);
  for (std::size_t e = 0; e < here.experts.size(); ++e) {
    const FfnSpec& one = here.experts[e];
    const FfnSpec& other = there.experts[e];
    if (one.gate) add(*one.gate, *other.gate, inner);
    add(one.up, other.up, inner);
    add(one.down, other.down, hidden);
  }
}

void RelaidSource::add(const TensorRef& here, const TensorRef& there, std::int64_t rows) {
  const auto [found, added] = tensors_.try_emplace(here.name);
  Tensor& tensor = found->second;
  const DType dtype = source_->find(there.name)->dtype;
  if (!added && tensor.info.dtype != dtype) {
    throw Error(ExitCode::kData,
                fmt::format("{}: {} is stored as {}, {} as {} (both become part of {}, which has "
                            "one type); convert the model to one type first",
                            source_->description(), tensor.runs.front().name,
                            name_of(tensor.info.dtype), there.name, name_of(dtype), here.name));
  }
  tensor.info = {dtype, here.stored_shape};
  tensor.runs.push_back({{here.row_offset, here.row_offset + rows},
                         there.name,
                         there.row_offset,
                         there.transposed,
                         there.column_offset});
  used_.insert(there.name);
}

std::map<std::string, TensorInfo> RelaidSource::relaid() const {
  std::map<std::string, TensorInfo> all;
  for (const auto& [name, tensor] : tensors_) all.emplace(name, tensor.info);
  return all;
}

std::optional<TensorInfo> RelaidSource::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? source_->find(name) : found->second.info;
}

void RelaidSource::read(const std::string& name, Range rows, Range cols, std::byte* out) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return source_->read(name, rows, cols, out);
  const std::int64_t row_bytes = cols.size() * size_of(found->second.info.dtype);
  for (const Run& run : found->second.runs) {
    const Range part{std::max(rows.begin, run.rows.begin), std::min(rows.end, run.rows.end)};
    if (part.empty()) continue;
    std::byte* to = out + (part.begin - rows.begin) * row_bytes;
    const std::int64_t first = run.first + part.begin - run.rows.begin;
    if (run.turned) {
      read_turned(run, {first, first + part.size()}, cols, to);
    } else {
      source_->read(run.name, {first, first + part.size()}, cols, to);
    }
  }
}

/// `rows` are columns of the source's tensor, and `cols` its rows behind first_row.
void RelaidSource::read_turned(const Run& run, Range rows, Range cols, std::byte* out) const {
  const auto size = static_cast<std::size_t>(size_of(source_->find(run.name)->dtype));
  const auto wide = static_cast<std::size_t>(rows.size());
  const auto high = static_cast<std::size_t>(cols.size());
  std::vector<std::byte> block(wide * high * size);
  source_->read(run.name, {run.first_row + cols.begin, run.first_row + cols.end}, rows,
                block.data());
  for (std::size_t r = 0; r < wide; ++r) {
    for (std::size_t c = 0; c < high; ++c) {
      std::memcpy(out + (r * high + c) * size, block.data() + (c * wide + r) * size, size);
    }
  }
}

}  // namespace gatefold
