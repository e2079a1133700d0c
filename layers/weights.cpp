#include "layers/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "parallel/agreement.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

/// Host memory used while loading: what peak memory may exceed a rank's weights by.
constexpr std::int64_t kStagingBytes = 8 << 20;

/// Where logical rows lie, from the first to the last of them.
Range stored_rows(const TensorRef& ref, Range rows) {
  const std::int64_t first = ref.row_offset + rows.begin * ref.row_step;
  return {first, rows.empty() ? first : first + (rows.size() - 1) * ref.row_step + 1};
}

/// out [rows, columns] from in [columns, stride], where row r is column r * step.
template <typename Element>
void turn(const std::byte* in, std::int64_t stride, std::int64_t step, std::int64_t rows,
          std::int64_t columns, std::byte* out) {
  constexpr std::int64_t kSize = sizeof(Element);
  constexpr std::int64_t kTile = 32;  // so that neither side is walked a cache line an element
  for (std::int64_t row = 0; row < rows; row += kTile) {
    for (std::int64_t c = 0; c < columns; ++c) {
      for (std::int64_t r = row; r < std::min(rows, row + kTile); ++r) {
        std::memcpy(out + (r * columns + c) * kSize, in + (c * stride + r * step) * kSize, kSize);
      }
    }
  }
}

/// Reads logical rows x columns of `ref`, rounded to `dtype`, into out [rows, columns].
void read_matrix(const TensorSource& source, const TensorRef& ref, Range rows, Range columns,
                 DType dtype, std::vector<std::byte>& out) {
  const Range stored = stored_rows(ref, rows);
  const Range across{columns.begin + ref.column_offset, columns.end + ref.column_offset};
  const std::int64_t element = size_of(dtype);
  const std::int64_t row_bytes = columns.size() * element;
  out.resize(static_cast<std::size_t>(rows.size() * row_bytes));
  if (!ref.transposed && ref.row_step == 1) {
    read_as(source, ref.name, stored, across, dtype, out.data());
    return;
  }
  if (!ref.transposed) {
    for (std::int64_t r = 0; r < rows.size(); ++r) {
      const std::int64_t at = stored.begin + r * ref.row_step;
      read_as(source, ref.name, {at, at + 1}, across, dtype, out.data() + r * row_bytes);
    }
    return;
  }
  std::vector<std::byte> turned(static_cast<std::size_t>(stored.size() * row_bytes));
  read_as(source, ref.name, across, stored, dtype, turned.data());
  if (element == 4) {
    turn<std::uint32_t>(turned.data(), stored.size(), ref.row_step, rows.size(), columns.size(),
                        out.data());
  } else {
    turn<std::uint16_t>(turned.data(), stored.size(), ref.row_step, rows.size(), columns.size(),
                        out.data());
  }
}

std::vector<float> read_vector(const TensorSource& source, const TensorRef& ref, Range range,
                               DType dtype) {
  const Range stored = stored_rows(ref, range);
  std::vector<float> read(static_cast<std::size_t>(stored.size()));
  const Range row{ref.column_offset, ref.column_offset + 1};
  read_as_float(source, ref.name, row, stored, read.data());
  std::vector<float> values(static_cast<std::size_t>(range.size()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = round_to(dtype, read[i * static_cast<std::size_t>(ref.row_step)]);
  }
  return values;
}

Buffer to_device(Device& device, const std::vector<float>& values) {
  const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(float));
  Buffer buffer = device.allocate(bytes);
  device.upload(buffer.data(), reinterpret_cast<const std::byte*>(values.data()), bytes);
  return buffer;
}

}  // namespace

BlockPlan BlockPlan::make(std::int64_t width, const LinearOptions& options,
                          const Communicator& tp) {
  const bool exact = options.reduce == Reduce::kExact;
  if (exact && tp.size() > options.blocks) {
    throw Error(ExitCode::kUsage,
                fmt::format("tp {} is more than {} blocks (a rank owns whole blocks); use --tp {} "
                            "or less, or --blocks {} or more",
                            tp.size(), options.blocks, options.blocks, tp.size()));
  }
  BlockPlan plan;
  plan.reduce = options.reduce;
  plan.blocks = {width, exact ? options.blocks : tp.size()};
  for (int r = 0; r < tp.size(); ++r) {
    plan.runs.push_back(owned_blocks(plan.blocks.count, tp.size(), r));
  }
  plan.owned = SumTree(plan.blocks).leaves(plan.runs[static_cast<std::size_t>(tp.rank())]);
  return plan;
}

WeightShape block_shape(const WeightTensors& tensors, CutAlong cut, Range columns) {
  if (cut == CutAlong::kOutputs) {
    return {columns.size(), tensors.inputs, tensors.gate.has_value()};
  }
  return {tensors.outputs, columns.size(), false};
}

WeightTensors gate_up_tensors(const FfnSpec& spec) {
  return {spec.intermediate_size, spec.hidden_size, spec.up,
          spec.up_bias,           spec.gate,        spec.gate_bias};
}

WeightTensors down_tensors(const FfnSpec& spec) {
  return {spec.hidden_size, spec.intermediate_size, spec.down, spec.down_bias, {}, {}};
}

BlockWeights::BlockWeights(WeightTensors tensors, CutAlong cut, const TensorSource& source,
                           const Place& place, const BlockPlan& plan, const LinearOptions& options)
    : tensors_(std::move(tensors)),
      cut_(cut),
      source_(&source),
      place_(place),
      plan_(plan),
      dtype_(options.dtype),
      kernel_(plan.reduce == Reduce::kFast ? GemmKernel::kLibraryWhole
                                           : options.kernel.value_or(GemmKernel::kPlain)) {
  if (plan.reduce == Reduce::kExact && kernel_ == GemmKernel::kLibraryWhole) {
    throw Error(
        ExitCode::kUsage,
        "whole GEMMs in exact mode (their bits depend on how many rows a call has, and they "
        "can't be merged in tree order); use tiles or panels, or the fast mode");
  }
  if (options.residency == Residency::kStreamed) return;
  // Agreed, so that a rank that can't load doesn't leave its peers waiting in forward().
  run_agreed(*place_.tp, [this] {
    for (std::size_t i = 0; i < count(); ++i) {
      resident_.push_back(load(i));
      place_.tp->progress().tick();
    }
    place_.device->synchronize();
  });
}

const BlockWeight& BlockWeights::at(std::size_t i) {
  if (!resident_.empty()) return resident_[i];
  if (!streamed_ || streamed_index_ != i) {
    streamed_.reset();  // the old block goes before the new one comes
    streamed_ = load(i);
    streamed_index_ = i;
  }
  return *streamed_;
}

BlockWeight BlockWeights::load(std::size_t i) const {
  const Range block = plan_.columns(i);
  const WeightShape shape = block_shape(tensors_, cut_, block);
  const bool by_outputs = cut_ == CutAlong::kOutputs;
  const Range rows = by_outputs ? block : Range{0, tensors_.outputs};
  const Range columns = by_outputs ? Range{0, tensors_.inputs} : block;

  BlockWeight loaded{place_.device->allocate_weight(shape, dtype_, kernel_), {}};
  if (tensors_.gate) load_rows(loaded.weight, *tensors_.gate, rows, columns, 0);
  load_rows(loaded.weight, tensors_.matrix, rows, columns, tensors_.gate ? rows.size() : 0);
  if (by_outputs && (tensors_.bias || tensors_.gate_bias)) loaded.bias = load_bias(rows, shape);
  return loaded;
}

/// Streams `rows` of one tensor to the weight's rows from `first_row` on.
void BlockWeights::load_rows(Weight& weight, const TensorRef& ref, Range rows, Range columns,
                             std::int64_t first_row) const {
  const std::int64_t row_bytes = columns.size() * size_of(DType::kF32);
  // Whole groups at a time, so that packing threads don't share cache lines.
  const std::int64_t step = std::max(kGroup, kStagingBytes / row_bytes / kGroup * kGroup);
  std::vector<std::byte> staged;
  std::vector<std::byte> widened;
  for (std::int64_t at = rows.begin; at < rows.end; at += step) {
    const Range part{at, std::min(at + step, rows.end)};
    read_matrix(*source_, ref, part, columns, dtype_, staged);
    const std::byte* host = staged.data();
    if (weight.storage != dtype_) {
      const std::int64_t n = part.size() * columns.size();
      widened.resize(static_cast<std::size_t>(n * size_of(weight.storage)));
      convert(dtype_, staged.data(), weight.storage, widened.data(), n);
      host = widened.data();
    }
    place_.device->store_rows(weight, first_row + at - rows.begin, part.size(), host);
    place_.tp->progress().tick();
  }
}

/// The block's bias in the order of its packed columns, zero where there is none.
Buffer BlockWeights::load_bias(Range rows, const WeightShape& shape) const {
  std::vector<float> packed(static_cast<std::size_t>(shape.groups() * kGroup));
  const auto place = [&](const std::optional<TensorRef>& ref, std::int64_t first_column) {
    if (!ref) return;
    const std::vector<float> values = read_vector(*source_, *ref, rows, dtype_);
    for (std::int64_t i = 0; i < rows.size(); ++i) {
      const std::int64_t group = i / shape.group_outputs();
      const std::int64_t column = first_column + i % shape.group_outputs();
      packed[static_cast<std::size_t>(group * kGroup + column)] =
          values[static_cast<std::size_t>(i)];
    }
  };
  place(tensors_.gate_bias, 0);
  place(tensors_.bias, shape.gated ? kGatedGroup : 0);
  return to_device(*place_.device, packed);
}

Activation load_activation(const FfnSpec& spec, const TensorSource& source) {
  Activation activation = spec.activation;
  if (spec.swish_beta) {
    read_as_float(source, *spec.swish_beta, {0, 1}, {0, 1}, &activation.beta);
    if (!std::isfinite(activation.beta)) {
      throw Error(ExitCode::kData,
                  fmt::format("{} is {} (a learnable beta must be finite); correct "
                              "the file",
                              *spec.swish_beta, activation.beta));
    }
  }
  return activation;
}

Buffer load_vector(const TensorSource& source, const TensorRef& ref, std::int64_t size, DType dtype,
                   Device& device) {
  std::vector<float> values = read_vector(source, ref, {0, size}, dtype);
  values.resize(static_cast<std::size_t>(round_up(size, kGroup)));
  return to_device(device, values);
}

Buffer load_router(const TensorSource& source, const TensorRef& ref, std::int64_t outputs,
                   std::int64_t inputs, Device& device) {
  std::vector<float> values(static_cast<std::size_t>(outputs * inputs));
  read_as_float(source, ref.name, {0, outputs}, {0, inputs}, values.data());
  const auto wrong = std::ranges::find_if_not(values, [](float v) { return std::isfinite(v); });
  if (wrong != values.end()) {
    const std::int64_t at = wrong - values.begin();
    throw Error(ExitCode::kData,
                fmt::format("{} is {} at row {}, column {} (what chooses experts must be finite); "
                            "correct the weights in {}",
                            ref.name, *wrong, at / inputs, at % inputs, source.description()));
  }
  return to_device(device, values);
}

}  // namespace gatefold
