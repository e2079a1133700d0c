#include "parallel/count_matrix.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "parallel/agreement.h"
#include "runtime/hash.h"

namespace gatefold {
namespace {

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// No rank says of more, so that sums over ranks don't overflow.
constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;

void add(GroupCounts& sum, const GroupCounts& one) {
  sum.rows += one.rows;
  sum.expert_rows += one.expert_rows;
  sum.roots += one.roots;
  sum.sums += one.sums;
}

}  // namespace

std::string contradiction(const std::string& what) {
  return what +
         " (the ranks disagree about a step's rows, or a message was altered); this is a fault of "
         "the network or of the program";
}

/// Or sizes of messages wouldn't match.
void gather_alike(Communicator& world, std::span<std::int64_t> values, const char* what) {
  if (world.size() == 1) return;
  const std::vector<std::int64_t> parts(
      as_size(world.size()), static_cast<std::int64_t>(values.size_bytes()) / world.size());
  world.host().all_gather_v(reinterpret_cast<std::byte*>(values.data()), parts);
  std::vector<std::uint64_t> hashes(as_size(world.size()));
  const std::uint64_t own = Fnv1a().add(std::as_bytes(values)).value();
  hashes[as_size(world.rank())] = own;
  all_gather<std::uint64_t>(world, hashes);
  for (const std::uint64_t hash : hashes) {
    if (hash == own) continue;
    throw AgreedError(ExitCode::kBackend,
                      contradiction(fmt::format("{} isn't the same on all ranks", what)));
  }
}

CountMatrix::CountMatrix(Communicator& world, const ExpertPlacement& placement, int nodes)
    : world_(world), placement_(placement), nodes_(nodes) {
  values_.resize(as_size(world.size() * width()));
}

GroupCounts CountMatrix::of(int source, int group) const {
  const int at = kGroups + kOfGroup * group;
  return {value(source, at), value(source, at + 1), value(source, at + 2), value(source, at + 3)};
}

void CountMatrix::exchange(const RankCounts& own, std::int64_t top_k,
                           const std::exception_ptr& failure) {
  std::int64_t* to = values_.data() + world_.rank() * width();
  *to++ = (own.failed ? kFailed : 0) + (own.given ? kGiven : 0);
  *to++ = own.rows;
  for (const std::int64_t n : {own.room.device, own.room.host, own.room.staged}) *to++ = n;
  *to++ = own.dropped;
  for (const GroupCounts& group : own.groups) {
    for (const std::int64_t n : {group.rows, group.expert_rows, group.roots, group.sums}) *to++ = n;
  }
  std::ranges::copy(own.nodes, to);
  gather_alike(world_, values_, "the count matrix of a dispatch");
  for (int source = 0; source < world_.size(); ++source) {
    if ((value(source, kStatus) & kFailed) == 0) continue;
    run_agreed(world_, [&] {
      if (failure) std::rethrow_exception(failure);
    });
  }
  check_given();
  check(top_k);
  add_up();
}

void CountMatrix::check_given() const {
  const auto given = [this](int rank) { return (value(rank, kStatus) & kGiven) != 0; };
  for (int rank = 1; rank < world_.size(); ++rank) {
    if (given(rank) == given(0)) continue;
    throw AgreedError(ExitCode::kUsage,
                      fmt::format("rank {} has a given routing and rank {} has none (tokens of one "
                                  "step are routed by one rule); give all ranks theirs, or none",
                                  given(0) ? 0 : rank, given(0) ? rank : 0));
  }
}

bool CountMatrix::right(int source, std::int64_t top_k) const {
  const std::int64_t tokens = rows(source);
  if (tokens < 0 || tokens > kMostTokens) return false;
  std::int64_t pairs = value(source, kDropped);
  if (pairs < 0 || pairs > tokens * top_k) return false;
  for (int g = 0; g < placement_.groups; ++g) {
    const GroupCounts n = of(source, g);
    const std::int64_t most = std::min(top_k, placement_.owned(g).size());
    const bool ordered = 0 <= n.rows && n.rows <= n.roots && n.roots <= n.sums &&
                         n.sums <= n.expert_rows && n.rows <= tokens;
    if (!ordered || n.expert_rows > n.rows * most) return false;
    pairs += n.expert_rows;
  }
  for (int node = 0; node < nodes_; ++node) {
    if (to_node(source, node) < 0 || to_node(source, node) > tokens) return false;
  }
  return pairs == tokens * top_k;
}

/// On every rank: all see the same matrix, so all throw or none does.
void CountMatrix::check(std::int64_t top_k) const {
  std::int64_t tokens = 0;
  for (int source = 0; source < world_.size(); ++source) {
    if (right(source, top_k)) {
      tokens += rows(source);
      continue;
    }
    throw AgreedError(
        ExitCode::kBackend,
        contradiction(fmt::format(
            "the count matrix of a dispatch has numbers for {} tokens of rank {} that can't be",
            rows(source), source)));
  }
  if (tokens <= std::numeric_limits<std::int32_t>::max() / top_k) return;
  throw AgreedError(
      ExitCode::kUsage,
      fmt::format("{} tokens with {} experts each in one step (their rows are numbered "
                  "in 32 bits); give fewer at a time",
                  tokens, top_k));
}

void CountMatrix::add_up() {
  for_group_.assign(as_size(placement_.groups), {});
  of_source_.assign(as_size(world_.size()), {});
  all_rows_ = 0;
  all_dropped_ = 0;
  for (int source = 0; source < world_.size(); ++source) {
    all_rows_ += rows(source);
    all_dropped_ += value(source, kDropped);
    for (int g = 0; g < placement_.groups; ++g) {
      const GroupCounts n = of(source, g);
      add(for_group_[as_size(g)], n);
      add(of_source_[as_size(source)], n);
    }
  }
}

void CountMatrix::agree(const std::exception_ptr& failure) {
  if (world_.size() > 1 && all_true(world_, !failure)) return;
  run_agreed(world_, [&] {
    if (failure) std::rethrow_exception(failure);
  });
}

}  // namespace gatefold
