#include "layers/balance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "launch/expert_load.h"
#include "launch/job.h"
#include "layers/router.h"
#include "layers/seeded_source.h"
#include "parallel/agreement.h"
#include "runtime/error.h"
#include "runtime/hash.h"

namespace gatefold {
namespace {

constexpr std::int64_t kChunkRows = 1024;
/// Of seeded tokens, so that a seeded router's logits have 1: its scores are then far from 0 and 1,
/// as a trained one's are.
constexpr float kDeviation = 0.25F;

/// Whether the table has it: 0, 1, 2, 5, 10, 20, 50 ... and the last.
bool is_shown(std::int64_t step, std::int64_t last) {
  std::int64_t power = 1;
  while (power * 10 <= step) power *= 10;
  const bool round = step == power || step == 2 * power || step == 5 * power;
  return step == 0 || round || step == last;
}

/// Decimals of a bias with which an update by `rate` shows.
int bias_digits(double rate) {
  int digits = 3;
  for (double shown = 1e-3; digits < 9 && rate < 0.999 * shown; shown /= 10) ++digits;
  return digits;
}

MoeSpec corrected_layer(const Job& job) {
  const std::vector<std::int64_t>& layers = job.layers();
  const auto fail = [](const std::string& problem, const std::string& why, const char* what) {
    throw AgreedError(ExitCode::kUsage, fmt::format("{} ({}); {}", problem, why, what));
  };
  if (layers.size() > 1) {
    fail(fmt::format("--layers {}", layer_text(layers)), "balance takes one layer's router",
         "give one");
  }
  if (!job.config().is_moe(layers.front())) {
    fail(fmt::format("layer {} is dense", layers.front()), "it has no router",
         "choose a mixture of experts with --layers, or another model");
  }
  LayerSpec spec = job.layer_spec(layers.front());
  auto& moe = std::get<MoeSpec>(spec);
  if (!moe.correction_bias) {
    fail(fmt::format("the router of layer {} has no correction bias", layers.front()),
         fmt::format("a {} model's is balanced by a loss in training", job.config().model_type),
         "choose a model that has one, such as deepseek_v3, kimi_k2 or glm4_moe");
  }
  return moe;
}

/// Tokens of each step: a file's, the same again and again, or new ones of the seed. Of those each
/// is sqrt(1 - skew^2) times a token of seeded_tokens() and skew times one that all share.
class StepTokens {
 public:
  StepTokens(const Job& job, std::int64_t hidden, std::int64_t count)
      : options_(job.options()), hidden_(hidden), count_(count), dtype_(job.dtype()) {
    if (!options_.input.empty()) {
      batch_ = job.tokens(hidden, count);
      return;
    }
    common_.resize(static_cast<std::size_t>(hidden));
    seeded_tokens(SplitMix64::mix(~options_.seed), {0, 1}, hidden, DType::kF32, common_.data());
    const auto skew = static_cast<float>(options_.skew);
    own_share_ = kDeviation * std::sqrt(1.0F - skew * skew);
    for (float& value : common_) value *= kDeviation * skew;
  }

  /// Rows of a step's tokens, [rows.size(), hidden] in the job's dtype, valid until the next call.
  const std::byte* rows(std::int64_t step, Range rows) {
    if (!options_.input.empty()) return batch_.row(rows.begin);
    const std::int64_t n = rows.size() * hidden_;
    values_.resize(static_cast<std::size_t>(n));
    bytes_.resize(static_cast<std::size_t>(n * size_of(dtype_)));
    const std::int64_t before = step * count_;
    seeded_tokens(options_.seed, {before + rows.begin, before + rows.end}, hidden_, DType::kF32,
                  values_.data());
    for (std::size_t i = 0; i < values_.size(); ++i) {
      values_[i] = own_share_ * values_[i] + common_[i % common_.size()];
    }
    convert(DType::kF32, reinterpret_cast<const std::byte*>(values_.data()), dtype_, bytes_.data(),
            n);
    return bytes_.data();
  }

 private:
  const Options& options_;
  std::int64_t hidden_;
  std::int64_t count_;
  DType dtype_;
  TokenBatch batch_;
  float own_share_ = 1.0F;
  std::vector<float> common_;  // [hidden]
  std::vector<float> values_;
  std::vector<std::byte> bytes_;
};

/// The router and this rank's share of each step's tokens.
class RouterSteps {
 public:
  RouterSteps(const Job& job, const MoeSpec& spec)
      : job_(job), spec_(spec), count_(job.token_count(spec.hidden_size)) {
    shape_.length = job.options().sequence_length > 0 ? job.options().sequence_length : count_;
    shape_.sequences = count_ / shape_.length;
    shape_.experts = spec.route.experts;
    shape_.top_k = spec.route.top_k;
    const Range group = job.own_tokens(count_);
    const Communicator& tp = job.grid().tp();
    const Range part = even_part(group.size(), tp.size(), tp.rank());
    own_ = {group.begin + part.begin, group.begin + part.end};
    tokens_.emplace(job, spec.hidden_size, count_);
    run_agreed(job.world(), [&] {
      Device& device = *job.place().device;
      router_.emplace(spec, job.source(), device);
      const std::int64_t rows = std::min(kChunkRows, own_.size());
      x_ = device.allocate(rows * spec.hidden_size * size_of(job.dtype()));
      scores_ = device.allocate(rows * shape_.experts * size_of(DType::kF32));
      log_sums_ = device.allocate(rows * size_of(DType::kF32));
      const auto all = static_cast<std::size_t>(own_.size());
      host_scores_.resize(all * static_cast<std::size_t>(shape_.experts));
      host_log_sums_.resize(all);
      ids_.resize(all * static_cast<std::size_t>(shape_.top_k));
    });
    bias_ = router_->correction_bias();
  }

  const LoadShape& shape() const { return shape_; }
  const std::vector<float>& bias() const { return bias_; }

  /// Loads of every sequence of a step's tokens. Collective.
  std::vector<LoadSums> sums(std::int64_t step) {
    run_agreed(job_.world(), [&] {
      for (std::int64_t at = own_.begin; at < own_.end; at += kChunkRows) {
        route(step, {at, std::min(at + kChunkRows, own_.end)});
      }
    });
    job_.world().progress().tick();
    return sum_loads(
        job_.world(), shape_,
        {own_.begin, own_.size(), host_scores_.data(), host_log_sums_.data(), ids_.data()});
  }

  void update(const LoadSums& batch) {
    update_correction_bias(batch, static_cast<float>(job_.options().rate), bias_);
    run_agreed(job_.world(), [&] { router_->set_correction_bias(bias_); });
  }

 private:
  void route(std::int64_t step, Range rows) {
    Device& device = *job_.place().device;
    const std::int64_t n = rows.size();
    device.upload(x_.data(), tokens_->rows(step, rows),
                  n * spec_.hidden_size * size_of(job_.dtype()));
    router_->route(x_.data(), job_.dtype(), n, chosen_);
    router_->score(n, scores_.as<float>(), log_sums_.as<float>());
    const std::int64_t first = rows.begin - own_.begin;
    std::ranges::copy(chosen_.ids, ids_.begin() + first * shape_.top_k);
    device.download(reinterpret_cast<std::byte*>(host_scores_.data() + first * shape_.experts),
                    scores_.data(), n * shape_.experts * size_of(DType::kF32));
    device.download(reinterpret_cast<std::byte*>(host_log_sums_.data() + first), log_sums_.data(),
                    n * size_of(DType::kF32));
  }

  const Job& job_;
  const MoeSpec& spec_;
  std::int64_t count_;
  LoadShape shape_;
  Range own_;
  std::optional<StepTokens> tokens_;
  std::optional<Router> router_;
  Buffer x_;
  Buffer scores_;
  Buffer log_sums_;
  Choices chosen_;
  std::vector<float> host_scores_;    // [own rows, E]
  std::vector<float> host_log_sums_;  // [own rows]
  std::vector<std::int32_t> ids_;     // [own rows, k]
  std::vector<float> bias_;           // [E]
};

Cell whole(std::int64_t n) { return Cell::of(static_cast<double>(n), fmt::format("{}", n)); }
Cell real(double n, int digits = 3) { return Cell::of(n, fmt::format("{:.{}f}", n, digits)); }

std::vector<Column> balance_columns() {
  std::vector<Column> columns = {{"step", "", "step"},
                                 {"least", "tokens", "least_tokens"},
                                 {"mean", "tokens", "mean_tokens"},
                                 {"most", "tokens", "most_tokens"},
                                 {"load", "max/mean", "load_max_over_mean"},
                                 {"entropy", "/ log2 E", "load_entropy_share"},
                                 {"bias", "least", "bias_least"},
                                 {"bias", "most", "bias_most"}};
  for (const auto& [loss, name] : kBalanceLosses) {
    columns.push_back({std::string(name), "loss", fmt::format("loss_{}", name)});
  }
  columns.push_back({"sequence", "loss", "loss_sequence"});
  columns.push_back({"z", "loss", "loss_z"});
  return columns;
}

std::vector<Cell> cells_of(std::int64_t step, const RouterSteps& router, int digits,
                           const std::vector<LoadSums>& sequences, const LoadSums& batch) {
  const std::int64_t k = router.shape().top_k;
  const double mean =
      static_cast<double>(batch.tokens * k) / static_cast<double>(router.shape().experts);
  const auto [least, most] = std::ranges::minmax(router.bias());
  std::vector<Cell> cells = {whole(step),
                             whole(std::ranges::min(batch.chosen)),
                             real(mean, 1),
                             whole(std::ranges::max(batch.chosen)),
                             real(busiest_expert(batch)),
                             real(entropy_share(batch.chosen)),
                             real(static_cast<double>(least), digits),
                             real(static_cast<double>(most), digits)};
  for (const auto& [loss, name] : kBalanceLosses) {
    cells.push_back(real(balance_loss(loss, batch, k)));
  }
  cells.push_back(real(mean_sequence_loss(BalanceLoss::kMegatron, sequences, k)));
  cells.push_back(real(z_loss(batch)));
  return cells;
}

std::string losses_text(const LoadShape& shape) {
  std::string text = "losses without a coefficient; at balance";
  for (const auto& [loss, name] : kBalanceLosses) {
    text += fmt::format("{} {} is {}", loss == BalanceLoss::kMegatron ? "" : ",", name,
                        loss_at_balance(loss, shape.top_k));
  }
  return text + fmt::format(
                    "; sequence: megatron's mean over {} of {}; z: mean of (log of the sum of "
                    "exp(logits))^2",
                    counted(shape.sequences, "sequence"), counted(shape.length, "token"));
}

void add_histogram(std::int64_t step, const LoadSums& batch, Report& report) {
  report.note(fmt::format("step {}: how many tokens experts get", step));
  for (const std::string& line : load_histogram(batch.chosen)) report.note(line);
}

}  // namespace

int balance(Job& job) {
  const MoeSpec spec = corrected_layer(job);
  Report report = job.report();
  job.world().progress().enter("balancing");
  RouterSteps router(job, spec);
  report.fact("router", fmt::format("{} of layer {}", kind_text(spec), spec.layer));
  report.columns(balance_columns());
  const int digits = bias_digits(job.options().rate);
  const std::int64_t last = job.options().steps;
  LoadSums first;
  LoadSums batch;
  std::vector<std::vector<Cell>> rows;
  for (std::int64_t step = 0; step <= last; ++step) {
    const std::vector<LoadSums> sequences = router.sums(step);
    batch = whole_batch(sequences);
    if (step == 0) first = batch;
    if (is_shown(step, last)) report.row(cells_of(step, router, digits, sequences, batch));
    if (step < last) router.update(batch);
  }
  report.note(losses_text(router.shape()));
  if (job.options().verbose) {
    add_histogram(0, first, report);
    add_histogram(last, batch, report);
  }
  const auto [least, most] = std::ranges::minmax(router.bias());
  report.note(
      fmt::format("max / mean: {:.3f} before, {:.3f} after {} of the bias by {}, which is "
                  "now {:.{}f} to {:.{}f}",
                  busiest_expert(first), busiest_expert(batch), counted(last, "update"),
                  job.options().rate, least, digits, most, digits));
  publish(job, report);
  return static_cast<int>(ExitCode::kOk);
}

}  // namespace gatefold
