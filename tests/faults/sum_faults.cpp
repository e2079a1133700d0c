#include "tests/faults/sum_faults.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace gatefold {
namespace {

using Transfers = std::span<const Transfer>;

void forget(const Transfer& t) { std::memset(t.data, 0, static_cast<std::size_t>(t.bytes)); }

void add_own_roots_only(Communicator& inner, Transfers sends, Transfers receives) {
  inner.exchange(sends, receives);
  for (const Transfer& t : receives) {
    if (t.peer != inner.rank()) forget(t);
  }
}

/// A group's roots arrive, and then arrive again on top.
void add_twice(Communicator& inner, Transfers sends, Transfers receives) {
  inner.exchange(sends, receives);
  std::vector<std::vector<float>> once;
  for (const Transfer& t : receives) {
    const auto* values = reinterpret_cast<const float*>(t.data);
    once.emplace_back(values, values + t.bytes / static_cast<std::int64_t>(sizeof(float)));
  }
  inner.exchange(sends, receives);
  for (std::size_t i = 0; i < receives.size(); ++i) {
    auto* values = reinterpret_cast<float*>(receives[i].data);
    for (std::size_t k = 0; k < once[i].size(); ++k) values[k] += once[i][k];
  }
}

/// The first peer's roots take the second's place, and so on; one root each, of the same size.
void rotate_roots(Communicator& inner, Transfers sends, Transfers receives) {
  std::vector<Transfer> rotated(receives.begin(), receives.end());
  for (std::size_t i = 0; i < rotated.size(); ++i) {
    rotated[i].data = receives[(i + 1) % receives.size()].data;
  }
  inner.exchange(sends, rotated);
}

void send_half(Communicator& inner, Transfers sends, Transfers receives) {
  std::vector<Transfer> halves(sends.begin(), sends.end());
  for (Transfer& t : halves) {
    if (t.peer != inner.rank()) t.bytes /= 2;
  }
  inner.exchange(halves, receives);
}

}  // namespace

HookedCommunicator::Exchange sum_fault(const Fault& fault) {
  const auto on_one_rank = [fault](const HookedCommunicator::Exchange& wrong) {
    return [fault, wrong](Communicator& inner, Transfers sends, Transfers receives) {
      if (inner.rank() == fault.rank) return wrong(inner, sends, receives);
      inner.exchange(sends, receives);
    };
  };
  if (fault.is("sum_skipped")) return add_own_roots_only;
  if (fault.is("sum_twice")) return add_twice;
  if (fault.is("order_changed")) return on_one_rank(rotate_roots);
  if (fault.is("one_rank_dropped")) {
    return [fault](Communicator& inner, Transfers sends, Transfers receives) {
      inner.exchange(sends, receives);
      for (const Transfer& t : receives) {
        if (t.peer == fault.rank) forget(t);
      }
    };
  }
  if (fault.is("message_halved")) return on_one_rank(send_half);
  if (fault.is("exchange_left_out")) return on_one_rank([](Communicator&, Transfers, Transfers) {});
  return {};
}

}  // namespace gatefold
