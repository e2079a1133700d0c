#include "layers/moe_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "layers/config_document.h"
#include "layers/model_config.h"
#include "layers/model_families.h"
#include "runtime/error.h"
#include "runtime/expert_rows.h"

namespace gatefold {
namespace {

constexpr std::pair<std::string_view, Score> kScores[] = {{"softmax", Score::kSoftmax},
                                                          {"sigmoid", Score::kSigmoid},
                                                          {"sqrtsoftplus", Score::kSqrtSoftplus}};
constexpr std::pair<std::string_view, TopKMethod> kMethods[] = {
    {"greedy", TopKMethod::kGreedy},
    {"group_limited_greedy", TopKMethod::kGroupLimitedGreedy},
    {"noaux_tc", TopKMethod::kNoAuxTc}};

/// Experts that a sparse mixer is defined for.
constexpr std::int64_t kMixed = 2;

// The value of field `key`, one of `names`.
template <typename Value, std::size_t kCount>
Value read_choice(const ConfigDocument& document, std::string_view key,
                  const std::pair<std::string_view, Value> (&names)[kCount], Value otherwise) {
  if (key.empty() || !document.has(key)) return otherwise;
  const std::string given = document.string(key, "");
  std::string known;
  for (const auto& [name, value] : names) {
    if (given == name) return value;
    known.append(known.empty() ? "" : ", ").append(name);
  }
  document.fail(key, fmt::format("unknown {} {} (known: {})", key, shown(given), known));
}

void read_groups(const ConfigDocument& document, RouteRule& route, bool pairs) {
  const MoeFamily& moe = *document.family().moe;
  route.groups = document.size(kGroupsKey, kMaxExperts, moe.default_groups);
  route.kept_groups = document.size(kKeptGroupsKey, kMaxExperts, moe.default_kept_groups);
  const std::string_view experts_key = document.first_of(moe.experts_keys);
  const auto fail = [&](const std::string& problem) {
    document.fail({kGroupsKey, experts_key, kKeptGroupsKey, moe.top_k_key}, problem);
  };
  const std::int64_t size = route.experts / route.groups;
  if (route.experts % route.groups != 0) {
    fail(fmt::format("{} {} does not divide {} {} (groups are of one size)", kGroupsKey,
                     route.groups, experts_key, route.experts));
  }
  if (route.kept_groups > route.groups) {
    fail(fmt::format("{} {} is more than {} {} (that many groups can't be kept)", kKeptGroupsKey,
                     route.kept_groups, kGroupsKey, route.groups));
  }
  if (route.kept_groups * size < route.top_k) {
    fail(fmt::format("{} {} of {} {} leaves {} of {} {} to choose {} {} from (too few)",
                     kKeptGroupsKey, route.kept_groups, kGroupsKey, route.groups,
                     route.kept_groups * size, experts_key, route.experts, moe.top_k_key,
                     route.top_k));
  }
  if (pairs && route.groups > 1 && size < 2) {
    fail(fmt::format("{} {} with {} {} makes groups of one (they are judged by their two best)",
                     kGroupsKey, route.groups, experts_key, route.experts));
  }
}

RouteRule read_route(const ConfigDocument& document, TopKMethod method) {
  const MoeFamily& moe = *document.family().moe;
  RouteRule route;
  const std::string_view experts_key = document.first_of(moe.experts_keys);
  route.experts = document.size(experts_key, kMaxExperts, 0);
  route.top_k = moe.default_top_k;
  if (!moe.top_k_key.empty()) {
    route.top_k = document.size(moe.top_k_key, kMaxTopK, moe.default_top_k);
  }
  if (route.top_k > route.experts) {
    document.fail({moe.top_k_key, experts_key},
                  fmt::format("{} {} is more than {} {} (a token's experts are distinct)",
                              moe.top_k_key, route.top_k, experts_key, route.experts));
  }
  route.score = read_choice(document, moe.score_key, kScores, moe.score);
  if (route.score == Score::kSparseMixer) {
    if (route.top_k != kMixed) {
      document.fail(moe.top_k_key,
                    fmt::format("{} is {} (a sparse mixer, as of {}, chooses {})", moe.top_k_key,
                                route.top_k, document.model_type(), kMixed));
    }
    route.margin =
        static_cast<float>(2 * document.coefficient(moe.half_margin_key, moe.default_half_margin));
  }
  if (method != TopKMethod::kGreedy) {
    const bool pairs = method == TopKMethod::kNoAuxTc;
    route.group_score = pairs ? GroupScore::kTwoBest : GroupScore::kBest;
    read_groups(document, route, pairs);
  }
  route.normalize = document.flag(moe.normalize) && (moe.normalize_one || route.top_k > 1);
  route.epsilon = moe.epsilon;
  route.scaling = document.positive_number(moe.scaling_key, moe.default_scaling);
  return route;
}

BalanceTerms read_balance(const ConfigDocument& document) {
  const LossKeys& keys = document.family().moe->loss;
  return {keys.loss, document.coefficient(keys.coefficient), document.flag(keys.per_sequence),
          document.coefficient(keys.z_coefficient)};
}

std::int64_t read_expert_width(const ConfigDocument& document) {
  const MoeFamily& moe = *document.family().moe;
  const bool said = document.has(moe.intermediate_size_key);
  const bool other = !said && document.has(moe.otherwise_intermediate_size_key);
  return document.size(other ? moe.otherwise_intermediate_size_key : moe.intermediate_size_key,
                       kMaxSize, 0);
}

// Into `moe`, whose experts' width is known.
void read_shared(const ConfigDocument& document, MoeConfig& moe) {
  const MoeFamily& family = *document.family().moe;
  const auto count = [&](std::int64_t limit) {
    return document.count(family.shared_key, limit, family.default_shared);
  };
  const std::int64_t expert = moe.intermediate_size;
  std::int64_t& width = moe.shared_intermediate_size;
  switch (family.shared_width) {
    case SharedWidth::kNone: return;
    case SharedWidth::kOfItsOwn:
      width = document.size(family.shared_key, kMaxSize, family.default_shared);
      return;
    case SharedWidth::kOfItsOwnIfAny: width = count(kMaxSize); return;
    case SharedWidth::kOneExpert: width = expert; return;
    case SharedWidth::kSeveralExperts: width = count(kMaxExperts) * expert; return;
    case SharedWidth::kListOfOneExpert: break;
  }
  moe.shared_experts = count(kMaxShared);
  width = moe.shared_experts == 0 ? 0 : expert;
}

// 0: none of the stack's layers is a mixture.
std::int64_t read_step(const ConfigDocument& document, const LayerStack& stack,
                       std::int64_t layers) {
  if (document.has(stack.moe_step_key)) {
    return document.count(stack.moe_step_key, kMaxLayers, 0);
  }
  if (stack.moe_count_key.empty()) return 1;
  if (!document.has(stack.moe_count_key)) {
    document.fail(stack.moe_step_key,
                  fmt::format("no {} and no {} (which layers are mixtures isn't said)",
                              stack.moe_step_key, stack.moe_count_key));
  }
  const std::int64_t mixtures = document.count(stack.moe_count_key, kMaxLayers, 0);
  if (mixtures > layers) {
    document.fail(stack.moe_count_key,
                  fmt::format("{} is {} ({} has {} layers)", stack.moe_count_key, mixtures,
                              stack.path, layers));
  }
  return mixtures == 0 ? 0 : layers / mixtures;
}

bool on_step(EveryStep every, std::int64_t layer, std::int64_t step) {
  if (step == 0) return false;
  switch (every) {
    case EveryStep::kFirst: return layer % step == 0;
    case EveryStep::kSecond: return layer % step == 1 % step;
    case EveryStep::kLast: break;
  }
  return (layer + 1) % step == 0;
}

std::vector<bool> read_moe_layers(const ConfigDocument& document,
                                  std::span<const std::int64_t> stacks) {
  const ModelFamily& family = document.family();
  const MoeFamily& moe = *family.moe;
  std::vector<bool> layers;
  for (std::size_t i = 0; i < stacks.size(); ++i) {
    const std::int64_t step = read_step(document, family.stacks[i], stacks[i]);
    for (std::int64_t layer = 0; layer < stacks[i]; ++layer) {
      layers.push_back(on_step(moe.every, layer, step));
    }
  }
  const auto total = static_cast<std::int64_t>(layers.size());
  if (!moe.list_key.empty() && document.has(moe.list_key)) {
    layers.assign(layers.size(), false);
    for (const std::int64_t layer : document.layers(moe.list_key, total)) {
      layers[static_cast<std::size_t>(layer)] = true;
    }
  }
  for (const std::int64_t layer : document.layers(moe.dense_list_key, total)) {
    layers[static_cast<std::size_t>(layer)] = false;
  }
  if (moe.first_key.empty()) return layers;
  const std::int64_t first = document.count(moe.first_key, kMaxLayers, moe.default_first);
  std::fill_n(layers.begin(), std::min(first, total), false);
  return layers;
}

// Expert `e` inside tensors that hold all E of them; `path` is the layer's.
FfnSpec stacked_expert(const ModelConfig& config, std::int64_t layer, const std::string& path,
                       const ExpertNames& names, std::int64_t e) {
  const std::int64_t experts = config.moe->route.experts;
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t inner = config.moe->intermediate_size;
  const bool gated = config.activation.gated;
  const std::int64_t fused = gated ? 2 * inner : inner;
  const bool alternating = gated && names.layout == ExpertLayout::kStackedAlternating;
  const bool turned = names.layout != ExpertLayout::kStacked;
  // As they are, an expert's matrix is a run of rows; transposed, its inputs are a run of rows.
  const auto matrix = [&](std::string_view module, std::int64_t out, std::int64_t in) {
    TensorRef ref{.name = path + std::string(module), .transposed = turned};
    ref.stored_shape = {experts, turned ? in : out, turned ? out : in};
    (turned ? ref.column_offset : ref.row_offset) = e * ref.stored_shape[1];
    return ref;
  };
  const auto vector = [&](std::string_view module, std::int64_t out) {
    return TensorRef{.name = path + std::string(module) + "_bias",
                     .stored_shape = {experts, out},
                     .column_offset = e};
  };
  const auto part = [&](TensorRef ref, bool up) {
    ref.row_step = alternating ? 2 : 1;
    if (up && gated) ref.row_offset += alternating ? 1 : inner;
    return ref;
  };
  FfnSpec spec;
  spec.layer = layer;
  spec.hidden_size = hidden;
  spec.intermediate_size = inner;
  spec.activation = config.activation;
  if (gated) spec.gate = part(matrix(names.gate, fused, hidden), false);
  spec.up = part(matrix(names.up, fused, hidden), true);
  spec.down = matrix(names.down, hidden, inner);
  if (!config.moe->expert_bias) return spec;
  if (gated) spec.gate_bias = part(vector(names.gate, fused), false);
  spec.up_bias = part(vector(names.up, fused), true);
  spec.down_bias = vector(names.down, hidden);
  return spec;
}

FfnSpec expert_spec(const ModelConfig& config, std::int64_t layer, const std::string& path,
                    const ExpertNames& names, std::int64_t e) {
  if (names.layout != ExpertLayout::kPerExpert) {
    return stacked_expert(config, layer, path, names, e);
  }
  const auto name = [&](std::string_view module) { return path + numbered(module, e); };
  return ffn_of_modules(
      config, layer, config.moe->intermediate_size,
      {name(names.gate), name(names.up), name(names.down), config.moe->expert_bias});
}

// Those of `config`, which has some; `path` is the layer's.
std::vector<FfnSpec> shared_specs(const ModelConfig& config, std::int64_t layer,
                                  const std::string& path) {
  const MoeFamily& family = *family_of(config).moe;
  std::vector<FfnSpec> specs;
  for (std::int64_t i = 0; i < config.moe->shared_experts; ++i) {
    const std::string stem = path + numbered(family.shared, i);
    const auto name = [&](std::string_view module) { return stem + std::string(module); };
    const SharedNames& names = family.shared_names;
    specs.push_back(
        ffn_of_modules(config, layer, config.moe->shared_intermediate_size,
                       {name(names.gate), name(names.up), name(names.down), config.bias}));
  }
  return specs;
}

}  // namespace

std::string numbered(std::string_view pattern, std::int64_t i) {
  const std::size_t hole = pattern.find("{}");
  if (hole == pattern.npos) return std::string(pattern);
  return fmt::format("{}{}{}", pattern.substr(0, hole), i, pattern.substr(hole + 2));
}

std::string_view name_of(ExpertLayout layout) {
  switch (layout) {
    case ExpertLayout::kPerExpert: return "per-expert";
    case ExpertLayout::kStacked: return "stacked";
    case ExpertLayout::kStackedTransposed: return "stacked-transposed";
    case ExpertLayout::kStackedAlternating: break;
  }
  return "stacked-alternating";
}

ExpertLayout layout_of(const ModelConfig& config) {
  return family_of(config).moe->names[config.moe->spelling].layout;
}

std::size_t spelling_of(const ModelConfig& config, ExpertLayout layout) {
  if (!config.moe) {
    throw Error(ExitCode::kUsage, fmt::format("experts stored {} (the layers of {} models are "
                                              "dense); leave the layout out",
                                              name_of(layout), config.model_type));
  }
  const std::vector<ExpertNames>& names = family_of(config).moe->names;
  auto found = std::ranges::find(names, layout, &ExpertNames::layout);
  if (found == names.end() && layout == ExpertLayout::kStacked) {
    found = std::ranges::find_if(
        names, [](const ExpertNames& one) { return one.layout != ExpertLayout::kPerExpert; });
  }
  if (found != names.end()) return static_cast<std::size_t>(found - names.begin());
  std::string theirs;
  for (const ExpertNames& one : names) {
    if (theirs.find(name_of(one.layout)) != theirs.npos) continue;
    theirs.append(theirs.empty() ? "" : " or ").append(name_of(one.layout));
  }
  throw Error(ExitCode::kUsage,
              fmt::format("experts of {} models stored {} (they are stored {}); choose another "
                          "layout, or leave it out",
                          config.model_type, name_of(layout), theirs));
}

std::optional<MoeConfig> read_moe_config(const ConfigDocument& document,
                                         std::span<const std::int64_t> stacks) {
  const ModelFamily& family = document.family();
  if (!family.moe || !document.flag(family.moe->enabled)) return std::nullopt;
  const TopKMethod method =
      read_choice(document, family.moe->method_key, kMethods, family.moe->method);
  MoeConfig moe;
  moe.route = read_route(document, method);
  moe.intermediate_size = read_expert_width(document);
  read_shared(document, moe);
  moe.balance = read_balance(document);
  if (!family.moe->capacity_key.empty()) {
    moe.expert_capacity =
        document.size(family.moe->capacity_key, kMaxSize, family.moe->default_capacity);
  }
  moe.router_bias = document.flag(family.moe->router_bias);
  moe.expert_bias = document.flag(family.moe->expert_bias);
  moe.correction_bias = method == TopKMethod::kNoAuxTc;
  moe.layers = read_moe_layers(document, stacks);
  return moe;
}

MoeSpec moe_under_prefix(const ModelConfig& config, std::int64_t layer, std::string_view prefix,
                         const ExpertNames& names) {
  const std::string path = layer_path(config, layer, prefix);
  if (!config.is_moe(layer)) {
    throw Error(ExitCode::kUsage, fmt::format("layer {} of {} is dense (its experts were asked "
                                              "for); choose another",
                                              layer, config.path));
  }
  const MoeFamily& family = *family_of(config).moe;
  const MoeConfig& moe = *config.moe;
  const std::string router = path + std::string(names.router);
  MoeSpec spec;
  spec.layer = layer;
  spec.hidden_size = config.hidden_size;
  spec.route = moe.route;
  spec.weight_on = family.weight_on;
  spec.balance = moe.balance;
  const std::int64_t experts = moe.route.experts;
  spec.router = {.name = router + ".weight", .stored_shape = {experts, config.hidden_size}};
  if (moe.router_bias) {
    spec.router_bias = TensorRef{.name = router + ".bias", .stored_shape = {experts}};
  }
  if (moe.correction_bias) {
    spec.correction_bias =
        TensorRef{.name = router + ".e_score_correction_bias", .stored_shape = {experts}};
  }
  for (std::int64_t e = 0; e < experts; ++e) {
    spec.experts.push_back(expert_spec(config, layer, path, names, e));
  }
  if (moe.shared_intermediate_size == 0) return spec;
  spec.shared = shared_specs(config, layer, path);
  if (!family.shared_gate.empty()) {
    spec.shared_gate = TensorRef{.name = path + std::string(family.shared_gate) + ".weight",
                                 .stored_shape = {1, config.hidden_size}};
  }
  return spec;
}

}  // namespace gatefold
