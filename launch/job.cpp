#include "launch/job.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <ranges>

#include "layers/seeded_source.h"
#include "parallel/agreement.h"
#include "runtime/checkpoint.h"
#include "runtime/error.h"
#include "runtime/hash.h"
#include "runtime/safetensors.h"

namespace gatefold {
namespace {

std::string hex(std::uint64_t value) { return fmt::format("{:016x}", value); }

/// The largest divisor of the world that the blocks allow.
std::int64_t default_tp(std::int64_t world, std::int64_t blocks) {
  std::int64_t tp = std::min(world, blocks);
  while (world % tp != 0) --tp;
  return tp;
}

/// Reads tensor `x` [T, H] or [B, S, H] of a safetensors file, rounded to the batch's dtype.
void read_tokens(const std::string& path, TokenBatch& batch) {
  const SafetensorsFile file(path);
  const auto found = file.header().tensors.find("x");
  if (found == file.header().tensors.end()) {
    throw Error(
        ExitCode::kData,
        fmt::format("{}: no tensor x (the input tokens have that name); it has: {}", path,
                    fmt::join(file.header().tensors |
                                  std::views::transform([](const auto& t) { return t.first; }),
                              ", ")));
  }
  const SafetensorsEntry& entry = found->second;
  const auto stored = dtype_from_safetensors(entry.dtype);
  const bool rank_fits = entry.shape.size() == 2 || entry.shape.size() == 3;
  if (!stored || !rank_fits || entry.shape.back() != batch.hidden) {
    throw Error(
        ExitCode::kData,
        fmt::format("{}: x is {} [{}] (tokens must be F32, BF16 or F16 of shape [T, {}] or "
                    "[B, S, {}], the model's hidden size); write it so",
                    path, entry.dtype, fmt::join(entry.shape, ", "), batch.hidden, batch.hidden));
  }
  batch.tokens = std::accumulate(entry.shape.begin(), entry.shape.end() - 1, std::int64_t{1},
                                 std::multiplies<>());
  std::vector<std::byte> raw(entry.end - entry.begin);
  file.read("x", 0, raw);
  const std::int64_t n = batch.tokens * batch.hidden;
  batch.x.resize(static_cast<std::size_t>(n * size_of(batch.dtype)));
  convert(*stored, raw.data(), batch.dtype, batch.x.data(), n);
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

std::uint64_t fingerprint(std::span<const std::byte> bytes) {
  return Fnv1a().add(bytes).value();
}

std::vector<float> TokenBatch::as_float(Range rows) const {
  std::vector<float> values(static_cast<std::size_t>(rows.size() * hidden));
  convert(dtype, row(rows.begin), DType::kF32, reinterpret_cast<std::byte*>(values.data()),
          rows.size() * hidden);
  return values;
}

Job::Job(const Options& options, Communicator& world, Seams seams)
    : options_(options), world_(&world), seams_(std::move(seams)) {
  world.progress().enter("set-up");
  read_config();
  make_grid();
  run_agreed(world, [this] {
    if (options_.device == DeviceKind::kCuda) device_ = make_cuda_device(world_->rank());
    if (options_.comm == CommKind::kNccl) {
      throw Error(ExitCode::kUnavailable,
                  "no NCCL communicator (this build has no CUDA part); use --comm mpi");
    }
    if (device_ == nullptr) device_ = make_cpu_device(static_cast<int>(options_.threads));
  });
  open_source();
}

void Job::read_config() {
  run_agreed(*world_, [this] {
    const std::string path =
        options_.model.empty() ? options_.config : options_.model + "/config.json";
    config_ = read_model_config(path, options_.set);
    dtype_ = options_.dtype.value_or(config_.dtype);
    layers_ = options_.layers;
    if (layers_.empty() && options_.model.empty()) layers_ = {0};
    if (layers_.empty()) {
      layers_.resize(static_cast<std::size_t>(config_.num_layers));
      std::iota(layers_.begin(), layers_.end(), 0);
    }
    for (const std::int64_t layer : layers_) {
      if (layer < config_.num_layers) continue;
      throw Error(
          ExitCode::kUsage,
          fmt::format("--layers {} is beyond the model's {} layers (they count from 0); use "
                      "0-{}",
                      layer, config_.num_layers, config_.num_layers - 1));
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
    if (tp <= most) return;
    throw Error(ExitCode::kUsage,
                fmt::format("--tp {} is more than --blocks {} (a rank owns whole blocks); use --tp "
                            "{} or less, or more blocks",
                            tp, options_.blocks, options_.blocks));
  });
  grid_ = std::make_unique<Grid>(*world_, tp);
  if (seams_.wrap_tp) wrapped_tp_ = seams_.wrap_tp(grid_->tp());
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

TokenBatch Job::tokens(std::int64_t hidden) const {
  TokenBatch batch;
  batch.hidden = hidden;
  batch.dtype = dtype_;
  run_agreed(*world_, [&] {
    if (!options_.input.empty()) {
      batch.description = options_.input;
      if (world_->rank() == 0) read_tokens(options_.input, batch);
      return;
    }
    batch.tokens = options_.tokens;
    batch.description = fmt::format("seed {}", options_.seed);
    const std::int64_t n = batch.tokens * hidden;
    std::vector<float> values(static_cast<std::size_t>(n));
    seeded_tokens(options_.seed, {0, batch.tokens}, hidden, dtype_, values.data());
    batch.x.resize(static_cast<std::size_t>(n * size_of(dtype_)));
    convert(DType::kF32, reinterpret_cast<const std::byte*>(values.data()), dtype_, batch.x.data(),
            n);
  });
  if (!options_.input.empty()) {
    world_->broadcast(reinterpret_cast<std::byte*>(&batch.tokens), sizeof(batch.tokens), 0);
    batch.x.resize(static_cast<std::size_t>(batch.tokens * batch.row_bytes()));
    world_->broadcast(batch.x.data(), static_cast<std::int64_t>(batch.x.size()), 0);
  }
  find_nan_rows(batch);
  run_agreed(*world_, [&] {
    own_tokens(batch.tokens);
    if (options_.sequence_length > 0 && batch.tokens % options_.sequence_length != 0) {
      throw Error(ExitCode::kUsage,
                  fmt::format("--sequence-length {} does not divide {} tokens (T = B x S); use a "
                              "divisor",
                              options_.sequence_length, batch.tokens));
    }
  });
  return batch;
}

Range Job::own_tokens(std::int64_t tokens) const {
  return split_tokens(tokens, grid_->dp_size(),
                      options_.token_split)[static_cast<std::size_t>(grid_->dp_index())];
}

KernelChoice Job::kernel(const FfnSpec& spec) const {
  world_->progress().enter("the GEMM self-check");
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
  for (const std::int64_t layer : job.layers()) {
    const FfnSpec spec = job.config().layer_spec(layer);
    const std::int64_t blocks = job.options().reduce == Reduce::kExact ? job.options().blocks : tp;
    const Blocks cut{spec.intermediate_size, blocks};
    const std::vector<Range> tokens = split_tokens(job.tokens(spec.hidden_size).tokens,
                                                   job.grid().dp_size(), job.options().token_split);
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
  report.fact("reduce", options_.reduce == Reduce::kExact
                            ? fmt::format("exact, {} blocks", options_.blocks)
                            : "fast: whole GEMMs and the library's all-reduce");
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
                fmt::format("{}, {} usable cores", spots[r].host, spots[r].cores));
  }
}

}  // namespace gatefold
