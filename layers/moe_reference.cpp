#include "layers/moe_reference.h"

#include <fmt/format.h>

#include <optional>
#include <utility>

#include "layers/reference_layers.h"
#include "layers/reference_math.h"
#include "layers/reference_routing.h"
#include "runtime/error.h"
#include "runtime/range.h"

namespace gatefold {
namespace {

using namespace reference;

[[noreturn]] void refuse(const MoeSpec& spec, const std::string& problem) {
  throw Error(ExitCode::kData,
              fmt::format("mixture of experts {} {} (the reference can't route); describe the "
                          "layer and its routing as layers/moe_spec.h says",
                          spec.layer, problem));
}

void check_spec(const MoeSpec& spec) {
  const RouteRule& rule = spec.route;
  if (rule.experts < 1 || static_cast<std::int64_t>(spec.experts.size()) != rule.experts) {
    refuse(spec, fmt::format("has {} experts and routes to {}", spec.experts.size(), rule.experts));
  }
  if (rule.top_k < 1 || rule.top_k > rule.experts) {
    refuse(spec, fmt::format("chooses {} of {} experts", rule.top_k, rule.experts));
  }
  if (rule.groups < 1 || rule.experts % rule.groups != 0 || rule.kept_groups < 1 ||
      rule.kept_groups > rule.groups ||
      rule.kept_groups * (rule.experts / rule.groups) < rule.top_k) {
    refuse(spec, fmt::format("chooses {} of {} experts from {} of {} groups", rule.top_k,
                             rule.experts, rule.kept_groups, rule.groups));
  }
  for (const std::vector<FfnSpec>* layers : {&spec.experts, &spec.shared}) {
    for (const FfnSpec& layer : *layers) {
      reference::check_spec(layer);
      if (layer.hidden_size == spec.hidden_size) continue;
      refuse(spec, fmt::format("has width {} and an expert of width {}", spec.hidden_size,
                               layer.hidden_size));
    }
  }
}

void check_arguments(const MoeSpec& spec, std::span<const float> x, std::int64_t tokens,
                     std::span<const std::int32_t> ids) {
  check_spec(spec);
  const auto size = static_cast<std::int64_t>(x.size());
  if (tokens < 0 || size != tokens * spec.hidden_size) {
    refuse(spec,
           fmt::format("got {} values for {} tokens of width {}", size, tokens, spec.hidden_size));
  }
  const auto count = static_cast<std::int64_t>(ids.size());
  if (count > 0 && count != tokens * spec.route.top_k) {
    refuse(spec,
           fmt::format("got {} expert ids for {} tokens of {}", count, tokens, spec.route.top_k));
  }
}

/// One reference pass over one layer.
class Pass {
 public:
  Pass(const MoeSpec& spec, const TensorSource& source, DType dtype, std::span<const float> x,
       std::int64_t tokens, const ReferenceOptions& options)
      : spec_(spec),
        source_(source),
        dtype_(dtype),
        tokens_(tokens),
        options_(options),
        x_(input_of(x, tokens, spec.hidden_size)),
        sums_(x.size()) {}

  void route(std::span<const std::int32_t> found, std::span<const std::uint8_t> kept,
             MoeReferenceResult& result);
  void add_experts();
  void add_shared();
  void finish(MoeReferenceResult& result) const;

 private:
  /// Where one row of an expert's batch comes from and goes.
  struct Row {
    std::int64_t token = 0;
    Number weight;
  };

  std::vector<std::int32_t> settle(std::int64_t token, const ScoredToken& scored,
                                   std::span<const std::int32_t> found,
                                   MoeReferenceResult& result) const;
  Operand expert_input(std::span<const Row> rows) const;
  std::vector<Number> fp32_output(const TensorRef& weight, const std::optional<TensorRef>& bias,
                                  std::int64_t out) const;

  /// Adds y of each row, times its weight where `weighed`, to its token's sum.
  void add_layer(const FfnSpec& layer, const Operand& input, std::span<const Row> rows,
                 bool weighed);

  const MoeSpec& spec_;
  const TensorSource& source_;
  DType dtype_;
  std::int64_t tokens_;
  const ReferenceOptions& options_;
  Operand x_;                              // [tokens, H]
  std::vector<DotSums> sums_;              // [tokens, H]
  std::vector<std::vector<Row>> batches_;  // [E] rows of each expert, by token
};

std::vector<Number> Pass::fp32_output(const TensorRef& weight, const std::optional<TensorRef>& bias,
                                      std::int64_t out) const {
  return linear_output(source_, weight, bias, DType::kF32, out, x_, tokens_, options_);
}

/// The ids that a token's y is computed with: the runtime's, if they may be right.
std::vector<std::int32_t> Pass::settle(std::int64_t token, const ScoredToken& scored,
                                       std::span<const std::int32_t> found,
                                       MoeReferenceResult& result) const {
  const std::vector<std::int32_t> own = choose_experts(spec_.route, scored.choice);
  if (found.empty()) return own;
  const std::vector<std::int32_t> theirs(found.begin(), found.end());
  if (same_choice(spec_.route, own, theirs)) return theirs;
  if (well_formed(spec_.route, theirs) && may_choose(spec_.route, scored.choice, theirs)) {
    ++result.near_ties;
    return theirs;
  }
  result.wrong_routes.push_back({token, own, theirs});
  return own;
}

void Pass::route(std::span<const std::int32_t> found, std::span<const std::uint8_t> kept,
                 MoeReferenceResult& result) {
  const std::int64_t experts = spec_.route.experts;
  const auto k = static_cast<std::size_t>(spec_.route.top_k);
  std::vector<double> correction;  // [E]
  if (spec_.correction_bias) {
    correction = read_bias(source_, spec_.correction_bias, DType::kF32, experts);
  }
  const std::vector<Number> logits = fp32_output(spec_.router, spec_.router_bias, experts);
  batches_.resize(static_cast<std::size_t>(experts));
  for (std::int64_t t = 0; t < tokens_; ++t) {
    const auto first = logits.begin() + t * experts;
    const ScoredToken scored = score_token(spec_.route, {first, first + experts}, correction);
    const auto theirs = found.empty() ? found : found.subspan(static_cast<std::size_t>(t) * k, k);
    const std::vector<std::int32_t> ids = settle(t, scored, theirs, result);
    const std::vector<Number> weights = routing_weights(spec_.route, scored, ids);
    for (std::size_t i = 0; i < k; ++i) {
      if (kept.empty() || kept[static_cast<std::size_t>(t) * k + i] != 0) {
        batches_[static_cast<std::size_t>(ids[i])].push_back({t, weights[i]});
      }
      result.ids.push_back(ids[i]);
      result.weights.push_back(weights[i].value);
      result.weight_bounds.push_back(weights[i].likely());
    }
  }
}

/// The tokens' rows; where weights are on the input, times them and rounded.
Operand Pass::expert_input(std::span<const Row> rows) const {
  const bool weighed = spec_.weight_on == WeightOn::kInput;
  Operand input(static_cast<std::int64_t>(rows.size()), spec_.hidden_size, !weighed);
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(rows.size()); ++i) {
    const Row& row = rows[static_cast<std::size_t>(i)];
    for (std::int64_t c = 0; c < spec_.hidden_size; ++c) {
      const Number value{*x_.value(row.token, c), 0, 0};
      input.set(i, c, weighed ? rounded(dtype_, product(row.weight, value)) : value);
    }
  }
  return input;
}

void Pass::add_layer(const FfnSpec& layer, const Operand& input, std::span<const Row> rows,
                     bool weighed) {
  const auto add = [&](Range columns, const std::vector<Number>& y) {
    auto value = y.begin();
    for (const Row& row : rows) {
      const std::int64_t first = row.token * spec_.hidden_size + columns.begin;
      for (std::int64_t j = 0; j < columns.size(); ++j, ++value) {
        DotSums& sums = sums_[static_cast<std::size_t>(first + j)];
        if (weighed) {
          sums.add_weighed(row.weight, *value);
        } else {
          sums.add_number(*value);
        }
      }
    }
  };
  for_each_output(layer, source_, dtype_, input, static_cast<std::int64_t>(rows.size()), options_,
                  add);
}

void Pass::add_experts() {
  for (std::size_t e = 0; e < batches_.size(); ++e) {
    if (batches_[e].empty()) continue;
    add_layer(spec_.experts[e], expert_input(batches_[e]), batches_[e],
              spec_.weight_on == WeightOn::kOutput);
  }
}

void Pass::add_shared() {
  std::vector<Row> rows;
  for (std::int64_t t = 0; t < tokens_; ++t) rows.push_back({t, {1, 0, 0}});
  if (spec_.shared_gate) {
    const std::vector<Number> gates = fp32_output(*spec_.shared_gate, std::nullopt, 1);
    for (std::size_t t = 0; t < rows.size(); ++t) rows[t].weight = sigmoid_of(gates[t]);
  }
  for (const FfnSpec& shared : spec_.shared) {
    add_layer(shared, x_, rows, spec_.shared_gate.has_value());
  }
}

void Pass::finish(MoeReferenceResult& result) const {
  const auto terms = spec_.route.top_k + static_cast<std::int64_t>(spec_.shared.size());
  for (const DotSums& sums : sums_) {
    const Number sum = dot_result(sums, terms);
    result.y.push_back(sum.value);
    result.bound.push_back(output_bound(dtype_, sum));
  }
}

}  // namespace

MoeReferenceResult reference_moe(const MoeSpec& spec, const TensorSource& source, DType dtype,
                                 std::span<const float> x, std::int64_t tokens,
                                 std::span<const std::int32_t> ids, const ReferenceOptions& options,
                                 std::span<const std::uint8_t> kept) {
  check_arguments(spec, x, tokens, ids);
  if (!kept.empty() && std::ssize(kept) != tokens * spec.route.top_k) {
    refuse(spec, fmt::format("got {} marks of what is kept for {} tokens of {}", kept.size(),
                             tokens, spec.route.top_k));
  }
  MoeReferenceResult result;
  Pass pass(spec, source, dtype, x, tokens, options);
  pass.route(ids, kept, result);
  pass.add_experts();
  pass.add_shared();
  pass.finish(result);
  return result;
}

MoeReferenceResult reference_routes(const MoeSpec& spec, const TensorSource& source, DType dtype,
                                    std::span<const float> x, std::int64_t tokens,
                                    std::span<const std::int32_t> ids,
                                    const ReferenceOptions& options) {
  check_arguments(spec, x, tokens, ids);
  MoeReferenceResult result;
  Pass(spec, source, dtype, x, tokens, options).route(ids, {}, result);
  return result;
}

}  // namespace gatefold
