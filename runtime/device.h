#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/activation.h"
#include "runtime/dtype.h"
#include "runtime/expert_rows.h"
#include "runtime/routing.h"
#include "runtime/tensor_layout.h"

namespace gatefold {

/// What a start-up self-check of a GEMM found.
struct SelfCheck {
  bool rows = false;              // a row's bits depend on nothing but the row
  bool columns = false;           // nor on how many columns a call has
  std::string kernel;             // the implementation's name
  std::uint64_t fingerprint = 0;  // of the results: equal on all ranks, or they must not mix
};

/// Everything that one device does. Calls are coarse (a GEMM over all rows, a sum over all roots)
/// and ordered: each starts after the one before it. Pointers are device memory unless "host" is
/// in the name. Nothing allocates but the calls named for it, pin_gemms(), prepare() and
/// self_check(). Any thread may call, one at a time.
class Device {
 public:
  virtual ~Device() = default;

  virtual std::string description() const = 0;
  /// Name and version of the GEMM library: compared between ranks.
  virtual std::string library() const = 0;
  /// What weights and hidden values of a model in `model` are kept in: `model` itself, or f32
  /// where the device can't multiply it ("widened").
  virtual DType storage(DType model) const = 0;
  /// Bytes of the largest cache: what a benchmark's cold memory must exceed.
  virtual std::int64_t last_level_cache() const = 0;
  /// The rows that a canonical tile may have, from the fewest on: see canonical tile_rows().
  virtual std::span<const std::int64_t> tile_heights() const = 0;

  /// Throws Error 71 with the bytes wanted.
  virtual Buffer allocate(std::int64_t bytes) = 0;
  /// Whether its memory is the host's: else only a communicator for device memory takes it.
  virtual bool in_host_memory() const = 0;
  /// upload() and download() have copied when they return.
  virtual void upload(std::byte* out, const std::byte* host, std::int64_t bytes) = 0;
  virtual void download(std::byte* host, const std::byte* in, std::int64_t bytes) = 0;
  /// Host memory that start_download() and start_upload() reach, pinned for the device.
  virtual Buffer allocate_host(std::int64_t bytes) = 0;
  /// The same copies without the wait: `host`, of allocate_host(), is the device's until
  /// synchronize().
  virtual void start_upload(std::byte* out, const std::byte* host, std::int64_t bytes) = 0;
  virtual void start_download(std::byte* host, const std::byte* in, std::int64_t bytes) = 0;
  /// `rows` rows of `bytes` bytes, strides in bytes.
  virtual void copy_rows(std::byte* out, std::int64_t out_stride, const std::byte* in,
                         std::int64_t in_stride, std::int64_t rows, std::int64_t bytes) = 0;
  virtual void fill(std::byte* out, std::byte value, std::int64_t bytes) = 0;
  virtual void synchronize() = 0;

  /// A named stretch of calls for the device's profiler, where it has one. They nest: see Phases.
  virtual void begin_range(const char*) {}
  virtual void end_range() {}
  /// Whom Phases tell of each range, too: its name as it begins, null as it ends.
  using RangeObserver = std::function<void(const char*)>;
  void observe_ranges(RangeObserver observer) { range_observer_ = std::move(observer); }
  const RangeObserver& range_observer() const { return range_observer_; }

  /// Zero-filled.
  virtual Weight allocate_weight(const WeightShape& shape, DType model, GemmKernel kernel) = 0;
  /// Packs rows [first_row, first_row + rows) of the weight from `host` [rows, inputs], dense, in
  /// the storage dtype.
  virtual void store_rows(Weight& weight, std::int64_t first_row, std::int64_t rows,
                          const std::byte* host) = 0;

  /// What the library would run the tile GEMMs of `shapes` by, as bytes for pin_gemms() on any rank
  /// with the same library and kind of device. GEMMs that are pinned already stay as they are.
  virtual std::vector<std::byte> choose_gemms(std::span<const WeightShape> shapes,
                                              DType storage) = 0;
  /// From now on they run by these choices, whatever the library would choose here.
  virtual void pin_gemms(std::span<const WeightShape> shapes, DType storage,
                         std::span<const std::byte> choices) = 0;
  /// Makes what calls with this weight shape and tile height need, so that they allocate nothing.
  /// Tiles by the library have to be pinned before.
  virtual void prepare(const WeightShape& shape, DType storage, GemmKernel kernel,
                       std::int64_t tile_rows) = 0;
  /// Runs the pinned tile GEMMs of this shape on rows in every place, beside other contents and
  /// padding, and again: a row's bits must stay the same.
  virtual SelfCheck self_check(const WeightShape& shape, DType storage) = 0;

  /// The first `columns` of x's rows → tiles in the storage dtype, padded with zeros.
  virtual void tile_rows(const InputRows& x, DType model, std::int64_t columns,
                         const Tiles& out) = 0;
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

  // Of mixtures of experts; E and k are RouteRule's.
  /// Dense rows of `bytes` bytes: row i of `out` is row index[i] of `in`.
  virtual void gather_rows(std::byte* out, const std::byte* in, const std::int32_t* index,
                           std::int64_t rows, std::int64_t bytes) = 0;
  virtual void router_logits(const LogitRows& io) = 0;
  /// logits [rows, E], correction [E] or null → ids and weights [rows, k], in the order in which
  /// a token's experts are chosen.
  virtual void choose_experts(const RouteRule& rule, const float* logits, const float* correction,
                              std::int64_t rows, std::int32_t* ids, float* weights) = 0;
  virtual void score_logits(const ScoredLogits& io) = 0;
  virtual void weigh_rows(const WeighedRows& io) = 0;
  virtual void combine_rows(const CombinedRows& io) = 0;

 private:
  RangeObserver range_observer_;
};

/// A CPU device with `threads` threads; 0 takes what OpenMP would (OMP_NUM_THREADS, affinity).
/// Throws Error 64 for more than 4096.
std::unique_ptr<Device> make_cpu_device(int threads = 0);

/// The GPUs that this process sees; where the build or the machine has none, why.
struct VisibleGpus {
  int count = 0;
  std::string why_none;
};
VisibleGpus visible_cuda_devices();
/// A CUDA device for this process's GPU. Throws Error 69 where the build or the machine has none.
std::unique_ptr<Device> make_cuda_device(int local_rank);

}  // namespace gatefold
