// Every family's dense layers against outputs of the transformers library (tests/golden/README.md),
// on every tensor-parallel width.
#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "layers/mlp.h"
#include "layers/model_config.h"
#include "layers/reference.h"
#include "memory_source.h"
#include "parallel/mpi_interop.h"
#include "runtime/checkpoint.h"
#include "tests/build_paths.h"
#include "tests/testing_device.h"

namespace gatefold {
namespace {

using testing::as_floats;
using testing::in_dtype;
using testing::OnDevice;

std::vector<std::string> golden_models() {
  std::vector<std::string> paths;
  for (const char* family : {"bert", "gemma3_text", "glm4", "gpt2", "llama", "llama_bias",
                             "mistral", "opt", "phi3", "qwen2", "qwen3", "qwen3_5"}) {
    for (const char* dtype : {"f32", "bf16"}) {
      paths.push_back(std::string(kSourceFolder) + "/tests/golden/" + family + "/" + dtype);
    }
  }
  for (const char* with_mixtures :
       {"deepseek", "deepseek_v2", "deepseek_v3", "glm4_moe", "llama4", "qwen2_moe", "qwen3_moe",
        "qwen3_vl_moe", "switch_transformers"}) {
    paths.push_back(std::string(kSourceFolder) + "/tests/golden/" + with_mixtures + "/bf16");
  }
  return paths;
}

/// Tensor `name` of golden.safetensors, which is F32.
std::vector<float> golden(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsEntry& entry = file.header().tensors.at(name);
  std::vector<float> values((entry.end - entry.begin) / sizeof(float));
  file.read(name, 0, std::as_writable_bytes(std::span(values)));
  return values;
}

class Golden : public ::testing::TestWithParam<std::string> {
 protected:
  std::vector<float> forward(std::int64_t layer, DType dtype) {
    const FfnSpec spec = resolve_layer(config_, layer, checkpoint_);
    MlpOptions options;
    options.linear.dtype = dtype;
    Mlp mlp(spec, checkpoint_, {device_.get(), tp_.get()}, options);
    const std::int64_t tokens = static_cast<std::int64_t>(x_.size()) / config_.hidden_size;
    OnDevice<std::byte> x(*device_, in_dtype(x_, dtype));
    OnDevice<std::byte> y(*device_, in_dtype(std::vector<float>(x_.size(), -1.0F), dtype));
    mlp.forward(x.data(), {tokens, tokens}, y.data());
    return as_floats(y.get(), dtype);
  }

  std::unique_ptr<Communicator> world_ = make_mpi_communicator(MPI_COMM_WORLD);
  std::unique_ptr<Device> device_ = testing::testing_device();
  testing::DeviceGroup tp_{*world_, *device_};
  Checkpoint checkpoint_{GetParam()};
  ModelConfig config_ = read_model_config(GetParam() + "/config.json");
  SafetensorsFile golden_{GetParam() + "/golden.safetensors"};
  std::vector<float> x_ = golden(golden_, "x");
};

TEST_P(Golden, Fp32OutputsAgreeToTheirRounding) {
  for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
    if (config_.is_moe(layer)) continue;  // moe_golden_test.cpp
    const std::vector<float> expected = golden(golden_, "y." + std::to_string(layer));
    const std::vector<float> y = forward(layer, DType::kF32);
    ASSERT_EQ(y.size(), expected.size());
    float largest = 0;
    for (const float value : expected) largest = std::max(largest, std::abs(value));
    for (std::size_t i = 0; i < y.size(); ++i) {
      EXPECT_NEAR(y[i], expected[i], 1e-5F * largest) << "layer " << layer << ", value " << i;
    }
  }
}

TEST_P(Golden, Bf16OutputsAgreeWithinTheBound) {
  // The goldens round neither h nor y; the bound of the float64 reference allows for both. Weights
  // of the f32 files would be rounded too, which the goldens don't have.
  if (config_.dtype != DType::kBf16) return;
  for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
    if (config_.is_moe(layer)) continue;  // moe_golden_test.cpp
    const std::vector<float> expected = golden(golden_, "y." + std::to_string(layer));
    const std::vector<float> y = forward(layer, DType::kBf16);
    const std::int64_t tokens = static_cast<std::int64_t>(x_.size()) / config_.hidden_size;
    const ReferenceResult reference = reference_ffn(resolve_layer(config_, layer, checkpoint_),
                                                    checkpoint_, DType::kBf16, x_, tokens);
    for (std::size_t i = 0; i < y.size(); ++i) {
      EXPECT_LE(std::abs(static_cast<double>(y[i]) - expected[i]), reference.bound[i])
          << "layer " << layer << ", value " << i;
      EXPECT_NEAR(reference.y[i], expected[i], 1e-5 * std::max(1.0, std::abs(reference.y[i])));
    }
  }
}

std::string model_name(const ::testing::TestParamInfo<std::string>& model) {
  const std::filesystem::path path = model.param;
  return path.parent_path().filename().string() + "_" + path.filename().string();
}

INSTANTIATE_TEST_SUITE_P(Families, Golden, ::testing::ValuesIn(golden_models()), model_name);

}  // namespace
}  // namespace gatefold
