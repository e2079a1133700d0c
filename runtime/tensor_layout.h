#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "runtime/canonical.h"
#include "runtime/dtype.h"

// What a device's memory holds and how it lies there: views and owners, no operations.

namespace gatefold {

/// Columns of a GEMM's output come in groups of 64; a gated group is 32 gate columns and then the
/// 32 up columns that belong to them, so that any run of groups can be activated by itself.
constexpr std::int64_t kGroup = 64;
constexpr std::int64_t kGatedGroup = 32;
/// Inner dimensions are padded with zeros to this: a whole number of groups of either kind, and of
/// what bf16 matrix instructions take at once.
constexpr std::int64_t kInnerStep = 64;

/// How a Buffer's memory is given back.
struct BufferRelease {
  void (*free)(std::byte*, std::int64_t) = nullptr;
  std::int64_t bytes = 0;
  void operator()(std::byte* data) const noexcept { free(data, bytes); }
};

/// Memory of one device, 256-byte aligned. Move only.
class Buffer {
 public:
  Buffer() = default;
  Buffer(std::byte* data, BufferRelease release) : data_(data, release) {}

  std::byte* data() const { return data_.get(); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }
  std::int64_t bytes() const { return data_ ? data_.get_deleter().bytes : 0; }

 private:
  std::unique_ptr<std::byte, BufferRelease> data_;
};

/// Who multiplies.
enum class GemmKernel {
  kLibraryTiles,   // the vendor's library, tile by tile, any number of columns a call
  kLibraryPanels,  // the same, always the same number of columns a call
  kPlain,          // our own kernel: slower; the order of its sums is in its source
  kLibraryWhole,   // the library over all rows at once: bits depend on the shape of the call
};

/// A weight [outputs, inputs] as layers see it. Gated: rows 0 … outputs-1 are the gate's and
/// rows outputs … 2*outputs-1 the up projection's; a layer's output has `outputs` columns.
struct WeightShape {
  std::int64_t outputs = 0;
  std::int64_t inputs = 0;
  bool gated = false;

  std::int64_t group_outputs() const { return gated ? kGatedGroup : kGroup; }
  std::int64_t groups() const { return round_up(outputs, kInnerStep) / group_outputs(); }
  std::int64_t padded_inputs() const { return round_up(inputs, kInnerStep); }
  /// Width of the output rows that gemm_activation() fills, padding included: padded_inputs() of
  /// the next weight.
  std::int64_t padded_outputs() const { return round_up(outputs, kInnerStep); }
  std::int64_t rows() const { return gated ? 2 * outputs : outputs; }
  friend bool operator==(const WeightShape&, const WeightShape&) = default;
};

/// A weight in the device's own packing, dense and padded with zeros.
struct Weight {
  WeightShape shape;
  DType storage = DType::kF32;
  GemmKernel kernel = GemmKernel::kPlain;
  Buffer data;  // of the CPU: [groups][padded_inputs / pair][64][pair], pair = 2 for bf16 and 1 for
                // f32; of a GPU: [groups * 64][padded_inputs]
};

/// Rows in canonical tiles: [tiles][tile_rows][width], dense, in the storage dtype; the last tile
/// is filled up with rows that nobody reads (zeros in a layer's input).
struct Tiles {
  std::byte* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t tile_rows = 1;
  std::int64_t width = 0;
  bool alone = false;  // the batch, over all ranks, has just this one tile

  std::int64_t count() const { return ceil_div(rows, tile_rows); }
  std::int64_t padded_rows() const { return count() * tile_rows; }
};

/// fp32 partial sums of H columns in groups of 64: element (group, row, column) of slot s lies at
/// s*slot_stride + group*group_stride + row*row_stride + column.
struct Partials {
  float* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t groups = 0;
  std::int64_t row_stride = kGroup;
  std::int64_t group_stride = 0;
  std::int64_t slot_stride = 0;

  float* at(std::int64_t slot, std::int64_t group) const {
    return data + slot * slot_stride + group * group_stride;
  }
};

/// Adds up the roots of the summation tree, adds the bias, rounds once to the model dtype.
struct RootSum {
  std::span<const float* const> roots;  // each [groups][rows][64] with the strides below
  const MergePlan* plan = nullptr;
  std::int64_t groups = 0;
  std::int64_t rows = 0;
  std::int64_t row_stride = kGroup;  // of the roots, elements
  std::int64_t group_stride = 0;     // of the roots, elements
  const float* bias = nullptr;       // [columns], may be null
  std::int64_t columns = 0;          // valid columns, at most 64*groups
  DType dtype = DType::kF32;         // of the output
  std::byte* out = nullptr;
  std::int64_t out_row_stride = 0;    // elements
  std::int64_t out_group_stride = 0;  // elements
};

}  // namespace gatefold
