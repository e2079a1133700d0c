#include "launch/timed_layer.h"

#include <algorithm>

namespace gatefold {
namespace {

/// Weights of all copies together, at most: what is left of rotation on small machines.
constexpr std::int64_t kMostWeightBytes = std::int64_t{6} << 30;
/// Each is made and taken once before a point is timed, and that takes its time for tiny ones, too.
constexpr std::int64_t kMostCopies = 64;

std::int64_t parameters(const LayerSpec& spec, std::int64_t experts) {
  if (const auto* dense = std::get_if<FfnSpec>(&spec)) return dense->parameters();
  const auto& moe = std::get<MoeSpec>(spec);
  std::int64_t sum = experts * moe.experts.front().parameters();
  for (const FfnSpec& shared : moe.shared) sum += shared.parameters();
  return sum;
}

}  // namespace

TimedLayer::TimedLayer(const LayerSpec& spec, const TensorSource& source, const MoePlace& place,
                       const MoeOptions& options, std::int64_t copies, const Beat& beat)
    : device_(*place.device) {
  for (std::int64_t i = 0; i < copies; ++i) {
    copies_.push_back(std::make_unique<Layer>(spec, source, place, options));
    beat();
  }
}

void TimedLayer::take(const TokenBatch& batch, Range own, std::int64_t tokens, Choices routing) {
  routed_ = routing.top_k > 0;
  routing_ = std::move(routing);
  const RowCount rows{own.size(), tokens};
  pass_.reset();
  pass_.emplace(device_, batch.row(own.begin), rows, batch.row_bytes());
}

void TimedLayer::touch(const Beat& beat) {
  for (std::size_t i = 0; i < copies_.size(); ++i) {
    prepare(static_cast<std::int64_t>(i));
    forward(static_cast<std::int64_t>(i));
    beat();
  }
}

void TimedLayer::prepare(std::int64_t pass) {
  last_ = copies_[static_cast<std::size_t>(pass) % copies_.size()].get();
  if (routed_) last_->moe()->replay(routing_);
}

void TimedLayer::forward(std::int64_t pass) {
  last_ = copies_[static_cast<std::size_t>(pass) % copies_.size()].get();
  pass_->forward(*last_);
}

Copies cold_copies(std::int64_t cache_bytes, std::int64_t round_bytes) {
  const std::int64_t round = std::max<std::int64_t>(1, round_bytes);
  const std::int64_t wanted = ceil_div(2 * cache_bytes, round) + 1;
  const std::int64_t most = std::max<std::int64_t>(1, kMostWeightBytes / round);
  const std::int64_t count = std::min({wanted, most, kMostCopies});
  return {count, count == wanted || count * round >= 2 * cache_bytes};
}

std::int64_t active_parameters(const LayerSpec& spec) {
  const auto* moe = std::get_if<MoeSpec>(&spec);
  return parameters(spec, moe == nullptr ? 0 : moe->route.top_k);
}

std::int64_t all_parameters(const LayerSpec& spec) {
  const auto* moe = std::get_if<MoeSpec>(&spec);
  return parameters(spec, moe == nullptr ? 0 : moe->route.experts);
}

}  // namespace gatefold
