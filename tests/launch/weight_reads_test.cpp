// What ranks have read is the same everywhere, or all ranks say whose isn't.
#include "launch/weight_reads.h"

#include <gmock/gmock.h>
#include <mpi.h>

#include <numeric>

#include "layers/mlp.h"
#include "parallel/mpi_interop.h"
#include "runtime/error.h"
#include "runtime/hash.h"
#include "tests/layers/memory_source.h"

namespace gatefold {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MemoryFfn;
using testing::MemorySource;

class Reads : public ::testing::Test {
 protected:
  void SetUp() override {
    world_ = make_mpi_communicator(MPI_COMM_WORLD);
    fill();
  }
  void fill() {
    std::vector<float> values(12);
    std::iota(values.begin(), values.end(), 1.0F);
    source_.set("w", {4, 3}, values);
    source_.set("v", {4, 3}, values);
    source_.set("bias", {12}, values);
  }

  std::vector<float> read(ReadLog& log, const std::string& name, Range rows, Range cols) const {
    std::vector<float> out(static_cast<std::size_t>(rows.size() * cols.size()));
    RecordingSource(source_, log).read(name, rows, cols, reinterpret_cast<std::byte*>(out.data()));
    return out;
  }
  int rank() const { return world_->rank(); }
  int size() const { return world_->size(); }

  std::unique_ptr<Communicator> world_;
  MemorySource source_;
  ReadLog mine_;
  ReadLog one_device_;
};

TEST_F(Reads, ARecordingSourceGivesWhatTheOtherGives) {
  const RecordingSource source(source_, mine_);
  EXPECT_EQ(source.find("w")->shape, (std::vector<std::int64_t>{4, 3}));
  EXPECT_EQ(source.find("x"), std::nullopt);
  EXPECT_EQ(source.description(), "memory");
  EXPECT_THAT(read(mine_, "w", {1, 3}, {1, 3}), ElementsAre(5, 6, 8, 9));
}

TEST_F(Reads, AReadIsLoggedWithTheHashOfItsBytes) {
  const std::vector<float> values = read(mine_, "w", {1, 3}, {0, 2});
  const std::vector<PieceRead> reads = mine_.reads();
  EXPECT_EQ(reads.size(), 1U);
  EXPECT_EQ(reads.at(0).hash, xxh64(std::as_bytes(std::span(values))));
  EXPECT_EQ(reads.at(0).piece.rows, (Range{1, 3}));
  EXPECT_EQ(reads.at(0).piece.columns, (Range{0, 2}));
  EXPECT_EQ(mine_.text(reads.at(0).piece), "'w' [rows 1-2, columns 0-1]");
}

TEST_F(Reads, AnotherTensorOrPieceIsAnotherRead) {
  read(mine_, "w", {0, 4}, {0, 3});
  read(mine_, "v", {0, 4}, {0, 3});
  read(mine_, "w", {0, 3}, {0, 3});
  read(mine_, "w", {1, 4}, {0, 3});
  read(mine_, "w", {0, 4}, {0, 2});
  read(mine_, "w", {0, 4}, {1, 3});
  EXPECT_EQ(mine_.reads().size(), 6U);
  EXPECT_THAT(mine_.changed(), IsEmpty());
}

TEST_F(Reads, TheSameReadTwiceIsOne) {
  read(mine_, "w", {0, 4}, {0, 3});
  read(mine_, "w", {0, 4}, {0, 3});
  EXPECT_EQ(mine_.reads().size(), 1U);
  EXPECT_THAT(mine_.changed(), IsEmpty());
}

TEST_F(Reads, AReadThatDiffersFromTheFirstIsAChange) {
  read(mine_, "w", {0, 4}, {0, 3});
  source_.at("w", 11) = 12.5F;
  read(mine_, "w", {0, 4}, {0, 3});
  EXPECT_EQ(mine_.reads().size(), 1U);
  EXPECT_EQ(mine_.changed().size(), 1U);
}

TEST_F(Reads, EmptyPiecesAndFailedReadsLeaveNothing) {
  class Broken final : public MemorySource {
    void read(const std::string&, Range, Range, std::byte*) const override {
      throw Error(ExitCode::kData, "broken");
    }
  };
  read(mine_, "w", {2, 2}, {0, 3});
  read(mine_, "w", {0, 4}, {1, 1});
  const Broken broken;
  std::byte out{};
  EXPECT_THROW(RecordingSource(broken, mine_).read("w", {0, 1}, {0, 1}, &out), Error);
  EXPECT_THAT(mine_.reads(), IsEmpty());
}

// ---- across ranks ----

TEST_F(Reads, EqualReadsDoNotDiffer) {
  read(one_device_, "w", {0, 2}, {0, 3});
  read(one_device_, "w", {2, 4}, {0, 3});
  read(mine_, "w", rank() % 2 == 0 ? Range{0, 2} : Range{2, 4}, {0, 3});
  const ReadComparison result = compare_reads(*world_, mine_, one_device_, Cut::kCanonical);
  EXPECT_EQ(result.differing, 0);
  EXPECT_THAT(result.ranks, IsEmpty());
  EXPECT_EQ(result.first, "");
}

TEST_F(Reads, AllRanksNameTheOneWhoseWeightsDiffer) {
  for (int other = 1; other < size(); ++other) {
    fill();
    ReadLog mine;
    ReadLog one_device;
    read(one_device, "w", {0, 4}, {0, 3});
    read(one_device, "w", {2, 4}, {0, 3});
    if (rank() == other) source_.at("w", 11) = 12.5F;
    read(mine, "w", {0, 4}, {0, 3});
    read(mine, "w", {2, 4}, {0, 3});
    const ReadComparison result = compare_reads(*world_, mine, one_device, Cut::kCanonical);
    EXPECT_EQ(result.differing, 2);
    EXPECT_THAT(result.ranks, ElementsAre(other));
    // The smaller piece says more.
    EXPECT_THAT(result.first,
                HasSubstr("rank " + std::to_string(other) +
                          " read 'w' [rows 2-3, columns 0-2] with other values than rank 0"));
  }
}

TEST_F(Reads, WhereRank0IsTheOddOneAllOthersDiffer) {
  if (rank() == 0) source_.at("w", 0) = 1.5F;
  read(one_device_, "w", {0, 4}, {0, 3});
  read(mine_, "w", {0, 4}, {0, 3});
  const ReadComparison result = compare_reads(*world_, mine_, one_device_, Cut::kCanonical);
  EXPECT_EQ(result.differing, size() - 1);
  EXPECT_EQ(std::ssize(result.ranks), size() - 1);
}

TEST_F(Reads, APieceThatOneDeviceDidNotReadIsWrongWhereBlocksAreCanonical) {
  read(one_device_, "w", {0, 4}, {0, 3});
  read(mine_, "w", {0, 4}, {0, 3});
  const bool last = rank() == size() - 1;
  if (last) read(mine_, "bias", {0, 1}, {3, 6});
  const ReadComparison canonical = compare_reads(*world_, mine_, one_device_, Cut::kCanonical);
  EXPECT_EQ(canonical.differing, 1);
  EXPECT_THAT(canonical.ranks, ElementsAre(size() - 1));
  EXPECT_THAT(canonical.first, HasSubstr("'bias' [rows 0-0, columns 3-5] and one device didn't"));
  EXPECT_EQ(compare_reads(*world_, mine_, one_device_, Cut::kByRanks).differing, 0);
}

TEST_F(Reads, Rank0MustReadTheSameForItsShardAndForOneDevice) {
  read(one_device_, "w", {0, 4}, {0, 3});
  if (rank() == 0) source_.at("w", 5) = -6;
  read(mine_, "w", {0, 4}, {0, 3});
  const ReadComparison result = compare_reads(*world_, mine_, one_device_, Cut::kCanonical);
  EXPECT_EQ(result.differing, 1);
  EXPECT_THAT(result.first, HasSubstr("rank 0 read 'w' [rows 0-3, columns 0-2] twice"));
}

TEST_F(Reads, AChangeBetweenTwoReadsIsNamedOnAnyRankAndInEitherLog) {
  for (int other = 0; other < size(); ++other) {
    fill();
    ReadLog mine;
    ReadLog one_device;
    read(one_device, "v", {0, 4}, {0, 3});
    read(one_device, "w", {0, 4}, {0, 3});
    read(mine, "w", {0, 4}, {0, 3});
    if (rank() == other) source_.at("w", 5) = -6;
    if (rank() == other) source_.at("v", 5) = -6;
    read(mine, "w", {0, 4}, {0, 3});
    read(one_device, "v", {0, 4}, {0, 3});
    const ReadComparison result = compare_reads(*world_, mine, one_device, Cut::kCanonical);
    EXPECT_EQ(result.differing, other == 0 ? 2 : 1);
    EXPECT_THAT(result.first, HasSubstr("rank " + std::to_string(other) + " read "));
    EXPECT_THAT(result.first, HasSubstr("twice"));
  }
}

/// What a layer over all ranks reads, and the same layer streamed on one device.
void expect_same_pieces(Communicator& world, const MemoryFfn& ffn, std::int64_t blocks) {
  const auto device = make_cpu_device();
  const auto alone = make_self_communicator();
  MlpOptions options;
  options.linear.dtype = DType::kBf16;
  options.linear.blocks = blocks;
  options.linear.kernel = GemmKernel::kPlain;
  ReadLog mine;
  ReadLog one_device;
  const Mlp sharded(ffn.spec, RecordingSource(ffn.source, mine), {device.get(), &world}, options);
  const RecordingSource source(ffn.source, one_device);
  options.linear.residency = Residency::kStreamed;
  Mlp streamed(ffn.spec, source, {device.get(), alone.get()}, options);
  const std::vector<std::byte> x(static_cast<std::size_t>(2 * ffn.spec.hidden_size));
  std::vector<std::byte> y(x.size());
  streamed.forward(x.data(), {1, 1}, y.data());
  const ReadComparison result = compare_reads(world, mine, one_device, Cut::kCanonical);
  EXPECT_EQ(result.first, "");
  EXPECT_FALSE(one_device.reads().empty());
}

TEST_F(Reads, ALayerReadsThePiecesThatItReadsOnOneDevice) {
  expect_same_pieces(*world_, MemoryFfn({48, 97, true, true}), 8);
  expect_same_pieces(*world_, MemoryFfn({48, 5, false, true}), 5);
}

// Four blocks of 12 MiB a matrix, each read in two pieces.
TEST_F(Reads, SoItDoesWithBlocksOfSeveralPieces) {
  expect_same_pieces(*world_, MemoryFfn({8192, 1536, false, false}), 4);
}

}  // namespace
}  // namespace gatefold
