#include "runtime/checkpoint.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "tests/build_paths.h"
#include "tests/runtime/file_testing.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr const char* kIndex = "model.safetensors.index.json";

class CheckpointDirectory : public testing::Test, protected TestFolder {
 protected:
  CheckpointDirectory() : TestFolder("checkpoint") {}

  std::string directory() const { return fs::path(path("x")).parent_path().string(); }

  /// A file of one-byte tensors (dtype U8, shape [1]) with these names.
  void put_shard(const std::string& file, const std::vector<std::string>& names) const {
    std::vector<std::string> entries;
    for (std::size_t i = 0; i < names.size(); ++i) {
      entries.push_back(tensor_entry("U8", "[1]", fmt::format("[{},{}]", i, i + 1), names[i]));
    }
    put(safetensors_text(header_json(entries), std::string(names.size(), 'x')), file);
  }

  /// Two shards with an index: a and b in the first, c in the second.
  void put_two_shards() const {
    put_shard("model-00001-of-00002.safetensors", {"a", "b"});
    put_shard("model-00002-of-00002.safetensors", {"c"});
    put(R"({"metadata":{"total_size":3},"weight_map":{"a":"model-00001-of-00002.safetensors",)"
        R"("b":"model-00001-of-00002.safetensors","c":"model-00002-of-00002.safetensors"}})",
        kIndex);
  }

  std::string refused(ExitCode code) const {
    return error_of(code, [&] { Checkpoint{directory()}; });
  }
};

/// A [4, 5] matrix with element (r, c) = 10 r + c, a vector and a scalar.
std::string matrix_file(const char* name = "m", const char* shape = "[4,5]") {
  std::string data;
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 5; ++j) {
      const std::uint16_t bits = float_to_bf16(static_cast<float>(10 * i + j));
      data.append(reinterpret_cast<const char*>(&bits), sizeof bits);
    }
  }
  for (const float value : {1.5F, 2.5F, 3.5F, 42.0F}) {
    data.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  const std::string json = header_json(
      {tensor_entry("BF16", shape, "[0,40]", name), tensor_entry("F32", "[3]", "[40,52]", "v"),
       tensor_entry("F32", "[]", "[52,56]", "s"), tensor_entry("F16", "[1,2,1]", "[56,60]", "cube"),
       tensor_entry("F8_E4M3", "[2,2]", "[60,64]", "f8"),
       tensor_entry("I64", "[1]", "[64,72]", "ids"),
       tensor_entry("F16", "[0,7]", "[72,72]", "none")});
  return safetensors_text(json, data + std::string(16, '\0'));
}

std::vector<float> read_bf16(const Checkpoint& checkpoint, Range rows, Range cols) {
  std::vector<std::uint16_t> bits(static_cast<std::size_t>(rows.size() * cols.size()));
  checkpoint.read("m", rows, cols, reinterpret_cast<std::byte*>(bits.data()));
  std::vector<float> values;
  for (const std::uint16_t element : bits) values.push_back(bf16_to_float(element));
  return values;
}

TEST_F(CheckpointDirectory, EveryRectangleOfAMatrixIsReadExactly) {
  put(matrix_file());
  const Checkpoint checkpoint(directory());
  for (std::int64_t r0 = 0; r0 <= 4; ++r0) {
    for (std::int64_t r1 = r0; r1 <= 4; ++r1) {
      for (std::int64_t c0 = 0; c0 <= 5; ++c0) {
        for (std::int64_t c1 = c0; c1 <= 5; ++c1) {
          std::vector<float> expected;
          for (std::int64_t r = r0; r < r1; ++r) {
            for (std::int64_t c = c0; c < c1; ++c)
              expected.push_back(static_cast<float>(10 * r + c));
          }
          ASSERT_EQ(read_bf16(checkpoint, {r0, r1}, {c0, c1}), expected);
        }
      }
    }
  }
}

TEST_F(CheckpointDirectory, VectorsAndScalarsReadAsOneRow) {
  put(matrix_file());
  const Checkpoint checkpoint(directory());
  float values[2] = {};
  checkpoint.read("v", {0, 1}, {1, 3}, reinterpret_cast<std::byte*>(values));
  EXPECT_EQ(values[0], 2.5F);
  EXPECT_EQ(values[1], 3.5F);
  checkpoint.read("s", {0, 1}, {0, 1}, reinterpret_cast<std::byte*>(values));
  EXPECT_EQ(values[0], 42.0F);
  checkpoint.read("none", {0, 0}, {0, 7}, nullptr);
}

TEST_F(CheckpointDirectory, AStackOfMatricesReadsAsTheirRowsBehindOneAnother) {
  put(matrix_file("m", "[2,2,5]"));
  const Checkpoint checkpoint(directory());
  EXPECT_EQ(read_bf16(checkpoint, {1, 3}, {3, 5}), (std::vector<float>{13, 14, 23, 24}));
  EXPECT_THAT(error_of(ExitCode::kData,
                       [&] {
                         read_bf16(checkpoint, {0, 5}, {0, 5});
                       }),
              HasSubstr("(it is [4, 5])"));
}

TEST_F(CheckpointDirectory, JustTheWantedBytesAreRead) {
  put(matrix_file());
  const Checkpoint checkpoint(directory());
  const auto start = static_cast<off_t>(SafetensorsFile(path()).header().data_start);
  const auto reads = [&](Range rows, Range cols) {
    io_faults().reads.clear();
    read_bf16(checkpoint, rows, cols);
    auto seen = io_faults().reads;
    for (auto& [offset, size] : seen) offset -= start;
    return seen;
  };
  using Reads = std::vector<std::pair<off_t, std::size_t>>;
  EXPECT_EQ(reads({1, 4}, {0, 5}), (Reads{{10, 30}}));
  EXPECT_EQ(reads({1, 4}, {2, 4}), (Reads{{14, 4}, {24, 4}, {34, 4}}));
  EXPECT_EQ(reads({2, 3}, {1, 2}), (Reads{{22, 2}}));
  EXPECT_EQ(reads({2, 2}, {0, 5}), Reads{});
  EXPECT_EQ(reads({0, 4}, {3, 3}), Reads{});
}

TEST_F(CheckpointDirectory, OpeningReadsHeadersOnly) {
  put(matrix_file());
  io_faults().reads.clear();
  const Checkpoint checkpoint(directory());
  std::size_t bytes = 0;
  for (const auto& [offset, size] : io_faults().reads) bytes += size;
  EXPECT_EQ(bytes, SafetensorsFile(path()).header().data_start);
}

TEST_F(CheckpointDirectory, RectanglesOutsideATensorAreRefused) {
  put(matrix_file());
  const Checkpoint checkpoint(directory());
  const auto message = [&](const std::string& name, Range rows, Range cols) {
    return error_of(ExitCode::kData, [&] { checkpoint.read(name, rows, cols, nullptr); });
  };
  const std::vector<std::pair<Range, Range>> outside = {
      {{0, 5}, {0, 5}},         {{0, 4}, {0, 6}},
      {{-1, 1}, {0, 5}},        {{0, 4}, {-1, 2}},
      {{3, 2}, {0, 5}},         {{0, 4}, {4, 3}},
      {{5, 5}, {0, 5}},         {{0, 4}, {6, 6}},
      {{0, 1}, {0, INT64_MAX}}, {{INT64_MIN, INT64_MAX}, {0, 1}}};
  for (const auto& [rows, cols] : outside) {
    EXPECT_THAT(message("m", rows, cols), HasSubstr("of tensor 'm' (it is [4, 5])"));
  }
  EXPECT_THAT(message("v", {0, 3}, {0, 1}), HasSubstr("of tensor 'v' (it is [1, 3])"));
  EXPECT_THAT(message("cube", {0, 3}, {0, 1}), HasSubstr("of tensor 'cube' (it is [2, 1])"));
  EXPECT_THAT(message("f8", {0, 1}, {0, 1}), HasSubstr("tensor 'f8' is stored as F8_E4M3"));
  EXPECT_THAT(message("nope", {0, 1}, {0, 1}), HasSubstr("no tensor 'nope'"));
}

TEST_F(CheckpointDirectory, OnlyAskingForATypeThatNoLayerComputesInIsAnError) {
  put(matrix_file());
  const Checkpoint checkpoint(directory());
  EXPECT_EQ(checkpoint.find("m")->dtype, DType::kBf16);
  EXPECT_EQ(checkpoint.find("m")->shape, (std::vector<std::int64_t>{4, 5}));
  EXPECT_EQ(checkpoint.find("cube")->dtype, DType::kF16);
  EXPECT_EQ(checkpoint.find("nope"), std::nullopt);
  for (const char* name : {"f8", "ids"}) {
    EXPECT_THAT(error_of(ExitCode::kData, [&] { checkpoint.find(name); }),
                AllOf(HasSubstr(path()), HasSubstr(fmt::format("tensor '{}' is stored as", name))));
  }
}

TEST_F(CheckpointDirectory, AFileCutAfterOpeningIsRefused) {
  put(matrix_file());
  const Checkpoint checkpoint(directory());
  fs::resize_file(path(), SafetensorsFile(path()).header().data_start + 35);
  EXPECT_EQ(read_bf16(checkpoint, {0, 3}, {0, 5}).back(), 24.0F);
  EXPECT_THAT(error_of(ExitCode::kData,
                       [&] {
                         read_bf16(checkpoint, {0, 4}, {0, 5});
                       }),
              HasSubstr("it shrank after it was opened"));
}

TEST_F(CheckpointDirectory, AnErrorOfTheDiskIsNoInput) {
  put(matrix_file());
  const Checkpoint checkpoint(directory());
  io_faults().read_error = EIO;
  EXPECT_THAT(error_of(ExitCode::kNoInput,
                       [&] {
                         read_bf16(checkpoint, {0, 4}, {0, 5});
                       }),
              HasSubstr("Input/output error"));
}

TEST_F(CheckpointDirectory, ShardsAreFoundThroughTheIndex) {
  put_two_shards();
  const Checkpoint checkpoint(directory());
  EXPECT_THAT(checkpoint.description(), testing::EndsWith("(3 tensors in 2 files)"));
  EXPECT_EQ(checkpoint.find("d"), std::nullopt);
  EXPECT_THAT(error_of(ExitCode::kData, [&] { checkpoint.find("c"); }),
              HasSubstr("model-00002-of-00002.safetensors: tensor 'c' is stored as U8"));
}

TEST_F(CheckpointDirectory, TheIndexComesBeforeASingleFile) {
  put_two_shards();
  put_shard("model.safetensors", {"z"});
  EXPECT_EQ(Checkpoint(directory()).find("z"), std::nullopt);
  fs::remove(path(kIndex));
  EXPECT_THAT(Checkpoint(directory()).description(), HasSubstr("(1 tensor in 1 file)"));
}

TEST_F(CheckpointDirectory, FilesMayBeSymbolicLinks) {
  put_two_shards();
  fs::create_directory(path("blobs"));
  for (const char* name : {"model-00001-of-00002.safetensors", kIndex}) {
    fs::rename(path(name), path("blobs/" + std::string(name)));
    fs::create_symlink("blobs/" + std::string(name), path(name));
  }
  EXPECT_THAT(Checkpoint(directory()).description(), HasSubstr("3 tensors in 2 files"));
}

TEST_F(CheckpointDirectory, AnIndexNeedsNoMetadata) {
  for (const char* metadata :
       {"", R"("metadata":{},)", R"("metadata":{"total_size":1},)", R"("other":[{"a":null}],)",
        R"("metadata":{"total_size":1.0,"total_parameters":7,"format":"pt"},)"}) {
    SCOPED_TRACE(metadata);
    put_shard("s.safetensors", {"a"});
    put(fmt::format(R"({{{}"weight_map":{{"a":"s.safetensors"}}}})", metadata), kIndex);
    EXPECT_THAT(Checkpoint(directory()).description(), HasSubstr("(1 tensor in 1 file)"));
  }
}

TEST_F(CheckpointDirectory, AWrongTotalSizeIsShown) {
  put_shard("s.safetensors", {"a"});
  put(R"({"metadata":{"total_size":5},"weight_map":{"a":"s.safetensors"}})", kIndex);
  EXPECT_THAT(Checkpoint(directory()).description(), HasSubstr("1 bytes where its index says 5"));
}

struct IndexCase {
  std::string text;
  std::string message;
};

TEST_F(CheckpointDirectory, MalformedIndexesAreRefused) {
  using namespace std::string_literals;
  put_shard("s.safetensors", {"a"});
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += R"({"a":)";
  const std::vector<IndexCase> cases = {
      {"", "not JSON"},
      {"{", "not JSON"},
      {"nonsense", "not JSON"},
      {"\xff", "not JSON"},
      {R"({"weight_map":{"a":"s.safetensors"}}x)", "not JSON"},
      {"{\"weight_map\":{\"a\":\"s.safetensors\"}}\0x"s, "NUL"},
      {"{\"weight_map\":{\"\xff\":\"s.safetensors\"}}", "not JSON"},
      {std::string(100'000, '['), "nested deeper"},
      {objects, "nested deeper"},
      {R"({"metadata":)" + std::string(100'000, '['), "nested deeper"},
      {"[]", "no object 'weight_map'"},
      {"null", "no object 'weight_map'"},
      {"{}", "no object 'weight_map'"},
      {R"({"weight_map":[]})", "no object 'weight_map'"},
      {R"({"weight_map":"s.safetensors"})", "no object 'weight_map'"},
      {R"({"weight_map":{}})", "'weight_map' is empty"},
      {R"({"weight_map":{"a":1}})", "tensor 'a' is mapped to '1'"},
      {R"({"weight_map":{"a":null}})", "tensor 'a' is mapped to 'null'"},
      {R"({"weight_map":{"a":["s.safetensors"]}})", "tensor 'a' is mapped to"},
      {R"({"weight_map":{"a":"s.safetensors","a":"s.safetensors"}})", "'a' is there twice"},
      {R"({"weight_map":{"a":"s.safetensors"},"weight_map":{}})", "'weight_map' is there twice"},
      {R"({"metadata":{"k":1,"k":2},"weight_map":{"a":"s.safetensors"}})", "'k' is there twice"},
      {R"({"metadata":[],"weight_map":{"a":"s.safetensors"}})", "'metadata' is no object"},
  };
  for (const auto& [text, message] : cases) {
    SCOPED_TRACE(text.substr(0, 100));
    put(text, kIndex);
    EXPECT_THAT(refused(ExitCode::kData), AllOf(HasSubstr(kIndex), HasSubstr(message)));
  }
}

TEST_F(CheckpointDirectory, TheSameKeyInTwoObjectsIsNoRepetition) {
  put_shard("s.safetensors", {"a", "metadata"});
  put(R"({"metadata":{"a":{"x":1},"b":{"x":2}},)"
      R"("weight_map":{"a":"s.safetensors","metadata":"s.safetensors"}})",
      kIndex);
  EXPECT_THAT(Checkpoint(directory()).description(), HasSubstr("(2 tensors in 1 file)"));
}

TEST_F(CheckpointDirectory, PathsOutsideTheDirectoryAreRefused) {
  fs::create_directory(path("sub"));
  put_shard("s.safetensors", {"a"});
  put_shard("sub/s.safetensors", {"a"});
  for (const std::string& name :
       {std::string("../s.safetensors"), path("s.safetensors"), std::string("sub/s.safetensors"),
        std::string("./s.safetensors"), std::string(".."), std::string("."), std::string(),
        std::string("s.safetensors\\u0000"), std::string("..\\u002fs.safetensors"),
        std::string("/etc/passwd")}) {
    SCOPED_TRACE(name);
    put(fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", name), kIndex);
    EXPECT_THAT(refused(ExitCode::kData), HasSubstr("not a plain file name"));
  }
}

// What protects a model's files from outputs knows them by their names.
TEST_F(CheckpointDirectory, AnIndexNamesSafetensorsFilesOnly) {
  for (const char* name : {"weights.bin", "s.safetensors.old", "safetensors", "config.json"}) {
    SCOPED_TRACE(name);
    put_shard(name, {"a"});
    put(fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", name), kIndex);
    EXPECT_THAT(refused(ExitCode::kData), HasSubstr("not the name of a safetensors file"));
  }
}

TEST_F(CheckpointDirectory, EveryMissingShardIsNamed) {
  put_two_shards();
  fs::remove(path("model-00002-of-00002.safetensors"));
  EXPECT_THAT(refused(ExitCode::kNoInput),
              AllOf(HasSubstr("missing: model-00002-of-00002.safetensors (")));
  fs::remove(path("model-00001-of-00002.safetensors"));
  EXPECT_THAT(refused(ExitCode::kNoInput), AllOf(HasSubstr("model-00001-of-00002.safetensors, "
                                                           "model-00002-of-00002.safetensors (")));
  fs::create_symlink("nowhere", path("model-00001-of-00002.safetensors"));
  EXPECT_THAT(refused(ExitCode::kNoInput), HasSubstr("model-00001-of-00002.safetensors, "));
}

TEST_F(CheckpointDirectory, ATensorThatItsFileLacksIsToldApartFromOneThatNobodyListed) {
  put_two_shards();
  const std::string second = path("model-00002-of-00002.safetensors");
  put_shard("model-00002-of-00002.safetensors", {"d"});
  EXPECT_THAT(refused(ExitCode::kData),
              AllOf(HasSubstr("maps tensor 'c' to " + second),
                    HasSubstr("the file is there, but the tensor is not in it")));
  // Mapped to the wrong one of two files.
  put_shard("model-00001-of-00002.safetensors", {"a", "c"});
  put_shard("model-00002-of-00002.safetensors", {"b"});
  EXPECT_THAT(refused(ExitCode::kData), AllOf(HasSubstr("maps tensor 'b' to"),
                                              HasSubstr(path("model-00001-of-00002.safetensors")),
                                              HasSubstr("the tensor is in " + second)));
}

TEST_F(CheckpointDirectory, ATensorThatTheIndexForgotIsAnErrorOnceItIsAskedFor) {
  put_two_shards();
  put_shard("model-00002-of-00002.safetensors", {"c", "d"});
  const Checkpoint checkpoint(directory());
  EXPECT_EQ(checkpoint.find("e"), std::nullopt);
  for (const auto& ask :
       std::vector<std::function<void()>>{[&] { checkpoint.find("d"); },
                                          [&] {
                                            checkpoint.read("d", {0, 1}, {0, 1}, nullptr);
                                          }}) {
    EXPECT_THAT(error_of(ExitCode::kData, ask),
                AllOf(HasSubstr("does not list tensor 'd'"),
                      HasSubstr("model-00002-of-00002.safetensors")));
  }
}

TEST_F(CheckpointDirectory, ATensorInTwoFilesIsRefused) {
  put_two_shards();
  put_shard("model-00002-of-00002.safetensors", {"c", "a"});
  EXPECT_THAT(refused(ExitCode::kData),
              AllOf(HasSubstr("tensor 'a' is in"), HasSubstr("model-00001-of-00002"),
                    HasSubstr("model-00002-of-00002")));
}

TEST_F(CheckpointDirectory, ShardsOfTwoSetsAreRefused) {
  put_shard("model-00001-of-00002.safetensors", {"a"});
  put_shard("model-00003-of-00003.safetensors", {"b"});
  put_shard("mtp-00001-of-00001.safetensors", {"c"});
  put_shard("extra-of-x.safetensors", {"d"});
  put(R"({"weight_map":{"a":"model-00001-of-00002.safetensors",)"
      R"("b":"model-00003-of-00003.safetensors"}})",
      kIndex);
  EXPECT_THAT(refused(ExitCode::kData), HasSubstr("two different sets"));
  put(R"({"weight_map":{"a":"model-00001-of-00002.safetensors",)"
      R"("c":"mtp-00001-of-00001.safetensors","d":"extra-of-x.safetensors"}})",
      kIndex);
  EXPECT_THAT(Checkpoint(directory()).description(), HasSubstr("3 files"));
}

TEST_F(CheckpointDirectory, AMalformedShardIsRefusedByName) {
  put_two_shards();
  const std::string shard = path("model-00002-of-00002.safetensors");
  fs::resize_file(shard, fs::file_size(shard) - 1);
  EXPECT_THAT(refused(ExitCode::kData), AllOf(HasSubstr(shard), HasSubstr("expected")));
  fs::resize_file(shard, 0);
  EXPECT_THAT(refused(ExitCode::kData), HasSubstr(shard));
  fs::remove(shard);
  fs::create_directory(shard);
  EXPECT_THAT(refused(ExitCode::kNoInput), HasSubstr(shard));
}

TEST_F(CheckpointDirectory, AnIndexThatCannotBeReadIsNoInput) {
  put_two_shards();
  fs::remove(path(kIndex));
  put_shard("model.safetensors", {"z"});
  const auto unreadable = [&] {
    EXPECT_THAT(refused(ExitCode::kNoInput), HasSubstr(path(kIndex)));
    fs::remove(path(kIndex));
  };
  fs::create_symlink("nowhere", path(kIndex));
  unreadable();
  fs::create_directory(path(kIndex));
  unreadable();
  ASSERT_EQ(::mkfifo(path(kIndex).c_str(), 0600), 0);
  unreadable();
  put("{", kIndex);
  fs::resize_file(path(kIndex), 100'000'001);  // sparse
  EXPECT_THAT(refused(ExitCode::kData), HasSubstr("an index has at most 100000000"));
}

TEST_F(CheckpointDirectory, DirectoriesWithoutAModelAreNoInput) {
  EXPECT_THAT(refused(ExitCode::kNoInput), HasSubstr("no *.safetensors file"));
  put("x", "pytorch_model.bin");
  put("x", "._model.safetensors");
  EXPECT_THAT(refused(ExitCode::kNoInput), HasSubstr("no *.safetensors file"));
  for (const std::string& name : {path("missing"), path("pytorch_model.bin"), std::string(),
                                  path("pytorch_model.bin/x"), std::string("/dev/null")}) {
    SCOPED_TRACE(name);
    EXPECT_THAT(error_of(ExitCode::kNoInput, [&] { Checkpoint{name}; }),
                HasSubstr((name.empty() ? "''" : name) + ": cannot be opened ("));
  }
}

TEST_F(CheckpointDirectory, SeveralFilesNeedAnIndexOrTheUsualName) {
  put_shard("one.safetensors", {"a"});
  EXPECT_THAT(Checkpoint(directory()).description(), HasSubstr("(1 tensor in 1 file)"));
  put_shard("two.safetensors", {"b"});
  EXPECT_THAT(refused(ExitCode::kData),
              AllOf(HasSubstr("2 *.safetensors files"), HasSubstr("add the index")));
  put_shard("model.safetensors", {"c", "d"});
  EXPECT_THAT(Checkpoint(directory()).description(), HasSubstr("(2 tensors in 1 file)"));
}

TEST_F(CheckpointDirectory, TheHashTellsHeadersApartNotWeights) {
  put_two_shards();
  const std::uint64_t hash = Checkpoint(directory()).header_hash();
  EXPECT_EQ(Checkpoint(directory()).header_hash(), hash);
  put(safetensors_text(header_json({tensor_entry("U8", "[1]", "[0,1]", "c")}), "y"),
      "model-00002-of-00002.safetensors");
  EXPECT_EQ(Checkpoint(directory()).header_hash(), hash);
  put(safetensors_text(header_json({tensor_entry("I8", "[1]", "[0,1]", "c")}), "y"),
      "model-00002-of-00002.safetensors");
  EXPECT_NE(Checkpoint(directory()).header_hash(), hash);
}

TEST(CheckpointFixture, APublishedModelOpens) {
  const Checkpoint checkpoint(kSourceFolder + std::string("/tests/fixtures/smollm2-135m-instruct"));
  EXPECT_GT(checkpoint.find("model.layers.0.mlp.gate_proj.weight")->shape.at(0), 0);
}

}  // namespace
}  // namespace gatefold
