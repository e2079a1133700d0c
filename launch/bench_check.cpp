#include "launch/bench_check.h"

#include <cmath>
#include <cstring>
#include <numeric>
#include <set>

#include "launch/bench_point.h"
#include "layers/moe_reference.h"
#include "parallel/agreement.h"

namespace gatefold {
namespace {

/// One token's of the results [tokens, H].
ReferenceResult row_of(const ReferenceResult& all, std::size_t row, std::int64_t hidden) {
  const auto part = [&](const std::vector<double>& values) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(row) * hidden;
    return std::vector<double>(begin, begin + hidden);
  };
  return {part(all.y), part(all.bound)};
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
  std::vector<std::int64_t> counts(static_cast<std::size_t>(world.size()));
  counts[static_cast<std::size_t>(world.rank())] = bits ? differing(y) : outside_bound(timed, y);
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

/// Those of the sample, and the first of each rank, so that none goes unseen; the same on all.
std::vector<std::int64_t> ExpectedOutput::judged_rows() const {
  Communicator& world = job_.world();
  std::vector<Range> parts(static_cast<std::size_t>(world.size()));
  parts[static_cast<std::size_t>(world.rank())] = own_;
  all_gather<Range>(world, parts);
  std::set<std::int64_t> rows(layer_.sample.begin(), layer_.sample.end());
  for (const Range& part : parts) {
    if (!part.empty()) rows.insert(part.begin);
  }
  return {rows.begin(), rows.end()};
}

/// A row's values are the same for every grid and batch, so that a layer's are computed once.
void ExpectedOutput::compute_references(const TimedLayer& timed,
                                        const std::vector<std::int64_t>& rows) {
  std::vector<std::int64_t> missing;
  std::vector<float> x;
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> kept;
  const bool limited = timed.moe() != nullptr && !timed.moe()->kept().empty();
  if (limited) layer_.references.clear();  // what is dropped of a row depends on the batch
  for (const std::int64_t row : rows) {
    if (layer_.references.contains(row)) continue;
    missing.push_back(row);
    const std::vector<float> one = batch_.as_float({row, row + 1});
    x.insert(x.end(), one.begin(), one.end());
    if (timed.moe() == nullptr) continue;
    const auto chosen = timed.moe()->routing().ids_of(row);
    ids.insert(ids.end(), chosen.begin(), chosen.end());
    if (!limited) continue;
    const std::int64_t k = timed.moe()->routing().top_k;
    const auto marks =
        timed.moe()->kept().subspan(static_cast<std::size_t>(row * k), static_cast<std::size_t>(k));
    kept.insert(kept.end(), marks.begin(), marks.end());
  }
  if (missing.empty()) return;
  const auto* dense = std::get_if<FfnSpec>(&layer_.spec);
  const ReferenceResult all =
      dense != nullptr
          ? reference_ffn(*dense, job_.source(), batch_.dtype, x, std::ssize(missing))
          : ReferenceResult(reference_moe(std::get<MoeSpec>(layer_.spec), job_.source(),
                                          batch_.dtype, x, std::ssize(missing), ids, {}, kept));
  for (std::size_t i = 0; i < missing.size(); ++i) {
    layer_.references[missing[i]] = row_of(all, i, batch_.hidden);
  }
}

/// Rank 0 computes what all judge their own y by.
std::int64_t ExpectedOutput::outside_bound(const TimedLayer& timed,
                                           const std::vector<std::byte>& y) {
  Communicator& world = job_.world();
  const std::vector<std::int64_t> rows = judged_rows();
  run_agreed(world, [&] {
    if (world.rank() == 0) compute_references(timed, rows);
  });
  std::int64_t wrong = 0;
  for (const std::int64_t row : rows) {
    ReferenceResult& known = layer_.references[row];
    for (std::vector<double>* values : {&known.y, &known.bound}) {
      values->resize(static_cast<std::size_t>(batch_.hidden));
      world.broadcast(reinterpret_cast<std::byte*>(values->data()), batch_.hidden * 8, 0);
    }
    if (!own_.contains(row)) continue;
    const std::int64_t at = (row - own_.begin) * batch_.row_bytes();
    wrong += gatefold::outside_bound(known, batch_.dtype, y.data() + at);
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
