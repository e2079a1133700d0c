// What ranks tell each other of a step's rows is looked at before any of them moves.
#include "parallel/token_exchange.h"

#include <gmock/gmock.h>
#include <mpi.h>

#include <cstring>
#include <memory>

#include "parallel/mpi_interop.h"
#include "runtime/device.h"
#include "runtime/error.h"
#include "tests/faults/hooked_communicator.h"

namespace gatefold {
namespace {

using ::testing::HasSubstr;

/// Every rank hears in the count matrix that each has very many tokens, all like its own one.
class BoastingCommunicator final : public HookedCommunicator {
 public:
  BoastingCommunicator(Communicator& inner, std::int64_t tokens)
      : HookedCommunicator(inner, [](Communicator&, auto, auto) { FAIL() << "rows moved"; }),
        tokens_(tokens) {}

  Communicator& host() override { return *this; }
  void all_gather_v(std::byte* all, std::span<const std::int64_t> parts) override {
    HookedCommunicator::all_gather_v(all, parts);
    const std::int64_t width = parts.front() / 8;
    if (width < kFirstGroup) return;  // not the count matrix
    for (std::int64_t i = 0; i < size() * width; ++i) {
      std::int64_t value = 0;
      std::memcpy(&value, all + i * 8, 8);
      if (i % width == kRows || i % width >= kFirstGroup) value *= tokens_;
      std::memcpy(all + i * 8, &value, 8);
    }
  }

 private:
  static constexpr std::int64_t kRows = 1;
  static constexpr std::int64_t kFirstGroup = 6;
  std::int64_t tokens_;
};

TEST(TokenExchange, MoreRowsThanThirtyTwoBitsCanNumberAreRefusedBeforeAnyMoves) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  const auto device = make_cpu_device(1);
  BoastingCommunicator boasting(*world, std::int64_t{1} << 29);
  TokenExchange exchange(boasting, *device, {8, world->size()}, 1, 64, DType::kF32,
                         Dispatcher::kAllToAll);
  Choices own;
  own.resize(1, 4);
  own.ids = {0, 2, 4, 6};
  try {
    exchange.plan(own);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_THAT(error.what(), HasSubstr("tokens with 4 experts each in one step"));
  }
}

}  // namespace
}  // namespace gatefold
