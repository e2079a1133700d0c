#include "launch/owners.h"

#include <fmt/format.h>

#include <numeric>
#include <string_view>

#include "runtime/error.h"
#include "runtime/quoted_name.h"

namespace gatefold {
namespace {

/// A grid that need not be this world's.
struct Shape {
  std::int64_t tp = 1;
  std::int64_t ranks = 1;
  std::int64_t ep = 0;  // 0: no experts

  std::int64_t etp() const { return ranks / ep; }
};

/// The grid of this world where the options fit it, else the smallest world's that they fit.
Shape shape_of(const Job& job) {
  const Options& options = job.options();
  Shape shape{.tp = options.tp > 0 ? options.tp : job.grid().tp().size(),
              .ranks = job.world().size()};
  if (job.grid().ep() == 0) return shape;
  const std::int64_t whole = std::lcm(shape.tp, std::max<std::int64_t>(1, options.ep));
  if (shape.ranks % whole != 0) shape.ranks = whole;
  shape.ep =
      options.ep > 0 ? options.ep : largest_divisor(shape.ranks, job.config().moe->route.experts);
  return shape;
}

/// "7": [7, 8), "0-3": [0, 4), "none".
std::string listed(Range range) {
  if (range.empty()) return "none";
  return fmt::format("{}-{}", range.begin, range.end - 1);
}

/// Of a column of the width I: a row of gate and up, a column of down.
std::int64_t parameters_per_column(const FfnSpec& spec) {
  const std::int64_t vectors = (spec.gate_bias ? 1 : 0) + (spec.up_bias ? 1 : 0);
  return (spec.gated() ? 3 : 2) * spec.hidden_size + vectors;
}

std::string amount(const Job& job, double parameters) {
  return fmt::format("{} parameters, {}", human(parameters, ""),
                     human(parameters * static_cast<double>(size_of(job.dtype())), "B"));
}

/// Of a dense layer or, as `what` says, of another MLP that is cut like one.
void add_dense_owners(const Job& job, const FfnSpec& spec, std::int64_t tp, std::string_view what,
                      Report& report) {
  const bool exact = job.options().reduce == Reduce::kExact;
  const Blocks blocks{spec.intermediate_size, exact ? job.options().blocks : tp};
  if (tp > blocks.count) {
    throw Error(ExitCode::kUsage, fmt::format("--tp {} is more than --blocks {} (a rank owns whole "
                                              "blocks); use a smaller tp or more blocks",
                                              tp, blocks.count));
  }
  report.note(
      fmt::format("{}tp {}: which blocks of {}, columns of I = {} and how much of the matrices",
                  what, tp, blocks.count, spec.intermediate_size));
  for (std::int64_t rank = 0; rank < tp; ++rank) {
    const Range run = owned_blocks(blocks.count, tp, rank);
    const Range columns = blocks.columns(run);
    const std::int64_t parameters = parameters_per_column(spec) * columns.size();
    report.note(fmt::format("  rank {}  blocks {}  columns {}  {}", rank, listed(run),
                            listed(columns), amount(job, static_cast<double>(parameters))));
  }
}

void add_expert_owners(const Job& job, const MoeSpec& spec, const Shape& shape, Report& report) {
  const Blocks blocks{spec.intermediate_size(), job.expert_blocks()};
  const std::int64_t etp = shape.etp();
  if (etp > blocks.count) {
    throw Error(ExitCode::kUsage,
                fmt::format("{} ranks share each expert of {} (a rank owns whole blocks); use a "
                            "larger --ep, or --expert-blocks {}",
                            etp, counted(blocks.count, "block"), etp));
  }
  report.note(fmt::format(
      "etp {} x ep {}: which of {} experts, blocks of {}, columns of I = {} and how much of the "
      "matrices; the router is on all ranks",
      etp, shape.ep, spec.route.experts, blocks.count, blocks.width));
  const ExpertPlacement placement{spec.route.experts, static_cast<int>(shape.ep)};
  const std::int64_t per_column = parameters_per_column(spec.experts.front());
  for (std::int64_t rank = 0; rank < shape.ranks; ++rank) {
    const Range experts = placement.owned(static_cast<int>(rank / etp));
    const Range run = owned_blocks(blocks.count, etp, rank % etp);
    const Range columns = blocks.columns(run);
    const std::int64_t parameters = per_column * columns.size() * experts.size();
    report.note(fmt::format("  rank {}  experts {}  blocks {}  columns {}  {}", rank,
                            listed(experts), listed(run), listed(columns),
                            amount(job, static_cast<double>(parameters))));
  }
}

}  // namespace

void add_owners(const Job& job, const LayerSpec& spec, Report& report) {
  const Shape shape = shape_of(job);
  if (const auto* dense = std::get_if<FfnSpec>(&spec)) {
    add_dense_owners(job, *dense, shape.tp, "", report);
    return;
  }
  const auto& moe = std::get<MoeSpec>(spec);
  add_expert_owners(job, moe, shape, report);
  for (const FfnSpec& shared : moe.shared) {
    add_dense_owners(job, shared, shape.tp, "shared expert, ", report);
  }
}

}  // namespace gatefold
