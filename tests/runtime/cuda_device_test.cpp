// The CUDA device against the CPU device: the same calls on both, all bits equal. By the plain
// kernel sums have one order, so values may be any; by the library they are small integers, exact
// in every order.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <span>
#include <thread>
#include <vector>

#include "runtime/activation_math.h"
#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/tensor_source.h"

namespace gatefold {
namespace {

using Bytes = std::vector<std::byte>;

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::uint32_t step(std::uint32_t& state) { return (state = state * 1664525U + 1013904223U) >> 8; }

std::vector<float> integers(std::int64_t n, std::uint32_t seed) {
  std::vector<float> values(as_size(n));
  for (float& value : values) value = static_cast<float>(step(seed) % 7U) - 3.0F;
  return values;
}

/// Many magnitudes.
std::vector<float> fractions(std::int64_t n, std::uint32_t seed) {
  std::vector<float> values(as_size(n));
  for (float& value : values) {
    const std::uint32_t bits = step(seed);
    value =
        (static_cast<float>(bits & 0xffffU) - 32768.0F) * (bits % 5U == 0 ? 0x1p-22F : 0x1p-14F);
  }
  return values;
}

/// And now and then what arithmetic treats differently; most long sums are NaN.
std::vector<float> with_specials(std::int64_t n, std::uint32_t seed) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const float special[] = {0.0F, -0.0F, kInf, -kInf, kNan, -kNan, 1e-42F, 3e38F};
  std::vector<float> values = fractions(n, seed);
  for (float& value : values) {
    const std::uint32_t bits = step(seed);
    if (bits % 211U == 0) value = special[bits / 211U % 8U];
  }
  return values;
}

using Values = std::vector<float>(std::int64_t n, std::uint32_t seed);

Bytes in_dtype(const std::vector<float>& values, DType dtype) {
  Bytes bytes(values.size() * as_size(size_of(dtype)));
  convert(DType::kF32, reinterpret_cast<const std::byte*>(values.data()), dtype, bytes.data(),
          std::ssize(values));
  return bytes;
}

Bytes raw(const std::vector<float>& values) { return in_dtype(values, DType::kF32); }

/// Memory of a device, filled with `bytes` or poisoned.
class Memory {
 public:
  Memory(Device& device, const Bytes& bytes)
      : device_(device), buffer_(device.allocate(std::ssize(bytes))) {
    device.upload(buffer_.data(), bytes.data(), std::ssize(bytes));
  }
  Memory(Device& device, std::int64_t poisoned)
      : Memory(device, Bytes(as_size(poisoned), std::byte{0xff})) {}

  std::byte* data() const { return buffer_.data(); }
  float* floats() const { return buffer_.as<float>(); }
  Bytes host() const {
    Bytes bytes(as_size(buffer_.bytes()));
    device_.download(bytes.data(), buffer_.data(), buffer_.bytes());
    return bytes;
  }

 private:
  Device& device_;
  Buffer buffer_;
};

class CudaDevice : public ::testing::Test {
 protected:
  /// run(device) on both gives the same bytes.
  template <typename Run>
  void same(const Run& run) {
    const Bytes expected = run(*cpu_);
    const Bytes found = run(*cuda_);
    ASSERT_EQ(found.size(), expected.size());
    const auto [at, other] = std::ranges::mismatch(found, expected);
    ASSERT_EQ(at - found.begin(), std::ssize(found)) << "the first byte that differs";
  }

  std::unique_ptr<Device> cpu_ = make_cpu_device(1);
  std::unique_ptr<Device> cuda_ = make_cuda_device(0);
};

constexpr DType kDTypes[] = {DType::kF32, DType::kBf16, DType::kF16};

TEST_F(CudaDevice, CopiesRowsOfAnyWidthAndAlignment) {
  for (const std::int64_t bytes : {1, 2, 6, 8, 16, 33, 4112, 20000}) {
    for (const std::int64_t shift : {0, 1, 2, 8}) {
      SCOPED_TRACE(std::to_string(bytes) + " bytes at " + std::to_string(shift));
      same([&](Device& device) {
        const std::int64_t in_stride = bytes + shift;
        const std::int64_t out_stride = bytes + 2 * shift;
        Bytes values(as_size(5 * in_stride + shift));
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::byte(i * 37 + i / 251);
        const Memory in(device, values);
        const Memory out(device, 5 * out_stride + shift);
        device.copy_rows(out.data() + shift, out_stride, in.data() + shift, in_stride, 5, bytes);
        return out.host();
      });
    }
  }
}

TEST_F(CudaDevice, TilesRowsAndBringsThemBack) {
  for (const DType dtype : kDTypes) {
    for (const std::int64_t columns : {1, 7, 64, 100, 1000, 9001}) {
      for (const std::int64_t rows : {1, 3, 70}) {
        SCOPED_TRACE(std::to_string(columns) + " columns");
        const std::int64_t stride = columns + columns % 3;
        same([&](Device& device) {
          const DType kept = device.storage(dtype);
          const Memory x(device, in_dtype(with_specials(rows * stride, 5), dtype));
          Tiles tiles{nullptr, rows, 64, round_up(columns, kInnerStep)};
          const Memory memory(device, tiles.padded_rows() * tiles.width * size_of(kept));
          tiles.data = memory.data();
          device.tile_rows({.data = x.data(), .stride = stride}, dtype, columns, tiles);
          const Memory back(device, rows * stride * size_of(dtype));
          device.untile_rows(tiles, dtype, columns, back.data(), stride);
          // As the model's type: what a CPU keeps may be wider.
          Bytes all = memory.host();
          Bytes narrow(all.size() / as_size(size_of(kept)) * as_size(size_of(dtype)));
          convert(kept, all.data(), dtype, narrow.data(), std::ssize(narrow) / size_of(dtype));
          std::ranges::copy(back.host(), std::back_inserter(narrow));
          return narrow;
        });
      }
    }
  }
}

TEST_F(CudaDevice, JoinsGroupsOfAnyNumberOfColumns) {
  for (const DType dtype : kDTypes) {
    for (const std::int64_t columns : {1, 63, 64, 65, 190, 576, 2049}) {
      for (const std::int64_t rows : {1, 5}) {
        same([&](Device& device) {
          const std::int64_t all = round_up(columns, kGroup) * rows;
          const Memory in(device, in_dtype(with_specials(all, 3), dtype));
          const Memory out(device, rows * columns * size_of(dtype));
          device.ungroup(in.data(), dtype, rows, columns, out.data());
          return out.host();
        });
      }
    }
  }
}

/// The roots of ranks that own `runs` of `blocks` blocks, added up.
struct Sum {
  std::int64_t blocks;
  std::int64_t ranks;
  std::int64_t rows;
  std::int64_t columns;
  bool bias;
};

Bytes sum_on(Device& device, const Sum& sum, DType dtype, Values* some) {
  std::vector<Range> runs;
  for (std::int64_t r = 0; r < sum.ranks; ++r) {
    runs.push_back(owned_blocks(sum.blocks, sum.ranks, r));
  }
  const MergePlan plan = SumTree({sum.blocks, sum.blocks}).global_plan(runs);
  const std::int64_t groups = ceil_div(sum.columns, kGroup);
  const std::int64_t each = groups * sum.rows * kGroup;
  const auto count = std::ssize(plan.merges);
  const Memory values(device, raw(some(each * count, 7)));
  const Memory bias(device, raw(some(sum.columns, 8)));
  std::vector<const float*> roots;
  for (std::int64_t i = 0; i < count; ++i) roots.push_back(values.floats() + i * each);
  const Memory out(device, sum.rows * sum.columns * size_of(dtype));
  device.sum_roots({.roots = roots,
                    .plan = &plan,
                    .groups = groups,
                    .rows = sum.rows,
                    .row_stride = kGroup,
                    .group_stride = sum.rows * kGroup,
                    .bias = sum.bias ? bias.floats() : nullptr,
                    .columns = sum.columns,
                    .dtype = dtype,
                    .out = out.data(),
                    .out_row_stride = sum.columns,
                    .out_group_stride = kGroup});
  return out.host();
}

TEST_F(CudaDevice, AddsRootsInTheOrderOfTheTree) {
  const Sum sums[] = {{1, 1, 3, 64, false},     {8, 2, 3, 65, true},       {8, 3, 2, 576, true},
                      {8, 5, 2, 1000, false},   {8, 8, 65, 100, true},     {13, 7, 3, 63, true},
                      {64, 60, 2, 70, true},    {1000, 999, 1, 9, true},   {31, 31, 1, 2048, false},
                      {257, 129, 1, 64, false}, {65535, 2, 1, 2048, false}};
  for (const Sum& sum : sums) {
    for (const DType dtype : kDTypes) {
      SCOPED_TRACE(std::to_string(sum.blocks) + " blocks of " + std::to_string(sum.ranks));
      for (Values* some : {fractions, with_specials})
        same([&](Device& device) { return sum_on(device, sum, dtype, some); });
    }
  }
}

TEST_F(CudaDevice, RefusesMoreRootsThanAKernelsArgumentsHold) {
  try {
    sum_on(*cuda_, {1025, 1025, 1, 1, false}, DType::kF32, fractions);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("1025 roots"));
  }
}

/// Pins what the device's own library chooses.
void pin(Device& device, const WeightShape& shape, DType storage) {
  device.pin_gemms({&shape, 1}, storage, device.choose_gemms({&shape, 1}, storage));
}

struct Layer {
  WeightShape shape;
  std::int64_t rows;
  GemmKernel kernel;
  DType dtype;
  Activation activation;
  bool bias;
  Values* values;
};

/// h of one block and then a weight's columns of it merged onto a stack of three.
Bytes layer_on(Device& device, const Layer& layer) {
  const WeightShape& up_shape = layer.shape;
  const WeightShape down_shape{up_shape.inputs, up_shape.outputs, false};
  const DType kept = device.storage(layer.dtype);
  const std::int64_t rows = layer.rows;
  const bool whole = layer.kernel == GemmKernel::kLibraryWhole;
  const std::int64_t height = whole ? rows : tile_rows(rows, device.tile_heights());
  const auto weight_of = [&](const WeightShape& shape, std::uint32_t seed) {
    Weight weight = device.allocate_weight(shape, layer.dtype, layer.kernel);
    const Bytes model = in_dtype(layer.values(shape.rows() * shape.inputs, seed), layer.dtype);
    for (std::int64_t first = 0; first < shape.rows(); first += 37) {
      const std::int64_t n = std::min<std::int64_t>(37, shape.rows() - first) * shape.inputs;
      Bytes host(as_size(n * size_of(kept)));
      convert(layer.dtype, model.data() + first * shape.inputs * size_of(layer.dtype), kept,
              host.data(), n);
      device.store_rows(weight, first, n / shape.inputs, host.data());
    }
    if (layer.kernel == GemmKernel::kLibraryTiles) pin(device, shape, kept);
    device.prepare(shape, kept, layer.kernel, height);
    return weight;
  };
  const Weight up = weight_of(up_shape, 1);
  const Weight down = weight_of(down_shape, 2);
  Tiles x{nullptr, rows, height, up_shape.padded_inputs()};
  Tiles h{nullptr, rows, height, up_shape.padded_outputs()};
  const Memory x_memory(device, x.padded_rows() * x.width * size_of(kept));
  const Memory h_memory(device, h.padded_rows() * h.width * size_of(kept));
  x.data = x_memory.data();
  h.data = h_memory.data();
  const Memory tokens(device, in_dtype(layer.values(rows * up_shape.inputs, 3), layer.dtype));
  const Memory bias(device, raw(layer.values(up_shape.groups() * kGroup, 4)));
  device.tile_rows({.data = tokens.data(), .stride = up_shape.inputs}, layer.dtype, up_shape.inputs,
                   x);
  device.gemm_activation(up, layer.bias ? bias.floats() : nullptr, layer.activation, layer.dtype, x,
                         h);
  const Memory hidden(device, rows * h.width * size_of(layer.dtype));
  device.untile_rows(h, layer.dtype, h.width, hidden.data(), h.width);

  const std::int64_t groups = down_shape.groups();
  const std::int64_t slot = groups * rows * kGroup;
  const Memory stack(device, raw(layer.values(3 * slot, 5)));
  const Partials partials{stack.floats(),
                          rows,
                          groups,
                          whole ? groups * kGroup : kGroup,
                          whole ? kGroup : rows * kGroup,
                          slot};
  device.gemm_merge(down, h, partials, whole ? 0 : 2, 0);
  if (!whole) device.gemm_merge(down, h, partials, 3, 2);
  Bytes all = hidden.host();
  std::ranges::copy(stack.host(), std::back_inserter(all));
  // Which NaN a sum has is open until its rounding.
  for (std::size_t i = all.size() - stack.host().size(); i < all.size(); i += 4) {
    float value = 0;
    std::memcpy(&value, &all[i], 4);
    value = canonical_nan(value);
    std::memcpy(&all[i], &value, 4);
  }
  return all;
}

TEST_F(CudaDevice, PlainKernelHasTheBitsOfTheCpusForEveryActivation) {
  for (const ActivationKind kind :
       {ActivationKind::kIdentity, ActivationKind::kRelu, ActivationKind::kRelu2,
        ActivationKind::kSilu, ActivationKind::kGeluExact, ActivationKind::kGeluTanh,
        ActivationKind::kQuickGelu, ActivationKind::kClampedSwiglu}) {
    for (const bool gated : {true, false}) {
      for (const DType dtype : kDTypes) {
        SCOPED_TRACE(std::to_string(static_cast<int>(kind)) + (gated ? " gated " : " ") +
                     std::string(name_of(dtype)));
        same([&](Device& device) {
          return layer_on(device, {{40, 20, gated},
                                   5,
                                   GemmKernel::kPlain,
                                   dtype,
                                   {.kind = kind, .gated = gated},
                                   gated,
                                   with_specials});
        });
      }
    }
  }
}

TEST_F(CudaDevice, PlainKernelHasTheBitsOfTheCpusForEveryShape) {
  const WeightShape shapes[] = {{1, 1, true},     {31, 64, true}, {33, 7, true},
                                {200, 130, true}, {5, 33, false}, {65, 128, false}};
  for (const WeightShape& shape : shapes) {
    for (const std::int64_t rows : {1, 64, 300}) {  // 64 fill a tile
      if (rows > 1 && shape.outputs > 65) continue;
      SCOPED_TRACE(std::to_string(shape.outputs) + "x" + std::to_string(shape.inputs) + ", " +
                   std::to_string(rows) + " rows");
      same([&](Device& device) {
        return layer_on(device, {shape,
                                 rows,
                                 GemmKernel::kPlain,
                                 DType::kBf16,
                                 {.gated = shape.gated},
                                 true,
                                 fractions});
      });
    }
  }
}

TEST_F(CudaDevice, LibrarysProductsOfIntegersAreTheCpus) {
  for (const GemmKernel kernel : {GemmKernel::kLibraryTiles, GemmKernel::kLibraryWhole}) {
    for (const DType dtype : kDTypes) {
      for (const std::int64_t rows : {1, 17, 70, 1100}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + ", " + std::to_string(rows) + " rows");
        Layer layer{
            {40, 33, true}, rows,    kernel, dtype, {.kind = ActivationKind::kRelu, .gated = true},
            true,           integers};
        // The CPU's library may have no such kernel; its plain one is as exact.
        const Bytes found = layer_on(*cuda_, layer);
        if (kernel == GemmKernel::kLibraryTiles) layer.kernel = GemmKernel::kPlain;
        EXPECT_EQ(found, layer_on(*cpu_, layer));
      }
    }
  }
}

TEST_F(CudaDevice, SelfCheckPassesWithTheSameFingerprintTwice) {
  for (const DType dtype : kDTypes) {
    pin(*cuda_, {64, 192, true}, dtype);
    const SelfCheck first = cuda_->self_check({64, 192, true}, dtype);
    EXPECT_TRUE(first.rows);
    EXPECT_TRUE(first.columns);
    EXPECT_THAT(first.kernel, ::testing::HasSubstr("cuBLASLt algorithm"));
    EXPECT_EQ(cuda_->self_check({64, 192, true}, dtype).fingerprint, first.fingerprint);
  }
}

TEST_F(CudaDevice, RunsAnotherRanksChoice) {
  setenv("GATEFOLD_FAKE_GPU_GEMM_RANKING", "1", 1);
  const auto rank_0 = make_cuda_device(0);
  const WeightShape shape{64, 192, true};
  const Bytes choices = rank_0->choose_gemms({&shape, 1}, DType::kBf16);
  unsetenv("GATEFOLD_FAKE_GPU_GEMM_RANKING");
  rank_0->pin_gemms({&shape, 1}, DType::kBf16, choices);
  cuda_->pin_gemms({&shape, 1}, DType::kBf16, choices);
  const SelfCheck expected = rank_0->self_check(shape, DType::kBf16);
  const SelfCheck found = cuda_->self_check(shape, DType::kBf16);
  EXPECT_EQ(found.fingerprint, expected.fingerprint);
  EXPECT_EQ(found.kernel, expected.kernel);
  EXPECT_EQ(cuda_->choose_gemms({&shape, 1}, DType::kBf16), choices);
}

TEST_F(CudaDevice, RunsNoTilesThatNobodyAgreedOn) {
  try {
    cuda_->prepare({64, 64, false}, DType::kBf16, GemmKernel::kLibraryTiles, 64);
    FAIL() << "prepared";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kBackend);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("64 x 64 x 64"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("call choose_kernel()"));
  }
  EXPECT_THROW(cuda_->self_check({64, 64, false}, DType::kBf16), Error);
}

TEST_F(CudaDevice, RefusesChoicesOfAnotherSize) {
  const WeightShape shape{64, 64, false};
  Bytes choices = cuda_->choose_gemms({&shape, 1}, DType::kBf16);
  choices.pop_back();
  EXPECT_THROW(cuda_->pin_gemms({&shape, 1}, DType::kBf16, choices), Error);
}

TEST_F(CudaDevice, MultipliesF32WithoutTf32) {
  // Odd numbers of 24 bits times one: TF32 would keep 11 of them.
  const auto odd = [](std::int64_t n, std::uint32_t seed) {
    std::vector<float> values(as_size(n), 0.0F);
    if (seed == 1) std::ranges::fill(values, 1.0F);
    if (seed != 3) return values;
    for (float& value : values) value = static_cast<float>(0x800001U + step(seed) % 0x3fffffU * 2U);
    return values;
  };
  Layer layer{{33, 1, false},
              5,
              GemmKernel::kLibraryTiles,
              DType::kF32,
              {.kind = ActivationKind::kIdentity, .gated = false},
              false,
              odd};
  const Bytes tiles = layer_on(*cuda_, layer);
  layer.kernel = GemmKernel::kLibraryWhole;
  const Bytes whole = layer_on(*cuda_, layer);
  layer.kernel = GemmKernel::kPlain;
  const Bytes expected = layer_on(*cpu_, layer);
  EXPECT_EQ(tiles, expected);
  const std::size_t hidden = as_size(5 * 64 * 4);
  EXPECT_TRUE(
      std::ranges::equal(std::span(whole).first(hidden), std::span(expected).first(hidden)));
}

TEST_F(CudaDevice, FillsWithAnyByte) {
  for (const std::byte value : {std::byte{0}, std::byte{0xff}, std::byte{7}}) {
    const Memory memory(*cuda_, Bytes(1000, std::byte{1}));
    cuda_->fill(memory.data() + 3, value, 990);
    Bytes expected(1000, value);
    std::fill_n(expected.begin(), 3, std::byte{1});
    std::fill(expected.begin() + 993, expected.end(), std::byte{1});
    EXPECT_EQ(memory.host(), expected);
  }
}

TEST_F(CudaDevice, TakesCallsFromAThreadThatHasAnotherGpu) {
  const auto second = make_cuda_device(1);  // where there are two
  const Layer layer{{40, 33, true},
                    70,
                    GemmKernel::kLibraryTiles,
                    DType::kBf16,
                    {.kind = ActivationKind::kRelu, .gated = true},
                    true,
                    integers};
  const Bytes expected = layer_on(*second, layer);
  Bytes found;
  std::thread([&] { found = layer_on(*second, layer); }).join();
  EXPECT_EQ(found, expected);
  // And this thread, whose GPU is now the second, may still use the first.
  EXPECT_EQ(layer_on(*cuda_, layer), expected);
}

TEST_F(CudaDevice, WaitsForACopyToPinnedMemory) {
  const Bytes values = raw(integers(1000, 1));
  const Memory memory(*cuda_, values);
  const Buffer host = cuda_->allocate_host(std::ssize(values));
  std::fill_n(host.data(), host.bytes(), std::byte{0});
  cuda_->start_download(host.data(), memory.data(), host.bytes());
  cuda_->synchronize();
  EXPECT_EQ(values, Bytes(host.data(), host.data() + host.bytes()));
}

TEST_F(CudaDevice, SaysHowMuchMemoryThereIsWhereItIsNotEnough) {
  try {
    static_cast<void>(cuda_->allocate(std::int64_t{1} << 50));
    FAIL() << "allocated";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kOutOfMemory);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("1125899906842624 bytes of GPU memory"));
  }
  // And goes on as if nothing had been.
  const Memory memory(*cuda_, Bytes(3, std::byte{7}));
  EXPECT_EQ(memory.host(), Bytes(3, std::byte{7}));
}

}  // namespace
}  // namespace gatefold
