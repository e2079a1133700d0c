#include "layers/linear.h"

#include <fmt/format.h>

#include <algorithm>

#include "layers/kernel_choice.h"
#include "parallel/agreement.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

BlockPlan plan_of(const WeightTensors& tensors, CutAlong cut, const Place& place,
                  const LinearOptions& options) {
  const std::int64_t width = cut == CutAlong::kOutputs ? tensors.outputs : tensors.inputs;
  return BlockPlan::make(width, options, *place.tp);
}

/// The options with the kernel chosen, by this layer's own self-check if need be.
LinearOptions with_kernel(const WeightTensors& tensors, CutAlong cut, const Place& place,
                          const LinearOptions& options) {
  LinearOptions chosen = options;
  if (options.kernel || options.reduce == Reduce::kFast) return chosen;
  const Blocks blocks = plan_of(tensors, cut, place, options).blocks;
  std::vector<WeightShape> shapes;
  for (std::int64_t b = 0; b < blocks.count; ++b) {
    const Range columns = blocks.columns(b);
    if (columns.empty()) continue;
    const WeightShape shape = block_shape(tensors, cut, columns);
    if (std::find(shapes.begin(), shapes.end(), shape) == shapes.end()) shapes.push_back(shape);
  }
  chosen.kernel = choose_kernel(*place.tp, *place.device, options.dtype, shapes).kernel;
  return chosen;
}

/// Nobody shares a replicated weight out, so it needs no cuts.
LinearOptions one_block(LinearOptions options) {
  options.blocks = 1;
  return options;
}

/// The library has its own way of adding up on a node.
WithinNode sums_within(Reduce reduce) {
  return reduce == Reduce::kFast ? WithinNode::kMessages : WithinNode::kSharedMemory;
}

Activation identity() {
  Activation activation;
  activation.kind = ActivationKind::kIdentity;
  activation.gated = false;
  return activation;
}

void grow(Device& device, Buffer& buffer, std::int64_t bytes) {
  if (buffer.bytes() < bytes) buffer = device.allocate(bytes);
}

void grow(Device& device, Buffer& buffer, DType dtype, const Tiles& tiles) {
  grow(device, buffer, tiles.padded_rows() * tiles.width * size_of(device.storage(dtype)));
}

}  // namespace

void check_rows(const RowCount& rows) {
  if (rows.local >= 0 && rows.local <= rows.global) return;
  throw Error(ExitCode::kUsage,
              fmt::format("{} rows of a batch of {} (a group's rows are 0 or more, and at most the "
                          "batch's); pass {{rows of this group, rows of all groups}}",
                          rows.local, rows.global));
}

std::int64_t tile_height(const Device& device, GemmKernel kernel, const RowCount& rows) {
  check_rows(rows);
  if (kernel == GemmKernel::kLibraryWhole) return std::max<std::int64_t>(1, rows.local);
  return tile_rows(rows.global, device.tile_heights());
}

std::vector<std::int64_t> tile_heights(const Device& device, GemmKernel kernel,
                                       const RowCount& rows) {
  if (kernel == GemmKernel::kLibraryWhole) return {tile_height(device, kernel, rows)};
  std::vector<std::int64_t> heights;
  for (const std::int64_t height : device.tile_heights()) {
    // Not where the height before holds the largest batch.
    if (heights.empty() || heights.back() < rows.global) heights.push_back(height);
  }
  return heights;
}

void gather_rows(const Place& place, const std::byte* in, std::int64_t rows, std::int64_t row_bytes,
                 std::byte* out) {
  const int ranks = place.tp->size();
  std::vector<std::int64_t> parts;
  for (int r = 0; r < ranks; ++r) parts.push_back(even_part(rows, ranks, r).size() * row_bytes);
  const Range own = even_part(rows, ranks, place.tp->rank());
  place.device->copy_rows(out + own.begin * row_bytes, row_bytes, in, row_bytes, own.size(),
                          row_bytes);
  place.tp->all_gather_v(out, parts);
}

MergedColumnParallelLinear::MergedColumnParallelLinear(WeightTensors tensors,
                                                       const Activation& activation,
                                                       const TensorSource& source,
                                                       const Place& place,
                                                       const LinearOptions& options)
    : activation_(activation),
      place_(place),
      dtype_(options.dtype),
      plan_(plan_of(tensors, CutAlong::kOutputs, place, options)),
      weights_(tensors, CutAlong::kOutputs, source, place, plan_,
               with_kernel(tensors, CutAlong::kOutputs, place, options)) {}

void MergedColumnParallelLinear::reserve(std::int64_t tile_rows) {
  for (std::size_t i = 0; i < blocks(); ++i) {
    place_.device->prepare(shape(i), place_.device->storage(dtype_), kernel(), tile_rows);
  }
}

void MergedColumnParallelLinear::forward_block(std::size_t i, const Tiles& x, const Tiles& h) {
  const BlockWeight& block = weights_.at(i);
  place_.device->gemm_activation(block.weight, block.bias_data(), activation_, dtype_, x, h);
}

ColumnParallelLinear::ColumnParallelLinear(WeightTensors tensors, const TensorSource& source,
                                           const Place& place, const LinearOptions& options,
                                           Output output, Rows input_rows)
    : outputs_(tensors.outputs),
      inputs_(tensors.inputs),
      place_(place),
      dtype_(options.dtype),
      output_(output),
      input_rows_(input_rows),
      linear_(std::move(tensors), identity(), source, place, options) {}

Range ColumnParallelLinear::own_columns(int rank) const {
  const BlockPlan& plan = linear_.plan();
  return plan.blocks.columns(plan.runs[static_cast<std::size_t>(rank)]);
}

Range ColumnParallelLinear::output_columns() const {
  return output_ == Output::kGathered ? Range{0, outputs_} : own_columns(place_.tp->rank());
}

/// Memory is lacking on all ranks or on none, or some would wait for the others.
void ColumnParallelLinear::reserve_agreed(std::int64_t rows, std::int64_t height) {
  Device& device = *place_.device;
  const std::int64_t row_bytes = rows * size_of(dtype_);
  const std::int64_t gathered_x = input_rows_ == Rows::kScattered ? row_bytes * inputs_ : 0;
  const std::int64_t gathered_y = output_ == Output::kGathered ? row_bytes * outputs_ : 0;
  run_agreed(*place_.tp, [&] {
    linear_.reserve(height);
    grow(device, x_tiles_, dtype_, {nullptr, rows, height, round_up(inputs_, kInnerStep)});
    for (std::size_t i = 0; i < linear_.blocks(); ++i) {
      const std::int64_t width = linear_.shape(i).padded_outputs();
      grow(device, h_tiles_, dtype_, {nullptr, rows, height, width});
    }
    grow(device, gathered_x_, gathered_x);
    grow(device, gathered_y_, gathered_y);
    if (gathered_y > 0) {
      grow(device, own_y_, row_bytes * own_columns(place_.tp->rank()).size());
    }
    place_.tp->reserve(std::max(gathered_x, gathered_y));
  });
}

void ColumnParallelLinear::forward(const std::byte* x, const RowCount& rows, std::byte* y) {
  Device& device = *place_.device;
  const std::int64_t element = size_of(dtype_);
  const std::int64_t height = tile_height(device, linear_.kernel(), rows);
  reserve_agreed(rows.local, height);

  if (input_rows_ == Rows::kScattered) {
    gather_rows(place_, x, rows.local, inputs_ * element, gathered_x_.data());
    x = gathered_x_.data();
  }
  const Tiles x_tiles{x_tiles_.data(), rows.local, height, round_up(inputs_, kInnerStep)};
  device.tile_rows({.data = x, .stride = inputs_}, dtype_, inputs_, x_tiles);

  const Range own = own_columns(place_.tp->rank());
  std::byte* own_y = output_ == Output::kGathered ? own_y_.data() : y;
  for (std::size_t i = 0; i < linear_.blocks(); ++i) {
    const Range columns = linear_.plan().columns(i);
    const Tiles h{h_tiles_.data(), rows.local, height, linear_.shape(i).padded_outputs()};
    linear_.forward_block(i, x_tiles, h);
    device.untile_rows(h, dtype_, columns.size(), own_y + (columns.begin - own.begin) * element,
                       own.size());
  }
  if (output_ == Output::kGathered) gather_columns(rows.local, own_y, y);
}

void ColumnParallelLinear::gather_columns(std::int64_t rows, const std::byte* own, std::byte* y) {
  const std::int64_t element = size_of(dtype_);
  std::byte* all = gathered_y_.data();
  std::vector<std::int64_t> parts;
  for (int r = 0; r < place_.tp->size(); ++r)
    parts.push_back(rows * own_columns(r).size() * element);
  const Range mine = own_columns(place_.tp->rank());
  const std::int64_t own_bytes = mine.size() * element;
  place_.device->copy_rows(all + rows * mine.begin * element, own_bytes, own, own_bytes, rows,
                           own_bytes);
  place_.tp->all_gather_v(all, parts);
  for (int r = 0; r < place_.tp->size(); ++r) {
    const Range columns = own_columns(r);
    place_.device->copy_rows(y + columns.begin * element, outputs_ * element,
                             all + rows * columns.begin * element, columns.size() * element, rows,
                             columns.size() * element);
  }
}

RowParallelLinear::RowParallelLinear(WeightTensors tensors, const TensorSource& source,
                                     const Place& place, const LinearOptions& options, Input input,
                                     Rows output_rows)
    : outputs_(tensors.outputs),
      place_(place),
      dtype_(options.dtype),
      output_dtype_(options.output_dtype.value_or(options.dtype)),
      input_(input),
      output_rows_(output_rows),
      plan_(plan_of(tensors, CutAlong::kInputs, place, options)),
      weights_(tensors, CutAlong::kInputs, source, place, plan_,
               with_kernel(tensors, CutAlong::kInputs, place, options)),
      merge_plan_(
          SumTree(plan_.blocks).local_plan(plan_.runs[static_cast<std::size_t>(place.tp->rank())])),
      tree_sum_(*place.tp, *place.device, SumTree(plan_.blocks), plan_.runs, tensors.outputs,
                std::nullopt, sums_within(options.reduce)) {
  if (!tensors.bias) return;
  run_agreed(*place.tp,
             [&] { bias_ = load_vector(source, *tensors.bias, outputs_, dtype_, *place.device); });
}

std::int64_t RowParallelLinear::workspace_bytes(std::int64_t rows) const {
  return tree_sum_.workspace_bytes(rows, output_dtype_);
}

void RowParallelLinear::share(std::int64_t rows) { tree_sum_.share(rows); }

void RowParallelLinear::reserve(std::int64_t rows, std::int64_t tile_rows) {
  share(rows);
  Device& device = *place_.device;
  for (std::size_t i = 0; i < weights_.count(); ++i) {
    device.prepare(shape(i), device.storage(dtype_), weights_.kernel(), tile_rows);
  }
  tree_sum_.reserve(rows, output_dtype_);
}

void RowParallelLinear::begin(std::int64_t rows) {
  // Group by group, so that a slice of columns is one message; whole GEMMs write rows.
  partials_ = tree_sum_.stack(rows);
  if (weights_.kernel() == GemmKernel::kLibraryWhole) {
    partials_.row_stride = partials_.groups * kGroup;
    partials_.group_stride = kGroup;
  }
  height_ = 0;
  if (plan_.reduce == Reduce::kFast && weights_.count() == 0 && rows > 0) {
    // A rank without columns adds nothing, but the library's sum takes its root all the same.
    place_.device->fill(reinterpret_cast<std::byte*>(partials_.data), std::byte{0},
                        partials_.slot_stride * size_of(DType::kF32));
  }
}

void RowParallelLinear::add_block(std::size_t i, const Tiles& h) {
  const int merges = merge_plan_.merges[i];
  place_.device->gemm_merge(weights_.at(i).weight, h, partials_, height_, merges);
  height_ += 1 - merges;
}

void RowParallelLinear::finish(std::byte* y) {
  const float* bias = bias_.bytes() > 0 ? bias_.as<float>() : nullptr;
  if (plan_.reduce == Reduce::kFast) {
    tree_sum_.sum_by_library(partials_, bias, output_dtype_, output_rows_, y);
  } else {
    tree_sum_.sum(partials_, bias, output_dtype_, output_rows_, y);
  }
}

void RowParallelLinear::forward(const std::byte* x, const RowCount& rows, std::byte* y) {
  Device& device = *place_.device;
  const std::int64_t height = tile_height(device, weights_.kernel(), rows);
  const Range own = plan_.blocks.columns(plan_.runs[static_cast<std::size_t>(place_.tp->rank())]);
  const bool whole = input_ == Input::kWhole;
  const std::int64_t stride = whole ? plan_.blocks.width : own.size();
  run_agreed(*place_.tp, [&] {
    reserve(rows.local, height);
    for (std::size_t i = 0; i < weights_.count(); ++i) {
      grow(device, h_tiles_, dtype_, {nullptr, rows.local, height, shape(i).padded_inputs()});
    }
  });
  begin(rows.local);
  for (std::size_t i = 0; i < weights_.count(); ++i) {
    const Range columns = plan_.columns(i);
    const Tiles h{h_tiles_.data(), rows.local, height, shape(i).padded_inputs()};
    const std::int64_t first = columns.begin - (whole ? 0 : own.begin);
    device.tile_rows({.data = x + first * size_of(dtype_), .stride = stride}, dtype_,
                     columns.size(), h);
    add_block(i, h);
  }
  finish(y);
}

ReplicatedLinear::ReplicatedLinear(WeightTensors tensors, const TensorSource& source,
                                   Device& device, const LinearOptions& options)
    : alone_(make_self_communicator()),
      linear_(std::move(tensors), source, {&device, alone_.get()}, one_block(options)) {}

void ReplicatedLinear::forward(const std::byte* x, const RowCount& rows, std::byte* y) {
  linear_.forward(x, rows, y);
}

}  // namespace gatefold
