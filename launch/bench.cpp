#include "launch/bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "launch/bench_point.h"
#include "launch/kernel_names.h"
#include "launch/machine.h"
#include "launch/progress_line.h"
#include "launch/sweep.h"
#include "launch/topology.h"
#include "parallel/agreement.h"
#include "runtime/quoted_name.h"

namespace gatefold {
namespace {

/// A model in one dtype, and the grids of ranks that it is timed on.
struct SweptConfig {
  Options options;
  std::string name;
  std::unique_ptr<Job> job;  // of all ranks; it times nothing
  SweepPlan plan;
  KernelNames kernels;
};

/// The first ranks of the world, and rank 0 with those that sleep meanwhile.
struct FirstRanks {
  std::unique_ptr<Communicator> active;
  std::unique_ptr<Communicator> sleepers;
  std::map<DType, RankSpeeds> speeds;
};

template <typename T>
std::vector<T> given_or(const std::vector<T>& given, const T& otherwise) {
  return given.empty() ? std::vector<T>{otherwise} : given;
}

/// The name by which a table tells models apart.
std::string model_name(const Options& options) {
  const std::filesystem::path path(options.model.empty() ? options.config : options.model);
  return options.model.empty() ? path.stem().string() : path.filename().string();
}

/// Options of the job over all ranks, which fits any: grids are the points'.
Options for_all_ranks(Options options) {
  options.tp = options.ep = 0;
  options.token_split.clear();
  const auto& reduces = options.sweep.reduces;
  const bool exact = reduces.empty() || std::ranges::count(reduces, Reduce::kExact) > 0;
  options.reduce = exact ? Reduce::kExact : Reduce::kFast;
  return options;
}

}  // namespace

struct Bench::State {
  State(const Options& given, Communicator& ranks, const Seams& planted)
      : options(given), world(ranks), seams(planted) {}

  void add_config(const Options& chosen);
  void make_configs();
  void describe();
  void describe_choices();
  void describe_timing();
  void describe_kernels();
  void describe_progress();
  int print_points();
  std::vector<std::int64_t> tokens() const;
  std::vector<Way> ways(const LayerSpec& spec, const std::vector<Reduce>& reduces) const;
  template <typename Property>
  bool all_same(Property of) const {
    return std::ranges::all_of(
        configs, [&](const auto& config) { return of(*config.job) == of(*configs.front().job); });
  }
  std::int64_t points() const;
  void skip(std::int64_t grids);

  void time_layer(SweptConfig& config, std::int64_t number);
  void load_one_rank(const Job& job, const std::vector<Way>& all_ways);
  void find_gemm_size(DType dtype);
  void time_grid(SweptConfig& config, const RankGrid& grid);
  FirstRanks& first_ranks(std::int64_t count);
  void on_first_ranks(std::int64_t count,
                      const std::function<void(FirstRanks&, const Beat&)>& work);
  void keep(const std::vector<Measured>& rows);
  std::string judgement() const;
  int finish();

  Options options;
  Communicator& world;
  Seams seams;
  std::unique_ptr<Communicator> self = make_self_communicator();
  std::vector<SweptConfig> configs;
  std::map<std::int64_t, FirstRanks> first_ranks_of;
  std::map<DType, std::int64_t> gemm_sizes;
  Report report;
  std::vector<std::string> warm_layers;  // whose weights caches hold, and why
  std::optional<ProgressLine> progress;
  std::int64_t measured_points = 0;
  std::int64_t skipped_points = 0;
  bool timed = false;
  std::int64_t wrong = 0;
  std::int64_t checked_rows = 0;
  std::int64_t unchecked_rows = 0;

  // Of the layer and the grid that are being timed.
  std::unique_ptr<BenchLayer> layer;
  std::unique_ptr<Job> job;
  std::unique_ptr<BenchPoint> point;
};

Bench::Bench(const Options& options, Communicator& world, const Seams& seams)
    : state_(std::make_unique<State>(options, world, seams)) {}
Bench::~Bench() = default;

int Bench::run() {
  State& s = *state_;
  s.make_configs();
  if (std::ranges::all_of(s.configs, [](const auto& c) { return c.plan.grids.empty(); })) {
    std::vector<std::string> why;
    for (const SweptConfig& config : s.configs) {
      why.insert(why.end(), config.plan.skipped.begin(), config.plan.skipped.end());
    }
    throw AgreedError(ExitCode::kUsage,
                      fmt::format("no point can be timed ({}); use other --tp, --ep or --dp, or "
                                  "more ranks",
                                  fmt::join(why, "; ")));
  }
  s.describe();
  if (s.options.dry_run) return s.print_points();
  s.progress.emplace("point", s.points(), s.world.rank() == 0 && !s.options.quiet);
  for (SweptConfig& config : s.configs) {
    for (const std::int64_t number : config.job->layers()) s.time_layer(config, number);
  }
  return s.finish();
}

/// All configs share the first one's device.
void Bench::State::add_config(const Options& chosen) {
  SweptConfig config;
  config.options = chosen;
  config.name = model_name(chosen);
  config.job =
      std::make_unique<Job>(for_all_ranks(chosen), world, seams,
                            configs.empty() ? nullptr : configs.front().job->shared_device());
  const ModelConfig& model = config.job->config();
  config.plan = plan_sweep(options,
                           {.blocks = options.blocks,
                            .experts = model.moe ? model.moe->route.experts : 0,
                            .expert_blocks = model.moe ? config.job->expert_blocks() : 1},
                           world.size());
  configs.push_back(std::move(config));
}

void Bench::State::make_configs() {
  for (const std::string& path : given_or(options.sweep.configs, options.config)) {
    Options chosen = options;
    chosen.config = path;
    if (options.sweep.dtypes.empty()) add_config(chosen);
    for (const DType dtype : options.sweep.dtypes) {
      chosen.dtype = dtype;
      add_config(chosen);
    }
  }
}

/// --input has as many as it has.
std::vector<std::int64_t> Bench::State::tokens() const {
  const Job& first = *configs.front().job;
  if (!options.input.empty()) return {first.token_count(first.config().hidden_size)};
  return given_or(options.sweep.tokens, options.tokens);
}

/// All that were asked for, with those that can't be timed.
std::int64_t Bench::State::points() const {
  std::int64_t count = 0;
  for (const SweptConfig& config : configs) {
    count += std::ssize(config.job->layers()) *
             (std::ssize(config.plan.grids) + std::ssize(config.plan.skipped));
  }
  return count * std::ssize(tokens());
}

void Bench::State::skip(std::int64_t grids) {
  const std::int64_t count = grids * std::ssize(tokens());
  skipped_points += count;
  progress->skip(count);
}

/// Experts have exact sums only, and dense layers nothing to dispatch.
std::vector<Way> Bench::State::ways(const LayerSpec& spec,
                                    const std::vector<Reduce>& reduces) const {
  std::vector<Way> all;
  const auto dispatchers = given_or(options.sweep.dispatchers, options.dispatcher);
  for (const Reduce reduce : reduces) {
    if (is_moe(spec) && reduce == Reduce::kFast) continue;
    for (const Dispatcher dispatcher : dispatchers) {
      if (is_moe(spec) || dispatcher == dispatchers.front()) all.push_back({reduce, dispatcher});
    }
  }
  return all;
}

void Bench::State::describe() {
  report = configs.front().job->report();
  Options echoed = options;
  if (all_same([](const Job& one) { return one.layers(); })) {
    echoed.layers = configs.front().job->layers();
  }
  if (all_same([](const Job& one) { return one.dtype(); })) {
    echoed.dtype = configs.front().job->dtype();
  }
  echoed.tokens = tokens().front();
  report.options(echoed.echo());
  std::vector<std::string> names;
  std::set<std::string> skipped;
  bool with_experts = false;
  for (const SweptConfig& config : configs) {
    const std::string name =
        fmt::format("{} ({})", options.model.empty() ? config.options.config : options.model,
                    config.job->config().model_type);
    if (std::ranges::count(names, name) == 0) names.push_back(name);
    for (const std::string& text : config.plan.skipped) skipped.insert(text);
    with_experts = with_experts || config.job->config().moe.has_value();
  }
  report.fact("model", fmt::format("{}", fmt::join(names, ", ")));
  report.fact("ranks", fmt::format("{}", world.size()));
  describe_choices();
  report.fact("scaling", options.scaling == Scaling::kWeak
                             ? "weak: so many tokens for each rank, against one rank with its own"
                             : "strong: so many tokens in all, against one rank with all of them");
  describe_timing();
  if (with_experts) report.fact("routing", text_of(options.routing));
  add_topology(world, configs.front().job->device(), options, report);
  const bool fast = std::ranges::count(options.sweep.reduces, Reduce::kFast) > 0;
  if (fast && with_experts) report.note("experts: timed with exact sums only");
  for (const std::string& text : skipped) report.note("skipped: " + text);
  report.columns(bench_columns(options, with_experts));
}

/// The header says what all points share; of what differs the table has a column.
void Bench::State::describe_choices() {
  constexpr std::string_view kInTheTable = "as the table says";
  if (!all_same([](const Job& one) { return one.dtype(); })) {
    report.fact("dtype", std::string(kInTheTable));
  }
  if (options.sweep.reduces.size() > 1) {
    report.fact("reduce", fmt::format("exact, {}; fast: whole GEMMs and the library's all-reduce",
                                      counted(options.blocks, "block")));
  }
  std::vector<std::int64_t> blocks;
  for (const SweptConfig& config : configs) {
    if (config.job->config().moe) blocks.push_back(config.job->expert_blocks());
  }
  if (blocks.empty()) return;
  const auto [least, most] = std::ranges::minmax(blocks);
  const std::string range = least == most ? "" : fmt::format("{} to ", least);
  const bool several = options.sweep.dispatchers.size() > 1;
  report.fact("experts", fmt::format("{}{} each, rows {}{}", range, counted(most, "block"),
                                     several ? "" : "by ",
                                     several ? kInTheTable : name_of(options.dispatcher)));
}

void Bench::State::describe_timing() {
  std::string weights = options.hot ? "hot" : "cold";
  if (!warm_layers.empty()) {
    weights += fmt::format(" but for {}", fmt::join(warm_layers, ", "));
  }
  report.fact("timing", fmt::format("medians of {} after {} to warm up, weights {}",
                                    options.iterations, options.warmup, weights));
}

void Bench::State::describe_kernels() {
  std::set<std::string> distinct;
  std::vector<std::string> each;
  for (const SweptConfig& config : configs) {
    const std::string text = config.kernels.text();
    distinct.insert(text);
    each.push_back(
        fmt::format("{} in {}: {}", config.name, gatefold::name_of(config.job->dtype()), text));
  }
  report.fact("kernel",
              distinct.size() == 1 ? *distinct.begin() : fmt::format("{}", fmt::join(each, "; ")));
}

void Bench::State::describe_progress() {
  std::string text = fmt::format("{} of {}", measured_points + skipped_points, points());
  if (skipped_points > 0) text += fmt::format(", {} of them skipped", skipped_points);
  report.detail("points", text);
}

int Bench::State::print_points() {
  report.columns({{"config", "", "config"},
                  {"layer", "", "layer"},
                  {"tokens", "", "tokens"},
                  {"dtype", "", "dtype"},
                  {"ranks", "", "ranks"},
                  {"grid", "", "grid"}});
  const auto number = [](std::int64_t n) {
    return Cell::of(static_cast<double>(n), fmt::format("{}", n));
  };
  for (const SweptConfig& config : configs) {
    for (const std::int64_t layer_number : config.job->layers()) {
      for (const RankGrid& grid : config.plan.grids) {
        for (const std::int64_t count : tokens()) {
          report.row({Cell::of(config.name), number(layer_number),
                      number(scaled_tokens(options.scaling, count, grid.ranks)),
                      Cell::of(std::string(name_of(config.job->dtype()))), number(grid.ranks),
                      Cell::of(grid.text())});
        }
      }
    }
  }
  report.note("dry run: nothing was computed");
  publish(*configs.front().job, report);
  return static_cast<int>(ExitCode::kOk);
}

void Bench::State::time_layer(SweptConfig& config, std::int64_t number) {
  Job& whole = *config.job;
  point.reset();
  layer = std::make_unique<BenchLayer>();
  layer->config = config.name;
  layer->number = number;
  layer->spec = whole.layer_spec(number);
  if (whole.residency(layer->spec) == Residency::kStreamed) {
    const MoeSpec& spec = std::get<MoeSpec>(layer->spec);
    throw AgreedError(
        ExitCode::kOutOfMemory,
        fmt::format("layer {} has {} experts of {} (more than this machine's memory holds twice: "
                    "for all ranks, and for one); use --set with fewer experts, or more machines",
                    number, spec.route.experts,
                    counted(spec.experts.front().parameters(), "parameter")));
  }
  layer->kernel = whole.kernel(layer->spec);
  config.kernels.add(number, layer->kernel.name);
  const std::int64_t least = std::ranges::min(tokens());
  layer->sample = {0};
  if (least > 1) layer->sample.push_back(least - 1);
  std::set<Reduce> wanted;
  for (const RankGrid& grid : config.plan.grids) {
    wanted.insert(grid.reduces.begin(), grid.reduces.end());
  }
  load_one_rank(whole, ways(layer->spec, {wanted.begin(), wanted.end()}));
  skip(std::ssize(config.plan.skipped));
  for (const RankGrid& grid : config.plan.grids) time_grid(config, grid);
}

/// What all grids are compared with, on rank 0; the others sleep.
void Bench::State::load_one_rank(const Job& whole, const std::vector<Way>& all_ways) {
  world.progress().enter("loading weights");
  const std::int64_t bytes =
      all_parameters(layer->spec) * size_of(whole.device().storage(whole.dtype()));
  std::set<Reduce> reduces;
  for (const Way& way : all_ways) reduces.insert(way.reduce);
  const auto sets = static_cast<std::int64_t>(all_ways.size() + reduces.size());
  const Copies copies = cold_copies(whole.device().last_level_cache(), bytes * sets);
  layer->copies = options.hot ? 1 : copies.count;
  if (!options.hot && !copies.cold) {
    warm_layers.push_back(
        fmt::format("{}layer {} ({} copies of {:.1f} MB, in caches of {:.0f} MB)",
                    configs.size() > 1 ? layer->config + ", " : "", layer->number, copies.count,
                    static_cast<double>(bytes) * 1e-6,
                    static_cast<double>(whole.device().last_level_cache()) * 1e-6));
    describe_timing();
  }
  for (const Reduce reduce : reduces) layer->one_rank[reduce] = nullptr;
  while_root_works(world, 0, [&](const Beat& beat) {
    const MoePlace place{&whole.device(), self.get(), self.get(), self.get()};
    for (auto& [reduce, one] : layer->one_rank) {
      one = std::make_unique<TimedLayer>(layer->spec, whole.source(), place,
                                         options_for(whole, layer->kernel, {reduce}), layer->copies,
                                         beat);
    }
    if (std::ranges::count(options.sweep.reduces, Reduce::kFast) == 0) return;
    layer->plain =
        std::make_unique<PlainLayer>(whole.device(), layer->spec, whole.dtype(), layer->copies);
  });
}

FirstRanks& Bench::State::first_ranks(std::int64_t count) {
  const auto known = first_ranks_of.find(count);
  if (known != first_ranks_of.end()) return known->second;
  FirstRanks made;
  const bool active = world.rank() < count;
  made.active = world.split(active ? 0 : 1);
  made.sleepers = world.split(active && world.rank() > 0 ? 1 : 0);
  return first_ranks_of.emplace(count, std::move(made)).first->second;
}

/// Rank 0, which works too, tells the sleepers now and then that it lives.
void Bench::State::on_first_ranks(std::int64_t count,
                                  const std::function<void(FirstRanks&, const Beat&)>& work) {
  FirstRanks& ranks = first_ranks(count);
  run_agreed(world, [&] {
    const bool active = world.rank() < count;
    if (active && world.rank() > 0) {
      work(ranks, [] {});
    } else {
      while_root_works(*ranks.sleepers, 0, [&](const Beat& beat) { work(ranks, beat); });
    }
  });
}

/// By rank 0, before anybody has much in memory.
void Bench::State::find_gemm_size(DType dtype) {
  std::int64_t size = 0;
  run_agreed(world, [&] {
    if (world.rank() == 0) size = best_gemm_size(configs.front().job->device(), dtype);
  });
  world.broadcast(reinterpret_cast<std::byte*>(&size), sizeof(size), 0);
  gemm_sizes[dtype] = size;
}

void Bench::State::time_grid(SweptConfig& config, const RankGrid& grid) {
  const std::vector<Way> wanted = ways(layer->spec, grid.reduces);
  if (wanted.empty()) return skip(1);
  timed = true;
  const std::vector<std::int64_t> counts = tokens();
  const DType dtype = config.job->dtype();
  if (!gemm_sizes.contains(dtype)) find_gemm_size(dtype);
  on_first_ranks(grid.ranks, [&](FirstRanks& ranks, const Beat& beat) {
    Options chosen = config.options;
    chosen.tp = grid.tp;
    chosen.ep = grid.ep;
    chosen.reduce = grid.reduces.front();
    point.reset();
    job = std::make_unique<Job>(chosen, *ranks.active, seams, config.job->shared_device());
    if (!ranks.speeds.contains(dtype)) {
      ranks.speeds[dtype] =
          measure_ranks(*ranks.active, job->device(), dtype, gemm_sizes.at(dtype), options);
    }
    progress->prepare("loading weights");
    point = std::make_unique<BenchPoint>(*job, *layer, wanted, beat);
    for (const std::int64_t count : counts) {
      progress->begin(fmt::format(
          "{}layer {}, {}, {}", configs.size() > 1 ? config.name + ", " : "", layer->number,
          counted(scaled_tokens(options.scaling, count, grid.ranks), "token"), grid.text()));
      const std::vector<Measured> found = point->measure(count, ranks.speeds[dtype]);
      ++measured_points;
      run_agreed(*ranks.active, [&] {
        if (world.rank() == 0) keep(found);
      });
    }
  });
}

/// A time limit leaves the points that are finished.
void Bench::State::keep(const std::vector<Measured>& found) {
  for (const Measured& m : found) {
    report.row(bench_row(m));
    ++(m.wrong ? checked_rows : unchecked_rows);
    wrong += m.wrong.value_or(0);
  }
  describe_progress();
  if (!options.json.empty()) write_file(options.json, report.json());
  if (!options.csv.empty()) write_file(options.csv, report.csv());
}

/// In the words of the rows: what has no number there is not said to be OK here.
std::string Bench::State::judgement() const {
  const char* why = options.check
                        ? "float64 goes by the router, and one rank has no other to agree with"
                        : "--no-check";
  if (checked_rows == 0) return fmt::format("not checked ({})", why);
  std::string text = fmt::format("{} {}", wrong, wrong == 0 ? "OK" : "FAILED");
  if (unchecked_rows > 0) {
    text += fmt::format(" in {}; {} not checked ({})", counted(checked_rows, "row"),
                        counted(unchecked_rows, "row"), why);
  }
  return text;
}

int Bench::State::finish() {
  progress.reset();
  if (!timed) {
    throw AgreedError(ExitCode::kUsage,
                      "--reduce fast with mixtures of experts alone (theirs are exact sums only); "
                      "use --reduce exact");
  }
  world.broadcast(reinterpret_cast<std::byte*>(&wrong), sizeof(wrong), 0);
  describe_kernels();
  describe_progress();
  report.note("Out of bounds values : " + judgement());
  publish(*configs.front().job, report);
  return static_cast<int>(wrong > 0 ? ExitCode::kVerificationFailed : ExitCode::kOk);
}

}  // namespace gatefold
