#include "layers/relaid_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "runtime/block_codecs.h"
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

/// A vector [out] as the matrix [out, 1], whose outputs lie behind one another.
TensorRef as_column(TensorRef ref) {
  ref.transposed = true;
  return ref;
}

/// Rows and columns: of a matrix [out, in], or of the tensor in which it lies.
struct Rectangle {
  Range rows, columns;
};

/// Those of `size` numbers, the first of which is at `offset` and each other `step` behind the one
/// before, that are within `range`.
Range counted_within(Range range, std::int64_t offset, std::int64_t step, std::int64_t size) {
  const auto first = [&](std::int64_t at) {
    return std::clamp<std::int64_t>(ceil_div(std::max<std::int64_t>(at - offset, 0), step), 0,
                                    size);
  };
  return {first(range.begin), first(range.end)};
}

/// The part of a matrix of `size` that rows x cols of its tensor hold.
Rectangle seen_part(const TensorRef& ref, Extent size, Range rows, Range cols) {
  const Range outputs =
      counted_within(ref.transposed ? cols : rows, ref.row_offset, ref.row_step, size.rows);
  const Range inputs =
      counted_within(ref.transposed ? rows : cols, ref.column_offset, 1, size.columns);
  return {outputs, inputs};
}

/// What of its tensor holds that part, the other of two alternating matrices included.
Rectangle stored_at(const TensorRef& ref, const Rectangle& part) {
  const Range outputs{ref.row_offset + part.rows.begin * ref.row_step,
                      ref.row_offset + (part.rows.end - 1) * ref.row_step + 1};
  const Range inputs{ref.column_offset + part.columns.begin, ref.column_offset + part.columns.end};
  return ref.transposed ? Rectangle{inputs, outputs} : Rectangle{outputs, inputs};
}

/// What is read at a time where it can't be read to where it goes.
constexpr std::int64_t kBandBytes = std::int64_t{1} << 19;
/// Sides of the squares in which matrices are copied, so that those that are turned stay in a
/// cache.
constexpr std::int64_t kSide = kMxGroup;

/// Elements from one output to the next, and from one input to the next.
struct Strides {
  std::int64_t row = 0, column = 0;

  Strides turned() const { return {column, row}; }
};
Strides strides_of(const TensorRef& ref, std::int64_t width) {
  return ref.transposed ? Strides{ref.row_step, width} : Strides{ref.row_step * width, 1};
}

template <typename Element>
void place_square(const Element* in, Strides from, Extent size, Strides to, Element* out) {
  for (std::int64_t r = 0; r < size.rows; ++r) {
    for (std::int64_t c = 0; c < size.columns; ++c) {
      out[r * to.row + c * to.column] = in[r * from.row + c * from.column];
    }
  }
}

/// A whole square that is turned: rows lie behind one another in the source, columns in the target.
void turn_square(const std::uint16_t* in, Strides from, Strides to, std::uint16_t* out) {
  constexpr Extent kSquare{kSide, kSide};
  constexpr Strides kDense{kSide, 1};
  std::array<std::uint16_t, kSide * kSide> dense;
  if (from.column == 2) {  // of alternating matrices
    for (std::int64_t r = 0; r < kSide; ++r) {
      std::uint16_t* const row = dense.data() + r * kSide;
      for (std::int64_t c = 0; c < kSide; ++c) row[c] = in[r * from.row + 2 * c];
    }
    in = dense.data();
    from = kDense;
  }
  if (to.row == 1) return transpose_group(in, from.row, out, to.column);
  std::array<std::uint16_t, kSide * kSide> turned;
  transpose_group(in, from.row, turned.data(), kSide);
  place_square(turned.data(), kDense, kSquare, to.turned(), out);
}

template <typename Element>
void place(const std::byte* in, Strides from, Extent size, Strides to, std::byte* out) {
  const auto* source = reinterpret_cast<const Element*>(in);
  auto* target = reinterpret_cast<Element*>(out);
  const bool turned = (from.row > from.column) != (to.row > to.column);
  if (from.row < from.column) {  // rows are what lies behind one another in the source
    std::swap(size.rows, size.columns);
    from = from.turned();
    to = to.turned();
  }
  for (std::int64_t row = 0; row < size.rows; row += kSide) {
    for (std::int64_t column = 0; column < size.columns; column += kSide) {
      const Extent square{std::min(kSide, size.rows - row), std::min(kSide, size.columns - column)};
      const Element* square_in = source + row * from.row + column * from.column;
      Element* square_out = target + row * to.row + column * to.column;
      if constexpr (sizeof(Element) == sizeof(std::uint16_t)) {
        if (turned && from.column <= 2 && square.rows == kSide && square.columns == kSide) {
          turn_square(square_in, from, to, square_out);
          continue;
        }
      }
      place_square(square_in, from, square, to, square_out);
    }
  }
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
  const std::int64_t experts = here.route.experts;
  const auto add_vector = [this](const std::optional<TensorRef>& one,
                                 const std::optional<TensorRef>& other, std::int64_t size) {
    if (one) add(as_column(*one), as_column(*other), {size, 1});
  };
  add(here.router, there.router, {experts, hidden});
  add_vector(here.router_bias, there.router_bias, experts);
  add_vector(here.correction_bias, there.correction_bias, experts);
  for (std::size_t e = 0; e < here.experts.size(); ++e) {
    const FfnSpec& one = here.experts[e];
    const FfnSpec& other = there.experts[e];
    if (one.gate) add(*one.gate, *other.gate, {inner, hidden});
    add(one.up, other.up, {inner, hidden});
    add(one.down, other.down, {hidden, inner});
    add_vector(one.gate_bias, other.gate_bias, inner);
    add_vector(one.up_bias, other.up_bias, inner);
    add_vector(one.down_bias, other.down_bias, hidden);
  }
}

void RelaidSource::add(const TensorRef& here, const TensorRef& there, Extent size) {
  const auto [found, added] = tensors_.try_emplace(here.name);
  Tensor& tensor = found->second;
  const DType dtype = source_->find(there.name)->dtype;
  if (!added && tensor.info.dtype != dtype) {
    throw Error(ExitCode::kData,
                fmt::format("{}: {} is stored as {}, {} as {} (both become part of {}, which has "
                            "one type); convert the model to one type first",
                            source_->description(), tensor.runs.front().there.name,
                            name_of(tensor.info.dtype), there.name, name_of(dtype), here.name));
  }
  tensor.info = {dtype, here.stored_shape};
  tensor.runs.push_back({here, there, size});
  used_.insert(there.name);
}

bool RelaidSource::is_turned(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found != tensors_.end() &&
         std::ranges::any_of(found->second.runs, [](const Run& run) { return is_turned(run); });
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
  for (const Run& run : found->second.runs) {
    read_run(run, rows, cols, size_of(found->second.info.dtype), out);
  }
}

void RelaidSource::read_run(const Run& run, Range rows, Range cols, std::int64_t element,
                            std::byte* out) const {
  const Rectangle part = seen_part(run.here, run.size, rows, cols);
  if (part.rows.empty() || part.columns.empty()) return;
  const Rectangle stored = stored_at(run.there, part);
  const Rectangle at = stored_at(run.here, part);
  out += ((at.rows.begin - rows.begin) * cols.size() + at.columns.begin - cols.begin) * element;
  const bool lies_so = !is_turned(run) && run.here.row_step == 1 && run.there.row_step == 1;
  if (lies_so && (stored.columns.size() == cols.size() || stored.rows.size() == 1)) {
    return source_->read(run.there.name, stored.rows, stored.columns, out);
  }
  const Strides from = strides_of(run.there, stored.columns.size());
  const Strides to = strides_of(run.here, cols.size());
  const auto along = run.there.transposed ? &Rectangle::columns : &Rectangle::rows;
  const std::int64_t stored_rows = run.there.transposed ? 1 : run.there.row_step;
  const std::int64_t row_bytes = stored_rows * stored.columns.size() * element;
  const std::int64_t step =
      std::min(std::max(kSide, kBandBytes / row_bytes / kSide * kSide), (part.*along).size());
  const std::unique_ptr<std::byte[]> block(
      new std::byte[static_cast<std::size_t>(step * row_bytes)]);
  Rectangle band = part;
  for (std::int64_t begin = (part.*along).begin; begin < (part.*along).end; begin += step) {
    band.*along = {begin, std::min(begin + step, (part.*along).end)};
    const Rectangle wanted = stored_at(run.there, band);
    source_->read(run.there.name, wanted.rows, wanted.columns, block.get());
    const Extent size{band.rows.size(), band.columns.size()};
    std::byte* const target =
        out + (begin - (part.*along).begin) * (run.there.transposed ? to.column : to.row) * element;
    if (element == 2) {
      place<std::uint16_t>(block.get(), from, size, to, target);
    } else {
      place<std::uint32_t>(block.get(), from, size, to, target);
    }
  }
}

}  // namespace gatefold
