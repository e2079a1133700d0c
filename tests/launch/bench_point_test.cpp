// One point of a benchmark: what it measures is what was planted, and timing allocates nothing.
#include "launch/bench_point.h"

#include <gmock/gmock.h>
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <thread>

#include "launch/bench_check.h"
#include "launch/routing_pattern.h"
#include "parallel/expert_plan.h"
#include "parallel/mpi_interop.h"
#include "runtime/phases.h"
#include "tests/faults/hooked_adder.h"
#include "tests/faults/hooked_communicator.h"
#include "tests/launch/counted_new.h"

namespace gatefold {
namespace {

constexpr double kDelay = 0.060;  // s, in one collective of a pass

void sleep_for_the_delay() { std::this_thread::sleep_for(std::chrono::duration<double>(kDelay)); }

std::size_t index_of(std::string_view phase) {
  return static_cast<std::size_t>(std::ranges::find(kPhases, phase) - kPhases.begin());
}

class Point : public ::testing::Test {
 protected:
  void SetUp() override {
    world_ = make_mpi_communicator(MPI_COMM_WORLD);
    config_ = std::filesystem::path(::testing::TempDir()) /
              ("gatefold_point_" + std::to_string(::getpid()) + ".json");
    options_.command = Command::kBench;
    options_.config = config_.string();
    options_.device = DeviceKind::kCpu;
    options_.comm = CommKind::kMpi;
    options_.threads = 1;
    options_.hot = true;
    options_.warmup = 1;
    options_.iterations = 8;
  }
  void TearDown() override { std::filesystem::remove(config_); }

  /// Layer 0 of a model with this config, on all ranks; a row for each of `ways`.
  std::vector<Measured> measure(const std::string& config, std::int64_t tokens,
                                const Seams& seams = {}, const std::vector<Way>& ways = {{}}) {
    std::ofstream(config_) << config;
    Job job(options_, *world_, seams);
    const auto self = make_self_communicator();
    BenchLayer layer;
    layer.spec = job.layer_spec(0);
    layer.kernel = job.kernel(layer.spec);
    layer.sample = {0, tokens - 1};
    for (const Way& way : ways) {
      layer.one_rank[way.reduce] = nullptr;
      if (world_->rank() != 0) continue;
      const MoePlace place{&job.device(), self.get(), self.get(), self.get()};
      layer.one_rank[way.reduce] = std::make_unique<TimedLayer>(
          layer.spec, job.source(), place, options_for(job, layer.kernel, {way.reduce}), 1, beat_);
    }
    if (alter_) alter_(layer);
    BenchPoint point(job, layer, ways, beat_);
    const std::int64_t before = testing::allocations();
    std::vector<Measured> rows = point.measure(tokens, {.gemm_peak = 1e9, .read_speed = 1e9});
    allocated_ = testing::allocations() - before;
    if (world_->rank() == 0) {
      one_rank_bytes_ = std::ssize(layer.one_rank.at(ways.front().reduce)->y());
    }
    pass_allocations_ = allocations_of_passes(point);
    return rows;
  }

  /// Of one pass of every lap on this rank.
  static std::int64_t allocations_of_passes(BenchPoint& point) {
    const std::vector<TimedLayer*> layers = point.layers();
    const std::int64_t before = testing::allocations();
    for (TimedLayer* layer : layers) layer->forward(0);
    return testing::allocations() - before;
  }

  std::unique_ptr<Communicator> world_;
  std::filesystem::path config_;
  Options options_;
  std::int64_t allocated_ = 0;
  std::int64_t pass_allocations_ = 0;
  std::int64_t one_rank_bytes_ = 0;  // of its last y
  Beat beat_ = [] {};
  std::function<void(BenchLayer&)> alter_;
};

const std::string kDense =
    R"({"model_type": "gatefold_ffn", "hidden_size": 192, "intermediate_size": 512,
        "num_hidden_layers": 1, "activation": "silu", "gated": true, "torch_dtype": "float32"})";
const std::string kMixture =
    R"({"model_type": "mixtral", "hidden_size": 128, "intermediate_size": 192,
        "num_hidden_layers": 1, "num_local_experts": 5, "num_experts_per_tok": 2,
        "hidden_act": "silu", "torch_dtype": "float32"})";

/// Rank 1's exchanges number `call` of each pass come late.
Seams late_exchange(int calls_in_a_pass, int call) {
  Seams seams;
  seams.wrap_exchanges = [=](Communicator& inner) -> std::unique_ptr<Communicator> {
    return std::make_unique<HookedCommunicator>(
        inner, [=, calls = 0](Communicator& to, std::span<const Transfer> sends,
                              std::span<const Transfer> receives) mutable {
          if (to.rank() == 1 && calls++ % calls_in_a_pass == call) sleep_for_the_delay();
          to.exchange(sends, receives);
        });
  };
  return seams;
}

/// The delay is in `phase`, whole and once, and in no other.
void expect_delay_in(const Measured& m, std::string_view phase, double without) {
  ASSERT_TRUE(m.phases.has_value());
  const double found = (*m.phases)[index_of(phase)];
  EXPECT_GE(found, 0.95 * kDelay) << phase;
  double rest = 0;
  for (const double seconds : *m.phases) rest += seconds;
  rest -= found;
  EXPECT_LT(rest, 0.5 * kDelay + 2 * without) << "other phases than " << phase;
  EXPECT_LT(found, 1.5 * kDelay + 2 * without) << phase;
  EXPECT_GE(communication(*m.phases), 0.95 * kDelay);
  EXPECT_GE(median(m.seconds), 0.95 * kDelay);
}

TEST_F(Point, ADelayInTheSumShowsAsThatInItsPhase) {
  if (world_->size() == 1) GTEST_SKIP() << "one rank has no sums";
  const Measured without = measure(kDense, 9).front();
  const Measured late = measure(kDense, 9, late_exchange(1, 0)).front();
  if (world_->rank() == 0) expect_delay_in(late, "exchange", median(without.seconds));
}

TEST_F(Point, ADelayInDispatchOrCombineShowsAsThatInItsPhase) {
  if (world_->size() == 1) GTEST_SKIP() << "one rank dispatches nothing";
  const Measured without = measure(kMixture, 9).front();
  const char* phases[] = {"dispatch", "combine"};
  for (int call = 0; call < 2; ++call) {
    SCOPED_TRACE(phases[call]);
    const Measured late = measure(kMixture, 9, late_exchange(2, call)).front();
    if (world_->rank() == 0) expect_delay_in(late, phases[call], median(without.seconds));
  }
}

TEST_F(Point, ARankThatComputesLongerIsTheOneThatCountsAndShows) {
  if (world_->size() == 1) GTEST_SKIP() << "one rank has no sums";
  Seams seams;
  seams.wrap_device = [](Device& device, int rank) -> std::unique_ptr<Device> {
    return std::make_unique<HookedAdder>(device, [rank](std::vector<const float*>&) {
      if (rank == 1) sleep_for_the_delay();
    });
  };
  const Measured m = measure(kDense, 9, seams).front();
  if (world_->rank() != 0) return;
  EXPECT_GE(quantile(m.seconds, 0), 0.95 * kDelay);
  // Where each rank adds a part, the others wait for it in gather.
  EXPECT_GE((*m.phases)[index_of("add")] + (*m.phases)[index_of("gather")], 0.95 * kDelay);
  EXPECT_GT(*m.busiest, 1.1);
  EXPECT_LE(*m.busiest, world_->size());
}

TEST_F(Point, WhatPassesBetweenPassesIsOverhead) {
  beat_ = sleep_for_the_delay;
  const Measured m = measure(kDense, 9).front();
  if (world_->rank() != 0) return;
  double timed = 0;  // at most: of the slowest ranks
  for (const auto* seconds :
       {&m.seconds, &m.one_rank_seconds, &m.all_reduce_seconds, &m.all_reduce_in_dtype_seconds}) {
    if (seconds == &m.one_rank_seconds && world_->size() == 1) continue;  // the same passes
    for (const double s : *seconds) timed += s;
  }
  EXPECT_GE(m.overhead * timed, 0.95 * kDelay * static_cast<double>(options_.iterations));
  beat_ = [] {};
}

TEST_F(Point, PhasesAreThePass) {
  for (const std::string& config : {kDense, kMixture}) {
    const Measured m = measure(config, 40).front();
    if (world_->rank() != 0) continue;
    const std::vector<std::size_t> middle = middle_passes(m.seconds);
    double whole = 0;
    for (const std::size_t pass : middle) whole += m.seconds[pass];
    whole /= static_cast<double>(middle.size());
    double sum = 0;
    for (const double seconds : *m.phases) sum += seconds;
    EXPECT_NEAR(sum / whole, 1, 0.001);
    // What no phase has: calls between them, which are nothing beside layers of any size.
    EXPECT_LT((*m.phases)[index_of("other")], 0.05 * whole + 20e-6);
  }
}

TEST_F(Point, TimingAllocatesNothingOfItsOwn) {
  const auto allocated = [&](std::int64_t iterations) {
    options_.iterations = iterations;
    measure(kDense, 9, {}, {{Reduce::kExact}, {Reduce::kFast}});
    return allocated_;
  };
  allocated(5);  // libraries keep what they make at first
  const std::int64_t few = allocated(5);
  const std::int64_t many = allocated(50);
  // What the layers' own passes do, for which the libraries may want memory of the host.
  EXPECT_EQ(many - few, 45 * pass_allocations_);
}

TEST_F(Point, MeetingAndTheLibrarysSumsAllocateNothing) {
  const auto device = make_cpu_device(1);
  AllReduceBaseline reduces(*world_, *device, 9, 192, DType::kBf16);
  reduces.reserve(20);
  RangeTimes ranges(*device);
  reduces.time(*world_, true);
  const std::int64_t before = testing::allocations();
  for (int pass = 1; pass < 20; ++pass) {
    reduces.time(*world_, true);
    ranges.clear();
    Phases phases(*device);
    phases.enter("gate_up");
  }
  EXPECT_EQ(testing::allocations(), before);
  EXPECT_EQ(reduces.fp32_seconds.size(), world_->size() == 1 ? 0U : 20U);
}

TEST_F(Point, CopiesTakeTurnsUntilTheCachesHoldNoneOfThem) {
  std::ofstream(config_) << kMixture;
  Job job(options_, *world_);
  const LayerSpec spec = job.layer_spec(0);
  const auto self = make_self_communicator();
  const MoePlace place{&job.device(), self.get(), self.get(), self.get()};
  TimedLayer layer(spec, job.source(), place, options_for(job, job.kernel(spec), {}), 2, beat_);
  const TokenBatch batch = job.tokens(128, 3);
  layer.take(batch, {0, 3}, 3);
  std::vector<const Moe*> used;
  for (std::int64_t pass = 0; pass < 4; ++pass) {
    layer.forward(pass);
    used.push_back(layer.moe());
  }
  EXPECT_NE(used[0], used[1]);
  EXPECT_EQ(used[0], used[2]);
  EXPECT_EQ(used[1], used[3]);
}

TEST(ColdCopies, AreEnoughForTheCachesOrSayThatTheyArent) {
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  const std::int64_t cache = 32 * kMiB;
  for (const std::int64_t bytes : {cache / 3 + 1, cache, 3 * cache}) {
    const Copies copies = cold_copies(cache, bytes);
    EXPECT_TRUE(copies.cold);
    EXPECT_GE((copies.count - 1) * bytes, 2 * cache) << "others that pass by until a turn comes";
    EXPECT_LT((copies.count - 2) * bytes, 2 * cache);
  }
  // Of weights that are larger than all caches one copy will do.
  EXPECT_EQ(cold_copies(cache, 7 * 1024 * kMiB).count, 1);
  EXPECT_TRUE(cold_copies(cache, 7 * 1024 * kMiB).cold);
  // Thousands of a tiny layer would have to be made.
  EXPECT_EQ(cold_copies(480 * kMiB, 100'000).count, 64);
  EXPECT_FALSE(cold_copies(480 * kMiB, 100'000).cold);
  EXPECT_EQ(cold_copies(480 * kMiB, 15 * kMiB).count, 64);
  EXPECT_TRUE(cold_copies(480 * kMiB, 15 * kMiB).cold);
}

/// Remembers how much the library was told to add, and takes its time for one of these.
class WatchedSums : public HookedCommunicator {
 public:
  WatchedSums(Communicator& inner, std::int64_t slow, std::vector<std::int64_t>& counts)
      : HookedCommunicator(
            inner, [](Communicator& to, std::span<const Transfer> sends,
                      std::span<const Transfer> receives) { to.exchange(sends, receives); }),
        slow_(slow),
        counts_(counts) {}
  void all_reduce(float* data, std::int64_t count) override {
    counts_.push_back(count);
    if (count == slow_) sleep_for_the_delay();
    HookedCommunicator::all_reduce(data, count);
  }

 private:
  std::int64_t slow_;
  std::vector<std::int64_t>& counts_;
};

TEST_F(Point, TheLibraryAddsRowsInFp32AndThenAsManyBytesAsTheModelsTypeHas) {
  if (world_->size() == 1) GTEST_SKIP() << "one rank has no sums";
  options_.dtype = DType::kBf16;
  options_.iterations = 4;
  std::vector<std::int64_t> counts;
  Seams seams;
  seams.wrap_exchanges = [&](Communicator& inner) -> std::unique_ptr<Communicator> {
    return std::make_unique<WatchedSums>(inner, 9 * 192, counts);
  };
  const Measured m = measure(kDense, 9, seams).front();
  ASSERT_EQ(counts.size(), 2U * 5);
  for (std::size_t i = 0; i < counts.size(); ++i)
    EXPECT_EQ(counts[i], i % 2 == 0 ? 9 * 192 : 9 * 96);
  EXPECT_GE(quantile(m.all_reduce_seconds, 0), 0.95 * kDelay);
  EXPECT_LT(quantile(m.all_reduce_in_dtype_seconds, 0), quantile(m.all_reduce_seconds, 0));
}

TEST_F(Point, RanksThatShareNoSumSendNothingAndReadAllWeightsEach) {
  options_.iterations = 2;
  options_.tp = 1;
  const Measured m = measure(kDense, 12).front();
  const int ranks = world_->size();
  EXPECT_EQ(m.tp, 1);
  EXPECT_EQ(m.dp, ranks);
  EXPECT_EQ(m.ep, 0);
  EXPECT_EQ(m.sum_bytes, 4.0 * 12 / ranks * 192);
  if (world_->rank() != 0) return;
  EXPECT_EQ(m.group, 1);
  EXPECT_EQ(m.sent_bytes, 0);
  EXPECT_EQ(m.flops, 2.0 * 12 * 3 * 192 * 512);
  EXPECT_EQ(m.weight_bytes, ranks * 4.0 * 3 * 192 * 512);
  EXPECT_TRUE(m.all_reduce_seconds.empty());
  EXPECT_EQ(m.wrong, 0);
}

/// All 12 tokens go to the same two of 5 experts: rows by hand, to whoever has these.
TEST_F(Point, CountsRowsToExpertsAndTheirSumsOnTheWayHome) {
  options_.iterations = 2;
  options_.routing.kind = RoutingKind::kOneHot;
  std::set<int> owners;
  alter_ = [&](BenchLayer& layer) {
    const RouteRule& rule = std::get<MoeSpec>(layer.spec).route;
    const Choices choices = patterned_choices(options_.routing, options_.seed, rule, {0, 1});
    for (const std::int32_t id : choices.ids) {
      owners.insert(ExpertPlacement{5, world_->size()}.owner(id));
    }
  };
  const Measured m = measure(kMixture, 12).front();
  const int ranks = world_->size();
  EXPECT_EQ(m.ep, ranks);
  if (world_->rank() != 0) return;
  const auto at = static_cast<double>(owners.size());
  const double rows = 12 * at - 12 * at / ranks;  // an owner's own stay
  EXPECT_EQ(m.sent_bytes, rows * 2 * 128 * 4.0);
  EXPECT_EQ(m.weight_bytes, 2 * 4.0 * 3 * 128 * 192);
  EXPECT_EQ(m.busiest, ranks / at);
  EXPECT_EQ(m.hottest_expert, 2.5);
  EXPECT_EQ(m.entropy, 1);
  EXPECT_EQ(m.group, ranks);
  if (ranks == 1) {
    EXPECT_FALSE(m.wrong.has_value()) << "float64 would route by itself";
  } else {
    EXPECT_EQ(m.wrong, 0);
  }
}

TEST_F(Point, CountsWhatIsSentAndRead) {
  options_.iterations = 2;
  const int ranks = world_->size();
  const Measured dense = measure(kDense, 9).front();
  const Measured moe = measure(kMixture, 9).front();
  if (world_->rank() != 0) return;
  EXPECT_EQ(dense.flops, 2.0 * 9 * 3 * 192 * 512);
  EXPECT_EQ(dense.weight_bytes, 4.0 * 3 * 192 * 512);
  EXPECT_EQ(moe.flops, 2.0 * 9 * 2 * 3 * 128 * 192);
  EXPECT_LE(moe.weight_bytes, 4.0 * 5 * 3 * 128 * 192);
  EXPECT_EQ(dense.seconds.size(), 2U) << "those to warm up don't count";
  EXPECT_EQ(dense.one_rank_seconds.size(), 2U);
  EXPECT_EQ(dense.wrong, 0);
  EXPECT_EQ(moe.wrong, 0);
  EXPECT_EQ(dense.tp, ranks);
  EXPECT_EQ(dense.dp, 1);
  EXPECT_EQ(dense.group, ranks);
  EXPECT_EQ(dense.sum_bytes, 4.0 * 9 * 192);
  if (ranks == 1) {
    EXPECT_EQ(dense.sent_bytes, 0);
    EXPECT_EQ(moe.sent_bytes, 0);
  } else if (ranks == 2) {
    // Both ranks' one root [9, 192] in fp32 goes to the other, which adds for itself.
    EXPECT_EQ(dense.sent_bytes, 2 * 4.0 * 9 * 192);
  } else if (ranks == 3) {
    // Of 8 blocks 2, 3 and 3 leave roots 0-1; 2-3 and 4; 5 and 6-7.
    EXPECT_EQ(dense.sent_bytes, 2 * (1 + 2 + 2) * 4.0 * 9 * 192);
  }
}

TEST_F(Point, WeakScalingComparesNRanksWithOneThatHasItsOwnTokens) {
  options_.iterations = 2;
  options_.scaling = Scaling::kWeak;
  const Measured m = measure(kDense, 5).front();
  EXPECT_EQ(m.tokens, 5 * world_->size());
  EXPECT_EQ(m.one_rank_tokens, 5);
  if (world_->rank() != 0) return;
  EXPECT_EQ(m.wrong, 0);
}

TEST_F(Point, WithWeakScalingTheOneRankComputesItsOwnTokensAlone) {
  options_.iterations = 2;
  options_.scaling = Scaling::kWeak;
  options_.check = false;  // which takes all
  EXPECT_FALSE(measure(kDense, 5).front().wrong.has_value());
  EXPECT_EQ(one_rank_bytes_, world_->rank() == 0 ? 5 * 192 * 4 : 0);
}

TEST_F(Point, EachWayIsBesideItsOwnOnOneRankAndBesideTheFastOne) {
  options_.iterations = 2;
  const std::vector<Measured> rows = measure(kDense, 9, {}, {{Reduce::kExact}, {Reduce::kFast}});
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0].reduce, Reduce::kExact);
  EXPECT_EQ(rows[1].reduce, Reduce::kFast);
  for (const Measured& m : rows) EXPECT_EQ(m.fast_seconds, rows[1].seconds);
  EXPECT_NE(rows[0].seconds, rows[1].seconds);
  if (world_->rank() != 0) return;
  EXPECT_NE(rows[0].one_rank_seconds, rows[1].one_rank_seconds);
  EXPECT_EQ(rows[0].one_rank_seconds == rows[0].seconds, world_->size() == 1);
  if (world_->size() == 1) return;
  EXPECT_EQ(rows[0].sent_bytes == rows[1].sent_bytes, world_->size() == 2);
  // As a ring does: each rank sends 2 (n - 1) / n of the rows.
  EXPECT_DOUBLE_EQ(rows[1].sent_bytes, 2.0 * (world_->size() - 1) * 4 * 9 * 192);
}

/// float64's values of two rows are planted: all of y's are far from them.
TEST_F(Point, FastSumsAndOneRankAreComparedWithFloat64) {
  options_.iterations = 2;
  alter_ = [](BenchLayer& layer) {
    for (const std::int64_t row : {0, 8}) {
      ReferenceResult wrong;
      wrong.y.assign(192, 1e6);
      wrong.bound.assign(192, 1);
      layer.references[row] = wrong;
    }
  };
  const std::vector<Measured> rows = measure(kDense, 9, {}, {{Reduce::kExact}, {Reduce::kFast}});
  EXPECT_EQ(rows[0].wrong, world_->size() == 1 ? 2 * 192 : 0);
  EXPECT_EQ(rows[1].wrong, 2 * 192 * world_->size()) << "each rank's copy counts";
}

/// Changes what the library's sum gives rank 1, of its first row alone.
class WrongSums : public HookedCommunicator {
 public:
  explicit WrongSums(Communicator& inner)
      : HookedCommunicator(
            inner, [](Communicator& to, std::span<const Transfer> sends,
                      std::span<const Transfer> receives) { to.exchange(sends, receives); }) {}
  void all_reduce(float* data, std::int64_t count) override {
    HookedCommunicator::all_reduce(data, count);
    if (rank() == 1) std::fill_n(data, 192, 1e6F);
  }
};

TEST_F(Point, FastSumsOfEveryRankAreJudged) {
  if (world_->size() == 1) GTEST_SKIP() << "one rank has no sums";
  options_.iterations = 2;
  Seams seams;
  seams.wrap_exchanges = [](Communicator& inner) -> std::unique_ptr<Communicator> {
    return std::make_unique<WrongSums>(inner);
  };
  const std::vector<Way> ways = {{Reduce::kExact}, {Reduce::kFast}};
  const std::vector<Measured> rows = measure(kDense, 9, seams, ways);
  EXPECT_EQ(rows[0].wrong, 0);
  EXPECT_EQ(rows[1].wrong, 192);
}

/// Has another first row of what it computed when that is looked at.
class WrongDownloads final : public testing::CountingDevice {
 public:
  using CountingDevice::CountingDevice;
  void download(std::byte* host, const std::byte* in, std::int64_t bytes) override {
    CountingDevice::download(host, in, bytes);
    std::fill_n(reinterpret_cast<float*>(host), 192, 1e6F);
  }
};

/// Rank 1's rows are none of the sample's.
TEST_F(Point, RowsOfARankThatSharesNoTokensWithTheFirstAreJudgedToo) {
  if (world_->size() == 1) GTEST_SKIP() << "one rank shares no tokens";
  options_.iterations = 2;
  options_.tp = 1;
  options_.reduce = Reduce::kFast;
  options_.scaling = Scaling::kWeak;
  Seams seams;
  seams.wrap_device = [](Device& device, int rank) -> std::unique_ptr<Device> {
    if (rank != 1) return nullptr;
    return std::make_unique<WrongDownloads>(device);
  };
  const Measured m = measure(kDense, 3, seams, {{Reduce::kFast}}).front();
  EXPECT_EQ(m.wrong, 192);
}

TEST_F(Point, ASumLeftOutIsCounted) {
  options_.iterations = 2;
  if (world_->size() == 1) GTEST_SKIP() << "one rank has no sums";
  Seams seams;
  seams.wrap_exchanges = [](Communicator& inner) -> std::unique_ptr<Communicator> {
    return std::make_unique<HookedCommunicator>(
        inner,
        [](Communicator& to, std::span<const Transfer> sends, std::span<const Transfer> receives) {
          to.exchange(sends, receives);
          for (const Transfer& t : receives) {
            if (t.peer != to.rank()) std::fill_n(t.data, t.bytes, std::byte{0});
          }
        });
  };
  const Measured m = measure(kDense, 4, seams).front();
  if (world_->rank() != 0) return;
  EXPECT_GT(*m.wrong, 4 * 192 * world_->size() / 2);
}

TEST(OutsideBound, CountsWhatNoRoundingExplains) {
  const ReferenceResult expected{{1, 2, 3, 4}, {0.1, 0.1, 0.1, 0.1}};
  const float near[] = {1.05F, 2.0F, 2.95F, 4.0F};
  EXPECT_EQ(outside_bound(expected, DType::kF32, reinterpret_cast<const std::byte*>(near)), 0);
  const float nan = std::nanf("");
  const float far[] = {1.2F, 2.0F, nan, 3.0F};
  EXPECT_EQ(outside_bound(expected, DType::kF32, reinterpret_cast<const std::byte*>(far)), 3);
}

}  // namespace
}  // namespace gatefold
