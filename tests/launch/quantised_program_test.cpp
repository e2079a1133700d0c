// Models whose files hold FP8 or MXFP4 beside the same models in bf16.
#include <fmt/format.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "layers/model_config.h"
#include "layers/model_files.h"
#include "runtime/block_codecs.h"
#include "runtime/dtype.h"
#include "tests/launch/program_testing.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using Json = nlohmann::json;

/// A tensor with its bytes.
struct Stored {
  SafetensorsWriter::Tensor tensor;
  std::vector<std::byte> bytes;
};

Stored in_bf16(const std::string& name, const std::vector<std::int64_t>& shape,
               const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * 2);
  convert(DType::kF32, reinterpret_cast<const std::byte*>(values.data()), DType::kBf16,
          bytes.data(), static_cast<std::int64_t>(values.size()));
  return {{name, "BF16", shape}, bytes};
}

/// One model written twice: its weights as they were quantised, and as what they stand for.
class Quantised : public Program {
 protected:
  void add_plain(const std::string& name, const std::vector<std::int64_t>& shape) {
    std::int64_t n = 1;
    for (const std::int64_t size : shape) n *= size;
    std::vector<float> values(static_cast<std::size_t>(n));
    for (float& value : values) value = std::ldexp(static_cast<float>(engine_() % 255) - 127, -8);
    for (auto* model : {&quantised_, &plain_}) model->push_back(in_bf16(name, shape, values));
  }

  /// Codes at random but for NaN, one scale for 128 x 128: powers of two, so that bf16 is exact.
  void add_f8(const std::string& name, std::int64_t rows, std::int64_t columns) {
    Stored codes{{name, "F8_E4M3", {rows, columns}}, {}};
    const std::int64_t across = (columns + 127) / 128;
    std::vector<float> scales;
    for (std::int64_t i = 0; i < (rows + 127) / 128 * across; ++i) {
      scales.push_back(std::ldexp(1.0F, -9 - static_cast<int>(engine_() % 4)));
    }
    std::vector<float> values;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) {
        const auto code = static_cast<std::uint8_t>(engine_() % 127 + (engine_() % 2) * 128);
        codes.bytes.push_back(static_cast<std::byte>(code));
        values.push_back(f8_e4m3_to_float(code) *
                         scales[static_cast<std::size_t>(r / 128 * across + c / 128)]);
      }
    }
    plain_.push_back(in_bf16(name, {rows, columns}, values));
    quantised_.push_back(std::move(codes));
    const auto bytes = std::as_bytes(std::span(scales));
    quantised_.push_back(
        {{name + "_scale_inv", "F32", {(rows + 127) / 128, across}}, {bytes.begin(), bytes.end()}});
  }

  /// Experts [rows, columns] in MXFP4, and turned [columns, rows] as bf16.
  void add_mxfp4(const std::string& name, std::int64_t experts, std::int64_t rows,
                 std::int64_t columns) {
    Stored codes{{name + "_blocks", "U8", {experts, rows, columns / 32, 16}}, {}};
    Stored scales{{name + "_scales", "U8", {experts, rows, columns / 32}}, {}};
    std::vector<float> values(static_cast<std::size_t>(experts * rows * columns));
    for (std::int64_t i = 0; i < experts * rows * columns; i += 2) {
      if (i % 32 == 0) scales.bytes.push_back(static_cast<std::byte>(122 + engine_() % 4));
      const float scale = f8_e8m0_to_float(static_cast<std::uint8_t>(scales.bytes.back()));
      const auto byte = static_cast<unsigned>(engine_() % 256);
      codes.bytes.push_back(static_cast<std::byte>(byte));
      for (std::int64_t half = 0; half < 2; ++half) {
        const std::int64_t at = i + half;
        const std::int64_t row = at / columns % rows;
        const std::int64_t turned = (at / columns / rows * columns + at % columns) * rows + row;
        values[static_cast<std::size_t>(turned)] =
            f4_e2m1_to_float(half == 0 ? byte & 15U : byte >> 4) * scale;
      }
    }
    plain_.push_back(in_bf16(name, {experts, columns, rows}, values));
    quantised_.push_back(std::move(codes));
    quantised_.push_back(std::move(scales));
  }

  void write(const std::string& folder, const Json& config, const std::vector<Stored>& model) {
    fs::create_directories(path(folder));
    std::ofstream(path(folder + "/config.json")) << config;
    std::vector<SafetensorsWriter::Tensor> header;
    for (const Stored& one : model) header.push_back(one.tensor);
    SafetensorsWriter writer(path(folder + "/model.safetensors"), header);
    for (const Stored& one : model) writer.append(one.bytes);
    writer.finish();
  }
  void write_both(Json config, const Json& quantization) {
    write("plain", config, plain_);
    config["quantization_config"] = quantization;
    write("quantised", config, quantised_);
  }

  /// A dense layer of odd width and a mixture, whose cuts lie off the scales' grid.
  void write_f8_model(const Json& quantization = {{"quant_method", "fp8"},
                                                  {"weight_block_size", {128, 128}}}) {
    const std::int64_t hidden = 200, wide = 301, inner = 144;
    const auto add_mlp = [&](const std::string& mlp, std::int64_t width) {
      add_f8(mlp + "gate_proj.weight", width, hidden);
      add_f8(mlp + "up_proj.weight", width, hidden);
      add_f8(mlp + "down_proj.weight", hidden, width);
    };
    add_mlp("model.layers.0.mlp.", wide);
    add_plain("model.layers.1.mlp.gate.weight", {4, hidden});
    for (int e = 0; e < 4; ++e) add_mlp(fmt::format("model.layers.1.mlp.experts.{}.", e), inner);
    write_both({{"model_type", "qwen3_moe"},
                {"hidden_size", hidden},
                {"intermediate_size", wide},
                {"moe_intermediate_size", inner},
                {"num_experts", 4},
                {"num_experts_per_tok", 2},
                {"norm_topk_prob", true},
                {"mlp_only_layers", {0}},
                {"num_hidden_layers", 2},
                {"hidden_act", "silu"},
                {"dtype", "bfloat16"}},
               quantization);
  }
  void write_mxfp4_model() {
    const std::int64_t hidden = 96, inner = 160;
    const std::string mlp = "model.layers.0.mlp.";
    add_plain(mlp + "router.weight", {4, hidden});
    add_plain(mlp + "router.bias", {4});
    add_mxfp4(mlp + "experts.gate_up_proj", 4, 2 * inner, hidden);
    add_plain(mlp + "experts.gate_up_proj_bias", {4, 2 * inner});
    add_mxfp4(mlp + "experts.down_proj", 4, hidden, inner);
    add_plain(mlp + "experts.down_proj_bias", {4, hidden});
    write_both({{"model_type", "gpt_oss"},
                {"hidden_size", hidden},
                {"intermediate_size", inner},
                {"num_local_experts", 4},
                {"num_experts_per_tok", 2},
                {"num_hidden_layers", 1},
                {"swiglu_limit", 7.0},
                {"torch_dtype", "bfloat16"}},
               {{"quant_method", "mxfp4"}});
  }

  std::vector<std::string> fingerprints(int ranks, const std::string& model,
                                        const std::string& grid) const {
    const Outcome outcome =
        on_ranks(ranks, "verify --quiet --tokens 37 --expert-blocks 4 " + grid + " --json " +
                            path("report.json") + " --model " + path(model));
    EXPECT_EQ(outcome.code, 0) << outcome.error << outcome.out;
    std::vector<std::string> found;
    if (outcome.code != 0) return found;
    const Json report = Json::parse(content_of(path("report.json")));
    for (const auto& row : report["rows"]) found.push_back(row["fingerprint"]);
    return found;
  }

  /// The same y, on each of these grids, as the plain model's; and the same weights, byte for byte.
  void expect_as_plain(const std::vector<std::pair<int, std::string>>& grids) const {
    const std::vector<std::string> plain = fingerprints(1, "plain", "");
    EXPECT_FALSE(plain.empty());
    for (const auto& [ranks, grid] : grids) {
      EXPECT_EQ(fingerprints(ranks, "quantised", grid), plain) << ranks << grid;
    }
    const ModelConfig config = read_model_config(path("quantised/config.json"));
    const ModelFiles quantised = open_model_files(path("quantised"), config);
    const ModelFiles whole = open_model_files(path("plain"), config);
    for (const Stored& one : plain_) {
      EXPECT_EQ(quantised.source->find(one.tensor.name)->shape, one.tensor.shape);
      const Extent extent = extent_of(one.tensor.shape);
      std::vector<std::byte> bytes(one.bytes.size());
      read_as(*quantised.source, one.tensor.name, {0, extent.rows}, {0, extent.columns},
              DType::kBf16, bytes.data());
      EXPECT_TRUE(bytes == one.bytes) << one.tensor.name;
    }
  }

  std::mt19937 engine_{5};
  std::vector<Stored> quantised_;
  std::vector<Stored> plain_;
};

TEST_F(Quantised, AnFp8ModelGivesTheBitsOfTheSameWeightsInBf16OnEveryGrid) {
  write_f8_model();
  expect_as_plain({{1, ""}, {2, "--tp 2 --ep 1"}, {3, "--tp 3 --ep 3"}, {4, "--tp 1 --ep 2"}});
  const Outcome inspected = on_ranks(2, "inspect --model " + path("quantised"));
  EXPECT_EQ(inspected.code, 0) << inspected.error;
  EXPECT_THAT(inspected.out, HasSubstr("15 weights as F8_E4M3 in blocks of 128 x 128"));
}

TEST_F(Quantised, AnMxfp4ModelGivesTheBitsOfTheSameWeightsInBf16OnEveryGrid) {
  write_mxfp4_model();
  expect_as_plain({{1, ""}, {2, "--tp 2 --ep 1"}, {3, "--ep 3"}, {4, "--tp 4 --ep 2"}});
  EXPECT_THAT(alone("inspect --model " + path("quantised")).out, HasSubstr("2 weights as MXFP4"));
}

TEST_F(Quantised, ConvertedWithATypeTheWeightsArePlainAndWithoutOneTheyAreAsTheyWere) {
  const auto converted = [&](int ranks, const std::string& from, const std::string& more = "") {
    fs::remove_all(path("made"));
    const Outcome made = on_ranks(
        ranks, "convert --quiet --model " + path(from) + " --output " + path("made") + " " + more);
    EXPECT_EQ(made.code, 0) << made.error;
    return content_of(path("made/model.safetensors"));
  };
  write_f8_model();
  EXPECT_TRUE(converted(3, "quantised", "--dtype bf16") == converted(1, "plain"));
  const std::string stacked = "--dtype bf16 --layout stacked";
  EXPECT_TRUE(converted(2, "plain", stacked) == converted(3, "quantised", stacked));
  const Json config = Json::parse(content_of(path("made/config.json")));
  EXPECT_FALSE(config.contains("quantization_config"));
  EXPECT_EQ(config["dtype"], "bfloat16");
  const SafetensorsFile as_it_was(path("quantised/model.safetensors"));
  converted(2, "quantised");
  EXPECT_TRUE(Json::parse(content_of(path("made/config.json"))).contains("quantization_config"));
  const SafetensorsFile made(path("made/model.safetensors"));
  for (const auto& [name, entry] : as_it_was.header().tensors) {
    EXPECT_EQ(made.header().tensors.at(name).dtype, entry.dtype);
    std::vector<std::byte> bytes(entry.end - entry.begin), others(bytes.size());
    as_it_was.read(name, 0, bytes);
    made.read(name, 0, others);
    EXPECT_TRUE(bytes == others) << name;
  }
  expect_one_complaint(on_ranks(2, "convert --layout stacked --model " + path("quantised") +
                                       " --output " + path("no")),
                       64, "add --dtype bf16");
  EXPECT_FALSE(fs::exists(path("no")));
}

TEST_F(Quantised, ConvertedMxfp4IsTheSameModelInBf16) {
  write_mxfp4_model();
  for (const char* name : {"quantised", "plain"}) {
    const Outcome made = on_ranks(2, fmt::format("convert --model {} --output {} --dtype bf16",
                                                 path(name), path(name) + "_made"));
    EXPECT_EQ(made.code, 0) << made.error;
  }
  EXPECT_TRUE(content_of(path("quantised_made/model.safetensors")) ==
              content_of(path("plain_made/model.safetensors")));
}

/// What make-model makes of a config from configs/, made small by `sizes`.
class MadeQuantised : public Quantised {
 protected:
  Outcome make(const std::string& config, const std::string& sizes, const std::string& dtype,
               const std::string& output = "made") const {
    std::string text = fmt::format("make-model --config {}/configs/{}.json --output {} --dtype {}",
                                   kSource, config, path(output), dtype);
    std::istringstream words(sizes);
    for (std::string word; words >> word;) text += " --set " + word;
    return alone(text + " --layers 0-1 --shards 3");
  }
  SafetensorsEntry entry(const std::string& name) const {
    const Json index = Json::parse(content_of(path("made/model.safetensors.index.json")));
    const SafetensorsFile file(path("made/" + index["weight_map"][name].get<std::string>()));
    return file.header().tensors.at(name);
  }
  void expect_stored(const std::string& name, const std::string& dtype,
                     const std::vector<std::int64_t>& shape) const {
    EXPECT_EQ(entry(name).dtype, dtype) << name;
    EXPECT_EQ(entry(name).shape, shape) << name;
  }
  Json quantization() const {
    return Json::parse(content_of(path("made/config.json")))["quantization_config"];
  }
  /// Every product is exact in bf16, so that what is converted to that is the same model, of
  /// another y than what it was quantised from.
  void expect_verified() const {
    const std::vector<std::string> alone_found = fingerprints(1, "made", "--layers 0-1");
    EXPECT_EQ(alone_found.size(), 2U);
    for (const int ranks : {2, 3}) {
      EXPECT_EQ(fingerprints(ranks, "made", "--layers 0-1"), alone_found);
    }
    const Outcome converted = on_ranks(2, fmt::format("convert --dtype bf16 --model {} --output {}",
                                                      path("made"), path("in_bf16")));
    EXPECT_EQ(converted.code, 0) << converted.error;
    EXPECT_EQ(fingerprints(1, "in_bf16", "--layers 0-1"), alone_found);
    EXPECT_NE(fingerprints(1, "unrounded", "--layers 0-1"), alone_found);
  }
};

TEST_F(MadeQuantised, AnFp8ModelLiesAsPublishedOnesDoAndVerifiesOnAllRanks) {
  const std::string sizes =
      "hidden_size=200 num_hidden_layers=2 n_routed_experts=8 n_group=2 topk_group=1 "
      "num_experts_per_tok=3 moe_intermediate_size=144 intermediate_size=301 "
      "first_k_dense_replace=1";
  for (const auto& [dtype, output] : {std::pair("f8_e4m3", "made"), {"bf16", "unrounded"}}) {
    const Outcome made = make("deepseek-v3", sizes, dtype, output);
    ASSERT_EQ(made.code, 0) << made.error;
  }
  const std::string moe = "model.layers.1.mlp.";
  expect_stored(moe + "experts.7.down_proj.weight", "F8_E4M3", {200, 144});
  expect_stored(moe + "experts.7.down_proj.weight_scale_inv", "F32", {2, 2});
  expect_stored(moe + "shared_experts.up_proj.weight", "F8_E4M3", {144, 200});
  expect_stored("model.layers.0.mlp.gate_proj.weight_scale_inv", "F32", {3, 2});
  expect_stored(moe + "gate.weight", "BF16", {8, 200});
  expect_stored(moe + "gate.e_score_correction_bias", "F32", {8});
  EXPECT_EQ(quantization(), Json::parse(R"({"activation_scheme": "dynamic", "fmt": "e4m3",
                                            "quant_method": "fp8",
                                            "weight_block_size": [128, 128]})"));
  EXPECT_THAT(alone("inspect --layers 0-1 --model " + path("made")).out,
              HasSubstr("30 weights as F8_E4M3 in blocks of 128 x 128"));
  expect_verified();
}

TEST_F(MadeQuantised, AnMxfp4ModelLiesAsPublishedOnesDoAndVerifiesOnAllRanks) {
  const std::string sizes =
      "hidden_size=96 intermediate_size=160 num_local_experts=6 num_hidden_layers=2";
  for (const auto& [dtype, output] : {std::pair("mxfp4", "made"), {"bf16", "unrounded"}}) {
    const Outcome made = make("gpt-oss-20b", sizes, dtype, output);
    ASSERT_EQ(made.code, 0) << made.error;
  }
  const std::string mlp = "model.layers.1.mlp.";
  expect_stored(mlp + "experts.gate_up_proj_blocks", "U8", {6, 320, 3, 16});
  expect_stored(mlp + "experts.gate_up_proj_scales", "U8", {6, 320, 3});
  expect_stored(mlp + "experts.down_proj_blocks", "U8", {6, 96, 5, 16});
  expect_stored(mlp + "experts.gate_up_proj_bias", "BF16", {6, 320});
  expect_stored(mlp + "router.weight", "BF16", {6, 96});
  EXPECT_EQ(quantization(), Json::parse(R"({"quant_method": "mxfp4"})"));
  EXPECT_THAT(alone("inspect --layers 0-1 --model " + path("made")).out,
              HasSubstr("4 weights as MXFP4"));
  expect_verified();
}

TEST_F(MadeQuantised, GatesOfSharedExpertsStayPlainAndBlocksHaveTheSizeThatTheConfigSays) {
  const Outcome made = alone(
      "make-model --config " + kSource + "/configs/qwen1.5-moe-a2.7b.json --layers 0 --set " +
      "hidden_size=96 --set num_experts=4 --set moe_intermediate_size=40 --set " +
      "shared_expert_intermediate_size=72 --dtype f8_e4m3 --set " +
      R"('quantization_config={"quant_method":"fp8","weight_block_size":[64,32]}' --output )" +
      path("made"));
  ASSERT_EQ(made.code, 0) << made.error;
  const SafetensorsFile file(path("made/model.safetensors"));
  const std::string mlp = "model.layers.0.mlp.";
  const auto& tensors = file.header().tensors;
  EXPECT_EQ(tensors.at(mlp + "shared_expert_gate.weight").dtype, "BF16");
  EXPECT_EQ(tensors.at(mlp + "shared_expert.up_proj.weight").dtype, "F8_E4M3");
  EXPECT_EQ(tensors.at(mlp + "shared_expert.up_proj.weight_scale_inv").shape,
            (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(fingerprints(2, "made", "--layers 0").size(), 1U);
}

// The figures are the machine's: here only that they are said, of what was made and of nothing
// else.
TEST_F(Quantised, MeasuredConversionsSayHowFastQuantisedWeightsAreReadBesidePlainOnes) {
  const auto measured = [this](int ranks, const std::string& model, const std::string& more) {
    fs::remove_all(path("made"));
    const Outcome made = on_ranks(ranks, fmt::format("convert --measure --model {} --output {} {}",
                                                     path(model), path("made"), more));
    EXPECT_EQ(made.code, 0) << made.error;
    EXPECT_THAT(made.out, HasSubstr("times as fast as a plain copy"));
    return made.out;
  };
  const auto said = ::testing::ContainsRegex(
      "reading the quantised weights is [0-9.]+ times as fast as reading what they are now: "
      "[0-9.]+ "
      ".?B/s of bf16 against [0-9.]+ .?B/s; by bytes of files [0-9.]+ times: [0-9.]+ .?B/s");
  write_mxfp4_model();
  EXPECT_THAT(measured(3, "quantised", "--dtype bf16"), said);
  EXPECT_THAT(measured(1, "plain", "--dtype bf16"), ::testing::Not(said));
  EXPECT_THAT(measured(1, "quantised", ""), ::testing::Not(said));
  quantised_.clear();
  plain_.clear();
  write_f8_model();
  EXPECT_THAT(measured(2, "quantised", "--dtype bf16"), said);
  // The dense layer lies as it did, the mixture doesn't.
  EXPECT_THAT(measured(2, "quantised", "--dtype bf16 --layout stacked"), said);
}

TEST_F(MadeQuantised, ATypeThatTheModelOrTheCommandDoesntHaveIsRefused) {
  expect_one_complaint(make("deepseek-v3", "", "mxfp4"), 64,
                       "--dtype mxfp4 of a deepseek_v3 model (only gpt_oss has such weights");
  expect_one_complaint(make("gpt-oss-20b", "hidden_size=48", "mxfp4"), 64,
                       "(32 inputs share a scale, and 48 are no multiple)");
  expect_one_complaint(make("gpt-oss-20b", "", "mxfp4 --layout per-expert"), 64,
                       "--dtype mxfp4 with --layout per-expert (only stacks have such weights)");
  EXPECT_FALSE(fs::exists(path("made")));
}

TEST_F(Quantised, FilesThatDontFitEachOtherOrTheConfigEndAllRanksWithOneMessage) {
  write_f8_model({{"quant_method", "fp8"}, {"weight_block_size", {64, 128}}});
  const std::string verify = "verify --model " + path("quantised");
  expect_one_complaint(on_ranks(3, verify), 65, "in blocks of 64 x 128: [5,2])");

  write_both(Json::parse(content_of(path("plain/config.json"))), {{"quant_method", "mxfp4"}});
  expect_one_complaint(on_ranks(2, verify), 65,
                       "has quant_method \"mxfp4\", and there are weights in fp8");

  std::erase_if(quantised_, [](const Stored& one) {
    return one.tensor.name == "model.layers.1.mlp.experts.3.down_proj.weight_scale_inv";
  });
  write_both(Json::parse(content_of(path("plain/config.json"))), {{"quant_method", "fp8"}});
  expect_one_complaint(on_ranks(3, verify + " --layers 1"), 65,
                       "no tensor 'model.layers.1.mlp.experts.3.down_proj.weight_scale_inv'");
  EXPECT_EQ(alone(verify + " --layers 0").code, 0) << "nothing of it is read";
}

TEST_F(Quantised, Mxfp4OfAFamilyThatDoesntHaveItIsRefused) {
  add_mxfp4("model.layers.0.mlp.experts.gate_up_proj", 2, 32, 32);
  write_both(Json::parse(content_of(kSource + "/configs/qwen3-30b-a3b.json")),
             {{"quant_method", "mxfp4"}});
  expect_one_complaint(on_ranks(2, "verify --model " + path("quantised")), 65,
                       "a qwen3_moe model with weights in MXFP4 (only gpt_oss has them");
}

}  // namespace
}  // namespace gatefold
