#include "launch/job.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <numeric>
#include <ranges>

#include "layers/seeded_source.h"
#include "parallel/agreement.h"
#include "parallel/staged_communicator.h"
#include "runtime/checkpoint.h"
#include "runtime/error.h"
#include "runtime/hash.h"
#include "runtime/quoted_name.h"
#include "runtime/safetensors.h"

namespace gatefold {
namespace {

/// Of fp32 tokens in memory at a time, but at least one row.
constexpr std::int64_t kPieceElements = std::int64_t{1} << 20;

std::string hex(std::uint64_t value) { return fmt::format("{:016x}", value); }

/// The largest divisor of the world that the blocks allow.
std::int64_t default_tp(std::int64_t world, std::int64_t blocks) {
  std::int64_t tp = std::min(world, blocks);
  while (world % tp != 0) --tp;
  return tp;
}

/// Tensor `x` [T, H] or [B, S, H] of a safetensors file.
class TokenFile {
 public:
  TokenFile(const std::string& path, std::int64_t hidden) : file_(path) {
    const auto found = file_.header().tensors.find("x");
    if (found == file_.header().tensors.end()) {
      throw Error(
          ExitCode::kData,
          fmt::format("{}: no tensor x (the input tokens have that name); it has: {}", path,
                      fmt::join(file_.header().tensors |
                                    std::views::transform([](const auto& t) { return t.first; }),
                                ", ")));
    }
    const SafetensorsEntry& entry = found->second;
    const auto stored = dtype_from_safetensors(entry.dtype);
    const bool rank_fits = entry.shape.size() == 2 || entry.shape.size() == 3;
    if (!stored || !rank_fits || entry.shape.back() != hidden) {
      throw Error(
          ExitCode::kData,
          fmt::format("{}: x is {} [{}] (tokens must be F32, BF16 or F16 of shape [T, {}] or "
                      "[B, S, {}], the model's hidden size); write it so",
                      path, entry.dtype, fmt::join(entry.shape, ", "), hidden, hidden));
    }
    stored_ = *stored;
    shape_ = entry.shape;
    tokens_ =
        std::accumulate(shape_.begin(), shape_.end() - 1, std::int64_t{1}, std::multiplies<>());
    if (tokens_ > 0) return;
    throw Error(ExitCode::kData, fmt::format("{}: x of shape [{}] holds no tokens (there is "
                                             "nothing to compute); give it at least one",
                                             path, fmt::join(shape_, ", ")));
  }

  std::int64_t tokens() const { return tokens_; }
  const std::vector<std::int64_t>& shape() const { return shape_; }

  /// Throws Error 64 where x is [B, S, H] with another S than `given`; 0: none is.
  void check_sequences(const std::string& path, std::int64_t given) const {
    if (given == 0 || shape_.size() != 3 || shape_[1] == given) return;
    throw Error(ExitCode::kUsage,
                fmt::format("--sequence-length {} and {} disagree (its x of shape [{}] has "
                            "sequences of {} tokens); leave the option out",
                            given, path, fmt::join(shape_, ", "), shape_[1]));
  }

  /// Fills x, rounded to the batch's dtype.
  void read(TokenBatch& batch) const {
    if (tokens_ != batch.tokens) {
      throw Error(ExitCode::kData, fmt::format("{}: {} tokens instead of {} (the file has changed "
                                               "meanwhile); start again",
                                               batch.description, tokens_, batch.tokens));
    }
    const std::int64_t n = tokens_ * batch.hidden;
    std::vector<std::byte> raw(static_cast<std::size_t>(n * size_of(stored_)));
    file_.read("x", 0, raw);
    convert(stored_, raw.data(), batch.dtype, batch.x.data(), n);
  }

 private:
  SafetensorsFile file_;
  DType stored_ = DType::kF32;
  std::vector<std::int64_t> shape_;
  std::int64_t tokens_ = 0;
};

/// Fills x a piece at a time, so that fp32 values of all of it never exist.
void make_tokens(std::uint64_t seed, TokenBatch& batch) {
  const std::int64_t step = std::max<std::int64_t>(1, kPieceElements / batch.hidden);
  std::vector<float> values;
  for (std::int64_t first = 0; first < batch.tokens; first += step) {
    const Range rows{first, std::min(first + step, batch.tokens)};
    values.resize(static_cast<std::size_t>(rows.size() * batch.hidden));
    seeded_tokens(seed, rows, batch.hidden, batch.dtype, values.data());
    convert(DType::kF32, reinterpret_cast<const std::byte*>(values.data()), batch.dtype,
            batch.x.data() + first * batch.row_bytes(), rows.size() * batch.hidden);
  }
}

std::int64_t machine_memory() {
  const std::int64_t bytes = std::int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE);
  return bytes > 0 ? bytes : std::numeric_limits<std::int64_t>::max();
}

/// Bytes of [tokens, hidden]. Throws Error 64 where that is no number, 71 where two such arrays are
/// more than the machine has.
std::int64_t checked_bytes(std::int64_t tokens, std::int64_t hidden, DType dtype) {
  std::int64_t most = 0;
  // fp32, twice: no count of bytes that follows from this one is larger.
  if (__builtin_mul_overflow(tokens, hidden, &most) || __builtin_mul_overflow(most, 8, &most)) {
    throw Error(ExitCode::kUsage,
                fmt::format("{} tokens of {} values (more than can be counted in bytes); use fewer "
                            "--tokens or a smaller hidden size",
                            tokens, hidden));
  }
  const std::int64_t bytes = tokens * hidden * size_of(dtype);
  const std::int64_t memory = machine_memory();
  if (2 * bytes > memory) {
    throw Error(ExitCode::kOutOfMemory,
                fmt::format("x and y of {} tokens of {} {} values take {} bytes (this machine has "
                            "{} bytes of memory); use fewer tokens",
                            tokens, hidden, name_of(dtype), 2 * bytes, memory));
  }
  return bytes;
}

void find_nan_rows(TokenBatch& batch) {
  for (std::int64_t t = 0; t < batch.tokens; ++t) {
    const std::vector<float> row = batch.as_float({t, t + 1});
    if (std::any_of(row.begin(), row.end(), [](float v) { return std::isnan(v); })) {
      batch.nan_rows.push_back(t);
    }
  }
}

}  // namespace

std::uint64_t fingerprint(std::span<const std::byte> bytes) { return Fnv1a().add(bytes).value(); }

std::vector<float> TokenBatch::as_float(Range rows) const {
  std::vector<float> values(static_cast<std::size_t>(rows.size() * hidden));
  convert(dtype, row(rows.begin), DType::kF32, reinterpret_cast<std::byte*>(values.data()),
          rows.size() * hidden);
  return values;
}

DevicePass::DevicePass(Device& device, const std::byte* host_x, const RowCount& rows,
                       std::int64_t row_bytes)
    : device_(device), rows_(rows) {
  const std::int64_t bytes = rows.local * row_bytes;
  x_ = device.allocate(bytes);
  y_ = device.allocate(bytes);
  if (bytes == 0) return;
  device.upload(x_.data(), host_x, bytes);
  const std::vector<std::byte> ones(static_cast<std::size_t>(bytes), std::byte{0xff});
  device.upload(y_.data(), ones.data(), bytes);
}

std::vector<std::byte> DevicePass::y() const {
  std::vector<std::byte> host(static_cast<std::size_t>(y_.bytes()));
  if (!host.empty()) device_.download(host.data(), y_.data(), y_.bytes());
  return host;
}

void KernelNames::state(Report& report) const {
  std::vector<std::string> parts;
  for (const auto& [name, layers] : layers_) {
    parts.push_back(layers_.size() == 1 ? name
                                        : fmt::format("{} (layers {})", name, layer_text(layers)));
  }
  report.fact("kernel", fmt::format("{}", fmt::join(parts, "; ")));
}

Job::Job(const Options& options, Communicator& world, Seams seams)
    : options_(options), world_(&world), seams_(std::move(seams)) {
  world.progress().enter("set-up");
  read_config();
  make_grid();
  const bool cuda =
      options_.device == DeviceKind::kCuda ||
      (options_.device == DeviceKind::kAuto && all_true(*world_, visible_cuda_devices() > 0));
  const int local_rank = cuda ? world_->split_by_host()->rank() : 0;
  run_agreed(*world_, [&] {
    if (cuda) device_ = make_cuda_device(local_rank);
    if (options_.comm == CommKind::kNccl) {
      throw Error(ExitCode::kUnavailable,
                  "no NCCL communicator (this build has none); use --comm mpi");
    }
    if (device_ == nullptr) device_ = make_cpu_device(static_cast<int>(options_.threads));
  });
  if (!device_->in_host_memory()) tp_.push_back(make_staged_communicator(tp(), *device_));
  open_source();
}

void Job::read_config() {
  run_agreed(*world_, [this] {
    const std::string path =
        options_.model.empty() ? options_.config : options_.model + "/config.json";
    config_ = read_model_config(path, options_.set);
    dtype_ = options_.dtype.value_or(config_.dtype);
    layers_ = options_.layers;
    const bool whole = !options_.model.empty() || options_.command == Command::kInspect ||
                       options_.command == Command::kMakeModel;
    if (layers_.empty() && !whole) layers_ = {0};
    if (layers_.empty()) {
      layers_.resize(static_cast<std::size_t>(config_.num_layers));
      std::iota(layers_.begin(), layers_.end(), 0);
    }
    for (const std::int64_t layer : layers_) {
      if (layer < config_.num_layers) continue;
      throw Error(ExitCode::kUsage,
                  fmt::format("--layers {} is beyond the model's {} (they count from 0); use "
                              "0-{}",
                              layer, counted(config_.num_layers, "layer"), config_.num_layers - 1));
    }
  });
  require_equal(*world_, "a config.json with hash",
                hex(fingerprint(std::as_bytes(std::span(config_.canonical_text)))),
                ExitCode::kData);
}

void Job::make_grid() {
  const bool exact = options_.reduce == Reduce::kExact;
  const std::int64_t most = exact ? options_.blocks : world_->size();
  // inspect shows the plan of any --tp, and make-model needs none: both run on the ranks there are.
  const bool shares =
      options_.command != Command::kInspect && options_.command != Command::kMakeModel;
  const bool fits = world_->size() % std::max<std::int64_t>(1, options_.tp) == 0;
  const std::int64_t tp =
      options_.tp > 0 && (shares || fits) ? options_.tp : default_tp(world_->size(), most);
  run_agreed(*world_, [&] {
    if (!exact || tp <= most) return;
    throw Error(ExitCode::kUsage,
                fmt::format("--tp {} is more than --blocks {} (a rank owns whole blocks); use --tp "
                            "{} or less, or more blocks",
                            tp, options_.blocks, options_.blocks));
  });
  grid_ = std::make_unique<Grid>(*world_, tp);
  if (seams_.wrap_tp) tp_.push_back(seams_.wrap_tp(grid_->tp()));
}

void Job::open_source() {
  std::string hash = "seeded";
  run_agreed(*world_, [&] {
    if (options_.model.empty()) {
      source_ = std::make_unique<SeededSource>(config_, options_.seed);
      return;
    }
    auto checkpoint = std::make_unique<Checkpoint>(options_.model);
    hash = hex(checkpoint->header_hash());
    source_ = std::move(checkpoint);
  });
  require_equal(*world_, "model files with header hash", hash, ExitCode::kData);
}

FfnSpec Job::layer_spec(std::int64_t layer) const {
  FfnSpec spec;
  run_agreed(*world_, [&] {
    spec = resolve_layer(config_, layer, *source_);
    spec.activation = load_activation(spec, *source_);
  });
  return spec;
}

std::int64_t Job::token_count(std::int64_t hidden) const {
  std::int64_t tokens = options_.tokens;
  if (!options_.input.empty()) {
    run_agreed(*world_, [&] {
      if (world_->rank() != 0) return;
      const TokenFile file(options_.input, hidden);
      file.check_sequences(options_.input, options_.sequence_length);
      tokens = file.tokens();
    });
    world_->broadcast(reinterpret_cast<std::byte*>(&tokens), sizeof(tokens), 0);
  }
  run_agreed(*world_, [&] {
    own_tokens(tokens);
    if (options_.sequence_length > 0 && tokens % options_.sequence_length != 0) {
      throw Error(ExitCode::kUsage,
                  fmt::format("--sequence-length {} does not divide {} tokens (T = B x S); use a "
                              "divisor",
                              options_.sequence_length, tokens));
    }
  });
  return tokens;
}

TokenBatch Job::tokens(std::int64_t hidden) const {
  TokenBatch batch;
  batch.tokens = token_count(hidden);
  batch.hidden = hidden;
  batch.dtype = dtype_;
  const bool from_file = !options_.input.empty();
  batch.shape = {batch.tokens, hidden};
  run_agreed(*world_, [&] {
    batch.description = from_file ? options_.input : fmt::format("seed {}", options_.seed);
    batch.x.resize(static_cast<std::size_t>(checked_bytes(batch.tokens, hidden, dtype_)));
    if (!from_file) make_tokens(options_.seed, batch);
    if (!from_file || world_->rank() != 0) return;
    const TokenFile file(options_.input, hidden);
    file.read(batch);
    batch.shape = file.shape();
  });
  if (from_file) {
    world_->broadcast(batch.x.data(), static_cast<std::int64_t>(batch.x.size()), 0);
  }
  run_agreed(*world_, [&] { find_nan_rows(batch); });
  return batch;
}

Range Job::own_tokens(std::int64_t tokens) const {
  return split_tokens(tokens, grid_->dp_size(),
                      options_.token_split)[static_cast<std::size_t>(grid_->dp_index())];
}

KernelChoice Job::kernel(const FfnSpec& spec) const {
  world_->progress().enter("the GEMM self-check");
  run_agreed(*world_, [&] {  // before minutes are spent on loading what can't be held
    if (!device_->in_host_memory()) return;
    const double bytes = static_cast<double>(spec.parameters()) *
                         static_cast<double>(size_of(device_->storage(dtype_))) /
                         grid_->tp().size();
    const auto memory = static_cast<double>(machine_memory());
    if (bytes <= memory) return;
    throw Error(
        ExitCode::kOutOfMemory,
        fmt::format("the layer's weights take {:.0f} GB on each of {} tensor-parallel ranks "
                    "(this machine has {:.0f} GB of memory); use more ranks on more machines",
                    bytes * 1e-9, grid_->tp().size(), memory * 1e-9));
  });
  const bool forced = seams_.fail_self_check && seams_.fail_self_check(world_->rank());
  return choose_kernel(*world_, *device_, dtype_, ffn_shapes(spec, options_.blocks), !forced);
}

MlpOptions Job::mlp_options(const KernelChoice& kernel) const {
  MlpOptions options;
  options.linear.dtype = dtype_;
  options.linear.blocks = options_.blocks;
  options.linear.reduce = options_.reduce;
  options.linear.kernel = kernel.kernel;
  return options;
}

Range Job::own_columns(const FfnSpec& spec) const {
  LinearOptions options;
  options.blocks = options_.blocks;
  options.reduce = options_.reduce;
  const BlockPlan plan = BlockPlan::make(spec.intermediate_size, options, grid_->tp());
  return plan.blocks.columns(plan.runs[static_cast<std::size_t>(grid_->tp().rank())]);
}

void publish(const Job& job, const Report& report) {
  const Options& options = job.options();
  run_agreed(job.world(), [&] {
    if (job.world().rank() != 0) return;
    const std::string text = options.quiet ? report.closing_text() : report.text();
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() ||
        std::fflush(stdout) != 0) {
      throw Error(ExitCode::kOutput,
                  "the report can't be printed (standard output is closed or "
                  "full); use --json or --csv");
    }
    if (!options.json.empty()) write_file(options.json, report.json());
    if (!options.csv.empty()) write_file(options.csv, report.csv());
  });
}

int print_plan(const Job& job, Report& report) {
  report.columns({{"rank", "", "rank"},
                  {"tp", "", "tp"},
                  {"dp", "", "dp"},
                  {"layer", "", "layer"},
                  {"blocks", "", "blocks"},
                  {"columns", "of I", "columns"},
                  {"tokens", "", "tokens"}});
  const std::int64_t tp = job.grid().tp().size();
  const std::int64_t count = job.token_count(job.config().hidden_size);
  const std::vector<Range> tokens =
      split_tokens(count, job.grid().dp_size(), job.options().token_split);
  for (const std::int64_t layer : job.layers()) {
    const FfnSpec spec = job.config().layer_spec(layer);
    const std::int64_t blocks = job.options().reduce == Reduce::kExact ? job.options().blocks : tp;
    const Blocks cut{spec.intermediate_size, blocks};
    for (std::int64_t rank = 0; rank < job.world().size(); ++rank) {
      const Range run = owned_blocks(blocks, tp, rank % tp);
      const Range columns = cut.columns(run);
      const Range own = tokens[static_cast<std::size_t>(rank / tp)];
      const auto text = [](Range r) { return fmt::format("[{},{})", r.begin, r.end); };
      report.row({Cell::of(static_cast<double>(rank), fmt::format("{}", rank)),
                  Cell::of(static_cast<double>(rank % tp), fmt::format("{}", rank % tp)),
                  Cell::of(static_cast<double>(rank / tp), fmt::format("{}", rank / tp)),
                  Cell::of(static_cast<double>(layer), fmt::format("{}", layer)),
                  Cell::of(text(run)), Cell::of(text(columns)), Cell::of(text(own))});
    }
  }
  report.note("dry run: nothing was computed");
  publish(job, report);
  return static_cast<int>(ExitCode::kOk);
}

Report Job::report() const {
  Report report;
  Options resolved = options_;
  resolved.layers = layers_;
  resolved.dtype = dtype_;
  if (resolved.tp == 0) resolved.tp = grid_->tp().size();
  const bool given = options_.tokens_given || !options_.input.empty();
  const bool without = options_.command == Command::kMakeModel ||
                       (options_.command == Command::kInspect && !given && !options_.dry_run);
  resolved.tokens = without ? 0 : token_count(config_.hidden_size);
  report.options(resolved.echo());
  report.fact("gatefold", GATEFOLD_VERSION);
  report.fact("model",
              fmt::format("{} ({})", options_.model.empty() ? config_.path : options_.model,
                          config_.model_type));
  report.fact("weights", source_->description());
  report.fact("ranks", fmt::format("{} = tp {} x dp {}", world_->size(), grid_->tp().size(),
                                   grid_->dp_size()));
  report.fact("device", device_->description());
  const DType kept = device_->storage(dtype_);
  report.fact("dtype", kept == dtype_ ? std::string(name_of(dtype_))
                                      : fmt::format("{}, widened to {} for this device's GEMMs",
                                                    name_of(dtype_), name_of(kept)));
  report.fact("gemm", device_->library());
  report.fact("comm", world_->description());
  const std::string exact = fmt::format("exact, {}", counted(options_.blocks, "block"));
  const std::string fast = "fast: whole GEMMs and the library's all-reduce";
  if (options_.command == Command::kBench) {
    report.fact("reduce", exact + "; " + fast);
  } else if (options_.command != Command::kMakeModel) {
    report.fact("reduce", options_.reduce == Reduce::kExact ? exact : fast);
  }
  if (options_.verbose) add_places(report);
  return report;
}

/// Where each rank runs. Collective.
void Job::add_places(Report& report) const {
  struct Spot {
    char host[64];
    std::int64_t cores;
  };
  std::vector<Spot> spots(static_cast<std::size_t>(world_->size()));
  Spot& own = spots[static_cast<std::size_t>(world_->rank())];
  gethostname(own.host, sizeof(own.host) - 1);
  cpu_set_t usable;
  CPU_ZERO(&usable);
  if (sched_getaffinity(0, sizeof(usable), &usable) == 0) own.cores = CPU_COUNT(&usable);
  all_gather<Spot>(*world_, spots);
  for (std::size_t r = 0; r < spots.size(); ++r) {
    report.fact(fmt::format("rank {}", r),
                fmt::format("{}, {}", spots[r].host, counted(spots[r].cores, "usable core")));
  }
}

}  // namespace gatefold
