#include "parallel/grid.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "runtime/error.h"

namespace gatefold {

Grid::Grid(Communicator& world, std::int64_t tp, std::int64_t ep) : world_(&world) {
  const auto check = [&world](const char* option, std::int64_t value, const char* product) {
    if (value >= 1 && world.size() % value == 0) return;
    throw Error(ExitCode::kUsage,
                fmt::format("--{} {} does not divide {} ranks (world = {}); use a divisor", option,
                            value, world.size(), product));
  };
  check("tp", tp, "tp x dp");
  if (ep != 0) check("ep", ep, "etp x ep");
  tp_ = world.split(static_cast<int>(world.rank() / tp));
  if (ep != 0) etp_ = world.split(static_cast<int>(world.rank() / (world.size() / ep)));
}

std::int64_t largest_divisor(std::int64_t ranks, std::int64_t most) {
  std::int64_t divisor = std::min(ranks, most);
  while (ranks % divisor != 0) --divisor;
  return divisor;
}

std::vector<Range> split_tokens(std::int64_t tokens, std::int64_t groups,
                                const std::vector<std::int64_t>& split) {
  std::vector<Range> parts;
  if (split.empty()) {
    for (std::int64_t g = 0; g < groups; ++g) parts.push_back(even_part(tokens, groups, g));
    return parts;
  }
  std::int64_t left = tokens;  // counted down, so that huge counts can't overflow a sum
  bool fits = static_cast<std::int64_t>(split.size()) == groups;
  for (const std::int64_t n : split) {
    fits = fits && n >= 0 && n <= left;
    if (fits) left -= n;
  }
  if (!fits || left != 0) {
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
