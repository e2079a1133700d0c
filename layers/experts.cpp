#include "layers/experts.h"

#include <algorithm>
#include <bit>

#include "parallel/agreement.h"
#include "runtime/phases.h"

namespace gatefold {
namespace {

/// Rows that pass over a block's weights before the next block. No bit depends on it.
constexpr std::int64_t kChunkRows = 1024;
/// An expert's block isn't narrower without need.
constexpr std::int64_t kNarrowest = 192;
constexpr std::int64_t kMostBlocks = 8;

std::int64_t chunk_rows(std::int64_t tile_height) { return kChunkRows / tile_height * tile_height; }

Range own_run(const BlockPlan& plan, const Place& place) {
  return plan.runs[static_cast<std::size_t>(place.tp->rank())];
}

}  // namespace

std::int64_t default_expert_blocks(std::int64_t intermediate_size) {
  const std::int64_t fitting = std::min(kMostBlocks, intermediate_size / kNarrowest);
  return static_cast<std::int64_t>(
      std::bit_floor(static_cast<std::uint64_t>(std::max<std::int64_t>(1, fitting))));
}

Experts::Experts(const MoeSpec& spec, Range own, const TensorSource& source, const Place& place,
                 const LinearOptions& options)
    : hidden_(spec.hidden_size),
      weigh_inputs_(spec.weight_on == WeightOn::kInput),
      place_(place),
      options_(options),
      plan_(BlockPlan::make(spec.intermediate_size(), options, *place.tp)),
      merge_plan_(SumTree(plan_.blocks).local_plan(own_run(plan_, place))),
      tree_sum_(*place.tp, *place.device, SumTree(plan_.blocks), plan_.runs, hidden_, 0) {
  for (std::int64_t e = own.begin; e < own.end; ++e) {
    experts_.push_back(load(spec.experts[static_cast<std::size_t>(e)], source));
  }
  for (std::size_t i = 0; i < plan_.owned.size(); ++i) {
    widest_block_ = std::max(widest_block_, round_up(plan_.columns(i).size(), kInnerStep));
  }
}

Experts::Expert Experts::load(const FfnSpec& spec, const TensorSource& source) const {
  Expert expert{{gate_up_tensors(spec), spec.activation, source, place_, options_},
                {down_tensors(spec), CutAlong::kInputs, source, place_, plan_, options_},
                {}};
  if (!spec.down_bias) return expert;
  run_agreed(*place_.tp, [&] {
    expert.down_bias =
        load_vector(source, *spec.down_bias, hidden_, options_.dtype, *place_.device);
  });
  return expert;
}

std::int64_t Experts::most_padded_rows(std::int64_t rows) const {
  std::int64_t most = 0;
  for (const std::int64_t height : tile_heights(*place_.device, *options_.kernel, {rows, rows})) {
    most = std::max(most, round_up(std::min(rows, chunk_rows(height)), height));
  }
  return most;
}

void Experts::share(std::int64_t rows) {
  if (!experts_.empty()) tree_sum_.share(std::min(rows, kChunkRows));
}

void Experts::reserve(std::int64_t rows) {
  if (rows <= reserved_ || experts_.empty()) return;
  share(rows);
  Device& device = *place_.device;
  const DType storage = device.storage(options_.dtype);
  const std::int64_t row_bytes = most_padded_rows(rows) * size_of(storage);
  x_tiles_ = device.allocate(row_bytes * round_up(hidden_, kInnerStep));
  h_tiles_ = device.allocate(row_bytes * widest_block_);
  tree_sum_.reserve(std::min(rows, kChunkRows), DType::kF32);
  Expert& any = experts_.front();  // all have the same shapes
  for (const std::int64_t height : tile_heights(device, *options_.kernel, {rows, rows})) {
    any.gate_up.reserve(height);
    for (std::size_t i = 0; i < any.down.count(); ++i) {
      device.prepare(any.down.shape(i), storage, *options_.kernel, height);
    }
  }
  reserved_ = rows;
}

void Experts::forward(TokenExchange& exchange, std::int64_t padded_rows) {
  for (std::int64_t e = 0; e < exchange.own_experts(); ++e) {
    run(e, exchange, padded_rows);
    place_.tp->progress().tick();
  }
}

void Experts::run(std::int64_t own_expert, TokenExchange& exchange, std::int64_t padded_rows) {
  const std::int64_t rows = exchange.rows(own_expert);
  if (std::max(rows, padded_rows) == 0) return;
  Expert& expert = experts_[static_cast<std::size_t>(own_expert)];
  // All of an expert's rows are here, so this is their global count.
  const std::int64_t height = tile_height(*place_.device, *options_.kernel, {rows, rows});
  const std::int64_t step = chunk_rows(height);
  Phases phases(*place_.device);
  for (std::int64_t first = 0; first < rows; first += step) {
    const std::int64_t n = std::min(step, rows - first);
    const Tiles chunk{nullptr, n, height, 0, rows <= height};
    const Partials own = multiply(expert, exchange.input(own_expert, first, weigh_inputs_), chunk);
    phases.enter("sum");
    const Partials sum = tree_sum_.sum_own_groups(own);
    WeighedRows weighed = exchange.output(own_expert, first, n, !weigh_inputs_);
    weighed.rows = sum.data;
    weighed.group_stride = sum.group_stride;
    if (expert.down_bias.bytes() > 0) {
      weighed.bias = expert.down_bias.as<float>() + exchange.own_groups().begin * kGroup;
    }
    phases.enter("weigh");
    place_.device->weigh_rows(weighed);
  }
  multiply_zeros(expert, padded_rows - rows);
  // Or a part of every streamed expert would be in memory, all of those of one block.
  expert.gate_up.let_go();
  expert.down.let_go();
}

/// The roots of this rank's blocks.
Partials Experts::multiply(Expert& expert, const InputRows& rows, const Tiles& chunk) {
  Tiles x = chunk;
  x.data = x_tiles_.data();
  x.width = round_up(hidden_, kInnerStep);
  {
    Phases phases(*place_.device);
    phases.enter("permute");
    place_.device->tile_rows(rows, options_.dtype, hidden_, x);
  }
  return multiply_tiles(expert, x);
}

/// In tiles of their own: with other heights the tokens' rows would have other bits.
void Experts::multiply_zeros(Expert& expert, std::int64_t rows) {
  if (rows <= 0) return;
  const std::int64_t height = tile_height(*place_.device, *options_.kernel, {rows, rows});
  const std::int64_t step = chunk_rows(height);
  Phases phases(*place_.device);
  for (std::int64_t first = 0; first < rows; first += step) {
    Tiles x{x_tiles_.data(), std::min(step, rows - first), height, 0, rows <= height};
    x.width = round_up(hidden_, kInnerStep);
    place_.device->fill(
        x.data, std::byte{0},
        x.padded_rows() * x.width * size_of(place_.device->storage(options_.dtype)));
    const Partials own = multiply_tiles(expert, x);
    phases.enter("sum");
    tree_sum_.sum_own_groups(own);
  }
}

/// x: in the storage dtype, padded to whole kInnerSteps.
Partials Experts::multiply_tiles(Expert& expert, const Tiles& x) {
  Phases phases(*place_.device);
  const Partials stack = tree_sum_.stack(x.rows);
  int height = 0;
  for (std::size_t i = 0; i < plan_.owned.size(); ++i) {
    Tiles h = x;
    h.data = h_tiles_.data();
    h.width = expert.gate_up.shape(i).padded_outputs();
    phases.enter("gate_up");
    expert.gate_up.forward_block(i, x, h);
    phases.enter("down");
    const int merges = merge_plan_.merges[i];
    place_.device->gemm_merge(expert.down.at(i).weight, h, stack, height, merges);
    height += 1 - merges;
  }
  return stack;
}

}  // namespace gatefold
