#include "parallel/tree_sum.h"

#include <algorithm>

namespace gatefold {

TreeSum::TreeSum(Communicator& comm, Device& device, const SumTree& tree, std::vector<Range> runs,
                 std::int64_t columns, std::int64_t one_shot_bytes)
    : comm_(comm),
      device_(device),
      runs_(std::move(runs)),
      columns_(columns),
      one_shot_bytes_(one_shot_bytes) {
  plan_ = tree.global_plan(runs_);
  for (const Range run : runs_) root_counts_.push_back(tree.local_plan(run).roots);
}

TreeSum::Slice TreeSum::slice_of(int rank, std::int64_t rows, Rows where) const {
  if (where == Rows::kScattered) return {{0, groups()}, even_part(rows, comm_.size(), rank)};
  if (one_shot(rows)) return {{0, groups()}, {0, rows}};
  return {even_part(groups(), comm_.size(), rank), {0, rows}};
}

std::int64_t TreeSum::all_roots_bytes(std::int64_t rows) const {
  const auto roots = static_cast<std::int64_t>(plan_.merges.size());
  return roots * groups() * rows * kGroup * size_of(DType::kF32);
}

std::int64_t TreeSum::received_bytes(std::int64_t rows) const {
  if (comm_.size() == 1) return 0;
  // The larger of the two kinds of slices, which differ by rounding.
  const std::int64_t own_groups = ceil_div(groups(), comm_.size());
  const std::int64_t own_rows = ceil_div(rows, comm_.size());
  const std::int64_t floats = std::max(own_groups * rows, groups() * own_rows) * kGroup;
  const std::int64_t in_slices =
      static_cast<std::int64_t>(plan_.merges.size()) * floats * size_of(DType::kF32);
  // Fewer rows may come whole.
  return std::max(in_slices, std::min(all_roots_bytes(rows), one_shot_bytes_));
}

std::int64_t TreeSum::gathered_bytes(std::int64_t rows, DType dtype) const {
  return comm_.size() == 1 ? 0 : groups() * rows * kGroup * size_of(dtype);
}

void TreeSum::reserve(std::int64_t rows, DType dtype) {
  const auto grow = [this](Buffer& buffer, std::int64_t bytes) {
    if (buffer.bytes() < bytes) buffer = device_.allocate(bytes);
  };
  grow(received_, received_bytes(rows));
  grow(gathered_, gathered_bytes(rows, dtype));
  // The lists of an exchange at their longest, one message per root and group.
  const std::size_t peers = root_counts_.size();
  const auto own = static_cast<std::size_t>(root_counts_[static_cast<std::size_t>(comm_.rank())]);
  const auto pieces = static_cast<std::size_t>(groups());
  roots_.reserve(std::max<std::size_t>(1, plan_.merges.size()));
  receives_.reserve(plan_.merges.size() * pieces);
  sends_.reserve(peers * own * pieces);
  parts_.reserve(peers);
}

/// First half's movement: every root's slice goes to the slice's owner. Fills roots_ with what this
/// rank adds: its own roots in place, the others' as received.
void TreeSum::exchange_roots(const Partials& own, Rows where) {
  const int me = comm_.rank();
  const Slice mine = slice_of(me, own.rows, where);
  // Rows that are cut have another group stride once received, so the own ones are copied too.
  const bool copy_own = where == Rows::kScattered;
  sends_.clear();
  receives_.clear();
  roots_.clear();
  root_row_stride_ = kGroup;
  root_group_stride_ = mine.rows.size() * kGroup;

  const std::int64_t row_bytes = kGroup * size_of(DType::kF32);
  float* next = received_.as<float>();
  for (int peer = 0; peer < comm_.size(); ++peer) {
    const bool in_place = peer == me && !copy_own;
    const std::int64_t bytes = mine.groups.size() * mine.rows.size() * row_bytes;
    for (int root = 0; root < root_counts_[static_cast<std::size_t>(peer)]; ++root) {
      roots_.push_back(in_place ? own.at(root, mine.groups.begin) : next);
      if (in_place) continue;
      // Cut rows arrive group by group, whole slices at once: as they are sent.
      const std::int64_t pieces = copy_own ? mine.groups.size() : 1;
      for (std::int64_t p = 0; p < pieces; ++p) {
        receives_.push_back(
            {peer, reinterpret_cast<std::byte*>(next) + p * bytes / pieces, bytes / pieces});
      }
      next += bytes / size_of(DType::kF32);
    }
  }
  for (int peer = 0; peer < comm_.size(); ++peer) {
    if (peer == me && !copy_own) continue;
    const Slice to = slice_of(peer, own.rows, where);
    for (int root = 0; root < root_counts_[static_cast<std::size_t>(me)]; ++root) {
      const std::int64_t step = copy_own ? 1 : std::max<std::int64_t>(1, to.groups.size());
      for (std::int64_t g = to.groups.begin; g < to.groups.end; g += step) {
        float* from = own.at(root, g) + to.rows.begin * own.row_stride;
        sends_.push_back(
            {peer, reinterpret_cast<std::byte*>(from), step * to.rows.size() * row_bytes});
      }
    }
  }
  comm_.exchange(sends_, receives_);
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
  exchange_roots(own, where);
  const Slice mine = slice_of(comm_.rank(), own.rows, where);
  if (where == Rows::kScattered || one_shot(own.rows)) {
    add_slice(plan_, bias, dtype, mine, out, columns_, kGroup);
    return;
  }
  // Finished slices are runs of groups, so they stand behind each other once gathered.
  const std::int64_t group_bytes = own.rows * kGroup * size_of(dtype);
  add_slice(plan_, bias, dtype, mine, gathered_.data() + mine.groups.begin * group_bytes, kGroup,
            own.rows * kGroup);
  parts_.clear();
  for (int r = 0; r < comm_.size(); ++r) {
    parts_.push_back(slice_of(r, own.rows, where).groups.size() * group_bytes);
  }
  comm_.all_gather_v(gathered_.data(), parts_);
  device_.ungroup(gathered_.data(), dtype, own.rows, columns_, out);
}

void TreeSum::sum_by_library(const Partials& own, const float* bias, DType dtype, Rows where,
                             std::byte* out) {
  comm_.all_reduce(own.data, groups() * own.rows * kGroup);
  const Range rows = where == Rows::kScattered ? even_part(own.rows, comm_.size(), comm_.rank())
                                               : Range{0, own.rows};
  roots_.assign(1, own.at(0, 0) + rows.begin * own.row_stride);
  root_row_stride_ = own.row_stride;
  root_group_stride_ = own.group_stride;
  const MergePlan one_root{{0}, 1, 1};
  add_slice(one_root, bias, dtype, {{0, groups()}, rows}, out, columns_, kGroup);
}

}  // namespace gatefold
