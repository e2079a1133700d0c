#include "parallel/row_window.h"

#include <algorithm>
#include <limits>

#include "parallel/row_messages.h"

namespace gatefold {
namespace {

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace

void RowWindow::lay_out(const CountMatrix& counts, std::int64_t top_k) {
  const int ranks = world_.size();
  std::vector<std::int64_t> held;  // rows
  std::vector<std::int64_t> sent(as_size(ranks));
  for (int r = 0; r < ranks; ++r) held.push_back(counts.rows(r));
  for (int source = 0; source < ranks; ++source) {
    for (int node = 0; node < map_.nodes(); ++node) {
      const std::int64_t rows = counts.to_node(source, node);
      sent[as_size(source)] += rows;
      held[as_size(map_.gateway(source, node))] += rows;
    }
  }
  top_k_ = top_k;
  most_bytes_ = 0;
  layouts_.clear();
  for (int r = 0; r < ranks; ++r) {
    layouts_.push_back(layout(counts, r, held[as_size(r)], sent[as_size(r)]));
    most_bytes_ = std::max(most_bytes_, layouts_.back().bytes);
  }
}

RowWindow::Layout RowWindow::layout(const CountMatrix& counts, int rank, std::int64_t held,
                                    std::int64_t sent) const {
  std::int64_t returned = 0;
  for (int peer = 0; peer < world_.size(); ++peer) {
    if (map_.neighbours(peer, rank)) continue;
    returned += counts.of(rank, shape_.group(peer)).roots * shape_.sum_bytes(shape_.member(peer));
  }
  const std::int64_t record = ExchangeShape::record_bytes(top_k_);
  const std::int64_t sums = counts.for_group(shape_.group(rank)).sums;
  Pieces pieces;
  Layout at;
  at.rows = pieces.add(held * row_pitch());
  at.records = pieces.add(held * record);
  at.sums = pieces.add(sums * shape_.sum_bytes(shape_.member(rank)));
  at.returned = pieces.add(returned);
  at.sent = pieces.add(sent * row_pitch());
  at.sent_records = pieces.add(sent * record);
  at.indices = pieces.add(StepIndices::bytes(shape_, counts, rank, sent));
  at.bytes = pieces.bytes();
  return at;
}

bool RowWindow::allocate() {
  const std::int64_t ample = std::max(most_bytes_, room() / 2 * 3);
  window_.reset();  // first, so that the two are never there together
  // Pieces of a node are numbered in 32 bits.
  const std::int64_t most = std::numeric_limits<std::int32_t>::max() / world_.size() * kPiece;
  if (ample > most) return false;
  window_ = world_.share(ample);
  return window_ != nullptr;
}

void RowWindow::exchange_between_nodes(const CountMatrix& counts, const DispatchPlan& to_nodes,
                                       std::byte* packed, std::byte* held, std::int64_t bytes) {
  const int me = world_.rank();
  sends_.clear();
  receives_.clear();
  for (int node = 0; node < map_.nodes(); ++node) {
    if (node == map_.node(me)) continue;
    sends_.push_back({map_.gateway(me, node), packed + to_nodes.begin[as_size(node)] * bytes,
                      to_nodes.count(node) * bytes});
  }
  std::byte* next = held + counts.rows(me) * bytes;
  for (int source = 0; source < world_.size(); ++source) {
    if (map_.neighbours(source, me) || map_.gateway(source, map_.node(me)) != me) continue;
    receives_.push_back({source, next, counts.to_node(source, map_.node(me)) * bytes});
    next += receives_.back().bytes;
  }
  world_.exchange(sends_, receives_);
}

void RowWindow::exchange_choices(const CountMatrix& counts, const DispatchPlan& to_nodes,
                                 const Choices& own_choices, std::vector<Arrival>& arrivals) {
  const std::int64_t record = ExchangeShape::record_bytes(top_k_);
  std::byte* records = own() + own_layout().records;
  for (std::int64_t row = 0; row < own_choices.rows; ++row) {
    write_record(own_choices, row, records + row * record);
  }
  if (map_.nodes() > 1) {
    std::byte* packed = own() + own_layout().sent_records;
    for (std::size_t i = 0; i < to_nodes.rows.size(); ++i) {
      write_record(own_choices, to_nodes.rows[i], packed + as_size(record) * i);
    }
    exchange_between_nodes(counts, to_nodes, packed, records, record);
  }
  window_->fence("the choices of a step");
  std::vector<std::int64_t> rows, came;
  const int node = map_.node(world_.rank());
  for (int source = 0; source < world_.size(); ++source) {
    rows.push_back(counts.rows(source));
    came.push_back(counts.to_node(source, node));
  }
  arrivals.clear();
  const std::int64_t step = row_pitch() / kPiece;
  for (const HeldRows& held : held_rows(map_, node, rows, came)) {
    const Layout& at = layouts_[as_size(held.holder)];
    arrivals.push_back({window_->segment(held.holder) + at.records + held.first * record,
                        held.count,
                        pieces_before(held.holder) + at.rows / kPiece + held.first * step, step});
  }
}

void RowWindow::find_roots(const CountMatrix& counts, const CombinePlan& plan,
                           std::vector<std::int32_t>& roots) const {
  const int me = world_.rank();
  roots.clear();
  std::vector<std::int64_t> of_group(plan.counts.size());  // where its first one begins
  std::int64_t returned = pieces_before(me) + own_layout().returned / kPiece;
  for (int member = 0; member < shape_.etp; ++member) {
    const std::int64_t width = shape_.sum_bytes(member) / kPiece;
    for (int g = 0; g < shape_.placement.groups; ++g) {
      const int peer = g * shape_.etp + member;
      std::int64_t& first = of_group[as_size(g)];
      if (!map_.neighbours(peer, me)) {
        first = returned;
        returned += plan.counts[as_size(g)].roots * width;
        continue;
      }
      first = pieces_before(peer) + layouts_[as_size(peer)].sums / kPiece;
      for (int home = 0; home < me; ++home) first += counts.of(home, g).roots * width;
    }
    for (std::size_t i = 0; i < plan.number.size(); ++i) {
      const std::int64_t first = of_group[as_size(plan.group_of[i])];
      roots.push_back(static_cast<std::int32_t>(first + plan.number[i] * width));
    }
  }
}

void RowWindow::dispatch(const CountMatrix& counts, const DispatchPlan& to_nodes,
                         const StepIndices& indices, const std::byte* x) {
  std::byte* rows = own() + own_layout().rows;
  device_.copy_rows(rows, row_pitch(), x, shape_.row_bytes(), counts.rows(world_.rank()),
                    shape_.row_bytes());
  if (map_.nodes() > 1) {
    std::byte* packed = own() + own_layout().sent;
    device_.gather_rows(packed, rows, indices.sent(), std::ssize(to_nodes.rows), row_pitch());
    exchange_between_nodes(counts, to_nodes, packed, rows, row_pitch());
  }
  window_->fence("the rows of a step");
}

void RowWindow::return_sums(const CountMatrix& counts) {
  const int me = world_.rank();
  if (map_.nodes() > 1) {
    const int group = shape_.group(me);
    sends_.clear();
    receives_.clear();
    std::byte* from = own() + own_layout().sums;
    for (int home = 0; home < world_.size(); ++home) {
      const std::int64_t bytes = counts.of(home, group).roots * shape_.sum_bytes(shape_.member(me));
      if (!map_.neighbours(home, me)) sends_.push_back({home, from, bytes});
      from += bytes;
    }
    std::byte* to = own() + own_layout().returned;
    for (int member = 0; member < shape_.etp; ++member) {
      for (int g = 0; g < shape_.placement.groups; ++g) {
        const int peer = g * shape_.etp + member;
        if (map_.neighbours(peer, me)) continue;
        receives_.push_back({peer, to, counts.of(me, g).roots * shape_.sum_bytes(member)});
        to += receives_.back().bytes;
      }
    }
    world_.exchange(sends_, receives_);
  }
  window_->fence("the sums of a step");
}

}  // namespace gatefold
