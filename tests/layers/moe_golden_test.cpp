// Every family's mixtures of experts against outputs of the transformers library, with the experts
// that it chose and their weights (tests/golden/README.md), on every grid.
#include <gmock/gmock.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>

#include "layers/model_config.h"
#include "layers/moe.h"
#include "layers/moe_reference.h"
#include "memory_source.h"
#include "parallel/grid.h"
#include "parallel/mpi_interop.h"
#include "runtime/checkpoint.h"
#include "tests/build_paths.h"
#include "tests/testing_device.h"

namespace gatefold {
namespace {

using testing::as_floats;
using testing::DeviceGroup;
using testing::in_dtype;
using testing::OnDevice;

std::vector<std::string> golden_models() {
  std::vector<std::string> paths;
  for (const char* model : {"deepseek/bf16",         "deepseek_v2/bf16",
                            "deepseek_v2_lite/bf16", "deepseek_v3/bf16",
                            "glm4_moe/bf16",         "gpt_oss/bf16",
                            "gpt_oss/f32",           "granitemoe/bf16",
                            "granitemoe_fused/bf16", "granitemoeshared/bf16",
                            "llama4/bf16",           "minimind/bf16",
                            "minimind2/bf16",        "mixtral/bf16",
                            "mixtral/f32",           "olmoe/bf16",
                            "phimoe/bf16",           "qwen2_moe/bf16",
                            "qwen3_5_moe/bf16",      "qwen3_moe/bf16",
                            "qwen3_moe_fused/bf16",  "qwen3_next/bf16",
                            "qwen3_vl_moe/bf16",     "switch_transformers/bf16"}) {
    paths.push_back(std::string(kSourceFolder) + "/tests/golden/" + model);
  }
  return paths;
}

/// One layer's golden values, a token's experts as in tests/golden/README.md.
struct GoldenLayer {
  std::vector<float> y;           // [tokens, H]
  std::vector<std::int32_t> ids;  // [tokens, k]
  std::vector<float> weights;     // [tokens, k]
};

class MoeGolden : public ::testing::TestWithParam<std::string> {
 protected:
  template <typename Value>
  std::vector<Value> golden(const std::string& name) const {
    const SafetensorsEntry& entry = golden_.header().tensors.at(name);
    std::vector<Value> values((entry.end - entry.begin) / sizeof(Value));
    golden_.read(name, 0, std::as_writable_bytes(std::span(values)));
    return values;
  }

  GoldenLayer layer_of(std::int64_t layer) const {
    const std::string n = std::to_string(layer);
    return {golden<float>("y." + n), golden<std::int32_t>("ids." + n),
            golden<float>("weights." + n)};
  }

  /// Calls check(layer, its spec, its golden values) for every mixture; there is at least one.
  template <typename Check>
  void for_every_mixture(const Check& check) const {
    std::int64_t mixtures = 0;
    for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
      const bool chosen = golden_.header().tensors.contains("ids." + std::to_string(layer));
      EXPECT_EQ(config_.is_moe(layer), chosen) << "layer " << layer;
      if (!chosen) continue;
      ++mixtures;
      check(resolve_moe(config_, layer, checkpoint_), layer_of(layer));
    }
    EXPECT_GE(mixtures, 1);
  }

  std::int64_t tokens() const { return static_cast<std::int64_t>(x_.size()) / config_.hidden_size; }

  std::unique_ptr<Communicator> world_ = make_mpi_communicator(MPI_COMM_WORLD);
  Checkpoint checkpoint_{GetParam()};
  ModelConfig config_ = read_model_config(GetParam() + "/config.json");
  SafetensorsFile golden_{GetParam() + "/golden.safetensors"};
  std::vector<float> x_ = golden<float>("x");
};

double largest_of(const std::vector<float>& values) {
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(value));
  return double{largest};
}

TEST_P(MoeGolden, TheReferenceRoutesAndComputesAsTransformersDoes) {
  for_every_mixture([&](const MoeSpec& spec, const GoldenLayer& layer) {
    const MoeReferenceResult result =
        reference_moe(spec, checkpoint_, config_.dtype, x_, tokens(), layer.ids);
    EXPECT_EQ(result.near_ties, 0);
    EXPECT_THAT(result.wrong_routes, ::testing::IsEmpty());
    for (std::size_t i = 0; i < layer.weights.size(); ++i) {
      EXPECT_NEAR(result.weights[i], layer.weights[i], 1e-5 * largest_of(layer.weights));
    }
    for (std::size_t i = 0; i < layer.y.size(); ++i) {
      EXPECT_NEAR(result.y[i], layer.y[i], 1e-5 * largest_of(layer.y)) << "value " << i;
    }
  });
}

/// y of this rank's tokens, and what the layer chose for those that the rank is home to.
struct Outcome {
  Range own;   // of all tokens
  Range home;  // of all tokens
  std::vector<float> y;
  Choices routing;
};

Outcome forward(const MoeSpec& spec, const TensorSource& source, const Grid& grid, DType dtype,
                const std::vector<float>& x) {
  const std::int64_t hidden = spec.hidden_size;
  const std::int64_t tokens = static_cast<std::int64_t>(x.size()) / hidden;
  const auto device = testing::testing_device();
  const DeviceGroup world(grid.world(), *device);
  const DeviceGroup tp(grid.tp(), *device);
  const DeviceGroup etp(grid.etp(), *device);
  MoeOptions options;
  options.linear.dtype = dtype;
  options.expert_blocks = 4;
  Moe moe(spec, source, {device.get(), world.get(), tp.get(), etp.get()}, options);
  const Range own = split_tokens(tokens, grid.dp_size())[static_cast<std::size_t>(grid.dp_index())];
  const std::vector<float> mine(x.begin() + own.begin * hidden, x.begin() + own.end * hidden);
  OnDevice<std::byte> in(*device, in_dtype(mine, dtype));
  OnDevice<std::byte> out(*device, in_dtype(std::vector<float>(mine.size(), -1.0F), dtype));
  moe.forward(in.data(), {own.size(), tokens}, out.data());
  moe.wait();
  const Range home = moe.home(own.size());
  return {own,
          {own.begin + home.begin, own.begin + home.end},
          as_floats(out.get(), dtype),
          moe.routing()};
}

/// All tp x dp = etp x ep of a world.
template <typename Check>
void for_every_grid(Communicator& world, const Check& check) {
  for (int tp = 1; tp <= world.size(); ++tp) {
    for (int ep = 1; ep <= world.size(); ++ep) {
      if (world.size() % tp == 0 && world.size() % ep == 0) check(Grid(world, tp, ep));
    }
  }
}

void expect_same_choices(const Outcome& found, const GoldenLayer& layer) {
  const auto k = static_cast<std::size_t>(found.routing.top_k);
  const auto first = static_cast<std::size_t>(found.home.begin) * k;
  EXPECT_EQ(found.routing.rows, found.home.size());
  for (std::size_t i = 0; i < found.routing.ids.size(); i += k) {
    for (std::size_t c = i; c < i + k; ++c) {
      const auto expert = layer.ids.begin() + static_cast<std::ptrdiff_t>(first + c);
      const auto begin = found.routing.ids.begin() + static_cast<std::ptrdiff_t>(i);
      const auto place = std::find(begin, begin + static_cast<std::ptrdiff_t>(k), *expert);
      const auto at = static_cast<std::size_t>(place - found.routing.ids.begin());
      EXPECT_LT(at, i + k) << "no expert " << *expert << " for token " << (first + i) / k;
      if (at >= i + k) continue;
      EXPECT_NEAR(found.routing.weights[at], layer.weights[first + c],
                  1e-5 * largest_of(layer.weights));
    }
  }
}

TEST_P(MoeGolden, Fp32OutputsAndChoicesAgreeToTheirRounding) {
  for_every_mixture([&](const MoeSpec& spec, const GoldenLayer& layer) {
    for_every_grid(*world_, [&](const Grid& grid) {
      const Outcome found = forward(spec, checkpoint_, grid, DType::kF32, x_);
      expect_same_choices(found, layer);
      const auto first = static_cast<std::size_t>(found.own.begin * spec.hidden_size);
      for (std::size_t i = 0; i < found.y.size(); ++i) {
        EXPECT_NEAR(found.y[i], layer.y[first + i], 1e-5 * largest_of(layer.y))
            << "value " << first + i;
      }
    });
  });
}

TEST_P(MoeGolden, Bf16OutputsAgreeWithinTheBound) {
  // The goldens round nothing but weights; weights of f32 files they don't round either.
  if (config_.dtype != DType::kBf16) return;
  for_every_mixture([&](const MoeSpec& spec, const GoldenLayer& layer) {
    const MoeReferenceResult reference =
        reference_moe(spec, checkpoint_, DType::kBf16, x_, tokens(), layer.ids);
    const Grid grid(*world_, 1, world_->size());
    const Outcome found = forward(spec, checkpoint_, grid, DType::kBf16, x_);
    expect_same_choices(found, layer);
    const auto first = static_cast<std::size_t>(found.own.begin * spec.hidden_size);
    for (std::size_t i = 0; i < found.y.size(); ++i) {
      EXPECT_LE(std::abs(double{found.y[i]} - layer.y[first + i]), reference.bound[first + i])
          << "value " << first + i;
    }
  });
}

/// y of the only mixture of a golden model, for tokens that are the same for models of one size.
std::vector<float> output_of(const std::string& model, const Grid& grid) {
  const std::string path = kSourceFolder + std::string("/tests/golden/") + model + "/bf16";
  const Checkpoint checkpoint(path);
  const ModelConfig config = read_model_config(path + "/config.json");
  const auto x = testing::noise(17 * config.hidden_size, 3, 1.7F);
  const std::int64_t layer = config.num_layers - 1;
  return forward(resolve_moe(config, layer, checkpoint), checkpoint, grid, DType::kBf16, x).y;
}

TEST(MoeLayouts, FilesOfOneModelInTwoLayoutsGiveTheSameBits) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  const Grid grid(*world, 1, world->size());
  EXPECT_EQ(output_of("qwen3_moe", grid), output_of("qwen3_moe_fused", grid));
  EXPECT_EQ(output_of("granitemoe", grid), output_of("granitemoe_fused", grid));
}

std::string model_name(const ::testing::TestParamInfo<std::string>& model) {
  const std::filesystem::path path = model.param;
  return path.parent_path().filename().string() + "_" + path.filename().string();
}

INSTANTIATE_TEST_SUITE_P(Families, MoeGolden, ::testing::ValuesIn(golden_models()), model_name);

}  // namespace
}  // namespace gatefold
