#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <set>

#include "launch/device_pass.h"
#include "launch/drop_check.h"
#include "launch/job.h"
#include "launch/kernel_names.h"
#include "launch/progress_line.h"
#include "launch/weight_reads.h"
#include "layers/moe_reference.h"
#include "parallel/agreement.h"
#include "runtime/quoted_name.h"

namespace gatefold {
namespace {

/// More tokens than this are checked against float64 by a sample of this many.
constexpr std::int64_t kSampledTokens = 64;

/// One wrong element, for the line that names it.
struct Spot {
  std::int64_t token = std::numeric_limits<std::int64_t>::max();
  std::int64_t column = 0;
  std::int64_t rank = 0;
  double found = 0;
  double expected = 0;
};

struct Comparison {
  std::int64_t wrong = 0;         // elements
  std::int64_t bits = 0;          // that differ in them
  double worst = 0;               // largest |error| ÷ bound, float64 only
  std::int64_t near_ties = 0;     // float64 only
  std::int64_t wrong_routes = 0;  // tokens
  std::int64_t first_route = std::numeric_limits<std::int64_t>::max();
  Spot first;
};

double element(const std::byte* row, DType dtype, std::int64_t column) {
  float value = 0;
  convert(dtype, row + column * size_of(dtype), DType::kF32, reinterpret_cast<std::byte*>(&value),
          1);
  return value;
}

std::int64_t differing_bits(const std::byte* a, const std::byte* b, std::int64_t bytes) {
  std::int64_t bits = 0;
  for (std::int64_t i = 0; i < bytes; ++i)
    bits += std::popcount(std::to_integer<unsigned>(a[i] ^ b[i]));
  return bits;
}

/// Passes each read on and tells the waiting peers that the root is alive.
class BeatingSource final : public TensorSource {
 public:
  BeatingSource(const TensorSource& inner, const std::function<void()>& beat)
      : inner_(inner), beat_(beat) {}
  std::optional<TensorInfo> find(const std::string& name) const override {
    return inner_.find(name);
  }
  void read(const std::string& name, Range rows, Range cols, std::byte* out) const override {
    beat_();
    inner_.read(name, rows, cols, out);
  }
  std::string description() const override { return inner_.description(); }

 private:
  const TensorSource& inner_;
  const std::function<void()>& beat_;
};

/// One layer's verification on this rank.
class LayerCheck {
 public:
  LayerCheck(Job& job, std::int64_t layer)
      : job_(job),
        spec_(job.layer_spec(layer)),
        batch_(job.tokens(hidden_size(spec_))),
        own_(job.own_tokens(batch_.tokens)),
        kernel_(job.kernel(spec_)) {}

  const LayerSpec& spec() const { return spec_; }
  const TokenBatch& batch() const { return batch_; }
  const KernelChoice& kernel() const { return kernel_; }
  std::span<const std::byte> one_device() const { return one_device_; }

  void run_distributed();
  void run_one_device();
  Comparison compare_bits();
  /// Tokens whose experts or weights, in any bit, are not those of one device. Collective.
  std::int64_t compare_routing() const;
  Comparison compare_float64();
  /// What a capacity dropped, where there is one; before compare_float64(). Collective.
  const std::optional<DropCheck>& judge_drops();
  /// Elements of y, on any rank, that are NaN.
  Comparison find_nan();
  /// Elements of y, on any rank, that failed any check: each once. Collective.
  std::int64_t wrong_values() const;
  /// Of the weights that went into the three passes above; after them. Collective.
  ReadComparison compare_weights() const;
  std::int64_t sampled_tokens() const { return static_cast<std::int64_t>(sample().size()); }

 private:
  void read_idle_experts(const TensorSource& source) const;
  ReferenceResult reference(const TensorSource& source, const std::vector<std::int64_t>& rows,
                            Comparison& mine);
  void judge(std::int64_t t, std::int64_t c, double expected, double bound, Comparison& mine);
  std::vector<std::int64_t> sample() const;
  std::vector<float> rows_as_float(const std::vector<std::int64_t>& rows) const;
  const std::byte* own_row(std::int64_t token) const {
    return own_y_.data() + (token - own_.begin) * batch_.row_bytes();
  }
  /// Marks this rank's element (t, c) as wrong.
  void mark(std::int64_t t, std::int64_t c) {
    wrong_[static_cast<std::size_t>((t - own_.begin) * batch_.hidden + c)] = true;
  }
  /// The same on all ranks: counts added, the worst kept, the first place in token order.
  Comparison agreed(const Comparison& mine) const;

  Job& job_;
  LayerSpec spec_;
  TokenBatch batch_;
  Range own_;
  KernelChoice kernel_;
  std::vector<std::byte> own_y_;       // this rank's copy of its group's rows
  std::vector<std::byte> one_device_;  // [tokens, H]
  Choices own_routing_;                // of this rank's home rows, which begin at own_home_
  std::int64_t own_home_ = 0;
  Choices routing_;                     // of all tokens, on one device; none in a dense layer
  std::vector<std::uint8_t> own_kept_;  // as own_routing_; empty without a capacity
  std::vector<std::uint8_t> kept_;      // as routing_
  std::optional<DropCheck> drops_;
  std::vector<bool> wrong_;   // [own tokens, H]
  ReadLog own_reads_;         // by this rank's layer and, but on rank 0, its reference
  ReadLog one_device_reads_;  // on rank 0: by the layer on one device and the reference
};

void LayerCheck::run_distributed() {
  Communicator& world = job_.world();
  world.progress().enter("loading weights");
  std::unique_ptr<TensorSource> wrapped;
  LayerSpec spec = spec_;
  if (job_.seams().wrap_source) {
    const auto* dense = std::get_if<FfnSpec>(&spec);
    wrapped = job_.seams().wrap_source(job_.source(), spec,
                                       dense != nullptr ? job_.own_columns(*dense) : Range{},
                                       dense != nullptr ? job_.grid().tp().rank() : world.rank());
  }
  if (auto* moe = std::get_if<MoeSpec>(&spec); moe != nullptr && job_.seams().alter_experts) {
    job_.seams().alter_experts(*moe, world.rank());
  }
  const RecordingSource source(wrapped ? *wrapped : job_.source(), own_reads_);
  const RowCount rows{own_.size(), batch_.tokens};
  MoeOptions options = job_.layer_options(kernel_);
  options.linear.residency = job_.residency(spec);
  std::optional<Layer> layer;
  std::optional<DevicePass> pass;
  run_agreed(world, [&] {
    layer.emplace(spec, source, job_.place(), options);
    layer->reserve(rows);
    pass.emplace(job_.device(), batch_.row(own_.begin), rows, batch_.row_bytes());
  });
  world.progress().enter("the distributed forward pass");
  pass->forward(*layer);
  run_agreed(world, [&] {
    own_y_ = pass->y();
    if (const Moe* moe = layer->moe()) {
      own_routing_ = moe->routing();
      own_kept_.assign(moe->kept().begin(), moe->kept().end());
      own_home_ = own_.begin + moe->home(own_.size()).begin;
    }
    wrong_.assign(static_cast<std::size_t>(own_.size() * batch_.hidden), false);
  });
  if (job_.seams().after_forward) job_.seams().after_forward(own_y_, world.rank(), world.size());
}

/// The same code in a world of one, weights streamed block by block, on rank 0.
void LayerCheck::run_one_device() {
  Communicator& world = job_.world();
  world.progress().enter("the one-device pass");
  run_agreed(world, [&] { one_device_.assign(batch_.x.size(), std::byte{0}); });
  const bool resident = job_.residency(spec_) == Residency::kResident;
  while_root_works(world, 0, [&](const std::function<void()>& beat) {
    const BeatingSource beating(job_.source(), beat);
    const RecordingSource source(beating, one_device_reads_);
    const auto alone = make_self_communicator();
    MoeOptions options = job_.layer_options(kernel_);
    options.linear.reduce = Reduce::kExact;
    options.linear.residency = Residency::kStreamed;
    Layer layer(spec_, source, {&job_.device(), alone.get(), alone.get(), alone.get()}, options);
    DevicePass pass(job_.device(), batch_.x.data(), {batch_.tokens, batch_.tokens},
                    batch_.row_bytes());
    pass.forward(layer);
    one_device_ = pass.y();
    if (const Moe* moe = layer.moe()) {
      routing_ = moe->routing();
      kept_.assign(moe->kept().begin(), moe->kept().end());
    }
    if (resident) read_idle_experts(source);
  });
  world.broadcast(one_device_.data(), static_cast<std::int64_t>(one_device_.size()), 0);
  const auto* moe = std::get_if<MoeSpec>(&spec_);
  if (moe == nullptr) return;
  run_agreed(world, [&] { routing_.resize(batch_.tokens, moe->route.top_k); });
  const std::int64_t bytes = routing_.rows * routing_.top_k * 4;
  world.broadcast(reinterpret_cast<std::byte*>(routing_.ids.data()), bytes, 0);
  world.broadcast(reinterpret_cast<std::byte*>(routing_.weights.data()), bytes, 0);
  if (!moe->capacity) return;
  run_agreed(world, [&] { kept_.resize(routing_.ids.size()); });
  world.broadcast(reinterpret_cast<std::byte*>(kept_.data()), std::ssize(kept_), 0);
}

/// Reads the experts that no token goes to as the ranks have, which load them all the same.
void LayerCheck::read_idle_experts(const TensorSource& source) const {
  const auto* moe = std::get_if<MoeSpec>(&spec_);
  if (moe == nullptr) return;
  const auto alone = make_self_communicator();
  LinearOptions options = job_.layer_options(kernel_).linear;
  options.blocks = job_.expert_blocks();
  const std::set<std::int32_t> used(routing_.ids.begin(), routing_.ids.end());
  for (std::int32_t e = 0; e < moe->route.experts; ++e) {
    if (used.contains(e)) continue;
    const Experts idle(*moe, {e, e + 1}, source, {&job_.device(), alone.get()}, options);
  }
}

std::int64_t LayerCheck::compare_routing() const {
  Comparison mine;
  const auto k = static_cast<std::size_t>(own_routing_.top_k);
  for (std::int64_t row = 0; row < own_routing_.rows; ++row) {
    const auto at = static_cast<std::size_t>(row) * k;
    const auto expected = static_cast<std::size_t>(own_home_ + row) * k;
    const bool same =
        std::memcmp(&own_routing_.ids[at], &routing_.ids[expected], 4 * k) == 0 &&
        std::memcmp(&own_routing_.weights[at], &routing_.weights[expected], 4 * k) == 0 &&
        (kept_.empty() || std::memcmp(&own_kept_[at], &kept_[expected], k) == 0);
    if (!same) ++mine.wrong;
  }
  return agreed(mine).wrong;
}

Comparison LayerCheck::agreed(const Comparison& mine) const {
  std::vector<Comparison> all(static_cast<std::size_t>(job_.world().size()));
  all[static_cast<std::size_t>(job_.world().rank())] = mine;
  all_gather<Comparison>(job_.world(), all);
  Comparison total;
  for (const Comparison& one : all) {
    total.wrong += one.wrong;
    total.bits += one.bits;
    total.worst = std::max(total.worst, one.worst);
    total.near_ties += one.near_ties;
    total.wrong_routes += one.wrong_routes;
    total.first_route = std::min(total.first_route, one.first_route);
    if (one.first.token < total.first.token) total.first = one.first;
  }
  return total;
}

std::int64_t LayerCheck::wrong_values() const {
  Comparison mine;
  mine.wrong = std::ranges::count(wrong_, true);
  return agreed(mine).wrong;
}

Comparison LayerCheck::compare_bits() {
  Comparison mine;
  const bool allowed = job_.options().reduce == Reduce::kFast;
  const std::int64_t size = size_of(batch_.dtype);
  for (std::int64_t t = own_.begin; t < own_.end; ++t) {
    const std::byte* found = own_row(t);
    const std::byte* expected = one_device_.data() + t * batch_.row_bytes();
    for (std::int64_t c = 0; c < batch_.hidden; ++c) {
      const std::int64_t bits = differing_bits(found + c * size, expected + c * size, size);
      if (bits == 0) continue;
      mine.bits += bits;
      if (!allowed) mark(t, c);
      if (mine.wrong++ > 0) continue;
      mine.first = {t, c, job_.world().rank(), element(found, batch_.dtype, c),
                    element(expected, batch_.dtype, c)};
    }
  }
  return agreed(mine);
}

Comparison LayerCheck::find_nan() {
  Comparison mine;
  for (std::int64_t t = own_.begin; t < own_.end; ++t) {
    for (std::int64_t c = 0; c < batch_.hidden; ++c) {
      const double value = element(own_row(t), batch_.dtype, c);
      if (!std::isnan(value)) continue;
      mark(t, c);
      if (mine.wrong++ > 0) continue;
      mine.first = {t, c, job_.world().rank(), value,
                    element(one_device_.data() + t * batch_.row_bytes(), batch_.dtype, c)};
    }
  }
  return agreed(mine);
}

/// All tokens, or as many as are checked, spread by a fixed generator over the batch.
std::vector<std::int64_t> LayerCheck::sample() const {
  std::vector<std::int64_t> tokens;
  const std::int64_t n = std::min(batch_.tokens, kSampledTokens);
  for (std::int64_t i = 0; i < n; ++i) {
    const Range stratum = even_part(batch_.tokens, n, i);
    const auto jump = static_cast<std::int64_t>(
        (job_.options().seed + static_cast<std::uint64_t>(i)) * 0x9e3779b97f4a7c15U >> 33);
    tokens.push_back(stratum.begin + jump % stratum.size());
  }
  return tokens;
}

std::vector<float> LayerCheck::rows_as_float(const std::vector<std::int64_t>& rows) const {
  std::vector<float> values;
  for (const std::int64_t t : rows) {
    const std::vector<float> row = batch_.as_float({t, t + 1});
    values.insert(values.end(), row.begin(), row.end());
  }
  return values;
}

/// y of these rows in float64, with its bound; counts near ties.
ReferenceResult LayerCheck::reference(const TensorSource& source,
                                      const std::vector<std::int64_t>& rows, Comparison& mine) {
  const std::vector<float> x = rows_as_float(rows);
  const auto tokens = static_cast<std::int64_t>(rows.size());
  if (const auto* dense = std::get_if<FfnSpec>(&spec_)) {
    return reference_ffn(*dense, source, batch_.dtype, x, tokens);
  }
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> kept;
  for (const std::int64_t t : rows) {
    const auto own = routing_.ids_of(t);
    ids.insert(ids.end(), own.begin(), own.end());
    if (!drops_) continue;
    const auto first = drops_->kept.begin() + t * routing_.top_k;
    kept.insert(kept.end(), first, first + routing_.top_k);
  }
  MoeReferenceResult found =
      reference_moe(std::get<MoeSpec>(spec_), source, batch_.dtype, x, tokens, ids, {}, kept);
  if (drops_) return found;  // which has judged the routes of all tokens
  mine.near_ties = found.near_ties;
  for (const WrongRoute& route : found.wrong_routes) {
    const std::int64_t t = rows[static_cast<std::size_t>(route.token)];
    if (mine.wrong_routes++ == 0) mine.first_route = t;
  }
  return found;
}

/// One element against float64; marks it where it is wrong.
void LayerCheck::judge(std::int64_t t, std::int64_t c, double expected, double bound,
                       Comparison& mine) {
  const double found = element(own_row(t), batch_.dtype, c);
  const double ratio = std::abs(found - expected) / bound;
  if (ratio <= 1) {
    mine.worst = std::max(mine.worst, ratio);
    return;
  }
  const bool same_infinity = std::isinf(found) && found == expected;
  const bool both_nan = std::isnan(found) && std::isnan(expected);  // find_nan() judges
  const bool unbounded = std::isinf(bound) && !std::isnan(found);
  if (same_infinity || both_nan || unbounded) return;
  mine.worst =
      std::isnan(ratio) ? std::numeric_limits<double>::infinity() : std::max(mine.worst, ratio);
  mark(t, c);
  if (mine.wrong++ == 0) mine.first = {t, c, job_.world().rank(), found, expected};
}

/// Rows are dealt over the ranks that hold them; each judges its own copy. A rank without rows
/// reads a dense layer's weights all the same, so that no rank's files go unseen.
Comparison LayerCheck::compare_float64() {
  Communicator& world = job_.world();
  world.progress().enter("the float64 reference");
  std::vector<std::int64_t> rows;
  std::int64_t dealt = 0;
  for (const std::int64_t t : sample()) {
    if (own_.contains(t) && dealt++ % job_.grid().tp().size() == job_.grid().tp().rank()) {
      rows.push_back(t);
    }
  }
  Comparison mine;
  run_agreed(world, [&] {
    const std::function<void()> beat = [&world] { world.progress().tick(); };
    const BeatingSource beating(job_.source(), beat);
    const RecordingSource source(beating, world.rank() == 0 ? one_device_reads_ : own_reads_);
    const ReferenceResult expected = reference(source, rows, mine);
    for (std::size_t i = 0; i < expected.y.size(); ++i) {
      judge(rows[i / static_cast<std::size_t>(batch_.hidden)],
            static_cast<std::int64_t>(i) % batch_.hidden, expected.y[i], expected.bound[i], mine);
    }
  });
  return agreed(mine);
}

const std::optional<DropCheck>& LayerCheck::judge_drops() {
  const auto* moe = std::get_if<MoeSpec>(&spec_);
  if (moe != nullptr && moe->capacity) drops_ = check_drops(job_, *moe, batch_, routing_, kept_);
  return drops_;
}

/// "1.5 instead of 2". A NaN's sign means nothing.
std::string shown(const Spot& at) {
  const auto text = [](double v) { return std::isnan(v) ? "NaN" : fmt::format("{:.9g}", v); };
  if (std::isnan(at.found) && std::isnan(at.expected)) return "NaN, as on one device";
  return fmt::format("{} instead of {}", text(at.found), text(at.expected));
}

ReadComparison LayerCheck::compare_weights() const {
  job_.world().progress().enter("the comparison of weights");
  // The reference reads the experts of a rank's own tokens.
  const bool all = job_.options().reduce == Reduce::kExact && !is_moe(spec_);
  return compare_reads(job_.world(), own_reads_, one_device_reads_,
                       all ? Cut::kCanonical : Cut::kByRanks);
}

void explain(Report& report, std::int64_t layer, const char* what, const Comparison& comparison) {
  if (comparison.wrong == 0) return;
  const Spot& at = comparison.first;
  report.note(fmt::format("layer {}: {} in {} values, first at token {}, column {} on rank {}: {}",
                          layer, what, comparison.wrong, at.token, at.column, at.rank, shown(at)));
}

void explain(Report& report, std::int64_t layer, const ReadComparison& weights) {
  if (weights.differing == 0) return;
  report.note(fmt::format("layer {}: other weights in {} on rank{} {}, first: {}", layer,
                          counted(weights.differing, "read"), weights.ranks.size() == 1 ? "" : "s",
                          layer_text(weights.ranks), weights.first));
}

/// What a row of the table says of a layer beside the results.
struct LayerWords {
  std::string kind;
  std::string shard;
  std::string shape;
};

LayerWords words_for(const Job& job, const LayerSpec& spec) {
  const Grid& grid = job.grid();
  const std::string shard = fmt::format("tp {} x dp {}", grid.tp().size(), grid.dp_size());
  if (const auto* dense = std::get_if<FfnSpec>(&spec)) {
    return {kind_text(spec), shard,
            fmt::format("{}x{}", dense->hidden_size, dense->intermediate_size)};
  }
  const auto& moe = std::get<MoeSpec>(spec);
  return {kind_text(spec), fmt::format("{}, etp {} x ep {}", shard, grid.etp().size(), grid.ep()),
          fmt::format("{}x{}", moe.hidden_size, moe.intermediate_size())};
}

void explain_routes(Report& report, std::int64_t layer, std::int64_t other,
                    const Comparison& float64) {
  if (other > 0) {
    report.note(fmt::format("layer {}: other experts or weights than one device for {}", layer,
                            counted(other, "token")));
  }
  if (float64.wrong_routes > 0) {
    report.note(
        fmt::format("layer {}: {} went to experts that no rounding explains, first token {}", layer,
                    counted(float64.wrong_routes, "token"), float64.first_route));
  }
}

/// What a capacity dropped and, of each kind, what was wrong with that.
void explain_drops(Report& report, std::int64_t layer, const DropCheck& drops, std::int64_t top_k) {
  report.note(fmt::format("layer {}: {}", layer, text_of(count_drops(drops.kept, top_k))));
  const auto explain = [&](std::int64_t tokens, std::int64_t first, const char* what) {
    if (tokens == 0) return;
    report.note(fmt::format("layer {}: {} {}, first token {}", layer, counted(tokens, "token"),
                            what, first));
  };
  explain(drops.wrong_routes, drops.first_route, "went to experts that no rounding explains");
  explain(drops.wrong_weights, drops.first_weight, "have weights that no rounding explains");
  explain(drops.wrong_drops, drops.first_drop, "kept other experts than the capacity leaves them");
}

/// What memory can't hold is read again for every pass.
void explain_residency(Report& report, std::int64_t layer, Residency residency) {
  if (residency == Residency::kResident) return;
  report.note(fmt::format(
      "layer {}: experts are read when rows come to them (this machine's memory can't hold them)",
      layer));
}

/// Checks one layer, adds its row; the number of wrong values, routes and differing reads.
std::int64_t check_layer(Job& job, std::int64_t layer, KernelNames& kernels, Report& report) {
  LayerCheck check(job, layer);
  kernels.add(layer, check.kernel().name);
  check.run_distributed();
  check.run_one_device();
  const Comparison bits = check.compare_bits();
  const std::int64_t other_routes = check.compare_routing();
  const Comparison nan = check.find_nan();
  const std::optional<DropCheck> drops = check.judge_drops();
  Comparison float64 = check.compare_float64();
  if (drops) float64.near_ties = drops->near_ties;
  const ReadComparison weights = check.compare_weights();

  const bool exact = job.options().reduce == Reduce::kExact;
  std::int64_t wrong =
      check.wrong_values() + other_routes + float64.wrong_routes + weights.differing;
  if (drops) wrong += drops->wrong_routes + drops->wrong_weights + drops->wrong_drops;
  const LayerWords words = words_for(job, check.spec());
  const auto count = [](std::int64_t n) {
    return Cell::of(static_cast<double>(n), fmt::format("{}", n));
  };
  report.row(
      {count(layer), Cell::of(words.kind), Cell::of(words.shard), Cell::of(words.shape),
       count(check.batch().tokens), count(bits.bits), count(weights.differing),
       count(check.sampled_tokens()), Cell::of(float64.worst, fmt::format("{:.3f}", float64.worst)),
       count(float64.near_ties), Cell::of(fmt::format("{:016x}", fingerprint(check.one_device()))),
       Cell::of(wrong == 0 ? "OK" : "FAILED")});
  explain_residency(report, layer, job.residency(check.spec()));
  explain(report, layer, weights);
  explain(report, layer, exact ? "other bits than one device" : "(allowed) other bits", bits);
  explain(report, layer, "NaN", nan);
  explain(report, layer, "outside the float64 bound", float64);
  explain_routes(report, layer, other_routes, float64);
  if (drops) explain_drops(report, layer, *drops, std::get<MoeSpec>(check.spec()).route.top_k);
  return wrong;
}

}  // namespace

int verify(Job& job) {
  Report report = job.report();
  report.columns({{"layer", "", "layer"},
                  {"kind", "", "kind"},
                  {"shard", "", "shard"},
                  {"HxI", "", "shape"},
                  {"tokens", "", "tokens"},
                  {"differing", "bits", "differing_bits"},
                  {"differing", "reads", "differing_reads"},
                  {"float64", "tokens", "float64_tokens"},
                  {"err/bound", "max", "max_error_over_bound"},
                  {"near", "ties", "near_ties"},
                  {"fingerprint", "", "fingerprint"},
                  {"verdict", "", "verdict"}});
  if (job.options().dry_run) return print_plan(job, report);
  if (job.options().reduce == Reduce::kFast) {
    report.note(
        "weights are compared as the reference reads them (fast layers cut them by the ranks)");
  }
  std::int64_t wrong = 0;
  KernelNames kernels;
  std::optional<ProgressLine> progress(std::in_place, "layer", std::ssize(job.layers()),
                                       job.world().rank() == 0 && !job.options().quiet);
  for (const std::int64_t layer : job.layers()) {
    progress->begin();
    wrong += check_layer(job, layer, kernels, report);
  }
  progress.reset();
  kernels.state(report);
  report.note(fmt::format("Out of bounds values : {} {}", wrong, wrong == 0 ? "OK" : "FAILED"));
  publish(job, report);
  return static_cast<int>(wrong == 0 ? ExitCode::kOk : ExitCode::kVerificationFailed);
}

}  // namespace gatefold
