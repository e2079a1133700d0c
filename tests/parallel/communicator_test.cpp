// What every communicator must do, whatever carries its messages: one suite, run on each backend.
#include "parallel/communicator.h"

#include <gmock/gmock.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "runtime/error.h"
#include "tests/parallel/backends.h"

namespace gatefold {
namespace {

constexpr std::byte kPoison{0xa5};

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

class CommunicatorTest : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    comm_ = GetParam().make();
    const auto& on_top = GetParam().on_top;
    if (!GetParam().split_in_two && !on_top) return;
    whole_ = std::move(comm_);
    comm_ = on_top ? on_top(*whole_) : whole_->split(whole_->rank() % 2);
  }
  int rank() const { return comm_->rank(); }
  int size() const { return comm_->size(); }
  /// Where rank r has given (r + 1) * (i % 100). One complaint and no way out: peers go on.
  void expect_sums(const float* values, std::int64_t first, std::int64_t count) const {
    const int ranks = size() * (size() + 1) / 2;
    std::int64_t i = first;
    while (i < first + count && values[i] == static_cast<float>(ranks * (i % 100))) ++i;
    EXPECT_EQ(i, first + count) << "is the first wrong element of those from " << first;
  }
  std::unique_ptr<Communicator> whole_;  // its progress is the halves' too
  std::unique_ptr<Communicator> comm_;
};

/// Byte i of what `from` sends to `to` as piece `piece`.
std::byte expected_byte(int from, int to, int piece, std::int64_t i) {
  const std::int64_t value = 31 * from + 7 * to + 101 * piece + i + i / 251;
  return static_cast<std::byte>(value % 255 + 1);
}

/// pieces[from][to]: the sizes of the messages between two ranks, in order.
using Traffic = std::vector<std::vector<std::vector<std::int64_t>>>;

/// Memory of one side of an exchange, a poisoned byte between any two pieces.
struct Side {
  std::vector<std::byte> memory;
  std::vector<Transfer> transfers;
  std::vector<std::pair<int, int>> names;  // peer, piece
};

Side lay_out(const std::function<const std::vector<std::int64_t>&(int)>& pieces_of, int size) {
  Side side;
  std::vector<std::int64_t> offsets;
  std::int64_t end = 1;
  for (int peer = 0; peer < size; ++peer) {
    const std::vector<std::int64_t>& pieces = pieces_of(peer);
    for (std::size_t p = 0; p < pieces.size(); ++p) {
      side.transfers.push_back({peer, nullptr, pieces[p]});
      side.names.emplace_back(peer, static_cast<int>(p));
      offsets.push_back(end);
      end += pieces[p] + 1;
    }
  }
  side.memory.assign(as_size(end), kPoison);
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    side.transfers[i].data = side.memory.data() + offsets[i];
  }
  return side;
}

/// Exchanges by the matrix and looks at every byte received, and at those between.
void exchange_and_check(Communicator& comm, const Traffic& traffic) {
  const auto me = as_size(comm.rank());
  Side send = lay_out(
      [&](int peer) -> auto& { return traffic[me][as_size(peer)]; }, comm.size());
  Side receive = lay_out(
      [&](int peer) -> auto& { return traffic[as_size(peer)][me]; }, comm.size());
  for (std::size_t t = 0; t < send.transfers.size(); ++t) {
    const auto [peer, piece] = send.names[t];
    for (std::int64_t i = 0; i < send.transfers[t].bytes; ++i) {
      send.transfers[t].data[i] = expected_byte(comm.rank(), peer, piece, i);
    }
  }
  std::vector<std::byte> expected = receive.memory;
  for (std::size_t t = 0; t < receive.transfers.size(); ++t) {
    const auto [peer, piece] = receive.names[t];
    const auto offset = receive.transfers[t].data - receive.memory.data();
    for (std::int64_t i = 0; i < receive.transfers[t].bytes; ++i) {
      expected[as_size(offset + i)] = expected_byte(peer, comm.rank(), piece, i);
    }
  }
  comm.exchange(send.transfers, receive.transfers);
  EXPECT_TRUE(receive.memory == expected);
}

Traffic made_by(int size, const std::function<std::vector<std::int64_t>(int, int)>& pieces) {
  Traffic traffic(as_size(size));
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) traffic[as_size(from)].push_back(pieces(from, to));
  }
  return traffic;
}

using Sizes = std::vector<std::int64_t>;

TEST_P(CommunicatorTest, ExchangesNothingAtAll) {
  comm_->exchange({}, {});
  exchange_and_check(*comm_, made_by(size(), [](int, int) { return Sizes{0}; }));
  exchange_and_check(*comm_, made_by(size(), [](int, int) { return Sizes{}; }));
}

TEST_P(CommunicatorTest, ExchangesMatricesWithAZeroRowColumnOrDiagonal) {
  for (int zero = 0; zero < size(); ++zero) {
    exchange_and_check(*comm_, made_by(size(), [&](int from, int to) {
      return Sizes{from == zero ? 0 : 10 + to};
    }));
    exchange_and_check(*comm_, made_by(size(), [&](int from, int to) {
      return Sizes{to == zero ? 0 : 10 + from};
    }));
    // Everything to, and everything from, one rank.
    exchange_and_check(*comm_, made_by(size(), [&](int from, int to) {
      return Sizes{to == zero ? 100 + from : 0};
    }));
    exchange_and_check(*comm_, made_by(size(), [&](int from, int to) {
      return Sizes{from == zero ? 100 + to : 0};
    }));
  }
  exchange_and_check(*comm_,
                     made_by(size(), [](int from, int to) { return Sizes{from == to ? 0 : 20}; }));
  exchange_and_check(*comm_,
                     made_by(size(), [](int from, int to) { return Sizes{from == to ? 20 : 0}; }));
}

TEST_P(CommunicatorTest, ExchangesTwoHundredRandomMatricesOfSeveralPieces) {
  std::mt19937 random(20);  // the same on all ranks
  const auto below = [&random](std::uint32_t n) { return static_cast<std::int64_t>(random() % n); };
  for (int i = 0; i < 200; ++i) {
    exchange_and_check(*comm_, made_by(size(), [&](int, int) {
      Sizes pieces(as_size(below(4)));
      for (std::int64_t& bytes : pieces) {
        const std::int64_t kind = below(8);
        bytes = kind < 3 ? 0 : kind < 7 ? below(300) : below(20000);
      }
      return pieces;
    }));
  }
}

TEST_P(CommunicatorTest, SkipsEmptyPiecesThatOnlyOneSideLists) {
  std::byte in{7};
  std::byte out{0};
  for (int peer = 0; peer < size(); ++peer) {
    const int from = (rank() + size() - peer) % size();
    const int to = (rank() + peer) % size();
    out = std::byte{0};
    const std::vector<Transfer> sends{{to, nullptr, 0}, {to, &in, 1}};
    const std::vector<Transfer> receives{{from, &out, 1}, {from, nullptr, 0}};
    comm_->exchange(sends, receives);
    EXPECT_EQ(out, in) << "from " << from;
    out = std::byte{0};
    const std::vector<Transfer> just{{to, &in, 1}};
    const std::vector<Transfer> with_empty{{from, nullptr, 0}, {from, &out, 1}};
    comm_->exchange(just, with_empty);
    EXPECT_EQ(out, in) << "from " << from;
  }
}

TEST_P(CommunicatorTest, RefusesPiecesForItselfThatDontMatch) {
  std::vector<std::byte> in(8);
  std::vector<std::byte> out(8);
  const std::vector<Transfer> send{{rank(), in.data(), 8}};
  const std::vector<Transfer> shorter{{rank(), out.data(), 4}};
  EXPECT_THROW(comm_->exchange(send, shorter), Error);
  EXPECT_THROW(comm_->exchange(send, {}), Error);
}

TEST_P(CommunicatorTest, GathersUnevenAndEmptyParts) {
  for (int pattern = 0; pattern < 5; ++pattern) {
    std::vector<std::int64_t> parts;
    for (int r = 0; r < size(); ++r) {
      const std::vector<std::int64_t> patterns{17, 13 * r, r == size() - 1 ? 1000 : 0,
                                               r % 2 == 0 ? 0 : 50, 0};
      parts.push_back(patterns[as_size(pattern)]);
    }
    std::vector<std::byte> expected;
    for (int r = 0; r < size(); ++r) {
      for (std::int64_t i = 0; i < parts[as_size(r)]; ++i) {
        expected.push_back(expected_byte(r, 0, 0, i));
      }
    }
    expected.push_back(kPoison);
    std::vector<std::byte> all(expected.size(), kPoison);
    std::int64_t own = 0;
    for (int r = 0; r < rank(); ++r) own += parts[as_size(r)];
    for (std::int64_t i = 0; i < parts[as_size(rank())]; ++i) {
      all[as_size(own + i)] = expected_byte(rank(), 0, 0, i);
    }
    comm_->all_gather_v(all.data(), parts);
    EXPECT_TRUE(all == expected) << "pattern " << pattern;
  }
}

TEST_P(CommunicatorTest, GathersOneValueOfEachRank) {
  std::vector<std::int64_t> values(as_size(size()), -1);
  values[as_size(rank())] = 100 + rank();
  all_gather<std::int64_t>(*comm_, values);
  for (int r = 0; r < size(); ++r) EXPECT_EQ(values[as_size(r)], 100 + r);
}

TEST_P(CommunicatorTest, BroadcastsFromEachRoot) {
  for (int root = 0; root < size(); ++root) {
    for (const std::int64_t bytes : {0, 1, 5000}) {
      std::vector<std::byte> data(as_size(bytes) + 1, kPoison);
      std::vector<std::byte> expected = data;
      for (std::int64_t i = 0; i < bytes; ++i) {
        expected[as_size(i)] = expected_byte(root, 1, 2, i);
      }
      if (rank() == root) data = expected;
      comm_->broadcast(data.data(), bytes, root);
      EXPECT_TRUE(data == expected) << bytes << " bytes from " << root;
    }
  }
}

TEST_P(CommunicatorTest, AddsIntegersOfAllRanksExactly) {
  for (const std::int64_t count : {0, 1, 3, 700}) {
    std::vector<float> values(as_size(count) + 1, -5.0F);
    for (std::int64_t i = 0; i < count; ++i) {
      values[as_size(i)] = static_cast<float>((rank() + 1) * (i % 100));
    }
    comm_->all_reduce(values.data(), count);
    expect_sums(values.data(), 0, count);
    EXPECT_EQ(values.back(), -5.0F);
  }
}

TEST_P(CommunicatorTest, ReduceScatterLeavesEveryRankTheSumOfItsPart) {
  for (const std::int64_t most : {0, 1, 5, 300}) {
    for (const bool even : {true, false}) {
      std::vector<std::int64_t> counts;
      for (int r = 0; r < size(); ++r) counts.push_back(even ? most : (r * 7 + 3) % (most + 1));
      const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
      std::vector<float> values(as_size(total) + 1, -5.0F);
      for (std::int64_t i = 0; i < total; ++i) {
        values[as_size(i)] = static_cast<float>((rank() + 1) * (i % 100));
      }
      comm_->reduce_scatter_v(values.data(), counts);
      const std::int64_t first =
          std::accumulate(counts.begin(), counts.begin() + rank(), std::int64_t{0});
      expect_sums(values.data(), first, counts[as_size(rank())]);
      EXPECT_EQ(values.back(), -5.0F);
    }
  }
}

TEST_P(CommunicatorTest, NoRankLeavesABarrierBeforeTheLastOneEnters) {
  // Ranks of one machine share the clock.
  const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
  for (int late = 0; late < std::min(size(), 2); ++late) {
    if (rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(60));
    std::vector<std::int64_t> entered(as_size(size()));
    entered[as_size(rank())] = now();
    comm_->barrier();
    const std::int64_t left = now();
    all_gather<std::int64_t>(*comm_, entered);
    for (const std::int64_t time : entered) EXPECT_GE(left, time);
  }
}

TEST_P(CommunicatorTest, SplitsIntoGroupsByColourOrderedByRank) {
  for (int groups = 1; groups <= size(); ++groups) {
    const int colour = rank() % groups;
    const auto part = comm_->split(colour);
    EXPECT_EQ(part->rank(), rank() / groups);
    EXPECT_EQ(part->size(), (size() - colour + groups - 1) / groups);
    std::vector<int> members(as_size(part->size()));
    members[as_size(part->rank())] = rank();
    all_gather<int>(*part, members);
    for (int r = 0; r < part->size(); ++r) EXPECT_EQ(members[as_size(r)], colour + r * groups);
    exchange_and_check(*part, made_by(part->size(), [](int from, int to) {
      return Sizes{10 + from, 20 + to};
    }));
    // Groups don't hear each other, nor the whole that they came from.
    exchange_and_check(*comm_, made_by(size(), [](int, int) { return Sizes{3}; }));
  }
}

TEST_P(CommunicatorTest, CountsItsWaitsAsProgressOfTheOneWhoAsked) {
  const std::uint64_t before = comm_->progress().ticks();
  comm_->barrier();
  const std::uint64_t between = comm_->progress().ticks();
  comm_->split(0)->barrier();
  if (size() > 1) {
    EXPECT_GT(between, before);
    EXPECT_GT(comm_->progress().ticks(), between) << "a part counts for the whole";
  }
  EXPECT_FALSE(comm_->description().empty());
}

INSTANTIATE_TEST_SUITE_P(Backends, CommunicatorTest, ::testing::ValuesIn(backends()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace gatefold
