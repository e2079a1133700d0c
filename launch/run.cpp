#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>

#include "launch/device_pass.h"
#include "launch/drop_check.h"
#include "launch/job.h"
#include "parallel/agreement.h"
#include "runtime/error.h"
#include "runtime/quoted_name.h"
#include "runtime/safetensors.h"

namespace gatefold {
namespace {

/// Weights with some hidden channels cut off: their rows of gate and up, and the biases there, read
/// as zeros, so that h[:, channel] = act(0) * 0 = 0.
class AblatedSource final : public TensorSource {
 public:
  AblatedSource(const TensorSource& inner, const FfnSpec& spec, std::vector<std::int64_t> channels)
      : inner_(inner), channels_(std::move(channels)) {
    for (const auto& ref : {spec.gate, std::optional(spec.up), spec.gate_bias, spec.up_bias}) {
      if (ref) refs_.push_back(*ref);
    }
  }

  std::optional<TensorInfo> find(const std::string& name) const override {
    return inner_.find(name);
  }
  std::string description() const override { return inner_.description(); }

  void read(const std::string& name, Range rows, Range cols, std::byte* out) const override {
    inner_.read(name, rows, cols, out);
    for (const TensorRef& ref : refs_) {
      if (ref.name != name) continue;
      const TensorInfo info = *inner_.find(name);
      // A bias reads as one row.
      const bool by_column = ref.transposed || info.shape.size() < 2;
      for (const std::int64_t channel : channels_) {
        const std::int64_t at = ref.row_offset + channel * ref.row_step;
        const Range cut{at, at + 1};
        clear(by_column ? rows : cut, by_column ? cut : cols, rows, cols, size_of(info.dtype), out);
      }
    }
  }

 private:
  /// Zeros where cut_rows x cut_cols meets rows x cols, which `out` holds.
  static void clear(Range cut_rows, Range cut_cols, Range rows, Range cols, std::int64_t element,
                    std::byte* out) {
    const auto meet = [](Range a, Range b) {
      return Range{std::max(a.begin, b.begin), std::min(a.end, b.end)};
    };
    const Range r = meet(cut_rows, rows);
    const Range c = meet(cut_cols, cols);
    if (c.empty()) return;
    for (std::int64_t row = r.begin; row < r.end; ++row) {
      const std::int64_t first = (row - rows.begin) * cols.size() + c.begin - cols.begin;
      std::fill_n(out + first * element, c.size() * element, std::byte{0});
    }
  }

  const TensorSource& inner_;
  std::vector<std::int64_t> channels_;
  std::vector<TensorRef> refs_;
};

/// y [T, H] on rank 0, nothing on the others.
std::vector<std::byte> gather_on_root(const Job& job, std::vector<std::byte>& own,
                                      const TokenBatch& batch) {
  Communicator& world = job.world();
  world.progress().enter("gathering y");
  std::vector<std::byte> y;
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
  if (job.grid().tp().rank() == 0) {
    sends.push_back({0, own.data(), static_cast<std::int64_t>(own.size())});
  }
  run_agreed(world, [&] {
    if (world.rank() == 0) y.resize(batch.x.size());
  });
  if (world.rank() == 0) {
    const auto parts = split_tokens(batch.tokens, job.grid().dp_size(), job.options().token_split);
    for (std::size_t group = 0; group < parts.size(); ++group) {
      receives.push_back({static_cast<int>(group) * job.grid().tp().size(),
                          y.data() + parts[group].begin * batch.row_bytes(),
                          parts[group].size() * batch.row_bytes()});
    }
  }
  world.exchange(sends, receives);
  return y;
}

/// What homes have of their tokens, `record` bytes of each: all of it on rank 0, in `to`.
void gather_homes(const Job& job, std::span<const std::byte> own, std::int64_t tokens,
                  std::int64_t record, void* to) {
  Communicator& world = job.world();
  const int tp = job.grid().tp().size();
  const auto parts = split_tokens(tokens, job.grid().dp_size(), job.options().token_split);
  const std::vector<Transfer> sends{{0, const_cast<std::byte*>(own.data()), std::ssize(own)}};
  std::vector<Transfer> receives;
  auto* at = static_cast<std::byte*>(to);
  for (int r = 0; r < world.size() && world.rank() == 0; ++r) {
    const Range group = parts[static_cast<std::size_t>(r / tp)];
    receives.push_back({r, at, even_part(group.size(), tp, r % tp).size() * record});
    at += receives.back().bytes;
  }
  world.exchange(sends, receives);
}

/// Which experts the tokens went to: all of them on rank 0, nothing on the others.
Choices gather_routing(const Job& job, const Choices& own, const TokenBatch& batch) {
  Communicator& world = job.world();
  Choices all;
  run_agreed(world, [&] {
    if (world.rank() == 0) all.resize(batch.tokens, own.top_k);
  });
  const std::int64_t record = own.top_k * 4;
  gather_homes(job, std::as_bytes(std::span(own.ids)), batch.tokens, record, all.ids.data());
  gather_homes(job, std::as_bytes(std::span(own.weights)), batch.tokens, record,
               all.weights.data());
  return all;
}

/// The same of what was kept of them.
std::vector<std::uint8_t> gather_kept(const Job& job, std::span<const std::uint8_t> own,
                                      const TokenBatch& batch) {
  const std::int64_t k = job.config().moe->route.top_k;
  std::vector<std::uint8_t> all;
  run_agreed(job.world(), [&] {
    if (job.world().rank() == 0) all.resize(static_cast<std::size_t>(batch.tokens * k));
  });
  gather_homes(job, std::as_bytes(own), batch.tokens, k, all.data());
  return all;
}

struct Result {
  std::vector<std::byte> y;        // [T, H] in the job's dtype, as all here on rank 0
  std::vector<float> delta;        // [T, H], y of the whole layer less y; empty without --ablate
  Choices routing;                 // of all tokens, the best expert first; no rows in a dense layer
  std::vector<std::uint8_t> kept;  // [T, k], see Moe::kept(); empty without a capacity
};

/// One forward pass of the layer over all ranks; `given` is its routing, if it has rows.
Result forward(const Job& job, const LayerSpec& spec, const TensorSource& source,
               const TokenBatch& batch, const KernelChoice& kernel, const Choices& given) {
  Communicator& world = job.world();
  world.progress().enter("loading weights");
  const Range own = job.own_tokens(batch.tokens);
  const RowCount rows{own.size(), batch.tokens};
  MoeOptions options = job.layer_options(kernel);
  options.linear.residency = job.residency(spec);
  std::optional<Layer> layer;
  std::optional<DevicePass> pass;
  run_agreed(world, [&] {
    layer.emplace(spec, source, job.place(), options);
    layer->reserve(rows);
    pass.emplace(job.device(), batch.row(own.begin), rows, batch.row_bytes());
  });
  world.progress().enter("the forward pass");
  if (given.rows > 0) layer->moe()->replay(given.part(own));
  pass->forward(*layer);
  std::vector<std::byte> y;
  run_agreed(world, [&] { y = pass->y(); });
  Result result;
  result.y = gather_on_root(job, y, batch);
  if (layer->moe() != nullptr) {
    result.routing = gather_routing(job, layer->moe()->routing(), batch);
    if (job.capacity()) result.kept = gather_kept(job, layer->moe()->kept(), batch);
  }
  return result;
}

std::vector<float> as_float(const std::vector<std::byte>& values, DType dtype) {
  std::vector<float> wide(values.size() / static_cast<std::size_t>(size_of(dtype)));
  convert(dtype, values.data(), DType::kF32, reinterpret_cast<std::byte*>(wide.data()),
          static_cast<std::int64_t>(wide.size()));
  return wide;
}

/// What the table says of y, NaN left out.
struct Statistics {
  double least = std::numeric_limits<double>::quiet_NaN();
  double most = least;
  double mean = least;
  std::int64_t nan_rows = 0;
  std::int64_t first_nan_row = -1;
};

Statistics statistics_of(const std::vector<float>& y, std::int64_t hidden) {
  Statistics found;
  double sum = 0;
  std::int64_t count = 0;
  std::int64_t last_nan_row = -1;
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double value = y[i];
    const std::int64_t row = static_cast<std::int64_t>(i) / hidden;
    if (std::isnan(value)) {
      found.nan_rows += row == last_nan_row ? 0 : 1;
      if (found.first_nan_row < 0) found.first_nan_row = row;
      last_nan_row = row;
      continue;
    }
    found.least = count == 0 ? value : std::min(found.least, value);
    found.most = count == 0 ? value : std::max(found.most, value);
    sum += value;
    ++count;
  }
  if (count > 0) found.mean = sum / static_cast<double>(count);
  return found;
}

void write_output(const std::string& path, const TokenBatch& batch, const Result& result) {
  std::vector<SafetensorsWriter::Tensor> tensors = {
      {"y", std::string(safetensors_name(batch.dtype)), batch.shape}};
  const bool ablated = !result.delta.empty();
  const bool routed = result.routing.rows > 0;
  const std::vector<std::int64_t> chosen{result.routing.rows, result.routing.top_k};
  if (ablated) tensors.push_back({"delta", "F32", batch.shape});
  if (routed) tensors.push_back({"topk_ids", "I32", chosen});
  if (routed) tensors.push_back({"topk_weights", "F32", chosen});
  if (!result.kept.empty()) tensors.push_back({"topk_kept", "BOOL", chosen});
  SafetensorsWriter writer(path, tensors);
  writer.append(result.y);
  if (ablated) writer.append(std::as_bytes(std::span(result.delta)));
  if (routed) writer.append(std::as_bytes(std::span(result.routing.ids)));
  if (routed) writer.append(std::as_bytes(std::span(result.routing.weights)));
  if (!result.kept.empty()) writer.append(std::as_bytes(std::span(result.kept)));
  writer.finish();
}

void add_notes(Report& report, const Job& job, const TokenBatch& batch, const Result& result,
               const Statistics& statistics) {
  if (!job.options().ablate.empty()) {
    float largest = 0;
    for (const float d : result.delta) largest = std::max(largest, std::abs(d));
    report.note(fmt::format(
        "{} set to 0: largest |delta| {:.6g}",
        counted(static_cast<std::int64_t>(job.options().ablate.size()), "hidden channel"),
        largest));
  }
  if (statistics.nan_rows > 0) {
    report.note(fmt::format(
        "warning: {} of {} rows of y hold NaN, the first is row {} ({} rows of "
        "the input do)",
        statistics.nan_rows, batch.tokens, statistics.first_nan_row, batch.nan_rows.size()));
  }
  if (!result.kept.empty()) report.note(text_of(count_drops(result.kept, result.routing.top_k)));
  if (!job.options().output.empty()) report.note(fmt::format("y is in {}", job.options().output));
}

void add_row(Report& report, const Job& job, const TokenBatch& batch, const Result& result,
             const Statistics& statistics) {
  const auto whole = [](std::int64_t n) {
    return Cell::of(static_cast<double>(n), fmt::format("{}", n));
  };
  const auto real = [](double v) { return Cell::of(v, fmt::format("{:.6g}", v)); };
  report.row({whole(job.layers().front()), whole(batch.tokens), whole(job.grid().tp().size()),
              whole(job.grid().dp_size()), Cell::of(std::string(name_of(job.dtype()))),
              Cell::of(fmt::format("{:016x}", fingerprint(result.y))), real(statistics.least),
              real(statistics.most), real(statistics.mean)});
}

/// Throws Error 64 where they can't be cut off.
void check_channels(const std::vector<std::int64_t>& channels, const LayerSpec& layer) {
  if (channels.empty()) return;
  const auto* spec = std::get_if<FfnSpec>(&layer);
  if (spec == nullptr) {
    throw Error(ExitCode::kUsage,
                "--ablate with a mixture of experts (hidden channels are those of a dense layer "
                "only so far); leave it out, or choose another layer");
  }
  for (const std::int64_t channel : channels) {
    if (channel < spec->intermediate_size) continue;
    throw Error(ExitCode::kUsage,
                fmt::format("--ablate {} is beyond the {} of layer {} (they count "
                            "from 0); use 0 to {}",
                            channel, counted(spec->intermediate_size, "hidden channel"),
                            spec->layer, spec->intermediate_size - 1));
  }
}

/// The routing that --input replays, where it has one and the layer is a mixture of experts.
Choices routing_to_replay(const Job& job, const LayerSpec& spec, const TokenBatch& batch) {
  const auto* moe = std::get_if<MoeSpec>(&spec);
  return moe == nullptr ? Choices{} : job.given_routing(moe->route, batch);
}

/// The layer, or with --ablate the layer with channels cut off and what that changes.
Result compute(const Job& job, const LayerSpec& spec, const TokenBatch& batch,
               const KernelChoice& kernel, const Choices& given) {
  const std::vector<std::int64_t>& channels = job.options().ablate;
  Result result = forward(job, spec, job.source(), batch, kernel, given);
  if (channels.empty()) return result;

  std::vector<float> whole;
  run_agreed(job.world(), [&] { whole = as_float(result.y, batch.dtype); });
  const AblatedSource source(job.source(), std::get<FfnSpec>(spec), channels);
  result = forward(job, spec, source, batch, kernel, given);
  run_agreed(job.world(), [&] {
    result.delta = as_float(result.y, batch.dtype);
    for (std::size_t i = 0; i < whole.size(); ++i) result.delta[i] = whole[i] - result.delta[i];
  });
  return result;
}

}  // namespace

int run(Job& job) {
  if (job.layers().size() != 1) {
    throw Error(ExitCode::kUsage, fmt::format("run computes one layer ({} are chosen); give "
                                              "--layers N",
                                              job.layers().size()));
  }
  Report report = job.report();
  if (job.options().dry_run) return print_plan(job, report);
  const LayerSpec spec = job.layer_spec(job.layers().front());
  check_channels(job.options().ablate, spec);
  const TokenBatch batch = job.tokens(hidden_size(spec));
  const Choices given = routing_to_replay(job, spec, batch);
  const KernelChoice kernel = job.kernel(spec);
  if (job.options().reduce == Reduce::kExact) report.fact("kernel", kernel.name);
  report.fact("tokens", batch.description);
  if (given.rows > 0) report.fact("routing", "replayed from " + batch.description);

  const Result result = compute(job, spec, batch, kernel, given);
  job.world().progress().enter("writing y");
  run_agreed(job.world(), [&] {
    if (job.world().rank() != 0) return;
    const Statistics statistics = statistics_of(as_float(result.y, batch.dtype), batch.hidden);
    report.columns({{"layer", "", "layer"},
                    {"tokens", "", "tokens"},
                    {"tp", "", "tp"},
                    {"dp", "", "dp"},
                    {"dtype", "", "dtype"},
                    {"fingerprint", "", "fingerprint"},
                    {"min", "", "min"},
                    {"max", "", "max"},
                    {"mean", "", "mean"}});
    add_row(report, job, batch, result, statistics);
    if (!job.options().output.empty()) write_output(job.options().output, batch, result);
    add_notes(report, job, batch, result, statistics);
  });
  publish(job, report);
  return static_cast<int>(ExitCode::kOk);
}

}  // namespace gatefold
