#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "launch/options.h"
#include "launch/report.h"
#include "launch/timing.h"

/// What bench's table says, as pure functions of what was measured.
namespace gatefold {

/// Phases that layers name, and what lies outside all of them. An activation is part of gate_up.
constexpr std::array<std::string_view, 16> kPhases = {
    "route", "plan", "dispatch", "permute", "tile",   "gate_up", "down",       "weigh",
    "sum",   "add",  "exchange", "gather",  "shared", "combine", "all-reduce", "other"};
/// Whether ranks exchange in it; waiting for the slower one is part of that.
bool is_communication(std::string_view phase);

/// Seconds of each of kPhases.
using PhaseSeconds = std::array<double, kPhases.size()>;
/// What a pass of `whole` seconds consisted of; "other" is what is left.
PhaseSeconds phases_of(std::span<const RangeTimes::Range> ranges, double whole);
double communication(const PhaseSeconds& phases);

/// One row: a layer on some ranks, timed pass by pass beside the same on one rank.
struct Measured {
  std::string config;
  std::int64_t layer = 0;
  std::string kind;
  bool moe = false;
  std::int64_t tokens = 0;           // of the batch, each once
  std::int64_t one_rank_tokens = 0;  // the same, but with weak scaling
  int ranks = 1;
  std::int64_t tp = 1;
  std::int64_t dp = 1;
  std::int64_t ep = 0;  // 0: there are no experts
  DType dtype = DType::kF32;
  Reduce reduce = Reduce::kExact;
  Dispatcher dispatcher = Dispatcher::kAllToAll;
  Scaling scaling = Scaling::kStrong;

  std::vector<double> seconds;           // of each pass, the slowest rank's
  std::vector<double> one_rank_seconds;  // of each pass
  std::vector<double> fast_seconds;      // of each, of --reduce fast; empty: not timed
  std::optional<PhaseSeconds> phases;    // of a typical pass on its slowest rank
  std::optional<double> busiest;         // most ÷ mean over ranks: of rows, of time to compute

  std::optional<double> hottest_expert;  // its rows ÷ the mean of all experts
  std::optional<double> entropy;         // of the experts' shares of rows, bits
  std::optional<double> dropped;         // share of choices, where there is a capacity

  double flops = 0;         // of all ranks
  double weight_bytes = 0;  // that all ranks read
  double sent_bytes = 0;    // from any rank to another
  double sum_bytes = 0;     // [rows of a group, H] in fp32: what all-reduce's formula is for
  int group = 1;            // ranks that share such a sum

  std::optional<double> gemm_peak;                  // FLOP/s of the ranks at once
  std::optional<double> read_speed;                 // B/s of the ranks at once
  std::vector<double> all_reduce_seconds;           // of [T, H] in fp32, each pass; may be empty
  std::vector<double> all_reduce_in_dtype_seconds;  // of as many bytes as it has in the dtype
  std::vector<double> plain_seconds;  // the library's own way on one rank; may be empty
  double overhead = 0;                // time between passes ÷ time in them
  std::optional<std::int64_t> wrong;  // nothing: not checked
};

/// What a table of this options' points shows of the columns; CSV and JSON always have all.
std::vector<Column> bench_columns(const Options& options, bool with_experts);
std::vector<Cell> bench_row(const Measured& m);

}  // namespace gatefold
