// The dense layer on small inputs with known answers, most of them public bug reports of sharded
// layers, and what it promises about memory.
#include "layers/mlp.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "group_test.h"
#include "memory_source.h"
#include "parallel/agreement.h"
#include "tests/parallel/usage_error.h"
#include "tests/runtime/counting_device.h"

namespace {

/// Every operator new of this thread: what a step allocates on the host.
thread_local std::int64_t host_allocations = 0;

void* counted(std::size_t bytes) {
  ++host_allocations;
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes); }
void* operator new[](std::size_t bytes) { return counted(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace gatefold {
namespace {

using testing::as_floats;
using testing::CountingDevice;
using testing::DeviceGroup;
using testing::FfnShape;
using testing::in_dtype;
using testing::MemoryFfn;
using testing::noise;
using testing::OnDevice;
using testing::testing_device;
using testing::usage_error;

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

MlpOptions options(DType dtype, std::int64_t blocks = 8) {
  MlpOptions o;
  o.linear.dtype = dtype;
  o.linear.blocks = blocks;
  return o;
}

/// Fixture D: H 16, I 4, gate[i][0] = i+1, up[i][0] = 10(i+1), down[0][i] = 1, token [1, 0, …].
constexpr std::int64_t kHidden = 16;
constexpr double kAnswer = 285.396347;

MemoryFfn fixture_d(bool bias = false, std::int64_t intermediate = 4) {
  MemoryFfn ffn({kHidden, intermediate, true, bias});
  const auto zeros = [](std::int64_t n) { return std::vector<float>(as_size(n), 0.0F); };
  ffn.source.set("gate", {intermediate, kHidden}, zeros(intermediate * kHidden));
  ffn.source.set("up", {intermediate, kHidden}, zeros(intermediate * kHidden));
  ffn.source.set("down", {kHidden, intermediate}, zeros(kHidden * intermediate));
  if (bias) {
    ffn.source.set("gate_bias", {intermediate}, zeros(intermediate));
    ffn.source.set("up_bias", {intermediate}, zeros(intermediate));
    ffn.source.set("down_bias", {kHidden}, zeros(kHidden));
  }
  for (std::int64_t i = 0; i < intermediate; ++i) {
    ffn.source.at("gate", i * kHidden) = static_cast<float>(i + 1);
    ffn.source.at("up", i * kHidden) = static_cast<float>(10 * (i + 1));
    ffn.source.at("down", i) = 1.0F;
  }
  return ffn;
}

/// `tokens` copies of the fixture's token.
std::vector<float> token(std::int64_t tokens = 1) {
  std::vector<float> x(as_size(tokens * kHidden));
  for (std::int64_t t = 0; t < tokens; ++t) x[as_size(t * kHidden)] = 1.0F;
  return x;
}

class MlpTest : public testing::GroupTest {
 protected:
  std::vector<std::byte> forward(Mlp& mlp, const std::vector<std::byte>& x, const RowCount& rows,
                                 std::int64_t row_bytes) {
    const std::vector<std::byte> before(as_size(rows.local * row_bytes + 64), std::byte{0xab});
    OnDevice<std::byte> in(*device_, x);
    OnDevice<std::byte> out(*device_, before);
    mlp.forward(in.data(), rows, out.data());
    std::vector<std::byte> y = out.get();
    for (std::size_t i = y.size() - 64; i < y.size(); ++i) EXPECT_EQ(y[i], std::byte{0xab});
    y.resize(y.size() - 64);
    return y;
  }
  std::vector<float> answer(Mlp& mlp, DType dtype, std::int64_t tokens = 1) {
    const auto y =
        forward(mlp, in_dtype(token(tokens), dtype), {tokens, tokens}, kHidden * size_of(dtype));
    return as_floats(y, dtype);
  }
  /// Every group's bits are those of one rank, for one token and for several tiles of them.
  void expect_bits_of_one_rank(Mlp& reference, Mlp& mlp, std::int64_t hidden, DType dtype,
                               const std::string& what) {
    for (const std::int64_t tokens : {1, 5, 70}) {
      const auto x = in_dtype(noise(tokens * hidden, 9, 1.7F), dtype);
      const std::int64_t row_bytes = hidden * size_of(dtype);
      const RowCount rows{tokens, tokens};
      EXPECT_TRUE(forward(mlp, x, rows, row_bytes) == forward(reference, x, rows, row_bytes))
          << what << ", " << tokens << " tokens, " << name_of(dtype);
    }
  }
};

TEST_F(MlpTest, FixtureDHasItsAnswerForEveryGroupTypeAndBlockCount) {
  const MemoryFfn ffn = fixture_d();
  for (const std::int64_t blocks : {4, 8, 5}) {  // one column each; with empty ones; uneven
    for_every_group(blocks, [&](const Place& place) {
      for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
        Mlp mlp(ffn.spec, ffn.source, place, options(dtype, blocks));
        for (const std::int64_t tokens : {1, 2, 20}) {
          const std::vector<float> y = answer(mlp, dtype, tokens);
          const double tolerance = dtype == DType::kF32 ? 1e-4 : 1e-2;
          for (std::int64_t i = 0; i < tokens * kHidden; ++i) {
            const double want = i % kHidden == 0 ? kAnswer : 0.0;
            EXPECT_NEAR(static_cast<double>(y[as_size(i)]), want, want * tolerance)
                << "tp " << place.tp->size() << ", " << name_of(dtype) << ", element " << i;
          }
        }
      }
    });
  }
}

TEST_F(MlpTest, FixtureDHasNoSignatureOfAKnownMistake) {
  const MemoryFfn ffn = fixture_d();
  for_every_group(4, [&](const Place& place) {
    Mlp mlp(ffn.spec, ffn.source, place, options(DType::kF32, 4));
    const auto y = static_cast<double>(answer(mlp, DType::kF32)[0]);
    for (const double wrong :
         {299.999546, 1109.225931, 1412.883927, 85.084938, 2 * kAnswer, 3 * kAnswer, 4 * kAnswer}) {
      EXPECT_GT(std::abs(y - wrong), 1.0);
    }
  });
}

TEST_F(MlpTest, SwappedGateAndUpGiveTheOtherNumber) {
  // So that the answer above is not one that any order of the tensors gives.
  MemoryFfn ffn = fixture_d();
  std::swap(*ffn.spec.gate, ffn.spec.up);
  Mlp mlp(ffn.spec, ffn.source, all(), options(DType::kF32));
  EXPECT_NEAR(static_cast<double>(answer(mlp, DType::kF32)[0]), 299.999546, 0.03);
}

TEST_F(MlpTest, RowCountsThatCantBeAreRefusedOnEveryRank) {
  const MemoryFfn ffn = fixture_d();
  for (const Rows scattered : {Rows::kReplicated, Rows::kScattered}) {
    MlpOptions o = options(DType::kF32);
    o.input_rows = scattered;
    o.output_rows = scattered;
    Mlp mlp(ffn.spec, ffn.source, all(), o);
    std::vector<float> memory(as_size(4 * kHidden));
    auto* bytes = reinterpret_cast<std::byte*>(memory.data());
    for (const RowCount& rows :
         std::vector<RowCount>{{-1, 4}, {-1, -1}, {4, 3}, {1, 0}, {0, -1}, {INT64_MIN, 0}}) {
      SCOPED_TRACE(std::to_string(rows.local) + " of " + std::to_string(rows.global) + " rows");
      usage_error([&] { mlp.forward(bytes, rows, bytes); });
      usage_error([&] { mlp.reserve(rows); });
      usage_error([&] { (void)mlp.workspace_bytes(rows); });
    }
  }
  world_->barrier();  // no rank is stuck in a call
}

TEST_F(MlpTest, DownBiasCountsOnce) {  // F01
  MemoryFfn ffn = fixture_d(true);
  for (std::int64_t i = 0; i < 4; ++i) {
    ffn.source.at("gate", i * kHidden) = 0.0F;
    ffn.source.at("up", i * kHidden) = 0.0F;
    ffn.source.at("down", i) = 0.0F;
  }
  ffn.source.at("down_bias", 0) = 100.0F;
  ffn.source.at("down_bias", 1) = 200.0F;
  std::vector<float> expected(as_size(kHidden), 0.0F);
  expected[0] = 100.0F;
  expected[1] = 200.0F;
  for_every_group(8, [&](const Place& place) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      for (const Reduce reduce : {Reduce::kExact, Reduce::kFast}) {
        MlpOptions o = options(dtype);
        o.linear.reduce = reduce;
        Mlp mlp(ffn.spec, ffn.source, place, o);
        EXPECT_EQ(answer(mlp, dtype), expected) << "tp " << place.tp->size();
      }
    }
  });
}

TEST_F(MlpTest, GateAndUpBiasGoWithTheirRows) {  // F02
  MemoryFfn ffn = fixture_d(true);
  ffn.source.at("gate_bias", 3) = 1.0F;
  ffn.source.at("up_bias", 3) = -40.0F;
  for_every_group(8, [&](const Place& place) {
    Mlp mlp(ffn.spec, ffn.source, place, options(DType::kF32));
    EXPECT_NEAR(static_cast<double>(answer(mlp, DType::kF32)[0]), 128.274, 0.002)
        << "tp " << place.tp->size();
  });
}

TEST_F(MlpTest, WidthsThatNeitherRanksNorKernelsDivideHaveTheBitsOfOneRank) {  // F05, F06
  for (const FfnShape& shape : {FfnShape{16, 10}, FfnShape{16, 4}, FfnShape{64, 768},
                                FfnShape{64, 40}, FfnShape{24, 1}, FfnShape{1, 7}}) {
    const MemoryFfn ffn(shape);
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      Mlp reference(ffn.spec, ffn.source, alone(), options(dtype));
      for_every_group(8, [&](const Place& place) {
        Mlp mlp(ffn.spec, ffn.source, place, options(dtype));
        expect_bits_of_one_rank(
            reference, mlp, shape.hidden, dtype,
            "I " + std::to_string(shape.intermediate) + ", tp " + std::to_string(place.tp->size()));
      });
    }
  }
}

TEST_F(MlpTest, MoreRanksThanBlocksAreRefusedOnAllRanks) {  // F05
  if (world_->size() < 2) return;
  const MemoryFfn ffn({16, 10});
  const std::int64_t blocks = world_->size() - 1;
  const std::string text =
      usage_error([&] { Mlp(ffn.spec, ffn.source, all(), options(DType::kF32, blocks)); });
  EXPECT_THAT(text, ::testing::HasSubstr("tp " + std::to_string(world_->size()) + " is more than " +
                                         std::to_string(blocks) + " blocks"));
  world_->barrier();
}

TEST_F(MlpTest, ABetaThatOneRankCantUseEndsTheLoadingOnAllRanks) {
  const auto group = make_mpi_communicator(MPI_COMM_WORLD, {.timeout_seconds = 5});
  const DeviceGroup on_device(*group, *device_);
  for (int bad = 0; bad < group->size(); ++bad) {
    MemoryFfn ffn = fixture_d();
    ffn.spec.swish_beta = "beta";
    ffn.source.set("beta", {1}, {group->rank() == bad ? std::nanf("") : 1.0F});
    try {
      Mlp(ffn.spec, ffn.source, {device_.get(), on_device.get()}, options(DType::kF32));
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kData);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("beta must be finite"));
    }
  }
}

TEST_F(MlpTest, TheActivationSeesTheWholeGateAndNoPartOfIt) {  // F10
  // A gate of 3 + (-1): silu of the sum is 1.761594, the sum of silus 2.588781.
  MemoryFfn ffn = fixture_d(false, 1);
  ffn.source.at("gate", 0) = 3.0F;
  ffn.source.at("gate", 1) = -1.0F;
  ffn.source.at("up", 0) = 1.0F;
  std::vector<float> x = token();
  x[1] = 1.0F;
  for_every_group(8, [&](const Place& place) {
    Mlp mlp(ffn.spec, ffn.source, place, options(DType::kF32));
    const auto y =
        as_floats(forward(mlp, in_dtype(x, DType::kF32), {1, 1}, kHidden * 4), DType::kF32);
    EXPECT_NEAR(static_cast<double>(y[0]), 1.761594, 1e-5) << "tp " << place.tp->size();
  });
}

TEST_F(MlpTest, NoTokensAreNoWorkAndNoHang) {
  const MemoryFfn ffn({64, 40, true, true});
  for_every_group(8, [&](const Place& place) {
    for (const Reduce reduce : {Reduce::kExact, Reduce::kFast}) {
      for (const Rows where : {Rows::kReplicated, Rows::kScattered}) {
        MlpOptions o = options(DType::kBf16);
        o.linear.reduce = reduce;
        o.input_rows = where;
        o.output_rows = where;
        Mlp mlp(ffn.spec, ffn.source, place, o);
        EXPECT_TRUE(forward(mlp, {}, {0, 0}, 128).empty());
        EXPECT_TRUE(forward(mlp, {}, {0, 40}, 128).empty());  // the tokens are other groups'
      }
    }
  });
}

TEST_F(MlpTest, StreamedWeightsGiveTheBitsOfResidentOnes) {
  const MemoryFfn ffn({64, 200, true, true});
  const auto x = in_dtype(noise(1100 * 64, 5, 1.7F), DType::kBf16);
  MlpOptions o = options(DType::kBf16);
  Mlp resident(ffn.spec, ffn.source, all(), o);
  o.linear.residency = Residency::kStreamed;
  Mlp streamed(ffn.spec, ffn.source, all(), o);
  for (const std::int64_t tokens : {1, 33, 1100}) {  // 1100: more than one chunk of 1024 rows
    const RowCount rows{tokens, tokens};
    EXPECT_TRUE(forward(streamed, x, rows, 128) == forward(resident, x, rows, 128)) << tokens;
  }
}

TEST_F(MlpTest, ARowHasTheSameBitsInManyChunksAndAmongAFewRows) {
  const MemoryFfn ffn({16, 20, true, true});
  const std::int64_t tokens = 2500;
  const auto x = in_dtype(noise(tokens * 16, 5, 1.7F), DType::kF32);
  Mlp mlp(ffn.spec, ffn.source, all(), options(DType::kF32));
  const auto whole = forward(mlp, x, {tokens, tokens}, 64);
  // The same rows a few at a time, as part of a batch of that many.
  for (const Range rows : {Range{0, 10}, Range{1020, 1030}, Range{2499, 2500}}) {
    const std::vector<std::byte> part(x.begin() + rows.begin * 64, x.begin() + rows.end * 64);
    const std::vector<std::byte> expected(whole.begin() + rows.begin * 64,
                                          whole.begin() + rows.end * 64);
    EXPECT_TRUE(forward(mlp, part, {rows.size(), tokens}, 64) == expected) << rows.begin;
  }
}

TEST_F(MlpTest, ThePlainKernelDoesntDependOnRanksEither) {
  const MemoryFfn ffn({64, 200, true, true});
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    MlpOptions o = options(dtype);
    o.linear.kernel = GemmKernel::kPlain;
    Mlp reference(ffn.spec, ffn.source, alone(), o);
    for_every_group(8, [&](const Place& place) {
      Mlp mlp(ffn.spec, ffn.source, place, o);
      expect_bits_of_one_rank(reference, mlp, 64, dtype,
                              "plain, tp " + std::to_string(place.tp->size()));
    });
  }
}

TEST_F(MlpTest, FastModeIsWithinRoundingOfExact) {
  for (const FfnShape& shape : {FfnShape{128, 200, true, true}, FfnShape{64, 2}, FfnShape{16, 1}}) {
    const MemoryFfn ffn(shape);
    for_every_group(100, [&](const Place& place) {
      MlpOptions o = options(DType::kF32);
      Mlp exact(ffn.spec, ffn.source, alone(), o);
      o.linear.reduce = Reduce::kFast;
      Mlp fast(ffn.spec, ffn.source, place, o);
      for (const std::int64_t tokens : {1, 40, 3}) {
        const auto x = in_dtype(noise(tokens * shape.hidden, 5, 1.7F), DType::kF32);
        const RowCount rows{tokens, tokens};
        const auto a = as_floats(forward(exact, x, rows, shape.hidden * 4), DType::kF32);
        const auto b = as_floats(forward(fast, x, rows, shape.hidden * 4), DType::kF32);
        float largest = 0.0F;
        float difference = 0.0F;
        for (std::size_t i = 0; i < a.size(); ++i) {
          largest = std::max(largest, std::abs(a[i]));
          difference = std::max(difference, std::abs(a[i] - b[i]));
        }
        EXPECT_LE(difference, 1e-5F * largest)
            << "I " << shape.intermediate << ", tp " << place.tp->size() << ", " << tokens;
      }
    });
  }
}

// What it promises about memory.

struct MemoryCase {
  Rows input_rows;
  Rows output_rows;
  Reduce reduce;
  DType dtype;
};

std::vector<MemoryCase> memory_cases() {
  std::vector<MemoryCase> cases;
  for (const Rows in : {Rows::kReplicated, Rows::kScattered}) {
    for (const Rows out : {Rows::kReplicated, Rows::kScattered}) {
      for (const Reduce reduce : {Reduce::kExact, Reduce::kFast}) {
        cases.push_back({in, out, reduce, DType::kF32});
        cases.push_back({in, out, reduce, DType::kBf16});
      }
    }
  }
  return cases;
}

MlpOptions options_of(const MemoryCase& c) {
  MlpOptions o = options(c.dtype);
  o.linear.reduce = c.reduce;
  o.input_rows = c.input_rows;
  o.output_rows = c.output_rows;
  return o;
}

TEST_F(MlpTest, WorkspaceBytesAreWhatReserveAllocates) {
  MpiOptions by_messages;
  by_messages.within_node = WithinNode::kMessages;
  const auto world = make_mpi_communicator(MPI_COMM_WORLD, by_messages);
  const MemoryFfn ffn({100, 90, true, true});
  for (const MemoryCase& c : memory_cases()) {
    for (const RowCount& rows : {RowCount{0, 0}, RowCount{1, 1}, RowCount{7, 100},
                                 RowCount{20, 144}, RowCount{65, 65}, RowCount{1500, 1500}}) {
      CountingDevice device(testing_device());
      const DeviceGroup group(*world, device);
      Mlp mlp(ffn.spec, ffn.source, {&device, group.get()}, options_of(c));
      const std::int64_t weights = device.allocated_bytes();
      mlp.reserve(rows);
      EXPECT_EQ(device.allocated_bytes() - weights, mlp.workspace_bytes(rows))
          << rows.local << " of " << rows.global << " rows";
      const DeviceGroup sharing(*world_, device);
      Mlp shared(ffn.spec, ffn.source, {&device, sharing.get()}, options_of(c));
      const std::int64_t before = device.allocated_bytes();
      shared.reserve(rows);
      EXPECT_LE(device.allocated_bytes() - before, shared.workspace_bytes(rows));
    }
  }
}

TEST_F(MlpTest, MemoryThatLacksOnOneRankEndsForwardOnAllAndTheNextIsRight) {
  const MemoryFfn ffn({100, 90, true, true});
  const RowCount rows{17, 17};
  const std::vector<float> x = noise(17 * 100, 3, 1.0F);
  const std::vector<std::byte> x_bytes = in_dtype(x, DType::kF32);
  testing::ShortOfMemory device(testing_device());
  const DeviceGroup group(*world_, device);
  OnDevice<std::byte> in(device, x_bytes);
  OnDevice<std::byte> out(device, std::vector<std::byte>(x_bytes.size()));
  const auto succeeds = [&](Mlp& mlp) {
    try {
      mlp.forward(in.data(), rows, out.data());
      mlp.wait();
      return true;
    } catch (const AgreedError& error) {
      EXPECT_EQ(error.code(), ExitCode::kOutOfMemory) << error.what();
      return false;
    }
  };
  Mlp reserved(ffn.spec, ffn.source, {&device, group.get()}, options(DType::kF32));
  reserved.reserve(rows);
  EXPECT_TRUE(succeeds(reserved));
  const std::vector<std::byte> expected = out.get();
  int left = 0;
  for (bool enough = false; !enough; ++left) {
    Mlp mlp(ffn.spec, ffn.source, {&device, group.get()}, options(DType::kF32));
    device.left = world_->rank() + 1 == world_->size() ? left : -1;
    enough = succeeds(mlp);
    device.left = -1;
    EXPECT_TRUE(succeeds(mlp)) << left;
    EXPECT_TRUE(out.get() == expected) << left;
  }
  EXPECT_GT(left, 2) << "what a batch allocates";
}

TEST_F(MlpTest, ForwardAllocatesNothingAfterReserveWithAsManyRowsOrFewer) {
  const MemoryFfn ffn({100, 90, true, true});
  for (const MemoryCase& c : memory_cases()) {
    CountingDevice device(testing_device());
    const DeviceGroup group(*world_, device);
    Mlp mlp(ffn.spec, ffn.source, {&device, group.get()}, options_of(c));
    const RowCount most{100, 160};
    mlp.reserve(most);
    const int before = device.allocations();
    const std::int64_t row_bytes = 100 * size_of(c.dtype);
    const std::vector<std::byte> zeros(as_size(most.local * row_bytes));
    OnDevice<std::byte> x(device.counted(), zeros);
    OnDevice<std::byte> y(device.counted(), zeros);
    std::vector<RowCount> counts{most};
    if (c.reduce == Reduce::kExact) {
      for (const std::int64_t global : {1, 2, 17, 33, 64, 65, 97, 100, 144, 145}) {
        counts.push_back({std::min<std::int64_t>(100, global), global});
        counts.push_back({1, global});
      }
      counts.push_back({0, 0});
    }
    for (const RowCount& rows : counts) mlp.forward(x.data(), rows, y.data());
    EXPECT_EQ(device.allocations(), before);
  }
}

TEST_F(MlpTest, ReserveInStepsIsAsGoodAsAtOnce) {
  const MemoryFfn ffn({100, 90});
  CountingDevice device(testing_device());
  const DeviceGroup group(*world_, device);
  Mlp mlp(ffn.spec, ffn.source, {&device, group.get()}, options(DType::kF32));
  mlp.reserve({100, 100});
  mlp.reserve({20, 500});  // more in all, fewer here
  const int before = device.allocations();
  OnDevice<std::byte> x(device.counted(), std::vector<std::byte>(100 * 400));
  OnDevice<std::byte> y(device.counted(), std::vector<std::byte>(100 * 400));
  for (const RowCount& rows : {RowCount{100, 500}, RowCount{100, 140}, RowCount{20, 30}}) {
    mlp.forward(x.data(), rows, y.data());
  }
  EXPECT_EQ(device.allocations(), before);
}

TEST_F(MlpTest, ARanksWeightsShrinkWithTheNumberOfRanks) {  // F08
  const MemoryFfn ffn({64, 8 * 64});
  for_every_group(8, [&](const Place& place) {
    CountingDevice device(testing_device());
    const Mlp mlp(ffn.spec, ffn.source, {&device, place.tp}, options(DType::kF32));
    const Range run = owned_blocks(8, place.tp->size(), place.tp->rank());
    EXPECT_EQ(device.weight_bytes(), run.size() * 64 * 64 * 3 * size_of(DType::kF32));
  });
}

TEST_F(MlpTest, ASecondForwardOfThePlainKernelAllocatesNothingOnTheHost) {
  if (testing::on_stand_in(*device_)) GTEST_SKIP() << "the stand-in allocates at each launch";
  const MemoryFfn ffn({100, 90, true, true});
  for (const Rows output_rows : {Rows::kReplicated, Rows::kScattered}) {
    MlpOptions o = options(DType::kF32);
    o.linear.kernel = GemmKernel::kPlain;
    o.output_rows = output_rows;
    Mlp mlp(ffn.spec, ffn.source, all(), o);
    OnDevice<std::byte> x(*device_, std::vector<std::byte>(70 * 400));
    OnDevice<std::byte> y(*device_, std::vector<std::byte>(70 * 400));
    mlp.forward(x.data(), {70, 70}, y.data());
    const std::int64_t before = host_allocations;
    mlp.forward(x.data(), {70, 70}, y.data());
    mlp.forward(x.data(), {3, 3}, y.data());
    EXPECT_EQ(host_allocations, before);
  }
}

}  // namespace
}  // namespace gatefold
