#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "runtime/device.h"
#include "runtime/error.h"

namespace gatefold::testing {

/// Passes every call on to another device and counts what is allocated.
class CountingDevice : public Device {
 public:
  explicit CountingDevice(std::unique_ptr<Device> device)
      : owned_(std::move(device)), device_(owned_.get()) {}
  /// `device` must outlive it.
  explicit CountingDevice(Device& device) : device_(&device) {}

  /// What it passes calls on to.
  Device& counted() const { return *device_; }
  int allocations() const { return allocations_; }
  int host_allocations() const { return host_allocations_; }
  std::int64_t allocated_bytes() const { return bytes_; }
  /// Of allocate_weight(), which the other two don't count.
  std::int64_t weight_bytes() const { return weight_bytes_; }

  std::string description() const override { return device_->description(); }
  std::string library() const override { return device_->library(); }
  DType storage(DType model) const override { return device_->storage(model); }
  std::int64_t last_level_cache() const override { return device_->last_level_cache(); }
  std::span<const std::int64_t> tile_heights() const override { return device_->tile_heights(); }
  Buffer allocate(std::int64_t bytes) override {
    ++allocations_;
    bytes_ += bytes;
    return device_->allocate(bytes);
  }
  void upload(std::byte* out, const std::byte* host, std::int64_t bytes) override {
    device_->upload(out, host, bytes);
  }
  void download(std::byte* host, const std::byte* in, std::int64_t bytes) override {
    device_->download(host, in, bytes);
  }
  bool in_host_memory() const override { return device_->in_host_memory(); }
  Buffer allocate_host(std::int64_t bytes) override {
    ++host_allocations_;
    return device_->allocate_host(bytes);
  }
  void start_upload(std::byte* out, const std::byte* host, std::int64_t bytes) override {
    device_->start_upload(out, host, bytes);
  }
  void start_download(std::byte* host, const std::byte* in, std::int64_t bytes) override {
    device_->start_download(host, in, bytes);
  }
  void copy_rows(std::byte* out, std::int64_t out_stride, const std::byte* in,
                 std::int64_t in_stride, std::int64_t rows, std::int64_t bytes) override {
    device_->copy_rows(out, out_stride, in, in_stride, rows, bytes);
  }
  void fill(std::byte* out, std::byte value, std::int64_t bytes) override {
    device_->fill(out, value, bytes);
  }
  void synchronize() override { device_->synchronize(); }
  Weight allocate_weight(const WeightShape& shape, DType model, GemmKernel kernel) override {
    Weight weight = device_->allocate_weight(shape, model, kernel);
    weight_bytes_ += weight.data.bytes();
    return weight;
  }
  void store_rows(Weight& weight, std::int64_t first_row, std::int64_t rows,
                  const std::byte* host) override {
    device_->store_rows(weight, first_row, rows, host);
  }
  std::vector<std::byte> choose_gemms(std::span<const WeightShape> shapes, DType storage) override {
    return device_->choose_gemms(shapes, storage);
  }
  void pin_gemms(std::span<const WeightShape> shapes, DType storage,
                 std::span<const std::byte> choices) override {
    device_->pin_gemms(shapes, storage, choices);
  }
  void prepare(const WeightShape& shape, DType storage, GemmKernel kernel,
               std::int64_t height) override {
    device_->prepare(shape, storage, kernel, height);
  }
  SelfCheck self_check(const WeightShape& shape, DType storage) override {
    return device_->self_check(shape, storage);
  }
  void tile_rows(const InputRows& x, DType model, std::int64_t columns, const Tiles& out) override {
    device_->tile_rows(x, model, columns, out);
  }
  void untile_rows(const Tiles& in, DType model, std::int64_t columns, std::byte* out,
                   std::int64_t out_stride) override {
    device_->untile_rows(in, model, columns, out, out_stride);
  }
  void gemm_activation(const Weight& weight, const float* bias, const Activation& activation,
                       DType model, const Tiles& x, const Tiles& h) override {
    device_->gemm_activation(weight, bias, activation, model, x, h);
  }
  void gemm_merge(const Weight& weight, const Tiles& h, const Partials& stack, int height,
                  int merges) override {
    device_->gemm_merge(weight, h, stack, height, merges);
  }
  void sum_roots(const RootSum& sum) override { device_->sum_roots(sum); }
  void ungroup(const std::byte* in, DType dtype, std::int64_t rows, std::int64_t columns,
               std::byte* out) override {
    device_->ungroup(in, dtype, rows, columns, out);
  }
  void gather_rows(std::byte* out, const std::byte* in, const std::int32_t* index,
                   std::int64_t rows, std::int64_t bytes) override {
    device_->gather_rows(out, in, index, rows, bytes);
  }
  void router_logits(const LogitRows& io) override { device_->router_logits(io); }
  void choose_experts(const RouteRule& rule, const float* logits, const float* correction,
                      std::int64_t rows, std::int32_t* ids, float* weights) override {
    device_->choose_experts(rule, logits, correction, rows, ids, weights);
  }
  void score_logits(const ScoredLogits& io) override { device_->score_logits(io); }
  void weigh_rows(const WeighedRows& io) override { device_->weigh_rows(io); }
  void combine_rows(const CombinedRows& io) override { device_->combine_rows(io); }

 private:
  std::unique_ptr<Device> owned_;
  Device* device_;
  int allocations_ = 0;
  int host_allocations_ = 0;
  std::int64_t bytes_ = 0;
  std::int64_t weight_bytes_ = 0;
};

/// Has memory for so many more buffers; with -1 for any number.
class ShortOfMemory final : public CountingDevice {
 public:
  using CountingDevice::CountingDevice;
  Buffer allocate(std::int64_t bytes) override {
    if (left == 0) throw Error(ExitCode::kOutOfMemory, "no memory left (planted); want less");
    if (left > 0) --left;
    return CountingDevice::allocate(bytes);
  }
  int left = -1;
};

}  // namespace gatefold::testing
