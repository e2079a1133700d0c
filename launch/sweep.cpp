#include "launch/sweep.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "runtime/quoted_name.h"

namespace gatefold {
namespace {

std::vector<std::int64_t> given_or(const std::vector<std::int64_t>& given, std::int64_t otherwise) {
  return given.empty() ? std::vector<std::int64_t>{otherwise} : given;
}

/// Why these ranks can't share a layer; empty where they can.
std::string obstacle(const RankGrid& grid, const SweptModel& model, std::int64_t ranks) {
  if (grid.ranks > ranks) return fmt::format("it takes {} ranks of {}", grid.ranks, ranks);
  if (grid.ep > 0 && model.experts == 0) return "the model's layers are dense";
  if (grid.ep > 0 && grid.ranks / grid.ep > model.expert_blocks) {
    return fmt::format("{} ranks would share each expert, of {}", grid.ranks / grid.ep,
                       counted(model.expert_blocks, "block"));
  }
  if (grid.reduces.empty()) return fmt::format("there are {}", counted(model.blocks, "block"));
  return "";
}

/// Exact sums take a block for each rank.
std::vector<Reduce> possible(const std::vector<Reduce>& wanted, std::int64_t tp,
                             const SweptModel& model) {
  std::vector<Reduce> reduces = wanted;
  if (tp > model.blocks) std::erase(reduces, Reduce::kExact);
  return reduces;
}

}  // namespace

std::string RankGrid::text() const {
  if (tp == 0 && ep == 0) return counted(ranks, "rank");
  std::string text = fmt::format("tp {}", std::max<std::int64_t>(1, tp));
  if (ep > 0) text += fmt::format(", ep {}", ep);
  return text + fmt::format(" on {}", counted(ranks, "rank"));
}

SweepPlan plan_sweep(const Options& options, const SweptModel& model, std::int64_t ranks) {
  const Sweep& sweep = options.sweep;
  const std::vector<Reduce> reduces =
      sweep.reduces.empty() ? std::vector<Reduce>{options.reduce} : sweep.reduces;
  SweepPlan plan;
  if (sweep.tp.empty() && sweep.ep.empty() && sweep.dp.empty()) {
    plan.grids.push_back({ranks, 0, 0, reduces});
    return plan;
  }
  for (const std::int64_t dp : given_or(sweep.dp, 1)) {
    for (const std::int64_t ep : given_or(sweep.ep, 0)) {
      for (const std::int64_t tp : given_or(sweep.tp, 1)) {
        const std::int64_t least = std::lcm(tp, std::max<std::int64_t>(1, ep));
        const RankGrid grid{least * dp, tp, ep, possible(reduces, tp, model)};
        const std::string why = obstacle(grid, model, ranks);
        if (why.empty()) {
          plan.grids.push_back(grid);
        } else {
          plan.skipped.push_back(fmt::format("{} ({})", grid.text(), why));
        }
      }
    }
  }
  return plan;
}

std::int64_t scaled_tokens(Scaling scaling, std::int64_t tokens, std::int64_t ranks) {
  return scaling == Scaling::kWeak ? tokens * ranks : tokens;
}

}  // namespace gatefold
