#include "launch/report.h"

#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/error.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Report sample() {
  Report report;
  report.options({{"tp", "4"}, {"timeout", "1.5"}, {"quiet", "false"}, {"dtype", "bf16"}});
  report.fact("model", "a \"quoted\" path");
  report.fact("gemm", "x");
  report.note("before");
  report.columns({{"layer", "", "layer"}, {"time", "us", "time_us"}, {"verdict", "", "verdict"}});
  report.row({Cell::of(0, "0"), Cell::of(12.25, "12.2"), Cell::of("OK")});
  report.row({Cell::of(10, "10"), Cell::of(1234.5, "1234.5"), Cell::of("a, \"b\"")});
  report.note("after");
  return report;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(Report, TheTableAlignsItsColumnsBetweenCommentLines) {
  EXPECT_THAT(lines_of(sample().text()),
              ElementsAre("# model  a \"quoted\" path",  //
                          "# gemm   x",                  //
                          "# before",                    //
                          "#",                           //
                          "# layer    time  verdict",    //
                          "#            us",             //
                          "      0    12.2       OK",    //
                          "     10  1234.5   a, \"b\"",  //
                          "# after"));
}

TEST(Report, CharactersOfSeveralBytesDontShiftAColumn) {
  Report report;
  report.columns({{"shape", "", "shape"}, {"n", "", "n"}});
  report.row({Cell::of("2×3"), Cell::of(1, "1")});
  report.row({Cell::of("2x3"), Cell::of(1, "1")});
  const auto lines = lines_of(report.text());
  ASSERT_EQ(lines.size(), 4U);
  EXPECT_EQ(lines[2], "    2×3  1");
  EXPECT_EQ(lines[3], "    2x3  1");
}

TEST(Report, QuietLeavesTheNotesAfterTheRows) { EXPECT_EQ(sample().closing_text(), "# after\n"); }

TEST(Report, JsonReadsBackWithNumbersAsNumbers) {
  const auto json = nlohmann::json::parse(sample().json());
  EXPECT_EQ(json["options"]["tp"], 4);
  EXPECT_TRUE(json["options"]["tp"].is_number_integer());
  EXPECT_EQ(json["options"]["timeout"], 1.5);
  EXPECT_EQ(json["options"]["quiet"], false);
  EXPECT_EQ(json["options"]["dtype"], "bf16");
  EXPECT_EQ(json["environment"]["model"], "a \"quoted\" path");
  ASSERT_EQ(json["rows"].size(), 2U);
  EXPECT_TRUE(json["rows"][0]["layer"].is_number_integer());
  EXPECT_EQ(json["rows"][0]["time_us"], 12.25);
  EXPECT_EQ(json["rows"][1]["verdict"], "a, \"b\"");
  EXPECT_THAT(json["notes"], ElementsAre("before", "after"));
}

TEST(Report, NanAndInfinityAreNeverBareTokensInJson) {
  Report report;
  report.columns({{"a", "", "a"}, {"b", "", "b"}, {"c", "", "c"}});
  report.row({Cell::of(kNaN, "nan"), Cell::of(kInfinity, "inf"), Cell::of(-kInfinity, "-inf")});
  const auto json = nlohmann::json::parse(report.json());
  for (const char* name : {"a", "b", "c"}) EXPECT_TRUE(json["rows"][0][name].is_null());
  EXPECT_THAT(lines_of(report.csv()), ElementsAre("a,b,c", "nan,inf,-inf"));
}

TEST(Report, WholeNumbersStayWholeAndLargerOnesStayNumbers) {
  Report report;
  report.columns({{"a", "", "a"}, {"b", "", "b"}});
  report.row({Cell::of(0x1p52, "many"), Cell::of(1e30, "more")});
  const auto json = nlohmann::json::parse(report.json());
  EXPECT_TRUE(json["rows"][0]["a"].is_number_integer());
  EXPECT_EQ(json["rows"][0]["a"], std::int64_t{1} << 52);
  EXPECT_EQ(json["rows"][0]["b"], 1e30);
  EXPECT_EQ(report.csv(), "a,b\n4503599627370496,1e+30\n");
}

TEST(Report, AnOptionThatReadsAsOtherJsonIsText) {
  Report report;
  const std::vector<std::string> values = {"[1]", "{}", "null", "\"x\"", "0x1", "-", ""};
  for (const std::string& value : values) {
    report.options({{"model", value}});
    EXPECT_EQ(nlohmann::json::parse(report.json())["options"]["model"], value);
  }
}

TEST(Report, BytesThatAreNoUtf8StillGiveJson) {
  Report report;
  report.options({{"model", "a\xff"}});
  report.fact("model", "\xc3");
  EXPECT_TRUE(nlohmann::json::accept(report.json()));
}

TEST(Report, CsvHasAHeaderFullPrecisionAndQuotes) {
  Report report;
  report.columns({{"x", "", "x_json"}, {"name", "", "na,me"}});
  report.row({Cell::of(0.1 + 0.2, "0.3"), Cell::of("a, \"b\"\nc")});
  report.row({Cell::of(3e9, "3e9"), Cell::of("plain")});
  EXPECT_EQ(report.csv(),
            "x_json,\"na,me\"\n0.30000000000000004,\"a, \"\"b\"\"\nc\"\n3000000000,plain\n");
}

TEST(Report, EachCharacterThatCsvMindsIsReasonForQuotes) {
  Report report;
  report.columns({{"x", "", "x"}});
  for (const char* text : {"a,b", "a\nb", "a\rb"}) report.row({Cell::of(text)});
  EXPECT_EQ(report.csv(), "x\n\"a,b\"\n\"a\nb\"\n\"a\rb\"\n");
}

TEST(Report, ARowMayBeShorterThanTheHeader) {
  Report report;
  report.columns({{"a", "", "a"}, {"b", "", "b"}});
  report.row({Cell::of("x")});
  EXPECT_EQ(report.csv(), "a,b\nx,\n");
}

TEST(Human, KeepsThreeOrFourSignificantDigits) {
  EXPECT_EQ(human(11010048, "", 4), "11.01 M");
  EXPECT_EQ(human(264241152, ""), "264 M");
  EXPECT_EQ(human(22020096, "B"), "22.0 MB");
  EXPECT_EQ(human(528482304, "B"), "528 MB");
  EXPECT_EQ(human(999, "B"), "999 B");
  EXPECT_EQ(human(1000, "B"), "1.00 kB");
  EXPECT_EQ(human(999499, ""), "999 k");
  EXPECT_EQ(human(999500, ""), "1.00 M");
  EXPECT_EQ(human(0, "B"), "0 B");
  EXPECT_EQ(human(0, ""), "0");
  EXPECT_EQ(human(-22020096, "B"), "-22.0 MB");
  EXPECT_EQ(human(1.5, "s"), "1.50 s");
  EXPECT_EQ(human(0.0123, ""), "0.0123");
  EXPECT_EQ(human(9.2e18, "B"), "9.20 EB");
  EXPECT_EQ(human(1e22, "B"), "10000 EB");
  EXPECT_EQ(human(kNaN, "B"), "nan B");
}

class Files : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) / ("gatefold_report_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string content(const std::string& name) const {
    std::ifstream file(folder_ / name);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      found.push_back(entry.path().filename().string());
    }
    return found;
  }

 private:
  fs::path folder_;
};

void expect_output_error(const std::string& path) {
  for (const bool write : {false, true}) {
    try {
      if (write) {
        write_file(path, "x");
      } else {
        require_writable(path);
      }
      ADD_FAILURE() << path << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kOutput) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("cannot write"));
    }
  }
}

TEST_F(Files, WritingReplacesTheWholeFileAndLeavesNothingElse) {
  write_file(path("a.json"), "a long text");
  write_file(path("a.json"), "short");
  EXPECT_EQ(content("a.json"), "short");
  EXPECT_THAT(names(), ElementsAre("a.json"));
}

TEST_F(Files, AskingWhetherAFileCanBeWrittenChangesNothing) {
  require_writable(path("new.json"));
  EXPECT_THAT(names(), IsEmpty());
  write_file(path("old.json"), "old");
  require_writable(path("old.json"));
  EXPECT_EQ(content("old.json"), "old");
  EXPECT_THAT(names(), ElementsAre("old.json"));
}

TEST_F(Files, APathThatCantBecomeAFileIsRefusedBeforeAndWhenWriting) {
  fs::create_directories(path("folder"));
  ::mkfifo(path("pipe").c_str(), 0600);
  fs::create_symlink(path("nowhere"), path("dangling"));
  expect_output_error(path("folder"));
  expect_output_error(path("folder/"));
  expect_output_error(path("missing/file.json"));
  expect_output_error(path("pipe"));
  expect_output_error(path("dangling"));
  expect_output_error("/proc/gatefold.json");
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
}

TEST_F(Files, ASymbolicLinkStaysAndItsFileIsReplaced) {
  write_file(path("target.json"), "old");
  fs::create_symlink(path("target.json"), path("link.json"));
  write_file(path("link.json"), "new");
  EXPECT_TRUE(fs::is_symlink(path("link.json")));
  EXPECT_EQ(content("target.json"), "new");
}

}  // namespace
}  // namespace gatefold
