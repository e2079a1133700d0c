#include "parallel/row_messages.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "runtime/error.h"

namespace gatefold {
namespace {

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace

void grow(Device& device, Buffer& buffer, std::int64_t needed) {
  if (buffer.bytes() >= needed) return;
  const std::int64_t ample = std::max(needed, buffer.bytes() / 2 * 3);
  buffer = Buffer();  // first, so that the two are never there together
  try {
    buffer = device.allocate(ample);
  } catch (const Error&) {
    buffer = device.allocate(needed);
  }
}

void write_record(const Choices& choices, std::int64_t row, std::byte* to) {
  const auto k = as_size(choices.top_k);
  std::memcpy(to, choices.ids.data() + as_size(row) * k, 4 * k);
  std::memcpy(to + 4 * k, choices.weights.data() + as_size(row) * k, 4 * k);
}

void read_record(const std::byte* from, std::int64_t row, Choices& choices) {
  const auto k = as_size(choices.top_k);
  std::memcpy(choices.ids.data() + as_size(row) * k, from, 4 * k);
  std::memcpy(choices.weights.data() + as_size(row) * k, from + 4 * k, 4 * k);
}

std::int64_t RowMessages::sent_rows(const CountMatrix& counts, int rank) const {
  return alone() || !shape_.all_to_all() ? 0 : counts.of_source(rank).rows;
}

std::int64_t RowMessages::received_rows(const CountMatrix& counts, int rank) const {
  if (alone()) return 0;
  return shape_.all_to_all() ? counts.for_group(shape_.group(rank)).rows : counts.all_rows();
}

RowMessages::Layout RowMessages::layout(const CountMatrix& counts, int rank) const {
  const std::int64_t sent = sent_rows(counts, rank);
  std::int64_t returned = 0;
  for (int member = 0; !alone() && member < shape_.etp; ++member) {
    returned += counts.of_source(rank).roots * shape_.sum_bytes(member);
  }
  Pieces pieces;
  Layout at;
  at.sent = pieces.add(sent * shape_.row_bytes());
  at.received = pieces.add(received_rows(counts, rank) * shape_.row_bytes());
  at.sums =
      pieces.add(counts.for_group(shape_.group(rank)).sums * shape_.sum_bytes(shape_.member(rank)));
  at.returned = pieces.add(returned);
  at.indices = pieces.add(StepIndices::bytes(shape_, counts, rank, sent));
  at.bytes = pieces.bytes();
  return at;
}

StepRoom RowMessages::need(const CountMatrix& counts, int rank, std::int64_t top_k) const {
  const Layout at = layout(counts, rank);
  const std::int64_t sent = sent_rows(counts, rank);
  const std::int64_t came = alone() ? counts.rows(rank) : received_rows(counts, rank);
  const std::int64_t moved = (sent * shape_.etp + came) * shape_.row_bytes();
  return {at.bytes, (sent + came) * ExchangeShape::record_bytes(top_k),
          alone() ? 0 : std::max(moved, at.indices - at.sums)};
}

void RowMessages::allocate(const StepRoom& need) {
  grow(device_, memory_, need.device);
  room_.device = memory_.bytes();
  if (need.host > room_.host) {
    records_.reserve(as_size(need.host));
    received_records_.reserve(as_size(need.host));
    room_.host = need.host;
  }
  if (need.staged > room_.staged) {
    world_.reserve(need.staged);
    room_.staged = need.staged;
  }
}

void RowMessages::lay_out(const CountMatrix& counts) { at_ = layout(counts, world_.rank()); }

void RowMessages::gather_all_choices(const CountMatrix& counts, const Choices& own,
                                     std::vector<Arrival>& arrivals) {
  const std::int64_t record = ExchangeShape::record_bytes(own.top_k);
  received_records_.resize(as_size(counts.all_rows() * record));
  parts_.clear();
  std::int64_t before = 0;
  for (int r = 0; r < world_.size(); ++r) {
    if (r == world_.rank()) {
      for (std::int64_t row = 0; row < own.rows; ++row) {
        write_record(own, row, received_records_.data() + (before + row) * record);
      }
    }
    arrivals.push_back({received_records_.data() + before * record, counts.rows(r), before, 1});
    parts_.push_back(counts.rows(r) * record);
    before += counts.rows(r);
  }
  if (!alone()) world_.host().all_gather_v(received_records_.data(), parts_);
}

void RowMessages::exchange_choices(const CountMatrix& counts, const DispatchPlan& plan,
                                   const Choices& own, std::vector<Arrival>& arrivals) {
  arrivals.clear();
  if (alone() || !shape_.all_to_all()) {
    gather_all_choices(counts, own, arrivals);
    return;
  }
  const std::int64_t record = ExchangeShape::record_bytes(own.top_k);
  records_.resize(plan.rows.size() * as_size(record));
  for (std::size_t i = 0; i < plan.rows.size(); ++i) {
    write_record(own, plan.rows[i], records_.data() + i * as_size(record));
  }
  const int group = shape_.group(world_.rank());
  received_records_.resize(as_size(counts.for_group(group).rows * record));
  sends_.clear();
  receives_.clear();
  std::int64_t came = 0;
  for (int peer = 0; peer < world_.size(); ++peer) {
    const int to = shape_.group(peer);
    sends_.push_back(
        {peer, records_.data() + plan.begin[as_size(to)] * record, plan.count(to) * record});
    const std::int64_t count = counts.of(peer, group).rows;
    arrivals.push_back({received_records_.data() + came * record, count, came, 1});
    receives_.push_back({peer, received_records_.data() + came * record, count * record});
    came += count;
  }
  world_.host().exchange(sends_, receives_);
}

void RowMessages::find_roots(const CountMatrix& counts, const CombinePlan& plan,
                             std::vector<std::int32_t>& roots) const {
  roots.clear();
  std::vector<std::int64_t> of_group;  // where its first one begins
  std::int64_t begin = (alone() ? at_.sums : at_.returned) / kPiece;
  for (int member = 0; member < shape_.etp; ++member) {
    const std::int64_t width = shape_.sum_bytes(member) / kPiece;
    of_group.assign(1, begin);
    for (const GroupCounts& group : plan.counts) {
      of_group.push_back(of_group.back() + group.roots * width);
    }
    for (std::size_t i = 0; i < plan.number.size(); ++i) {
      const auto group = as_size(plan.group_of[i]);
      roots.push_back(static_cast<std::int32_t>(of_group[group] + plan.number[i] * width));
    }
    begin += counts.of_source(world_.rank()).roots * width;
  }
}

void RowMessages::dispatch(const CountMatrix& counts, const DispatchPlan& plan,
                           const StepIndices& indices, const std::byte* x) {
  rows_ = alone() ? x : memory_.data() + at_.received;
  if (alone()) return;
  if (shape_.all_to_all()) {
    send_rows(counts, plan, indices, x);
  } else {
    gather_all_rows(counts, x);
  }
}

void RowMessages::send_rows(const CountMatrix& counts, const DispatchPlan& plan,
                            const StepIndices& indices, const std::byte* x) {
  const std::int64_t row = shape_.row_bytes();
  std::byte* sent = memory_.data() + at_.sent;
  std::byte* next = memory_.data() + at_.received;
  device_.gather_rows(sent, x, indices.sent(), std::ssize(plan.rows), row);
  sends_.clear();
  receives_.clear();
  const int group = shape_.group(world_.rank());
  for (int peer = 0; peer < world_.size(); ++peer) {
    const int to = shape_.group(peer);
    sends_.push_back({peer, sent + plan.begin[as_size(to)] * row, plan.count(to) * row});
    receives_.push_back({peer, next, counts.of(peer, group).rows * row});
    next += receives_.back().bytes;
  }
  world_.exchange(sends_, receives_);
}

void RowMessages::gather_all_rows(const CountMatrix& counts, const std::byte* x) {
  const std::int64_t row = shape_.row_bytes();
  std::byte* received = memory_.data() + at_.received;
  parts_.clear();
  std::int64_t before = 0;
  for (int r = 0; r < world_.size(); ++r) {
    parts_.push_back(counts.rows(r) * row);
    if (r < world_.rank()) before += parts_.back();
  }
  device_.copy_rows(received + before, row, x, row, counts.rows(world_.rank()), row);
  world_.all_gather_v(received, parts_);
}

void RowMessages::return_sums(const CountMatrix& counts) {
  if (alone()) return;
  const int me = world_.rank();
  const int group = shape_.group(me);
  const std::int64_t own_bytes = shape_.sum_bytes(shape_.member(me));
  sends_.clear();
  receives_.clear();
  std::byte* from = memory_.data() + at_.sums;
  for (int peer = 0; peer < world_.size(); ++peer) {
    sends_.push_back({peer, from, counts.of(peer, group).roots * own_bytes});
    from += sends_.back().bytes;
  }
  std::byte* to = memory_.data() + at_.returned;
  for (int member = 0; member < shape_.etp; ++member) {
    const std::int64_t bytes = shape_.sum_bytes(member);
    for (int g = 0; g < shape_.placement.groups; ++g) {
      receives_.push_back({g * shape_.etp + member, to, counts.of(me, g).roots * bytes});
      to += receives_.back().bytes;
    }
  }
  world_.exchange(sends_, receives_);
}

}  // namespace gatefold
