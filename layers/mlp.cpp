#include "layers/mlp.h"

#include <algorithm>

namespace gatefold {
namespace {

/// Rows that pass over a block's weights before the next block: few enough for their partial sums
/// to stay in cache, many enough to read weights seldom. No bit depends on it.
constexpr std::int64_t kChunkRows = 1024;

WeightTensors gate_up_tensors(const FfnSpec& spec) {
  return {spec.intermediate_size, spec.hidden_size, spec.up,
          spec.up_bias,           spec.gate,        spec.gate_bias};
}

WeightTensors down_tensors(const FfnSpec& spec) {
  return {spec.hidden_size, spec.intermediate_size, spec.down, spec.down_bias, {}, {}};
}

/// One self-check for both weights, so that they use the same kernel.
MlpOptions with_kernel(const FfnSpec& spec, const Place& place, MlpOptions options) {
  if (!options.linear.kernel && options.linear.reduce == Reduce::kExact) {
    options.linear.kernel = choose_kernel(*place.tp, *place.device, options.linear.dtype,
                                          ffn_shapes(spec, options.linear.blocks))
                                .kernel;
  }
  return options;
}

}  // namespace

Mlp::Mlp(const FfnSpec& spec, const TensorSource& source, const Place& place,
         const MlpOptions& options)
    : hidden_(spec.hidden_size),
      place_(place),
      options_(with_kernel(spec, place, options)),
      gate_up_(gate_up_tensors(spec), load_activation(spec, source), source, place,
               options_.linear),
      down_(down_tensors(spec), source, place, options_.linear, RowParallelLinear::Input::kParallel,
            options_.output_rows) {}

std::int64_t Mlp::chunk_rows(const RowCount& rows) const {
  const std::int64_t height = tile_height(gate_up_.kernel(), rows);
  // Scattered rows are cut from the whole batch, and streamed weights should stream once.
  const bool at_once = gate_up_.kernel() == GemmKernel::kLibraryWhole ||
                       options_.output_rows == Rows::kScattered ||
                       options_.linear.residency == Residency::kStreamed;
  if (at_once) return std::max<std::int64_t>(1, rows.local);
  return kChunkRows / height * height;
}

std::int64_t Mlp::widest_block() const {
  std::int64_t width = 0;
  for (std::size_t i = 0; i < gate_up_.blocks(); ++i) {
    width = std::max(width, gate_up_.shape(i).padded_outputs());
  }
  return width;
}

std::int64_t Mlp::workspace_bytes(const RowCount& rows) const {
  const std::int64_t height = tile_height(gate_up_.kernel(), rows);
  const std::int64_t padded = round_up(std::min(chunk_rows(rows), rows.local), height);
  const std::int64_t element = size_of(place_.device->storage(options_.linear.dtype));
  const std::int64_t tiles = padded * (round_up(hidden_, kInnerStep) + widest_block()) * element;
  return tiles + down_.workspace_bytes(std::min(chunk_rows(rows), rows.local));
}

void Mlp::reserve(const RowCount& rows) {
  Device& device = *place_.device;
  const std::int64_t height = tile_height(gate_up_.kernel(), rows);
  const std::int64_t chunk = std::min(chunk_rows(rows), rows.local);
  const std::int64_t padded = round_up(chunk, height);
  const std::int64_t element = size_of(device.storage(options_.linear.dtype));
  const auto grow = [&device](Buffer& buffer, std::int64_t bytes) {
    if (buffer.bytes() < bytes) buffer = device.allocate(bytes);
  };
  grow(x_tiles_, padded * round_up(hidden_, kInnerStep) * element);
  grow(h_tiles_, padded * widest_block() * element);
  if (options_.input_rows == Rows::kScattered) {
    grow(gathered_x_, rows.local * hidden_ * size_of(options_.linear.dtype));
  }
  gate_up_.reserve(height);
  down_.reserve(chunk, height);
}

void Mlp::forward(const std::byte* x, const RowCount& rows, std::byte* y) {
  reserve(rows);
  const std::int64_t row_bytes = hidden_ * size_of(options_.linear.dtype);
  if (options_.input_rows == Rows::kScattered) {
    gather_rows(*place_.tp, x, rows.local, row_bytes, gathered_x_.data());
    x = gathered_x_.data();
  }
  const std::int64_t height = tile_height(gate_up_.kernel(), rows);
  const std::int64_t chunk = chunk_rows(rows);
  for (std::int64_t first = 0; first < rows.local; first += chunk) {
    const std::int64_t n = std::min(chunk, rows.local - first);
    const Tiles tiles{nullptr, n, height, 0, rows.global <= height};
    forward_chunk(x + first * row_bytes, tiles, y + first * row_bytes);
  }
}

void Mlp::forward_chunk(const std::byte* x, const Tiles& chunk, std::byte* y) {
  Tiles x_tiles = chunk;
  x_tiles.data = x_tiles_.data();
  x_tiles.width = round_up(hidden_, kInnerStep);
  place_.device->tile_rows(x, hidden_, options_.linear.dtype, hidden_, x_tiles);
  down_.begin(chunk.rows);
  for (std::size_t block = 0; block < gate_up_.blocks(); ++block) {
    Tiles h = chunk;
    h.data = h_tiles_.data();
    h.width = gate_up_.shape(block).padded_outputs();
    gate_up_.forward_block(block, x_tiles, h);
    down_.add_block(block, h);
    place_.tp->progress().tick();
  }
  down_.finish(y);
}

}  // namespace gatefold
