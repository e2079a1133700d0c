// The one idea: bits never depend on ranks. Every tp and dp split of this world, every thread
// count of a CPU, gives the bits of a world of one on the same kind of device.
#include <gtest/gtest.h>
#include <mpi.h>

#include <array>
#include <limits>
#include <map>
#include <memory>

#include "from_rank_0.h"
#include "layers/mlp.h"
#include "memory_source.h"
#include "parallel/grid.h"
#include "parallel/mpi_interop.h"
#include "tests/testing_device.h"

namespace gatefold {
namespace {

using testing::as_floats;
using testing::DeviceGroup;
using testing::FfnShape;
using testing::from_rank_0;
using testing::in_dtype;
using testing::is_rank_0;
using testing::MemoryFfn;
using testing::noise;
using testing::on_stand_in;
using testing::OnDevice;
using testing::testing_device;

struct Case {
  FfnShape shape;
  DType dtype;
};

constexpr std::array<std::int64_t, 6> kTokens = {0, 1, 3, 17, 64, 257};
/// Elements of a weight that a stand-in multiplies in seconds.
constexpr std::int64_t kMostOnStandIn = std::int64_t{200} * 1000;

/// Of a CPU device; a GPU has none.
std::vector<int> thread_counts() {
  return testing::on_cuda() ? std::vector<int>{1} : std::vector<int>{1, 2};
}

MlpOptions options_for(DType dtype, std::int64_t blocks = 8) {
  MlpOptions options;
  options.linear.dtype = dtype;
  options.linear.blocks = blocks;
  return options;
}

/// Rows that could leak into others: NaN and infinity.
std::vector<float> batch(std::int64_t tokens, std::int64_t hidden) {
  std::vector<float> x = noise(tokens * hidden, 77, 1.7F);
  if (tokens > 2) {
    x[static_cast<std::size_t>(hidden + hidden / 2)] = std::numeric_limits<float>::quiet_NaN();
    x[static_cast<std::size_t>(2 * hidden)] = std::numeric_limits<float>::infinity();
  }
  return x;
}

/// A layer of a group, on a device of its own.
class Layer {
 public:
  Layer(const MemoryFfn& ffn, Communicator& tp, const MlpOptions& options, int threads = 1)
      : device_(testing_device(threads)),
        tp_(tp, *device_),
        mlp_(ffn.spec, ffn.source, {device_.get(), tp_.get()}, options) {}

  /// y has as many rows as x, whether scattered or not.
  std::vector<std::byte> forward(const std::vector<std::byte>& x, const RowCount& rows) {
    OnDevice<std::byte> in(*device_, x);
    OnDevice<std::byte> out(*device_, std::vector<std::byte>(x.size(), std::byte{0xab}));
    mlp_.forward(in.data(), rows, out.data());
    return out.get();
  }

 private:
  std::unique_ptr<Device> device_;
  DeviceGroup tp_;
  Mlp mlp_;
};

std::vector<std::byte> rows_of(const std::vector<std::byte>& x, Range rows,
                               std::int64_t row_bytes) {
  return {x.begin() + rows.begin * row_bytes, x.begin() + rows.end * row_bytes};
}

class Exact : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { world_ = make_mpi_communicator(MPI_COMM_WORLD); }
  std::unique_ptr<Communicator> world_;
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const FfnShape& s = info.param.shape;
  return std::to_string(s.hidden) + "x" + std::to_string(s.intermediate) + "_" +
         std::string(name_of(info.param.dtype)) + (s.gated ? "" : "_plain") +
         (s.bias ? "_bias" : "");
}

/// An even split of tokens over groups, and one where the first group has nearly everything.
std::vector<std::vector<std::int64_t>> token_splits(std::int64_t tokens, std::int64_t groups) {
  std::vector<std::int64_t> skewed(static_cast<std::size_t>(groups), 0);
  const std::int64_t last = groups > 1 && tokens > 0 ? 1 : 0;
  skewed.front() = tokens - last;
  skewed.back() += last;
  return {{}, skewed};
}

TEST_P(Exact, EverySplitGivesTheBitsOfOneRank) {
  const auto [shape, dtype] = GetParam();
  if (shape.hidden * shape.intermediate > kMostOnStandIn && on_stand_in(*testing_device())) {
    GTEST_SKIP() << "a stand-in for a GPU takes minutes";
  }
  const MemoryFfn ffn(shape);
  const std::int64_t row_bytes = shape.hidden * size_of(dtype);
  const auto alone = make_self_communicator();
  std::unique_ptr<Layer> reference;
  if (is_rank_0()) reference = std::make_unique<Layer>(ffn, *alone, options_for(dtype));
  std::map<std::int64_t, std::vector<std::byte>> expected;  // of so many tokens
  for (const std::int64_t tokens : kTokens) {
    std::vector<std::byte>& y = expected[tokens];
    if (is_rank_0()) {
      y = reference->forward(in_dtype(batch(tokens, shape.hidden), dtype), {tokens, tokens});
    }
    from_rank_0(y);
  }

  for (std::int64_t tp = 1; tp <= world_->size(); ++tp) {
    if (world_->size() % tp != 0) continue;
    const Grid grid(*world_, tp);
    for (const int threads : thread_counts()) {
      Layer layer(ffn, grid.tp(), options_for(dtype), threads);
      for (const std::int64_t tokens : kTokens) {
        const std::vector<std::byte> x = in_dtype(batch(tokens, shape.hidden), dtype);
        for (const auto& split : token_splits(tokens, grid.dp_size())) {
          const Range own = split_tokens(tokens, grid.dp_size(),
                                         split)[static_cast<std::size_t>(grid.dp_index())];
          const auto y = layer.forward(rows_of(x, own, row_bytes), {own.size(), tokens});
          EXPECT_TRUE(y == rows_of(expected[tokens], own, row_bytes))
              << "tp " << tp << ", dp " << grid.dp_size() << ", threads " << threads << ", tokens "
              << tokens << (split.empty() ? ", even" : ", skewed");
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Exact,
    ::testing::Values(Case{{1024, 3072}, DType::kBf16}, Case{{1024, 3072}, DType::kF32},
                      Case{{576, 1536}, DType::kBf16}, Case{{576, 1536}, DType::kF32},
                      Case{{320, 600}, DType::kBf16}, Case{{320, 600}, DType::kF16},
                      Case{{64, 100}, DType::kBf16}, Case{{64, 100}, DType::kF32},
                      Case{{64, 6}, DType::kBf16}, Case{{64, 6}, DType::kF32},
                      Case{{96, 100, false, true}, DType::kBf16},
                      Case{{80, 200, true, true}, DType::kF16}),
    case_name);

TEST(ExactRows, PermutedTokensPermuteTheOutputAndAChangedOneChangesNoOther) {
  const std::int64_t hidden = 64;
  const std::int64_t tokens = 37;
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  const MemoryFfn ffn({hidden, 200});
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    Layer layer(ffn, *world, options_for(dtype));
    const std::int64_t row_bytes = hidden * size_of(dtype);
    const auto x = in_dtype(noise(tokens * hidden, 5, 1.0F), dtype);
    const auto y = layer.forward(x, {tokens, tokens});

    std::vector<std::byte> turned = x;
    std::rotate(turned.begin(), turned.begin() + 11 * row_bytes, turned.end());
    std::vector<std::byte> expected = y;
    std::rotate(expected.begin(), expected.begin() + 11 * row_bytes, expected.end());
    EXPECT_TRUE(layer.forward(turned, {tokens, tokens}) == expected);

    std::vector<std::byte> changed = x;
    std::fill_n(changed.begin() + 20 * row_bytes, row_bytes, std::byte{0});
    const auto y_changed = layer.forward(changed, {tokens, tokens});
    for (std::int64_t t = 0; t < tokens; ++t) {
      EXPECT_EQ(rows_of(y, {t, t + 1}, row_bytes) == rows_of(y_changed, {t, t + 1}, row_bytes),
                t != 20)
          << "row " << t;
    }
  }
}

TEST(ExactRows, FourAndEightBlocksDifferInSomeBit) {
  // Otherwise the tree isn't there, and equal bits prove nothing.
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  if (world->size() > 4) return;
  const MemoryFfn ffn({320, 600});
  const auto x = in_dtype(noise(64 * 320, 5, 1.7F), DType::kF32);
  Layer four(ffn, *world, options_for(DType::kF32, 4));
  Layer eight(ffn, *world, options_for(DType::kF32, 8));
  EXPECT_FALSE(four.forward(x, {64, 64}) == eight.forward(x, {64, 64}));
}

TEST(ExactRows, ScatteredRowsAreTheReplicatedOnesCut) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  const MemoryFfn ffn({128, 200, true, true});
  for (const std::int64_t tokens : {1, 3, 65}) {
    const auto x = in_dtype(noise(tokens * 128, 5, 1.7F), DType::kBf16);
    MlpOptions options = options_for(DType::kBf16);
    Layer replicated(ffn, *world, options);
    options.input_rows = Rows::kScattered;
    options.output_rows = Rows::kScattered;
    Layer scattered(ffn, *world, options);
    const Range own = even_part(tokens, world->size(), world->rank());
    const auto all = replicated.forward(x, {tokens, tokens});
    EXPECT_TRUE(scattered.forward(rows_of(x, own, 256), {tokens, tokens}) == rows_of(all, own, 256))
        << tokens << " tokens";
  }
}

TEST(ExactRows, FastModeIsCloseToExact) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  const MemoryFfn ffn({128, 200, true, true});
  for (const std::int64_t tokens : {1, 40}) {
    const auto x = in_dtype(noise(tokens * 128, 5, 1.7F), DType::kF32);
    MlpOptions options = options_for(DType::kF32);
    Layer exact(ffn, *world, options);
    options.linear.reduce = Reduce::kFast;
    Layer fast(ffn, *world, options);
    const auto a = as_floats(exact.forward(x, {tokens, tokens}), DType::kF32);
    const auto b = as_floats(fast.forward(x, {tokens, tokens}), DType::kF32);
    for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 2e-6) << i;
  }
}

}  // namespace
}  // namespace gatefold
