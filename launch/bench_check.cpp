#include "launch/bench_check.h"

#include <cmath>
#include <cstring>
#include <numeric>

#include "launch/bench_point.h"
#include "layers/moe_reference.h"
#include "parallel/agreement.h"

namespace gatefold {
namespace {

/// The rows of a sample that this rank's y has: the first and the last of what one rank took, which
/// are in every point's batch.
std::vector<std::int64_t> sampled(const BenchLayer& layer, Range own) {
  std::vector<std::int64_t> rows;
  for (const std::int64_t row : layer.sample) {
    if (own.contains(row)) rows.push_back(row);
  }
  return rows;
}

}  // namespace

ExpectedOutput::ExpectedOutput(Job& job, BenchLayer& layer, const TokenBatch& batch, Range own,
                               std::int64_t one_rank_tokens, RoutingFor routing_for)
    : job_(job),
      layer_(layer),
      batch_(batch),
      own_(own),
      one_rank_tokens_(one_rank_tokens),
      routing_for_(std::move(routing_for)) {}

std::optional<std::int64_t> ExpectedOutput::wrong_values(const TimedLayer& timed, Reduce reduce) {
  Communicator& world = job_.world();
  const bool bits = reduce == Reduce::kExact && world.size() > 1;
  // Of tokens that no router sent there float64 would only say that it wouldn't have, either.
  if (!bits && routing_for_({0, 1}).top_k > 0) return std::nullopt;
  std::vector<std::byte> y;
  run_agreed(world, [&] { y = timed.y(); });
  if (bits && !bits_) make_bits();
  std::int64_t wrong = 0;
  run_agreed(world, [&] {
    if (bits) {
      wrong = differing(y);
    } else if (world.rank() == 0) {
      wrong = outside_bound(timed, y);
    }
  });
  std::vector<std::int64_t> counts(static_cast<std::size_t>(world.size()));
  counts[static_cast<std::size_t>(world.rank())] = wrong;
  all_gather<std::int64_t>(world, counts);
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

/// Rows' bits depend on how many there are, so that one rank needs the whole batch.
void ExpectedOutput::make_bits() {
  Communicator& world = job_.world();
  run_agreed(world, [&] {
    bits_.emplace(batch_.x.size());
    if (world.rank() != 0) return;
    TimedLayer& one_rank = *layer_.one_rank.at(Reduce::kExact);
    if (one_rank_tokens_ != batch_.tokens) {
      const Range all{0, batch_.tokens};
      one_rank.take(batch_, all, batch_.tokens, routing_for_(all));
      one_rank.prepare(0);
      one_rank.forward(0);
    }
    bits_ = one_rank.y();
  });
  world.broadcast(bits_->data(), std::ssize(*bits_), 0);
}

std::int64_t ExpectedOutput::differing(const std::vector<std::byte>& y) {
  const auto element = static_cast<std::size_t>(size_of(batch_.dtype));
  const std::byte* expected = bits_->data() + own_.begin * batch_.row_bytes();
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < y.size(); i += element) {
    wrong += std::memcmp(y.data() + i, expected + i, element) != 0 ? 1 : 0;
  }
  return wrong;
}

/// float64's values are the same for every grid and batch, so that a layer's are computed once.
std::int64_t ExpectedOutput::outside_bound(const TimedLayer& timed,
                                           const std::vector<std::byte>& y) {
  std::int64_t wrong = 0;
  for (const std::int64_t row : sampled(layer_, own_)) {
    auto known = layer_.references.find(row);
    if (known == layer_.references.end()) {
      const std::vector<float> x = batch_.as_float({row, row + 1});
      ReferenceResult made;
      if (const auto* dense = std::get_if<FfnSpec>(&layer_.spec)) {
        made = reference_ffn(*dense, job_.source(), batch_.dtype, x, 1);
      } else {
        const auto ids = timed.moe()->routing().ids_of(row);
        made = reference_moe(std::get<MoeSpec>(layer_.spec), job_.source(), batch_.dtype, x, 1,
                             {ids.begin(), ids.end()});
      }
      known = layer_.references.emplace(row, std::move(made)).first;
    }
    const std::int64_t at = (row - own_.begin) * batch_.row_bytes();
    wrong += gatefold::outside_bound(known->second, batch_.dtype, y.data() + at);
  }
  return wrong;
}

std::int64_t outside_bound(const ReferenceResult& expected, DType dtype, const std::byte* y) {
  std::vector<float> found(expected.y.size());
  convert(dtype, y, DType::kF32, reinterpret_cast<std::byte*>(found.data()), std::ssize(found));
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double value = found[i];
    const double error = std::abs(value - expected.y[i]);
    const bool same = value == expected.y[i] || (std::isnan(value) && std::isnan(expected.y[i]));
    const bool unbounded = std::isinf(expected.bound[i]) && !std::isnan(value);
    if (!same && !unbounded && !(error <= expected.bound[i])) ++wrong;
  }
  return wrong;
}

}  // namespace gatefold
