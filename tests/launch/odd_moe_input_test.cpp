// What the program makes of mixtures of experts that are wrong or unusual.
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <map>

#include "tests/launch/program_testing.h"

namespace gatefold {
namespace {

using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kHidden = 16;
constexpr std::int64_t kInner = 8;
constexpr std::int64_t kExperts = 4;
const std::string kMlp = "model.layers.0.mlp.";

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// Two experts of four behind a corrected router, and a shared one.
class OddMoe : public Program {
 protected:
  struct Stored {
    std::vector<std::int64_t> shape;
    std::vector<float> values;
  };

  void SetUp() override {
    Program::SetUp();
    add(kMlp + "gate.weight", {kExperts, kHidden}, 1.0F);
    add(kMlp + "gate.e_score_correction_bias", {kExperts}, 0.1F);
    for (std::int64_t e = 0; e < kExperts; ++e) add_ffn(fmt::format("experts.{}", e));
    add_ffn("shared_experts");
    std::ofstream(path("config.json"))
        << R"({"model_type": "deepseek_v3", "hidden_size": 16, "intermediate_size": 8,
               "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
               "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0,
               "num_hidden_layers": 1, "hidden_act": "silu", "torch_dtype": "float32"})";
    std::filesystem::create_directories(path("model"));
    std::filesystem::copy(path("config.json"), path("model/config.json"));
  }

  void write_model() const {
    std::vector<SafetensorsWriter::Tensor> tensors;
    std::vector<std::vector<float>> values;
    for (const auto& [name, stored] : stored_) {
      tensors.push_back({name, "F32", stored.shape});
      values.push_back(stored.values);
    }
    write_tensors(path("model/model.safetensors"), tensors, values);
  }

  std::vector<float> tokens(std::int64_t count) const { return noise(count * kHidden, 99, 1.5F); }

  /// x of so many tokens, and a routing of them.
  void write_routed(std::int64_t count, const std::vector<std::int64_t>& shape,
                    const std::vector<std::int32_t>& ids) const {
    const std::vector<float> x = tokens(count);
    const std::vector<float> weights(ids.size(), 0.5F);
    SafetensorsWriter writer(path("x.safetensors"), {{"x", "F32", {count, kHidden}},
                                                     {"topk_ids", "I32", shape},
                                                     {"topk_weights", "F32", shape}});
    writer.append(std::as_bytes(std::span(x)));
    writer.append(std::as_bytes(std::span(ids)));
    writer.append(std::as_bytes(std::span(weights)));
    writer.finish();
  }

  std::string config() const { return " --config " + path("config.json"); }
  std::string model() const { return " --model " + path("model"); }
  std::string input() const { return " --input " + path("x.safetensors"); }

  std::map<std::string, Stored> stored_;

 private:
  static std::vector<float> noise(std::int64_t count, std::uint64_t seed, float scale) {
    std::vector<float> values(as_size(count));
    for (float& value : values) {
      seed = seed * 6364136223846793005U + 1442695040888963407U;
      value = scale * (static_cast<float>(seed >> 40) / 8388608.0F - 1.0F);
    }
    return values;
  }
  void add(const std::string& name, const std::vector<std::int64_t>& shape, float scale) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    stored_[name] = {shape, noise(count, stored_.size() + 1, scale)};
  }
  void add_ffn(const std::string& module) {
    add(kMlp + module + ".gate_proj.weight", {kInner, kHidden}, 0.5F);
    add(kMlp + module + ".up_proj.weight", {kInner, kHidden}, 0.5F);
    add(kMlp + module + ".down_proj.weight", {kHidden, kInner}, 0.5F);
  }
};

TEST_F(OddMoe, NumbersOfExpertsThatCantBeAreRefusedByName) {
  struct Case {
    const char* set;
    const char* says;
  };
  for (const Case& one :
       {Case{"num_experts_per_tok=5", "num_experts_per_tok 5 is more than n_routed_experts 4"},
        Case{"num_experts_per_tok=0", "num_experts_per_tok is 0 (must be positive)"},
        Case{"num_experts_per_tok=33", "num_experts_per_tok is 33 (absurd: more than 32)"},
        Case{"n_routed_experts=2049", "n_routed_experts is 2049 (absurd: more than 2048)"},
        Case{"n_routed_experts=0", "n_routed_experts is 0 (must be positive)"},
        Case{"n_group=3", "n_group 3 does not divide n_routed_experts 4"},
        Case{"topk_group=2", "topk_group 2 is more than n_group 1"},
        Case{"scoring_func=softplus", "unknown scoring_func \"softplus\" (known: softmax"},
        Case{"topk_method=random", "unknown topk_method \"random\" (known: greedy"},
        Case{"routed_scaling_factor=0", "routed_scaling_factor is 0 (not a positive number)"}}) {
    expect_one_complaint(alone("verify" + config() + " --set " + one.set), 64, one.says);
  }
  std::string text = content_of(path("config.json"));
  text[text.find("\"num_experts_per_tok\": 2") + 23] = '9';
  std::ofstream(path("config.json")) << text;
  expect_one_complaint(on_ranks(3, "verify" + config()), 65,
                       "num_experts_per_tok 9 is more than n_routed_experts 4");
}

TEST_F(OddMoe, GridsThatCantBeAreRefusedWithWhatWouldDo) {
  expect_one_complaint(on_ranks(2, "verify" + config() + " --ep 3"), 64,
                       "--ep 3 does not divide 2 ranks");
  expect_one_complaint(on_ranks(2, "verify" + config() + " --ep 1"), 64,
                       "2 ranks share each expert of 1 block");
  expect_one_complaint(alone("verify" + config() + " --reduce fast"), 64, "--reduce fast");
  expect_one_complaint(alone("verify --config " + kSource + "/configs/gpt2.json --ep 1"), 64,
                       "--ep 1 is not possible");
  EXPECT_EQ(on_ranks(2, "verify" + config() + " --ep 1 --expert-blocks 2").code, 0);
}

TEST_F(OddMoe, ARouterThatIsntFiniteIsRefusedByTensorAndPlace) {
  const auto refused = [&](const std::string& name, std::size_t at, float value,
                           const std::string& says) {
    const float before = std::exchange(stored_[kMlp + name].values[at], value);
    write_model();
    expect_one_complaint(on_ranks(2, "verify" + model()), 65, kMlp + name + " is " + says);
    expect_one_complaint(alone("run" + model() + " --tokens 3"), 65, kMlp + name + " is " + says);
    stored_[kMlp + name].values[at] = before;
  };
  refused("gate.weight", 2 * kHidden + 5, kNan, "nan at row 2, column 5");
  refused("gate.weight", 3, -std::numeric_limits<float>::infinity(), "-inf at row 0, column 3");
  refused("gate.e_score_correction_bias", 1, kNan, "nan at row 0, column 1");
  write_model();
  EXPECT_EQ(on_ranks(2, "verify" + model()).code, 0);
}

TEST_F(OddMoe, AnExpertsTensorThatIsMissingIsNamed) {
  stored_.erase(kMlp + "experts.3.up_proj.weight");
  write_model();
  for (const char* command : {"verify", "run --tokens 3", "inspect", "bench --iterations 1"}) {
    expect_one_complaint(on_ranks(2, command + model()), 65, kMlp + "experts.3.up_proj.weight");
  }
}

TEST_F(OddMoe, AGivenRoutingIsRefusedByItsRowInTheFile) {
  write_model();
  const std::string command = "run" + model() + input();
  // Row 3 is the last rank's second.
  write_routed(4, {4, 2}, {0, 1, 1, 2, 2, 3, 3, 4});
  expect_one_complaint(on_ranks(2, command), 65, "expert 4 in row 3 of a given routing");
  write_routed(4, {4, 2}, {0, 1, 1, 2, 2, -1, 3, 0});
  expect_one_complaint(on_ranks(2, command), 65, "expert -1 in row 2 of a given routing");
  write_routed(4, {4, 2}, {0, 1, 1, 2, 2, 2, 3, 0});
  expect_one_complaint(on_ranks(2, command), 65, "expert 2 in row 2 of a given routing (it is");
  write_routed(4, {4, 3}, {0, 1, 2, 1, 2, 3, 2, 3, 0, 3, 0, 1});
  expect_one_complaint(on_ranks(2, command), 65, "topk_ids is I32 [4, 3]");
  write_routed(4, {3, 2}, {0, 1, 1, 2, 2, 3});
  expect_one_complaint(alone(command), 65, "topk_ids is I32 [3, 2]");
  write_routed(4, {4, 2}, {0, 1, 1, 2, 2, 3, 3, 0});
  EXPECT_EQ(on_ranks(2, command).code, 0);
}

TEST_F(OddMoe, ANanTokenIsNanInItsOwnRowAndGoesToExpertsThatAreThere) {
  write_model();
  std::vector<float> x = tokens(6);
  const auto computed = [&](const std::string& file) {
    write_tokens(x, kHidden);
    const Outcome outcome = on_ranks(3, "run" + model() + input() + " --output " + path(file));
    EXPECT_EQ(outcome.code, 0) << outcome.error;
    return read_f32(path(file), "y");
  };
  const std::vector<float> clean = computed("clean.safetensors");
  x[3 * kHidden + 7] = kNan;
  const std::vector<float> dirty = computed("dirty.safetensors");
  for (std::int64_t i = 0; i < 6 * kHidden; ++i) {
    const float y = dirty[as_size(i)];
    EXPECT_TRUE(i / kHidden == 3 ? std::isnan(y) : y == clean[as_size(i)]) << i;
  }
  const SafetensorsFile file(path("dirty.safetensors"));
  std::vector<std::int32_t> ids(12);
  file.read("topk_ids", 0, std::as_writable_bytes(std::span(ids)));
  for (std::size_t i = 0; i < 12; i += 2) {
    EXPECT_TRUE(ids[i] >= 0 && ids[i] < kExperts && ids[i + 1] >= 0 && ids[i + 1] < kExperts);
    EXPECT_NE(ids[i], ids[i + 1]) << i;
  }
  const Outcome verified = on_ranks(3, "verify --quiet" + model() + input());
  EXPECT_EQ(verified.code, 1) << verified.error;
  EXPECT_EQ(verified.out,
            "# layer 0: NaN in 16 values, first at token 3, column 0 on rank 1: NaN, as on one "
            "device\n# Out of bounds values : 16 FAILED\n");
}

TEST_F(OddMoe, AReplayedRoutingGivesTheSameBits) {
  write_model();
  write_tokens(tokens(5), kHidden);
  ASSERT_EQ(on_ranks(2, "run" + model() + input() + " --output " + path("y.safetensors")).code, 0);
  const SafetensorsFile first(path("y.safetensors"));
  const std::vector<float> x = tokens(5);
  std::vector<std::byte> ids(40);
  std::vector<std::byte> weights(40);
  first.read("topk_ids", 0, ids);
  first.read("topk_weights", 0, weights);
  SafetensorsWriter writer(
      path("x.safetensors"),
      {{"x", "F32", {5, kHidden}}, {"topk_ids", "I32", {5, 2}}, {"topk_weights", "F32", {5, 2}}});
  writer.append(std::as_bytes(std::span(x)));
  writer.append(ids);
  writer.append(weights);
  writer.finish();
  const Outcome again =
      on_ranks(3, "run" + model() + input() + " --output " + path("again.safetensors"));
  ASSERT_EQ(again.code, 0) << again.error;
  EXPECT_THAT(again.out, HasSubstr("replayed from"));
  EXPECT_EQ(content_of(path("again.safetensors")), content_of(path("y.safetensors")));
}

}  // namespace
}  // namespace gatefold
