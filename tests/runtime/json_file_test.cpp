#include "runtime/json_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tests/runtime/file_testing.h"

namespace gatefold {
namespace {

using namespace std::string_literals;
using testing::AllOf;
using testing::HasSubstr;

constexpr JsonRules kRules{
    .max_bytes = 100, .max_depth = 3, .kind = "an index", .remedy = "write it again"};

class JsonFile : public testing::Test, protected TestFolder {
 protected:
  JsonFile() : TestFolder("json-file") {}
  std::string refused(ExitCode code, const std::string& text) {
    return error_of(code, [&] { read_json_text(put(text), kRules); });
  }
};

TEST_F(JsonFile, GoodTextComesBackAsItIs) {
  for (const std::string& text :
       {R"({"a":[{"b":1}],"c":{"a":2}})"s, " [1, -2.5e3, null]\n"s, "\"\xc3\xa9\""s,
        R"([{"a":1},{"a":2}])"s, std::string(99, ' ') + '1'}) {
    EXPECT_EQ(read_json_text(put(text), kRules), text);
  }
}

TEST_F(JsonFile, BadTextIsADataErrorThatNamesTheFile) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "not JSON"},
      {"{} x", "not JSON"},
      {"[1,]", "not JSON"},
      {"[1e999]", "not JSON"},
      {"\"\xff\"", "not JSON"},
      {"\xff\xfe[]", "not JSON"},
      {"\xef\xbb\xbf{}", "byte order mark"},
      {"{}\0"s, "NUL"},
      {"\0{}"s, "NUL"},
      {"[[[[]]]]", "nested deeper than 3 levels (no index is)"},
      {R"({"a":{"b":{"c":{}}}})", "nested deeper"},
      {R"({"a":1,"b":{"a":2},"a":3})", "'a' is there twice"},
      {R"([{"b":{"a":1,"a":2}}])", "'a' is there twice"},
      {std::string(100, ' ') + '1', "an index has at most 100"},
  };
  for (const auto& [text, message] : cases) {
    SCOPED_TRACE(text);
    EXPECT_THAT(refused(ExitCode::kData, text), AllOf(HasSubstr(path()), HasSubstr(message)));
  }
}

TEST_F(JsonFile, WhatIsNoRegularFileIsNoInputAtOnce) {
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  for (const std::string& name :
       {path("fifo"), path("."), path("missing"), "/dev/null"s, ""s, put("1", "file") + "/x"}) {
    SCOPED_TRACE(name);
    EXPECT_THAT(error_of(ExitCode::kNoInput, [&] { read_json_text(name, kRules); }),
                HasSubstr((name.empty() ? "''" : name) + ": can't be opened ("));
  }
}

TEST_F(JsonFile, AFileWithoutASizeIsReadToItsEnd) {
  // /proc says 0 for all of its files.
  EXPECT_THAT(error_of(ExitCode::kData, [] { read_json_text("/proc/self/status", kRules); }),
              HasSubstr("larger than 100"));
  EXPECT_THAT(read_json_text("/proc/sys/kernel/pid_max", kRules), testing::EndsWith("\n"));
}

}  // namespace
}  // namespace gatefold
