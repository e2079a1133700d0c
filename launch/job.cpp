#include "launch/job.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <ranges>

#include "launch/balance_config.h"
#include "launch/device_choice.h"
#include "launch/outputs.h"
#include "layers/dense_experts.h"
#include "layers/model_files.h"
#include "layers/relaid_source.h"
#include "layers/seeded_source.h"
#include "parallel/agreement.h"
#include "runtime/error.h"
#include "runtime/hash.h"
#include "runtime/quoted_name.h"
#include "runtime/safetensors.h"

namespace gatefold {
namespace {

/// What weights may take of a machine's memory before they are streamed.
constexpr double kMostOfMemory = 0.7;

std::string hex(std::uint64_t value) { return fmt::format("{:016x}", value); }

DenseExperts dense_experts(const Options& options) {
  return {options.split ? DenseInto::kParts : DenseInto::kCopies, options.experts};
}

/// As many parts as there are experts for, or more where too many ranks would share one: then some
/// ranks have none.
std::int64_t default_ep(std::int64_t ranks, std::int64_t experts, std::int64_t blocks) {
  std::int64_t ep = largest_divisor(ranks, experts);
  while (ranks % ep != 0 || ranks / ep > blocks) ++ep;
  return ep;
}

/// The first dense layer and the first mixture of experts, of those that there are.
std::vector<std::int64_t> first_of_each_kind(const ModelConfig& config) {
  std::vector<std::int64_t> layers{0};
  std::int64_t other = 1;
  while (other < config.num_layers && config.is_moe(other) == config.is_moe(0)) ++other;
  if (other < config.num_layers) layers.push_back(other);
  return layers;
}

/// Or 0, of a model that has none.
std::int64_t first_mixture(const ModelConfig& config) {
  std::int64_t layer = 0;
  while (layer < config.num_layers && !config.is_moe(layer)) ++layer;
  return layer < config.num_layers ? layer : 0;
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

}  // namespace

std::uint64_t fingerprint(std::span<const std::byte> bytes) { return Fnv1a().add(bytes).value(); }

Job::Job(const Options& options, Communicator& world, Seams seams, std::shared_ptr<Device> device)
    : options_(options), world_(&world), seams_(std::move(seams)), device_(std::move(device)) {
  world.progress().enter("set-up");
  read_config();
  read_sequences();
  make_grid();
  if (device_ == nullptr) device_ = make_device(options_, *world_);
  comm_ = choose_comm(*world_, *device_, options_.comm);
  std::unique_ptr<Communicator> on_device;
  std::unique_ptr<Communicator> world_on_device;
  const auto put_on_device = [this](Communicator& group) {
    return make_device_communicator(group, *device_, comm_.kind, options_.timeout);
  };
  run_agreed(*world_, [&] {  // a group that fails must not leave the others waiting
    on_device = put_on_device(tp());
    if (grid_->ep() == 0) return;
    world_on_device = put_on_device(experts_world());
    etp_on_device_ = put_on_device(grid_->etp());
  });
  if (on_device != nullptr) tp_.push_back(std::move(on_device));
  if (world_on_device != nullptr) experts_world_.push_back(std::move(world_on_device));
  if (seams_.wrap_device) wrapped_device_ = seams_.wrap_device(*device_, world_->rank());
  open_source();
}

void Job::read_config() {
  run_agreed(*world_, [this] {
    if (options_.from_dense.empty()) {
      const std::string path =
          options_.model.empty() ? options_.config : options_.model + "/config.json";
      config_ = path.empty() ? parse_model_config(kBalanceConfig, "built in", options_.set)
                             : read_model_config(path, options_.set);
    } else {
      dense_ = read_model_config(options_.from_dense + "/config.json");
      config_ = experts_config(*dense_, dense_experts(options_),
                               options_.dtype.value_or(dense_->dtype), options_.set);
    }
    if (options_.layout) config_.moe->spelling = spelling_of(config_, *options_.layout);
    dtype_ = options_.dtype.value_or(config_.dtype);
    layers_ = options_.layers;
    const bool whole = !options_.model.empty() || options_.command == Command::kInspect ||
                       options_.command == Command::kMakeModel;
    if (layers_.empty() && options_.command == Command::kBalance) {
      layers_ = {first_mixture(config_)};
    }
    if (layers_.empty() && !whole) layers_ = first_of_each_kind(config_);
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

/// What --input says of sequences where --sequence-length doesn't: [B, S, H] is S tokens each.
void Job::read_sequences() {
  if (options_.input.empty() || options_.sequence_length > 0) return;
  std::int64_t length = 0;
  run_agreed(*world_, [&] {
    if (world_->rank() != 0) return;
    const TokenFile file(options_.input, config_.hidden_size);
    length = file.shape().size() == 3 ? file.shape()[1] : 0;
    if (length > 0 || !options_.per_sequence) return;
    throw Error(ExitCode::kUsage,
                fmt::format("--per-sequence without --sequence-length (x of {} is [T, H], which "
                            "doesn't say how long sequences are); give it",
                            options_.input));
  });
  world_->broadcast(reinterpret_cast<std::byte*>(&length), sizeof(length), 0);
  options_.sequence_length = length;
}

void Job::make_grid() {
  const bool exact = options_.reduce == Reduce::kExact;
  const std::int64_t ranks = world_->size();
  const std::int64_t most = exact ? options_.blocks : ranks;
  const std::int64_t experts = config_.moe ? config_.moe->route.experts : 0;
  // inspect shows the plan of any grid, and make-model and balance need none: all run on the ranks
  // there are.
  const bool shares = options_.command != Command::kInspect &&
                      options_.command != Command::kMakeModel &&
                      options_.command != Command::kBalance;
  const auto settled = [&](std::int64_t given, std::int64_t otherwise) {
    const bool fits = given > 0 && ranks % given == 0;
    return given > 0 && (shares || fits) ? given : otherwise;
  };
  const std::int64_t tp = settled(options_.tp, experts > 0 ? 1 : largest_divisor(ranks, most));
  const std::int64_t ep =
      experts == 0 ? 0 : settled(options_.ep, default_ep(ranks, experts, expert_blocks()));
  run_agreed(*world_, [&] {
    if (exact && tp > most) {
      throw Error(ExitCode::kUsage,
                  fmt::format("--tp {} is more than --blocks {} (a rank owns whole blocks); use "
                              "--tp {} or less, or more blocks",
                              tp, options_.blocks, options_.blocks));
    }
    if (experts == 0 && options_.ep > 0) {
      throw Error(ExitCode::kUsage,
                  fmt::format("--ep {} is not possible (the layers of {} models are dense); leave "
                              "it out",
                              options_.ep, config_.model_type));
    }
    if (experts == 0 && options_.routing.kind != RoutingKind::kRouter) {
      throw Error(ExitCode::kUsage,
                  fmt::format("--routing {} is not possible (the layers of {} models are dense); "
                              "leave it out",
                              text_of(options_.routing), config_.model_type));
    }
    if (capacity() && experts == 0) {
      throw Error(ExitCode::kUsage,
                  fmt::format("--capacity{} is not possible (the layers of {} models are dense); "
                              "leave it out",
                              options_.capacity != 0 ? "" : "-factor", config_.model_type));
    }
    if (options_.capacity < 0 && experts > 0 && config_.moe->expert_capacity == 0) {
      throw Error(ExitCode::kUsage,
                  fmt::format("--capacity config is not possible (configs of {} models have none); "
                              "give a number of rows, or --capacity-factor",
                              config_.model_type));
    }
    if (experts > 0 && shares) check_expert_blocks(ranks / std::max<std::int64_t>(1, ep));
  });
  grid_ = std::make_unique<Grid>(*world_, tp, ep);
  if (!seams_.wrap_exchanges) return;
  if (experts > 0) {
    experts_world_.push_back(seams_.wrap_exchanges(*world_));
  } else {
    tp_.push_back(seams_.wrap_exchanges(grid_->tp()));
  }
}

std::optional<Capacity> Job::capacity() const {
  if (options_.capacity_factor == 0 && options_.capacity == 0) return std::nullopt;
  const bool of_config = options_.capacity < 0 && config_.moe;
  return Capacity{.factor = options_.capacity_factor,
                  .rows = of_config ? config_.moe->expert_capacity : options_.capacity,
                  .drop = options_.drop,
                  .sequence_length = options_.per_sequence ? options_.sequence_length : 0,
                  .pad = options_.pad};
}

std::int64_t Job::expert_blocks() const {
  return options_.expert_blocks > 0 ? options_.expert_blocks
                                    : default_expert_blocks(config_.moe->intermediate_size);
}

/// etp ranks share each expert.
void Job::check_expert_blocks(std::int64_t etp) const {
  const std::int64_t blocks = expert_blocks();
  if (etp <= blocks) return;
  throw Error(ExitCode::kUsage,
              fmt::format("{} ranks share each expert of {} (a rank owns whole blocks); use a "
                          "larger --ep, or --expert-blocks {}",
                          etp, counted(blocks, "block"), etp));
}

void Job::open_source() {
  std::string hash = "seeded";
  run_agreed(*world_, [&] {
    const std::string& directory = dense_ ? options_.from_dense : options_.model;
    ModelConfig canonical = config_;
    if (canonical.moe) canonical.moe->spelling = 0;
    if (directory.empty()) {
      source_ = std::make_unique<SeededSource>(canonical, options_.seed);
      return;
    }
    ModelFiles files = open_model_files(directory, dense_ ? *dense_ : config_);
    hash = hex(files.header_hash);
    source_ = std::move(files.source);
    if (!dense_) return;
    dense_source_ = std::move(source_);
    source_ = std::make_unique<DenseExpertsSource>(*dense_, *dense_source_, dense_experts(options_),
                                                   canonical, layers_);
  });
  require_equal(*world_, "model files with header hash", hash, ExitCode::kData);
  if (!config_.moe || config_.moe->spelling == 0) return;
  run_agreed(*world_, [&] {
    source_ = std::make_unique<RelaidSource>(config_, std::move(source_), layers_);
  });
}

LayerSpec Job::layer_spec(std::int64_t layer) const {
  LayerSpec spec;
  run_agreed(*world_, [&] {
    if (config_.is_moe(layer)) {
      MoeSpec moe = resolve_moe(config_, layer, *source_);
      moe.capacity = capacity();
      spec = std::move(moe);
      return;
    }
    FfnSpec dense = resolve_layer(config_, layer, *source_);
    dense.activation = load_activation(dense, *source_);
    spec = std::move(dense);
  });
  return spec;
}

FfnSpec Job::dense_spec(std::int64_t layer) const {
  if (config_.is_moe(layer)) {
    throw AgreedError(ExitCode::kUsage,
                      fmt::format("layer {} is a mixture of experts ({} computes dense layers only "
                                  "so far); choose another with --layers",
                                  layer, name_of(options_.command)));
  }
  return std::get<FfnSpec>(layer_spec(layer));
}

MoePlace Job::place() const {
  MoePlace place{device_.get(), nullptr, &tp(), nullptr};
  if (wrapped_device_ != nullptr) place.device = wrapped_device_.get();
  if (grid_->ep() == 0) return place;
  place.world = &experts_world();
  place.etp = etp_on_device_ != nullptr ? etp_on_device_.get() : &grid_->etp();
  return place;
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

TokenBatch Job::tokens(std::int64_t hidden, std::int64_t count) const {
  TokenBatch batch;
  batch.tokens = count;
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

Choices Job::given_routing(const RouteRule& rule, const TokenBatch& batch) const {
  Choices given;
  if (options_.input.empty()) return given;
  run_agreed(*world_, [&] {
    if (world_->rank() != 0) return;
    given = TokenFile(options_.input, batch.hidden).routing(rule);
    if (given.rows > 0) check_choices(given, rule, batch.tokens);  // while rows are the file's
  });
  std::int64_t rows = given.rows;
  world_->broadcast(reinterpret_cast<std::byte*>(&rows), sizeof(rows), 0);
  run_agreed(*world_, [&] { given.resize(rows, rule.top_k); });
  const std::int64_t bytes = rows * rule.top_k * 4;
  world_->broadcast(reinterpret_cast<std::byte*>(given.ids.data()), bytes, 0);
  world_->broadcast(reinterpret_cast<std::byte*>(given.weights.data()), bytes, 0);
  return given;
}

Range Job::own_tokens(std::int64_t tokens) const {
  return split_tokens(tokens, grid_->dp_size(),
                      options_.token_split)[static_cast<std::size_t>(grid_->dp_index())];
}

KernelChoice Job::kernel(const LayerSpec& spec) const {
  world_->progress().enter("the GEMM self-check");
  run_agreed(*world_, [&] { check_memory(spec); });
  const bool forced = seams_.fail_self_check && seams_.fail_self_check(world_->rank());
  return choose_kernel(*world_, *device_, dtype_, layer_shapes(spec, layer_options({})), !forced);
}

/// Before minutes are spent on loading what can't be held.
void Job::check_memory(const LayerSpec& spec) const {
  const auto* dense = std::get_if<FfnSpec>(&spec);
  if (!device_->in_host_memory() || dense == nullptr) return;
  const double bytes = static_cast<double>(dense->parameters()) *
                       static_cast<double>(size_of(device_->storage(dtype_))) / grid_->tp().size();
  const auto memory = static_cast<double>(machine_memory());
  if (bytes <= memory) return;
  throw Error(ExitCode::kOutOfMemory,
              fmt::format("the layer's weights take {:.0f} GB on each of {} tensor-parallel ranks "
                          "(this machine has {:.0f} GB of memory); use more ranks on more machines",
                          bytes * 1e-9, grid_->tp().size(), memory * 1e-9));
}

Residency Job::residency(const LayerSpec& spec) const {
  const auto* moe = std::get_if<MoeSpec>(&spec);
  if (moe == nullptr || !device_->in_host_memory()) return Residency::kResident;
  const auto neighbours = world_->split_by_host()->size();
  const double experts = static_cast<double>(ceil_div(moe->route.experts, grid_->ep())) *
                         static_cast<double>(moe->experts.front().parameters()) /
                         grid_->etp().size();
  double shared = 0;
  for (const FfnSpec& one : moe->shared) shared += static_cast<double>(one.parameters());
  const double bytes = (experts + shared / grid_->tp().size()) * neighbours *
                       static_cast<double>(size_of(device_->storage(dtype_)));
  const bool fits = bytes <= kMostOfMemory * static_cast<double>(machine_memory());
  return all_true(*world_, fits) ? Residency::kResident : Residency::kStreamed;
}

MlpOptions Job::mlp_options(const KernelChoice& kernel) const {
  MlpOptions options;
  options.linear.dtype = dtype_;
  options.linear.blocks = options_.blocks;
  options.linear.reduce = options_.reduce;
  options.linear.kernel = kernel.kernel;
  return options;
}

MoeOptions Job::layer_options(const KernelChoice& kernel) const {
  return {.linear = mlp_options(kernel).linear,
          .expert_blocks = options_.expert_blocks,
          .dispatcher = options_.dispatcher};
}

Range Job::own_columns(const FfnSpec& spec) const {
  LinearOptions options;
  options.blocks = options_.blocks;
  options.reduce = options_.reduce;
  const BlockPlan plan = BlockPlan::make(spec.intermediate_size, options, grid_->tp());
  return plan.blocks.columns(plan.runs[static_cast<std::size_t>(grid_->tp().rank())]);
}

std::string kind_text(const LayerSpec& spec) {
  if (const auto* dense = std::get_if<FfnSpec>(&spec)) {
    return dense->gated() ? "dense, gated" : "dense, plain";
  }
  const auto& moe = std::get<MoeSpec>(spec);
  return fmt::format("moe, {} of {}{}", moe.route.top_k, moe.route.experts,
                     moe.shared.empty() ? "" : fmt::format(" + {}", moe.shared.size()));
}

void publish(const Job& job, const Report& report) {
  Report known = report;
  known.fact("comm", job.carrier());  // what layers found of shared memory, too
  publish(job.world(), job.options(), known);
}

namespace {

/// Of the ranks' words the first that have one to say, before all what kept them from sharing.
std::string sharing(Communicator& world) {
  struct Words {
    char text[256];
  };
  std::vector<Words> all(static_cast<std::size_t>(world.size()));
  Words& own = all[static_cast<std::size_t>(world.rank())];
  world.sharing().copy(own.text, sizeof(own.text) - 1);
  all_gather<Words>(world, all);
  std::string first;
  for (const Words& words : all) {
    const std::string_view text = words.text;
    if (first.empty() || (text.starts_with("messages") && !first.starts_with("messages"))) {
      first = text;
    }
  }
  return first;
}

}  // namespace

std::string Job::carrier() const {
  std::string text = tp().description();
  if (comm_.kind == CommKind::kNccl) text += " over " + world_->description();
  const std::string why = device_->in_host_memory() ? sharing(*world_) : comm_.why;
  return why.empty() ? text : fmt::format("{} ({})", text, why);
}

Report Job::report() const {
  Report report;
  Options resolved = options_;
  resolved.layers = layers_;
  resolved.dtype = dtype_;
  if (resolved.tp == 0) resolved.tp = grid_->tp().size();
  if (resolved.ep == 0) resolved.ep = std::max<std::int64_t>(1, grid_->ep());
  const bool given = options_.tokens_given || !options_.input.empty();
  const bool without = options_.command == Command::kMakeModel ||
                       (options_.command == Command::kInspect && !given && !options_.dry_run);
  resolved.tokens = without ? 0 : token_count(config_.hidden_size);
  report.options(resolved.echo());
  report.fact("gatefold", GATEFOLD_VERSION);
  const std::string type =
      dense_ ? fmt::format("{}, made into {}", dense_->model_type, config_.model_type)
             : config_.model_type;
  const std::string& directory = dense_ ? options_.from_dense : options_.model;
  report.fact("model", fmt::format("{} ({})", directory.empty() ? config_.path : directory, type));
  report.fact("weights", source_->description());
  std::string ranks =
      fmt::format("{} = tp {} x dp {}", world_->size(), grid_->tp().size(), grid_->dp_size());
  if (grid_->ep() > 0) {
    ranks += fmt::format(" = etp {} x ep {}", grid_->etp().size(), grid_->ep());
  }
  report.fact("ranks", ranks);
  report.fact("device", device_->description() + why_no_gpu(options_, *device_));
  const DType kept = device_->storage(dtype_);
  report.fact("dtype", kept == dtype_ ? std::string(name_of(dtype_))
                                      : fmt::format("{}, widened to {} for this device's GEMMs",
                                                    name_of(dtype_), name_of(kept)));
  report.fact("gemm", device_->library());
  report.fact("comm", carrier());
  const bool of_layers =
      options_.command != Command::kMakeModel && options_.command != Command::kBalance;
  if (of_layers) {
    report.fact("reduce", options_.reduce == Reduce::kExact
                              ? fmt::format("exact, {}", counted(options_.blocks, "block"))
                              : "fast: whole GEMMs and the library's all-reduce");
  }
  if (config_.moe && of_layers) {
    report.fact("experts", fmt::format("{} each, rows by {}", counted(expert_blocks(), "block"),
                                       name_of(options_.dispatcher)));
    if (capacity()) report.fact("capacity", text_of(*capacity()));
  }
  report.detail("revision", options_.revision);
  if (options_.verbose) add_places(report);
  return report;
}

/// Where each rank runs. Collective.
void Job::add_places(Report& report) const {
  struct Spot {
    char host[64];
    std::int64_t cores;
    char gpu[128];
  };
  std::vector<Spot> spots(static_cast<std::size_t>(world_->size()));
  Spot& own = spots[static_cast<std::size_t>(world_->rank())];
  gethostname(own.host, sizeof(own.host) - 1);
  cpu_set_t usable;
  CPU_ZERO(&usable);
  if (sched_getaffinity(0, sizeof(usable), &usable) == 0) own.cores = CPU_COUNT(&usable);
  if (!device_->in_host_memory()) {
    fmt::format_to_n(own.gpu, sizeof(own.gpu) - 1, ", {}", device_->description());
  }
  all_gather<Spot>(*world_, spots);
  for (std::size_t r = 0; r < spots.size(); ++r) {
    report.fact(fmt::format("rank {}", r),
                fmt::format("{}, {}{}", spots[r].host, counted(spots[r].cores, "usable core"),
                            spots[r].gpu));
  }
}

}  // namespace gatefold
