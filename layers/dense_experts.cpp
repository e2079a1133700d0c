#include "layers/dense_experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "runtime/error.h"
#include "runtime/quoted_name.h"
#include "runtime/routing.h"

namespace gatefold {
namespace {

std::string_view config_name(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "float32";
    case DType::kBf16: return "bfloat16";
    case DType::kF16: break;
  }
  return "float16";
}

std::int64_t width_of_expert(const ModelConfig& dense, const DenseExperts& how) {
  return how.into == DenseInto::kCopies ? dense.intermediate_size
                                        : dense.intermediate_size / how.experts;
}

void check_equal_parts(const ModelConfig& dense, const DenseExperts& how) {
  if (how.into == DenseInto::kCopies || dense.intermediate_size % how.experts == 0) return;
  throw Error(ExitCode::kUsage,
              fmt::format("{} experts out of the {} neurons of a layer of {} (experts have equal "
                          "parts); use a divisor",
                          how.experts, dense.intermediate_size, dense.path));
}

// What only some dense families have would be lost without a word.
void check_expressible(const ModelConfig& dense) {
  const auto refuse = [&](std::string_view what) {
    throw Error(ExitCode::kData,
                fmt::format("{}: its layers have {} (the experts of qwen3_moe models, which are "
                            "made of them, don't); choose another model",
                            dense.path, what));
  };
  if (!dense.activation.gated) refuse("no gate");
  if (dense.bias) refuse("biases");
  if (dense.swish_beta) refuse("a learnable beta");
  if (dense.activation.kind == ActivationKind::kClampedSwiglu) refuse("clamps");
}

void check_choices_of_all(const DenseExperts& how,
                          const std::vector<std::pair<std::string, std::string>>& overrides) {
  const bool given = std::ranges::any_of(
      overrides, [](const auto& pair) { return pair.first == "num_experts_per_tok"; });
  if (how.into == DenseInto::kCopies || given || how.experts <= kMaxTopK) return;
  throw Error(ExitCode::kUsage,
              fmt::format("{} experts that each token goes to (all parts make up the layer, and "
                          "{} experts of a token are the most); use fewer, or --set "
                          "num_experts_per_tok=K",
                          how.experts, kMaxTopK));
}

void check_overrides(const std::vector<std::pair<std::string, std::string>>& overrides) {
  for (const auto& [key, value] : overrides) {
    if (key == "num_experts_per_tok" || key == "norm_topk_prob") continue;
    throw Error(ExitCode::kUsage,
                fmt::format("--set {}={} of a model made from a dense one (all but "
                            "num_experts_per_tok and norm_topk_prob follows from that); leave it "
                            "out",
                            key, value));
  }
}

}  // namespace

ModelConfig experts_config(const ModelConfig& dense, const DenseExperts& how, DType dtype,
                           const std::vector<std::pair<std::string, std::string>>& overrides) {
  check_overrides(overrides);
  check_expressible(dense);
  check_equal_parts(dense, how);
  check_choices_of_all(how, overrides);
  const bool copies = how.into == DenseInto::kCopies;
  nlohmann::json config = {
      {"model_type", "qwen3_moe"},
      {"hidden_size", dense.hidden_size},
      {"intermediate_size", dense.intermediate_size},
      {"moe_intermediate_size", width_of_expert(dense, how)},
      {"num_hidden_layers", dense.num_layers},
      {"num_experts", how.experts},
      {"num_experts_per_tok", copies ? 1 : how.experts},
      // One copy has to weigh 1; all parts weigh 1 / E as it is.
      {"norm_topk_prob", copies},
      {"decoder_sparse_step", 1},
      {"mlp_only_layers", nlohmann::json::array()},
      {"hidden_act", activation_name(dense.activation.kind)},
      {"dtype", config_name(dtype)},
  };
  if (dense.vocab_size > 0) config["vocab_size"] = dense.vocab_size;
  return parse_model_config(config.dump(), dense.path, overrides);
}

DenseExpertsSource::DenseExpertsSource(const ModelConfig& dense, const TensorSource& source,
                                       const DenseExperts& how, const ModelConfig& made,
                                       const std::vector<std::int64_t>& layers)
    : source_(source), how_(how) {
  const std::int64_t hidden = made.hidden_size;
  const std::int64_t width = made.moe->intermediate_size;
  for (const std::int64_t layer : layers) {
    const FfnSpec from = resolve_layer(dense, layer, source);
    const MoeSpec to = made.moe_spec(layer);
    parts_[to.router.name].info = {made.dtype, to.router.stored_shape};
    for (std::size_t e = 0; e < to.experts.size(); ++e) {
      const bool copies = how.into == DenseInto::kCopies;
      const std::int64_t first = copies ? 0 : static_cast<std::int64_t>(e) * width;
      const Range neurons{first, first + width};
      add(to.experts[e].gate->name, *from.gate, neurons, {0, hidden});
      add(to.experts[e].up.name, from.up, neurons, {0, hidden});
      add(to.experts[e].down.name, from.down, {0, hidden}, neurons);
    }
  }
}

// Rows and columns of the matrix that `ref` is.
void DenseExpertsSource::add(const std::string& name, const TensorRef& ref, Range rows,
                             Range columns) {
  if (ref.transposed || ref.row_step != 1) {
    throw Error(ExitCode::kData,
                fmt::format("{}: {} is stored [in, out] (experts are made of [out, in] only so "
                            "far); choose another model",
                            source_.description(), ref.name));
  }
  parts_[name] = {.name = ref.name,
                  .info = {source_.find(ref.name)->dtype, {rows.size(), columns.size()}},
                  .first_row = ref.row_offset + rows.begin,
                  .first_column = ref.column_offset + columns.begin};
}

std::optional<TensorInfo> DenseExpertsSource::find(const std::string& name) const {
  const auto found = parts_.find(name);
  if (found == parts_.end()) return std::nullopt;
  return found->second.info;
}

void DenseExpertsSource::read(const std::string& name, Range rows, Range cols,
                              std::byte* out) const {
  const auto found = parts_.find(name);
  if (found == parts_.end()) {
    throw Error(ExitCode::kData, fmt::format("{}: no tensor {} (it isn't one of the layers that "
                                             "are made); check the layer",
                                             description(), name));
  }
  const Part& part = found->second;
  if (part.name.empty()) {
    std::fill_n(out, rows.size() * cols.size() * size_of(part.info.dtype), std::byte{0});
    return;
  }
  source_.read(part.name, {part.first_row + rows.begin, part.first_row + rows.end},
               {part.first_column + cols.begin, part.first_column + cols.end}, out);
}

std::string DenseExpertsSource::description() const {
  return fmt::format("{}, each layer {} {}", source_.description(),
                     how_.into == DenseInto::kCopies ? "copied into" : "cut into",
                     counted(how_.experts, "expert"));
}

}  // namespace gatefold
