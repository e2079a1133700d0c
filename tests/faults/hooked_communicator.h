#pragma once

#include <functional>
#include <utility>

#include "parallel/communicator.h"

namespace gatefold {

/// A communicator whose exchanges of tensors go through a function: in a layer, the movement of the
/// roots, and of rows to their experts.
class HookedCommunicator : public Communicator {
 public:
  using Exchange = std::function<void(Communicator& inner, std::span<const Transfer> sends,
                                      std::span<const Transfer> receives)>;

  HookedCommunicator(Communicator& inner, Exchange exchange)
      : Communicator(inner.rank(), inner.size(), &inner.progress()),
        inner_(inner),
        exchange_(std::move(exchange)) {}

  std::string description() const override { return inner_.description(); }
  Communicator& host() override { return inner_.host(); }
  void exchange(std::span<const Transfer> sends, std::span<const Transfer> receives) override {
    exchange_(inner_, sends, receives);
  }
  void all_gather_v(std::byte* all, std::span<const std::int64_t> parts) override {
    inner_.all_gather_v(all, parts);
  }
  void broadcast(std::byte* data, std::int64_t bytes, int root) override {
    inner_.broadcast(data, bytes, root);
  }
  void barrier() override { inner_.barrier(); }
  void all_reduce(float* data, std::int64_t count) override { inner_.all_reduce(data, count); }
  void reduce_scatter_v(float* data, std::span<const std::int64_t> counts) override {
    inner_.reduce_scatter_v(data, counts);
  }
  void wait() override { inner_.wait(); }
  void reserve(std::int64_t bytes) override { inner_.reserve(bytes); }
  std::unique_ptr<Communicator> split(int color) override { return inner_.split(color); }
  std::unique_ptr<Communicator> split_by_host() override { return inner_.split_by_host(); }

 private:
  Communicator& inner_;
  Exchange exchange_;
};

}  // namespace gatefold
