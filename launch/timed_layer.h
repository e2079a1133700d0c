#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "launch/device_pass.h"
#include "launch/tokens.h"
#include "layers/layer.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// Called now and then by a rank at work while others wait for it: a sign of life.
using Beat = std::function<void()>;

/// A layer to be timed: the same weights in so many places of memory, taken in turn, that they are
/// out of the caches when their turn comes; and x and y on the device.
class TimedLayer {
 public:
  /// Collective over the place's groups, as Layer's constructor is. Throws Error 64, 65, 66, 71.
  TimedLayer(const LayerSpec& spec, const TensorSource& source, const MoePlace& place,
             const MoeOptions& options, std::int64_t copies, const Beat& beat);

  /// From now on a pass takes rows `own` of the first `tokens` of the batch, and sends them where
  /// `routing` says, of these rows; without rows, where the router does. Throws Error 71.
  void take(const TokenBatch& batch, Range own, std::int64_t tokens, Choices routing = {});
  /// One pass by each copy, so that none reserves or meets new memory when it is timed.
  /// Collective.
  void touch(const Beat& beat = [] {});
  /// What pass number `pass` needs and isn't timed.
  void prepare(std::int64_t pass);
  /// That pass; returns when y is there. Collective.
  void forward(std::int64_t pass);

  /// Of the last pass.
  std::vector<std::byte> y() const { return pass_->y(); }
  /// Null for a dense layer. Of the copy that made it.
  const Moe* moe() const { return last_ == nullptr ? nullptr : last_->moe(); }

 private:
  Device& device_;
  std::vector<std::unique_ptr<Layer>> copies_;
  std::optional<DevicePass> pass_;
  Choices routing_;
  bool routed_ = false;  // by routing_
  Layer* last_ = nullptr;
};

struct Copies {
  std::int64_t count = 1;
  bool cold = true;  // out of the last-level cache when their turn comes
};

/// How many copies it takes, where `round_bytes` of weights are read until a layer's turn comes
/// again, for twice a last-level cache to pass by; few enough for some gigabytes, and to be loaded
/// soon.
Copies cold_copies(std::int64_t cache_bytes, std::int64_t round_bytes);

/// The parameters that a token meets, of experts the top k; routers don't count.
std::int64_t active_parameters(const LayerSpec& spec);
/// All of its experts' and other parameters, routers left out.
std::int64_t all_parameters(const LayerSpec& spec);

}  // namespace gatefold
