#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/count_matrix.h"
#include "parallel/exchange_shape.h"
#include "parallel/step_indices.h"
#include "runtime/device.h"

namespace gatefold {

/// Brings rows to their experts' ranks and sums home by messages, or, in a world of one, leaves
/// them where they are. See TokenExchange, whose steps these are.
class RowMessages {
 public:
  /// world and device must outlive it.
  RowMessages(Communicator& world, Device& device, const ExchangeShape& shape)
      : world_(world), device_(device), shape_(shape) {}

  /// Of a rank.
  StepRoom need(const CountMatrix& counts, int rank, std::int64_t top_k) const;
  const StepRoom& room() const { return room_; }
  /// Throws Error 71.
  void allocate(const StepRoom& need);
  /// Gives the step that the counts are of its place in memory.
  void lay_out(const CountMatrix& counts);

  /// `arrivals`: of every source. Collective.
  void exchange_choices(const CountMatrix& counts, const DispatchPlan& plan, const Choices& own,
                        std::vector<Arrival>& arrivals);
  /// Where the roots of own rows will be: [etp, all], from root_base() on.
  void find_roots(const CountMatrix& counts, const CombinePlan& plan,
                  std::vector<std::int32_t>& roots) const;
  std::byte* indices() const { return memory_.data() + at_.indices; }

  /// Collective.
  void dispatch(const CountMatrix& counts, const DispatchPlan& plan, const StepIndices& indices,
                const std::byte* x);
  /// Then rows lie here, row_stride() elements apart.
  const std::byte* rows() const { return rows_; }
  std::int64_t row_stride() const { return shape_.hidden; }

  float* sums() const { return reinterpret_cast<float*>(memory_.data() + at_.sums); }
  /// Each home gets the roots of its tokens: from every group, and of it from every member the
  /// columns that are its share. Collective.
  void return_sums(const CountMatrix& counts);
  const float* root_base() const { return memory_.as<float>(); }

 private:
  struct Layout {
    std::int64_t sent = 0;      // [rows to other ranks by group, H]
    std::int64_t received = 0;  // [received rows, H], or [all rows, H]
    std::int64_t sums = 0;      // [sums, own share of H] fp32
    std::int64_t returned = 0;  // [roots of own rows, share] fp32, for each member of a group
    std::int64_t indices = 0;
    std::int64_t bytes = 0;
  };
  Layout layout(const CountMatrix& counts, int rank) const;
  bool alone() const { return world_.size() == 1; }
  std::int64_t sent_rows(const CountMatrix& counts, int rank) const;
  std::int64_t received_rows(const CountMatrix& counts, int rank) const;
  void gather_all_choices(const CountMatrix& counts, const Choices& own,
                          std::vector<Arrival>& arrivals);
  void send_rows(const CountMatrix& counts, const DispatchPlan& plan, const StepIndices& indices,
                 const std::byte* x);
  void gather_all_rows(const CountMatrix& counts, const std::byte* x);

  Communicator& world_;
  Device& device_;
  ExchangeShape shape_;
  StepRoom room_;
  Buffer memory_;
  Layout at_;
  const std::byte* rows_ = nullptr;
  std::vector<std::byte> records_;  // ids and weights on their way
  std::vector<std::byte> received_records_;
  std::vector<Transfer> sends_;
  std::vector<Transfer> receives_;
  std::vector<std::int64_t> parts_;
};

/// Bytes of `buffer` become at least `needed`, more than a half of what they were at a time, so
/// that steps of growing size rarely allocate. Throws Error 71.
void grow(Device& device, Buffer& buffer, std::int64_t needed);

/// One token's ids and weights. See ExchangeShape::record_bytes().
void write_record(const Choices& choices, std::int64_t row, std::byte* to);
void read_record(const std::byte* from, std::int64_t row, Choices& choices);

}  // namespace gatefold
