#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "runtime/activation.h"
#include "runtime/canonical.h"
#include "runtime/dtype.h"

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
  Buffer data;  // [groups][padded_inputs / pair][64][pair], pair = 2 for bf16 and 1 for f32
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

/// What a start-up self-check of a GEMM found.
struct SelfCheck {
  bool rows = false;              // a row's bits depend on nothing but the row
  bool columns = false;           // nor on how many columns a call has
  std::string kernel;             // the implementation's name
  std::uint64_t fingerprint = 0;  // of the results: equal on all ranks, or they must not mix
};

/// Everything that one device does. Calls are coarse (a GEMM over all rows, a sum over all roots)
/// and ordered: each starts after the one before it. Pointers are device memory unless "host" is
/// in the name. Nothing but allocate(), allocate_weight(), prepare() and self_check() allocates.
class Device {
 public:
  virtual ~Device() = default;

  virtual std::string description() const = 0;
  /// Name and version of the GEMM library: compared between ranks.
  virtual std::string library() const = 0;
  /// What weights and hidden values of a model in `model` are kept in: `model` itself, or f32
  /// where the device can't multiply it ("widened").
  virtual DType storage(DType model) const = 0;

  /// Throws Error 71 with the bytes wanted.
  virtual Buffer allocate(std::int64_t bytes) = 0;
  virtual void upload(std::byte* out, const std::byte* host, std::int64_t bytes) = 0;
  virtual void download(std::byte* host, const std::byte* in, std::int64_t bytes) = 0;
  /// `rows` rows of `bytes` bytes, strides in bytes.
  virtual void copy_rows(std::byte* out, std::int64_t out_stride, const std::byte* in,
                         std::int64_t in_stride, std::int64_t rows, std::int64_t bytes) = 0;
  virtual void synchronize() = 0;

  /// Zero-filled.
  virtual Weight allocate_weight(const WeightShape& shape, DType model, GemmKernel kernel) = 0;
  /// Packs rows [first_row, first_row + rows) of the weight from `host` [rows, inputs], dense, in
  /// the storage dtype.
  virtual void store_rows(Weight& weight, std::int64_t first_row, std::int64_t rows,
                          const std::byte* host) = 0;

  /// Makes what calls with this weight shape and tile height need, so that they allocate nothing.
  virtual void prepare(const WeightShape& shape, DType storage, GemmKernel kernel,
                       std::int64_t tile_rows) = 0;
  /// Runs the library's tile GEMMs of this shape on rows in every place, beside other contents and
  /// padding, and again: a row's bits must stay the same.
  virtual SelfCheck self_check(const WeightShape& shape, DType storage) = 0;

  /// x [rows, columns] in the model dtype, rows `x_stride` elements apart → tiles in the storage
  /// dtype, padded with zeros.
  virtual void tile_rows(const std::byte* x, std::int64_t x_stride, DType model,
                         std::int64_t columns, const Tiles& out) = 0;
  /// The way back: the first `columns` of the tiles' rows → out [rows, columns] in the model dtype,
  /// rows `out_stride` elements apart.
  virtual void untile_rows(const Tiles& in, DType model, std::int64_t columns, std::byte* out,
                           std::int64_t out_stride) = 0;
  /// h = round(act(x Wᵀ + bias)) to the model dtype, in tiles of the storage dtype.
  /// bias: fp32 in the order of the weight's packed columns [groups*64], or null.
  virtual void gemm_activation(const Weight& weight, const float* bias,
                               const Activation& activation, DType model, const Tiles& x,
                               const Tiles& h) = 0;
  /// p = h Wᵀ in fp32, then `merges` times p = slot[--height] + p, then slot[height] = p.
  virtual void gemm_merge(const Weight& weight, const Tiles& h, const Partials& stack, int height,
                          int merges) = 0;
  virtual void sum_roots(const RootSum& sum) = 0;
  /// in [groups][rows][64] → out [rows, columns], both in `dtype`.
  virtual void ungroup(const std::byte* in, DType dtype, std::int64_t rows, std::int64_t columns,
                       std::byte* out) = 0;
};

/// A CPU device with `threads` threads; 0 takes what OpenMP would (OMP_NUM_THREADS, affinity).
std::unique_ptr<Device> make_cpu_device(int threads = 0);

/// A CUDA device for this process's GPU. Throws Error 69 where the build or the machine has none.
std::unique_ptr<Device> make_cuda_device(int local_rank);

}  // namespace gatefold
