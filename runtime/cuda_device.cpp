#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>

#include "runtime/cuda_check.h"
#include "runtime/cuda_gemm.h"
#include "runtime/cuda_interop.h"
#include "runtime/cuda_kernels.h"
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

/// Small batches are bound by the weights' way from memory, so that padding costs nothing.
constexpr std::array<std::int64_t, 5> kTileHeights{64, 256, 512, 768, 1024};
/// Of host rows on their way into a weight.
constexpr std::int64_t kStagingBytes = 8 << 20;

/// Throws Error 69 where there are none.
int usable_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return count;
  const char* why = status == cudaSuccess ? "the driver shows none" : cudaGetErrorString(status);
  throw Error(
      ExitCode::kUnavailable,
      fmt::format("no CUDA device ({}); look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use "
                  "--device cpu",
                  why));
}

// A fault that came up meanwhile is for the next call to tell.
void release(std::byte* data, std::int64_t) { cudaFree(data); }
void release_host(std::byte* data, std::int64_t) { cudaFreeHost(data); }

enum class StreamIs { kOwn, kCallers };

/// Work goes to one stream, in order, and to the GPU that was current when it was made.
class CudaDevice final : public Device {
 public:
  CudaDevice(cudaStream_t stream, StreamIs whose)
      : stream_(stream), owns_stream_(whose == StreamIs::kOwn) {
    check(cudaGetDevice(&index_), "cudaGetDevice");
    check(cudaGetDeviceProperties(&properties_, index_), "cudaGetDeviceProperties");
  }
  ~CudaDevice() override {
    cudaStreamSynchronize(stream_);
    if (owns_stream_) cudaStreamDestroy(stream_);
  }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  cudaStream_t stream() const { return stream_; }

  std::string description() const override {
    return fmt::format("cuda {}, {}, {:.0f} GiB", index_, properties_.name,
                       static_cast<double>(properties_.totalGlobalMem) / 0x1p30);
  }
  std::string library() const override {
    return fmt::format("{} on {} (compute {}.{})", CublasLt::version(), properties_.name,
                       properties_.major, properties_.minor);
  }
  DType storage(DType model) const override { return model; }
  std::span<const std::int64_t> tile_heights() const override { return kTileHeights; }

  Buffer allocate(std::int64_t bytes) override;
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
    cuda::copy_rows(out, out_stride, in, in_stride, rows, bytes, stream_);
  }
  void synchronize() override { check(cudaStreamSynchronize(stream_), "the GPU's work"); }

  Weight allocate_weight(const WeightShape& shape, DType model, GemmKernel kernel) override;
  void store_rows(Weight& weight, std::int64_t first_row, std::int64_t rows,
                  const std::byte* host) override;
  void prepare(const WeightShape& shape, DType storage, GemmKernel kernel,
               std::int64_t tile_rows) override;
  SelfCheck self_check(const WeightShape& shape, DType storage) override;

  void tile_rows(const std::byte* x, std::int64_t x_stride, DType model, std::int64_t columns,
                 const Tiles& out) override {
    const std::int64_t element = size_of(model);
    cuda::pad_rows(x, x_stride * element, out.rows, columns * element, out.data, out.padded_rows(),
                   out.width * element, stream_);
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
  void sum_roots(const RootSum& sum) override { cuda::sum_roots(sum, stream_); }
  void ungroup(const std::byte* in, DType dtype, std::int64_t rows, std::int64_t columns,
               std::byte* out) override {
    cuda::ungroup(in, size_of(dtype), rows, columns, out, stream_);
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
    check(cudaMemcpyAsync(out, in, static_cast<std::size_t>(bytes), kind, stream_), name);
  }
  void multiply(const Weight& weight, const std::byte* a, std::int64_t rows, float* c);
  template <typename Use>
  void gemm_tiles(const Weight& weight, const Tiles& in, const Use& use);

  cudaStream_t stream_;
  bool owns_stream_;
  int index_ = 0;
  cudaDeviceProp properties_{};
  CublasLt library_;
  std::map<CudaGemm::Shape, std::unique_ptr<CudaGemm>> gemms_;
  Buffer products_;  // of one tile
  Buffer staging_;
};

Buffer CudaDevice::allocate(std::int64_t bytes) {
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

Buffer CudaDevice::allocate_host(std::int64_t bytes) {
  void* data = nullptr;
  check(cudaMallocHost(&data, static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1))),
        "cudaMallocHost");
  return {static_cast<std::byte*>(data), {release_host, bytes}};
}

Weight CudaDevice::allocate_weight(const WeightShape& shape, DType model, GemmKernel kernel) {
  Weight weight{shape, storage(model), kernel, {}};
  const std::int64_t row_bytes = shape.padded_inputs() * size_of(weight.storage);
  weight.data = allocate(shape.groups() * kGroup * row_bytes);
  check(cudaMemsetAsync(weight.data.data(), 0, static_cast<std::size_t>(weight.data.bytes()),
                        stream_),
        "cudaMemsetAsync");
  const std::int64_t staged = std::max(kStagingBytes, row_bytes);
  if (staging_.bytes() < staged) staging_ = allocate(staged);
  return weight;
}

void CudaDevice::store_rows(Weight& weight, std::int64_t first_row, std::int64_t rows,
                            const std::byte* host) {
  const std::int64_t row_bytes = weight.shape.inputs * size_of(weight.storage);
  if (row_bytes == 0) return;
  const std::int64_t step = staging_.bytes() / row_bytes;
  for (std::int64_t at = 0; at < rows; at += step) {
    const std::int64_t part = std::min(step, rows - at);
    upload(staging_.data(), host + at * row_bytes, part * row_bytes);
    cuda::pack_weight_rows(weight, first_row + at, part, staging_.data(), stream_);
  }
}

void CudaDevice::prepare(const WeightShape& shape, DType storage, GemmKernel kernel,
                         std::int64_t tile_rows) {
  const CudaGemm::Shape wanted = gemm_shape(shape, storage, kernel, tile_rows);
  const std::int64_t bytes = wanted.rows * wanted.columns * size_of(DType::kF32);
  if (products_.bytes() < bytes) products_ = allocate(bytes);
  if (kernel == GemmKernel::kPlain || gemms_.contains(wanted)) return;
  std::unique_ptr<CudaGemm> gemm = CudaGemm::create(library_, wanted);
  if (gemm == nullptr) {
    throw Error(ExitCode::kBackend,
                fmt::format("cuBLASLt has no algorithm for {} x {} x {} in {} (rows, columns, "
                            "inputs); use another --dtype, or --device cpu",
                            wanted.rows, wanted.columns, wanted.inputs, name_of(storage)));
  }
  gemms_[wanted] = std::move(gemm);
}

SelfCheck CudaDevice::self_check(const WeightShape& shape, DType storage) {
  // Every call takes all columns, so that their number is no question.
  SelfCheck result{true, true, "", 0};
  Fnv1a fingerprint;
  for (const std::int64_t rows : kTileHeights) {
    const CudaGemm::Shape tile = gemm_shape(shape, storage, GemmKernel::kLibraryTiles, rows);
    const std::unique_ptr<CudaGemm> gemm = CudaGemm::create(library_, tile);
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
                         gemm->run(a.data(), w.data(), c.as<float>(), stream_);
                         download(reinterpret_cast<std::byte*>(host_c), c.data(), c.bytes());
                       });
    result.rows = result.rows && check.passed;
    result.kernel = gemm->algorithm();
    fingerprint.add_number(check.fingerprint).add(result.kernel);
  }
  result.fingerprint = fingerprint.value();
  return result;
}

void CudaDevice::multiply(const Weight& weight, const std::byte* a, std::int64_t rows, float* c) {
  const CudaGemm::Shape shape = gemm_shape(weight.shape, weight.storage, weight.kernel, rows);
  if (weight.kernel == GemmKernel::kPlain) {
    cuda::plain_gemm(weight.storage, a, rows, shape.inputs, weight.data.data(), shape.columns, c,
                     stream_);
  } else {
    gemms_.at(shape)->run(a, weight.data.data(), c, stream_);
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
  const std::int64_t row_bytes = h.width * size_of(model);
  gemm_tiles(weight, x, [&](std::int64_t first, const float* c) {
    cuda::activate_tile(activation, weight.shape, c, bias, x.tile_rows, model,
                        h.data + first * row_bytes, stream_);
  });
}

void CudaDevice::gemm_merge(const Weight& weight, const Tiles& h, const Partials& stack, int height,
                            int merges) {
  if (weight.kernel == GemmKernel::kLibraryWhole) {  // one root, made in place
    if (h.rows > 0) multiply(weight, h.data, h.rows, stack.data);
    return;
  }
  gemm_tiles(weight, h, [&](std::int64_t first, const float* c) {
    cuda::merge_tile(c, std::min(h.tile_rows, h.rows - first), stack, first, height, merges,
                     stream_);
  });
}

}  // namespace

int visible_cuda_devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::unique_ptr<Device> make_cuda_device(int local_rank) {
  // One visible GPU is this process's, whoever else is on the host.
  check(cudaSetDevice(local_rank % usable_devices()), "cudaSetDevice");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return std::make_unique<CudaDevice>(stream, StreamIs::kOwn);
}

std::unique_ptr<Device> make_cuda_device_on(cudaStream_t stream) {
  usable_devices();
  return std::make_unique<CudaDevice>(stream, StreamIs::kCallers);
}

cudaStream_t cuda_stream(const Device& device) {
  const auto* cuda = dynamic_cast<const CudaDevice*>(&device);
  if (cuda != nullptr) return cuda->stream();
  throw Error(ExitCode::kBackend,
              "the stream of a device without one (only a CUDA device has it); "
              "this is a fault of the program");
}

}  // namespace gatefold
