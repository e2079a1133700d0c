#include "layers/mlp.h"

#include <algorithm>

#include "layers/kernel_choice.h"
#include "parallel/agreement.h"
#include "runtime/phases.h"

namespace gatefold {
namespace {

/// Rows that pass over a block's weights before the next block: few enough for their partial sums
/// to stay in cache, many enough to read weights seldom. No bit depends on it.
constexpr std::int64_t kChunkRows = 1024;

/// One self-check for both weights, so that they use the same kernel.
MlpOptions with_kernel(const FfnSpec& spec, const Place& place, MlpOptions options) {
  if (!options.linear.kernel && options.linear.reduce == Reduce::kExact) {
    options.linear.kernel = choose_kernel(*place.tp, *place.device, options.linear.dtype,
                                          ffn_shapes(spec, options.linear.blocks))
                                .kernel;
  }
  return options;
}

/// Agreed, so that a rank that can't read its beta doesn't leave its peers waiting for its weights.
Activation agreed_activation(const FfnSpec& spec, const TensorSource& source, Communicator& tp) {
  Activation activation;
  run_agreed(tp, [&] { activation = load_activation(spec, source); });
  return activation;
}

}  // namespace

Mlp::Mlp(const FfnSpec& spec, const TensorSource& source, const Place& place,
         const MlpOptions& options)
    : hidden_(spec.hidden_size),
      place_(place),
      options_(with_kernel(spec, place, options)),
      gate_up_(gate_up_tensors(spec), agreed_activation(spec, source, *place.tp), source, place,
               options_.linear),
      down_(down_tensors(spec), source, place, options_.linear, RowParallelLinear::Input::kParallel,
            options_.output_rows) {}

std::int64_t Mlp::chunk_rows(const RowCount& rows) const {
  const std::int64_t height = tile_height(*place_.device, gate_up_.kernel(), rows);
  // Whole GEMMs take all rows, and scattered rows are cut from the whole batch.
  const bool at_once =
      gate_up_.kernel() == GemmKernel::kLibraryWhole || options_.output_rows == Rows::kScattered;
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

/// Rows of the largest chunk of a batch of up to these row counts, and the same with padding.
std::int64_t Mlp::most_rows(const RowCount& rows) const {
  return std::min(chunk_rows(rows), rows.local);
}

std::int64_t Mlp::most_padded_rows(const RowCount& rows) const {
  std::int64_t most = 0;
  for (const std::int64_t height : tile_heights(*place_.device, gate_up_.kernel(), rows)) {
    most = std::max(most, round_up(most_rows(rows), height));
  }
  return most;
}

std::int64_t Mlp::gathered_bytes(const RowCount& rows) const {
  const bool scattered = options_.input_rows == Rows::kScattered;
  return scattered ? rows.local * hidden_ * size_of(options_.linear.dtype) : 0;
}

std::int64_t Mlp::workspace_bytes(const RowCount& rows) const {
  const std::int64_t element = size_of(place_.device->storage(options_.linear.dtype));
  const std::int64_t tiles =
      most_padded_rows(rows) * (round_up(hidden_, kInnerStep) + widest_block()) * element;
  return tiles + gathered_bytes(rows) + down_.workspace_bytes(most_rows(rows));
}

bool Mlp::has_room(const RowCount& rows) const {
  if (gate_up_.kernel() == GemmKernel::kLibraryWhole) return rows.local == reserved_.local;
  return rows.local <= reserved_.local && rows.global <= reserved_.global;
}

void Mlp::share(const RowCount& rows) { down_.share(most_rows(rows)); }

void Mlp::reserve(const RowCount& rows) {
  check_rows(rows);
  if (has_room(rows)) return;
  const bool whole = gate_up_.kernel() == GemmKernel::kLibraryWhole;
  const RowCount most{whole ? rows.local : std::max(rows.local, reserved_.local),
                      std::max(rows.global, reserved_.global)};
  share(most);
  Device& device = *place_.device;
  const std::int64_t element = size_of(device.storage(options_.linear.dtype));
  const auto grow = [&device](Buffer& buffer, std::int64_t bytes) {
    if (buffer.bytes() < bytes) buffer = device.allocate(bytes);
  };
  grow(x_tiles_, most_padded_rows(most) * round_up(hidden_, kInnerStep) * element);
  grow(h_tiles_, most_padded_rows(most) * widest_block() * element);
  grow(gathered_x_, gathered_bytes(most));
  place_.tp->reserve(gathered_bytes(most));
  for (const std::int64_t height : tile_heights(*place_.device, gate_up_.kernel(), most)) {
    gate_up_.reserve(height);
    down_.reserve(most_rows(most), height);
  }
  reserved_ = most;
}

/// All ranks of the group need room or none does, also after one of them has found none.
void Mlp::reserve_agreed(const RowCount& rows) {
  const RowCount before = reserved_;
  try {
    run_agreed(*place_.tp, [&] { reserve(rows); });
  } catch (...) {
    reserved_ = before;
    throw;
  }
}

void Mlp::forward(const std::byte* x, const RowCount& rows, std::byte* y) {
  check_rows(rows);
  if (!has_room(rows)) reserve_agreed(rows);
  const std::int64_t row_bytes = hidden_ * size_of(options_.linear.dtype);
  const std::int64_t y_bytes =
      hidden_ * size_of(options_.linear.output_dtype.value_or(options_.linear.dtype));
  if (options_.input_rows == Rows::kScattered) {
    gather_rows(place_, x, rows.local, row_bytes, gathered_x_.data());
    x = gathered_x_.data();
  }
  const std::int64_t height = tile_height(*place_.device, gate_up_.kernel(), rows);
  const std::int64_t chunk = chunk_rows(rows);
  for (std::int64_t first = 0; first < rows.local; first += chunk) {
    const std::int64_t n = std::min(chunk, rows.local - first);
    const Tiles tiles{nullptr, n, height, 0, rows.global <= height};
    forward_chunk(x + first * row_bytes, tiles, y + first * y_bytes);
  }
}

void Mlp::forward_chunk(const std::byte* x, const Tiles& chunk, std::byte* y) {
  Tiles x_tiles = chunk;
  x_tiles.data = x_tiles_.data();
  x_tiles.width = round_up(hidden_, kInnerStep);
  Phases phases(*place_.device);
  phases.enter("tile");
  place_.device->tile_rows({.data = x, .stride = hidden_}, options_.linear.dtype, hidden_, x_tiles);
  down_.begin(chunk.rows);
  for (std::size_t block = 0; block < gate_up_.blocks(); ++block) {
    Tiles h = chunk;
    h.data = h_tiles_.data();
    h.width = gate_up_.shape(block).padded_outputs();
    phases.enter("gate_up");
    gate_up_.forward_block(block, x_tiles, h);
    phases.enter("down");
    down_.add_block(block, h);
    place_.tp->progress().tick();
  }
  phases.enter("sum");
  down_.finish(y);
}

void Mlp::wait() {
  place_.tp->wait();  // with its deadline
  place_.device->synchronize();
}

}  // namespace gatefold
