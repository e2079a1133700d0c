#include "parallel/tree_sum.h"

#include <algorithm>

#include "runtime/phases.h"

namespace gatefold {

namespace {

/// Up to so many bytes a node's ranks have a second stack each, which saves them a wait.
constexpr std::int64_t kTurnBytes = 64 << 10;

int most_slots(const SumTree& tree, std::span<const Range> runs) {
  int most = 1;
  for (const Range run : runs) most = std::max(most, tree.local_plan(run).depth);
  return most;
}

}  // namespace

TreeSum::TreeSum(Communicator& comm, Device& device, const SumTree& tree, std::vector<Range> runs,
                 std::int64_t columns, std::optional<std::int64_t> one_shot_bytes,
                 WithinNode within)
    : comm_(comm),
      device_(device),
      runs_(std::move(runs)),
      plan_(tree.global_plan(runs_)),
      columns_(columns),
      one_shot_bytes_(one_shot_bytes),
      within_(within),
      window_({most_slots(tree, runs_), groups(), ceil_div(groups(), comm.size()),
               kTurnBytes / (most_slots(tree, runs_) * slot_bytes(1))}) {
  for (const Range run : runs_) root_counts_.push_back(tree.local_plan(run).roots);
  slots_ = std::max(1, tree.local_plan(runs_[static_cast<std::size_t>(comm.rank())]).depth);
}

TreeSum::Slice TreeSum::slice_of(int rank, std::int64_t rows, Rows where) const {
  if (where == Rows::kScattered) return {{0, groups()}, even_part(rows, comm_.size(), rank)};
  if (whole_) return {{0, groups()}, {0, rows}};
  return {even_part(groups(), comm_.size(), rank), {0, rows}};
}

std::int64_t TreeSum::all_roots_bytes(std::int64_t rows) const {
  return static_cast<std::int64_t>(plan_.merges.size()) * slot_bytes(rows);
}

bool TreeSum::one_shot(std::int64_t rows, DType dtype) const {
  const std::int64_t roots = all_roots_bytes(rows);
  if (has_far_ranks() || one_shot_bytes_) return roots <= one_shot_bytes();
  // What two halves save of what a rank reads of the others: slices of roots and of the sum in
  // place of all roots.
  const std::int64_t ranks = comm_.size();
  const std::int64_t gathered = gathered_bytes(rows, dtype);
  const std::int64_t saved = roots - roots / ranks - gathered;
  const std::int64_t taken_back = roots <= kCachedRoots ? kTakeBack * gathered / ranks : 0;
  return saved * (ranks - 1) / ranks <= kFenceBytes + taken_back;
}

std::int64_t TreeSum::stack_bytes(std::int64_t rows) const { return slots_ * slot_bytes(rows); }

std::int64_t TreeSum::received_bytes(std::int64_t rows) const {
  if (comm_.size() == 1) return 0;
  // The larger of the two kinds of slices, which differ by rounding.
  const std::int64_t own_groups = ceil_div(groups(), comm_.size());
  const std::int64_t own_rows = ceil_div(rows, comm_.size());
  const std::int64_t floats = std::max(own_groups * rows, groups() * own_rows) * kGroup;
  const std::int64_t in_slices =
      static_cast<std::int64_t>(plan_.merges.size()) * floats * size_of(DType::kF32);
  // Fewer rows may come whole.
  return std::max(in_slices, std::min(all_roots_bytes(rows), one_shot_bytes()));
}

std::int64_t TreeSum::gathered_bytes(std::int64_t rows, DType dtype) const {
  return comm_.size() == 1 ? 0 : groups() * rows * kGroup * size_of(dtype);
}

/// At most. Fast mode's sum moves one root, of a rank without blocks too.
std::int64_t TreeSum::sent_bytes(std::int64_t rows) const {
  const std::int64_t bytes = std::max(1, own_roots()) * slot_bytes(rows);
  return std::max(bytes, (comm_.size() - 1) * std::min(bytes, one_shot_bytes()));
}

void TreeSum::share(std::int64_t rows) {
  if (comm_.size() == 1 || !device_.in_host_memory()) return;
  if (within_ == WithinNode::kSharedMemory) window_.share(comm_, rows);
}

std::int64_t TreeSum::bytes_to_others(std::int64_t rows, DType dtype, Rows where) const {
  const int me = comm_.rank();
  const bool one_shot = where == Rows::kReplicated && all_roots_bytes(rows) <= one_shot_bytes();
  const auto values = [&](int rank) {  // of a rank's slice of the sum
    if (where == Rows::kScattered) {
      return groups() * even_part(rows, comm_.size(), rank).size() * kGroup;
    }
    return (one_shot ? groups() : even_part(groups(), comm_.size(), rank).size()) * rows * kGroup;
  };
  std::int64_t bytes = 0;
  for (int peer = 0; peer < comm_.size(); ++peer) {
    if (peer == me) continue;
    bytes += root_counts_[static_cast<std::size_t>(me)] * values(peer) * size_of(DType::kF32);
    const bool gathers = where == Rows::kReplicated && !one_shot;
    if (gathers) bytes += values(me) * size_of(dtype);
  }
  return bytes;
}

void TreeSum::reserve(std::int64_t rows, DType dtype) {
  share(rows);
  const auto grow = [this](Buffer& buffer, std::int64_t bytes) {
    if (buffer.bytes() < bytes) buffer = device_.allocate(bytes);
  };
  if (!window_.exists()) grow(stack_, stack_bytes(rows));
  if (has_far_ranks()) {
    grow(received_, received_bytes(rows));
    grow(gathered_, gathered_bytes(rows, dtype));
  }
  comm_.reserve(std::max(sent_bytes(rows) + received_bytes(rows), gathered_bytes(rows, dtype)));
  // The lists of an exchange at their longest, one message per root and group.
  const std::size_t peers = root_counts_.size();
  const auto pieces = static_cast<std::size_t>(groups());
  roots_.reserve(std::max<std::size_t>(1, plan_.merges.size()));
  receives_.reserve(std::max(peers, plan_.merges.size() * pieces));
  sends_.reserve(peers * std::max<std::size_t>(1, static_cast<std::size_t>(own_roots()) * pieces));
  parts_.reserve(peers);
}

Partials TreeSum::stack(std::int64_t rows) {
  begun_ = window_.exists() ? window_.begin(rows) : stack_.as<float>();
  return {begun_, rows, groups(), kGroup, rows * kGroup, groups() * rows * kGroup};
}

/// The roots where peers can read them, if there is such a place: copied, where they aren't yet.
Partials TreeSum::in_stack(const Partials& own) {
  if (!window_.exists() || own.data == begun_) return own;
  const Partials shared = stack(own.rows);
  const std::int64_t element = size_of(DType::kF32);
  device_.copy_rows(reinterpret_cast<std::byte*>(shared.data), shared.slot_stride * element,
                    reinterpret_cast<const std::byte*>(own.data), own.slot_stride * element,
                    own_roots(), slot_bytes(own.rows));
  return shared;
}

/// A root that lies on this node, from the slice's first row and group on.
const float* TreeSum::near_root(const Partials& own, int rank, int root, const Slice& slice) const {
  Partials partials = own;
  if (rank != comm_.rank()) partials.data = window_.stack(rank);
  return partials.at(root, slice.groups.begin) + slice.rows.begin * kGroup;
}

/// First half's movement: every root's slice comes to the slice's owner. Fills roots_ with what
/// this rank adds: roots of this node in place, the others' as received.
void TreeSum::exchange_roots(const Partials& own, Rows where) {
  const Slice mine = slice_of(comm_.rank(), own.rows, where);
  // Rows that are cut have another group stride once received, so the near ones are copied too.
  const bool cut = where == Rows::kScattered && has_far_ranks();
  root_row_stride_ = kGroup;
  root_group_stride_ = (cut ? mine.rows.size() : own.rows) * kGroup;
  list_roots(own, mine, cut);
  if (has_far_ranks()) {
    list_sends(own, where);
    comm_.exchange(sends_, receives_);
  }
  if (window_.exists()) window_.publish();
  if (cut) copy_near_roots(own, mine);
}

void TreeSum::list_roots(const Partials& own, const Slice& mine, bool cut) {
  receives_.clear();
  roots_.clear();
  const std::int64_t floats = mine.groups.size() * mine.rows.size() * kGroup;
  // Cut rows arrive group by group, whole slices at once: as they are sent.
  const std::int64_t pieces = cut ? mine.groups.size() : 1;
  float* next = received_.as<float>();
  for (int peer = 0; peer < comm_.size(); ++peer) {
    for (int root = 0; root < root_counts_[static_cast<std::size_t>(peer)]; ++root) {
      if (is_near(peer) && !cut) {
        roots_.push_back(near_root(own, peer, root, mine));
        continue;
      }
      roots_.push_back(next);
      for (std::int64_t p = 0; p < pieces && !is_near(peer); ++p) {
        receives_.push_back({peer, reinterpret_cast<std::byte*>(next + p * floats / pieces),
                             floats / pieces * size_of(DType::kF32)});
      }
      next += floats;
    }
  }
}

void TreeSum::list_sends(const Partials& own, Rows where) {
  sends_.clear();
  const std::int64_t row_bytes = kGroup * size_of(DType::kF32);
  for (int peer = 0; peer < comm_.size(); ++peer) {
    if (is_near(peer)) continue;
    const Slice to = slice_of(peer, own.rows, where);
    for (int root = 0; root < own_roots(); ++root) {
      const bool cut = where == Rows::kScattered;
      const std::int64_t step = cut ? 1 : std::max<std::int64_t>(1, to.groups.size());
      for (std::int64_t g = to.groups.begin; g < to.groups.end; g += step) {
        float* from = own.at(root, g) + to.rows.begin * own.row_stride;
        sends_.push_back(
            {peer, reinterpret_cast<std::byte*>(from), step * to.rows.size() * row_bytes});
      }
    }
  }
}

/// The rows of this rank, to where list_roots() has left room between the received ones.
void TreeSum::copy_near_roots(const Partials& own, const Slice& mine) {
  const std::int64_t floats = mine.rows.size() * kGroup;
  if (floats == 0) return;
  const std::int64_t element = size_of(DType::kF32);
  float* next = received_.as<float>();
  for (int peer = 0; peer < comm_.size(); ++peer) {
    for (int root = 0; root < root_counts_[static_cast<std::size_t>(peer)]; ++root) {
      if (is_near(peer)) {
        const float* from = near_root(own, peer, root, mine);
        device_.copy_rows(reinterpret_cast<std::byte*>(next), floats * element,
                          reinterpret_cast<const std::byte*>(from), own.group_stride * element,
                          groups(), floats * element);
      }
      next += groups() * floats;
    }
  }
}

void TreeSum::add_slice(const MergePlan& plan, const float* bias, DType dtype, const Slice& slice,
                        std::byte* out, std::int64_t out_row_stride,
                        std::int64_t out_group_stride) {
  const std::int64_t first = slice.groups.begin * kGroup;
  RootSum sum;
  sum.roots = roots_;
  sum.plan = &plan;
  sum.groups = slice.groups.size();
  sum.rows = slice.rows.size();
  sum.row_stride = root_row_stride_;
  sum.group_stride = root_group_stride_;
  sum.bias = bias == nullptr ? nullptr : bias + first;
  sum.columns = std::min(columns_ - first, sum.groups * kGroup);
  sum.dtype = dtype;
  sum.out = out;
  sum.out_row_stride = out_row_stride;
  sum.out_group_stride = out_group_stride;
  device_.sum_roots(sum);
}

void TreeSum::sum(const Partials& own, const float* bias, DType dtype, Rows where, std::byte* out) {
  if (comm_.size() == 1) {
    roots_.assign(1, own.at(0, 0));
    root_row_stride_ = own.row_stride;
    root_group_stride_ = own.group_stride;
    add_slice(plan_, bias, dtype, {{0, groups()}, {0, own.rows}}, out, columns_, kGroup);
    return;
  }
  if (own.rows == 0) return;
  whole_ = where == Rows::kReplicated && one_shot(own.rows, dtype);
  Phases phases(device_);
  phases.enter("exchange");
  exchange_roots(in_stack(own), where);
  phases.enter("add");
  const Slice mine = slice_of(comm_.rank(), own.rows, where);
  if (where == Rows::kScattered || whole_) {
    add_slice(plan_, bias, dtype, mine, out, columns_, kGroup);
    if (window_.exists()) window_.done();
  } else if (window_.exists()) {
    add_slice(plan_, bias, dtype, mine, window_.finished(comm_.rank()), width_of(mine), kGroup);
    phases.enter("gather");
    share_slices(own.rows, dtype, out);
  } else {
    // Finished slices are runs of groups, so they stand behind each other once gathered.
    std::byte* slice = gathered_.data() + mine.groups.begin * own.rows * kGroup * size_of(dtype);
    add_slice(plan_, bias, dtype, mine, slice, kGroup, own.rows * kGroup);
    phases.enter("gather");
    gather_slices(own.rows, dtype, out);
  }
  begun_ = nullptr;
}

void TreeSum::gather_slices(std::int64_t rows, DType dtype, std::byte* out) {
  parts_.clear();
  for (int r = 0; r < comm_.size(); ++r) {
    parts_.push_back(slice_of(r, rows, Rows::kReplicated).groups.size() * rows * kGroup *
                     size_of(dtype));
  }
  comm_.all_gather_v(gathered_.data(), parts_);
  device_.ungroup(gathered_.data(), dtype, rows, columns_, out);
}

/// Columns of a slice: the last group may have fewer than 64.
std::int64_t TreeSum::width_of(const Slice& slice) const {
  return std::min(columns_, slice.groups.end * kGroup) - slice.groups.begin * kGroup;
}

/// Second half in shared memory: slices lie row by row there, and come so from other nodes.
void TreeSum::share_slices(std::int64_t rows, DType dtype, std::byte* out) {
  const std::int64_t element = size_of(dtype);
  sends_.clear();
  receives_.clear();
  std::byte* next = gathered_.data();
  for (int r = 0; r < comm_.size(); ++r) {
    if (is_near(r)) continue;
    const Slice own = slice_of(comm_.rank(), rows, Rows::kReplicated);
    const Slice theirs = slice_of(r, rows, Rows::kReplicated);
    sends_.push_back({r, window_.finished(comm_.rank()), rows * width_of(own) * element});
    receives_.push_back({r, next, rows * width_of(theirs) * element});
    next += receives_.back().bytes;
  }
  if (has_far_ranks()) comm_.exchange(sends_, receives_);
  window_.fence();
  const Transfer* far = receives_.data();
  for (int r = 0; r < comm_.size(); ++r) {
    const Slice slice = slice_of(r, rows, Rows::kReplicated);
    const std::byte* from = is_near(r) ? window_.finished(r) : (far++)->data;
    device_.copy_rows(out + slice.groups.begin * kGroup * element, columns_ * element, from,
                      width_of(slice) * element, rows, width_of(slice) * element);
  }
}

Partials TreeSum::sum_own_groups(const Partials& own) {
  if (comm_.size() == 1) return own;
  whole_ = false;
  exchange_roots(in_stack(own), Rows::kReplicated);
  const Slice mine = slice_of(comm_.rank(), own.rows, Rows::kReplicated);
  std::byte* out = window_.exists() ? window_.finished(comm_.rank()) : gathered_.data();
  add_slice(plan_, nullptr, DType::kF32, mine, out, kGroup, own.rows * kGroup);
  if (window_.exists()) window_.done();
  begun_ = nullptr;
  return {
      reinterpret_cast<float*>(out), own.rows, mine.groups.size(), kGroup, own.rows * kGroup, 0};
}

void TreeSum::sum_by_library(const Partials& own, const float* bias, DType dtype, Rows where,
                             std::byte* out) {
  Phases phases(device_);
  Range rows{0, own.rows};
  if (where == Rows::kScattered) {
    phases.enter("reduce-scatter");
    parts_.clear();
    for (int r = 0; r < comm_.size(); ++r) {
      parts_.push_back(even_part(own.rows, comm_.size(), r).size() * own.row_stride);
    }
    comm_.reduce_scatter_v(own.data, parts_);
    rows = even_part(own.rows, comm_.size(), comm_.rank());
  } else {
    phases.enter("all-reduce");
    comm_.all_reduce(own.data, groups() * own.rows * kGroup);
  }
  phases.enter("add");
  roots_.assign(1, own.at(0, 0) + rows.begin * own.row_stride);
  root_row_stride_ = own.row_stride;
  root_group_stride_ = own.group_stride;
  const MergePlan one_root{{0}, 1, 1};
  add_slice(one_root, bias, dtype, {{0, groups()}, rows}, out, columns_, kGroup);
}

}  // namespace gatefold
