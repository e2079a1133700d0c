#include "launch/expert_load.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

#include "layers/dropper.h"
#include "layers/router.h"
#include "parallel/agreement.h"

namespace gatefold {
namespace {

constexpr std::int64_t kChunkRows = 1024;
/// Up to twice as many experts have a line each.
constexpr std::int64_t kLines = 32;
constexpr std::int64_t kLongestBar = 40;

double total_of(const ExpertRows& rows) {
  return static_cast<double>(std::accumulate(rows.begin(), rows.end(), std::int64_t{0}));
}

/// Of this rank's own tokens.
Choices route_own(const Job& job, const MoeSpec& spec, const TokenBatch& batch) {
  Device& device = job.device();
  Router router(spec, job.source(), device);
  const Communicator& tp = job.grid().tp();
  const Range group = job.own_tokens(batch.tokens);
  const Range part = even_part(group.size(), tp.size(), tp.rank());
  const Buffer x = device.allocate(kChunkRows * batch.row_bytes());
  Choices all;
  Choices chosen;
  all.top_k = spec.route.top_k;
  for (std::int64_t at = part.begin; at < part.end; at += kChunkRows) {
    const std::int64_t rows = std::min(kChunkRows, part.end - at);
    device.upload(x.data(), batch.row(group.begin + at), rows * batch.row_bytes());
    router.route(x.data(), batch.dtype, rows, chosen);
    all.rows += rows;
    all.ids.insert(all.ids.end(), chosen.ids.begin(), chosen.ids.end());
    all.weights.insert(all.weights.end(), chosen.weights.begin(), chosen.weights.end());
    job.world().progress().tick();
  }
  return all;
}

/// Over all ranks. Collective.
DropCount find_drops(Communicator& world, const MoeSpec& spec, const Choices& own,
                     std::int64_t tokens) {
  if (!spec.capacity) return {};
  Dropper dropper(world, *spec.capacity, spec.route.experts);
  dropper.decide(own, tokens, false);
  std::vector<DropCount> all(static_cast<std::size_t>(world.size()));
  all[static_cast<std::size_t>(world.rank())] = count_drops(dropper.kept(), own.top_k);
  all_gather<DropCount>(world, all);
  DropCount sum;
  for (const DropCount& one : all) {
    sum.choices += one.choices;
    sum.dropped += one.dropped;
    sum.tokens += one.tokens;
    sum.without += one.without;
  }
  return sum;
}

}  // namespace

double max_over_mean(const ExpertRows& rows) {
  const auto largest = static_cast<double>(*std::ranges::max_element(rows));
  return largest * static_cast<double>(rows.size()) / total_of(rows);
}

double entropy_bits(const ExpertRows& rows) {
  double bits = 0;
  for (const std::int64_t one : rows) {
    const double share = static_cast<double>(one) / total_of(rows);
    if (one > 0) bits -= share * std::log2(share);
  }
  return bits + 0.0;  // not -0
}

double entropy_share(const ExpertRows& rows) {
  return rows.size() < 2 ? 1.0 : entropy_bits(rows) / std::log2(static_cast<double>(rows.size()));
}

std::int64_t experts_without(const ExpertRows& rows) { return std::ranges::count(rows, 0); }

std::vector<std::string> load_histogram(const ExpertRows& rows) {
  const auto experts = static_cast<std::int64_t>(rows.size());
  const std::int64_t each = experts <= 2 * kLines ? 1 : ceil_div(experts, kLines);
  std::vector<std::int64_t> sums;
  for (std::int64_t e = 0; e < experts; ++e) {
    if (e % each == 0) sums.push_back(0);
    sums.back() += rows[static_cast<std::size_t>(e)];
  }
  const std::int64_t most = std::max<std::int64_t>(1, *std::ranges::max_element(sums));
  std::vector<std::string> lines;
  for (std::int64_t first = 0; first < experts; first += each) {
    const std::int64_t last = std::min(first + each, experts) - 1;
    const std::int64_t sum = sums[static_cast<std::size_t>(first / each)];
    // Rounded up, so that none but an idle expert has no bar.
    const std::int64_t bar = ceil_div(sum * kLongestBar, most);
    const std::string who =
        each == 1 ? fmt::format("expert {}", first) : fmt::format("experts {}-{}", first, last);
    lines.push_back(fmt::format("  {:<17}{:>9}{}{}", who, sum, bar > 0 ? "  " : "",
                                std::string(static_cast<std::size_t>(bar), '#')));
  }
  return lines;
}

ExpertLoad find_expert_load(const Job& job, const MoeSpec& spec, const TokenBatch& batch) {
  Communicator& world = job.world();
  world.progress().enter("the router");
  using Counts = std::array<std::int64_t, kMaxExperts>;
  std::vector<Counts> all;
  Choices own;
  run_agreed(world, [&] {
    all.resize(static_cast<std::size_t>(world.size()));
    own = route_own(job, spec, batch);
    Counts& mine = all[static_cast<std::size_t>(world.rank())];
    for (const std::int32_t expert : own.ids) ++mine[static_cast<std::size_t>(expert)];
  });
  all_gather<Counts>(world, all);
  ExpertRows rows(static_cast<std::size_t>(spec.route.experts));
  for (const Counts& one : all) {
    for (std::size_t e = 0; e < rows.size(); ++e) rows[e] += one[e];
  }
  return {std::move(rows), find_drops(world, spec, own, batch.tokens)};
}

}  // namespace gatefold
