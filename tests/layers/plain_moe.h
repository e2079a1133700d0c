#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "layers/moe_reference.h"
#include "plain_layer.h"

/// A mixture of experts in naive loops: in double, or in fp32 with an honest runtime's roundings.
namespace gatefold::plain_moe {

using plain_layer::at;
using plain_layer::Layer;
using plain_layer::TypedSource;

struct Mixture {
  std::int64_t hidden = 0;
  RouteRule rule;
  std::vector<float> router;   // [E, H]
  std::vector<Layer> experts;  // [E]
  WeightOn weight_on = WeightOn::kOutput;
  std::vector<float> router_bias;  // [E]; empty: none
  std::vector<float> correction;   // [E]; empty: none
  std::vector<Layer> shared;
  std::vector<float> shared_gate;  // [1, H]; empty: none
};

inline void add_layer(const Layer& layer, const std::string& prefix, DType stored,
                      std::vector<FfnSpec>& specs, TypedSource& source) {
  FfnSpec spec = plain_layer::spec_of(layer);
  const auto add = [&](TensorRef& ref, std::vector<std::int64_t> shape,
                       const std::vector<float>& values) {
    ref.name = prefix + ref.name;
    source.add(ref.name, stored, std::move(shape), values);
  };
  if (spec.gate) add(*spec.gate, {layer.width, layer.hidden}, layer.gate);
  add(spec.up, {layer.width, layer.hidden}, layer.up);
  add(spec.down, {layer.hidden, layer.width}, layer.down);
  if (spec.gate_bias) add(*spec.gate_bias, {layer.width}, layer.gate_bias);
  if (spec.up_bias) add(*spec.up_bias, {layer.width}, layer.up_bias);
  if (spec.down_bias) add(*spec.down_bias, {layer.hidden}, layer.down_bias);
  specs.push_back(spec);
}

/// A mixture as reference_moe gets it. Routers are stored in fp32.
struct Stored {
  MoeSpec spec;
  TypedSource source;

  Stored(const Mixture& mixture, DType stored) {
    const std::int64_t experts = mixture.rule.experts;
    const auto add = [&](const char* name, std::vector<std::int64_t> shape,
                         const std::vector<float>& values) {
      source.add(name, DType::kF32, std::move(shape), values);
      return TensorRef{name};
    };
    spec.layer = 3;
    spec.hidden_size = mixture.hidden;
    spec.route = mixture.rule;
    spec.weight_on = mixture.weight_on;
    spec.router = add("router", {experts, mixture.hidden}, mixture.router);
    if (!mixture.router_bias.empty()) {
      spec.router_bias = add("router.bias", {experts}, mixture.router_bias);
    }
    if (!mixture.correction.empty()) {
      spec.correction_bias = add("correction", {experts}, mixture.correction);
    }
    for (const Layer& layer : mixture.experts) {
      add_layer(layer, "expert" + std::to_string(spec.experts.size()) + ".", stored, spec.experts,
                source);
    }
    for (const Layer& layer : mixture.shared) {
      add_layer(layer, "shared" + std::to_string(spec.shared.size()) + ".", stored, spec.shared,
                source);
    }
    if (!mixture.shared_gate.empty()) {
      spec.shared_gate = add("shared_gate", {1, mixture.hidden}, mixture.shared_gate);
    }
  }
};

inline MoeReferenceResult reference_of(const Mixture& mixture, DType dtype,
                                       const std::vector<float>& x,
                                       const std::vector<std::int32_t>& ids = {}) {
  const Stored stored(mixture, dtype);
  const auto tokens = static_cast<std::int64_t>(x.size()) / mixture.hidden;
  return reference_moe(stored.spec, stored.source, dtype, x, tokens, ids);
}

enum class Fault {
  kNone,
  kExpertOffByOne,
  kNextTokensInput,
  kScalingTwice,
  kCorrectionInWeights,
  kSharedTwice,
  kSharedUngated,
  kWeightElsewhere,
  kOneExpertLost,
  kNormalizedOtherwise,
};

/// In Real: double rounds nothing, float what a runtime rounds.
template <typename Real>
class Naive {
 public:
  Naive(const Mixture& mixture, DType dtype, Fault fault = Fault::kNone)
      : mixture_(mixture), dtype_(dtype), fault_(fault) {}

  struct Output {
    std::vector<std::int32_t> ids;  // [tokens, k]
    std::vector<Real> weights;      // [tokens, k]
    std::vector<Real> y;            // [tokens, H]
  };

  Output run(const std::vector<float>& x) const {
    Output output;
    const auto h = static_cast<std::size_t>(mixture_.hidden);
    for (std::size_t first = 0; first < x.size(); first += h) {
      const std::size_t input = fault_ == Fault::kNextTokensInput ? (first + h) % x.size() : first;
      token(std::vector<Real>(x.begin() + static_cast<std::ptrdiff_t>(first),
                              x.begin() + static_cast<std::ptrdiff_t>(first + h)),
            std::vector<Real>(x.begin() + static_cast<std::ptrdiff_t>(input),
                              x.begin() + static_cast<std::ptrdiff_t>(input + h)),
            output);
    }
    return output;
  }

 private:
  static Real sigmoid(Real z) { return 1 / (1 + std::exp(-z)); }

  Real rounded(Real value) const {
    if constexpr (std::is_same_v<Real, float>) {
      return round_to(dtype_, value);
    } else {
      return value;
    }
  }

  static Real dot(const float* w, const std::vector<Real>& v) {
    Real sum = 0;
    for (std::size_t i = 0; i < v.size(); ++i) sum += static_cast<Real>(w[i]) * v[i];
    return sum;
  }

  static Real bias_of(const std::vector<float>& bias, std::int64_t i) {
    return bias.empty() ? 0 : static_cast<Real>(bias[static_cast<std::size_t>(i)]);
  }

  static Real hidden_value(const Activation& activation, Real gate, Real up) {
    const Real z = activation.gated ? gate : up;
    const Real factor = activation.gated ? up : 1;
    switch (activation.kind) {
      case ActivationKind::kIdentity: return z * factor;
      case ActivationKind::kRelu: return std::max<Real>(z, 0) * factor;
      case ActivationKind::kRelu2: return std::max<Real>(z, 0) * std::max<Real>(z, 0) * factor;
      case ActivationKind::kClampedSwiglu: {
        const auto limit = static_cast<Real>(activation.limit);
        const Real g = std::min(gate, limit);
        return (std::clamp(up, -limit, limit) + 1) *
               (g * sigmoid(static_cast<Real>(activation.alpha) * g));
      }
      default: return z * sigmoid(z) * factor;
    }
  }

  std::vector<Real> ffn(const Layer& layer, const std::vector<Real>& x) const {
    std::vector<Real> h;
    for (std::int64_t i = 0; i < layer.width; ++i) {
      const std::size_t row = at(i, layer.hidden, 0);
      const Real up = dot(&layer.up[row], x) + bias_of(layer.up_bias, i);
      const Real gate =
          layer.activation.gated ? dot(&layer.gate[row], x) + bias_of(layer.gate_bias, i) : Real{0};
      h.push_back(rounded(hidden_value(layer.activation, gate, up)));
    }
    std::vector<Real> y;
    for (std::int64_t j = 0; j < layer.hidden; ++j) {
      y.push_back(dot(&layer.down[at(j, layer.width, 0)], h) + bias_of(layer.down_bias, j));
    }
    return y;
  }

  static std::vector<Real> softmax(std::vector<Real> values) {
    const Real top = *std::max_element(values.begin(), values.end());
    Real sum = 0;
    for (Real& value : values) sum += value = std::exp(value - top);
    for (Real& value : values) value /= sum;
    return values;
  }

  /// By taking the largest k times, groups first.
  std::vector<std::int32_t> choose(std::vector<Real> choice) const {
    const RouteRule& rule = mixture_.rule;
    const auto size = static_cast<std::ptrdiff_t>(rule.experts / rule.groups);
    std::vector<Real> worth;
    for (auto group = choice.begin(); group != choice.end(); group += size) {
      std::vector<Real> sorted(group, group + size);
      std::sort(sorted.rbegin(), sorted.rend());
      worth.push_back(sorted[0] + (rule.group_score == GroupScore::kTwoBest ? sorted[1] : 0));
    }
    std::vector<Real> kept(choice.size(), -HUGE_VAL);
    for (std::int64_t i = 0; i < rule.kept_groups; ++i) {
      const auto best = std::max_element(worth.begin(), worth.end()) - worth.begin();
      std::copy_n(choice.begin() + best * size, size, kept.begin() + best * size);
      worth[static_cast<std::size_t>(best)] = -HUGE_VAL;
    }
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < rule.top_k; ++i) {
      const auto best = std::max_element(kept.begin(), kept.end()) - kept.begin();
      ids.push_back(static_cast<std::int32_t>(best));
      kept[static_cast<std::size_t>(best)] = -HUGE_VAL;
    }
    return ids;
  }

  std::vector<Real> scores_of(const std::vector<Real>& logits) const {
    if (mixture_.rule.score == Score::kSoftmax) return softmax(logits);
    std::vector<Real> scores = logits;
    if (mixture_.rule.score == Score::kSigmoid) {
      for (Real& score : scores) score = sigmoid(score);
    }
    if (mixture_.rule.score == Score::kSqrtSoftplus) {
      for (Real& score : scores) {
        score = std::sqrt(std::max(score, Real{0}) + std::log1p(std::exp(-std::abs(score))));
      }
    }
    return scores;
  }

  /// A sparse mixer's, by leaving out what is too far or gone.
  std::vector<Real> mixed(const std::vector<Real>& logits,
                          const std::vector<std::int32_t>& ids) const {
    std::vector<Real> w;
    std::vector<Real> left = logits;
    for (const std::int32_t id : ids) {
      const auto chosen = static_cast<std::size_t>(id);
      const Real best = logits[chosen];
      std::vector<Real> near = left;
      for (std::size_t e = 0; e < near.size(); ++e) {
        const Real size = std::max(std::abs(logits[e]), best);
        if ((best - logits[e]) / size > static_cast<Real>(mixture_.rule.margin)) {
          near[e] = -HUGE_VAL;
        }
      }
      w.push_back(softmax(near)[chosen]);
      left[chosen] = -HUGE_VAL;
    }
    return w;
  }

  void weigh(std::vector<Real>& w) const {
    const RouteRule& rule = mixture_.rule;
    if (rule.score == Score::kSoftmaxOfChosen) w = softmax(w);
    if (rule.score == Score::kSigmoidOfChosen) {
      for (Real& weight : w) weight = sigmoid(weight);
    }
    if (rule.normalize != (fault_ == Fault::kNormalizedOtherwise)) {
      const Real sum = std::accumulate(w.begin(), w.end(), Real{0}) + Real{rule.epsilon};
      for (Real& weight : w) weight /= sum;
    }
    const int times = fault_ == Fault::kScalingTwice ? 2 : 1;
    for (int i = 0; i < times; ++i) {
      for (Real& weight : w) weight *= static_cast<Real>(rule.scaling);
    }
  }

  void token(const std::vector<Real>& x, const std::vector<Real>& input, Output& output) const {
    std::vector<Real> logits;
    for (std::int64_t e = 0; e < mixture_.rule.experts; ++e) {
      logits.push_back(dot(&mixture_.router[at(e, mixture_.hidden, 0)], x) +
                       bias_of(mixture_.router_bias, e));
    }
    const std::vector<Real> scores = scores_of(logits);
    std::vector<Real> choice = scores;
    for (std::size_t e = 0; e < choice.size(); ++e) {
      choice[e] += bias_of(mixture_.correction, static_cast<std::int64_t>(e));
    }
    const std::vector<std::int32_t> ids = choose(choice);
    std::vector<Real> w;
    for (const std::int32_t id : ids) {
      const auto e = static_cast<std::size_t>(id);
      w.push_back(fault_ == Fault::kCorrectionInWeights ? choice[e] : scores[e]);
    }
    if (mixture_.rule.score == Score::kSparseMixer) w = mixed(logits, ids);
    weigh(w);
    output.ids.insert(output.ids.end(), ids.begin(), ids.end());
    output.weights.insert(output.weights.end(), w.begin(), w.end());
    combine(x, input, ids, w, output.y);
  }

  void combine(const std::vector<Real>& x, const std::vector<Real>& input,
               const std::vector<std::int32_t>& ids, const std::vector<Real>& w,
               std::vector<Real>& y) const {
    std::vector<Real> sum(x.size());
    const bool on_input =
        (mixture_.weight_on == WeightOn::kInput) != (fault_ == Fault::kWeightElsewhere);
    for (std::size_t i = fault_ == Fault::kOneExpertLost ? 1 : 0; i < ids.size(); ++i) {
      const std::int64_t off = fault_ == Fault::kExpertOffByOne ? 1 : 0;
      std::vector<Real> v = input;
      for (Real& value : v) value = on_input ? rounded(w[i] * value) : value;
      v = ffn(mixture_.experts[static_cast<std::size_t>((ids[i] + off) % mixture_.rule.experts)],
              v);
      for (std::size_t j = 0; j < v.size(); ++j) sum[j] += on_input ? v[j] : w[i] * v[j];
    }
    const bool gated = !mixture_.shared_gate.empty() && fault_ != Fault::kSharedUngated;
    const Real gate = gated ? sigmoid(dot(mixture_.shared_gate.data(), x)) : Real{1};
    for (int i = 0; i < (fault_ == Fault::kSharedTwice ? 2 : 1); ++i) {
      for (const Layer& layer : mixture_.shared) {
        const std::vector<Real> s = ffn(layer, x);
        for (std::size_t j = 0; j < s.size(); ++j) sum[j] += gate * s[j];
      }
    }
    for (const Real value : sum) y.push_back(rounded(value));
  }

  const Mixture& mixture_;
  DType dtype_;
  Fault fault_;
};

}  // namespace gatefold::plain_moe
