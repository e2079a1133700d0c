#include "launch/outputs.h"

#include <gmock/gmock.h>

#include <filesystem>

#include "tests/runtime/file_testing.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

/// A model of two shards with its index, tokens, and the names under which they can be hit.
class Outputs : public testing::Test, protected TestFolder {
 protected:
  Outputs() : TestFolder("outputs") {
    fs::create_directories(path("model"));
    for (const char* name : {"config.json", "model.safetensors.index.json", "a.safetensors",
                             "b.safetensors", "report.json"}) {
      put("x", std::string("model/") + name);
    }
    put("x", "tokens");
    options.command = Command::kRun;
    options.model = path("model");
    options.input = path("tokens");
  }

  std::string refused(const std::string& output) {
    options.output = output;
    return error_of(ExitCode::kUsage, [&] { check_outputs(options); });
  }
  void accepted(const std::string& output) {
    options.output = output;
    EXPECT_NO_THROW(check_outputs(options)) << output;
  }

  Options options;
};

TEST_F(Outputs, AFileOfTheModelIsNoOutputUnderAnyName) {
  for (const char* name :
       {"config.json", "model.safetensors.index.json", "a.safetensors", "b.safetensors"}) {
    const std::string file = path("model/") + name;
    EXPECT_THAT(refused(file), HasSubstr("is a file of the model"));
    EXPECT_THAT(refused(path("model/../model/./") + name), HasSubstr("is a file of the model"));
    fs::create_symlink(file, path("link"));
    EXPECT_THAT(refused(path("link")), HasSubstr("is a file of the model"));
    fs::remove(path("link"));
    fs::create_hard_link(file, path("hard"));
    EXPECT_THAT(refused(path("hard")), HasSubstr("is a file of the model"));
    fs::remove(path("hard"));
  }
  fs::create_directory_symlink(path("model"), path("also"));
  EXPECT_THAT(refused(path("also/a.safetensors")), HasSubstr("is a file of the model"));
  options.json = path("model/config.json");
  EXPECT_THAT(refused(path("y")), HasSubstr("--json"));
}

TEST_F(Outputs, ANameThatTheModelWouldBeReadFromIsNoOutputEither) {
  EXPECT_THAT(refused(path("model/model.safetensors")),
              HasSubstr("would be a file of the model ("));
  fs::create_directory_symlink(path("model"), path("also"));
  EXPECT_THAT(refused(path("also/y.safetensors")), HasSubstr("would be a file of the model ("));
  EXPECT_THAT(refused(path("model/.safetensors")), HasSubstr("would be a file of the model ("));
  accepted(path("model/report.json"));
  accepted(path("model/new.json"));
  accepted(path("y.safetensors"));
}

TEST_F(Outputs, InputsAreNoOutputs) {
  EXPECT_THAT(refused(path("tokens")), HasSubstr("is the --input file"));
  options.model.clear();
  options.config = put("{}", "config");
  EXPECT_THAT(refused(path("./config")), HasSubstr("is the --config file"));
}

TEST_F(Outputs, TwoOutputsAreTwoFiles) {
  options.json = path("r");
  EXPECT_THAT(refused(path("r")), HasSubstr("is the same as --output"));
  EXPECT_THAT(refused(path("./r")), HasSubstr("is the same as --output"));
  put("x", "r");
  fs::create_symlink("r", path("s"));
  EXPECT_THAT(refused(path("s")), HasSubstr("is the same as --output"));
  options.csv = path("model/../r");
  EXPECT_THAT(refused(path("y")), HasSubstr("--csv"));
  options.csv = path("r.csv");
  accepted(path("y"));
}

TEST_F(Outputs, AModelThatIsMadeKeepsItsFilesToo) {
  options = {};
  options.command = Command::kMakeModel;
  options.config = path("model/config.json");
  options.json = path("made/config.json");
  EXPECT_THAT(refused(path("made/")), HasSubstr("would be a file of the model ("));
  options.json = path("made");
  EXPECT_THAT(refused(path("made/")), HasSubstr("is the same as --output"));
  options.json = path("model/config.json");
  EXPECT_THAT(refused(path("made")), HasSubstr("is the --config file"));
  options.json = path("made.json");
  accepted(path("made"));
}

TEST_F(Outputs, StandardOutputHoldsTheTable) {
  EXPECT_THAT(refused("/dev/stdout"), HasSubstr("is standard output"));
  EXPECT_THAT(refused("/dev/fd/2"), HasSubstr("is standard "));
}

TEST_F(Outputs, WhatCantBeWrittenIsAnOutputError) {
  options.output = path("missing/y");
  error_of(ExitCode::kOutput, [&] { check_outputs(options); });
}

}  // namespace
}  // namespace gatefold
