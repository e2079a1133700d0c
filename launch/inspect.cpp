#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "launch/job.h"
#include "launch/model_total.h"
#include "parallel/agreement.h"
#include "runtime/activation.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

/// How far a gate must open, or swing below zero, to be counted.
constexpr float kOpen = 0.1F;
constexpr std::int64_t kChunkRows = 1024;

/// Layers that are alike but for their number.
struct LayerKind {
  FfnSpec spec;
  std::vector<std::int64_t> layers;
};

bool alike(const FfnSpec& a, const FfnSpec& b) {
  return a.hidden_size == b.hidden_size && a.intermediate_size == b.intermediate_size &&
         a.gated() == b.gated() && a.activation.kind == b.activation.kind &&
         a.parameters() == b.parameters();
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
  device.tile_rows(x.data(), hidden, job.dtype(), hidden, x_tiles);
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

std::string_view activation_name(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::kIdentity: return "identity";
    case ActivationKind::kRelu: return "relu";
    case ActivationKind::kRelu2: return "relu2";
    case ActivationKind::kSilu: return "silu";
    case ActivationKind::kGeluExact: return "gelu";
    case ActivationKind::kGeluTanh: return "gelu_pytorch_tanh";
    case ActivationKind::kQuickGelu: return "quick_gelu";
    case ActivationKind::kClampedSwiglu: return "clamped_swiglu";
  }
  return "?";
}

Cell whole(std::int64_t n) { return Cell::of(static_cast<double>(n), fmt::format("{}", n)); }
Cell share(std::int64_t part, std::int64_t all) {
  const double value = all > 0 ? static_cast<double>(part) / static_cast<double>(all) : 0.0;
  return Cell::of(value, fmt::format("{:.1f} %", 100 * value));
}
std::string shape(std::int64_t rows, std::int64_t columns) {
  return fmt::format("[{}, {}]", rows, columns);
}

/// With --model each layer is looked up in the checkpoint. Collective.
std::vector<LayerKind> find_kinds(const Job& job) {
  std::vector<LayerKind> kinds;
  for (const std::int64_t layer : job.layers()) {
    FfnSpec spec =
        job.options().model.empty() ? job.config().layer_spec(layer) : job.layer_spec(layer);
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

std::vector<Column> columns_of(bool with_gates, const FfnSpec& spec) {
  std::vector<Column> columns = {{"layers", "", "layers"},
                                 {"kind", "", "kind"},
                                 {"act", "", "activation"},
                                 {"gate", "[I, H]", "gate"},
                                 {"up", "[I, H]", "up"},
                                 {"down", "[H, I]", "down"},
                                 {"bias", "", "bias"},
                                 {"parameters", "a layer", "parameters"},
                                 {"read", "B/token", "bytes_per_token"}};
  if (with_gates) {
    const std::string name = spec.gated() ? "act(gate)" : "act(up)";
    columns.push_back({name, "> 0.1", "gate_open"});
    columns.push_back({name, "< -0.1", "gate_closed"});
  }
  return columns;
}

std::vector<Cell> cells_of(const Job& job, const FfnSpec& spec, const std::string& layers) {
  const std::string wide = shape(spec.intermediate_size, spec.hidden_size);
  return {Cell::of(layers),
          Cell::of(spec.gated() ? "dense, gated" : "dense, plain"),
          Cell::of(std::string(activation_name(spec.activation.kind))),
          Cell::of(spec.gated() ? wide : "-"),
          Cell::of(wide),
          Cell::of(shape(spec.hidden_size, spec.intermediate_size)),
          Cell::of(spec.down_bias ? "yes" : "no"),
          whole(spec.parameters()),
          whole(spec.parameters() * size_of(job.dtype()))};
}

/// One row per kind of layer, or with tokens one per layer.
void add_rows(const Job& job, const std::vector<LayerKind>& kinds, Report& report) {
  const bool with_gates = job.options().tokens_given || !job.options().input.empty();
  report.columns(columns_of(with_gates, kinds.front().spec));
  if (!with_gates) {
    for (const auto& [spec, layers] : kinds) {
      report.row(cells_of(job, spec, layer_text(layers)));
    }
    return;
  }
  const TokenBatch batch = job.tokens(kinds.front().spec.hidden_size);
  KernelNames kernels;
  for (const std::int64_t layer : job.layers()) {
    const FfnSpec spec = job.layer_spec(layer);
    const KernelChoice kernel = job.kernel(spec);
    kernels.add(layer, kernel.name);
    const GateCount gates = count_gates(job, spec, batch, kernel);
    std::vector<Cell> cells = cells_of(job, spec, fmt::format("{}", layer));
    cells.push_back(share(gates.open, gates.values));
    cells.push_back(share(gates.closed, gates.values));
    report.row(std::move(cells));
  }
  if (job.options().reduce == Reduce::kExact) kernels.state(report);
}

void add_totals(const Job& job, const std::vector<LayerKind>& kinds, Report& report) {
  const double element = static_cast<double>(size_of(job.dtype()));
  std::int64_t parameters = 0;
  for (const auto& [spec, layers] : kinds) {
    const auto count = static_cast<std::int64_t>(layers.size());
    const double each = static_cast<double>(spec.parameters());
    const double all = each * static_cast<double>(count);
    report.note(
        fmt::format("{} parameters a layer, {} for {}, {} a layer and {} in all read per {} token",
                    human(each, "", 4), human(all, ""), count, human(each * element, "B"),
                    human(all * element, "B"), name_of(job.dtype())));
    parameters += spec.parameters() * count;
  }
  const auto total = model_parameters(job.config());
  if (!total) return;
  report.note(fmt::format("{:.1f} % of the model's {} parameters, counted from its config",
                          100.0 * static_cast<double>(parameters) / *total, human(*total, "")));
}

/// Which rank of a tensor-parallel group owns what, for --tp or the tp of this world.
void add_owners(const Job& job, const FfnSpec& spec, Report& report) {
  const std::int64_t tp = job.options().tp > 0 ? job.options().tp : job.grid().tp().size();
  const bool exact = job.options().reduce == Reduce::kExact;
  const Blocks blocks{spec.intermediate_size, exact ? job.options().blocks : tp};
  if (tp > blocks.count) {
    throw Error(ExitCode::kUsage, fmt::format("--tp {} is more than --blocks {} (a rank owns whole "
                                              "blocks); use a smaller tp or more blocks",
                                              tp, blocks.count));
  }
  const std::int64_t vectors = (spec.gate_bias ? 1 : 0) + (spec.up_bias ? 1 : 0);
  const std::int64_t per_column = (spec.gated() ? 3 : 2) * spec.hidden_size + vectors;
  report.note(
      fmt::format("tp {}: which blocks of {}, columns of I = {} and how much of the matrices", tp,
                  blocks.count, spec.intermediate_size));
  for (std::int64_t rank = 0; rank < tp; ++rank) {
    const Range run = owned_blocks(blocks.count, tp, rank);
    const Range columns = blocks.columns(run);
    const double parameters = static_cast<double>(per_column * columns.size());
    report.note(fmt::format(
        "  rank {}  blocks {}-{}  columns {}  {} parameters, {}", rank, run.begin, run.end - 1,
        columns.empty() ? std::string("none")
                        : fmt::format("{}-{}", columns.begin, columns.end - 1),
        human(parameters, ""), human(parameters * static_cast<double>(size_of(job.dtype())), "B")));
  }
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
