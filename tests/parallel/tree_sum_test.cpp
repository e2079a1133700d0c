// The sum over ranks against the tree evaluated in one place: the same bits for every number of
// ranks, or the order has changed on the way.
#include "parallel/tree_sum.h"

#include <gmock/gmock.h>
#include <mpi.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <map>
#include <optional>
#include <vector>

#include "parallel/mpi_interop.h"
#include "parallel/staged_communicator.h"
#include "runtime/tensor_source.h"
#include "tests/faults/hooked_adder.h"
#include "tests/runtime/counting_device.h"
#include "tests/testing_device.h"

namespace gatefold {
namespace {

using testing::DeviceGroup;
using testing::OnDevice;
using testing::testing_device;

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
  std::vector<float> memory;  // the host's
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
  OwnRoots own = own_roots(tree, run, p.rows, p.columns);
  OnDevice<float> roots(device, own.memory);
  own.partials.data = roots.data();
  const Range rows =
      p.where == Rows::kScattered ? even_part(p.rows, tp.size(), tp.rank()) : Range{0, p.rows};
  std::vector<float> biases;
  for (std::int64_t c = 0; c < p.columns; ++c) biases.push_back(bias_at(c));
  OnDevice<float> bias(device, biases);
  std::vector<std::byte> expected = expected_rows(p, rows);
  expected.resize(expected.size() + as_size(kGuard), kPoison);
  OnDevice<std::byte> out(device, std::vector<std::byte>(expected.size(), kPoison));
  sum.sum(own.partials, p.bias ? bias.data() : nullptr, p.dtype, p.where, out.data());
  EXPECT_TRUE(out.get() == expected)
      << "tp " << tp.size() << ", " << p.blocks.count << " blocks of " << p.blocks.width << ", "
      << p.rows << "x" << p.columns << " " << name_of(p.dtype) << (p.bias ? ", bias" : "")
      << (p.where == Rows::kScattered ? ", scattered" : "");
}

/// How ranks reach each other: which of them share memory, if any.
enum class Reach { kOneNode, kMessages, kTwoNodes, kRankZeroAlone };

MpiOptions options_of(Reach reach) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MpiOptions options;
  if (reach == Reach::kMessages) options.within_node = WithinNode::kMessages;
  if (reach == Reach::kTwoNodes) options.node = rank % 2;
  if (reach == Reach::kRankZeroAlone) options.node = rank == 0 ? 1 : 0;
  return options;
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

class TreeSumReachTest : public TreeSumTest, public ::testing::WithParamInterface<Reach> {
 protected:
  void SetUp() override {
    world_ = make_mpi_communicator(MPI_COMM_WORLD, options_of(GetParam()));
    const bool all_the_same = world_->size() == 1 || testing::on_cuda();
    if (all_the_same && GetParam() != Reach::kOneNode) GTEST_SKIP();
  }
};
INSTANTIATE_TEST_SUITE_P(Reaches, TreeSumReachTest,
                         ::testing::Values(Reach::kOneNode, Reach::kMessages, Reach::kTwoNodes,
                                           Reach::kRankZeroAlone));

TEST_P(TreeSumReachTest, HasTheBitsOfOneRankForEveryGroupBlockCountAndShape) {
  // Smaller groups are worlds of other tests; on one node they share it with ranks that idle.
  const int smallest = GetParam() == Reach::kOneNode ? 1 : world_->size();
  for (int tp = smallest; tp <= world_->size(); ++tp) {
    const auto group = first_ranks(tp);
    if (!takes_part(tp)) continue;
    const auto device = testing_device();
    const DeviceGroup on_device(*group, *device);
    for (std::int64_t count = tp; count <= 9; ++count) {
      for (const std::int64_t columns : {1, 64, 100, 200}) {
        for (const bool empty : {false, true}) {  // with empty blocks, or without
          if (GetParam() != Reach::kOneNode && empty != (count % 2 == 0)) continue;
          const Blocks blocks{empty ? count / 2 + 1 : 100 * count, count};
          // Few rows in one shot and more in two halves, and all in two halves.
          const std::int64_t some = 3 * count * ceil_div(columns, kGroup) * kGroup * 4;
          TreeSum one_shot(*on_device.get(), *device, SumTree(blocks), runs_of(count, tp), columns,
                           some);
          TreeSum halves(*on_device.get(), *device, SumTree(blocks), runs_of(count, tp), columns,
                         kNever);
          for (TreeSum* sum : {&one_shot, &halves}) {
            sum->reserve(17, DType::kF32);
            for (const std::int64_t rows : {17, 3, 1, 0}) {
              // Not every combination: each pair of values occurs.
              const bool bias = (count + rows + columns / 50) % 2 == 0;
              const DType dtype =
                  std::vector{DType::kF32, DType::kBf16, DType::kF16}[as_size((count + rows) % 3)];
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

TEST_P(TreeSumReachTest, GivesARankItsOwnGroupsInFp32) {
  const int tp = world_->size();
  const auto device = testing_device();
  const DeviceGroup group(*world_, *device);
  for (const std::int64_t columns : {1, 100, 500}) {
    const Blocks blocks{900, 9};
    const SumTree tree(blocks);
    TreeSum sum(*group.get(), *device, tree, runs_of(9, tp), columns, kNever);
    for (const std::int64_t rows : {1, 5, 3, 5}) {
      sum.reserve(rows, DType::kF32);
      OwnRoots own = own_roots(tree, owned_blocks(9, tp, world_->rank()), rows, columns);
      OnDevice<float> roots(*device, own.memory);
      own.partials.data = roots.data();
      const Partials slice = sum.sum_own_groups(own.partials);
      const Range groups = even_part(ceil_div(columns, kGroup), tp, world_->rank());
      EXPECT_EQ(slice.groups, tp == 1 ? ceil_div(columns, kGroup) : groups.size());
      std::vector<float> values(as_size(groups.size() * rows * kGroup));
      if (tp == 1 || values.empty()) continue;
      device->download(reinterpret_cast<std::byte*>(values.data()),
                       reinterpret_cast<const std::byte*>(slice.at(0, 0)), std::ssize(values) * 4);
      for (std::int64_t i = 0; i < std::ssize(values); ++i) {
        const std::int64_t column = (groups.begin + i / (rows * kGroup)) * kGroup + i % kGroup;
        if (column >= columns) continue;
        const std::int64_t row = i / kGroup % rows;
        EXPECT_EQ(values[as_size(i)], by_definition(blocks, 0, 16, row, column)) << row;
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

TEST_P(TreeSumReachTest, SumsFollowEachOtherWithoutWaitingForTheSlowest) {
  // Each rank is late to read in its turn: no stack may be written while a peer still reads it.
  const int tp = world_->size();
  const auto device = testing_device();
  if (!device->in_host_memory()) return;
  const Blocks blocks{900, 9};
  const SumTree tree(blocks);
  constexpr std::int64_t kColumns = 200;
  const std::int64_t some = std::int64_t{9} * 4 * kGroup * 4 * 4;  // up to four rows in one shot
  int turn = 0;
  HookedAdder late(*device, [&](std::vector<const float*>&) {
    if (turn % tp == world_->rank()) usleep(100);
  });
  TreeSum sum(*world_, late, tree, runs_of(9, tp), kColumns, some);
  sum.reserve(70, DType::kF32);
  const Range run = owned_blocks(9, tp, world_->rank());
  const std::int64_t roots = tree.local_plan(run).roots;
  const auto rows_of = [](int t) {
    return std::vector<std::int64_t>{1, 70, 70, 4, 4, 1}[as_size(t % 6)];
  };
  const auto where_of = [](int t) { return t % 7 < 3 ? Rows::kReplicated : Rows::kScattered; };
  const auto own_rows = [&](int t) {
    return where_of(t) == Rows::kScattered ? even_part(rows_of(t), tp, world_->rank())
                                           : Range{0, rows_of(t)};
  };
  // Another sum each time, whose bits are the first one's but for the exponent.
  const auto scale_of = [](int t) { return std::ldexp(1.0F, t % 5); };
  std::map<std::int64_t, OwnRoots> own;
  for (const std::int64_t rows : {1, 4, 70}) own[rows] = own_roots(tree, run, rows, kColumns);
  std::vector<std::vector<float>> outs;
  for (int t = 0; t < 300; ++t) outs.emplace_back(as_size(own_rows(t).size() * kColumns));
  for (; turn < 300; ++turn) {
    const Partials stack = sum.stack(rows_of(turn));
    const std::vector<float>& values = own[rows_of(turn)].memory;
    for (std::int64_t i = 0; i < roots * stack.slot_stride; ++i) {
      stack.data[i] = values[as_size(i)] * scale_of(turn);
    }
    sum.sum(stack, nullptr, DType::kF32, where_of(turn),
            reinterpret_cast<std::byte*>(outs[as_size(turn)].data()));
  }
  std::map<std::int64_t, std::vector<std::byte>> all;
  for (const std::int64_t rows : {1, 4, 70}) {
    all[rows] = expected_rows({blocks, rows, kColumns, false, DType::kF32, {}}, {0, rows});
  }
  std::int64_t wrong = 0;
  for (int t = 0; t < 300; ++t) {
    const auto* expected = reinterpret_cast<const float*>(all[rows_of(t)].data());
    expected += own_rows(t).begin * kColumns;
    for (const float value : outs[as_size(t)]) wrong += value == *expected++ * scale_of(t) ? 0 : 1;
  }
  EXPECT_EQ(wrong, 0);
}

TEST_F(TreeSumTest, AddsTheBiasOnceAndRoundsOnce) {
  // Field case F01: 200 and 400 would be a bias per rank.
  const int tp = world_->size();
  const auto device = testing_device();
  const DeviceGroup group(*world_, *device);
  const Blocks blocks{9, 9};
  TreeSum sum(*group.get(), *device, SumTree(blocks), runs_of(9, tp), 2);
  sum.reserve(1, DType::kBf16);
  const SumTree tree(blocks);
  const Range run = owned_blocks(9, tp, world_->rank());
  OwnRoots own = own_roots(tree, run, 1, 2);
  OnDevice<float> zeros(*device, std::vector<float>(own.memory.size()));
  own.partials.data = zeros.data();
  OnDevice<float> bias(*device, {100.0F, 200.0F});
  OnDevice<std::uint16_t> out(*device, {1, 1});
  sum.sum(own.partials, bias.data(), DType::kBf16, Rows::kReplicated,
          reinterpret_cast<std::byte*>(out.data()));
  const std::vector<std::uint16_t> y = out.get();
  EXPECT_EQ(bf16_to_float(y[0]), 100.0F);
  EXPECT_EQ(bf16_to_float(y[1]), 200.0F);
}

TEST_F(TreeSumTest, AllocatesInReserveJustWhatItSaysAndNeverInASum) {
  // Some rows in one shot and the others in two halves, too: both kinds of memory.
  const std::int64_t some = std::int64_t{9} * 4 * kGroup * 4 * 4;
  for (const std::int64_t one_shot : {kNever, some, TreeSum::kOneShotBytes}) {
    const DType dtype = one_shot == some ? DType::kF32 : DType::kBf16;
    testing::CountingDevice device(testing_device());
    const auto staged = make_staged_communicator(*world_, device);
    const Blocks blocks{900, 9};
    const int tp = world_->size();
    TreeSum sum(*staged, device, SumTree(blocks), runs_of(9, tp), 200, one_shot);
    sum.reserve(17, dtype);
    EXPECT_EQ(device.allocated_bytes(), sum.workspace_bytes(17, dtype));
    const int before = device.allocations();
    const int host_before = device.host_allocations();
    for (const std::int64_t rows : {17, 16, 3, 1, 0, 17}) {
      for (const Rows where : {Rows::kReplicated, Rows::kScattered}) {
        expect_the_trees_bits(*staged, device.counted(), sum,
                              {blocks, rows, 200, true, dtype, where});
      }
      sum.reserve(rows, dtype);
    }
    EXPECT_EQ(device.allocations(), before);
    EXPECT_EQ(device.host_allocations(), host_before);
    EXPECT_GT(before, 0);
  }
}

TEST_F(TreeSumTest, TheLibrarysOwnSumIsExactOnIntegers) {
  const int tp = world_->size();
  const auto device = testing_device();
  const DeviceGroup group(*world_, *device);
  const Blocks blocks{100, tp};
  for (const std::int64_t columns : {1, 64, 100, 200}) {
    TreeSum sum(*group.get(), *device, SumTree(blocks), runs_of(tp, tp), columns);
    const std::int64_t groups = ceil_div(columns, kGroup);
    for (const std::int64_t rows : {0, 1, 3, 17}) {
      for (const bool by_rows : {false, true}) {
        std::vector<float> memory(as_size(groups * rows * kGroup) + 1);
        Partials own{memory.data(), rows, groups, kGroup, rows * kGroup, groups * rows * kGroup};
        if (by_rows) {
          own.row_stride = groups * kGroup;
          own.group_stride = kGroup;
        }
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t c = 0; c < columns; ++c) {
            own.at(0, c / kGroup)[r * own.row_stride + c % kGroup] =
                static_cast<float>((world_->rank() + 1) * (r + 3 * c));
          }
        }
        std::vector<float> biases;
        for (std::int64_t c = 0; c < columns; ++c) biases.push_back(static_cast<float>(c % 10));
        OnDevice<float> bias(*device, biases);
        for (const Rows where : {Rows::kReplicated, Rows::kScattered}) {
          if (where == Rows::kScattered && !by_rows) continue;
          OnDevice<float> roots(*device, memory);  // the library's sum may take their place
          own.data = roots.data();
          const Range part =
              where == Rows::kScattered ? even_part(rows, tp, world_->rank()) : Range{0, rows};
          OnDevice<float> out(*device,
                              std::vector<float>(as_size(part.size() * columns) + 1, -1.0F));
          sum.sum_by_library(own, bias.data(), DType::kF32, where,
                             reinterpret_cast<std::byte*>(out.data()));
          std::vector<float> expected;
          for (std::int64_t r = part.begin; r < part.end; ++r) {
            for (std::int64_t c = 0; c < columns; ++c) {
              expected.push_back(static_cast<float>(tp * (tp + 1) / 2 * (r + 3 * c) + c % 10));
            }
          }
          expected.push_back(-1.0F);
          EXPECT_EQ(out.get(), expected) << rows << "x" << columns;
        }
      }
    }
  }
}

}  // namespace
}  // namespace gatefold
