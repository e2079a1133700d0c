#include "parallel/grid.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "runtime/error.h"

namespace gatefold {

Grid::Grid(Communicator& world, std::int64_t tp) : world_(&world) {
  if (tp < 1 || world.size() % tp != 0) {
    throw Error(ExitCode::kUsage,
                fmt::format("--tp {} does not divide {} ranks (world = tp x dp); use a divisor", tp,
                            world.size()));
  }
  tp_ = world.split(static_cast<int>(world.rank() / tp));
}

std::vector<Range> split_tokens(std::int64_t tokens, std::int64_t groups,
                                const std::vector<std::int64_t>& split) {
  std::vector<Range> parts;
  if (split.empty()) {
    for (std::int64_t g = 0; g < groups; ++g) parts.push_back(even_part(tokens, groups, g));
    return parts;
  }
  const bool negative = std::any_of(split.begin(), split.end(), [](auto n) { return n < 0; });
  const std::int64_t sum = std::accumulate(split.begin(), split.end(), std::int64_t{0});
  if (static_cast<std::int64_t>(split.size()) != groups || negative || sum != tokens) {
    throw Error(ExitCode::kUsage,
                fmt::format("--token-split {} doesn't fit {} tokens in {} dp groups (one count a "
                            "group, none negative, {} in all); correct the counts",
                            fmt::join(split, ","), tokens, groups, tokens));
  }
  std::int64_t begin = 0;
  for (const std::int64_t n : split) {
    parts.push_back({begin, begin + n});
    begin += n;
  }
  return parts;
}

}  // namespace gatefold
