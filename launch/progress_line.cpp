#include "launch/progress_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "launch/timing.h"

namespace gatefold {
namespace {

bool on_a_terminal() {
  const char* told = std::getenv("GATEFOLD_PROGRESS");
  return ::isatty(STDERR_FILENO) == 1 || (told != nullptr && std::string_view(told) == "1");
}

/// Returns to the line's begin and wipes it.
constexpr const char* kWipe = "\r\x1b[K";

}  // namespace

ProgressLine::ProgressLine(std::string_view noun, std::int64_t steps, bool wanted)
    : noun_(noun), steps_(steps), start_(now()), shown_(wanted && on_a_terminal()) {}

ProgressLine::~ProgressLine() {
  if (!written_) return;
  std::fputs(kWipe, stderr);
  std::fflush(stderr);
}

void ProgressLine::begin(const std::string& what) {
  ++begun_;
  const std::int64_t number = begun_ + skipped_;
  const std::string left = time_left(begun_ - 1, steps_ - number + 1, now() - start_);
  write(fmt::format("{} {} of {}{}{}{}{}", noun_, number, steps_, what.empty() ? "" : ": ", what,
                    left.empty() ? "" : ", ", left));
}

void ProgressLine::prepare(const std::string& what) {
  write(fmt::format("before {} {} of {}: {}", noun_, begun_ + skipped_ + 1, steps_, what));
}

void ProgressLine::write(const std::string& text) {
  if (!shown_) return;
  written_ = true;
  std::fputs((kWipe + text).c_str(), stderr);
  std::fflush(stderr);
}

std::string time_left(std::int64_t done, std::int64_t left, double seconds) {
  if (done <= 0) return "";
  const double rest = seconds / static_cast<double>(done) * static_cast<double>(left);
  if (rest >= 90) return fmt::format("about {:.0f} min left", std::ceil(rest / 60));
  return fmt::format("about {:.0f} s left", std::ceil(rest));
}

}  // namespace gatefold
