#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "parallel/communicator.h"
#include "tests/testing_device.h"

namespace gatefold {

/// A communicator for a device's memory, for a suite that knows the host's: each piece is carried
/// to the device and back.
class CarriedCommunicator final : public Communicator {
 public:
  CarriedCommunicator(std::shared_ptr<Device> device, std::unique_ptr<Communicator> comm)
      : Communicator(comm->rank(), comm->size(), &comm->progress()),
        device_(std::move(device)),
        comm_(std::move(comm)) {}

  std::string description() const override { return comm_->description(); }
  Communicator& host() override { return comm_->host(); }
  void exchange(std::span<const Transfer> sends, std::span<const Transfer> receives) override {
    std::vector<Piece> out;
    std::vector<Piece> in;
    const std::vector<Transfer> device_sends = carry(sends, out);
    const std::vector<Transfer> device_receives = carry(receives, in);
    comm_->exchange(device_sends, device_receives);
    for (const Piece& piece : in) piece.fetch();
  }
  void all_gather_v(std::byte* all, std::span<const std::int64_t> parts) override {
    Piece piece(*device_, all, std::accumulate(parts.begin(), parts.end(), std::int64_t{0}));
    comm_->all_gather_v(piece.data(), parts);
    piece.fetch();
  }
  void broadcast(std::byte* data, std::int64_t bytes, int root) override {
    Piece piece(*device_, data, bytes);
    comm_->broadcast(piece.data(), bytes, root);
    piece.fetch();
  }
  void barrier() override { comm_->barrier(); }
  void all_reduce(float* data, std::int64_t count) override {
    Piece piece(*device_, reinterpret_cast<std::byte*>(data), count * size_of(DType::kF32));
    comm_->all_reduce(reinterpret_cast<float*>(piece.data()), count);
    piece.fetch();
  }
  void reduce_scatter_v(float* data, std::span<const std::int64_t> counts) override {
    Piece piece(
        *device_, reinterpret_cast<std::byte*>(data),
        std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) * size_of(DType::kF32));
    comm_->reduce_scatter_v(reinterpret_cast<float*>(piece.data()), counts);
    piece.fetch();
  }
  void wait() override { comm_->wait(); }
  std::unique_ptr<Communicator> split(int color) override {
    return std::make_unique<CarriedCommunicator>(device_, comm_->split(color));
  }

 private:
  /// Bytes of the host for the length of a call.
  class Piece {
   public:
    Piece(Device& device, std::byte* host, std::int64_t bytes)
        : host_(host), device_(device, std::vector<std::byte>(host, host + bytes)) {}
    std::byte* data() { return device_.data(); }
    void fetch() const {
      const std::vector<std::byte> bytes = device_.get();
      std::copy(bytes.begin(), bytes.end(), host_);
    }

   private:
    std::byte* host_;
    testing::OnDevice<std::byte> device_;
  };

  std::vector<Transfer> carry(std::span<const Transfer> transfers, std::vector<Piece>& pieces) {
    std::vector<Transfer> carried;
    for (const Transfer& t : transfers) {
      pieces.emplace_back(*device_, t.data, t.bytes);
      carried.push_back({t.peer, pieces.back().data(), t.bytes});
    }
    return carried;
  }

  std::shared_ptr<Device> device_;
  std::unique_ptr<Communicator> comm_;
};

}  // namespace gatefold
