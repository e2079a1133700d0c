#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace gatefold {

/// Where a long run has got to: one line on a terminal, written over itself and wiped at the end.
/// Elsewhere, as in files, nothing.
class ProgressLine {
 public:
  /// Of `steps` steps, each a `noun`. GATEFOLD_PROGRESS=1 in the environment says that standard
  /// error, though a pipe, ends on a terminal: as that of mpirun's ranks may.
  ProgressLine(std::string_view noun, std::int64_t steps, bool wanted = true);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  /// A step begins: "point 3 of 12: layer 0, 64 tokens, about 40 s left".
  void begin(const std::string& what = "");
  /// So many steps that nobody has to wait for.
  void skip(std::int64_t steps) { skipped_ += steps; }
  /// What the next step waits for: "before point 3 of 12: loading weights".
  void prepare(const std::string& what);

 private:
  void write(const std::string& text);

  std::string_view noun_;
  std::int64_t steps_;
  std::int64_t begun_ = 0;
  std::int64_t skipped_ = 0;
  double start_;
  bool shown_;
  bool written_ = false;
};

/// "about 40 s left" for `left` steps after `done` took `seconds`; empty before the first.
std::string time_left(std::int64_t done, std::int64_t left, double seconds);

}  // namespace gatefold
