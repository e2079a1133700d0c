#include "launch/plain_exchange.h"

namespace gatefold {
namespace {

Buffer uploaded(Device& device, const std::vector<std::int32_t>& values) {
  const std::int64_t bytes = std::ssize(values) * std::int64_t{sizeof(std::int32_t)};
  Buffer buffer = device.allocate(bytes);
  device.upload(buffer.data(), reinterpret_cast<const std::byte*>(values.data()), bytes);
  return buffer;
}

/// Pieces of so many rows behind each other, one for each rank.
std::vector<Transfer> pieces(const std::vector<std::int64_t>& rows, const Buffer& buffer,
                             std::int64_t row_bytes) {
  std::vector<Transfer> list;
  std::byte* next = buffer.data();
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    list.push_back({static_cast<int>(rank), next, rows[rank] * row_bytes});
    next += list.back().bytes;
  }
  return list;
}

}  // namespace

PlainExchange::PlainExchange(Communicator& comm, Device& device, const ExpertPlacement& placement,
                             std::span<const Choices> choices, std::int64_t hidden, DType dtype)
    : comm_(comm), device_(device), hidden_(hidden), dtype_(dtype) {
  std::vector<std::int64_t> to;
  std::vector<std::int64_t> from;
  DispatchPlan plan;
  for (const Choices& source : choices) {
    plan.make(placement, source);
    from.push_back(plan.count(comm.rank()));
    received_rows_ += from.back();
  }
  const Choices& own = choices[static_cast<std::size_t>(comm.rank())];
  plan.make(placement, own);
  for (int rank = 0; rank < comm.size(); ++rank) to.push_back(plan.count(rank));
  tokens_ = own.rows;
  sent_rows_ = std::ssize(plan.rows);

  std::vector<std::int32_t> begin{0};
  std::vector<std::int32_t> roots;
  std::vector<std::int32_t> merges;
  for (std::int64_t token = 0; token < tokens_; ++token) {
    for (std::int64_t row = 0; row < sent_rows_; ++row) {
      if (plan.rows[static_cast<std::size_t>(row)] != token) continue;
      merges.push_back(std::ssize(roots) > begin.back() ? 1 : 0);
      roots.push_back(static_cast<std::int32_t>(row));
    }
    begin.push_back(static_cast<std::int32_t>(roots.size()));
  }
  rows_ = uploaded(device, plan.rows);
  begin_ = uploaded(device, begin);
  roots_ = uploaded(device, roots);
  merges_ = uploaded(device, merges);

  const std::int64_t row_bytes = hidden * size_of(dtype);
  const std::int64_t sum_bytes = hidden * size_of(DType::kF32);
  packed_ = device.allocate(sent_rows_ * row_bytes);
  received_ = device.allocate(received_rows_ * row_bytes);
  sums_ = device.allocate(received_rows_ * sum_bytes);
  returned_ = device.allocate(sent_rows_ * sum_bytes);
  rows_out_ = pieces(to, packed_, row_bytes);
  rows_in_ = pieces(from, received_, row_bytes);
  sums_out_ = pieces(from, sums_, sum_bytes);
  sums_in_ = pieces(to, returned_, sum_bytes);
  comm.reserve((sent_rows_ + received_rows_) * sum_bytes);
}

void PlainExchange::dispatch(const std::byte* x) {
  device_.gather_rows(packed_.data(), x, rows_.as<std::int32_t>(), sent_rows_,
                      hidden_ * size_of(dtype_));
  comm_.exchange(rows_out_, rows_in_);
}

void PlainExchange::combine(std::byte* y) {
  comm_.exchange(sums_out_, sums_in_);
  CombinedRows rows;
  rows.sums = returned_.as<float>();
  rows.begin = begin_.as<std::int32_t>();
  rows.roots = roots_.as<std::int32_t>();
  rows.merges = merges_.as<std::int32_t>();
  rows.tokens = tokens_;
  rows.groups = hidden_ / kGroup;
  rows.columns = hidden_;
  rows.row_stride = hidden_;
  rows.dtype = dtype_;
  rows.y = y;
  device_.combine_rows(rows);
}

}  // namespace gatefold
