#include "runtime/dequantised_source.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "runtime/block_codecs.h"
#include "runtime/error.h"
#include "runtime/quoted_name.h"

namespace gatefold {
namespace {

/// Codes in memory at a time: what the second level of any cache holds beside their values.
constexpr std::int64_t kStagedBytes = std::int64_t{1} << 18;
/// Rows that are transposed at a time: a cache line of bf16 on the other side.
constexpr std::int64_t kTile = kMxGroup;

constexpr std::string_view kIncomplete = "download the model again";
constexpr std::string_view kMismatch = "check that config.json and the files belong together";

std::string without(std::string_view suffix, const std::string& name) {
  return name.ends_with(suffix) ? name.substr(0, name.size() - suffix.size()) : std::string();
}

std::string shown(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ","));
}

std::string joined(std::string_view name, std::string_view suffix) {
  return std::string(name) + std::string(suffix);
}

/// What is read of each row for bytes `wanted` of it: of short rows all, since the pages are the
/// same, and one call reads many rows.
Range staged_bytes(std::int64_t row_bytes, Range wanted) {
  constexpr std::int64_t kPageBytes = 4096;
  return row_bytes <= kPageBytes ? Range{0, row_bytes} : wanted;
}

/// Columns `across` of up to 32 rows `in_step` apart, turned; `in` has room for 32 whole rows of
/// whole groups. Columns are `out_step` apart.
void transpose(const std::uint16_t* in, std::int64_t in_step, std::int64_t rows, Range across,
               std::uint16_t* out, std::int64_t out_step) {
  std::array<std::uint16_t, kMxGroup * kMxGroup> edge;
  for (std::int64_t group = 0; group < across.end; group += kMxGroup) {
    const Range part{std::max(group, across.begin), std::min(group + kMxGroup, across.end)};
    std::uint16_t* const to = out + (part.begin - across.begin) * out_step;
    if (rows == kMxGroup && part.size() == kMxGroup) {
      transpose_group(in + group, in_step, to, out_step);
      continue;
    }
    transpose_group(in + group, in_step, edge.data(), kMxGroup);
    for (std::int64_t c = part.begin; c < part.end; ++c) {
      std::copy_n(edge.data() + (c - group) * kMxGroup, rows, to + (c - part.begin) * out_step);
    }
  }
}

}  // namespace

struct DequantisedSource::Blocks {
  TensorInfo info;
  std::string codes;         // the tensor
  std::string scales;        // the tensor
  std::int64_t rows = 0;     // of one stored matrix
  std::int64_t columns = 0;  // of one stored matrix, in elements
};

DequantisedSource::DequantisedSource(std::unique_ptr<Checkpoint> checkpoint, BlockSize f8_block)
    : checkpoint_(std::move(checkpoint)), f8_block_(f8_block) {
  for (const std::string& name : checkpoint_->names()) {
    const std::string& type = checkpoint_->stored(name)->dtype;
    if (type == kF8Type) formats_.emplace(name, BlockFormat::kF8E4M3);
    if (name.ends_with(kF8Scales)) {
      formats_.emplace(without(kF8Scales, name), BlockFormat::kF8E4M3);
    }
    if (type != kMxType) continue;
    for (const std::string_view suffix : {kMxBlocks, kMxScales}) {
      if (name.ends_with(suffix)) formats_.emplace(without(suffix, name), BlockFormat::kMxfp4);
    }
  }
}

void DequantisedSource::fail(const std::string& problem, std::string_view remedy) const {
  throw Error(ExitCode::kData,
              fmt::format("{}: {}; {}", checkpoint_->description(), problem, remedy));
}

DequantisedSource::Blocks DequantisedSource::f8_blocks(const std::string& name) const {
  const std::string scales_name = joined(name, kF8Scales);
  const SafetensorsEntry* weight = checkpoint_->stored(name);
  const SafetensorsEntry* scales = checkpoint_->stored(scales_name);
  if (weight == nullptr) {
    fail(fmt::format("no tensor {} (there are scales of it: {})", quoted_name(name),
                     quoted_name(scales_name)),
         kIncomplete);
  }
  if (weight->dtype != kF8Type) {
    fail(fmt::format("tensor {} is stored as {} and has scales, {} (they are {}'s)",
                     quoted_name(name), weight->dtype, quoted_name(scales_name), kF8Type),
         kMismatch);
  }
  if (scales == nullptr) {
    fail(fmt::format("no tensor {} (tensor {} is stored as {}, which means nothing without its "
                     "scales in blocks)",
                     quoted_name(scales_name), quoted_name(name), kF8Type),
         kIncomplete);
  }
  if (!dtype_from_safetensors(scales->dtype)) {
    fail(fmt::format("tensor {} is stored as {} (scales of {} are F32, BF16 or F16)",
                     quoted_name(scales_name), scales->dtype, kF8Type),
         kMismatch);
  }
  const std::size_t dimensions = weight->shape.size();
  std::vector<std::int64_t> expected = weight->shape;
  if (dimensions >= 2) {
    std::int64_t& out = expected[dimensions - 2];
    std::int64_t& in = expected[dimensions - 1];
    out = ceil_div(out, f8_block_.rows);
    in = ceil_div(in, f8_block_.columns);
  }
  if (dimensions < 2 || scales->shape != expected) {
    fail(fmt::format("tensor {} has shape {} (for {} of shape {} in blocks of {} x {}: {})",
                     quoted_name(scales_name), quoted_name(shown(scales->shape)), quoted_name(name),
                     quoted_name(shown(weight->shape)), f8_block_.rows, f8_block_.columns,
                     dimensions < 2 ? "only matrices have blocks" : shown(expected)),
         "correct weight_block_size in config.json, or the weights");
  }
  return {{DType::kF32, weight->shape},
          name,
          scales_name,
          weight->shape[dimensions - 2],
          weight->shape[dimensions - 1]};
}

DequantisedSource::Blocks DequantisedSource::mxfp4_blocks(const std::string& name) const {
  const std::string names[] = {joined(name, kMxBlocks), joined(name, kMxScales)};
  for (int i = 0; i < 2; ++i) {
    const SafetensorsEntry* stored = checkpoint_->stored(names[i]);
    if (stored == nullptr) {
      fail(fmt::format("no tensor {} (weights in MXFP4 need it beside {})", quoted_name(names[i]),
                       quoted_name(names[1 - i])),
           kIncomplete);
    }
    if (stored->dtype != kMxType) {
      fail(fmt::format("tensor {} is stored as {} (weights in MXFP4 have it as {})",
                       quoted_name(names[i]), stored->dtype, kMxType),
           kMismatch);
    }
  }
  if (checkpoint_->stored(name) != nullptr) {
    fail(fmt::format("both {} and {} (two spellings of one tensor: which one counts isn't said)",
                     quoted_name(name), quoted_name(names[0])),
         "take one away");
  }
  const std::vector<std::int64_t>& blocks = checkpoint_->stored(names[0])->shape;
  const std::vector<std::int64_t>& scales = checkpoint_->stored(names[1])->shape;
  // Elements and their bytes can be counted where the header's reader could count the codes: but
  // for shapes that nobody has, with a zero in them.
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 58;
  std::int64_t bytes = 1;
  for (const std::int64_t size : blocks) bytes *= std::max<std::int64_t>(1, size);
  if (blocks.size() < 3 || blocks.back() != kMxGroupBytes || bytes > kMostBytes ||
      !std::equal(blocks.begin(), blocks.end() - 1, scales.begin(), scales.end())) {
    fail(fmt::format("tensor {} has shape {} with {} of shape {} (in MXFP4 they are [..., out, "
                     "in / 32, 16] and [..., out, in / 32])",
                     quoted_name(names[0]), quoted_name(shown(blocks)), quoted_name(names[1]),
                     quoted_name(shown(scales))),
         kMismatch);
  }
  TensorInfo info{DType::kBf16, {blocks.begin(), blocks.end() - 3}};
  const std::int64_t rows = blocks[blocks.size() - 3];
  const std::int64_t columns = scales.back() * kMxGroup;
  info.shape.insert(info.shape.end(), {columns, rows});
  return {std::move(info), names[0], names[1], rows, columns};
}

DequantisedSource::Blocks DequantisedSource::blocks_of(const std::string& name,
                                                       BlockFormat format) const {
  return format == BlockFormat::kF8E4M3 ? f8_blocks(name) : mxfp4_blocks(name);
}

std::optional<TensorInfo> DequantisedSource::find(const std::string& name) const {
  const auto format = formats_.find(name);
  if (format == formats_.end()) return checkpoint_->find(name);
  return blocks_of(name, format->second).info;
}

std::map<std::string, std::vector<std::string>> DequantisedSource::quantised() const {
  std::map<std::string, std::vector<std::string>> all;
  for (const auto& [name, format] : formats_) {
    const Blocks blocks = blocks_of(name, format);
    all[name] = {blocks.codes, blocks.scales};
  }
  return all;
}

void DequantisedSource::read(const std::string& name, Range rows, Range cols,
                             std::byte* out) const {
  const auto format = formats_.find(name);
  if (format == formats_.end()) return checkpoint_->read(name, rows, cols, out);
  const Blocks blocks = blocks_of(name, format->second);
  const Extent extent = extent_of(blocks.info.shape);
  if (!rows.within(extent.rows) || !cols.within(extent.columns)) {
    fail(
        fmt::format("rows [{}, {}) and columns [{}, {}) of tensor {} (it is [{}, {}])", rows.begin,
                    rows.end, cols.begin, cols.end, quoted_name(name), extent.rows, extent.columns),
        kMismatch);
  }
  if (rows.empty() || cols.empty()) return;
  if (format->second == BlockFormat::kF8E4M3) {
    read_f8(blocks, rows, cols, reinterpret_cast<float*>(out));
  } else {
    read_mxfp4(blocks, rows, cols, reinterpret_cast<std::uint16_t*>(out));
  }
}

void DequantisedSource::read_f8(const Blocks& blocks, Range rows, Range cols, float* out) const {
  const Range staged = staged_bytes(blocks.columns, cols);
  const std::int64_t step = std::clamp<std::int64_t>(kStagedBytes / staged.size(), 1, rows.size());
  const std::int64_t scale_rows = ceil_div(blocks.rows, f8_block_.rows);  // of one matrix
  const auto scale_row = [&](std::int64_t row) {
    return row / blocks.rows * scale_rows + row % blocks.rows / f8_block_.rows;
  };
  const Range scale_cols{cols.begin / f8_block_.columns, ceil_div(cols.end, f8_block_.columns)};
  std::vector<std::byte> codes(static_cast<std::size_t>(step * staged.size()));
  std::vector<float> scales;
  for (std::int64_t row = rows.begin; row < rows.end; row += step) {
    const Range part{row, std::min(row + step, rows.end)};
    const Range part_scales{scale_row(part.begin), scale_row(part.end - 1) + 1};
    checkpoint_->read_bytes(blocks.codes, blocks.columns, part, staged, codes.data());
    scales.resize(static_cast<std::size_t>(part_scales.size() * scale_cols.size()));
    read_as_float(*checkpoint_, blocks.scales, part_scales, scale_cols, scales.data());
    const std::byte* in = codes.data() + cols.begin - staged.begin;
    for (std::int64_t r = part.begin; r < part.end; ++r) {
      decode_f8_e4m3(in, cols, f8_block_.columns,
                     scales.data() + (scale_row(r) - part_scales.begin) * scale_cols.size(), out);
      in += staged.size();
      out += cols.size();
    }
  }
}

void DequantisedSource::read_mxfp4(const Blocks& blocks, Range rows, Range cols,
                                   std::uint16_t* out) const {
  for (std::int64_t at = rows.begin; at < rows.end;) {  // matrix by matrix
    const std::int64_t matrix = at / blocks.columns;
    const std::int64_t first = matrix * blocks.columns;
    const Range across{at - first, std::min(rows.end - first, blocks.columns)};
    const std::int64_t stored = matrix * blocks.rows;
    read_turned(blocks, {stored + cols.begin, stored + cols.end}, across, out);
    out += across.size() * cols.size();
    at = first + across.end;
  }
}

/// Elements `across` of `rows` of the stored matrices, as columns: `out` [across, rows].
void DequantisedSource::read_turned(const Blocks& blocks, Range rows, Range across,
                                    std::uint16_t* out) const {
  const std::int64_t row_groups = blocks.columns / kMxGroup;
  const Range groups{across.begin / kMxGroup, ceil_div(across.end, kMxGroup)};
  const Range bytes{groups.begin * kMxGroupBytes, groups.end * kMxGroupBytes};
  const Range staged = staged_bytes(row_groups * kMxGroupBytes, bytes);
  const Range staged_scales = staged_bytes(row_groups, groups);
  const std::int64_t step = std::max(kTile, kStagedBytes / staged.size() / kTile * kTile);
  const std::int64_t width = groups.size() * kMxGroup;
  const Range in_tile{across.begin - groups.begin * kMxGroup, across.end - groups.begin * kMxGroup};
  std::vector<std::byte> codes(static_cast<std::size_t>(step * staged.size()));
  std::vector<std::byte> scales(static_cast<std::size_t>(step * staged_scales.size()));
  std::vector<std::uint16_t> tile(static_cast<std::size_t>(kTile * width));
  for (std::int64_t row = rows.begin; row < rows.end; row += step) {
    const Range part{row, std::min(row + step, rows.end)};
    checkpoint_->read_bytes(blocks.codes, row_groups * kMxGroupBytes, part, staged, codes.data());
    checkpoint_->read_bytes(blocks.scales, row_groups, part, staged_scales, scales.data());
    const std::byte* code = codes.data() + bytes.begin - staged.begin;
    const std::byte* scale = scales.data() + groups.begin - staged_scales.begin;
    for (std::int64_t r = part.begin; r < part.end; r += kTile) {
      const std::int64_t n = std::min(kTile, part.end - r);
      for (std::int64_t i = 0; i < n; ++i) {
        decode_mxfp4(code, scale, groups.size(), tile.data() + i * width);
        code += staged.size();
        scale += staged_scales.size();
      }
      transpose(tile.data(), width, n, in_tile, out + (r - rows.begin), rows.size());
    }
  }
}

std::int64_t DequantisedSource::count(BlockFormat format) const {
  return std::ranges::count(formats_, format, [](const auto& weight) { return weight.second; });
}

std::string DequantisedSource::description() const {
  std::string text = checkpoint_->description();
  if (const std::int64_t weights = count(BlockFormat::kF8E4M3); weights > 0) {
    text += fmt::format(", {} as {} in blocks of {} x {}", counted(weights, "weight"), kF8Type,
                        f8_block_.rows, f8_block_.columns);
  }
  if (const std::int64_t weights = count(BlockFormat::kMxfp4); weights > 0) {
    text += fmt::format(", {} as MXFP4", counted(weights, "weight"));
  }
  return text;
}

}  // namespace gatefold
