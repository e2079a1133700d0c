#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "launch/expert_load.h"
#include "launch/job.h"
#include "launch/kernel_names.h"
#include "launch/model_total.h"
#include "launch/owners.h"
#include "parallel/agreement.h"
#include "runtime/activation.h"
#include "runtime/quoted_name.h"

namespace gatefold {
namespace {

/// How far a gate must open, or swing below zero, to be counted.
constexpr float kOpen = 0.1F;
constexpr std::int64_t kChunkRows = 1024;

/// Layers that are alike but for their number.
struct LayerKind {
  LayerSpec spec;
  std::vector<std::int64_t> layers;
};

bool alike(const FfnSpec& a, const FfnSpec& b) {
  return a.hidden_size == b.hidden_size && a.intermediate_size == b.intermediate_size &&
         a.gated() == b.gated() && a.activation.kind == b.activation.kind &&
         a.parameters() == b.parameters();
}

bool alike(const MoeSpec& a, const MoeSpec& b) {
  return alike(a.experts.front(), b.experts.front()) && a.route.experts == b.route.experts &&
         a.route.top_k == b.route.top_k &&
         std::ranges::equal(a.shared, b.shared, [](const FfnSpec& one, const FfnSpec& other) {
           return alike(one, other);
         });
}

bool alike(const LayerSpec& a, const LayerSpec& b) {
  if (is_moe(a) != is_moe(b)) return false;
  return is_moe(a) ? alike(std::get<MoeSpec>(a), std::get<MoeSpec>(b))
                   : alike(std::get<FfnSpec>(a), std::get<FfnSpec>(b));
}

bool any_moe(const std::vector<LayerKind>& kinds) {
  return std::ranges::any_of(kinds, [](const LayerKind& kind) { return is_moe(kind.spec); });
}

/// The first dense layer's, if any is.
const FfnSpec* first_dense(const std::vector<LayerKind>& kinds) {
  for (const LayerKind& kind : kinds) {
    if (const auto* dense = std::get_if<FfnSpec>(&kind.spec)) return dense;
  }
  return nullptr;
}

/// What a layer has, and what one token meets of it.
struct Size {
  double all = 0;
  double active = 0;
  double bytes = 0;  // read for one token
};

Size size_of_layer(const LayerSpec& spec, DType dtype) {
  const auto element = static_cast<double>(size_of(dtype));
  if (const auto* dense = std::get_if<FfnSpec>(&spec)) {
    const auto all = static_cast<double>(dense->parameters());
    return {all, all, all * element};
  }
  const auto& moe = std::get<MoeSpec>(spec);
  Size size{static_cast<double>(moe.parameters(moe.route.experts)),
            static_cast<double>(moe.parameters(moe.route.top_k))};
  // Routers and what gates shared experts are kept in fp32.
  std::int64_t mlps = moe.route.top_k * moe.experts.front().parameters();
  for (const FfnSpec& shared : moe.shared) mlps += shared.parameters();
  const auto multiplied = static_cast<double>(mlps);
  size.bytes = multiplied * element + (size.active - multiplied) * 4;
  return size;
}

/// act(gate), or act(up) where there is no gate, over tokens and hidden channels.
struct GateCount {
  std::int64_t open = 0;    // above 0.1
  std::int64_t closed = 0;  // below -0.1
  std::int64_t values = 0;
};

/// The gate alone as a plain activated layer.
MergedColumnParallelLinear make_gate(const Job& job, const FfnSpec& spec,
                                     const KernelChoice& kernel) {
  WeightTensors tensors{spec.intermediate_size,
                        spec.hidden_size,
                        spec.gate.value_or(spec.up),
                        spec.gate ? spec.gate_bias : spec.up_bias,
                        {},
                        {}};
  Activation activation = spec.activation;
  activation.gated = false;
  return {std::move(tensors), activation, job.source(), Place{&job.device(), &job.tp()},
          job.mlp_options(kernel).linear};
}

/// Counts this rank's columns for `rows` rows of x, which lies on the host.
void count_rows(const Job& job, MergedColumnParallelLinear& gate, const std::byte* host_x,
                std::int64_t rows, std::int64_t height, std::int64_t hidden, GateCount& count) {
  Device& device = job.device();
  const std::int64_t element = size_of(device.storage(job.dtype()));
  const auto tiles = [&](std::int64_t width, Buffer& memory) {
    Tiles made{nullptr, rows, height, width};
    memory = device.allocate(made.padded_rows() * width * element);
    made.data = memory.data();
    return made;
  };
  Buffer x_memory;
  Buffer h_memory;
  const Tiles x_tiles = tiles(round_up(hidden, kInnerStep), x_memory);
  const Buffer x = device.allocate(rows * hidden * size_of(job.dtype()));
  device.upload(x.data(), host_x, x.bytes());
  device.tile_rows({.data = x.data(), .stride = hidden}, job.dtype(), hidden, x_tiles);
  for (std::size_t block = 0; block < gate.blocks(); ++block) {
    const Tiles h = tiles(gate.shape(block).padded_outputs(), h_memory);
    gate.forward_block(block, x_tiles, h);
    const std::int64_t columns = gate.shape(block).outputs;
    const Buffer own = device.allocate(rows * columns * size_of(job.dtype()));
    device.untile_rows(h, job.dtype(), columns, own.data(), columns);
    std::vector<std::byte> host(static_cast<std::size_t>(own.bytes()));
    device.download(host.data(), own.data(), own.bytes());
    std::vector<float> values(static_cast<std::size_t>(rows * columns));
    convert(job.dtype(), host.data(), DType::kF32, reinterpret_cast<std::byte*>(values.data()),
            rows * columns);
    count.open += std::ranges::count_if(values, [](float v) { return v > kOpen; });
    count.closed += std::ranges::count_if(values, [](float v) { return v < -kOpen; });
    count.values += rows * columns;
    job.world().progress().tick();
  }
}

/// How far the gates of a layer open for the tokens, over all ranks. Collective.
GateCount count_gates(const Job& job, const FfnSpec& spec, const TokenBatch& batch,
                      const KernelChoice& kernel) {
  Communicator& world = job.world();
  const Range own = job.own_tokens(batch.tokens);
  std::vector<GateCount> all(static_cast<std::size_t>(world.size()));
  GateCount& mine = all[static_cast<std::size_t>(world.rank())];
  world.progress().enter("the gates");
  run_agreed(world, [&] {
    MergedColumnParallelLinear gate = make_gate(job, spec, kernel);
    const bool at_once = gate.kernel() == GemmKernel::kLibraryWhole;
    const std::int64_t height =
        tile_height(job.device(), gate.kernel(), {own.size(), batch.tokens});
    const std::int64_t chunk = at_once ? height : kChunkRows / height * height;
    gate.reserve(height);
    for (std::int64_t first = own.begin; first < own.end; first += chunk) {
      const std::int64_t rows = std::min(chunk, own.end - first);
      count_rows(job, gate, batch.row(first), rows, height, spec.hidden_size, mine);
    }
  });
  all_gather<GateCount>(world, all);
  GateCount total;
  for (const GateCount& one : all) {
    total.open += one.open;
    total.closed += one.closed;
    total.values += one.values;
  }
  return total;
}

Cell whole(std::int64_t n) { return Cell::of(static_cast<double>(n), fmt::format("{}", n)); }
Cell whole(double n) { return Cell::of(n, fmt::format("{:.0f}", n)); }
Cell real(double n) { return Cell::of(n, fmt::format("{:.3f}", n)); }
Cell share(std::int64_t part, std::int64_t all) {
  const double value = all > 0 ? static_cast<double>(part) / static_cast<double>(all) : 0.0;
  return Cell::of(value, fmt::format("{:.1f} %", 100 * value));
}

/// With --model each layer is looked up in the checkpoint. Collective.
std::vector<LayerKind> find_kinds(const Job& job) {
  const ModelConfig& config = job.config();
  const auto planned = [&config](std::int64_t layer) {
    return config.is_moe(layer) ? LayerSpec(config.moe_spec(layer))
                                : LayerSpec(config.layer_spec(layer));
  };
  std::vector<LayerKind> kinds;
  for (const std::int64_t layer : job.layers()) {
    LayerSpec spec = job.options().model.empty() ? planned(layer) : job.layer_spec(layer);
    const auto known = std::ranges::find_if(
        kinds, [&spec](const LayerKind& kind) { return alike(kind.spec, spec); });
    if (known != kinds.end()) {
      known->layers.push_back(layer);
    } else {
      kinds.push_back({std::move(spec), {layer}});
    }
  }
  return kinds;
}

/// What a table says of models without experts is what it says of all, and no more.
std::vector<Column> columns_of(bool with_tokens, const std::vector<LayerKind>& kinds) {
  const bool experts = any_moe(kinds);
  std::vector<Column> columns = {{"layers", "", "layers"},  {"kind", "", "kind"},
                                 {"act", "", "activation"}, {"gate", "[I, H]", "gate"},
                                 {"up", "[I, H]", "up"},    {"down", "[H, I]", "down"},
                                 {"bias", "", "bias"}};
  if (experts) columns.push_back({"shared", "I", "shared"});
  columns.push_back({"parameters", "a layer", "parameters"});
  if (experts) columns.push_back({"active", "a token", "active_parameters"});
  columns.push_back({"read", "B/token", "bytes_per_token"});
  if (!with_tokens) return columns;
  if (const FfnSpec* dense = first_dense(kinds)) {
    const std::string name = dense->gated() ? "act(gate)" : "act(up)";
    columns.push_back({name, "> 0.1", "gate_open"});
    columns.push_back({name, "< -0.1", "gate_closed"});
  }
  if (experts) {
    columns.insert(columns.end(), {{"load", "max/mean", "load_max_over_mean"},
                                   {"entropy", "bits", "load_entropy_bits"},
                                   {"entropy", "/ log2 E", "load_entropy_share"},
                                   {"experts", "without", "experts_without_tokens"}});
  }
  return columns;
}

std::vector<Cell> cells_of(const Job& job, const LayerSpec& spec, bool experts,
                           const std::string& layers) {
  const auto* moe = std::get_if<MoeSpec>(&spec);
  const FfnSpec& ffn = moe == nullptr ? std::get<FfnSpec>(spec) : moe->experts.front();
  const std::string times = moe == nullptr ? "" : fmt::format("{} x ", moe->route.experts);
  const auto shape = [&times](std::int64_t rows, std::int64_t columns) {
    return Cell::of(fmt::format("{}[{}, {}]", times, rows, columns));
  };
  const Cell wide = shape(ffn.intermediate_size, ffn.hidden_size);
  const Size size = size_of_layer(spec, job.dtype());
  std::vector<Cell> cells = {Cell::of(layers),
                             Cell::of(kind_text(spec)),
                             Cell::of(std::string(activation_name(ffn.activation.kind))),
                             ffn.gated() ? wide : Cell::of("-"),
                             wide,
                             shape(ffn.hidden_size, ffn.intermediate_size),
                             Cell::of(ffn.down_bias ? "yes" : "no")};
  if (experts) {
    const bool shared = moe != nullptr && !moe->shared.empty();
    cells.push_back(shared ? whole(moe->shared.front().intermediate_size) : Cell::of("-"));
  }
  cells.push_back(whole(size.all));
  if (experts) cells.push_back(whole(size.active));
  cells.push_back(whole(size.bytes));
  return cells;
}

/// How far the gates of layer `spec` open, if it is dense.
void add_gates(const Job& job, const FfnSpec* spec, const TokenBatch& batch, KernelNames& kernels,
               std::vector<Cell>& cells) {
  if (spec == nullptr) {
    cells.insert(cells.end(), 2, Cell::of("-"));
    return;
  }
  const KernelChoice kernel = job.kernel(*spec);
  kernels.add(spec->layer, kernel.name);
  const GateCount gates = count_gates(job, *spec, batch, kernel);
  cells.push_back(share(gates.open, gates.values));
  cells.push_back(share(gates.closed, gates.values));
}

void add_load(const ExpertRows& rows, std::vector<Cell>& cells) {
  if (rows.empty()) {
    cells.insert(cells.end(), 4, Cell::of("-"));
    return;
  }
  cells.insert(cells.end(), {real(max_over_mean(rows)), real(entropy_bits(rows)),
                             real(entropy_share(rows)), whole(experts_without(rows))});
}

/// One row for each layer, with what its gate or its router does with the tokens.
void add_rows_with_tokens(const Job& job, const std::vector<LayerKind>& kinds, Report& report) {
  const TokenBatch batch = job.tokens(hidden_size(kinds.front().spec));
  KernelNames kernels;
  std::vector<std::string> histograms;
  for (const std::int64_t layer : job.layers()) {
    const LayerSpec spec = job.layer_spec(layer);
    std::vector<Cell> cells = cells_of(job, spec, any_moe(kinds), fmt::format("{}", layer));
    if (first_dense(kinds) != nullptr) {
      add_gates(job, std::get_if<FfnSpec>(&spec), batch, kernels, cells);
    }
    if (any_moe(kinds)) {
      const auto* moe = std::get_if<MoeSpec>(&spec);
      const ExpertLoad load = moe == nullptr ? ExpertLoad{} : find_expert_load(job, *moe, batch);
      add_load(load.rows, cells);
      if (moe != nullptr) {
        histograms.push_back(fmt::format("layer {}: how many rows its experts get of {}", layer,
                                         counted(batch.tokens, "token")));
        for (std::string& line : load_histogram(load.rows)) histograms.push_back(std::move(line));
        if (moe->capacity) {
          histograms.push_back(fmt::format("layer {}: {}", layer, text_of(load.drops)));
        }
      }
    }
    report.row(std::move(cells));
  }
  for (const std::string& line : histograms) report.note(line);
  if (first_dense(kinds) != nullptr && job.options().reduce == Reduce::kExact) {
    kernels.state(report);
  }
}

/// One row per kind of layer, or with tokens one per layer.
void add_rows(const Job& job, const std::vector<LayerKind>& kinds, Report& report) {
  const bool with_tokens = job.options().tokens_given || !job.options().input.empty();
  report.columns(columns_of(with_tokens, kinds));
  if (with_tokens) {
    add_rows_with_tokens(job, kinds, report);
    return;
  }
  for (const auto& [spec, layers] : kinds) {
    report.row(cells_of(job, spec, any_moe(kinds), layer_text(layers)));
  }
}

void add_totals(const Job& job, const std::vector<LayerKind>& kinds, Report& report) {
  Size sum;
  for (const auto& [spec, layers] : kinds) {
    const Size each = size_of_layer(spec, job.dtype());
    const auto count = static_cast<double>(layers.size());
    const auto active = [&](double parameters) {
      return is_moe(spec) ? fmt::format(" ({} active)", human(parameters, "")) : std::string();
    };
    report.note(fmt::format(
        "{} parameters{} a layer, {}{} for {}, {} a layer and {} in all read per {} token",
        human(each.all, "", 4), active(each.active), human(each.all * count, ""),
        active(each.active * count), layers.size(), human(each.bytes, "B"),
        human(each.bytes * count, "B"), name_of(job.dtype())));
    sum.all += each.all * count;
    sum.active += each.active * count;
  }
  if (any_moe(kinds)) {
    report.note(fmt::format("{} parameters in these feed-forward layers, {} active for a token",
                            human(sum.all, ""), human(sum.active, "")));
  }
  const auto total = model_parameters(job.config());
  if (!total) return;
  const std::string active =
      any_moe(kinds)
          ? fmt::format(" ({} active, attention and embeddings too)", human(total->active, ""))
          : std::string();
  report.note(fmt::format("{:.1f} % of the model's {} parameters{}, counted from its config",
                          100.0 * sum.all / total->all, human(total->all, ""), active));
}

}  // namespace

int inspect(Job& job) {
  Report report = job.report();
  if (job.options().dry_run) return print_plan(job, report);
  const std::vector<LayerKind> kinds = find_kinds(job);
  add_rows(job, kinds, report);
  for (const LayerKind& kind : kinds) add_owners(job, kind.spec, report);
  add_totals(job, kinds, report);
  publish(job, report);
  return static_cast<int>(ExitCode::kOk);
}

}  // namespace gatefold
