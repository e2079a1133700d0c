// bench's table by hand: each column of a row whose measurements are round numbers.
#include "launch/bench_columns.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>

namespace gatefold {
namespace {

using ::testing::DoubleEq;
using ::testing::DoubleNear;
using ::testing::ElementsAre;

std::size_t index_of(std::string_view phase) {
  return static_cast<std::size_t>(std::ranges::find(kPhases, phase) - kPhases.begin());
}

PhaseSeconds phases(const std::map<std::string_view, double>& seconds) {
  PhaseSeconds all{};
  for (const auto& [name, value] : seconds) all.at(index_of(name)) = value;
  return all;
}

/// A dense layer of 1e9 FLOP and 1e8 B of weights a pass that takes 10 ms, on 4 ranks as tp 2 x
/// dp 2.
Measured sample() {
  Measured m;
  m.config = "qwen";
  m.layer = 3;
  m.kind = "dense, gated";
  m.tokens = 500;
  m.one_rank_tokens = 500;
  m.ranks = 4;
  m.tp = 2;
  m.dp = 2;
  m.dtype = DType::kBf16;
  m.seconds = {0.010, 0.012, 0.008, 0.010, 0.020};
  m.one_rank_seconds = {0.030, 0.036, 0.024, 0.030, 0.060};
  m.fast_seconds = {0.008, 0.0096, 0.0064, 0.008, 0.016};
  m.plain_seconds = {0.040, 0.024, 0.020, 0.030, 0.024};
  m.phases =
      phases({{"gate_up", 0.005}, {"down", 0.003}, {"exchange", 0.0015}, {"gather", 0.0005}});
  m.busiest = 1.25;
  m.flops = 1e9;
  m.weight_bytes = 1e8;
  m.sent_bytes = 4e6;
  m.sum_bytes = 1e6;
  m.group = 2;
  m.gemm_peak = 1e12;
  m.read_speed = 4e10;
  m.all_reduce_seconds = {0.001, 0.003, 0.002};
  m.all_reduce_in_dtype_seconds = {0.0005, 0.0005, 0.0005};
  m.overhead = 0.015;
  m.wrong = 0;
  return m;
}

std::map<std::string, Cell> row_of(const Measured& m) {
  const std::vector<Column> columns = bench_columns({}, true);
  const std::vector<Cell> cells = bench_row(m);
  EXPECT_EQ(columns.size(), cells.size());
  std::map<std::string, Cell> row;
  for (std::size_t i = 0; i < cells.size(); ++i) row[columns[i].json_name] = cells[i];
  EXPECT_EQ(row.size(), cells.size()) << "a JSON name is there twice";
  return row;
}

double number(const Measured& m, const std::string& column) {
  const Cell cell = row_of(m).at(column);
  EXPECT_TRUE(cell.is_number) << column << ": " << cell.text;
  return cell.number;
}
std::string text(const Measured& m, const std::string& column) { return row_of(m).at(column).text; }

TEST(BenchColumns, EachSaysWhatItIsCalled) {
  Measured m = sample();
  m.moe = true;
  m.one_rank_tokens = 125;
  m.ranks = 30;
  m.tp = 6;
  m.dp = 5;
  m.ep = 15;
  m.reduce = Reduce::kFast;
  m.dispatcher = Dispatcher::kAllGather;
  const std::map<std::string, double> numbers = {
      {"layer", 3}, {"tokens", 500}, {"one_rank_tokens", 125}, {"ranks", 30}, {"tp", 6},
      {"dp", 5},    {"ep", 15}};
  for (const auto& [column, value] : numbers) EXPECT_EQ(number(m, column), value) << column;
  const std::map<std::string, std::string> texts = {
      {"config", "qwen"}, {"kind", "dense, gated"}, {"scaling", "strong"},
      {"dtype", "bf16"},  {"reduce", "fast"},       {"dispatcher", "allgather"}};
  for (const auto& [column, value] : texts) EXPECT_EQ(text(m, column), value) << column;
}

TEST(BenchColumns, TimesAreOnesThatOccurred) {
  const Measured m = sample();
  EXPECT_THAT(number(m, "time_us"), DoubleEq(10000));
  EXPECT_THAT(number(m, "min_us"), DoubleEq(8000));
  EXPECT_THAT(number(m, "p90_us"), DoubleEq(20000));
  EXPECT_THAT(number(m, "max_us"), DoubleEq(20000));
}

TEST(BenchColumns, SpeedsAreWorkOverTheMedian) {
  const Measured m = sample();
  EXPECT_THAT(number(m, "tokens_per_s"), DoubleNear(50000, 1e-6));
  EXPECT_THAT(number(m, "tflops"), DoubleNear(0.1, 1e-9));
  EXPECT_THAT(number(m, "tflops_per_rank"), DoubleNear(0.025, 1e-9));
  EXPECT_THAT(number(m, "gemm_peak_percent"), DoubleNear(10, 1e-9));
  EXPECT_THAT(number(m, "weights_gb_per_s"), DoubleNear(10, 1e-9));
  EXPECT_THAT(number(m, "read_percent"), DoubleNear(25, 1e-9));
}

TEST(BenchColumns, BandwidthsAreAnAllReducesOverTheTimeOfCommunication) {
  Measured m = sample();
  EXPECT_THAT(number(m, "sent_bytes"), DoubleEq(4e6));
  EXPECT_THAT(number(m, "comm_percent"), DoubleNear(20, 1e-9));
  // 1e6 B in 2 ms; two ranks: the same on the bus.
  EXPECT_THAT(number(m, "algbw_gb_per_s"), DoubleNear(0.5, 1e-9));
  EXPECT_THAT(number(m, "busbw_gb_per_s"), DoubleNear(0.5, 1e-9));
  m.group = 8;
  EXPECT_THAT(number(m, "busbw_gb_per_s"), DoubleNear(0.875, 1e-9));
}

TEST(BenchColumns, WithExpertsTheyAreAnAllToAlls) {
  Measured m = sample();
  m.moe = true;
  m.ep = 4;
  m.phases = phases({{"route", 0.001}, {"plan", 0.0005}, {"dispatch", 0.001}, {"combine", 0.0005}});
  // 4e6 B from 4 ranks in 2 ms, a quarter of what they would send in all staying where it is.
  EXPECT_THAT(number(m, "busbw_gb_per_s"), DoubleNear(0.5, 1e-9));
  EXPECT_THAT(number(m, "algbw_gb_per_s"), DoubleNear(0.5 * 4 / 3, 1e-9));
  EXPECT_THAT(number(m, "comm_percent"), DoubleNear(200 / 3.0, 1e-9));
}

TEST(BenchColumns, RanksExchangeInThesePhasesAndInNoOthers) {
  std::vector<std::string_view> found;
  std::ranges::copy_if(kPhases, std::back_inserter(found), is_communication);
  EXPECT_THAT(found,
              ElementsAre("plan", "dispatch", "exchange", "gather", "combine", "all-reduce"));
}

TEST(BenchColumns, OneRankHasNoBandwidthAndNoSpeedUp) {
  Measured m = sample();
  m.ranks = m.group = 1;
  m.tp = m.dp = 1;
  m.sent_bytes = 0;
  m.one_rank_seconds = m.seconds;
  for (const bool moe : {false, true}) {
    m.moe = moe;
    for (const char* column : {"sent_bytes", "algbw_gb_per_s", "busbw_gb_per_s", "comm_percent"}) {
      EXPECT_EQ(number(m, column), 0) << column;
      EXPECT_FALSE(std::signbit(number(m, column))) << column;
    }
    EXPECT_EQ(text(m, "busbw_gb_per_s"), "0.00");
    EXPECT_EQ(number(m, "speed_up"), 1);
    EXPECT_EQ(number(m, "efficiency_percent"), 100);
  }
}

TEST(BenchColumns, NoTimeOfCommunicationIsNoInfinity) {
  Measured m = sample();
  m.phases = phases({{"gate_up", 0.010}});
  for (const bool moe : {false, true}) {
    m.moe = moe;
    EXPECT_EQ(number(m, "algbw_gb_per_s"), 0);
    EXPECT_EQ(number(m, "busbw_gb_per_s"), 0);
  }
  m.moe = false;
  m.group = 1;  // dp alone has no sums
  EXPECT_EQ(number(m, "busbw_gb_per_s"), 0);
  EXPECT_FALSE(std::signbit(number(m, "busbw_gb_per_s")));
}

TEST(BenchColumns, SpeedUpIsTheMedianOfRatios) {
  Measured m = sample();
  EXPECT_THAT(number(m, "speed_up"), DoubleNear(3, 1e-9));
  EXPECT_THAT(number(m, "efficiency_percent"), DoubleNear(75, 1e-9));
  EXPECT_THAT(number(m, "ratio_to_fast"), DoubleNear(1.25, 1e-9));
  EXPECT_THAT(number(m, "one_rank_to_plain"), DoubleNear(1.2, 1e-9));
  EXPECT_THAT(number(m, "one_rank_us"), DoubleNear(30000, 1e-6));
}

TEST(BenchColumns, BaselinesAndBalanceAreAsMeasured) {
  Measured m = sample();
  m.plain_seconds = {0.004, 0.006, 0.005, 0.005, 0.005};
  m.hottest_expert = 2.5;
  m.dropped = 0.125;
  m.entropy = 3.25;
  const std::map<std::string, double> numbers = {
      {"all_reduce_fp32_us", 2000}, {"all_reduce_dtype_us", 500}, {"plain_us", 5000},
      {"overhead_percent", 1.5},    {"imbalance", 1.25},          {"hottest_expert", 2.5},
      {"dropped_percent", 12.5},    {"load_entropy_bits", 3.25},  {"wrong", 0}};
  for (const auto& [column, value] : numbers) {
    EXPECT_THAT(number(m, column), DoubleNear(value, 1e-9)) << column;
  }
  m.wrong = 7;
  EXPECT_EQ(number(m, "wrong"), 7);
}

TEST(BenchColumns, WithWeakScalingRanksDoTheirShareInTheTimeOfOne) {
  Measured m = sample();
  m.scaling = Scaling::kWeak;
  m.one_rank_tokens = 125;
  m.one_rank_seconds = {0.009, 0.0108, 0.0072, 0.009, 0.018};
  EXPECT_THAT(number(m, "efficiency_percent"), DoubleNear(90, 1e-9));
  EXPECT_THAT(number(m, "speed_up"), DoubleNear(3.6, 1e-9));
  EXPECT_EQ(text(m, "scaling"), "weak");
  EXPECT_EQ(number(m, "one_rank_tokens"), 125);
}

TEST(BenchColumns, WhatWasntMeasuredIsADash) {
  Measured m = sample();
  m.phases.reset();
  m.busiest.reset();
  m.gemm_peak.reset();
  m.read_speed.reset();
  m.fast_seconds.clear();
  m.plain_seconds.clear();
  m.all_reduce_seconds.clear();
  m.wrong.reset();
  for (const char* column :
       {"ep", "dispatcher", "phases", "phase_gate_up_us", "comm_percent", "busbw_gb_per_s",
        "algbw_gb_per_s", "imbalance", "gemm_peak_percent", "read_percent", "ratio_to_fast",
        "all_reduce_fp32_us", "plain_us", "one_rank_to_plain", "wrong"}) {
    EXPECT_EQ(text(m, column), "-") << column;
  }
}

TEST(BenchColumns, PhasesHaveAColumnEachAndTheLargestInWords) {
  const Measured m = sample();
  EXPECT_EQ(text(m, "phases"), "gate_up 50, down 30, exchange 15, gather 5");
  EXPECT_THAT(number(m, "phase_gate_up_us"), DoubleNear(5000, 1e-9));
  EXPECT_THAT(number(m, "phase_exchange_us"), DoubleNear(1500, 1e-9));
  EXPECT_EQ(number(m, "phase_all_reduce_us"), 0);
}

TEST(BenchColumns, InWordsAreFourPhasesAtMostAndNoneThatIsNothing) {
  Measured m = sample();
  m.phases = phases({{"route", 10}, {"gate_up", 40}, {"down", 25}, {"sum", 5}, {"other", 20}});
  EXPECT_EQ(text(m, "phases"), "gate_up 40, down 25, other 20, route 10");
  m.phases = phases({{"gate_up", 99.6}, {"down", 0.4}});
  EXPECT_EQ(text(m, "phases"), "gate_up 100");
}

TEST(BenchColumns, WhatIsInNoPhaseOrInOneThatNobodyKnowsIsOther) {
  const RangeTimes::Range ranges[] = {{"gate_up", 3}, {"down", 2}, {"unheard of", 1}};
  const PhaseSeconds found = phases_of(ranges, 10);
  EXPECT_EQ(found[index_of("gate_up")], 3);
  EXPECT_EQ(found[index_of("down")], 2);
  EXPECT_EQ(found[index_of("other")], 5);
  double sum = 0;
  for (const double seconds : found) sum += seconds;
  EXPECT_EQ(sum, 10);
}

TEST(BenchColumns, TheScreenShowsWhatDiffersAndTheRestWhenAsked) {
  const auto shown = [](const Options& options, const std::string& name) {
    for (const Column& column : bench_columns(options, false)) {
      if (column.json_name == name) return column.on_screen;
    }
    return false;
  };
  Options options;
  for (const char* name : {"config", "dtype", "reduce", "dispatcher", "ratio_to_fast", "ep",
                           "phases", "imbalance", "one_rank_us"}) {
    EXPECT_FALSE(shown(options, name)) << name;
  }
  for (const char* name : {"layer", "tokens", "tp", "time_us", "speed_up", "wrong"}) {
    EXPECT_TRUE(shown(options, name)) << name;
  }
  options.sweep.configs = {"a", "b"};
  options.sweep.reduces = {Reduce::kExact, Reduce::kFast};
  for (const char* name : {"config", "reduce", "ratio_to_fast", "one_rank_to_plain"}) {
    EXPECT_TRUE(shown(options, name)) << name;
  }
  options.verbose = true;
  for (const Column& column : bench_columns(options, false)) EXPECT_TRUE(column.on_screen);
}

}  // namespace
}  // namespace gatefold
