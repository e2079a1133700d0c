#include "parallel/token_exchange.h"

#include <fmt/format.h>

#include <algorithm>

#include "parallel/agreement.h"
#include "runtime/phases.h"

namespace gatefold {
namespace {

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// The lowest rank on each rank's host. Collective.
std::vector<int> lowest_neighbours(Communicator& world) {
  const auto neighbours = world.split_by_host();
  std::vector<int> near(as_size(neighbours->size()));
  near[as_size(neighbours->rank())] = world.rank();
  all_gather<int>(*neighbours, near);
  std::vector<int> lowest(as_size(world.size()));
  lowest[as_size(world.rank())] = *std::ranges::min_element(near);
  all_gather<int>(world, lowest);
  return lowest;
}

/// What `step` throws, but for what ends the step at once: a peer that is lost learns of nothing.
template <typename Step>
std::exception_ptr failure_of(const Step& step) {
  try {
    step();
  } catch (const NoAnswerError&) {
    throw;
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace

TokenExchange::TokenExchange(Communicator& world, Device& device, const ExpertPlacement& placement,
                             int etp, std::int64_t hidden, DType dtype, Dispatcher dispatcher)
    : world_(world),
      device_(device),
      shape_{placement, etp, hidden, dtype, dispatcher},
      map_(lowest_neighbours(world.host())),
      counts_(world, placement, map_.nodes()),
      messages_(world, device, shape_) {
  if (world.size() > 1 && device.in_host_memory()) window_.emplace(world, device, shape_, map_);
}

void TokenExchange::plan(const Choices& own, const std::exception_ptr& failed, bool given) {
  std::exception_ptr failure = failed;
  if (!failure) {
    failure = failure_of([&] {
      dispatch_.make(shape_.placement, own);
      combine_.make(shape_.placement, own);
      to_nodes_.make(map_, world_.rank(), shape_.placement, shape_.etp, own, !shape_.all_to_all());
    });
  }
  counts_.exchange(own_counts(own, failure != nullptr, given), own.top_k, failure);
  make_room(own.top_k);
  if (window_) {
    window_->exchange_choices(counts_, to_nodes_.plan, own, arrivals_);
  } else {
    messages_.lay_out(counts_);
    messages_.exchange_choices(counts_, dispatch_, own, arrivals_);
  }
  // What can fail on one rank, and not in the middle of an exchange.
  counts_.agree(failure_of([&] {
    keep_received_choices(own.top_k);
    experts_.make(shape_.placement, group(), received_choices_, rows_of_source_);
    check_received_counts();
    upload_indices();
  }));
  count_moved_rows(own);
}

RankCounts TokenExchange::own_counts(const Choices& own, bool failed, bool given) const {
  RankCounts counts;
  counts.groups.resize(as_size(shape_.placement.groups));
  counts.nodes.resize(as_size(map_.nodes()));
  counts.failed = failed;
  counts.given = given;
  if (failed) return counts;
  counts.rows = own.rows;
  counts.dropped = std::ranges::count(own.ids, Choices::kDropped);
  counts.room = window_ ? StepRoom{window_->room(), 0, 0} : messages_.room();
  counts.groups = combine_.counts;
  for (int node = 0; node < map_.nodes(); ++node) {
    counts.nodes[as_size(node)] = to_nodes_.plan.count(node);
  }
  return counts;
}

/// Everybody sees who has too little, so that all agree on it only then.
void TokenExchange::make_room(std::int64_t top_k) {
  bool enough = true;
  if (window_) {
    window_->lay_out(counts_, top_k);
    if (window_->has_room() || window_->allocate()) return;
    window_.reset();  // messages have to do from now on, for which nobody has memory yet
    enough = false;
  }
  for (int rank = 0; rank < world_.size(); ++rank) {
    enough = enough && counts_.room(rank).covers(messages_.need(counts_, rank, top_k));
  }
  if (enough) return;
  run_agreed(world_, [&] { messages_.allocate(messages_.need(counts_, world_.rank(), top_k)); });
}

/// Of the tokens that came those that have an expert here, after a look at each.
void TokenExchange::keep_received_choices(std::int64_t top_k) {
  const Range own = shape_.placement.owned(group());
  std::int64_t came = 0;
  for (const Arrival& arrival : arrivals_) came += arrival.count;
  received_choices_.resize(came, top_k);
  rows_of_source_.clear();
  row_at_.clear();
  std::int64_t kept = 0;
  for (int source = 0; source < world_.size(); ++source) {
    const Arrival& from = arrivals_[as_size(source)];
    const std::int64_t before = kept;
    for (std::int64_t i = 0; i < from.count; ++i) {
      read_record(from.records + i * ExchangeShape::record_bytes(top_k), kept, received_choices_);
      const auto ids = received_choices_.ids_of(kept);
      const bool ascending = std::ranges::adjacent_find(ids, std::greater_equal<>()) == ids.end();
      const bool inside =
          ids.empty() || (ids.front() >= 0 && ids.back() < shape_.placement.experts);
      if (!ascending || !inside) {
        throw Error(
            ExitCode::kBackend,
            contradiction(fmt::format(
                "a token from rank {} came with expert ids out of order or range", source)));
      }
      if (std::ranges::none_of(ids, [own](auto id) { return own.contains(id); })) continue;
      row_at_.push_back(from.first_row + i * from.row_step);
      ++kept;
    }
    rows_of_source_.push_back(kept - before);
  }
  received_choices_.resize(kept, top_k);
}

/// What the tokens that came lead to is what their homes said, or sums would be mistaken for
/// others.
void TokenExchange::check_received_counts() const {
  for (int source = 0; source < world_.size(); ++source) {
    const GroupCounts& said = counts_.of(source, group());
    if (rows_of_source_[as_size(source)] == said.rows &&
        experts_.roots_of_source[as_size(source)] == said.roots) {
      continue;
    }
    throw Error(ExitCode::kBackend,
                contradiction(fmt::format("tokens from rank {} came with other experts than it "
                                          "said in the count matrix",
                                          source)));
  }
  const GroupCounts& said = counts_.for_group(group());
  if (experts_.sums == said.sums && std::ssize(experts_.rows) == said.expert_rows) return;
  throw Error(ExitCode::kBackend,
              contradiction("tokens came with other experts than the count matrix says"));
}

void TokenExchange::upload_indices() {
  for (std::int32_t& row : experts_.rows) {
    row = static_cast<std::int32_t>(row_at_[as_size(row)]);
  }
  if (window_) {
    window_->find_roots(counts_, combine_, roots_);
    indices_.upload(device_, window_->indices(), to_nodes_.plan.rows, experts_, combine_, roots_);
    return;
  }
  messages_.find_roots(counts_, combine_, roots_);
  const bool sends = world_.size() > 1 && shape_.all_to_all();
  indices_.upload(
      device_, messages_.indices(),
      sends ? std::span<const std::int32_t>(dispatch_.rows) : std::span<const std::int32_t>(),
      experts_, combine_, roots_);
}

void TokenExchange::count_moved_rows(const Choices& own) {
  moved_ = {};
  moved_.received = received_choices_.rows;
  moved_.dropped = counts_.all_dropped();
  moved_.once_a_host = std::ssize(to_nodes_.plan.rows);
  const int me = world_.rank();
  for (int peer = 0; peer < world_.size(); ++peer) {
    if (peer == me) continue;
    const std::int64_t rows =
        shape_.all_to_all() ? counts_.of(me, shape_.group(peer)).rows : own.rows;
    moved_.sent += rows;
    if (!map_.neighbours(peer, me)) moved_.sent_to_hosts += rows;
    moved_.returned += experts_.roots_of_source[as_size(peer)];
  }
  if (window_) moved_.sent_to_hosts = moved_.once_a_host;
}

void TokenExchange::dispatch(const std::byte* x) {
  Phases phases(device_);
  phases.enter("dispatch");
  if (window_) {
    window_->dispatch(counts_, to_nodes_.plan, indices_, x);
  } else {
    messages_.dispatch(counts_, dispatch_, indices_, x);
  }
}

InputRows TokenExchange::input(std::int64_t own_expert, std::int64_t first, bool weigh) const {
  const std::int64_t at = experts_.begin[as_size(own_expert)] + first;
  const std::byte* rows = window_ ? window_->rows() : messages_.rows();
  const std::int64_t stride = window_ ? window_->row_stride() : messages_.row_stride();
  return {rows, stride, indices_.rows() + at, weigh ? indices_.weights() + at : nullptr};
}

WeighedRows TokenExchange::output(std::int64_t own_expert, std::int64_t first, std::int64_t count,
                                  bool weigh) const {
  const std::int64_t at = experts_.begin[as_size(own_expert)] + first;
  WeighedRows rows;
  rows.count = count;
  rows.groups = own_groups().size();
  rows.weights = weigh ? indices_.weights() + at : nullptr;
  rows.merge_begin = indices_.merge_begin() + at;
  rows.merges = indices_.merges();
  rows.targets = indices_.targets() + at;
  rows.sums = window_ ? window_->sums() : messages_.sums();
  return rows;
}

void TokenExchange::combine(std::span<const SharedRows> shared, std::byte* y) {
  Phases phases(device_);
  phases.enter("combine");
  if (window_) {
    window_->return_sums(counts_);
  } else {
    messages_.return_sums(counts_);
  }
  for (int member = 0; member < shape_.etp; ++member) {
    const Range groups = shape_.share(member);
    CombinedRows rows;
    rows.sums = window_ ? window_->root_base() : messages_.root_base();
    rows.begin = indices_.combine_begin();
    rows.roots = indices_.combine_roots(member);
    rows.merges = indices_.combine_merges();
    rows.tokens = counts_.rows(world_.rank());
    rows.groups = groups.size();
    rows.root_stride = kGroup;
    rows.first_column = groups.begin * kGroup;
    rows.columns = std::min(shape_.hidden - rows.first_column, groups.size() * kGroup);
    rows.shared = shared;
    rows.row_stride = shape_.hidden;
    rows.dtype = shape_.dtype;
    rows.y = y;
    device_.combine_rows(rows);
  }
}

void TokenExchange::copy_map(RowMap& map) const {
  map.sent = dispatch_.rows;
  map.sent_begin = dispatch_.begin;
  map.rows_of_source = rows_of_source_;
  map.expert_begin = experts_.begin;
  map.weights = experts_.weights;
  // Where rows lie is known by now, and no longer which they are.
  map.received.resize(experts_.rows.size());
  std::vector<std::int64_t> next(experts_.begin.begin(), experts_.begin.end() - 1);
  const Range own = shape_.placement.owned(group());
  for (std::int64_t row = 0; row < received_choices_.rows; ++row) {
    for (const std::int32_t id : received_choices_.ids_of(row)) {
      if (!own.contains(id)) continue;
      map.received[as_size(next[as_size(id - own.begin)]++)] = static_cast<std::int32_t>(row);
    }
  }
}

}  // namespace gatefold
