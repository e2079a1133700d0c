#include "layers/dropper.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "parallel/agreement.h"
#include "parallel/count_matrix.h"
#include "runtime/routing_math.h"

namespace gatefold {
namespace {

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// Calls visit(expert, choice) for every choice of these rows, in order.
template <typename Visit>
void for_choices(const Choices& own, Range rows, const Visit& visit) {
  for (std::int64_t i = rows.begin * own.top_k; i < rows.end * own.top_k; ++i) {
    visit(as_size(own.ids[as_size(i)]), as_size(i));
  }
}

/// Larger for what is kept first: `position` is that of the row among its expert's.
std::int64_t keep_key(DropBy drop, float weight, std::int64_t position) {
  return drop == DropBy::kPosition ? -position : choice_key(weight, position);
}

}  // namespace

Dropper::Dropper(Communicator& world, const Capacity& capacity, std::int64_t experts)
    : world_(world), capacity_(capacity), experts_(experts) {
  check(capacity);
  edge_rows_.resize(as_size(world.size() * 2 * experts));
}

void Dropper::decide(const Choices& own, std::int64_t tokens, bool failed) {
  padded_rows_ = 0;
  kept_.assign(own.ids.size(), 1);
  if (!gather_rows(own.rows, tokens, failed) || tokens == 0) return;
  most_ = capacity_rows(capacity_, length_, experts_, own.top_k);
  if (capacity_.pad) padded_rows_ = tokens / length_ * most_;
  gather_edges(own);
  if (capacity_.drop == DropBy::kProbability) gather_weights(own);
  const std::vector<std::int64_t> ends = edges_of(world_.rank());
  if (ends.empty()) return;
  for (std::int64_t s = ends.front(); s <= ends.back(); ++s) keep(own, s);
}

/// False where a rank has failed.
bool Dropper::gather_rows(std::int64_t rows, std::int64_t tokens, bool failed) {
  std::vector<std::int64_t> said(as_size(world_.size() * 3));
  const auto own = said.begin() + world_.rank() * 3;
  own[0] = failed ? 1 : 0;
  own[1] = rows;
  own[2] = tokens;
  gather_alike(world_, said, "what ranks say of their tokens before any is dropped");
  begin_.assign(1, 0);
  bool go_on = true;
  bool same = true;
  for (auto of = said.begin(); of != said.end(); of += 3) {
    go_on = go_on && of[0] == 0;
    same = same && of[2] == said[2];
    begin_.push_back(begin_.back() + of[1]);
  }
  if (!go_on) return false;
  if (!same || begin_.back() != said[2]) {
    throw AgreedError(ExitCode::kUsage,
                      fmt::format("{} tokens of all ranks in a step of {} (a capacity counts the "
                                  "tokens of all); give each rank its own rows, and all of them "
                                  "the same number of rows in all",
                                  begin_.back(), said[2]));
  }
  length_ =
      capacity_.sequence_length > 0 ? capacity_.sequence_length : std::max<std::int64_t>(1, tokens);
  if (tokens % length_ == 0) return true;
  throw AgreedError(ExitCode::kUsage,
                    fmt::format("{} tokens in sequences of {} (each has a capacity of its own, so "
                                "they have to be whole); correct one of them",
                                tokens, length_));
}

std::vector<std::int64_t> Dropper::edges_of(int rank) const {
  const Range tokens{begin_[as_size(rank)], begin_[as_size(rank) + 1]};
  if (tokens.empty()) return {};
  const std::int64_t first = tokens.begin / length_;
  const std::int64_t last = (tokens.end - 1) / length_;
  return first == last ? std::vector{first} : std::vector{first, last};
}

const std::int64_t* Dropper::edge_rows(int rank, std::size_t edge) const {
  return edge_rows_.data() + as_size((rank * 2 + static_cast<std::int64_t>(edge)) * experts_);
}

Range Dropper::own_rows(std::int64_t sequence) const {
  const std::int64_t first = begin_[as_size(world_.rank())];
  const std::int64_t end = begin_[as_size(world_.rank()) + 1];
  return {std::max(first, sequence * length_) - first,
          std::min(end, (sequence + 1) * length_) - first};
}

/// Sequences between a rank's first and last are its own alone.
void Dropper::gather_edges(const Choices& own) {
  const int me = world_.rank();
  std::int64_t* to = edge_rows_.data() + as_size(me * 2 * experts_);
  std::fill_n(to, 2 * experts_, 0);
  for (const std::int64_t s : edges_of(me)) {
    for_choices(own, own_rows(s), [to](std::size_t e, std::size_t) { ++to[e]; });
    to += experts_;
  }
  gather_alike(world_, edge_rows_, "the rows of experts before any is dropped");
  edges_.clear();
  for (int rank = 0; rank < world_.size(); ++rank) {
    const std::vector<std::int64_t> sequences = edges_of(rank);
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      Edge& edge = edges_[sequences[i]];
      edge.rows.resize(as_size(experts_));
      edge.before.resize(as_size(experts_));
      ++edge.ranks;
      const std::int64_t* rows = edge_rows(rank, i);
      const auto add = [rows, this](OfExperts& sum) {
        std::transform(sum.begin(), sum.end(), rows, sum.begin(), std::plus<>());
      };
      add(edge.rows);
      if (rank < me) add(edge.before);
    }
  }
}

template <typename Visit>
void Dropper::for_shared(const Visit& visit) const {
  for (int rank = 0; rank < world_.size(); ++rank) {
    const std::vector<std::int64_t> sequences = edges_of(rank);
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const Edge& edge = edges_.at(sequences[i]);
      for (std::size_t e = 0; edge.ranks > 1 && e < edge.rows.size(); ++e) {
        if (edge.rows[e] > most_) visit(rank, sequences[i], e, edge_rows(rank, i)[e]);
      }
    }
  }
}

/// Weights of experts that have too many rows, of sequences that several ranks have tokens of.
void Dropper::gather_weights(const Choices& own) {
  std::vector<std::int64_t> parts(as_size(world_.size()));
  std::int64_t all = 0;
  std::map<std::int64_t, OfExperts> next;  // where own ones go
  for_shared([&](int rank, std::int64_t sequence, std::size_t e, std::int64_t rows) {
    if (rank == world_.rank()) {
      OfExperts& at = next[sequence];
      at.resize(as_size(experts_), -1);
      at[e] = all;
    }
    parts[as_size(rank)] += rows * static_cast<std::int64_t>(sizeof(float));
    all += rows;
  });
  // The same on all ranks, which have grown alike.
  if (as_size(all) > weights_.capacity()) {
    run_agreed(world_, [&] { weights_.reserve(as_size(all)); });
  }
  weights_.resize(as_size(all));
  if (all == 0) return;
  for (auto& [sequence, at] : next) {
    for_choices(own, own_rows(sequence), [&, this](std::size_t e, std::size_t i) {
      if (at[e] >= 0) weights_[as_size(at[e]++)] = own.weights[i];
    });
  }
  world_.host().all_gather_v(reinterpret_cast<std::byte*>(weights_.data()), parts);
}

/// Of each expert the lowest key that it keeps.
Dropper::OfExperts Dropper::lowest_keys(const Choices& own, std::int64_t sequence) const {
  if (capacity_.drop == DropBy::kPosition) return OfExperts(as_size(experts_), 1 - most_);
  std::vector<OfExperts> keys(as_size(experts_));
  const auto add = [&keys](std::size_t e, float weight) {
    keys[e].push_back(keep_key(DropBy::kProbability, weight, std::ssize(keys[e])));
  };
  const auto edge = edges_.find(sequence);
  if (edge == edges_.end() || edge->second.ranks == 1) {
    for_choices(own, own_rows(sequence),
                [&](std::size_t e, std::size_t i) { add(e, own.weights[i]); });
  } else {
    auto weight = weights_.begin();
    for_shared([&](int, std::int64_t of, std::size_t e, std::int64_t rows) {
      for (std::int64_t i = 0; of == sequence && i < rows; ++i) add(e, weight[i]);
      weight += rows;
    });
  }
  OfExperts lowest(as_size(experts_), kTakenKey);
  for (std::size_t e = 0; e < keys.size(); ++e) {
    if (std::ssize(keys[e]) <= most_) continue;
    const auto last = keys[e].begin() + (most_ - 1);
    std::nth_element(keys[e].begin(), last, keys[e].end(), std::greater<>());
    lowest[e] = *last;
  }
  return lowest;
}

void Dropper::keep(const Choices& own, std::int64_t sequence) {
  const OfExperts lowest = lowest_keys(own, sequence);
  const auto edge = edges_.find(sequence);
  OfExperts next = edge == edges_.end() ? OfExperts(as_size(experts_)) : edge->second.before;
  for_choices(own, own_rows(sequence), [&, this](std::size_t e, std::size_t i) {
    kept_[i] = keep_key(capacity_.drop, own.weights[i], next[e]++) >= lowest[e] ? 1 : 0;
  });
}

}  // namespace gatefold
