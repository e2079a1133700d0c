#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <utility>

#include "runtime/cuda_check.h"
#include "runtime/cuda_expert_kernels.h"
#include "runtime/cuda_gemm.h"
#include "runtime/cuda_interop.h"
#include "runtime/cuda_kernels.h"
#include "runtime/cuda_ranges.h"
#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/gemm_check.h"
#include "runtime/hash.h"

namespace gatefold {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  const bool memory = status == cudaErrorMemoryAllocation;
  throw Error(
      memory ? ExitCode::kOutOfMemory : ExitCode::kBackend,
      fmt::format(
          "{} failed ({}: {}); {}", call, cudaGetErrorName(status), cudaGetErrorString(status),
          memory ? "use more ranks or fewer tokens" : "see the driver's log, or use --device cpu"));
}

namespace {

// A fault that came up meanwhile is for the next call to tell; a context that is gone has taken its
// memory with it.
void release(std::byte* data, std::int64_t) { cudaFree(data); }
void release_host(std::byte* data, std::int64_t) { cudaFreeHost(data); }

}  // namespace

Buffer allocate_on_gpu(std::int64_t bytes) {
  void* data = nullptr;
  const auto wanted = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  const cudaError_t status = cudaMalloc(&data, wanted);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());  // or the next launch would be blamed
    std::size_t free = 0;
    std::size_t total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    throw Error(ExitCode::kOutOfMemory,
                fmt::format("{} bytes of GPU memory could not be had ({} of {} are free); use more "
                            "ranks or fewer tokens",
                            wanted, free, total));
  }
  check(status, "cudaMalloc");
  return {static_cast<std::byte*>(data), {release, bytes}};
}

namespace {

using Stream = std::unique_ptr<CUstream_st, void (*)(cudaStream_t)>;
void destroy(cudaStream_t stream) { cudaStreamDestroy(stream); }
void leave(cudaStream_t) {}

struct DestroyEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<CUevent_st, DestroyEvent>;

Event make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return Event(event);
}

/// Small batches are bound by the weights' way from memory, so that padding costs nothing.
constexpr std::array<std::int64_t, 5> kTileHeights{64, 256, 512, 768, 1024};
/// So that each tile of a batch starts where its GEMM expects it.
static_assert(kTileHeights[0] * kInnerStep * 2 % CudaGemm::kAlignment == 0);
/// Of host rows on their way into a weight.
constexpr std::int64_t kStagingBytes = 8 << 20;

/// Pinned host memory for those rows, free again when the GPU has copied them.
struct Staging {
  Buffer host;
  Event copied;
};

[[noreturn]] void no_device(const std::string& why) {
  throw Error(
      ExitCode::kUnavailable,
      fmt::format("no CUDA device ({}); look at nvidia-smi, whose driver must be for CUDA {} "
                  "or later, and at CUDA_VISIBLE_DEVICES, or use --device cpu",
                  why, CUDART_VERSION / 1000));
}

/// For the calls by which a process gets hold of its GPU. Throws Error 69, or 71.
void check_usable(cudaError_t status) {
  if (status == cudaErrorMemoryAllocation) check(status, "getting hold of the GPU");
  if (status != cudaSuccess) no_device(cudaGetErrorString(status));
}

/// Throws Error 69 where there are none.
int usable_devices() {
  const VisibleGpus gpus = visible_cuda_devices();
  if (gpus.count == 0) no_device(gpus.why_none);
  return gpus.count;
}

/// Makes `device` the calling thread's GPU for a while: each thread has one of its own.
class CurrentGpu {
 public:
  explicit CurrentGpu(int device) : device_(device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device_) check(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~CurrentGpu() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;

 private:
  int device_;
  int before_ = 0;
};

/// Work goes to one stream, in order, and to the GPU that was current when it was made.
class CudaDevice final : public Device {
 public:
  explicit CudaDevice(Stream stream) : stream_(std::move(stream)) {
    check(cudaGetDevice(&index_), "cudaGetDevice");
    check(cudaGetDeviceProperties(&properties_, index_), "cudaGetDeviceProperties");
    for (Staging& staging : staging_) staging.copied = make_event();
  }
  /// What the members own is in use until the stream is done.
  ~CudaDevice() override { cudaStreamSynchronize(stream()); }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  cudaStream_t stream() const { return stream_.get(); }

  std::string description() const override {
    return fmt::format("cuda {}, {}, {:.0f} GiB, driver for CUDA {}", index_, properties_.name,
                       static_cast<double>(properties_.totalGlobalMem) / 0x1p30, driver_version());
  }
  std::string library() const override {
    return fmt::format("{} on {} (compute {}.{})", CublasLt::version(), properties_.name,
                       properties_.major, properties_.minor);
  }
  DType storage(DType model) const override { return model; }
  std::int64_t last_level_cache() const override { return properties_.l2CacheSize; }
  std::span<const std::int64_t> tile_heights() const override { return kTileHeights; }

  Buffer allocate(std::int64_t bytes) override {
    const CurrentGpu current(index_);
    return allocate_on_gpu(bytes);
  }
  bool in_host_memory() const override { return false; }
  Buffer allocate_host(std::int64_t bytes) override;
  void start_upload(std::byte* out, const std::byte* host, std::int64_t bytes) override {
    start_copy(out, host, bytes, cudaMemcpyHostToDevice, "a copy to the GPU");
  }
  void start_download(std::byte* host, const std::byte* in, std::int64_t bytes) override {
    start_copy(host, in, bytes, cudaMemcpyDeviceToHost, "a copy from the GPU");
  }
  void upload(std::byte* out, const std::byte* host, std::int64_t bytes) override {
    start_upload(out, host, bytes);
    synchronize();
  }
  void download(std::byte* host, const std::byte* in, std::int64_t bytes) override {
    start_download(host, in, bytes);
    synchronize();
  }
  void copy_rows(std::byte* out, std::int64_t out_stride, const std::byte* in,
                 std::int64_t in_stride, std::int64_t rows, std::int64_t bytes) override {
    const CurrentGpu current(index_);
    cuda::copy_rows(out, out_stride, in, in_stride, rows, bytes, stream());
  }
  void fill(std::byte* out, std::byte value, std::int64_t bytes) override {
    const CurrentGpu current(index_);
    check(cudaMemsetAsync(out, std::to_integer<int>(value), static_cast<std::size_t>(bytes),
                          stream()),
          "cudaMemsetAsync");
  }
  void synchronize() override { check(cudaStreamSynchronize(stream()), "the GPU's work"); }
  void begin_range(const char* name) override { ranges_.begin(name); }
  void end_range() override { ranges_.end(); }

  Weight allocate_weight(const WeightShape& shape, DType model, GemmKernel kernel) override;
  void store_rows(Weight& weight, std::int64_t first_row, std::int64_t rows,
                  const std::byte* host) override;
  std::vector<std::byte> choose_gemms(std::span<const WeightShape> shapes, DType storage) override;
  void pin_gemms(std::span<const WeightShape> shapes, DType storage,
                 std::span<const std::byte> choices) override;
  void prepare(const WeightShape& shape, DType storage, GemmKernel kernel,
               std::int64_t tile_rows) override;
  SelfCheck self_check(const WeightShape& shape, DType storage) override;

  void tile_rows(const InputRows& x, DType model, std::int64_t columns, const Tiles& out) override {
    const CurrentGpu current(index_);
    const std::int64_t element = size_of(model);
    if (x.index != nullptr || x.scale != nullptr) {
      return cuda::tile_chosen_rows(x, model, columns, out, stream());
    }
    cuda::pad_rows(x.data, x.stride * element, out.rows, columns * element, out.data,
                   out.padded_rows(), out.width * element, stream());
  }
  void untile_rows(const Tiles& in, DType model, std::int64_t columns, std::byte* out,
                   std::int64_t out_stride) override {
    const std::int64_t element = size_of(model);
    copy_rows(out, out_stride * element, in.data, in.width * element, in.rows, columns * element);
  }
  void gemm_activation(const Weight& weight, const float* bias, const Activation& activation,
                       DType model, const Tiles& x, const Tiles& h) override;
  void gemm_merge(const Weight& weight, const Tiles& h, const Partials& stack, int height,
                  int merges) override;
  void sum_roots(const RootSum& sum) override {
    const CurrentGpu current(index_);
    cuda::sum_roots(sum, stream());
  }
  void ungroup(const std::byte* in, DType dtype, std::int64_t rows, std::int64_t columns,
               std::byte* out) override {
    const CurrentGpu current(index_);
    cuda::ungroup(in, size_of(dtype), rows, columns, out, stream());
  }
  void gather_rows(std::byte* out, const std::byte* in, const std::int32_t* index,
                   std::int64_t rows, std::int64_t bytes) override {
    const CurrentGpu current(index_);
    cuda::gather_rows(out, in, index, rows, bytes, stream());
  }
  void router_logits(const LogitRows& io) override {
    const CurrentGpu current(index_);
    cuda::router_logits(io, stream());
  }
  void choose_experts(const RouteRule& rule, const float* logits, const float* correction,
                      std::int64_t rows, std::int32_t* ids, float* weights) override {
    const CurrentGpu current(index_);
    cuda::choose_experts(rule, logits, correction, rows, ids, weights, stream());
  }
  void score_logits(const ScoredLogits& io) override {
    const CurrentGpu current(index_);
    cuda::score_logits(io, stream());
  }
  void weigh_rows(const WeighedRows& io) override {
    const CurrentGpu current(index_);
    cuda::weigh_rows(io, stream());
  }
  void combine_rows(const CombinedRows& io) override {
    const CurrentGpu current(index_);
    cuda::combine_rows(io, stream());
  }

 private:
  static CudaGemm::Shape gemm_shape(const WeightShape& shape, DType storage, GemmKernel kernel,
                                    std::int64_t rows) {
    return {rows, shape.padded_inputs(), shape.groups() * kGroup, storage,
            kernel != GemmKernel::kLibraryWhole};
  }
  void start_copy(std::byte* out, const std::byte* in, std::int64_t bytes, cudaMemcpyKind kind,
                  const char* name) {
    if (bytes == 0) return;
    const CurrentGpu current(index_);
    check(cudaMemcpyAsync(out, in, static_cast<std::size_t>(bytes), kind, stream()), name);
  }
  const CudaGemm* pinned(const CudaGemm::Shape& shape) const;
  void multiply(const Weight& weight, const std::byte* a, std::int64_t rows, float* c);
  template <typename Use>
  void gemm_tiles(const Weight& weight, const Tiles& in, const Use& use);

  Stream stream_;
  int index_ = 0;
  cudaDeviceProp properties_{};
  CudaRanges ranges_;
  CublasLt library_;
  /// Null: pinned to none, as some rank's library has no algorithm that runs here.
  std::map<CudaGemm::Shape, std::unique_ptr<CudaGemm>> gemms_;
  Buffer products_;  // of one tile
  std::array<Staging, 2> staging_;
  std::size_t turn_ = 0;
  Buffer staged_;  // what a staging holds, on the GPU
};

Buffer CudaDevice::allocate_host(std::int64_t bytes) {
  const CurrentGpu current(index_);
  void* data = nullptr;
  const auto wanted = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  const cudaError_t status = cudaMallocHost(&data, wanted);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());  // or the next launch would be blamed
    throw Error(ExitCode::kOutOfMemory,
                fmt::format("{} bytes of pinned host memory could not be had; look at ulimit -l, "
                            "or use more ranks on more machines",
                            wanted));
  }
  check(status, "cudaMallocHost");
  return {static_cast<std::byte*>(data), {release_host, bytes}};
}

Weight CudaDevice::allocate_weight(const WeightShape& shape, DType model, GemmKernel kernel) {
  Weight weight{shape, storage(model), kernel, {}};
  const std::int64_t row_bytes = shape.padded_inputs() * size_of(weight.storage);
  weight.data = allocate(shape.groups() * kGroup * row_bytes);
  fill(weight.data.data(), std::byte{0}, weight.data.bytes());
  const std::int64_t bytes = std::max(kStagingBytes, row_bytes);
  if (staged_.bytes() >= bytes) return weight;
  synchronize();
  for (Staging& staging : staging_) staging.host = allocate_host(bytes);
  staged_ = allocate(bytes);
  return weight;
}

void CudaDevice::store_rows(Weight& weight, std::int64_t first_row, std::int64_t rows,
                            const std::byte* host) {
  const CurrentGpu current(index_);
  const std::int64_t row_bytes = weight.shape.inputs * size_of(weight.storage);
  if (row_bytes == 0) return;
  const std::int64_t step = staged_.bytes() / row_bytes;
  for (std::int64_t at = 0; at < rows; at += step) {
    const std::int64_t part = std::min(step, rows - at);
    Staging& staging = staging_[turn_++ % staging_.size()];
    check(cudaEventSynchronize(staging.copied.get()), "a weight's copy to the GPU");
    std::memcpy(staging.host.data(), host + at * row_bytes,
                static_cast<std::size_t>(part * row_bytes));
    start_upload(staged_.data(), staging.host.data(), part * row_bytes);
    check(cudaEventRecord(staging.copied.get(), stream()), "cudaEventRecord");
    cuda::pack_weight_rows(weight, first_row + at, part, staged_.data(), stream());
  }
}

/// What choose_gemms() tells of one shape and tile height.
struct Choice {
  std::uint64_t found = 0;
  CudaGemm::Algorithm algorithm{};
};

std::vector<std::byte> CudaDevice::choose_gemms(std::span<const WeightShape> shapes,
                                                DType storage) {
  const CurrentGpu current(index_);
  std::vector<Choice> choices;
  for (const WeightShape& shape : shapes) {
    for (const std::int64_t rows : kTileHeights) {
      const auto tile = gemm_shape(shape, storage, GemmKernel::kLibraryTiles, rows);
      const auto before = gemms_.find(tile);
      const std::unique_ptr<CudaGemm> made =
          before == gemms_.end() ? CudaGemm::choose(library_, tile) : nullptr;
      const CudaGemm* gemm = before == gemms_.end() ? made.get() : before->second.get();
      choices.push_back(gemm == nullptr ? Choice{} : Choice{1, gemm->algorithm()});
    }
  }
  const auto bytes = std::as_bytes(std::span(choices));
  return {bytes.begin(), bytes.end()};
}

void CudaDevice::pin_gemms(std::span<const WeightShape> shapes, DType storage,
                           std::span<const std::byte> choices) {
  const CurrentGpu current(index_);
  if (choices.size() != shapes.size() * kTileHeights.size() * sizeof(Choice)) {
    throw Error(ExitCode::kBackend,
                fmt::format("{} bytes of GEMM choices for {} shapes (they come from another "
                            "version); start all ranks with the same program",
                            choices.size(), shapes.size()));
  }
  for (const WeightShape& shape : shapes) {
    for (const std::int64_t rows : kTileHeights) {
      Choice choice;
      std::memcpy(&choice, choices.data(), sizeof(Choice));
      choices = choices.subspan(sizeof(Choice));
      const auto tile = gemm_shape(shape, storage, GemmKernel::kLibraryTiles, rows);
      gemms_[tile] = choice.found == 0 ? nullptr : CudaGemm::pin(library_, tile, choice.algorithm);
    }
  }
}

/// Null where none runs. Throws Error 70 where nothing is pinned: ranks might then differ.
const CudaGemm* CudaDevice::pinned(const CudaGemm::Shape& shape) const {
  const auto found = gemms_.find(shape);
  if (found != gemms_.end()) return found->second.get();
  throw Error(ExitCode::kBackend,
              fmt::format("tiles of {} x {} x {} (rows, columns, inputs) have no algorithm that "
                          "all ranks agreed on (each might choose another, with other bits); call "
                          "choose_kernel() with this weight's shape first",
                          shape.rows, shape.columns, shape.inputs));
}

void CudaDevice::prepare(const WeightShape& shape, DType storage, GemmKernel kernel,
                         std::int64_t tile_rows) {
  const CurrentGpu current(index_);
  const CudaGemm::Shape wanted = gemm_shape(shape, storage, kernel, tile_rows);
  const std::int64_t bytes = wanted.rows * wanted.columns * size_of(DType::kF32);
  if (products_.bytes() < bytes) products_ = allocate(bytes);
  if (kernel == GemmKernel::kPlain) return;
  // No bits are promised of whole GEMMs, so that each rank's own choice will do.
  if (kernel == GemmKernel::kLibraryWhole && !gemms_.contains(wanted)) {
    gemms_[wanted] = CudaGemm::choose(library_, wanted);
  }
  if (pinned(wanted) != nullptr) return;
  throw Error(ExitCode::kBackend,
              fmt::format("cuBLASLt has no algorithm for {} x {} x {} in {} (rows, columns, "
                          "inputs); use another --dtype, or --device cpu",
                          wanted.rows, wanted.columns, wanted.inputs, name_of(storage)));
}

SelfCheck CudaDevice::self_check(const WeightShape& shape, DType storage) {
  const CurrentGpu current(index_);
  // Every call takes all columns, so that their number is no question.
  SelfCheck result{true, true, "", 0};
  Fnv1a fingerprint;
  for (const std::int64_t rows : kTileHeights) {
    const CudaGemm::Shape tile = gemm_shape(shape, storage, GemmKernel::kLibraryTiles, rows);
    const CudaGemm* gemm = pinned(tile);
    if (gemm == nullptr) return {false, false, "", 0};
    const std::int64_t element = size_of(storage);
    const Buffer a = allocate(rows * tile.inputs * element);
    const Buffer w = allocate(tile.columns * tile.inputs * element);
    const Buffer c = allocate(rows * tile.columns * size_of(DType::kF32));
    const GemmCheck check =
        check_row_bits(rows, tile.inputs, tile.columns, storage,
                       [&](const std::byte* host_a, const std::byte* host_w, float* host_c) {
                         upload(a.data(), host_a, a.bytes());
                         upload(w.data(), host_w, w.bytes());
                         gemm->run(a.data(), w.data(), c.as<float>(), stream());
                         download(reinterpret_cast<std::byte*>(host_c), c.data(), c.bytes());
                       });
    result.rows = result.rows && check.passed;
    result.kernel = gemm->name();
    fingerprint.add_number(check.fingerprint).add(result.kernel);
  }
  result.fingerprint = fingerprint.value();
  return result;
}

void CudaDevice::multiply(const Weight& weight, const std::byte* a, std::int64_t rows, float* c) {
  const CudaGemm::Shape shape = gemm_shape(weight.shape, weight.storage, weight.kernel, rows);
  if (weight.kernel == GemmKernel::kPlain) {
    cuda::plain_gemm(weight.storage, a, rows, shape.inputs, weight.data.data(), shape.columns, c,
                     stream());
  } else {
    pinned(shape)->run(a, weight.data.data(), c, stream());
  }
}

/// Calls use(first row, products) for each tile.
template <typename Use>
void CudaDevice::gemm_tiles(const Weight& weight, const Tiles& in, const Use& use) {
  const std::int64_t row_bytes = in.width * size_of(weight.storage);
  for (std::int64_t first = 0; first < in.rows; first += in.tile_rows) {
    multiply(weight, in.data + first * row_bytes, in.tile_rows, products_.as<float>());
    use(first, products_.as<float>());
  }
}

void CudaDevice::gemm_activation(const Weight& weight, const float* bias,
                                 const Activation& activation, DType model, const Tiles& x,
                                 const Tiles& h) {
  const CurrentGpu current(index_);
  const std::int64_t row_bytes = h.width * size_of(model);
  gemm_tiles(weight, x, [&](std::int64_t first, const float* c) {
    cuda::activate_tile(activation, weight.shape, c, bias, x.tile_rows, model,
                        h.data + first * row_bytes, stream());
  });
}

void CudaDevice::gemm_merge(const Weight& weight, const Tiles& h, const Partials& stack, int height,
                            int merges) {
  const CurrentGpu current(index_);
  if (weight.kernel == GemmKernel::kLibraryWhole) {  // one root, made in place
    if (h.rows > 0) multiply(weight, h.data, h.rows, stack.data);
    return;
  }
  gemm_tiles(weight, h, [&](std::int64_t first, const float* c) {
    cuda::merge_tile(c, std::min(h.tile_rows, h.rows - first), stack, first, height, merges,
                     stream());
  });
}

}  // namespace

std::unique_ptr<Device> make_cuda_device(int local_rank) {
  // One visible GPU is this process's, whoever else is on the host.
  check_usable(cudaSetDevice(local_rank % usable_devices()));
  cudaStream_t stream = nullptr;
  check_usable(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return std::make_unique<CudaDevice>(Stream(stream, destroy));
}

std::unique_ptr<Device> make_cuda_device_on(cudaStream_t stream) {
  usable_devices();
  return std::make_unique<CudaDevice>(Stream(stream, leave));
}

cudaStream_t cuda_stream(const Device& device) {
  const auto* cuda = dynamic_cast<const CudaDevice*>(&device);
  if (cuda != nullptr) return cuda->stream();
  throw Error(ExitCode::kBackend,
              "the stream of a device without one (only a CUDA device has it); "
              "this is a fault of the program");
}

}  // namespace gatefold
