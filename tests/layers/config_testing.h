// What tests of configs, and of where their tensors lie, share.
#pragma once

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "layers/model_config.h"
#include "layers/stored_tensors.h"
#include "runtime/error.h"
#include "runtime/tensor_source.h"

namespace gatefold::testing {

using Overrides = std::vector<std::pair<std::string, std::string>>;

/// A folder of its own for a config.json, removed at the end.
class ConfigTest : public ::testing::Test {
 protected:
  ConfigTest() {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    directory_ = std::filesystem::path(::testing::TempDir()) /
                 fmt::format("{}.{}", info->test_suite_name(), info->name());
    std::filesystem::create_directories(directory_);
  }
  ~ConfigTest() override { std::filesystem::remove_all(directory_); }

  std::string write(const std::string& text) const {
    const std::filesystem::path path = directory_ / "config.json";
    std::ofstream(path, std::ios::binary) << text;
    return path.string();
  }
  ModelConfig read_text(const std::string& text, const Overrides& overrides = {}) const {
    return read_model_config(write(text), overrides);
  }
  ModelConfig read(const nlohmann::json& json, const Overrides& overrides = {}) const {
    return read_text(json.dump(), overrides);
  }

  std::filesystem::path directory_;
};

/// `action` ends in an Error with this code, which says `word`.
template <typename Action>
void expect_error(ExitCode code, const std::string& word, const Action& action,
                  const std::string& what = "") {
  try {
    action();
    ADD_FAILURE() << "no error where one should say \"" << word << "\" " << what;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what() << what;
    EXPECT_THAT(error.what(), ::testing::HasSubstr(word)) << what;
  }
}

/// Only names and shapes: what a layer is resolved by.
class ShapeSource : public TensorSource {
 public:
  std::map<std::string, std::vector<std::int64_t>> shapes;

  std::optional<TensorInfo> find(const std::string& name) const override {
    const auto found = shapes.find(name);
    if (found == shapes.end()) return std::nullopt;
    return TensorInfo{.dtype = DType::kBf16, .shape = found->second};
  }
  void read(const std::string&, Range, Range, std::byte*) const override { FAIL(); }
  std::string description() const override { return "the shapes"; }
};

/// Of the tensors of an FfnSpec or a MoeSpec.
template <typename Spec>
ShapeSource source_of(const Spec& spec) {
  ShapeSource source;
  for (const StoredTensor& tensor : stored_tensors(spec)) source.shapes[tensor.name] = tensor.shape;
  return source;
}

}  // namespace gatefold::testing
