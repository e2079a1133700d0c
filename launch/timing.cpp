#include "launch/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>

namespace gatefold {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const auto last = static_cast<double>(values.size() - 1);
  return values[static_cast<std::size_t>(std::lround(q * last))];
}

double median(const std::vector<double>& values) { return quantile(values, 0.5); }

double median_ratio(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < a.size(); ++i) ratios.push_back(a[i] / b[i]);
  return median(ratios);
}

void meet(Communicator& world) {
  world.barrier();
  world.barrier();
}

std::vector<int> slowest_of_ranks(Communicator& world, std::vector<double>& seconds) {
  const auto ranks = static_cast<std::size_t>(world.size());
  const std::size_t n = seconds.size();
  std::vector<double> all(ranks * n);
  std::copy(seconds.begin(), seconds.end(),
            all.begin() + world.rank() * static_cast<std::ptrdiff_t>(n));
  const std::vector<std::int64_t> parts(ranks, static_cast<std::int64_t>(n * sizeof(double)));
  world.host().all_gather_v(reinterpret_cast<std::byte*>(all.data()), parts);
  std::vector<int> who(n);
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t r = 1; r < ranks; ++r) {
      if (all[r * n + i] > all[static_cast<std::size_t>(who[i]) * n + i]) {
        who[i] = static_cast<int>(r);
      }
    }
    seconds[i] = all[static_cast<std::size_t>(who[i]) * n + i];
  }
  return who;
}

double timed(Communicator& world, const std::function<void()>& action) {
  meet(world);
  const double start = now();
  action();
  std::vector<double> seconds = {now() - start};
  slowest_of_ranks(world, seconds);
  return seconds.front();
}

std::vector<std::size_t> middle_passes(const std::vector<double>& seconds) {
  std::vector<std::size_t> passes(seconds.size());
  std::iota(passes.begin(), passes.end(), std::size_t{0});
  std::ranges::stable_sort(passes, {}, [&](std::size_t pass) { return seconds[pass]; });
  const std::size_t outer = passes.size() / 4;
  return {passes.begin() + static_cast<std::ptrdiff_t>(outer),
          passes.end() - static_cast<std::ptrdiff_t>(outer)};
}

RangeTimes::RangeTimes(Device& device) : device_(device) {
  device.observe_ranges([this](const char* name) { change(name); });
}

void RangeTimes::change(const char* name) {
  const double time = now();
  if (depth_ > 0) add(time - last_);
  last_ = time;
  if (name != nullptr) {
    inside_.at(depth_++) = name;
    add(0);
  } else {
    --depth_;
  }
}

void RangeTimes::add(double since_last) {
  const char* name = inside_[depth_ - 1];
  const auto end = ranges_.begin() + static_cast<std::ptrdiff_t>(count_);
  const auto known = std::find_if(ranges_.begin(), end, [name](const Range& range) {
    return range.name == name || std::strcmp(range.name, name) == 0;
  });
  if (known != end) {
    known->seconds += since_last;
  } else {
    ranges_.at(count_++) = {name, since_last};
  }
}

}  // namespace gatefold
