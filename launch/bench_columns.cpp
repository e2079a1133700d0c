#include "launch/bench_columns.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "launch/bandwidth.h"

namespace gatefold {
namespace {

constexpr std::size_t kOther = kPhases.size() - 1;
constexpr double kMicro = 1e6;

Cell nothing() { return Cell::of("-"); }
Cell integer(std::int64_t value) {
  return Cell::of(static_cast<double>(value), fmt::format("{}", value));
}
Cell decimal(double value, int digits) {
  return Cell::of(value, fmt::format("{:.{}f}", value, digits));
}
Cell decimal(const std::optional<double>& value, int digits) {
  return value ? decimal(*value, digits) : nothing();
}
Cell micros(const std::vector<double>& seconds, double q = 0.5) {
  return seconds.empty() ? nothing() : decimal(quantile(seconds, q) * kMicro, 1);
}
Cell ratio(const std::vector<double>& a, const std::vector<double>& b, int digits) {
  return a.empty() || b.empty() ? nothing() : decimal(median_ratio(a, b), digits);
}

double time(const Measured& m) { return median(m.seconds); }
double flop_rate(const Measured& m) { return m.flops / time(m); }
double read_rate(const Measured& m) { return m.weight_bytes / time(m); }

std::optional<double> percent(double part, const std::optional<double>& whole) {
  return whole && *whole > 0 ? std::optional(100 * part / *whole) : std::nullopt;
}

/// With weak scaling n ranks do n times as much in the time of one.
double speed_up(const Measured& m) {
  const double faster = median_ratio(m.one_rank_seconds, m.seconds);
  return m.scaling == Scaling::kWeak ? faster * m.ranks : faster;
}

std::optional<double> communication_percent(const Measured& m) {
  if (m.ranks == 1) return 0;
  if (!m.phases) return std::nullopt;
  double all = 0;
  for (const double seconds : *m.phases) all += seconds;
  return all > 0 ? 100 * communication(*m.phases) / all : 0;
}

/// Of a dense layer's sum what an all-reduce of the rows would have. With experts what an
/// all-to-all would have that sends as much: there the bytes that are sent are the exact figure.
std::optional<double> bus_bandwidth(const Measured& m) {
  if (m.ranks == 1) return 0;
  if (!m.phases) return std::nullopt;
  const double seconds = communication(*m.phases);
  if (m.moe) return algorithm_bandwidth(m.sent_bytes / m.ranks, seconds);
  return algorithm_bandwidth(m.sum_bytes, seconds) * all_reduce_share(m.group);
}
std::optional<double> algorithm_bandwidth_of(const Measured& m) {
  if (m.ranks == 1) return 0;
  if (!m.phases) return std::nullopt;
  if (m.moe) return *bus_bandwidth(m) / all_to_all_share(m.ranks);
  return m.group == 1 ? 0 : algorithm_bandwidth(m.sum_bytes, communication(*m.phases));
}

/// "gate_up 61, down 31, exchange 5": the largest, in percent.
std::string largest_phases(const PhaseSeconds& phases) {
  double all = 0;
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < phases.size(); ++i) {
    all += phases[i];
    order.push_back(i);
  }
  std::ranges::stable_sort(order, std::greater(), [&](std::size_t i) { return phases[i]; });
  std::string text;
  for (const std::size_t i : std::span(order).first(4)) {
    const double share = all > 0 ? 100 * phases[i] / all : 0;
    if (share < 0.5) break;
    text += fmt::format("{}{} {:.0f}", text.empty() ? "" : ", ", kPhases[i], share);
  }
  return text.empty() ? "-" : text;
}

std::string_view name_of(Reduce reduce) { return reduce == Reduce::kExact ? "exact" : "fast"; }

using Value = std::function<Cell(const Measured&)>;
struct Entry {
  Column column;
  Value value;
};

void add_identity(std::vector<Entry>& all) {
  all.push_back({{"config", "", "config"}, [](const auto& m) { return Cell::of(m.config); }});
  all.push_back({{"layer", "", "layer"}, [](const auto& m) { return integer(m.layer); }});
  all.push_back({{"kind", "", "kind"}, [](const auto& m) { return Cell::of(m.kind); }});
  all.push_back({{"tokens", "", "tokens"}, [](const auto& m) { return integer(m.tokens); }});
  all.push_back({{"tokens", "1 rank", "one_rank_tokens"},
                 [](const auto& m) { return integer(m.one_rank_tokens); }});
  all.push_back({{"scaling", "", "scaling"}, [](const auto& m) {
                   return Cell::of(m.scaling == Scaling::kWeak ? "weak" : "strong");
                 }});
  all.push_back({{"ranks", "", "ranks"}, [](const auto& m) { return integer(m.ranks); }});
  all.push_back({{"tp", "", "tp"}, [](const auto& m) { return integer(m.tp); }});
  all.push_back({{"dp", "", "dp"}, [](const auto& m) { return integer(m.dp); }});
  all.push_back(
      {{"ep", "", "ep"}, [](const auto& m) { return m.ep == 0 ? nothing() : integer(m.ep); }});
  all.push_back({{"dtype", "", "dtype"},
                 [](const auto& m) { return Cell::of(std::string(gatefold::name_of(m.dtype))); }});
  all.push_back({{"reduce", "", "reduce"},
                 [](const auto& m) { return Cell::of(std::string(name_of(m.reduce))); }});
  all.push_back({{"dispatcher", "", "dispatcher"}, [](const auto& m) {
                   return m.moe ? Cell::of(std::string(gatefold::name_of(m.dispatcher)))
                                : nothing();
                 }});
}

void add_speeds(std::vector<Entry>& all) {
  const auto at = [](double q) { return [q](const Measured& m) { return micros(m.seconds, q); }; };
  all.push_back({{"time", "us", "time_us"}, at(0.5)});
  all.push_back({{"min", "us", "min_us"}, at(0)});
  all.push_back({{"p90", "us", "p90_us"}, at(0.9)});
  all.push_back({{"max", "us", "max_us"}, at(1)});
  all.push_back({{"tokens/s", "", "tokens_per_s"}, [](const auto& m) {
                   return decimal(static_cast<double>(m.tokens) / time(m), 0);
                 }});
  all.push_back(
      {{"TFLOP/s", "", "tflops"}, [](const auto& m) { return decimal(flop_rate(m) * 1e-12, 3); }});
  all.push_back({{"TFLOP/s", "rank", "tflops_per_rank"},
                 [](const auto& m) { return decimal(flop_rate(m) / m.ranks * 1e-12, 3); }});
  all.push_back({{"peak", "%", "gemm_peak_percent"},
                 [](const auto& m) { return decimal(percent(flop_rate(m), m.gemm_peak), 1); }});
  all.push_back({{"weights", "GB/s", "weights_gb_per_s"},
                 [](const auto& m) { return decimal(read_rate(m) * 1e-9, 2); }});
  all.push_back({{"read", "%", "read_percent"},
                 [](const auto& m) { return decimal(percent(read_rate(m), m.read_speed), 1); }});
}

void add_movement(std::vector<Entry>& all) {
  all.push_back({{"sent", "B", "sent_bytes"},
                 [](const auto& m) { return Cell::of(m.sent_bytes, human(m.sent_bytes, "")); }});
  const auto gigabytes = [](const std::optional<double>& rate) {
    return rate ? decimal(*rate * 1e-9, 2) : nothing();
  };
  all.push_back({{"algbw", "GB/s", "algbw_gb_per_s"},
                 [=](const auto& m) { return gigabytes(algorithm_bandwidth_of(m)); }});
  all.push_back({{"busbw", "GB/s", "busbw_gb_per_s"},
                 [=](const auto& m) { return gigabytes(bus_bandwidth(m)); }});
  all.push_back({{"comm", "%", "comm_percent"},
                 [](const auto& m) { return decimal(communication_percent(m), 1); }});
  all.push_back(
      {{"busiest", "x mean", "imbalance"}, [](const auto& m) { return decimal(m.busiest, 2); }});
  all.push_back({{"hottest", "x mean", "hottest_expert"},
                 [](const auto& m) { return decimal(m.hottest_expert, 2); }});
  all.push_back({{"entropy", "bits", "load_entropy_bits"},
                 [](const auto& m) { return decimal(m.entropy, 2); }});
  all.push_back({{"dropped", "%", "dropped_percent"}, [](const auto& m) {
                   return m.dropped ? decimal(100 * *m.dropped, 1) : nothing();
                 }});
  all.push_back({{"phases", "%", "phases"}, [](const auto& m) {
                   return m.phases ? Cell::of(largest_phases(*m.phases)) : nothing();
                 }});
  for (std::size_t i = 0; i < kPhases.size(); ++i) {
    std::string json_name = fmt::format("phase_{}_us", kPhases[i]);
    std::ranges::replace(json_name, '-', '_');
    all.push_back({{std::string(kPhases[i]), "us", json_name}, [i](const auto& m) {
                     return m.phases ? decimal((*m.phases)[i] * kMicro, 1) : nothing();
                   }});
  }
}

void add_comparisons(std::vector<Entry>& all) {
  all.push_back({{"allreduce", "fp32 us", "all_reduce_fp32_us"},
                 [](const auto& m) { return micros(m.all_reduce_seconds); }});
  all.push_back({{"allreduce", "dtype us", "all_reduce_dtype_us"},
                 [](const auto& m) { return micros(m.all_reduce_in_dtype_seconds); }});
  all.push_back(
      {{"plain", "us", "plain_us"}, [](const auto& m) { return micros(m.plain_seconds); }});
  all.push_back({{"1 rank", "/plain", "one_rank_to_plain"},
                 [](const auto& m) { return ratio(m.one_rank_seconds, m.plain_seconds, 3); }});
  all.push_back({{"/fast", "", "ratio_to_fast"},
                 [](const auto& m) { return ratio(m.seconds, m.fast_seconds, 3); }});
  all.push_back(
      {{"1 rank", "us", "one_rank_us"}, [](const auto& m) { return micros(m.one_rank_seconds); }});
  all.push_back(
      {{"speed-up", "", "speed_up"}, [](const auto& m) { return decimal(speed_up(m), 2); }});
  all.push_back({{"eff", "%", "efficiency_percent"},
                 [](const auto& m) { return decimal(100 * speed_up(m) / m.ranks, 0); }});
  all.push_back({{"between", "%", "overhead_percent"},
                 [](const auto& m) { return decimal(100 * m.overhead, 2); }});
  all.push_back({{"#wrong", "", "wrong"},
                 [](const auto& m) { return m.wrong ? integer(*m.wrong) : nothing(); }});
}

const std::vector<Entry>& entries() {
  static const std::vector<Entry> all = [] {
    std::vector<Entry> made;
    add_identity(made);
    add_speeds(made);
    add_movement(made);
    add_comparisons(made);
    return made;
  }();
  return all;
}

/// What fits beside each other and isn't the same in every row.
bool shown(const Options& options, bool with_experts, const std::string& name) {
  const Sweep& sweep = options.sweep;
  if (options.verbose) return true;
  if (name == "config") return sweep.configs.size() > 1;
  if (name == "dtype") return sweep.dtypes.size() > 1 || sweep.configs.size() > 1;
  if (name == "reduce" || name == "ratio_to_fast" || name == "one_rank_to_plain")
    return sweep.reduces.size() > 1;
  if (name == "dispatcher") return sweep.dispatchers.size() > 1;
  if (name == "ep" || name == "imbalance" || name == "hottest_expert") return with_experts;
  if (name == "dropped_percent") return options.capacity_factor > 0 || options.capacity != 0;
  constexpr std::string_view kAlways[] = {"layer",
                                          "tokens",
                                          "tp",
                                          "dp",
                                          "time_us",
                                          "min_us",
                                          "p90_us",
                                          "max_us",
                                          "tflops",
                                          "gemm_peak_percent",
                                          "weights_gb_per_s",
                                          "read_percent",
                                          "sent_bytes",
                                          "busbw_gb_per_s",
                                          "comm_percent",
                                          "speed_up",
                                          "efficiency_percent",
                                          "wrong"};
  return std::ranges::find(kAlways, name) != std::end(kAlways);
}

}  // namespace

bool is_communication(std::string_view phase) {
  return phase == "plan" || phase == "dispatch" || phase == "exchange" || phase == "gather" ||
         phase == "combine" || phase == "all-reduce";
}

PhaseSeconds phases_of(std::span<const RangeTimes::Range> ranges, double whole) {
  PhaseSeconds phases{};
  double known = 0;
  for (const RangeTimes::Range& range : ranges) {
    const auto at =
        static_cast<std::size_t>(std::ranges::find(kPhases, range.name) - kPhases.begin());
    if (at >= kOther) continue;
    phases[at] += range.seconds;
    known += range.seconds;
  }
  phases[kOther] = std::max(0.0, whole - known);
  return phases;
}

double communication(const PhaseSeconds& phases) {
  double sum = 0;
  for (std::size_t i = 0; i < phases.size(); ++i) {
    if (is_communication(kPhases[i])) sum += phases[i];
  }
  return sum;
}

std::vector<Column> bench_columns(const Options& options, bool with_experts) {
  std::vector<Column> columns;
  for (const Entry& entry : entries()) {
    columns.push_back(entry.column);
    columns.back().on_screen = shown(options, with_experts, entry.column.json_name);
  }
  return columns;
}

std::vector<Cell> bench_row(const Measured& m) {
  std::vector<Cell> cells;
  for (const Entry& entry : entries()) cells.push_back(entry.value(m));
  return cells;
}

}  // namespace gatefold
