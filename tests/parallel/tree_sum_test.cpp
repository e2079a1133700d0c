// The sum over ranks against the tree evaluated in one place: the same bits for every number of
// ranks, or the order has changed on the way.
#include "parallel/tree_sum.h"

#include <gmock/gmock.h>
#include <mpi.h>

#include <bit>
#include <optional>
#include <vector>

#include "parallel/mpi_interop.h"
#include "runtime/tensor_source.h"
#include "tests/runtime/counting_device.h"

namespace gatefold {
namespace {

constexpr std::byte kPoison{0xff};  // NaN in every element type
constexpr std::int64_t kGuard = 64;
constexpr std::int64_t kNever = 0;  // bytes of a sum in one shot

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// Block b's partial sum at (row, column): fractions of three magnitudes, whose sums depend on
/// their order; every fourth column has large values that cancel among them.
float partial(std::int64_t block, std::int64_t row, std::int64_t column) {
  const std::int64_t kind = (block + row + column) % 5;
  if (column % 4 == 3 && kind < 2) return kind == 0 ? 1e8F : -1e8F;
  auto hash = static_cast<std::uint32_t>(block * 7919 + row * 104729 + column * 1299709 + 1);
  hash = (hash ^ (hash >> 15)) * 0x2c1b3c6dU;
  hash = (hash ^ (hash >> 12)) * 0x297a2d39U;
  const auto fraction = static_cast<float>(hash >> 8) * 0x1p-23F - 1.0F;
  return kind == 2 ? 1e-3F * fraction : kind == 3 ? 1e3F * fraction : fraction;
}

float bias_at(std::int64_t column) { return 0.3F + static_cast<float>(column); }

/// The tree by its definition; nothing where the node has no block with columns.
std::optional<float> by_definition(const Blocks& blocks, std::int64_t first, std::int64_t width,
                                   std::int64_t row, std::int64_t column) {
  if (first >= blocks.count) return std::nullopt;
  if (width == 1) {
    if (blocks.columns(first).empty()) return std::nullopt;
    return partial(first, row, column);
  }
  const auto lower = by_definition(blocks, first, width / 2, row, column);
  const auto upper = by_definition(blocks, first + width / 2, width / 2, row, column);
  if (lower && upper) return *lower + *upper;
  return lower ? lower : upper;
}

struct Problem {
  Blocks blocks;
  std::int64_t rows;
  std::int64_t columns;
  bool bias;
  DType dtype;
  Rows where;
};

/// This rank's roots, by its local plan, in slots of [groups][rows][64]; padding columns are NaN.
struct OwnRoots {
  std::vector<float> memory;
  Partials partials;
};

OwnRoots own_roots(const SumTree& tree, Range run, std::int64_t rows, std::int64_t columns) {
  const std::int64_t groups = ceil_div(columns, kGroup);
  const MergePlan plan = tree.local_plan(run);
  const std::vector<std::int64_t> leaves = tree.leaves(run);
  OwnRoots own;
  own.partials = {nullptr, rows, groups, kGroup, rows * kGroup, groups * rows * kGroup};
  own.memory.assign(as_size(std::max(1, plan.roots) * own.partials.slot_stride),
                    std::numeric_limits<float>::quiet_NaN());
  own.partials.data = own.memory.data();
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      std::vector<float> stack;
      for (std::size_t i = 0; i < leaves.size(); ++i) {
        stack.push_back(partial(leaves[i], row, column));
        for (int m = 0; m < plan.merges[i]; ++m) {
          const float upper = stack.back();
          stack.pop_back();
          stack.back() = stack.back() + upper;
        }
      }
      for (std::size_t root = 0; root < stack.size(); ++root) {
        own.partials.at(static_cast<std::int64_t>(root),
                        column / kGroup)[row * kGroup + column % kGroup] = stack[root];
      }
    }
  }
  return own;
}

/// What a rank should get: `rows` of the whole sum in `dtype`.
std::vector<std::byte> expected_rows(const Problem& p, Range rows) {
  std::vector<float> values;
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    for (std::int64_t column = 0; column < p.columns; ++column) {
      const float sum = by_definition(p.blocks, 0, 16, row, column).value_or(0.0F);
      values.push_back(p.bias ? sum + bias_at(column) : sum);
    }
  }
  const auto n = static_cast<std::int64_t>(values.size());
  std::vector<std::byte> bytes(as_size(n * size_of(p.dtype)));
  convert(DType::kF32, reinterpret_cast<const std::byte*>(values.data()), p.dtype, bytes.data(), n);
  return bytes;
}

std::vector<Range> runs_of(std::int64_t blocks, int ranks) {
  std::vector<Range> runs;
  for (int r = 0; r < ranks; ++r) runs.push_back(owned_blocks(blocks, ranks, r));
  return runs;
}

void expect_the_trees_bits(Communicator& tp, Device& device, TreeSum& sum, const Problem& p) {
  const SumTree tree(p.blocks);
  const Range run = owned_blocks(p.blocks.count, tp.size(), tp.rank());
  const OwnRoots own = own_roots(tree, run, p.rows, p.columns);
  const Range rows =
      p.where == Rows::kScattered ? even_part(p.rows, tp.size(), tp.rank()) : Range{0, p.rows};
  std::vector<float> bias;
  for (std::int64_t c = 0; c < p.columns; ++c) bias.push_back(bias_at(c));
  std::vector<std::byte> expected = expected_rows(p, rows);
  std::vector<std::byte> out(expected.size() + as_size(kGuard), kPoison);
  expected.resize(out.size(), kPoison);
  sum.sum(own.partials, p.bias ? bias.data() : nullptr, p.dtype, p.where, out.data());
  device.synchronize();
  EXPECT_TRUE(out == expected) << "tp " << tp.size() << ", " << p.blocks.count << " blocks of "
                               << p.blocks.width << ", " << p.rows << "x" << p.columns << " "
                               << name_of(p.dtype) << (p.bias ? ", bias" : "")
                               << (p.where == Rows::kScattered ? ", scattered" : "");
}

class TreeSumTest : public ::testing::Test {
 protected:
  void SetUp() override { world_ = make_mpi_communicator(MPI_COMM_WORLD); }
  /// The first `tp` ranks as a group; the others get one that they leave alone.
  std::unique_ptr<Communicator> first_ranks(int tp) const {
    return world_->split(world_->rank() < tp ? 0 : 1);
  }
  bool takes_part(int tp) const { return world_->rank() < tp; }

  std::unique_ptr<Communicator> world_;
};

TEST_F(TreeSumTest, HasTheBitsOfOneRankForEveryGroupBlockCountAndShape) {
  for (int tp = 1; tp <= world_->size(); ++tp) {
    const auto group = first_ranks(tp);
    if (!takes_part(tp)) continue;
    const auto device = make_cpu_device(1);
    for (std::int64_t count = tp; count <= 9; ++count) {
      for (const std::int64_t width : {count / 2 + 1, 100 * count}) {  // with empty blocks, without
        const Blocks blocks{width, count};
        for (const std::int64_t columns : {1, 64, 100, 200}) {
          TreeSum one_shot(*group, *device, SumTree(blocks), runs_of(count, tp), columns);
          TreeSum halves(*group, *device, SumTree(blocks), runs_of(count, tp), columns, kNever);
          for (const std::int64_t rows : {0, 1, 3, 17}) {
            // Not every combination: each pair of values occurs.
            const bool bias = (count + rows + columns / 50) % 2 == 0;
            const DType dtype =
                std::vector{DType::kF32, DType::kBf16, DType::kF16}[as_size((count + rows) % 3)];
            for (TreeSum* sum : {&one_shot, &halves}) {
              sum->reserve(rows, dtype);
              for (const Rows where : {Rows::kReplicated, Rows::kScattered}) {
                expect_the_trees_bits(*group, *device, *sum,
                                      {blocks, rows, columns, bias, dtype, where});
              }
            }
          }
        }
      }
    }
  }
}

TEST_F(TreeSumTest, ShapesAreNotBlindToTheOrder) {
  // Summing the blocks one after the other must differ from the tree, or equal bits prove little.
  const Blocks blocks{800, 8};
  int differing = 0;
  for (std::int64_t column = 0; column < 64; ++column) {
    float in_order = 0.0F;
    for (std::int64_t b = 0; b < 8; ++b) in_order += partial(b, 0, column);
    differing += in_order != by_definition(blocks, 0, 16, 0, column) ? 1 : 0;
  }
  EXPECT_GT(differing, 30);
}

TEST_F(TreeSumTest, AddsTheBiasOnceAndRoundsOnce) {
  // Field case F01: 200 and 400 would be a bias per rank.
  const int tp = world_->size();
  const auto device = make_cpu_device(1);
  const Blocks blocks{9, 9};
  TreeSum sum(*world_, *device, SumTree(blocks), runs_of(9, tp), 2);
  sum.reserve(1, DType::kBf16);
  const SumTree tree(blocks);
  const Range run = owned_blocks(9, tp, world_->rank());
  OwnRoots own = own_roots(tree, run, 1, 2);
  std::fill(own.memory.begin(), own.memory.end(), 0.0F);
  const std::vector<float> bias{100.0F, 200.0F};
  std::vector<std::uint16_t> y(2);
  sum.sum(own.partials, bias.data(), DType::kBf16, Rows::kReplicated,
          reinterpret_cast<std::byte*>(y.data()));
  EXPECT_EQ(bf16_to_float(y[0]), 100.0F);
  EXPECT_EQ(bf16_to_float(y[1]), 200.0F);
}

TEST_F(TreeSumTest, AllocatesInReserveJustWhatItSaysAndNeverInASum) {
  // Some rows in one shot and the others in two halves, too: both kinds of memory.
  const std::int64_t some = std::int64_t{9} * 4 * kGroup * 4 * 4;
  for (const std::int64_t one_shot : {kNever, some, TreeSum::kOneShotBytes}) {
    const DType dtype = one_shot == some ? DType::kF32 : DType::kBf16;
    testing::CountingDevice device(make_cpu_device(1));
    const Blocks blocks{900, 9};
    const int tp = world_->size();
    TreeSum sum(*world_, device, SumTree(blocks), runs_of(9, tp), 200, one_shot);
    sum.reserve(17, dtype);
    EXPECT_EQ(device.allocated_bytes(), sum.workspace_bytes(17, dtype));
    const int before = device.allocations();
    for (const std::int64_t rows : {17, 16, 3, 1, 0, 17}) {
      for (const Rows where : {Rows::kReplicated, Rows::kScattered}) {
        expect_the_trees_bits(*world_, device, sum, {blocks, rows, 200, true, dtype, where});
      }
      sum.reserve(rows, dtype);
    }
    EXPECT_EQ(device.allocations(), before);
    EXPECT_EQ(before == 0, tp == 1);
  }
}

TEST_F(TreeSumTest, TheLibrarysOwnSumIsExactOnIntegersInAnyLayout) {
  const int tp = world_->size();
  const auto device = make_cpu_device(1);
  const Blocks blocks{100, tp};
  for (const std::int64_t columns : {1, 64, 100, 200}) {
    TreeSum sum(*world_, *device, SumTree(blocks), runs_of(tp, tp), columns);
    const std::int64_t groups = ceil_div(columns, kGroup);
    for (const std::int64_t rows : {0, 1, 3, 17}) {
      for (const bool by_rows : {false, true}) {
        std::vector<float> memory(as_size(groups * rows * kGroup) + 1);
        Partials own{memory.data(), rows, groups, kGroup, rows * kGroup, groups * rows * kGroup};
        if (by_rows) {
          own.row_stride = groups * kGroup;
          own.group_stride = kGroup;
        }
        std::vector<float> bias;
        for (std::int64_t c = 0; c < columns; ++c) bias.push_back(static_cast<float>(c % 10));
        for (const Rows where : {Rows::kReplicated, Rows::kScattered}) {
          for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t c = 0; c < columns; ++c) {
              own.at(0, c / kGroup)[r * own.row_stride + c % kGroup] =
                  static_cast<float>((world_->rank() + 1) * (r + 3 * c));
            }
          }
          const Range part =
              where == Rows::kScattered ? even_part(rows, tp, world_->rank()) : Range{0, rows};
          std::vector<float> out(as_size(part.size() * columns) + 1, -1.0F);
          sum.sum_by_library(own, bias.data(), DType::kF32, where,
                             reinterpret_cast<std::byte*>(out.data()));
          std::vector<float> expected;
          for (std::int64_t r = part.begin; r < part.end; ++r) {
            for (std::int64_t c = 0; c < columns; ++c) {
              expected.push_back(static_cast<float>(tp * (tp + 1) / 2 * (r + 3 * c) + c % 10));
            }
          }
          expected.push_back(-1.0F);
          EXPECT_EQ(out, expected) << rows << "x" << columns;
        }
      }
    }
  }
}

}  // namespace
}  // namespace gatefold
