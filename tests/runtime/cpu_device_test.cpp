// The CPU device against plain loops. Values are small integers, so that every sum is exact in any
// order and a wrong element can't hide in a tolerance; where order is promised, bits are compared.
#include <gmock/gmock.h>
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "runtime/activation_math.h"
#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/row_kernel.h"
#include "runtime/tensor_source.h"

namespace gatefold {
namespace {

constexpr std::byte kPoison{0xff};  // NaN in every element type
constexpr std::size_t kGuardBytes = 512;

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::vector<float> integers(std::int64_t n, std::uint32_t seed, int most = 3) {
  std::vector<float> values(as_size(n));
  std::uint32_t state = seed * 2654435761U + 1U;
  for (float& value : values) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<float>(static_cast<int>((state >> 16) % as_size(2 * most + 1)) - most);
  }
  return values;
}

/// Values whose sums depend on their order.
std::vector<float> fractions(std::int64_t n, std::uint32_t seed) {
  std::vector<float> values = integers(n, seed, 30000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] *= (i % 5 == 0) ? 0x1p-22F : 0x1p-14F;
  return values;
}

std::vector<std::byte> in_dtype(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * as_size(size_of(dtype)));
  convert(DType::kF32, reinterpret_cast<const std::byte*>(values.data()), dtype, bytes.data(),
          static_cast<std::int64_t>(values.size()));
  return bytes;
}

std::vector<float> as_floats(const std::byte* data, std::int64_t n, DType dtype) {
  std::vector<float> values(as_size(n));
  convert(dtype, data, DType::kF32, reinterpret_cast<std::byte*>(values.data()), n);
  return values;
}

std::uint32_t bits(float value) { return std::bit_cast<std::uint32_t>(value); }

/// Poisoned memory with a guard behind it that a destructor checks.
class Guarded {
 public:
  Guarded(Device& device, std::int64_t bytes)
      : bytes_(as_size(bytes)),
        memory_(device.allocate(bytes + static_cast<std::int64_t>(kGuardBytes))) {
    std::fill_n(memory_.data(), bytes_ + kGuardBytes, kPoison);
  }
  ~Guarded() {
    const std::byte* guard = memory_.data() + bytes_;
    EXPECT_TRUE(std::all_of(guard, guard + kGuardBytes, [](std::byte b) { return b == kPoison; }))
        << "written past the end";
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  std::byte* data() const { return memory_.data(); }
  template <typename T>
  T* as() const {
    return memory_.as<T>();
  }

 private:
  std::size_t bytes_;
  Buffer memory_;
};

/// Whether this CPU has the library's kernel for the type at all.
bool usable(Device& device, DType storage, GemmKernel kernel) {
  return kernel == GemmKernel::kPlain ||
         !device.self_check({64, 64, false}, storage).kernel.empty();
}

/// A weight made of `values` [rows, inputs], stored a few rows at a time.
Weight make_weight(Device& device, const WeightShape& shape, DType model, GemmKernel kernel,
                   const std::vector<float>& values, std::int64_t step = 37) {
  Weight weight = device.allocate_weight(shape, model, kernel);
  for (std::int64_t row = 0; row < shape.rows(); row += step) {
    const std::int64_t rows = std::min(step, shape.rows() - row);
    const std::vector<float> part(values.begin() + row * shape.inputs,
                                  values.begin() + (row + rows) * shape.inputs);
    device.store_rows(weight, row, rows, in_dtype(part, weight.storage).data());
  }
  return weight;
}

/// x W^T in double: exact for small integers.
std::vector<double> multiply(const std::vector<float>& x, const std::vector<float>& w,
                             std::int64_t rows, std::int64_t inputs, std::int64_t outputs) {
  std::vector<double> y(as_size(rows * outputs));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t o = 0; o < outputs; ++o) {
      double sum = 0;
      for (std::int64_t k = 0; k < inputs; ++k) {
        sum += static_cast<double>(x[as_size(r * inputs + k)]) *
               static_cast<double>(w[as_size(o * inputs + k)]);
      }
      y[as_size(r * outputs + o)] = sum;
    }
  }
  return y;
}

/// A bias [rows of the weight] in the order of packed columns; padding holds NaN.
std::vector<float> packed_bias(const WeightShape& shape, const std::vector<float>& bias) {
  std::vector<float> packed(as_size(shape.groups() * kGroup),
                            std::numeric_limits<float>::quiet_NaN());
  for (std::int64_t row = 0; row < shape.rows(); ++row) {
    const bool up = shape.gated && row >= shape.outputs;
    const std::int64_t output = up ? row - shape.outputs : row;
    const std::int64_t group = output / shape.group_outputs();
    const std::int64_t column = output % shape.group_outputs() + (up ? kGatedGroup : 0);
    packed[as_size(group * kGroup + column)] = bias[as_size(row)];
  }
  return packed;
}

struct Kind {
  int threads;
  DType model;
  GemmKernel kernel;
};

class CpuDeviceGemm : public ::testing::TestWithParam<Kind> {
 protected:
  CpuDeviceGemm()
      : device_(make_cpu_device(GetParam().threads)),
        model_(GetParam().model),
        storage_(device_->storage(model_)),
        kernel_(GetParam().kernel) {}
  void SetUp() override {
    if (!usable(*device_, storage_, kernel_)) GTEST_SKIP() << "oneDNN has no such kernel here";
  }
  std::int64_t height(std::int64_t rows) const {
    return kernel_ == GemmKernel::kLibraryWhole ? std::max<std::int64_t>(1, rows)
                                                : tile_rows(rows, device_->tile_heights());
  }
  Tiles tiles(const Guarded& memory, std::int64_t rows, std::int64_t width) const {
    return {memory.data(), rows, height(rows), width, rows <= height(rows)};
  }
  std::int64_t tile_bytes(std::int64_t rows, std::int64_t width) const {
    return round_up(rows, height(rows)) * width * size_of(storage_);
  }
  void check_activation(const WeightShape& shape, std::int64_t rows, ActivationKind kind,
                        bool with_bias);
  void check_merge(const WeightShape& shape, std::int64_t rows, std::int64_t blocks);

  std::unique_ptr<Device> device_;
  DType model_;
  DType storage_;
  GemmKernel kernel_;
};

void CpuDeviceGemm::check_activation(const WeightShape& shape, std::int64_t rows,
                                     ActivationKind kind, bool with_bias) {
  const std::vector<float> x = integers(rows * shape.inputs, 1);
  const std::vector<float> w = integers(shape.rows() * shape.inputs, 2);
  const std::vector<float> bias = integers(shape.rows(), 3);
  const std::vector<float> packed = packed_bias(shape, bias);
  const Activation activation{.kind = kind, .gated = shape.gated};

  const Weight weight = make_weight(*device_, shape, model_, kernel_, w);
  device_->prepare(shape, storage_, kernel_, height(rows));
  const Guarded x_memory(*device_, tile_bytes(rows, shape.padded_inputs()));
  const Guarded h_memory(*device_, tile_bytes(rows, shape.padded_outputs()));
  const Tiles x_tiles = tiles(x_memory, rows, shape.padded_inputs());
  const Tiles h_tiles = tiles(h_memory, rows, shape.padded_outputs());
  device_->tile_rows({.data = in_dtype(x, model_).data(), .stride = shape.inputs}, model_,
                     shape.inputs, x_tiles);
  device_->gemm_activation(weight, with_bias ? packed.data() : nullptr, activation, model_, x_tiles,
                           h_tiles);

  const std::vector<double> z = multiply(x, w, rows, shape.inputs, shape.rows());
  const std::vector<float> h = as_floats(h_memory.data(), rows * h_tiles.width, storage_);
  const auto at = [&](std::int64_t row, std::int64_t column) {
    const double b = with_bias ? static_cast<double>(bias[as_size(column)]) : 0.0;
    return static_cast<float>(z[as_size(row * shape.rows() + column)] + b);
  };
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t o = 0; o < h_tiles.width; ++o) {
      float expected = 0.0F;
      if (o < shape.outputs) {
        expected = shape.gated ? gate_times_up(activation, at(r, o), at(r, o + shape.outputs))
                               : activate(activation, at(r, o));
        expected = round_to(model_, expected);
      }
      ASSERT_EQ(bits(h[as_size(r * h_tiles.width + o)]), bits(expected))
          << shape.outputs << "x" << shape.inputs << (shape.gated ? " gated" : "") << ", row " << r
          << " of " << rows << ", column " << o;
    }
  }
}

TEST_P(CpuDeviceGemm, ActivationOfAGemmIsThatOfPlainLoops) {
  for (const bool gated : {true, false}) {
    for (const auto& [outputs, inputs] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {1, 1}, {5, 33}, {31, 64}, {33, 65}, {64, 7}, {65, 128}, {100, 100}, {200, 31}}) {
      for (const std::int64_t rows : {1, 2, 17, 70}) {
        for (const bool bias : {false, true}) {
          check_activation({outputs, inputs, gated}, rows, ActivationKind::kIdentity, bias);
        }
      }
    }
    check_activation({97, 65, gated}, 1, ActivationKind::kSilu, true);
    check_activation({97, 65, gated}, 66, ActivationKind::kSilu, true);
    check_activation({97, 65, gated}, 66, ActivationKind::kRelu2, false);
  }
}

TEST_P(CpuDeviceGemm, PanelsWiderThanACacheAndARemainderGiveEveryColumn) {
  // 4096 inputs: in f32 a panel of 1 MiB holds one group, in bf16 two; 320 outputs are 5 groups.
  check_activation({320, 4096, false}, 20, ActivationKind::kIdentity, true);
  check_activation({70, 4096, true}, 65, ActivationKind::kIdentity, true);
}

TEST_P(CpuDeviceGemm, NoRowsAreNoWork) {
  const WeightShape shape{40, 40, false};
  const Weight weight =
      make_weight(*device_, shape, model_, kernel_, integers(shape.rows() * shape.inputs, 2));
  device_->prepare(shape, storage_, kernel_, height(0));
  const Guarded guard(*device_, 0);
  const Tiles none{guard.data(), 0, height(0), shape.padded_inputs()};
  device_->gemm_activation(weight, nullptr, {.gated = false}, model_, none, none);
  device_->gemm_merge(weight, none, {guard.as<float>(), 0, 1, kGroup, 0, 0}, 0, 0);
  device_->tile_rows({.data = nullptr, .stride = 40}, model_, 40, none);
  device_->untile_rows(none, model_, 40, guard.data(), 40);
}

/// Sums `blocks` products through the plan of the tree, block by block, in one stack.
void CpuDeviceGemm::check_merge(const WeightShape& shape, std::int64_t rows, std::int64_t blocks) {
  const bool whole = kernel_ == GemmKernel::kLibraryWhole;
  const MergePlan plan = SumTree({blocks, blocks}).local_plan({0, blocks});
  const std::int64_t slot = shape.groups() * rows * kGroup;
  const Guarded stack_memory(*device_, plan.depth * slot * size_of(DType::kF32));
  const Partials stack{stack_memory.as<float>(),
                       rows,
                       shape.groups(),
                       whole ? shape.groups() * kGroup : kGroup,
                       whole ? kGroup : rows * kGroup,
                       slot};
  device_->prepare(shape, storage_, kernel_, height(rows));

  std::vector<double> expected(as_size(rows * shape.outputs));
  int stack_height = 0;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const auto seed = static_cast<std::uint32_t>(10 * b);
    const std::vector<float> h = integers(rows * shape.inputs, seed + 1);
    const std::vector<float> w = integers(shape.outputs * shape.inputs, seed + 2);
    const Weight weight = make_weight(*device_, shape, model_, kernel_, w);
    const Guarded h_memory(*device_, tile_bytes(rows, shape.padded_inputs()));
    const Tiles h_tiles = tiles(h_memory, rows, shape.padded_inputs());
    device_->tile_rows({.data = in_dtype(h, model_).data(), .stride = shape.inputs}, model_,
                       shape.inputs, h_tiles);
    const int merges = plan.merges[as_size(b)];
    device_->gemm_merge(weight, h_tiles, stack, stack_height, merges);
    stack_height += 1 - merges;
    const std::vector<double> p = multiply(h, w, rows, shape.inputs, shape.outputs);
    for (std::size_t i = 0; i < p.size(); ++i) expected[i] += p[i];
  }
  ASSERT_EQ(stack_height, 1);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t o = 0; o < shape.groups() * kGroup; ++o) {
      const double want = o < shape.outputs ? expected[as_size(r * shape.outputs + o)] : 0.0;
      const float got = stack.at(0, o / kGroup)[r * stack.row_stride + o % kGroup];
      ASSERT_EQ(static_cast<double>(got), want)
          << shape.outputs << "x" << shape.inputs << ", " << blocks << " blocks, row " << r
          << " of " << rows << ", column " << o;
    }
  }
}

TEST_P(CpuDeviceGemm, MergedProductsAreTheSumOfPlainLoops) {
  const std::int64_t most = kernel_ == GemmKernel::kLibraryWhole ? 1 : 8;
  for (const std::int64_t rows : {1, 3, 16, 70}) {
    for (const std::int64_t blocks : {std::int64_t{1}, most / 2, most}) {
      if (blocks == 0) continue;
      for (const std::int64_t outputs : {1, 64, 100}) {
        check_merge({outputs, 33, false}, rows, blocks);
      }
    }
  }
}

TEST_P(CpuDeviceGemm, MergesAddInTheOrderOfTheTree) {
  if (kernel_ == GemmKernel::kLibraryWhole) return;  // makes one root, merges nothing
  const WeightShape shape{70, 40, false};
  const std::int64_t rows = 19;
  const std::int64_t blocks = 7;
  const std::int64_t slot = shape.groups() * rows * kGroup;
  const MergePlan plan = SumTree({blocks, blocks}).local_plan({0, blocks});
  device_->prepare(shape, storage_, kernel_, height(rows));
  const Guarded alone_memory(*device_, blocks * slot * size_of(DType::kF32));
  const Guarded stack_memory(*device_, plan.depth * slot * size_of(DType::kF32));
  const Partials alone{alone_memory.as<float>(), rows, 2, kGroup, rows * kGroup, slot};
  const Partials stack{stack_memory.as<float>(), rows, 2, kGroup, rows * kGroup, slot};
  int stack_height = 0;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const auto seed = static_cast<std::uint32_t>(10 * b);
    const Weight weight =
        make_weight(*device_, shape, model_, kernel_, fractions(70 * 40, seed + 1));
    const Guarded h_memory(*device_, tile_bytes(rows, shape.padded_inputs()));
    const Tiles h = tiles(h_memory, rows, shape.padded_inputs());
    device_->tile_rows(
        {.data = in_dtype(fractions(rows * 40, seed + 2), model_).data(), .stride = 40}, model_, 40,
        h);
    device_->gemm_merge(weight, h, alone, static_cast<int>(b), 0);
    const int merges = plan.merges[as_size(b)];
    device_->gemm_merge(weight, h, stack, stack_height, merges);
    stack_height += 1 - merges;
  }
  int in_order = 0;
  for (std::int64_t i = 0; i < slot; ++i) {
    std::array<float, 7> p;
    for (std::size_t b = 0; b < 7; ++b) p[b] = alone.data[static_cast<std::int64_t>(b) * slot + i];
    const float sum = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + p[6]);
    ASSERT_EQ(bits(stack.data[i]), bits(sum)) << i;
    const float row = ((((((p[0] + p[1]) + p[2]) + p[3]) + p[4]) + p[5]) + p[6]);
    in_order += bits(sum) == bits(row) ? 1 : 0;
  }
  EXPECT_LT(in_order, slot) << "no element tells one order from another";
}

TEST_P(CpuDeviceGemm, CallersThatFlushDenormalsGetTheSameBits) {
  const WeightShape shape{64, 64, false};
  std::vector<float> x = fractions(17 * 64, 1);
  std::vector<float> w = fractions(64 * 64, 2);
  for (float& value : x) value *= 0x1p-60F;
  for (float& value : w) value *= 0x1p-60F;  // products near 2^-128, results subnormal
  const auto run = [&](std::int64_t rows) {
    const auto device = make_cpu_device(GetParam().threads);
    const Weight weight = make_weight(*device, shape, model_, kernel_, w);
    device->prepare(shape, storage_, kernel_, height(rows));
    const Guarded x_memory(*device, tile_bytes(rows, 64));
    const Guarded h_memory(*device, tile_bytes(rows, 64));
    const Guarded p_memory(*device, rows * 64 * size_of(DType::kF32));
    const Guarded y_memory(*device, rows * 64 * size_of(DType::kF32));
    const Tiles x_tiles = tiles(x_memory, rows, 64);
    const Tiles h = tiles(h_memory, rows, 64);
    device->tile_rows({.data = in_dtype(x, DType::kF32).data(), .stride = 64}, DType::kF32, 64,
                      x_tiles);
    device->gemm_activation(weight, nullptr, {ActivationKind::kIdentity, false}, model_, x_tiles,
                            h);
    device->gemm_merge(weight, x_tiles, {p_memory.as<float>(), rows, 1, kGroup, rows * kGroup, 0},
                       0, 0);
    const float* root = p_memory.as<float>();
    const MergePlan one{{0}, 1, 1};
    RootSum sum;
    sum.roots = {&root, 1};
    sum.plan = &one;
    sum.groups = 1;
    sum.rows = rows;
    sum.columns = 64;
    sum.out = y_memory.data();
    sum.out_row_stride = 64;
    device->sum_roots(sum);
    std::vector<std::byte> all(h_memory.data(), h_memory.data() + rows * 64 * size_of(storage_));
    all.insert(all.end(), p_memory.data(), p_memory.data() + rows * 64 * 4);
    all.insert(all.end(), y_memory.data(), y_memory.data() + rows * 64 * 4);
    return all;
  };
  if (storage_ != DType::kF32) return;  // bf16's matrix instructions flush by themselves, always
  for (const std::int64_t rows : {1, 17}) {
    const std::vector<std::byte> expected = run(rows);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040U);  // FTZ and DAZ
    const std::vector<std::byte> flushed = run(rows);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_TRUE(flushed == expected) << rows << " rows";
    EXPECT_EQ(after & 0x8040U, 0x8040U) << "the caller's own setting was changed";
    const std::vector<float> values =
        as_floats(expected.data(), static_cast<std::int64_t>(expected.size()) / 4, DType::kF32);
    EXPECT_TRUE(std::any_of(values.begin(), values.end(),
                            [](float v) { return std::fpclassify(v) == FP_SUBNORMAL; }));
  }
}

TEST_P(CpuDeviceGemm, ABadActivationIsAnErrorAndNotTheEndOfTheProcess) {
  const WeightShape shape{64, 64, false};
  const Weight weight = make_weight(*device_, shape, model_, kernel_, integers(64 * 64, 2));
  device_->prepare(shape, storage_, kernel_, height(5));
  const Guarded memory(*device_, tile_bytes(5, 64));
  const Tiles x = tiles(memory, 5, 64);
  const Guarded out(*device_, tile_bytes(5, 64));
  Activation activation;
  activation.gated = false;
  activation.beta = std::numeric_limits<float>::infinity();
  try {
    device_->gemm_activation(weight, nullptr, activation, model_, x, tiles(out, 5, 64));
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
  }
}

std::vector<Kind> all_kinds() {
  std::vector<Kind> kinds;
  for (const int threads : {1, 2, 3}) {
    for (const GemmKernel kernel : {GemmKernel::kPlain, GemmKernel::kLibraryTiles,
                                    GemmKernel::kLibraryPanels, GemmKernel::kLibraryWhole}) {
      for (const DType model : {DType::kF32, DType::kBf16})
        kinds.push_back({threads, model, kernel});
    }
    kinds.push_back({threads, DType::kF16, GemmKernel::kLibraryTiles});
  }
  return kinds;
}

std::string kind_name(const ::testing::TestParamInfo<Kind>& test) {
  const char* kernel = "";
  switch (test.param.kernel) {
    case GemmKernel::kPlain: kernel = "plain"; break;
    case GemmKernel::kLibraryTiles: kernel = "tiles"; break;
    case GemmKernel::kLibraryPanels: kernel = "panels"; break;
    case GemmKernel::kLibraryWhole: kernel = "whole"; break;
  }
  return std::string(kernel).append("_").append(name_of(test.param.model)).append("_") +
         std::to_string(test.param.threads);
}

INSTANTIATE_TEST_SUITE_P(Kinds, CpuDeviceGemm, ::testing::ValuesIn(all_kinds()), kind_name);

TEST(CpuDeviceThreads, MoreThanOpenMPCanStartAreRefused) {
  EXPECT_EQ(make_cpu_device(4096)->description(), "cpu, 4096 threads");
  for (const int threads : {4097, 99999, std::numeric_limits<int>::max()}) {
    try {
      make_cpu_device(threads);
      ADD_FAILURE() << "no error for " << threads;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      EXPECT_THAT(error.what(), ::testing::HasSubstr(std::to_string(threads) + " threads"));
    }
  }
}

}  // namespace
}  // namespace gatefold
