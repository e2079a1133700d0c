#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "parallel/communicator.h"
#include "runtime/device.h"

/// What benchmarks have in common: clocks, and statistics of what they measured.
namespace gatefold {

/// Seconds of a steady clock.
double now();
/// The value that this part of all lie below; one that occurred.
double quantile(std::vector<double> values, double q);
double median(const std::vector<double>& values);
/// The median of a[i] / b[i]: drift of the machine's speed cancels.
double median_ratio(const std::vector<double>& a, const std::vector<double>& b);
/// All ranks, awake. Ranks that slept through another's turn wake up to a polling step apart; the
/// second barrier finds all of them awake.
void meet(Communicator& world);
/// Each of `seconds`, one a pass, becomes that of its slowest rank; returns which that is.
/// Collective.
std::vector<int> slowest_of_ranks(Communicator& world, std::vector<double>& seconds);
/// Seconds that `action` takes from a common start on the slowest rank. Collective.
double timed(Communicator& world, const std::function<void()>& action);
/// The passes whose times are between the quartiles: what is typical, whatever the outliers are.
std::vector<std::size_t> middle_passes(const std::vector<double>& seconds);

/// Seconds that a device's ranges have taken on the host's clock, each less what lies in ranges
/// within it. On a GPU work goes on after its range: only the CPU's are what they seem. Allocates
/// nothing once it is there. Names are string literals.
class RangeTimes {
 public:
  struct Range {
    const char* name;
    double seconds;
  };

  explicit RangeTimes(Device& device);
  ~RangeTimes() { device_.observe_ranges({}); }
  RangeTimes(const RangeTimes&) = delete;
  RangeTimes& operator=(const RangeTimes&) = delete;

  void clear() { count_ = 0; }
  /// By name, in the order in which they first began.
  std::span<const Range> seconds() const { return {ranges_.data(), count_}; }

 private:
  void change(const char* name);
  void add(double since_last);

  Device& device_;
  std::array<Range, 32> ranges_{};
  std::size_t count_ = 0;
  std::array<const char*, 16> inside_{};
  std::size_t depth_ = 0;
  double last_ = 0;
};

}  // namespace gatefold
