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

ProgressLine::ProgressLine(std::int64_t steps, bool wanted)
    : steps_(steps), start_(now()), shown_(wanted && on_a_terminal()) {}

ProgressLine::~ProgressLine() {
  if (!written_) return;
  std::fputs(kWipe, stderr);
  std::fflush(stderr);
}

void ProgressLine::begin(const std::string& what) {
  ++begun_;
  const std::string left = time_left(begun_ - 1, steps_, now() - start_);
  write(
      fmt::format("point {} of {}: {}{}{}", begun_, steps_, what, left.empty() ? "" : ", ", left));
}

void ProgressLine::prepare(const std::string& what) {
  write(fmt::format("before point {} of {}: {}", begun_ + 1, steps_, what));
}

void ProgressLine::write(const std::string& text) {
  if (!shown_) return;
  written_ = true;
  std::fputs((kWipe + text).c_str(), stderr);
  std::fflush(stderr);
}

std::string time_left(std::int64_t done, std::int64_t steps, double seconds) {
  if (done <= 0) return "";
  const double left = seconds / static_cast<double>(done) * static_cast<double>(steps - done);
  if (left >= 90) return fmt::format("about {:.0f} min left", std::ceil(left / 60));
  return fmt::format("about {:.0f} s left", std::ceil(left));
}

}  // namespace gatefold
