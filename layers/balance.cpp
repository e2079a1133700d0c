#include "layers/balance.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "parallel/agreement.h"
#include "runtime/canonical.h"
#include "runtime/dtype.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// What a token, or a node of the tree over tokens, has of fp32 values: P of each expert, and
/// log_sum² behind them.
std::int64_t width(const LoadShape& shape) { return shape.experts + 1; }

/// A stack of such values, merged as a plan says.
class Stack {
 public:
  explicit Stack(std::int64_t width) : width_(as_size(width)) {}

  /// Room for one more on top.
  std::span<float> push() {
    values_.resize(values_.size() + width_);
    return std::span(values_).last(width_);
  }
  void merge(int times) {
    for (int i = 0; i < times; ++i) {
      const std::span<float> upper = std::span(values_).last(width_);
      const std::span<float> lower = std::span(values_).last(2 * width_).first(width_);
      std::ranges::transform(lower, upper, lower.begin(), std::plus<>());
      values_.resize(values_.size() - width_);
    }
  }
  std::span<const float> values() const { return values_; }

 private:
  std::size_t width_;
  std::vector<float> values_;
};

/// The tree over one sequence's tokens, and which of them each rank has.
struct Sequence {
  SumTree tree;
  std::vector<Range> runs;  // [ranks]

  Sequence(const LoadShape& shape, std::int64_t number, std::span<const Range> tokens)
      : tree(Blocks{shape.length, shape.length}) {
    const std::int64_t begin = number * shape.length;
    for (const Range& rank : tokens) {
      runs.push_back({std::clamp<std::int64_t>(rank.begin - begin, 0, shape.length),
                      std::clamp<std::int64_t>(rank.end - begin, 0, shape.length)});
    }
  }
};

std::vector<Range> runs_of_ranks(Communicator& world, const LoadShape& shape,
                                 const ScoredTokens& own) {
  struct Said {
    Range run;
    std::int64_t length = 0;
  };
  std::vector<Said> said(as_size(world.size()));
  said[as_size(world.rank())] = {{own.first, own.first + own.rows}, shape.length};
  all_gather<Said>(world, said);
  std::vector<Range> runs;
  std::int64_t next = 0;
  for (const auto& [run, length] : said) {
    if (length != said.front().length) {
      throw Error(ExitCode::kUsage,
                  fmt::format("sequences of {} tokens on rank {} and of {} on rank 0 (it is one "
                              "batch); give all ranks one length",
                              length, runs.size(), said.front().length));
    }
    if (run.begin != next || run.size() < 0) {
      throw Error(
          ExitCode::kUsage,
          fmt::format("tokens {} to {} on a rank, behind {} on those before it (runs follow "
                      "each other in the order of ranks); pass the batch's own numbers",
                      run.begin, run.end, next));
    }
    next = run.end;
    runs.push_back(run);
  }
  if (next == shape.tokens()) return runs;
  throw Error(ExitCode::kUsage,
              fmt::format("{} tokens on all ranks ({} sequences of {} are {}); pass all of them",
                          next, shape.sequences, shape.length, shape.tokens()));
}

/// The roots of this rank's tokens in every sequence, one behind the other.
std::vector<float> own_roots(std::span<const Sequence> sequences, const LoadShape& shape,
                             const ScoredTokens& own, int rank) {
  std::vector<float> roots;
  std::int64_t row = 0;
  for (const Sequence& sequence : sequences) {
    Stack stack(width(shape));
    for (const int merges : sequence.tree.local_plan(sequence.runs[as_size(rank)]).merges) {
      const std::span<float> values = stack.push();
      std::copy_n(own.scores + row * shape.experts, shape.experts, values.begin());
      const float log_sum = own.log_sums == nullptr ? 0.0F : own.log_sums[row];
      values.back() = log_sum * log_sum;
      ++row;
      stack.merge(merges);
    }
    roots.insert(roots.end(), stack.values().begin(), stack.values().end());
  }
  return roots;
}

/// All ranks' roots, rank by rank, and where each rank's begin.
struct AllRoots {
  std::vector<float> values;
  std::vector<std::int64_t> next;  // [ranks] the first that isn't merged yet
};

AllRoots gather_roots(Communicator& world, std::span<const Sequence> sequences,
                      const LoadShape& shape, std::span<const float> own) {
  AllRoots all;
  std::vector<std::int64_t> bytes;
  for (int rank = 0; rank < world.size(); ++rank) {
    std::int64_t count = 0;
    for (const Sequence& sequence : sequences) {
      count += sequence.tree.local_plan(sequence.runs[as_size(rank)]).roots * width(shape);
    }
    all.next.push_back(std::ssize(all.values));
    all.values.resize(all.values.size() + as_size(count));
    bytes.push_back(count * size_of(DType::kF32));
  }
  std::ranges::copy(own, all.values.begin() + all.next[as_size(world.rank())]);
  world.host().all_gather_v(reinterpret_cast<std::byte*>(all.values.data()), bytes);
  return all;
}

/// The one value of a sequence. Merges each rank's roots of it, in order.
std::vector<float> merged(const Sequence& sequence, const LoadShape& shape, AllRoots& all) {
  Stack stack(width(shape));
  const MergePlan plan = sequence.tree.global_plan(sequence.runs);
  std::size_t leaf = 0;
  for (std::size_t rank = 0; rank < sequence.runs.size(); ++rank) {
    const int roots = sequence.tree.local_plan(sequence.runs[rank]).roots;
    for (int i = 0; i < roots; ++i, ++leaf) {
      std::copy_n(all.values.begin() + all.next[rank], width(shape), stack.push().begin());
      all.next[rank] += width(shape);
      stack.merge(plan.merges[leaf]);
    }
  }
  return {stack.values().begin(), stack.values().end()};
}

/// [sequences, 2, E]: tokens of this rank that go to an expert, and whose first choice it is.
std::vector<std::int64_t> own_counts(const LoadShape& shape, const ScoredTokens& own) {
  std::vector<std::int64_t> counts(as_size(shape.sequences * 2 * shape.experts));
  for (std::int64_t row = 0; row < own.rows; ++row) {
    const std::int64_t sequence = (own.first + row) / shape.length;
    std::int64_t* chosen = counts.data() + sequence * 2 * shape.experts;
    const std::int32_t* ids = own.ids + row * shape.top_k;
    for (std::int64_t i = 0; i < shape.top_k; ++i) ++chosen[ids[i]];
    ++chosen[shape.experts + ids[0]];
  }
  return counts;
}

std::vector<std::int64_t> sum_over_ranks(Communicator& world,
                                         const std::vector<std::int64_t>& own) {
  const std::size_t n = own.size();
  std::vector<std::int64_t> all(n * as_size(world.size()));
  std::ranges::copy(own, all.begin() + static_cast<std::ptrdiff_t>(n) * world.rank());
  const std::vector<std::int64_t> parts(as_size(world.size()),
                                        static_cast<std::int64_t>(n * sizeof(std::int64_t)));
  world.host().all_gather_v(reinterpret_cast<std::byte*>(all.data()), parts);
  std::vector<std::int64_t> sum(n);
  for (std::size_t i = 0; i < all.size(); ++i) sum[i % n] += all[i];
  return sum;
}

void check(const LoadShape& shape) {
  if (shape.sequences >= 0 && shape.length > 0 && shape.experts > 0 && shape.top_k > 0 &&
      shape.top_k <= shape.experts) {
    return;
  }
  throw Error(ExitCode::kUsage,
              fmt::format("{} sequences of {} tokens, {} of {} experts each (lengths and experts "
                          "are 1 or more, and a token has at most all of them); correct them",
                          shape.sequences, shape.length, shape.top_k, shape.experts));
}

}  // namespace

std::vector<LoadSums> sum_loads(Communicator& world, const LoadShape& shape,
                                const ScoredTokens& own) {
  check(shape);
  const std::vector<Range> tokens = runs_of_ranks(world, shape, own);
  if (shape.sequences == 0) return {};
  std::vector<Sequence> sequences;
  for (std::int64_t s = 0; s < shape.sequences; ++s) sequences.emplace_back(shape, s, tokens);
  AllRoots roots =
      gather_roots(world, sequences, shape, own_roots(sequences, shape, own, world.rank()));
  const std::vector<std::int64_t> counts = sum_over_ranks(world, own_counts(shape, own));
  std::vector<LoadSums> sums;
  auto count = counts.begin();
  for (const Sequence& sequence : sequences) {
    LoadSums& sum = sums.emplace_back();
    sum.tokens = shape.length;
    sum.scores = merged(sequence, shape, roots);
    sum.squares = sum.scores.back();
    sum.scores.pop_back();
    for (std::vector<std::int64_t>* part : {&sum.chosen, &sum.best}) {
      part->assign(count, count + shape.experts);
      count += shape.experts;
    }
  }
  return sums;
}

LoadSums whole_batch(std::span<const LoadSums> sequences) {
  LoadSums batch;
  if (sequences.empty()) return batch;
  const std::size_t experts = sequences.front().scores.size();
  batch.chosen.resize(experts);
  batch.best.resize(experts);
  const auto count = static_cast<std::int64_t>(sequences.size());
  const MergePlan plan = SumTree(Blocks{count, count}).local_plan({0, count});
  Stack stack(static_cast<std::int64_t>(experts) + 1);
  for (std::size_t s = 0; s < sequences.size(); ++s) {
    const LoadSums& sequence = sequences[s];
    batch.tokens += sequence.tokens;
    for (std::size_t e = 0; e < experts; ++e) {
      batch.chosen[e] += sequence.chosen[e];
      batch.best[e] += sequence.best[e];
    }
    const std::span<float> values = stack.push();
    std::ranges::copy(sequence.scores, values.begin());
    values.back() = sequence.squares;
    stack.merge(plan.merges[s]);
  }
  batch.scores.assign(stack.values().begin(), stack.values().end() - 1);
  batch.squares = stack.values().back();
  return batch;
}

double balance_loss(BalanceLoss loss, const LoadSums& sums, std::int64_t top_k) {
  if (sums.tokens == 0) return 0;
  const std::vector<std::int64_t>& counts = loss == BalanceLoss::kSwitch ? sums.best : sums.chosen;
  double sum = 0;
  for (std::size_t e = 0; e < counts.size(); ++e) {
    sum += static_cast<double>(counts[e]) * static_cast<double>(sums.scores[e]);
  }
  const auto tokens = static_cast<double>(sums.tokens);
  const double share = loss == BalanceLoss::kMegatron ? static_cast<double>(top_k) : 1.0;
  return static_cast<double>(counts.size()) * sum / (tokens * tokens * share);
}

double loss_at_balance(BalanceLoss loss, std::int64_t top_k) {
  return loss == BalanceLoss::kTransformers ? static_cast<double>(top_k) : 1.0;
}

double mean_sequence_loss(BalanceLoss loss, std::span<const LoadSums> sequences,
                          std::int64_t top_k) {
  if (sequences.empty()) return 0;
  double sum = 0;
  for (const LoadSums& sequence : sequences) sum += balance_loss(loss, sequence, top_k);
  return sum / static_cast<double>(sequences.size());
}

double z_loss(const LoadSums& sums) {
  return sums.tokens == 0 ? 0
                          : static_cast<double>(sums.squares) / static_cast<double>(sums.tokens);
}

double weighed_losses(const BalanceTerms& terms, std::span<const LoadSums> sequences,
                      std::int64_t top_k) {
  const LoadSums batch = whole_batch(sequences);
  const double balance = terms.per_sequence ? mean_sequence_loss(terms.loss, sequences, top_k)
                                            : balance_loss(terms.loss, batch, top_k);
  return terms.coefficient * balance + terms.z_coefficient * z_loss(batch);
}

double busiest_expert(const LoadSums& sums) {
  const std::int64_t all = std::accumulate(sums.chosen.begin(), sums.chosen.end(), std::int64_t{0});
  if (all == 0) return 0;
  return static_cast<double>(std::ranges::max(sums.chosen)) *
         static_cast<double>(sums.chosen.size()) / static_cast<double>(all);
}

void update_correction_bias(const LoadSums& batch, float rate, std::span<float> bias) {
  const std::int64_t all =
      std::accumulate(batch.chosen.begin(), batch.chosen.end(), std::int64_t{0});
  for (std::size_t e = 0; e < bias.size(); ++e) {
    const std::int64_t below = all - static_cast<std::int64_t>(bias.size()) * batch.chosen[e];
    if (below > 0) bias[e] += rate;
    if (below < 0) bias[e] -= rate;
  }
}

}  // namespace gatefold
