#include "parallel/shared_window.h"

#include <immintrin.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "parallel/communicator.h"

namespace gatefold {
namespace {

using Clock = std::chrono::steady_clock;

/// Polls before a waiting rank first gives its core away: some tens of microseconds.
constexpr int kSpins = 1000;

}  // namespace

SharedWindow::SharedWindow(Parts parts) : parts_(std::move(parts)) {
  segments_.resize(static_cast<std::size_t>(parts_.group_size));
  std::byte* segment = parts_.segments;
  for (std::size_t i = 0; i < parts_.ranks.size(); ++i, segment += parts_.segment_bytes) {
    segments_[static_cast<std::size_t>(parts_.ranks[i])] = segment;
    if (parts_.ranks[i] == parts_.own) node_rank_ = i;
  }
}

std::uint64_t SharedWindow::arrive() {
  count(node_rank_).store(++arrivals_, std::memory_order_release);
  return arrivals_;
}

bool SharedWindow::all_arrived(std::uint64_t arrivals) const {
  for (std::size_t i = 0; i < parts_.ranks.size(); ++i) {
    if (count(i).load(std::memory_order_acquire) < arrivals) return false;
  }
  return true;
}

void SharedWindow::wait_for(std::uint64_t arrivals, const char* what) {
  parts_.progress->tick();
  for (int spin = 0; spin < kSpins; ++spin) {
    if (all_arrived(arrivals)) return;
    _mm_pause();
  }
  const auto start = Clock::now();
  while (!all_arrived(arrivals)) {
    parts_.move_messages();
    const std::chrono::duration<double> waited = Clock::now() - start;
    if (waited.count() > parts_.timeout_seconds) give_up(arrivals, what);
    if (waited.count() < 0.02) {
      sched_yield();
    } else {
      usleep(200);
    }
  }
  parts_.progress->tick();
}

void SharedWindow::give_up(std::uint64_t arrivals, const char* what) {
  std::vector<int> missing;
  for (std::size_t i = 0; i < parts_.ranks.size(); ++i) {
    if (count(i).load(std::memory_order_acquire) < arrivals) {
      missing.push_back(parts_.world_ranks[i]);
    }
  }
  throw NoAnswerError(std::move(missing), parts_.timeout_seconds, what, *parts_.progress);
}

}  // namespace gatefold
