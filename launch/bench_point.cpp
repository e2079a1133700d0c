#include "launch/bench_point.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

#include "launch/bandwidth.h"
#include "launch/bench_check.h"
#include "launch/expert_load.h"
#include "launch/machine.h"
#include "launch/routing_pattern.h"
#include "launch/sweep.h"
#include "launch/timing.h"
#include "layers/weights.h"
#include "parallel/agreement.h"
#include "parallel/tree_sum.h"

namespace gatefold {
namespace {

/// Each rank's value, on every rank.
std::vector<double> of_all(Communicator& world, double own) {
  std::vector<double> values(static_cast<std::size_t>(world.size()));
  values[static_cast<std::size_t>(world.rank())] = own;
  all_gather<double>(world, values);
  return values;
}
double sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

/// A layer's turn in every pass: on all ranks, or on rank 0 while the others wait.
struct Lap {
  TimedLayer* layer = nullptr;            // null: this rank waits
  std::vector<double> seconds = {};       // of each counted pass
  std::vector<PhaseSeconds> phases = {};  // likewise, of this rank
};

/// What a row is made of.
struct RowLaps {
  Way way;
  std::size_t all = 0;
  std::size_t one_rank = 0;
};

/// One measurement: a layer, a grid and a batch.
class Measurement {
 public:
  Measurement(Job& job, BenchLayer& layer, const Beat& beat, std::int64_t tokens)
      : job_(job),
        layer_(layer),
        beat_(beat),
        world_(job.world()),
        place_(job.place()),
        group_(is_moe(layer.spec) ? *place_.world : *place_.tp),
        one_rank_tokens_(tokens),
        batch_(job.tokens(hidden_size(layer.spec),
                          scaled_tokens(job.options().scaling, tokens, world_.size()))),
        own_(job.own_tokens(batch_.tokens)) {}

  void add_laps(const std::vector<Way>& ways, std::vector<std::unique_ptr<TimedLayer>>& layers);
  void prepare();
  void time();
  std::vector<Measured> rows(const RankSpeeds& speeds);

 private:
  bool one_rank() const { return world_.size() == 1; }
  void time_lap(Lap& lap, RangeTimes& ranges, std::int64_t pass, bool counted);
  void time_plain(std::int64_t pass, bool counted);
  void add_phases(const Lap& lap, const std::vector<int>& slowest, Measured& m);
  std::int64_t bytes_read(const Moe& moe) const;
  void add_work(const Lap& lap, const Way& way, Measured& m);
  double sent_by_dense(Reduce reduce) const;
  double sent_by_experts(const Moe& moe) const;
  ExpertRows rows_of_experts(const Moe& moe) const;
  /// Where these tokens go; without rows, where the router sends them.
  Choices routing(Range tokens) const;

  Job& job_;
  BenchLayer& layer_;
  const Beat& beat_;
  Communicator& world_;
  MoePlace place_;
  Communicator& group_;  // whose sums are what an all-reduce would make
  std::int64_t one_rank_tokens_;
  TokenBatch batch_;
  Range own_;
  Choices given_;  // of the batch, with --routing file
  std::vector<Lap> laps_;
  std::vector<RowLaps> row_laps_;
  std::optional<AllReduceBaseline> reduces_;
  double timed_seconds_ = 0;
  double overhead_ = 0;
};

/// Each way's own lap, and one for each kind of sum on one rank; on a grid of one these are the
/// same.
void Measurement::add_laps(const std::vector<Way>& ways,
                           std::vector<std::unique_ptr<TimedLayer>>& layers) {
  std::map<Reduce, std::size_t> alone;
  for (auto& [reduce, layer] : layer_.one_rank) {
    alone[reduce] = laps_.size();
    laps_.push_back({layer.get()});
  }
  for (std::size_t i = 0; i < ways.size(); ++i) {
    const std::size_t one = alone.at(ways[i].reduce);
    row_laps_.push_back({ways[i], one_rank() ? one : laps_.size(), one});
    if (!one_rank()) laps_.push_back({layers[i].get()});
  }
}

Choices Measurement::routing(Range tokens) const {
  const auto* moe = std::get_if<MoeSpec>(&layer_.spec);
  const RoutingPattern& pattern = job_.options().routing;
  if (moe == nullptr || pattern.kind == RoutingKind::kRouter) return {};
  if (pattern.kind == RoutingKind::kFile) return given_.part(tokens);
  return patterned_choices(pattern, job_.options().seed, moe->route, tokens);
}

void Measurement::prepare() {
  if (is_moe(layer_.spec) && job_.options().routing.kind == RoutingKind::kFile) {
    given_ = job_.given_routing(std::get<MoeSpec>(layer_.spec).route, batch_);
    if (given_.rows == 0) {
      throw AgreedError(ExitCode::kData,
                        fmt::format("{} has no topk_ids (--routing file takes them from there); "
                                    "use a file that run has written",
                                    job_.options().input));
    }
  }
  const auto passes = static_cast<std::size_t>(job_.options().iterations);
  run_agreed(world_, [&] {
    for (auto& [reduce, layer] : layer_.one_rank) {
      if (layer != nullptr) {
        const Range tokens{0, one_rank_tokens_};
        layer->take(batch_, tokens, one_rank_tokens_, routing(tokens));
      }
    }
    for (const RowLaps& row : row_laps_) {
      if (!one_rank()) {
        laps_[row.all].layer->take(batch_, own_, batch_.tokens, routing(own_));
      }
    }
    for (Lap& lap : laps_) {
      lap.seconds.reserve(passes);
      lap.phases.reserve(passes);
    }
    const std::int64_t rows = is_moe(layer_.spec) ? batch_.tokens : own_.size();
    reduces_.emplace(group_, *place_.device, rows, batch_.hidden, batch_.dtype);
    reduces_->reserve(job_.options().iterations);
  });
  // Errors of what is collective come to all ranks by themselves.
  for (const RowLaps& row : row_laps_) {
    if (!one_rank()) laps_[row.all].layer->touch();
  }
  run_agreed(world_, [&] {
    for (auto& [reduce, layer] : layer_.one_rank) {
      if (layer != nullptr) layer->touch(beat_);
    }
    if (layer_.plain == nullptr) return;
    const Moe* experts = layer_.one_rank.begin()->second->moe();
    layer_.plain->take(one_rank_tokens_, experts == nullptr ? 0 : bytes_read(*experts),
                       static_cast<int>(job_.options().threads));
    layer_.plain->reserve(job_.options().iterations);
  });
}

/// Of the weights of a mixture on one rank: experts without tokens aren't read.
std::int64_t Measurement::bytes_read(const Moe& moe) const {
  const auto& spec = std::get<MoeSpec>(layer_.spec);
  std::int64_t parameters = 0;
  for (std::int64_t e = 0; e < spec.route.experts; ++e) {
    if (moe.expert_rows(e) > 0) parameters += spec.experts.front().parameters();
  }
  for (const FfnSpec& shared : spec.shared) parameters += shared.parameters();
  return parameters * size_of(place_.device->storage(batch_.dtype));
}

void Measurement::time_lap(Lap& lap, RangeTimes& ranges, std::int64_t pass, bool counted) {
  if (lap.layer != nullptr) lap.layer->prepare(pass);
  ranges.clear();
  meet(world_);
  if (lap.layer == nullptr) return;
  const double start = now();
  lap.layer->forward(pass);
  const double seconds = now() - start;
  if (!counted) return;
  lap.seconds.push_back(seconds);
  lap.phases.push_back(phases_of(ranges.seconds(), seconds));
  timed_seconds_ += seconds;
}

void Measurement::time_plain(std::int64_t pass, bool counted) {
  if (layer_.plain == nullptr) return;
  const double start = now();
  layer_.plain->time(pass, counted);
  if (counted) timed_seconds_ += now() - start;
}

/// All take turns in every pass, so that a drift of the machine's speed is everybody's.
void Measurement::time() {
  const Options& options = job_.options();
  world_.progress().enter("the benchmark");
  RangeTimes ranges(*place_.device);
  double begin = now();
  for (std::int64_t pass = 0; pass < options.warmup + options.iterations; ++pass) {
    const bool counted = pass >= options.warmup;
    if (pass == options.warmup) begin = now();
    for (Lap& lap : laps_) time_lap(lap, ranges, pass, counted);
    meet(world_);
    time_plain(pass, counted);
    reduces_->time(world_, counted);
    beat_();
  }
  timed_seconds_ += sum(reduces_->fp32_seconds) + sum(reduces_->dtype_seconds);
  overhead_ = (now() - begin - timed_seconds_) / timed_seconds_;
}

/// Of the middle half of the passes, each as its slowest rank spent it: outliers, which may have
/// any cause, don't blur what a pass consists of.
void Measurement::add_phases(const Lap& lap, const std::vector<int>& slowest, Measured& m) {
  if (!place_.device->in_host_memory()) return;  // there the host's clock tells nothing
  const std::vector<std::size_t> middle = middle_passes(m.seconds);
  PhaseSeconds own{};
  double computing = 0;
  for (const std::size_t pass : middle) {
    computing += lap.seconds[pass] - communication(lap.phases[pass]);
    if (slowest[pass] != world_.rank()) continue;
    for (std::size_t i = 0; i < own.size(); ++i) own[i] += lap.phases[pass][i];
  }
  m.phases.emplace();
  for (std::size_t i = 0; i < own.size(); ++i) {
    (*m.phases)[i] = sum(of_all(world_, own[i])) / static_cast<double>(middle.size());
  }
  const std::vector<double> all = of_all(world_, computing);
  m.busiest = *std::ranges::max_element(all) / (sum(all) / world_.size());
}

/// What this rank's tp group sends; the library's own sum as a ring would.
double Measurement::sent_by_dense(Reduce reduce) const {
  const auto& spec = std::get<FfnSpec>(layer_.spec);
  Communicator& tp = *place_.tp;
  if (tp.size() == 1) return 0;
  if (reduce == Reduce::kFast) {
    const auto bytes = static_cast<double>(own_.size() * spec.hidden_size * size_of(DType::kF32));
    return bytes * all_reduce_share(tp.size());
  }
  LinearOptions options;
  options.blocks = job_.options().blocks;
  const BlockPlan plan = BlockPlan::make(spec.intermediate_size, options, tp);
  const TreeSum tree(tp, *place_.device, SumTree(plan.blocks), plan.runs, spec.hidden_size);
  return static_cast<double>(tree.bytes_to_others(own_.size(), batch_.dtype, Rows::kReplicated));
}

/// Rows to experts, sums home, shared experts' sums, and finished rows within a tp group.
double Measurement::sent_by_experts(const Moe& moe) const {
  const ExchangeCounts& counts = moe.counts();
  const Range groups =
      even_part(ceil_div(batch_.hidden, kGroup), place_.etp->size(), place_.etp->rank());
  Communicator& tp = *place_.tp;
  std::int64_t bytes = counts.sent * batch_.row_bytes() +
                       counts.returned * groups.size() * kGroup * size_of(DType::kF32) +
                       (tp.size() - 1) * moe.home(own_.size()).size() * batch_.row_bytes();
  for (const FfnSpec& shared : std::get<MoeSpec>(layer_.spec).shared) {
    if (tp.size() == 1) break;
    LinearOptions options;
    options.blocks = job_.options().blocks;
    const BlockPlan plan = BlockPlan::make(shared.intermediate_size, options, tp);
    const TreeSum tree(tp, *place_.device, SumTree(plan.blocks), plan.runs, batch_.hidden);
    bytes += tree.bytes_to_others(own_.size(), DType::kF32, Rows::kScattered);
  }
  return static_cast<double>(bytes);
}

/// Of the whole layer, [E]; members of a group of experts have the same.
ExpertRows Measurement::rows_of_experts(const Moe& moe) const {
  const std::int64_t experts = std::get<MoeSpec>(layer_.spec).route.experts;
  const Range own = ExpertPlacement{experts, place_.ep()}.owned(world_.rank() / place_.etp->size());
  std::vector<std::int64_t> all(static_cast<std::size_t>(experts * world_.size()));
  for (std::int64_t e = own.begin; e < own.end && place_.etp->rank() == 0; ++e) {
    all[static_cast<std::size_t>(world_.rank() * experts + e)] = moe.expert_rows(e - own.begin);
  }
  const std::vector<std::int64_t> parts(static_cast<std::size_t>(world_.size()),
                                        experts * static_cast<std::int64_t>(sizeof(all[0])));
  world_.host().all_gather_v(reinterpret_cast<std::byte*>(all.data()), parts);
  ExpertRows rows(static_cast<std::size_t>(experts));
  for (std::size_t i = 0; i < all.size(); ++i) rows[i % rows.size()] += all[i];
  return rows;
}

void Measurement::add_work(const Lap& lap, const Way& way, Measured& m) {
  const std::int64_t element = place_.device->storage(batch_.dtype) == batch_.dtype
                                   ? size_of(batch_.dtype)
                                   : size_of(DType::kF32);
  m.flops = 2.0 * static_cast<double>(batch_.tokens) *
            static_cast<double>(active_parameters(layer_.spec));
  const bool has_rows = !own_.empty();
  const bool first = place_.tp->rank() == 0;
  const double groups = sum(of_all(world_, first && has_rows ? 1 : 0));  // that read a dense layer
  if (const auto* dense = std::get_if<FfnSpec>(&layer_.spec)) {
    m.weight_bytes = groups * static_cast<double>(dense->parameters() * element);
    m.sent_bytes = sum(of_all(world_, sent_by_dense(way.reduce)));
    m.group = place_.tp->size();
    m.sum_bytes = static_cast<double>(own_.size() * batch_.hidden * size_of(DType::kF32));
    return;
  }
  const auto& spec = std::get<MoeSpec>(layer_.spec);
  const Moe& moe = *lap.layer->moe();
  const ExpertRows load = rows_of_experts(moe);
  m.hottest_expert = max_over_mean(load);
  m.entropy = entropy_bits(load);
  if (spec.capacity) {
    m.dropped = static_cast<double>(moe.counts().dropped) /
                static_cast<double>(batch_.tokens * spec.route.top_k);
  }
  const std::int64_t hit = std::ranges::count_if(load, [](std::int64_t n) { return n > 0; });
  double parameters = static_cast<double>(hit * spec.experts.front().parameters());
  for (const FfnSpec& shared : spec.shared) {
    parameters += groups * static_cast<double>(shared.parameters());
  }
  m.weight_bytes = parameters * static_cast<double>(element);
  m.sent_bytes = sum(of_all(world_, sent_by_experts(moe)));
  m.group = world_.size();
  const std::vector<double> received =
      of_all(world_, static_cast<double>(one_rank() ? batch_.tokens : moe.counts().received));
  m.busiest = *std::ranges::max_element(received) / (sum(received) / world_.size());
}

std::vector<Measured> Measurement::rows(const RankSpeeds& speeds) {
  ExpectedOutput expected(job_, layer_, batch_, own_, one_rank_tokens_,
                          [this](Range tokens) { return routing(tokens); });
  slowest_of_ranks(world_, reduces_->fp32_seconds);
  slowest_of_ranks(world_, reduces_->dtype_seconds);
  std::vector<Measured> rows;
  for (const RowLaps& row : row_laps_) {
    const Lap& lap = laps_[row.all];
    Measured m;
    m.config = layer_.config;
    m.layer = layer_.number;
    m.kind = kind_text(layer_.spec);
    m.moe = is_moe(layer_.spec);
    m.tokens = batch_.tokens;
    m.one_rank_tokens = one_rank_tokens_;
    m.ranks = world_.size();
    m.tp = job_.grid().tp().size();
    m.dp = job_.grid().dp_size();
    m.ep = job_.grid().ep();
    m.dtype = batch_.dtype;
    m.reduce = row.way.reduce;
    m.dispatcher = row.way.dispatcher;
    m.scaling = job_.options().scaling;
    m.seconds = lap.seconds;
    const std::vector<int> slowest = slowest_of_ranks(world_, m.seconds);
    m.one_rank_seconds = laps_[row.one_rank].seconds;
    add_phases(lap, slowest, m);
    add_work(lap, row.way, m);
    m.gemm_peak = speeds.gemm_peak;
    m.read_speed = speeds.read_speed;
    m.all_reduce_seconds = reduces_->fp32_seconds;
    m.all_reduce_in_dtype_seconds = reduces_->dtype_seconds;
    if (layer_.plain != nullptr) m.plain_seconds = layer_.plain->seconds();
    m.overhead = overhead_;
    if (job_.options().check) m.wrong = expected.wrong_values(*lap.layer, row.way.reduce);
    rows.push_back(std::move(m));
  }
  for (Measured& m : rows) {
    for (const Measured& other : rows) {
      if (other.reduce == Reduce::kFast) m.fast_seconds = other.seconds;
    }
  }
  return rows;
}

}  // namespace

MoeOptions options_for(const Job& job, const KernelChoice& kernel, const Way& way) {
  MoeOptions options = job.layer_options(kernel);
  options.linear.reduce = way.reduce;
  if (way.reduce == Reduce::kFast) options.linear.kernel.reset();  // whole GEMMs
  options.dispatcher = way.dispatcher;
  return options;
}

RankSpeeds measure_ranks(Communicator& ranks, Device& device, DType dtype, std::int64_t gemm_size,
                         const Options& options) {
  ranks.progress().enter("the measurement of peaks");
  constexpr std::int64_t kPasses = 10;
  constexpr double kSeconds = 0.3;
  const auto rate_of_all = [&ranks](const std::function<Load()>& make) {
    Load load;
    run_agreed(ranks, [&] { load = make(); });
    meet(ranks);
    const std::vector<double> seconds = time_passes(load, kPasses, kSeconds);
    return sum(of_all(ranks, load.work / *std::ranges::min_element(seconds)));
  };
  RankSpeeds speeds;
  speeds.gemm_peak = rate_of_all([&] { return gemm_load(device, dtype, gemm_size); });
  if (options.hot) return speeds;  // weights that caches hold are read as fast as these are
  const std::int64_t bytes = cold_bytes(device, ranks.split_by_host()->size());
  speeds.read_speed =
      rate_of_all([&] { return read_load(device, bytes, static_cast<int>(options.threads)); });
  return speeds;
}

BenchPoint::BenchPoint(Job& job, BenchLayer& layer, std::vector<Way> ways, const Beat& beat)
    : job_(job), layer_(layer), ways_(std::move(ways)), beat_(beat) {
  job.world().progress().enter("loading weights");
  if (job.world().size() == 1) {
    ways_.erase(std::ranges::unique(ways_, {}, &Way::reduce).begin(), ways_.end());
    return;
  }
  for (const Way& way : ways_) {
    run_agreed(job.world(), [&] {
      layers_.push_back(std::make_unique<TimedLayer>(layer.spec, job.source(), job.place(),
                                                     options_for(job, layer.kernel, way),
                                                     layer.copies, beat_));
    });
  }
}

std::vector<TimedLayer*> BenchPoint::layers() const {
  std::vector<TimedLayer*> all;
  for (const auto& layer : layers_) all.push_back(layer.get());
  for (const auto& [reduce, layer] : layer_.one_rank) {
    if (layer != nullptr) all.push_back(layer.get());
  }
  return all;
}

std::vector<Measured> BenchPoint::measure(std::int64_t tokens, const RankSpeeds& speeds) {
  Measurement measurement(job_, layer_, beat_, tokens);
  measurement.add_laps(ways_, layers_);
  measurement.prepare();
  measurement.time();
  return measurement.rows(speeds);
}

}  // namespace gatefold
