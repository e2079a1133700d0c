#include "launch/progress_line.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <functional>

namespace gatefold {
namespace {

/// What goes to standard error, which no test has on a terminal.
std::string written(const char* told, const std::function<void()>& work) {
  ::setenv("GATEFOLD_PROGRESS", told, 1);
  ::testing::internal::CaptureStderr();
  work();
  ::unsetenv("GATEFOLD_PROGRESS");
  return ::testing::internal::GetCapturedStderr();
}

TEST(ProgressLine, IsWrittenOverItselfAndWipedAtTheEnd) {
  const auto three_steps = [] {
    ProgressLine line("point", 3);
    line.prepare("loading weights");
    line.begin("layer 0");
    line.begin("layer 1");
    line.prepare("loading weights");
  };
  EXPECT_EQ(written("1", three_steps),
            "\r\x1b[Kbefore point 1 of 3: loading weights\r\x1b[Kpoint 1 of 3: layer 0"
            "\r\x1b[Kpoint 2 of 3: layer 1, about 1 s left"
            "\r\x1b[Kbefore point 3 of 3: loading weights\r\x1b[K");
  EXPECT_EQ(written("1", [] { ProgressLine("point", 3).prepare("loading weights"); }),
            "\r\x1b[Kbefore point 1 of 3: loading weights\r\x1b[K");
}

TEST(ProgressLine, CountsWhatIsSkippedAndNamesItsSteps) {
  EXPECT_EQ(written("1",
                    [] {
                      ProgressLine line("layer", 6);
                      line.skip(2);
                      line.begin("");
                      line.skip(1);
                      line.prepare("loading weights");
                      line.begin("dense");
                    }),
            "\r\x1b[Klayer 3 of 6\r\x1b[Kbefore layer 5 of 6: loading weights"
            "\r\x1b[Klayer 5 of 6: dense, about 1 s left\r\x1b[K");
}

TEST(ProgressLine, IsNothingInFilesAndWhereUnwanted) {
  const auto step = [](bool wanted) {
    ProgressLine line("point", 2, wanted);
    line.prepare("loading weights");
    line.begin("layer 0");
  };
  EXPECT_EQ(written("0", [&] { step(true); }), "");
  EXPECT_EQ(written("1", [&] { step(false); }), "");
  EXPECT_EQ(written("1", [] { const ProgressLine line("point", 2); }), "");
}

TEST(TimeLeft, IsAsLongAsItTookForWhatIsDone) {
  EXPECT_EQ(time_left(0, 4, 10), "");
  EXPECT_EQ(time_left(1, 3, 10), "about 30 s left");
  EXPECT_EQ(time_left(3, 1, 10), "about 4 s left");
  EXPECT_EQ(time_left(1, 1, 89), "about 89 s left");
  EXPECT_EQ(time_left(1, 1, 90), "about 2 min left");
  EXPECT_EQ(time_left(1, 2, 90), "about 3 min left");
}

}  // namespace
}  // namespace gatefold
