#include "launch/machine_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "launch/bandwidth.h"
#include "launch/device_choice.h"
#include "launch/movement_bench.h"
#include "launch/outputs.h"
#include "launch/timing.h"
#include "launch/topology.h"
#include "parallel/agreement.h"
#include "parallel/shared_window.h"
#include "runtime/quoted_name.h"

namespace gatefold {
namespace {

constexpr std::int64_t kMostBytes = std::int64_t{64} << 20;
/// Of one row; so a run of ten ranks takes less than a minute, too.
constexpr double kSeconds = 0.5;

/// Message sizes: 8, 16, 64, 256 B … 64 MiB.
std::vector<std::int64_t> message_sizes() {
  std::vector<std::int64_t> sizes{8};
  for (std::int64_t bytes = 16; bytes <= kMostBytes; bytes *= 4) sizes.push_back(bytes);
  return sizes;
}

Cell number(double value, int digits) {
  return Cell::of(value, fmt::format("{:.{}f}", value, digits));
}
Cell whole(double value) { return Cell::of(value, fmt::format("{:.0f}", value)); }
Cell none() { return Cell::of("-"); }

double fastest(const std::vector<double>& seconds) { return quantile(seconds, 0); }

Buffer zeros(Device& device, std::int64_t bytes) {
  Buffer memory = device.allocate(bytes);
  device.fill(memory.data(), std::byte{0}, bytes);
  return memory;
}

}  // namespace

MachineBench::MachineBench(const Options& options, Communicator& world)
    : options_(options), world_(world) {
  world.progress().enter("set-up");
  device_ = make_device(options, world);
  choice_ = choose_comm(world, *device_, options.comm);
  run_agreed(world, [&] {
    on_device_ = make_device_communicator(world, *device_, choice_.kind, options.timeout);
  });
  comm_ = on_device_ != nullptr ? on_device_.get() : &world;
  std::vector<int> sizes(static_cast<std::size_t>(world.size()));
  sizes[static_cast<std::size_t>(world.rank())] = world.split_by_host()->size();
  all_gather<int>(world, sizes);
  ranks_a_host_ = *std::ranges::min_element(sizes);
}

std::vector<int> MachineBench::one_and_all() const {
  if (world_.size() == 1) return {1};
  return {1, world_.size()};
}

Report MachineBench::header() {
  Report report;
  report.options(options_.echo());
  report.fact("gatefold", GATEFOLD_VERSION);
  report.fact("ranks", fmt::format("{}", world_.size()));
  report.fact("device", device_->description() + why_no_gpu(options_, *device_));
  report.fact("gemm", device_->library());
  std::string comm = comm_->description();
  if (choice_.kind == CommKind::kNccl) comm += " over " + world_.description();
  report.fact("comm", choice_.why.empty() ? comm : fmt::format("{} ({})", comm, choice_.why));
  add_topology(world_, *device_, options_, report);
  report.detail("revision", options_.revision);
  report.columns({{"what", "", "what"},
                  {"how", "", "how"},
                  {"ranks", "", "ranks"},
                  {"size", "B", "bytes"},
                  {"times", "", "times"},
                  {"time", "us", "time_us"},
                  {"min", "us", "min_us"},
                  {"p90", "us", "p90_us"},
                  {"max", "us", "max_us"},
                  {"TFLOP/s", "", "tflops"},
                  {"algbw", "GB/s", "algbw_gb_per_s"},
                  {"busbw", "GB/s", "busbw_gb_per_s"},
                  {"x library", "", "times_library"}});
  return report;
}

int MachineBench::run() {
  report_ = header();
  world_.progress().enter("the benchmark");
  time_gemms();
  time_memory();
  if (world_.size() > 1) {
    time_pairs();
    Buffer first;
    Buffer second;
    run_agreed(world_, [&] {
      first = zeros(*device_, kMostBytes);
      second = zeros(*device_, kMostBytes);
      comm_->reserve(2 * kMostBytes);
    });
    time_all_reduce(first);
    time_all_to_all(first, second);
    time_movements();
  }
  report_.note(
      "times are a pass's on its slowest rank; rates of gemm, read and copy are those of the "
      "fastest pass, of what ranks send to each other those of the median");
  report_.note(
      "a message's time is half of a round trip, through a window a copy in, a fence and a copy "
      "out; busbw = algbw x 2 (n - 1) / n of an all-reduce, "
      "(n - 1) / n of an all-to-all");
  if (world_.size() > 1) {
    report_.note(
        "x library: how many times as fast as the library, side by side, the median over passes "
        "(a canonical sum: as its all-reduce of as many fp32 bytes; dispatch + combine, without "
        "the plan of which row goes where: as packing, all-to-all-v and unpacking by messages)");
    // Of a GPU's ranks there is nothing to say.
    if (!comm_->sharing().empty()) report_.note("canonical sums and rows: " + comm_->sharing());
  } else {
    report_.note("one rank sends nothing: no messages and no collectives");
  }
  publish(world_, options_, report_);
  return static_cast<int>(ExitCode::kOk);
}

/// A load on the ranks that take part, an empty one on the others; all fail alike.
Load MachineBench::agreed_load(bool takes_part, const std::function<Load()>& make) {
  Load load;
  run_agreed(world_, [&] {
    if (takes_part) load = make();
  });
  return load;
}

/// Seconds of a pass, each time, of the slowest of the ranks that take part, rank 0 among them.
/// The same on all ranks. Collective.
std::vector<double> MachineBench::time(bool takes_part, const Load& load) {
  const auto timed = [&](std::int64_t passes) {
    meet(world_);
    const double start = now();
    if (!takes_part) return 0.0;
    for (std::int64_t i = 0; i < passes; ++i) load.pass();
    return (now() - start) / static_cast<double>(passes);
  };
  timed(1);
  Schedule plan = schedule(timed(1), options_.iterations, kSeconds);
  world_.broadcast(reinterpret_cast<std::byte*>(&plan), sizeof(plan), 0);
  for (std::int64_t i = 0; i < options_.warmup && i < plan.times; ++i) timed(plan.passes);
  std::vector<double> seconds;
  for (std::int64_t i = 0; i < plan.times; ++i) seconds.push_back(timed(plan.passes));
  slowest_of_ranks(world_, seconds);
  return seconds;
}

void MachineBench::time_gemms() {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    std::int64_t size = 0;
    run_agreed(world_, [&] {
      if (world_.rank() == 0) size = best_gemm_size(*device_, dtype);
    });
    world_.broadcast(reinterpret_cast<std::byte*>(&size), sizeof(size), 0);
    const Load load = agreed_load(true, [&] { return gemm_load(*device_, dtype, size); });
    for (const int ranks : one_and_all()) {
      add_gemm({"gemm", load.how, ranks, 0, time(world_.rank() < ranks, load)}, load.work * ranks);
    }
  }
}

void MachineBench::time_memory() {
  const auto rows = [&](const char* what, const std::function<Load(std::int64_t bytes)>& make) {
    for (const int ranks : one_and_all()) {
      const bool takes_part = world_.rank() < ranks;
      // Rank 0's for all, so that each has as much to do.
      std::int64_t bytes = cold_bytes(*device_, ranks == 1 ? 1 : ranks_a_host_);
      world_.broadcast(reinterpret_cast<std::byte*>(&bytes), sizeof(bytes), 0);
      const Load load = agreed_load(takes_part, [&] { return make(bytes); });
      const std::vector<double> seconds = time(takes_part, load);
      add_memory({what, load.how, ranks, static_cast<double>(bytes), seconds}, load.work * ranks);
    }
  };
  const int threads = static_cast<int>(options_.threads);
  rows("read", [&](std::int64_t bytes) { return read_load(*device_, bytes, threads); });
  rows("copy", [&](std::int64_t bytes) { return copy_load(*device_, bytes); });
  if (device_->in_host_memory()) return;
  for (const CopyWay way : {CopyWay::kToDevice, CopyWay::kToHost}) {
    rows("copy", [&](std::int64_t bytes) { return host_copy_load(*device_, bytes, way); });
  }
}

/// Rank 0 and one rank on each kind of place that there is.
std::vector<MachineBench::Pair> MachineBench::find_pairs() {
  std::int64_t leader = world_.rank();
  const std::unique_ptr<Communicator> here = world_.split_by_host();
  here->broadcast(reinterpret_cast<std::byte*>(&leader), sizeof(leader), 0);
  std::vector<std::int64_t> leaders(static_cast<std::size_t>(world_.size()));
  leaders[static_cast<std::size_t>(world_.rank())] = leader;
  all_gather<std::int64_t>(world_, leaders);
  std::vector<Pair> pairs;
  const auto near = std::find(leaders.begin() + 1, leaders.end(), leaders.front());
  const auto far = std::ranges::find_if(leaders, [&](auto l) { return l != leaders.front(); });
  for (const auto& [found, how] : {std::pair(near, "same node"), std::pair(far, "other node")}) {
    if (found != leaders.end()) pairs.push_back({how, static_cast<int>(found - leaders.begin())});
  }
  return pairs;
}

void MachineBench::time_pairs() {
  for (const Pair& pair : find_pairs()) time_pair(pair);
}

void MachineBench::time_pair(const Pair& pair) {
  const bool takes_part = world_.rank() == 0 || world_.rank() == pair.peer;
  const std::unique_ptr<Communicator> host = world_.split(takes_part ? 0 : 1);
  std::unique_ptr<Communicator> on_device;
  Buffer memory;
  run_agreed(world_, [&] {
    if (!takes_part) return;
    on_device = make_device_communicator(*host, *device_, choice_.kind, options_.timeout);
    memory = zeros(*device_, kMostBytes);
    if (on_device != nullptr) on_device->reserve(2 * kMostBytes);
  });
  Communicator& comm = on_device != nullptr ? *on_device : *host;
  for (const std::int64_t bytes : message_sizes()) {
    std::vector<double> seconds = time(takes_part, round_trip(comm, memory, bytes));
    for (double& one : seconds) one /= 2;
    add_message({"message", pair.how, 2, static_cast<double>(bytes), std::move(seconds)}, 1);
  }
  if (on_device == nullptr) time_window(*host, takes_part, pair, memory);
}

/// The same through memory that both share: a copy in, a fence, a copy out.
void MachineBench::time_window(Communicator& both, bool takes_part, const Pair& pair,
                               Buffer& memory) {
  const std::unique_ptr<SharedWindow> window = takes_part ? both.share(kMostBytes) : nullptr;
  std::int64_t shared = window != nullptr ? 1 : 0;
  world_.broadcast(reinterpret_cast<std::byte*>(&shared), sizeof(shared), 0);
  if (shared == 0) {
    if (!both.sharing().empty()) report_.note(pair.how + ": " + both.sharing());
    return;
  }
  for (const std::int64_t bytes : message_sizes()) {
    const auto size = static_cast<std::size_t>(bytes);
    const Load load{"", 0, [&] {
                      for (int turn = 0; turn < 2; ++turn) {
                        std::byte* segment = window->segment(turn);
                        const bool mine = turn == both.rank();
                        if (mine) std::memcpy(segment, memory.data(), size);
                        window->fence("a copy through shared memory");
                        if (!mine) std::memcpy(memory.data(), segment, size);
                      }
                    }};
    std::vector<double> seconds = time(takes_part, load);
    for (double& one : seconds) one /= 2;
    add_message({"message", pair.how + ", window", 2, static_cast<double>(bytes), seconds}, 1);
  }
}

/// There and back again.
Load MachineBench::round_trip(Communicator& pair, Buffer& memory, std::int64_t bytes) {
  const Transfer transfer{1 - pair.rank(), memory.data(), bytes};
  return {"", 0, [&pair, transfer] {
            for (int turn = 0; turn < 2; ++turn) {
              if (turn == pair.rank()) {
                pair.exchange({&transfer, 1}, {});
              } else {
                pair.exchange({}, {&transfer, 1});
              }
            }
            pair.wait();
          }};
}

void MachineBench::time_all_reduce(Buffer& memory) {
  for (const std::int64_t bytes : message_sizes()) {
    const Load load{"", 0, [&] {
                      comm_->all_reduce(memory.as<float>(), bytes / size_of(DType::kF32));
                      comm_->wait();
                    }};
    add_message({"all-reduce", "library's, f32", world_.size(), static_cast<double>(bytes),
                 time(true, load)},
                all_reduce_share(world_.size()));
  }
}

void MachineBench::time_all_to_all(Buffer& out, Buffer& in) {
  const std::int64_t ranks = world_.size();
  for (const std::int64_t bytes : message_sizes()) {
    const std::int64_t piece = bytes / ranks;
    if (piece == 0) continue;
    std::vector<Transfer> sends;
    std::vector<Transfer> receives;
    for (int r = 0; r < ranks; ++r) {
      sends.push_back({r, out.data() + r * piece, piece});
      receives.push_back({r, in.data() + r * piece, piece});
    }
    const Load load{"", 0, [&] {
                      comm_->exchange(sends, receives);
                      comm_->wait();
                    }};
    add_message({"all-to-all", "equal parts", world_.size(), static_cast<double>(piece * ranks),
                 time(true, load)},
                all_to_all_share(world_.size()));
  }
}

void MachineBench::time_movements() {
  MovementBench bench(options_, world_, *comm_, *device_);
  for (Movement& one : bench.time_all()) {
    const Cell times = number(times_library(one), 2);
    const Measured measured{one.what, one.how, world_.size(), static_cast<double>(one.bytes),
                            std::move(one.seconds)};
    if (one.is_all_reduce) {
      add_message(measured, all_reduce_share(world_.size()), times);
    } else {
      add_row(measured, none(), none(), none(), times);
    }
  }
}

void MachineBench::add_row(const Measured& one, Cell tflops, Cell algbw, Cell busbw,
                           Cell times_library) {
  const auto us = [&](double q) { return number(quantile(one.seconds, q) * 1e6, 2); };
  report_.row({Cell::of(one.what), Cell::of(one.how), whole(one.ranks),
               one.bytes > 0 ? whole(one.bytes) : none(),
               whole(static_cast<double>(one.seconds.size())), us(0.5), us(0), us(0.9), us(1),
               std::move(tflops), std::move(algbw), std::move(busbw), std::move(times_library)});
}

void MachineBench::add_gemm(const Measured& one, double flops) {
  add_row(one, number(flops / fastest(one.seconds) * 1e-12, 3), none(), none());
}

void MachineBench::add_memory(const Measured& one, double bytes) {
  const double rate = algorithm_bandwidth(bytes, fastest(one.seconds));
  add_row(one, none(), number(rate * 1e-9, 2), none());
}

void MachineBench::add_message(const Measured& one, double share, Cell times_library) {
  const double rate = algorithm_bandwidth(one.bytes, median(one.seconds));
  add_row(one, none(), number(rate * 1e-9, 3), number(rate * share * 1e-9, 3),
          std::move(times_library));
}

}  // namespace gatefold
