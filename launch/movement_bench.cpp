#include "launch/movement_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>

#include "launch/plain_exchange.h"
#include "launch/routing_pattern.h"
#include "launch/timing.h"
#include "parallel/agreement.h"
#include "parallel/token_exchange.h"
#include "parallel/tree_sum.h"

namespace gatefold {
namespace {

/// Of one row.
constexpr double kSeconds = 0.4;
constexpr std::int64_t kPassesAnIteration = 50;

/// A row of roots is 8 KiB.
constexpr std::int64_t kSumColumns = 2048;
constexpr std::int64_t kMostSumRows = 2048;

constexpr std::int64_t kTokens = 128;  // of each rank
constexpr std::int64_t kHidden = 4096;
constexpr std::int64_t kExperts = 64;
constexpr std::int64_t kTopK = 8;

/// No zeros, and in fp32 and bf16 an ordinary number.
constexpr std::byte kValue{0x3f};

/// The experts of every rank's tokens, ids ascending.
std::vector<Choices> uniform_choices(std::int64_t experts, int ranks) {
  const RouteRule rule{.experts = experts, .top_k = kTopK};
  std::vector<Choices> all;
  for (int rank = 0; rank < ranks; ++rank) {
    const Range tokens{rank * kTokens, (rank + 1) * kTokens};
    all.push_back(patterned_choices({RoutingKind::kUniform, 0}, 0, rule, tokens));
    for (auto ids = all.back().ids.begin(); ids != all.back().ids.end(); ids += kTopK) {
      std::sort(ids, ids + kTopK);
    }
  }
  return all;
}

/// The received rows, each once, as numbers of where experts read them; in device memory.
Buffer rows_to_read(Device& device, const TokenExchange& exchange, std::int64_t& count) {
  std::set<std::int32_t> rows;
  const std::int64_t element = sizeof(std::int32_t);
  for (std::int64_t e = 0; e < exchange.own_experts(); ++e) {
    std::vector<std::int32_t> of_expert(static_cast<std::size_t>(exchange.rows(e)));
    device.download(reinterpret_cast<std::byte*>(of_expert.data()),
                    reinterpret_cast<const std::byte*>(exchange.input(e, 0, false).index),
                    std::ssize(of_expert) * element);
    rows.insert(of_expert.begin(), of_expert.end());
  }
  const std::vector<std::int32_t> list(rows.begin(), rows.end());
  count = std::ssize(list);
  Buffer index = device.allocate(count * element);
  device.upload(index.data(), reinterpret_cast<const std::byte*>(list.data()), count * element);
  return index;
}

std::int64_t most_rows(const TokenExchange& exchange) {
  std::int64_t most = 0;
  for (std::int64_t e = 0; e < exchange.own_experts(); ++e) most = std::max(most, exchange.rows(e));
  return most;
}

/// As experts end: every one's rows weighed and added.
void write_sums(Device& device, const TokenExchange& exchange, const Buffer& values) {
  for (std::int64_t e = 0; e < exchange.own_experts(); ++e) {
    WeighedRows rows = exchange.output(e, 0, exchange.rows(e), true);
    rows.rows = values.as<float>();
    rows.group_stride = rows.count * kGroup;
    device.weigh_rows(rows);
  }
}

}  // namespace

double times_library(const Movement& one) { return median_ratio(one.library, one.seconds); }

std::int64_t movement_passes(double seconds, std::int64_t iterations) {
  const double fitting = std::min(kSeconds / std::max(seconds, 1e-9), 1e6);
  return std::clamp(static_cast<std::int64_t>(fitting), std::min<std::int64_t>(3, iterations),
                    kPassesAnIteration * iterations);
}

std::vector<Movement> MovementBench::time_all() {
  std::vector<Movement> all;
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (std::int64_t rows = 1; rows <= kMostSumRows; rows *= 2) {
      all.push_back(time_sum(rows, dtype));
    }
  }
  all.push_back(time_dispatch());
  return all;
}

/// What this rank takes for the timed parts of a pass. Collective.
double MovementBench::seconds_of(const Side& side) {
  double seconds = 0;
  for (const Turn& turn : side) {
    turn.write();
    device_.synchronize();
    meet(world_);
    const double start = now();
    turn.move();
    comm_.wait();
    device_.synchronize();
    seconds += now() - start;
  }
  return seconds;
}

/// Both take turns in every pass, so that a drift of the machine's speed is both's.
void MovementBench::time_sides(const Side& own, const Side& library, Movement& movement) {
  double start = 0;
  for (int pass = 0; pass < 2; ++pass) {  // the first one touches memory
    start = now();
    seconds_of(own);
    seconds_of(library);
  }
  std::int64_t passes = movement_passes(now() - start, options_.iterations);
  world_.broadcast(reinterpret_cast<std::byte*>(&passes), sizeof(passes), 0);
  movement.seconds.resize(static_cast<std::size_t>(passes));
  movement.library.resize(static_cast<std::size_t>(passes));
  for (std::int64_t pass = -options_.warmup; pass < passes; ++pass) {
    const auto counted = static_cast<std::size_t>(std::max<std::int64_t>(0, pass));
    movement.seconds[counted] = seconds_of(own);
    movement.library[counted] = seconds_of(library);
  }
  slowest_of_ranks(world_, movement.seconds);
  slowest_of_ranks(world_, movement.library);
}

Buffer MovementBench::written(std::int64_t bytes) {
  Buffer memory = device_.allocate(bytes);
  device_.fill(memory.data(), kValue, bytes);
  return memory;
}

Movement MovementBench::time_sum(std::int64_t rows, DType dtype) {
  // As many blocks as layers have, or as the ranks need.
  const std::int64_t count = std::max<std::int64_t>(options_.blocks, world_.size());
  const SumTree tree(Blocks{count, count});
  std::vector<Range> runs;
  for (int rank = 0; rank < world_.size(); ++rank) {
    runs.push_back(owned_blocks(count, world_.size(), rank));
  }
  const std::int64_t values = rows * kSumColumns;
  const std::int64_t bytes = values * size_of(DType::kF32);
  const std::int64_t own_bytes =
      tree.local_plan(runs[static_cast<std::size_t>(world_.rank())]).roots * bytes;
  TreeSum sum(comm_, device_, tree, runs, kSumColumns);
  Buffer out;
  Buffer data;
  run_agreed(world_, [&] {
    sum.reserve(rows, dtype);
    out = written(values * size_of(dtype));
    data = written(bytes);
    comm_.reserve(2 * bytes);
  });

  Partials roots;
  const Side own{{[&] {
                    // All have met since the last sum: nothing to wait for.
                    roots = sum.stack(rows);
                    device_.fill(reinterpret_cast<std::byte*>(roots.data), kValue, own_bytes);
                  },
                  [&] { sum.sum(roots, nullptr, dtype, Rows::kReplicated, out.data()); }}};
  const Side library{{[&] { device_.fill(data.data(), kValue, bytes); },
                      [&] { comm_.all_reduce(data.as<float>(), values); }}};
  Movement movement{.what = "canonical sum",
                    .how = std::string(name_of(dtype)),
                    .bytes = bytes,
                    .is_all_reduce = true};
  time_sides(own, library, movement);
  return movement;
}

/// A step that has been planned. Timed are the rows' way to where experts work on them, where each
/// that came is read once, and the way of their sums home; what experts add is written in between.
Movement MovementBench::time_dispatch() {
  const ExpertPlacement placement{std::max<std::int64_t>(kExperts, world_.size()), world_.size()};
  const std::vector<Choices> choices = uniform_choices(placement.experts, world_.size());
  TokenExchange exchange(comm_, device_, placement, 1, kHidden, DType::kBf16,
                         Dispatcher::kAllToAll);
  exchange.plan(choices[static_cast<std::size_t>(world_.rank())]);

  const std::int64_t bytes = kTokens * kHidden * size_of(DType::kBf16);
  std::optional<PlainExchange> plain;
  Buffer x, y, index, values, tiled;
  Tiles tiles;
  run_agreed(world_, [&] {
    plain.emplace(comm_, device_, placement, choices, kHidden, DType::kBf16);
    x = written(bytes);
    y = written(bytes);
    index = rows_to_read(device_, exchange, tiles.rows);
    values = written(most_rows(exchange) * kHidden * size_of(DType::kF32));
    tiles.tile_rows = std::max<std::int64_t>(1, tiles.rows);
    tiles.width = kHidden;
    tiled = written(tiles.padded_rows() * kHidden * size_of(device_.storage(DType::kBf16)));
    tiles.data = tiled.data();
  });

  const auto write_x = [&] { device_.fill(x.data(), kValue, bytes); };
  const auto read = [&](const InputRows& rows) {
    device_.tile_rows(rows, DType::kBf16, kHidden, tiles);
  };
  const Side own{
      {write_x,
       [&] {
         exchange.dispatch(x.data());
         InputRows rows = exchange.input(0, 0, false);
         rows.index = index.as<std::int32_t>();
         read(rows);
       }},
      {[&] { write_sums(device_, exchange, values); }, [&] { exchange.combine({}, y.data()); }}};
  const Side library{{write_x,
                      [&] {
                        plain->dispatch(x.data());
                        read({.data = plain->rows(), .stride = kHidden});
                      }},
                     {[&] {
                        device_.fill(reinterpret_cast<std::byte*>(plain->sums()), kValue,
                                     plain->received_rows() * kHidden * size_of(DType::kF32));
                      },
                      [&] { plain->combine(y.data()); }}};
  Movement movement{.what = "dispatch + combine",
                    .how = fmt::format("{} x {} bf16, {} experts, top {}", kTokens, kHidden,
                                       placement.experts, kTopK),
                    .bytes = bytes};
  time_sides(own, library, movement);
  return movement;
}

}  // namespace gatefold
