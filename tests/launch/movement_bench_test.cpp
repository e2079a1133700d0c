// What movements are compared by, and that what they are compared with moves the same.
#include "launch/movement_bench.h"

#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <iterator>

#include "launch/plain_exchange.h"
#include "launch/routing_pattern.h"
#include "parallel/mpi_interop.h"
#include "tests/testing_device.h"

namespace gatefold {
namespace {

using testing::DeviceGroup;
using testing::OnDevice;

TEST(Movement, OfAFifthOfTheLibrarysTimeIsFiveTimesAsFast) {
  Movement movement;
  movement.seconds = {1e-6, 4e-6, 2e-6};
  movement.library = {5e-6, 4e-6, 20e-6};
  EXPECT_DOUBLE_EQ(times_library(movement), 5) << "the median of 5, 1 and 10";
}

TEST(Movement, IsTimedByWhatFitsAndNeverLessThanThreeTimes) {
  EXPECT_EQ(movement_passes(0.01, 20), 40);
  EXPECT_EQ(movement_passes(1.0, 20), 3);
  EXPECT_EQ(movement_passes(1.0, 1), 1);
  EXPECT_EQ(movement_passes(1e-6, 20), 1000);
  EXPECT_EQ(movement_passes(1e-6, 1), 50);
  EXPECT_EQ(movement_passes(0, 20), 1000) << "a clock that stood still";
}

constexpr std::int64_t kExperts = 5;
constexpr std::int64_t kHidden = 128;
constexpr std::int64_t kTokens = 9;

std::int64_t first_token(int rank) { return rank * (rank + 1) / 2 * kTokens; }
Range tokens_of(int rank) { return {first_token(rank), first_token(rank + 1)}; }  // uneven

std::vector<Choices> choices_of(int ranks) {
  std::vector<Choices> all;
  for (int rank = 0; rank < ranks; ++rank) {
    all.push_back(patterned_choices({RoutingKind::kUniform, 0}, 1,
                                    {.experts = kExperts, .top_k = 2}, tokens_of(rank)));
    for (auto ids = all.back().ids.begin(); ids != all.back().ids.end(); ids += 2) {
      std::sort(ids, ids + 2);
    }
  }
  return all;
}

std::vector<float> values_of(std::int64_t token) {
  std::vector<float> row;
  for (std::int64_t c = 0; c < kHidden; ++c)
    row.push_back(static_cast<float>(token * 7 + c % 5 + 1));
  return row;
}

/// The rows that come to this rank, by the choices of all.
std::vector<float> expected_rows(const ExpertPlacement& placement,
                                 const std::vector<Choices>& choices, int me) {
  std::vector<float> expected;
  for (int source = 0; source < std::ssize(choices); ++source) {
    const Choices& tokens = choices[static_cast<std::size_t>(source)];
    for (std::int64_t row = 0; row < tokens.rows; ++row) {
      const auto ids = tokens.ids_of(row);
      if (std::ranges::none_of(ids, [&](auto id) { return placement.owner(id) == me; })) continue;
      std::ranges::copy(values_of(tokens_of(source).begin + row), std::back_inserter(expected));
    }
  }
  return expected;
}

TEST(PlainExchange, BringsEachTokenToTheRanksOfItsExpertsAndTheirSumsHome) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  const auto device = testing::testing_device();
  const DeviceGroup comm(*world, *device);
  const ExpertPlacement placement{kExperts, world->size()};
  const std::vector<Choices> choices = choices_of(world->size());
  PlainExchange exchange(*comm.get(), *device, placement, choices, kHidden, DType::kF32);

  std::vector<float> x;
  const Range own = tokens_of(world->rank());
  for (std::int64_t t = own.begin; t < own.end; ++t) {
    std::ranges::copy(values_of(t), std::back_inserter(x));
  }
  OnDevice<float> on_device(*device, x);
  exchange.dispatch(reinterpret_cast<const std::byte*>(on_device.data()));
  comm.get()->wait();
  std::vector<float> rows(static_cast<std::size_t>(exchange.received_rows() * kHidden));
  const std::int64_t bytes = std::ssize(rows) * size_of(DType::kF32);
  device->download(reinterpret_cast<std::byte*>(rows.data()), exchange.rows(), bytes);
  EXPECT_EQ(rows, expected_rows(placement, choices, world->rank()));

  // Each rank adds what came times its number + 1.
  for (float& value : rows) value *= static_cast<float>(world->rank() + 1);
  device->upload(reinterpret_cast<std::byte*>(exchange.sums()),
                 reinterpret_cast<const std::byte*>(rows.data()), bytes);
  exchange.combine(reinterpret_cast<std::byte*>(on_device.data()));
  comm.get()->wait();
  const std::vector<float> y = on_device.get();
  const Choices& tokens = choices[static_cast<std::size_t>(world->rank())];
  for (std::int64_t row = 0; row < tokens.rows; ++row) {
    int factor = 0;
    for_groups(placement, tokens.ids_of(row), [&](int rank) { factor += rank + 1; });
    for (std::int64_t c = 0; c < kHidden; ++c) {
      const auto at = static_cast<std::size_t>(row * kHidden + c);
      ASSERT_EQ(y[at], static_cast<float>(factor) * x[at]) << row << ", " << c;
    }
  }
}

}  // namespace
}  // namespace gatefold
