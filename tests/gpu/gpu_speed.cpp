// gpu_speed: what a GPU must be fast at, as ratios within one run. Each pass over the layer's
// weights (352 MB in bf16) pushes everything else out of the L2 cache, so that weights are always
// cold.
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "layers/mlp.h"
#include "layers/moe.h"
#include "parallel/grid.h"
#include "runtime/cuda_interop.h"
#include "runtime/cuda_kernels.h"
#include "runtime/error.h"
#include "tests/gpu/bare_gemm.h"
#include "tests/gpu/device_timer.h"
#include "tests/layers/memory_moe.h"
#include "tests/layers/memory_source.h"

namespace {

using namespace gatefold;
using gatefold_speed::BareGemm;
using gatefold_speed::DeviceTimer;
using gatefold_speed::median;
using gatefold_speed::median_ratio;
using gatefold_speed::require;

constexpr std::size_t kWorkspace = std::size_t{32} << 20;

struct Plan {
  std::int64_t hidden;
  std::int64_t intermediate;
  std::vector<std::int64_t> tokens;
  int repeats;
  bool is_speed;  // not on a stand-in
  gatefold::testing::MoeShape moe;
  std::int64_t moe_tokens;
};

/// Prints rows, and remembers whether a demand was missed.
class Table {
 public:
  explicit Table(bool is_speed) : is_speed_(is_speed) {
    std::printf("%-44s %7s %10s %7s  %s\n", "#", "tokens", "us", "ratio", "demand");
  }
  enum class Bound { kNone, kAtLeast, kAtMost };
  void row(const std::string& what, std::int64_t tokens, double seconds, double ratio,
           Bound bound = Bound::kNone, double limit = 0) {
    const auto shown = static_cast<long long>(tokens);
    if (!is_speed_) {
      std::printf("%-44s %7lld %10s %7s  %s\n", what.c_str(), shown, "-", "-",
                  "not a speed: FakeGPU");
      return;
    }
    const bool met =
        bound == Bound::kNone || (bound == Bound::kAtLeast ? ratio >= limit : ratio <= limit);
    failed_ = failed_ || !met;
    char demand[64] = "";
    if (bound != Bound::kNone) {
      std::snprintf(demand, sizeof(demand), "%s %.2f %s",
                    bound == Bound::kAtLeast ? ">=" : "<=", limit, met ? "OK" : "MISSED");
    }
    std::printf("%-44s %7lld %10.1f %7.3f  %s\n", what.c_str(), shown, seconds * 1e6, ratio,
                demand);
  }
  bool failed() const { return failed_; }

 private:
  bool is_speed_;
  bool failed_ = false;
};

/// Device memory with bf16 noise, or none in particular.
struct Memory {
  Buffer buffer;
  Memory(Device& device, std::int64_t bytes) : buffer(device.allocate(bytes)) {}
  Memory(Device& device, std::int64_t values, std::uint64_t seed)
      : buffer(device.allocate(values * 2)) {
    const std::vector<std::byte> host =
        gatefold::testing::in_dtype(gatefold::testing::noise(values, seed, 0.1F), DType::kBf16);
    device.upload(buffer.data(), host.data(), buffer.bytes());
  }
  void* get() const { return buffer.data(); }
};

/// silu_and_mul of fp32 gate and up to bf16 h, against a copy that moves as many bytes.
void time_activation(const Plan& plan, Device& device, DeviceTimer& timer, Table& table) {
  const std::int64_t rows = plan.tokens.back();
  const WeightShape shape{plan.intermediate, plan.hidden, true};
  const Memory products(device, rows * 2 * plan.intermediate * 4);
  const Memory h(device, rows * plan.intermediate * 2);
  const std::int64_t moved = products.buffer.bytes() + h.buffer.bytes();
  const Memory from(device, moved / 2);
  const Memory to(device, moved / 2);
  for (const Memory* memory : {&products, &from}) {
    require(cudaMemsetAsync(memory->get(), 0x3e, static_cast<std::size_t>(memory->buffer.bytes()),
                            timer.stream()));
  }
  Activation activation;
  activation.gated = true;
  std::vector<double> ours;
  std::vector<double> copies;
  for (int i = -3; i < plan.repeats; ++i) {
    const double our = timer.seconds([&] {
      cuda::activate_tile(activation, shape, products.buffer.as<float>(), nullptr, rows,
                          DType::kBf16, h.buffer.data(), timer.stream());
    });
    const double copy = timer.seconds([&] {
      require(cudaMemcpyAsync(to.get(), from.get(), static_cast<std::size_t>(moved / 2),
                              cudaMemcpyDeviceToDevice, timer.stream()));
    });
    if (i < 0) continue;
    ours.push_back(our);
    copies.push_back(copy);
  }
  table.row("copy on the device, as many bytes", rows, median(copies), 1);
  table.row("silu_and_mul: speed / copy's", rows, median(ours), median_ratio(copies, ours),
            Table::Bound::kAtLeast, 0.92);
}

/// gate_up as one GEMM or as two, then down, each by the best algorithm.
class BareLayer {
 public:
  BareLayer(const Plan& plan, std::int64_t rows, cudaDataType output, cublasLtHandle_t handle,
            Device& device, DeviceTimer& timer, const Memory& weights)
      : weights_(weights),
        timer_(timer),
        in_(device, rows * std::max(plan.hidden, plan.intermediate), 7),
        out_(device, rows * 2 * plan.intermediate * 4),
        workspace_(device, kWorkspace),
        up_bytes_(plan.hidden * plan.intermediate * 2),
        merged_(handle, {rows, 2 * plan.intermediate, plan.hidden, output}),
        single_(handle, {rows, plan.intermediate, plan.hidden, output}),
        down_(handle, {rows, plan.hidden, plan.intermediate, output}) {
    merged_.choose(timer, in_.get(), weight(0), out_.get(), workspace_.get(), kWorkspace);
    single_.choose(timer, in_.get(), weight(0), out_.get(), workspace_.get(), kWorkspace);
    down_.choose(timer, in_.get(), weight(2), out_.get(), workspace_.get(), kWorkspace);
    // Each way after a pass over the other weights.
    std::vector<double> one;
    std::vector<double> two;
    for (int i = 0; i < 5; ++i) {
      for (const bool merge : {true, false}) {
        merge_ = merge;
        (merge ? one : two).push_back(seconds());
      }
    }
    merge_ = median(one) <= median(two);
  }

  double seconds() {
    return timer_.seconds([&] {
      cudaStream_t stream = timer_.stream();
      if (merge_) {
        merged_.run(in_.get(), weight(0), out_.get(), stream);
      } else {
        single_.run(in_.get(), weight(0), out_.get(), stream);
        single_.run(in_.get(), weight(1), out_.get(), stream);
      }
      down_.run(in_.get(), weight(2), out_.get(), stream);
    });
  }
  const char* gate_up() const { return merge_ ? "gate_up as one" : "gate and up apart"; }

 private:
  const std::byte* weight(int i) const { return weights_.buffer.data() + i * up_bytes_; }

  const Memory& weights_;  // gate, up, down
  DeviceTimer& timer_;
  Memory in_;
  Memory out_;
  Memory workspace_;
  std::int64_t up_bytes_;
  BareGemm merged_;
  BareGemm single_;
  BareGemm down_;
  bool merge_ = true;
};

Mlp make_layer(const gatefold::testing::MemoryFfn& ffn, Device& device, Communicator& alone,
               Reduce reduce) {
  MlpOptions options;
  options.linear.dtype = DType::kBf16;
  options.linear.blocks = 8;
  options.linear.reduce = reduce;
  return Mlp(ffn.spec, ffn.source, {&device, &alone}, options);
}

/// |a - b| / |b|: both ways must have computed the same layer. NaN never passes.
bool close(Device& device, const Memory& a, const Memory& b) {
  double difference = 0;
  double size = 0;
  std::vector<std::vector<float>> values;
  for (const Memory* y : {&a, &b}) {
    std::vector<std::byte> host(static_cast<std::size_t>(y->buffer.bytes()));
    device.download(host.data(), y->buffer.data(), y->buffer.bytes());
    values.push_back(gatefold::testing::as_floats(host, DType::kBf16));
  }
  for (std::size_t i = 0; i < values[0].size(); ++i) {
    const double x = static_cast<double>(values[0][i]);
    const double y = static_cast<double>(values[1][i]);
    difference += (x - y) * (x - y);
    size += y * y;
  }
  return size > 0 && std::sqrt(difference / size) < 0.01;
}

/// Returns whether the exact and the fast layer agree.
bool time_layers(const Plan& plan, Device& device, DeviceTimer& timer, Table& table) {
  const auto alone = make_self_communicator();
  const gatefold::testing::MemoryFfn ffn({plan.hidden, plan.intermediate});
  Mlp exact = make_layer(ffn, device, *alone, Reduce::kExact);
  Mlp fast = make_layer(ffn, device, *alone, Reduce::kFast);
  const Memory weights(device, 3 * plan.hidden * plan.intermediate, 5);
  cublasLtHandle_t handle = nullptr;
  require(cublasLtCreate(&handle));
  bool same = true;
  for (const std::int64_t tokens : plan.tokens) {
    const RowCount rows{tokens, tokens};
    const Memory x(device, tokens * plan.hidden, 3);
    const Memory y_exact(device, tokens * plan.hidden * 2);
    const Memory y_fast(device, tokens * plan.hidden * 2);
    const auto forward = [&](Mlp& mlp, const Memory& y) {
      return timer.seconds([&] { mlp.forward(x.buffer.data(), rows, y.buffer.data()); });
    };
    exact.reserve(rows);
    fast.reserve(rows);
    BareLayer bare(plan, tokens, CUDA_R_16BF, handle, device, timer, weights);
    BareLayer wide(plan, tokens, CUDA_R_32F, handle, device, timer, weights);
    std::vector<double> exact_seconds;
    std::vector<double> fast_seconds;
    std::vector<double> bare_seconds;
    std::vector<double> wide_seconds;
    for (int i = -3; i < plan.repeats; ++i) {
      const double times[] = {forward(exact, y_exact), forward(fast, y_fast), bare.seconds(),
                              wide.seconds()};
      if (i < 0) continue;
      exact_seconds.push_back(times[0]);
      fast_seconds.push_back(times[1]);
      bare_seconds.push_back(times[2]);
      wide_seconds.push_back(times[3]);
    }
    const bool judged = tokens >= 16;
    const bool large = tokens >= 512;
    using enum Table::Bound;
    table.row(std::string("bare best GEMMs, bf16 out, ") + bare.gate_up(), tokens,
              median(bare_seconds), 1);
    table.row(std::string("bare best GEMMs, fp32 out, ") + wide.gate_up(), tokens,
              median(wide_seconds), median_ratio(wide_seconds, bare_seconds));
    table.row("layer, fast / bare best GEMMs", tokens, median(fast_seconds),
              median_ratio(fast_seconds, bare_seconds), judged ? kAtMost : kNone, 1.06);
    table.row("layer, exact / fast", tokens, median(exact_seconds),
              median_ratio(exact_seconds, fast_seconds), large ? kAtMost : kNone, 1.15);
    if (!close(device, y_exact, y_fast)) {
      std::printf("%lld tokens: exact and fast differ by more than rounding\n",
                  static_cast<long long>(tokens));
      same = false;
    }
  }
  cublasLtDestroy(handle);
  return same;
}

template <typename T>
Buffer on_device(Device& device, const std::vector<T>& values) {
  Buffer buffer = device.allocate(static_cast<std::int64_t>(values.size() * sizeof(T)));
  device.upload(buffer.data(), reinterpret_cast<const std::byte*>(values.data()), buffer.bytes());
  return buffer;
}

/// What moves rows to their experts and sums back, each against a copy that moves as many bytes.
class RowMoves {
 public:
  RowMoves(const Plan& plan, Device& device, DeviceTimer& timer)
      : hidden_(plan.moe.hidden),
        tokens_(plan.moe_tokens),
        top_k_(plan.moe.top_k),
        repeats_(plan.repeats),
        device_(device),
        timer_(timer),
        x_(device, tokens_ * hidden_, 3),
        wide_(device, rows() * hidden_ * 4),
        sums_(device, rows() * hidden_ * 4),
        y_(device, tokens_ * hidden_ * 2) {
    std::vector<std::int32_t> index;   // of a row's token: tokens far apart, as experts have them
    std::vector<std::int32_t> own;     // each row's own number
    std::vector<std::int32_t> begin;   // of a token's roots
    std::vector<std::int32_t> merges;  // of a token's roots: one after the other
    for (std::int64_t row = 0; row < rows(); ++row) {
      index.push_back(static_cast<std::int32_t>(row * 1009 % tokens_));
      own.push_back(static_cast<std::int32_t>(row));
      merges.push_back(row % top_k_ == 0 ? 0 : 1);
    }
    for (std::int64_t t = 0; t <= tokens_; ++t) {
      begin.push_back(static_cast<std::int32_t>(t * top_k_));
    }
    index_ = on_device(device, index);
    own_ = on_device(device, own);
    none_ = on_device(device, std::vector<std::int32_t>(as_size(rows() + 1), 0));
    begin_ = on_device(device, begin);
    merges_ = on_device(device, merges);
    weights_ = on_device(device, std::vector<float>(as_size(rows()), 0.125F));
    require(cudaMemsetAsync(wide_.get(), 0x3c, static_cast<std::size_t>(wide_.buffer.bytes()),
                            timer.stream()));
  }

  void time_all(Table& table) {
    const std::int64_t row_bytes = hidden_ * 2;
    const Tiles tiles{sums_.buffer.data(), rows(), 64, hidden_};
    time(table, "permute: speed / copy's", 2 * rows() * row_bytes, [&] {
      device_.tile_rows({x_.buffer.data(), hidden_, index_.as<std::int32_t>(), nullptr},
                        DType::kBf16, hidden_, tiles);
    });
    WeighedRows weighed;
    weighed.rows = wide_.buffer.as<float>();
    weighed.count = rows();
    weighed.groups = hidden_ / kGroup;
    weighed.group_stride = rows() * kGroup;
    weighed.weights = weights_.as<float>();
    weighed.merge_begin = none_.as<std::int32_t>();
    weighed.merges = none_.as<std::int32_t>();
    weighed.targets = own_.as<std::int32_t>();
    weighed.sums = sums_.buffer.as<float>();
    time(table, "weigh rows: speed / copy's", 4 * rows() * row_bytes,
         [&] { device_.weigh_rows(weighed); });
    CombinedRows combined;
    combined.sums = sums_.buffer.as<float>();
    combined.begin = begin_.as<std::int32_t>();
    combined.roots = own_.as<std::int32_t>();
    combined.merges = merges_.as<std::int32_t>();
    combined.tokens = tokens_;
    combined.groups = hidden_ / kGroup;
    combined.columns = hidden_;
    combined.row_stride = hidden_;
    combined.dtype = DType::kBf16;
    combined.y = y_.buffer.data();
    time(table, "unpermute: speed / copy's", 2 * rows() * row_bytes + tokens_ * row_bytes,
         [&] { device_.combine_rows(combined); });
  }

 private:
  static std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }
  std::int64_t rows() const { return tokens_ * top_k_; }

  template <typename Move>
  void time(Table& table, const char* what, std::int64_t moved, const Move& move) {
    const Memory from(device_, moved / 2);
    const Memory to(device_, moved / 2);
    std::vector<double> ours;
    std::vector<double> copies;
    for (int i = -3; i < repeats_; ++i) {
      const double our = timer_.seconds(move);
      const double copy = timer_.seconds([&] {
        require(cudaMemcpyAsync(to.get(), from.get(), as_size(moved / 2), cudaMemcpyDeviceToDevice,
                                timer_.stream()));
      });
      if (i < 0) continue;
      ours.push_back(our);
      copies.push_back(copy);
    }
    table.row(what, tokens_, median(ours), median_ratio(copies, ours), Table::Bound::kAtLeast,
              0.80);
  }

  std::int64_t hidden_;
  std::int64_t tokens_;
  std::int64_t top_k_;
  int repeats_;
  Device& device_;
  DeviceTimer& timer_;
  Memory x_;
  Memory wide_;
  Memory sums_;
  Memory y_;
  Buffer index_;
  Buffer own_;
  Buffer none_;
  Buffer begin_;
  Buffer merges_;
  Buffer weights_;
};

/// A mixture of experts against a dense layer of equal work in fast mode, both whole.
void time_experts(const Plan& plan, Device& device, DeviceTimer& timer, Table& table) {
  const auto alone = make_self_communicator();
  const Grid grid(*alone, 1, 1);
  const gatefold::testing::MemoryMoe moe_weights(plan.moe);
  MoeOptions options;
  options.linear.dtype = DType::kBf16;
  Moe moe(moe_weights.spec, moe_weights.source, {&device, alone.get(), &grid.tp(), &grid.etp()},
          options);
  const gatefold::testing::MemoryFfn dense_weights(
      {plan.moe.hidden, plan.moe.top_k * plan.moe.intermediate});
  Mlp dense = make_layer(dense_weights, device, *alone, Reduce::kFast);
  const RowCount rows{plan.moe_tokens, plan.moe_tokens};
  const Memory x(device, plan.moe_tokens * plan.moe.hidden, 3);
  const Memory y(device, plan.moe_tokens * plan.moe.hidden * 2);
  moe.reserve(rows);
  dense.reserve(rows);
  std::vector<double> moe_seconds;
  std::vector<double> dense_seconds;
  for (int i = -3; i < plan.repeats; ++i) {
    const double times[] = {
        timer.seconds([&] { moe.forward(x.buffer.data(), rows, y.buffer.data()); }),
        timer.seconds([&] { dense.forward(x.buffer.data(), rows, y.buffer.data()); })};
    if (i < 0) continue;
    moe_seconds.push_back(times[0]);
    dense_seconds.push_back(times[1]);
  }
  table.row("dense layer of the experts' work, fast", plan.moe_tokens, median(dense_seconds), 1);
  table.row("experts, exact: rate / dense's", plan.moe_tokens, median(moe_seconds),
            median_ratio(dense_seconds, moe_seconds), Table::Bound::kAtLeast, 0.85);
}

int run() {
  cudaDeviceProp device_properties{};
  require(cudaGetDeviceProperties(&device_properties, 0));
  const bool is_speed = std::strstr(device_properties.name, "FakeGPU") == nullptr;
  // The experts are qwen3-30b-a3b's.
  const Plan plan = is_speed
                        ? Plan{4096, 14336, {1, 16, 512, 4096}, 30, true, {2048, 768, 128, 8}, 4096}
                        : Plan{128, 192, {1, 16}, 1, false, {128, 64, 4, 2}, 16};
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  bool good = true;
  {
    const auto device = make_cuda_device_on(stream);
    std::printf(
        "# %s; %s\n# H %lld, I %lld, bf16, weights cold, medians of %d interleaved repeats\n",
        device->description().c_str(), device->library().c_str(),
        static_cast<long long>(plan.hidden), static_cast<long long>(plan.intermediate),
        plan.repeats);
    DeviceTimer timer(stream);
    Table table(plan.is_speed);
    time_activation(plan, *device, timer, table);
    const bool same = time_layers(plan, *device, timer, table);
    RowMoves(plan, *device, timer).time_all(table);
    time_experts(plan, *device, timer, table);
    good = same && !table.failed();
  }
  require(cudaStreamDestroy(stream));
  return good ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const Error& error) {
    std::fprintf(stderr, "gpu_speed: %s\n", error.what());
    return static_cast<int>(error.code());
  }
}
