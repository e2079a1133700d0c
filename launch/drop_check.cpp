#include "launch/drop_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "layers/moe_reference.h"
#include "layers/reference_capacity.h"
#include "parallel/agreement.h"

namespace gatefold {
namespace {

/// Tokens that are routed at a time: each has a score with its errors for every expert.
constexpr std::int64_t kTokensAtOnce = 256;

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

bool within(double found, double expected, double bound) {
  if (std::isnan(found) || std::isnan(expected)) return std::isnan(found) == std::isnan(expected);
  return found == expected || std::abs(found - expected) <= bound;
}

/// What one rank finds of its part of the tokens.
struct Routed {
  std::int64_t near_ties = 0;
  std::int64_t wrong_routes = 0;
  std::int64_t wrong_weights = 0;
  std::int64_t first_route = std::numeric_limits<std::int64_t>::max();
  std::int64_t first_weight = first_route;
};

void route_some(const Job& job, const MoeSpec& spec, const TokenBatch& batch,
                const Choices& routing, Range tokens, std::vector<double>& weights,
                Routed& routed) {
  const std::int64_t k = routing.top_k;
  const std::span<const std::int32_t> ids(routing.ids.data() + tokens.begin * k,
                                          as_size(tokens.size() * k));
  const MoeReferenceResult expected =
      reference_routes(spec, job.source(), batch.dtype, batch.as_float(tokens), tokens.size(), ids);
  routed.near_ties += expected.near_ties;
  std::vector<bool> wrong(as_size(tokens.size()));
  for (const WrongRoute& route : expected.wrong_routes) {
    if (routed.wrong_routes++ == 0) routed.first_route = tokens.begin + route.token;
    wrong[as_size(route.token)] = true;
  }
  for (std::int64_t t = 0; t < tokens.size(); ++t) {
    bool right = true;
    for (auto i = as_size(t * k); i < as_size((t + 1) * k); ++i) {
      const std::size_t at = as_size(tokens.begin * k) + i;
      weights[at] = expected.weights[i];
      right = right && within(routing.weights[at], expected.weights[i], expected.weight_bounds[i]);
    }
    if (right || wrong[as_size(t)]) continue;
    if (routed.wrong_weights++ == 0) routed.first_weight = tokens.begin + t;
  }
}

/// Tokens of which two kept other choices; `first` gets the first one.
std::int64_t differing(std::span<const std::uint8_t> a, std::span<const std::uint8_t> b,
                       std::int64_t k, std::int64_t& first) {
  std::int64_t tokens = 0;
  for (std::int64_t t = 0; t < std::ssize(a) / k; ++t) {
    if (std::ranges::equal(a.subspan(as_size(t * k), as_size(k)),
                           b.subspan(as_size(t * k), as_size(k)))) {
      continue;
    }
    if (tokens++ == 0) first = t;
  }
  return tokens;
}

}  // namespace

DropCheck check_drops(Job& job, const MoeSpec& spec, const TokenBatch& batch,
                      const Choices& routing, std::span<const std::uint8_t> kept) {
  Communicator& world = job.world();
  world.progress().enter("the float64 routing of all tokens");
  const std::int64_t k = routing.top_k;
  std::vector<double> weights;  // [tokens, k] float64's
  std::vector<Routed> all(as_size(world.size()));
  run_agreed(world, [&] {
    weights.resize(routing.ids.size());
    const Range own = even_part(batch.tokens, world.size(), world.rank());
    for (std::int64_t t = own.begin; t < own.end; t += kTokensAtOnce) {
      route_some(job, spec, batch, routing, {t, std::min(own.end, t + kTokensAtOnce)}, weights,
                 all[as_size(world.rank())]);
      world.progress().tick();
    }
  });
  all_gather<Routed>(world, all);
  std::vector<std::int64_t> parts;
  for (int r = 0; r < world.size(); ++r) {
    parts.push_back(even_part(batch.tokens, world.size(), r).size() * k *
                    static_cast<std::int64_t>(sizeof(double)));
  }
  world.all_gather_v(reinterpret_cast<std::byte*>(weights.data()), parts);

  DropCheck check;
  for (const Routed& routed : all) {
    check.near_ties += routed.near_ties;
    check.wrong_routes += routed.wrong_routes;
    check.wrong_weights += routed.wrong_weights;
    check.first_route = std::min(check.first_route, routed.first_route);
    check.first_weight = std::min(check.first_weight, routed.first_weight);
  }
  run_agreed(world, [&] {
    const auto kept_by = [&](const std::vector<double>& by) {
      return reference_kept(*spec.capacity, spec.route.experts, k, routing.ids, by);
    };
    check.kept = kept_by({routing.weights.begin(), routing.weights.end()});
    check.wrong_drops = differing(kept, check.kept, k, check.first_drop);
    std::int64_t first = 0;
    check.near_ties += differing(kept_by(weights), check.kept, k, first);
  });
  return check;
}

DropCount count_drops(std::span<const std::uint8_t> kept, std::int64_t top_k) {
  DropCount count{std::ssize(kept), std::ranges::count(kept, 0), std::ssize(kept) / top_k, 0};
  for (std::int64_t t = 0; t < count.tokens; ++t) {
    const auto of_token = kept.subspan(as_size(t * top_k), as_size(top_k));
    if (std::ranges::count(of_token, 0) == top_k) ++count.without;
  }
  return count;
}

std::string text_of(const DropCount& count) {
  const auto all = static_cast<double>(std::max<std::int64_t>(1, count.choices));
  return fmt::format("{} of {} choices dropped ({:.1f} %), {} of {} tokens without an expert",
                     count.dropped, count.choices, 100 * static_cast<double>(count.dropped) / all,
                     count.without, count.tokens);
}

}  // namespace gatefold
