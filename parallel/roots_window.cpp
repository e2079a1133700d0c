#include "parallel/roots_window.h"

#include <algorithm>

#include "runtime/range.h"
#include "runtime/tensor_layout.h"

namespace gatefold {
namespace {

constexpr std::int64_t kFloatBytes = 4;
constexpr std::int64_t kAlignment = 256;

}  // namespace

std::int64_t RootsWindow::stack_bytes(std::int64_t rows) const {
  return round_up(shape_.slots * shape_.groups * rows * kGroup * kFloatBytes, kAlignment);
}

void RootsWindow::share(Communicator& comm, std::int64_t rows) {
  if (rows <= asked_rows_) return;
  asked_rows_ = rows;
  window_.reset();  // before there is another
  stacks_[0] = 0;
  finished_ = stack_bytes(rows);
  stacks_[1] = finished_ + round_up(shape_.slice_groups * rows * kGroup * kFloatBytes, kAlignment);
  window_ = comm.share(stacks_[1] + stack_bytes(std::min(rows, shape_.few_rows)));
  unread_ = {};
  current_ = 0;
}

float* RootsWindow::begin(std::int64_t rows) {
  takes_turns_ = rows <= shape_.few_rows;
  current_ = takes_turns_ ? 1 - current_ : 0;
  const std::uint64_t unread = unread_[current_];
  if (window_->arrivals() < unread) window_->arrive();
  window_->await(unread, "the sum of a node's ranks");
  return reinterpret_cast<float*>(at(window_->own(), stacks_[current_]));
}

void RootsWindow::publish() {
  fence();
  unread_[current_] = window_->arrivals() + 1;
}

void RootsWindow::done() {
  if (!takes_turns_) window_->arrive();
}

}  // namespace gatefold
