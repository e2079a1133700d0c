#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string_view>

#include "launch/job.h"
#include "parallel/agreement.h"

namespace gatefold {
namespace {

/// Weights of all variants together, at most: what is left of rotation on small machines.
constexpr std::int64_t kMostWeightBytes = std::int64_t{6} << 30;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::int64_t last_level_cache() {
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return bytes > 0 ? bytes : std::int64_t{32} << 20;
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const auto last = static_cast<double>(values.size() - 1);
  return values[static_cast<std::size_t>(std::lround(q * last))];
}

/// Ranks that slept through another's turn wake up to a polling step apart; the second barrier
/// finds all of them awake.
void meet(Communicator& world) {
  world.barrier();
  world.barrier();
}

double median(const std::vector<double>& values) { return quantile(values, 0.5); }

/// The median of a[i] ÷ b[i]: drift of the machine's speed cancels.
double median_ratio(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < a.size(); ++i) ratios.push_back(a[i] / b[i]);
  return median(ratios);
}

Buffer zeros(Device& device, std::int64_t bytes) {
  Buffer memory = device.allocate(bytes);
  const std::vector<std::byte> piece(std::size_t{1} << 20);
  for (std::int64_t at = 0; at < bytes;) {
    const std::int64_t n = std::min(bytes - at, static_cast<std::int64_t>(piece.size()));
    device.upload(memory.data() + at, piece.data(), n);
    at += n;
  }
  return memory;
}

/// One way to run the layer: exact or fast, on all ranks or on rank 0 alone.
struct Variant {
  Reduce reduce = Reduce::kExact;
  bool alone = false;
  std::vector<std::unique_ptr<Mlp>> copies;  // the same layer in different memory
  std::optional<DevicePass> pass;            // on the ranks that take part
  std::vector<double> seconds;               // of each iteration, the slowest rank's
};

/// What time_sums() needs: roots as this rank's blocks leave them.
struct Sums {
  SumTree canonical;
  std::vector<Range> runs;
  TreeSum tree;
  Buffer memory;
  Buffer out;
  Buffer values;
  Partials partials;

  Sums(const Job& job, const FfnSpec& spec, std::int64_t rows)
      : canonical({spec.intermediate_size, job.options().blocks}),
        runs(runs_of(job)),
        tree(job.tp(), job.device(), canonical, runs, spec.hidden_size) {
    Device& device = job.device();
    const std::int64_t groups = ceil_div(spec.hidden_size, kGroup);
    const std::int64_t slot = groups * rows * kGroup;
    const Range own = runs[static_cast<std::size_t>(job.tp().rank())];
    const std::int64_t bytes = canonical.local_plan(own).roots * slot * size_of(DType::kF32);
    tree.reserve(rows, job.dtype());
    memory = zeros(device, bytes);
    values = zeros(device, slot * size_of(DType::kF32));
    out = device.allocate(slot * size_of(DType::kF32));
    partials = {memory.as<float>(), rows, groups, kGroup, rows * kGroup, slot};
  }
  static std::vector<Range> runs_of(const Job& job) {
    std::vector<Range> all;
    for (int r = 0; r < job.tp().size(); ++r) {
      all.push_back(owned_blocks(job.options().blocks, job.tp().size(), r));
    }
    return all;
  }
};

/// Gate and up as one whole GEMM or as two, on rank 0: the better one is what "plain" means.
struct GateUp {
  Weight merged;
  Weight gate;
  Weight up;
};

class LayerBench {
 public:
  LayerBench(Job& job, std::int64_t layer);
  void run();
  void add_rows(Report& report) const;
  const KernelChoice& kernel() const { return kernel_; }
  /// Values whose bits differ between all ranks and one; nothing where none was compared.
  std::optional<std::int64_t> wrong() const { return wrong_; }

 private:
  void make_copies();
  void time_variant(Variant& variant, std::size_t iteration, bool counted);
  void time_read(int readers, std::vector<double>& seconds, bool counted);
  void make_gate_up(std::int64_t copies);
  void time_gate_up(std::size_t iteration, bool counted);
  void time_sums(std::size_t iteration, bool counted);
  void slowest_of_ranks(std::vector<double>& seconds) const;
  void compare_outputs();
  std::int64_t weight_bytes() const { return spec_.parameters() * size_of(batch_.dtype); }
  const Variant* find(Reduce reduce, bool alone) const;

  Job& job_;
  FfnSpec spec_;
  std::int64_t layer_;
  TokenBatch batch_;
  Range own_;
  KernelChoice kernel_;
  std::unique_ptr<Communicator> self_ = make_self_communicator();
  std::vector<Variant> variants_;

  Buffer read_memory_;
  std::int64_t read_at_ = 0;
  std::uint64_t read_sum_ = 0;
  std::vector<double> read_seconds_;         // rank 0 alone
  std::vector<double> shared_read_seconds_;  // all ranks, a share each: the slowest
  std::vector<double> one_gemm_seconds_;
  std::vector<double> two_gemm_seconds_;
  std::vector<GateUp> gate_up_;
  Buffer gate_up_out_;
  Buffer gate_up_in_;
  std::unique_ptr<Sums> sums_;
  std::vector<double> tree_seconds_;
  std::vector<double> allreduce_seconds_;
  std::optional<std::int64_t> wrong_;
};

LayerBench::LayerBench(Job& job, std::int64_t layer)
    : job_(job),
      spec_(job.layer_spec(layer)),
      layer_(layer),
      batch_(job.tokens(spec_.hidden_size)),
      own_(job.own_tokens(batch_.tokens)),
      kernel_(job.kernel(spec_)) {
  for (const Reduce reduce : {Reduce::kExact, Reduce::kFast}) {
    variants_.push_back({reduce, false, {}, {}, {}});
    if (job.world().size() > 1) variants_.push_back({reduce, true, {}, {}, {}});
  }
  make_copies();
}

/// Enough copies that twice the last-level cache passes by before memory is used again.
void LayerBench::make_copies() {
  const std::int64_t per_round = weight_bytes() * static_cast<std::int64_t>(variants_.size());
  const std::int64_t wanted = ceil_div(2 * last_level_cache(), per_round) + 1;
  const std::int64_t most = std::max<std::int64_t>(1, kMostWeightBytes / per_round);
  const std::int64_t copies = job_.options().hot ? 1 : std::min(wanted, most);
  Communicator& world = job_.world();
  world.progress().enter("loading weights");
  for (Variant& variant : variants_) {
    const RowCount rows = variant.alone ? RowCount{batch_.tokens, batch_.tokens}
                                        : RowCount{own_.size(), batch_.tokens};
    MlpOptions options = job_.mlp_options(kernel_);
    options.linear.reduce = variant.reduce;
    if (variant.reduce == Reduce::kFast) options.linear.kernel.reset();
    run_agreed(world, [&] {
      if (variant.alone && world.rank() != 0) return;
      Communicator& comm = variant.alone ? *self_ : job_.tp();
      variant.pass.emplace(job_.device(), batch_.row(variant.alone ? 0 : own_.begin), rows,
                           batch_.row_bytes());
      for (std::int64_t i = 0; i < copies; ++i) {
        variant.copies.push_back(
            std::make_unique<Mlp>(spec_, job_.source(), Place{&job_.device(), &comm}, options));
        variant.copies.back()->reserve(rows);
        world.progress().tick();
      }
    });
  }
  run_agreed(world, [&] {
    if (job_.tp().size() > 1) sums_ = std::make_unique<Sums>(job_, spec_, own_.size());
    // Host memory, whatever the layer runs on: the CPU reads it. All of it on rank 0, else a share.
    const std::int64_t share = world.rank() == 0 ? weight_bytes() : weight_bytes() / world.size();
    read_memory_ = zeros(*make_cpu_device(1), share * copies);
    if (world.rank() != 0) return;
    if (spec_.gated()) make_gate_up(copies);
  });
}

void LayerBench::time_variant(Variant& variant, std::size_t iteration, bool counted) {
  Communicator& world = job_.world();
  meet(world);
  const double start = now();
  if (!variant.copies.empty()) {
    Mlp& mlp = *variant.copies[iteration % variant.copies.size()];
    variant.pass->forward(mlp);
    job_.device().synchronize();
  }
  if (counted) variant.seconds.push_back(now() - start);
}

/// A plain read of as many bytes as the layer's weights have, a share by each of the first ranks.
void LayerBench::time_read(int readers, std::vector<double>& seconds, bool counted) {
  meet(job_.world());
  if (job_.world().rank() >= readers) return;
  const std::int64_t bytes = weight_bytes() / readers;
  if (read_at_ + bytes > read_memory_.bytes()) read_at_ = 0;
  const auto* data = reinterpret_cast<const std::uint64_t*>(read_memory_.data() + read_at_);
  const auto words = static_cast<std::size_t>(bytes / 8);
  constexpr std::size_t kLanes = 32;
  std::array<std::uint64_t, kLanes> sum{};
  const double start = now();
  for (std::size_t i = 0; i + kLanes <= words; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) sum[lane] ^= data[i + lane];
  }
  if (counted) seconds.push_back(now() - start);
  for (const std::uint64_t lane : sum) read_sum_ ^= lane;
  read_at_ += round_up(bytes, 64);
}

void LayerBench::make_gate_up(std::int64_t copies) {
  Device& device = job_.device();
  const std::int64_t width = spec_.intermediate_size;
  const std::int64_t rows = std::max<std::int64_t>(1, batch_.tokens);
  const auto weight = [&](std::int64_t outputs) {
    const WeightShape shape{outputs, spec_.hidden_size, false};
    device.prepare(shape, device.storage(batch_.dtype), GemmKernel::kLibraryWhole, rows);
    return device.allocate_weight(shape, batch_.dtype, GemmKernel::kLibraryWhole);
  };
  for (std::int64_t i = 0; i < copies; ++i) {
    gate_up_.push_back({weight(2 * width), weight(width), weight(width)});
  }
  gate_up_in_ =
      zeros(device, rows * round_up(spec_.hidden_size, kInnerStep) * size_of(DType::kF32));
  gate_up_out_ = device.allocate(rows * round_up(2 * width, kInnerStep) * size_of(DType::kF32));
}

void LayerBench::time_gate_up(std::size_t iteration, bool counted) {
  meet(job_.world());
  if (gate_up_.empty()) return;
  const GateUp& weights = gate_up_[iteration % gate_up_.size()];
  const Tiles x{gate_up_in_.data(), batch_.tokens, std::max<std::int64_t>(1, batch_.tokens),
                round_up(spec_.hidden_size, kInnerStep)};
  const auto run = [&](const Weight& weight) {
    job_.device().gemm_merge(weight, x, {gate_up_out_.as<float>(), batch_.tokens, 0, 0, 0, 0}, 0,
                             0);
    job_.device().synchronize();
  };
  const double start = now();
  run(weights.merged);
  const double middle = now();
  run(weights.gate);
  run(weights.up);
  if (!counted) return;
  one_gemm_seconds_.push_back(middle - start);
  two_gemm_seconds_.push_back(now() - middle);
}

/// The canonical sum of [T, H] against the library's all-reduce of as many fp32 values. They take
/// turns at being first: rank 0 was busy alone before, and what comes first meets cold caches.
void LayerBench::time_sums(std::size_t iteration, bool counted) {
  if (!sums_) return;
  const auto timed = [&](std::vector<double>& seconds, const auto& sum) {
    meet(job_.world());
    const double start = now();
    sum();
    if (counted) seconds.push_back(now() - start);
  };
  const auto canonical = [&] {
    sums_->tree.sum(sums_->partials, nullptr, batch_.dtype, Rows::kReplicated, sums_->out.data());
    job_.device().synchronize();
  };
  const auto library = [&] {
    job_.tp().all_reduce(sums_->values.as<float>(), own_.size() * spec_.hidden_size);
  };
  if (iteration % 2 == 0) timed(tree_seconds_, canonical);
  timed(allreduce_seconds_, library);
  if (iteration % 2 == 1) timed(tree_seconds_, canonical);
}

void LayerBench::run() {
  Communicator& world = job_.world();
  const Options& options = job_.options();
  world.progress().enter("the benchmark");
  const std::int64_t rounds = options.warmup + options.iterations;
  for (std::int64_t i = 0; i < rounds; ++i) {
    const bool counted = i >= options.warmup;
    for (Variant& variant : variants_) time_variant(variant, static_cast<std::size_t>(i), counted);
    time_read(1, read_seconds_, counted);
    if (world.size() > 1) time_read(world.size(), shared_read_seconds_, counted);
    time_gate_up(static_cast<std::size_t>(i), counted);
    time_sums(static_cast<std::size_t>(i), counted);
  }
  for (Variant& variant : variants_) {
    if (!variant.alone) slowest_of_ranks(variant.seconds);
  }
  slowest_of_ranks(shared_read_seconds_);
  slowest_of_ranks(tree_seconds_);
  slowest_of_ranks(allreduce_seconds_);
  if (options.check) compare_outputs();
}

void LayerBench::slowest_of_ranks(std::vector<double>& seconds) const {
  const auto ranks = static_cast<std::size_t>(job_.world().size());
  const std::size_t n = seconds.size();
  std::vector<double> all(ranks * n);
  std::copy(seconds.begin(), seconds.end(),
            all.begin() + job_.world().rank() * static_cast<std::ptrdiff_t>(n));
  const std::vector<std::int64_t> parts(ranks, static_cast<std::int64_t>(n * sizeof(double)));
  job_.world().all_gather_v(reinterpret_cast<std::byte*>(all.data()), parts);
  for (std::size_t r = 0; r < ranks; ++r) {
    for (std::size_t i = 0; i < n; ++i) seconds[i] = std::max(seconds[i], all[r * n + i]);
  }
}

const Variant* LayerBench::find(Reduce reduce, bool alone) const {
  for (const Variant& variant : variants_) {
    if (variant.reduce == reduce && variant.alone == alone) return &variant;
  }
  return nullptr;
}

/// Counts the values of the exact output that differ between all ranks and rank 0 alone.
void LayerBench::compare_outputs() {
  const Variant* all = find(Reduce::kExact, false);
  const Variant* one = find(Reduce::kExact, true);
  if (one == nullptr || batch_.tokens == 0) return;
  std::vector<std::byte> expected;
  std::vector<std::byte> found;
  run_agreed(job_.world(), [&] {
    found = all->pass->y();
    expected.resize(batch_.x.size());
    if (one->pass) expected = one->pass->y();
  });
  job_.world().broadcast(expected.data(), static_cast<std::int64_t>(expected.size()), 0);
  const auto element = static_cast<std::size_t>(size_of(batch_.dtype));
  std::int64_t mine = 0;
  const std::byte* own = expected.data() + own_.begin * batch_.row_bytes();
  for (std::size_t i = 0; i < found.size(); i += element) {
    mine += std::memcmp(found.data() + i, own + i, element) != 0 ? 1 : 0;
  }
  std::vector<std::int64_t> counts(static_cast<std::size_t>(job_.world().size()));
  counts[static_cast<std::size_t>(job_.world().rank())] = mine;
  all_gather<std::int64_t>(job_.world(), counts);
  wrong_ = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

Cell integer(std::int64_t value) {
  return Cell::of(static_cast<double>(value), fmt::format("{}", value));
}
Cell decimal(double value, int digits) {
  return Cell::of(value, fmt::format("{:.{}f}", value, digits));
}

void LayerBench::add_rows(Report& report) const {
  const auto tokens = static_cast<double>(batch_.tokens);
  const auto bytes = static_cast<double>(weight_bytes());
  const double flops = 2 * tokens * static_cast<double>(spec_.parameters());
  for (const Variant& variant : variants_) {
    const double time = median(variant.seconds);
    const Variant* fast = find(Reduce::kFast, variant.alone);
    const Variant* one = find(variant.reduce, true);
    const double speed_up =
        one == nullptr || variant.alone ? 1 : median_ratio(one->seconds, variant.seconds);
    const bool exact = variant.reduce == Reduce::kExact;
    report.row({integer(layer_), integer(batch_.tokens),
                integer(variant.alone ? 1 : job_.grid().tp().size()),
                integer(variant.alone ? 1 : job_.grid().dp_size()),
                Cell::of(exact ? "exact" : "fast"), decimal(time * 1e6, 1),
                decimal(quantile(variant.seconds, 0) * 1e6, 1),
                decimal(quantile(variant.seconds, 0.9) * 1e6, 1),
                decimal(quantile(variant.seconds, 1) * 1e6, 1), decimal(tokens / time, 0),
                decimal(flops / time * 1e-12, 3), decimal(bytes / time * 1e-9, 2),
                decimal(median_ratio(variant.seconds, fast->seconds), 3), decimal(speed_up, 2),
                exact && !variant.alone && wrong_ ? integer(*wrong_) : Cell::of("-")});
  }
  const Variant* alone = find(Reduce::kExact, job_.world().size() > 1);
  report.note(fmt::format(
      "layer {}: plain read of the weights' {} on one rank: {:.1f} us, {:.2f} GB/s; "
      "read / exact on one rank {:.3f}",
      layer_, human(bytes, "B"), median(read_seconds_) * 1e6, bytes / median(read_seconds_) * 1e-9,
      median_ratio(read_seconds_, alone->seconds)));
  if (!shared_read_seconds_.empty()) {
    report.note(
        fmt::format("layer {}: the same read shared by {} ranks: {:.1f} us, speed-up {:.2f}",
                    layer_, job_.world().size(), median(shared_read_seconds_) * 1e6,
                    median_ratio(read_seconds_, shared_read_seconds_)));
  }
  if (!one_gemm_seconds_.empty()) {
    const double one = median(one_gemm_seconds_);
    const double two = median(two_gemm_seconds_);
    const double fast = median(find(Reduce::kFast, job_.world().size() > 1)->seconds);
    // The whole pass took less than its own GEMM: noise, and no ratio.
    const std::string ratio =
        fast <= one
            ? "-"
            : fmt::format("{:.3f}", median(alone->seconds) / (fast - std::max(0.0, one - two)));
    report.note(
        fmt::format("layer {}: gate and up as one plain GEMM {:.1f} us, as two {:.1f} us; exact / "
                    "best plain on one rank {}",
                    layer_, one * 1e6, two * 1e6, ratio));
  }
  if (!tree_seconds_.empty()) {
    const auto sum_bytes = static_cast<double>(own_.size() * spec_.hidden_size * 4);
    report.note(fmt::format(
        "layer {}: sum of {} fp32 over tp {}: canonical {:.1f} us, library's "
        "all-reduce {:.1f} us, library / canonical {:.2f}",
        layer_, human(sum_bytes, "B"), job_.tp().size(), median(tree_seconds_) * 1e6,
        median(allreduce_seconds_) * 1e6, median_ratio(allreduce_seconds_, tree_seconds_)));
  }
}

std::string verdict(const Job& job, std::optional<std::int64_t> wrong) {
  constexpr std::string_view kName = "Out of bounds values :";
  if (wrong) return fmt::format("{} {} {}", kName, *wrong, *wrong == 0 ? "OK" : "FAILED");
  return fmt::format("{} not checked ({})", kName,
                     !job.options().check     ? "--no-check"
                     : job.world().size() > 1 ? "there are no tokens"
                                              : "one rank has none to compare with; see verify");
}

}  // namespace

int bench(Job& job) {
  Report report = job.report();
  report.columns({{"layer", "", "layer"},
                  {"tokens", "", "tokens"},
                  {"tp", "", "tp"},
                  {"dp", "", "dp"},
                  {"reduce", "", "reduce"},
                  {"time", "us", "time_us"},
                  {"min", "us", "min_us"},
                  {"p90", "us", "p90_us"},
                  {"max", "us", "max_us"},
                  {"tokens/s", "", "tokens_per_s"},
                  {"TFLOP/s", "", "tflops"},
                  {"weights", "GB/s", "weights_gb_per_s"},
                  {"/fast", "", "ratio_to_fast"},
                  {"speed-up", "", "speed_up"},
                  {"#wrong", "", "wrong"}});
  if (job.options().dry_run) return print_plan(job, report);
  std::optional<std::int64_t> wrong;
  KernelNames kernels;
  for (const std::int64_t layer : job.layers()) {
    LayerBench point(job, layer);
    point.run();
    kernels.add(layer, point.kernel().name);
    if (job.world().rank() == 0) point.add_rows(report);
    if (point.wrong()) wrong = wrong.value_or(0) + *point.wrong();
  }
  kernels.state(report);
  report.note(verdict(job, wrong));
  publish(job, report);
  return static_cast<int>(wrong.value_or(0) == 0 ? ExitCode::kOk : ExitCode::kVerificationFailed);
}

}  // namespace gatefold
