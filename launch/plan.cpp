// --dry-run: which rank would own what.
#include <fmt/format.h>

#include "launch/job.h"

namespace gatefold {
namespace {

Cell number(std::int64_t n) { return Cell::of(static_cast<double>(n), fmt::format("{}", n)); }
Cell range(Range r) { return Cell::of(fmt::format("[{},{})", r.begin, r.end)); }

/// With experts, each layer's row says which group's they are.
std::vector<Column> columns_of(bool with_experts) {
  std::vector<Column> columns = {{"rank", "", "rank"}, {"tp", "", "tp"}, {"dp", "", "dp"}};
  if (with_experts) columns.insert(columns.end(), {{"etp", "", "etp"}, {"ep", "", "ep"}});
  columns.push_back({"layer", "", "layer"});
  if (with_experts) columns.push_back({"experts", "", "experts"});
  columns.insert(
      columns.end(),
      {{"blocks", "", "blocks"}, {"columns", "of I", "columns"}, {"tokens", "", "tokens"}});
  return columns;
}

/// What rank `rank` owns of a layer: experts, blocks of the width, and its columns.
std::vector<Cell> shard_of(const Job& job, const LayerSpec& spec, std::int64_t rank) {
  const auto cut = [](std::int64_t width, std::int64_t blocks, std::int64_t ranks,
                      std::int64_t own) {
    const Range run = owned_blocks(blocks, ranks, own);
    return std::vector<Cell>{range(run), range(Blocks{width, blocks}.columns(run))};
  };
  const Grid& grid = job.grid();
  const std::int64_t tp = grid.tp().size();
  if (const auto* dense = std::get_if<FfnSpec>(&spec)) {
    const std::int64_t blocks = job.options().reduce == Reduce::kExact ? job.options().blocks : tp;
    std::vector<Cell> cells = cut(dense->intermediate_size, blocks, tp, rank % tp);
    if (grid.ep() > 0) cells.insert(cells.begin(), Cell::of("-"));
    return cells;
  }
  const auto& moe = std::get<MoeSpec>(spec);
  const int etp = grid.etp().size();
  std::vector<Cell> cells = cut(moe.intermediate_size(), job.expert_blocks(), etp, rank % etp);
  const ExpertPlacement placement{moe.route.experts, static_cast<int>(grid.ep())};
  cells.insert(cells.begin(), range(placement.owned(static_cast<int>(rank) / etp)));
  return cells;
}

}  // namespace

int print_plan(const Job& job, Report& report) {
  const Grid& grid = job.grid();
  const bool with_experts = grid.ep() > 0;
  report.columns(columns_of(with_experts));
  const std::int64_t tp = grid.tp().size();
  const std::int64_t count = job.token_count(job.config().hidden_size);
  const std::vector<Range> tokens = split_tokens(count, grid.dp_size(), job.options().token_split);
  for (const std::int64_t layer : job.layers()) {
    const LayerSpec spec = job.layer_spec(layer);
    for (std::int64_t rank = 0; rank < job.world().size(); ++rank) {
      std::vector<Cell> cells = {number(rank), number(rank % tp), number(rank / tp)};
      if (with_experts) {
        const std::int64_t etp = grid.etp().size();
        cells.insert(cells.end(), {number(rank % etp), number(rank / etp)});
      }
      cells.push_back(number(layer));
      for (Cell& cell : shard_of(job, spec, rank)) cells.push_back(std::move(cell));
      cells.push_back(range(tokens[static_cast<std::size_t>(rank / tp)]));
      report.row(std::move(cells));
    }
  }
  report.note("dry run: nothing was computed");
  publish(job, report);
  return static_cast<int>(ExitCode::kOk);
}

}  // namespace gatefold
