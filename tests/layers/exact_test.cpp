// The one idea: bits never depend on ranks. Every tp and dp split of this world, every thread
// count, gives the bits of a world of one.
#include <gtest/gtest.h>
#include <mpi.h>

#include <limits>

#include "layers/mlp.h"
#include "memory_source.h"
#include "parallel/grid.h"
#include "parallel/mpi_interop.h"

namespace gatefold {
namespace {

using testing::as_floats;
using testing::FfnShape;
using testing::in_dtype;
using testing::MemoryFfn;
using testing::noise;

struct Case {
  FfnShape shape;
  DType dtype;
};

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

std::vector<std::byte> forward(Mlp& mlp, const std::vector<std::byte>& x, const RowCount& rows,
                               std::int64_t row_bytes) {
  std::vector<std::byte> y(static_cast<std::size_t>(rows.local * row_bytes), std::byte{0xab});
  mlp.forward(x.data(), rows, y.data());
  return y;
}

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

TEST_P(Exact, EverySplitGivesTheBitsOfOneRank) {
  const auto [shape, dtype] = GetParam();
  const MemoryFfn ffn(shape);
  const std::int64_t row_bytes = shape.hidden * size_of(dtype);
  const auto alone = make_self_communicator();
  const auto one_thread = make_cpu_device(1);
  Mlp reference(ffn.spec, ffn.source, {one_thread.get(), alone.get()}, options_for(dtype));

  for (std::int64_t tp = 1; tp <= world_->size(); ++tp) {
    if (world_->size() % tp != 0) continue;
    const Grid grid(*world_, tp);
    for (const int threads : {1, 2}) {
      const auto device = make_cpu_device(threads);
      Mlp mlp(ffn.spec, ffn.source, {device.get(), &grid.tp()}, options_for(dtype));
      for (const std::int64_t tokens : {1, 3, 17, 64, 257}) {
        const std::vector<std::byte> x = in_dtype(batch(tokens, shape.hidden), dtype);
        const std::vector<std::byte> expected = forward(reference, x, {tokens, tokens}, row_bytes);
        // An even split, and one where the first group has nearly everything.
        std::vector<std::int64_t> skewed(static_cast<std::size_t>(grid.dp_size()), 0);
        skewed.front() = tokens - (grid.dp_size() > 1 ? 1 : 0);
        skewed.back() += grid.dp_size() > 1 ? 1 : 0;
        for (const auto& split : {std::vector<std::int64_t>{}, skewed}) {
          const Range own = split_tokens(tokens, grid.dp_size(),
                                         split)[static_cast<std::size_t>(grid.dp_index())];
          const auto y = forward(mlp, rows_of(x, own, row_bytes), {own.size(), tokens}, row_bytes);
          EXPECT_TRUE(y == rows_of(expected, own, row_bytes))
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
                      Case{{64, 100}, DType::kBf16}, Case{{64, 100}, DType::kF32},
                      Case{{64, 6}, DType::kBf16}, Case{{64, 6}, DType::kF32},
                      Case{{96, 100, false, true}, DType::kBf16},
                      Case{{80, 200, true, true}, DType::kF16}),
    case_name);

TEST(ExactRows, PermutedTokensPermuteTheOutputAndAChangedOneChangesNoOther) {
  const std::int64_t hidden = 64;
  const std::int64_t tokens = 37;
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  const auto device = make_cpu_device(1);
  const MemoryFfn ffn({hidden, 200});
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    Mlp mlp(ffn.spec, ffn.source, {device.get(), world.get()}, options_for(dtype));
    const std::int64_t row_bytes = hidden * size_of(dtype);
    const auto x = in_dtype(noise(tokens * hidden, 5, 1.0F), dtype);
    const auto y = forward(mlp, x, {tokens, tokens}, row_bytes);

    std::vector<std::byte> turned = x;
    std::rotate(turned.begin(), turned.begin() + 11 * row_bytes, turned.end());
    std::vector<std::byte> expected = y;
    std::rotate(expected.begin(), expected.begin() + 11 * row_bytes, expected.end());
    EXPECT_TRUE(forward(mlp, turned, {tokens, tokens}, row_bytes) == expected);

    std::vector<std::byte> changed = x;
    std::fill_n(changed.begin() + 20 * row_bytes, row_bytes, std::byte{0});
    const auto y_changed = forward(mlp, changed, {tokens, tokens}, row_bytes);
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
  const auto device = make_cpu_device(1);
  const MemoryFfn ffn({576, 1536});
  const auto x = in_dtype(noise(64 * 576, 5, 1.7F), DType::kF32);
  Mlp four(ffn.spec, ffn.source, {device.get(), world.get()}, options_for(DType::kF32, 4));
  Mlp eight(ffn.spec, ffn.source, {device.get(), world.get()}, options_for(DType::kF32, 8));
  EXPECT_FALSE(forward(four, x, {64, 64}, 576 * 4) == forward(eight, x, {64, 64}, 576 * 4));
}

TEST(ExactRows, ScatteredRowsAreTheReplicatedOnesCut) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  const auto device = make_cpu_device(1);
  const MemoryFfn ffn({128, 200, true, true});
  for (const std::int64_t tokens : {1, 3, 65}) {
    const auto x = in_dtype(noise(tokens * 128, 5, 1.7F), DType::kBf16);
    MlpOptions options = options_for(DType::kBf16);
    Mlp replicated(ffn.spec, ffn.source, {device.get(), world.get()}, options);
    options.input_rows = Rows::kScattered;
    options.output_rows = Rows::kScattered;
    Mlp scattered(ffn.spec, ffn.source, {device.get(), world.get()}, options);
    const Range own = even_part(tokens, world->size(), world->rank());
    const auto all = forward(replicated, x, {tokens, tokens}, 256);
    std::vector<std::byte> y(static_cast<std::size_t>(own.size() * 256));
    scattered.forward(rows_of(x, own, 256).data(), {tokens, tokens}, y.data());
    EXPECT_TRUE(y == rows_of(all, own, 256)) << tokens << " tokens";
  }
}

TEST(ExactRows, FastModeIsCloseToExact) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  const auto device = make_cpu_device(1);
  const MemoryFfn ffn({128, 200, true, true});
  for (const std::int64_t tokens : {1, 40}) {
    const auto x = in_dtype(noise(tokens * 128, 5, 1.7F), DType::kF32);
    MlpOptions options = options_for(DType::kF32);
    Mlp exact(ffn.spec, ffn.source, {device.get(), world.get()}, options);
    options.linear.reduce = Reduce::kFast;
    Mlp fast(ffn.spec, ffn.source, {device.get(), world.get()}, options);
    const auto a = as_floats(forward(exact, x, {tokens, tokens}, 512), DType::kF32);
    const auto b = as_floats(forward(fast, x, {tokens, tokens}, 512), DType::kF32);
    for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 2e-6) << i;
  }
}

}  // namespace
}  // namespace gatefold
