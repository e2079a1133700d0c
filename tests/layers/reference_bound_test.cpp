#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "layers/reference.h"
#include "plain_layer.h"

namespace gatefold {
namespace {

using namespace plain_layer;

// ---- an honest runtime, in naive fp32 ----

enum class Order { kForward, kBackward, kLanes, kPairwise, kBlocks };
constexpr std::array kOrders = {Order::kForward, Order::kBackward, Order::kLanes, Order::kPairwise,
                                Order::kBlocks};

float forward_sum(const float* w, const float* v, std::int64_t n) {
  float sum = 0;
  for (std::int64_t k = 0; k < n; ++k) sum += w[k] * v[k];
  return sum;
}

float backward_sum(const float* w, const float* v, std::int64_t n) {
  float sum = 0;
  for (std::int64_t k = n - 1; k >= 0; --k) sum += w[k] * v[k];
  return sum;
}

float lanes_sum(const float* w, const float* v, std::int64_t n) {
  std::array<float, 16> lanes{};
  for (std::int64_t k = 0; k < n; ++k) lanes[static_cast<std::size_t>(k % 16)] += w[k] * v[k];
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

float pairwise_sum(const float* w, const float* v, std::int64_t n) {
  if (n <= 2) return forward_sum(w, v, n);
  return pairwise_sum(w, v, n / 2) + pairwise_sum(w + n / 2, v + n / 2, n - n / 2);
}

float blocks_sum(const float* w, const float* v, std::int64_t n) {
  std::array<float, 8> b{};
  for (std::int64_t i = 0; i < 8; ++i) {
    const Range block = even_part(n, 8, i);
    b[static_cast<std::size_t>(i)] = forward_sum(w + block.begin, v + block.begin, block.size());
  }
  return ((b[0] + b[1]) + (b[2] + b[3])) + ((b[4] + b[5]) + (b[6] + b[7]));
}

float dot(Order order, const float* w, const float* v, std::int64_t n) {
  switch (order) {
    case Order::kForward: return forward_sum(w, v, n);
    case Order::kBackward: return backward_sum(w, v, n);
    case Order::kLanes: return lanes_sum(w, v, n);
    case Order::kPairwise: return pairwise_sum(w, v, n);
    case Order::kBlocks: return blocks_sum(w, v, n);
  }
  return 0;
}

float fp32_activation(const Activation& activation, float z) {
  const auto gated = [z](float scale) { return z / (1 + std::exp(-scale * z)); };
  switch (activation.kind) {
    case ActivationKind::kIdentity: return z;
    case ActivationKind::kRelu: return std::max(z, 0.0F);
    case ActivationKind::kRelu2: return std::max(z, 0.0F) * std::max(z, 0.0F);
    case ActivationKind::kSilu: return gated(activation.beta);
    case ActivationKind::kGeluExact: return 0.5F * z * (1 + std::erf(z * 0.70710678F));
    case ActivationKind::kGeluTanh:
      return 0.5F * z * (1 + std::tanh(0.79788456F * (z + 0.044715F * z * z * z)));
    case ActivationKind::kQuickGelu: return gated(1.702F);
    case ActivationKind::kClampedSwiglu: return gated(activation.alpha);
  }
  return 0;
}

float fp32_hidden(const Activation& activation, float gate, float up) {
  if (!activation.gated) return fp32_activation(activation, up);
  if (activation.kind != ActivationKind::kClampedSwiglu) {
    return fp32_activation(activation, gate) * up;
  }
  const float limit = activation.limit;
  return (std::clamp(up, -limit, limit) + 1) * fp32_activation(activation, std::min(gate, limit));
}

enum class Fault { kNone, kBlockMissing, kDoubledSum, kGateUpSwapped, kBiasTwice, kNoUp };

float bias_at(const std::vector<float>& bias, std::int64_t i) {
  return bias.empty() ? 0 : bias[static_cast<std::size_t>(i)];
}

/// h [I] of one token, rounded to `dtype`.
std::vector<float> run_hidden(const Layer& layer, DType dtype, const float* x, Order order,
                              Fault fault) {
  std::vector<float> h(static_cast<std::size_t>(layer.width));
  for (std::int64_t i = 0; i < layer.width; ++i) {
    const std::size_t row = at(i, layer.hidden, 0);
    float gate = 0;
    if (layer.activation.gated) {
      gate = dot(order, &layer.gate[row], x, layer.hidden) + bias_at(layer.gate_bias, i);
    }
    float up = dot(order, &layer.up[row], x, layer.hidden) + bias_at(layer.up_bias, i);
    if (fault == Fault::kGateUpSwapped) std::swap(gate, up);
    if (fault == Fault::kNoUp) up = 1;
    float value = fp32_hidden(layer.activation, gate, up);
    if (fault == Fault::kBlockMissing && even_part(layer.width, 8, 5).contains(i)) value = 0;
    h[static_cast<std::size_t>(i)] = round_to(dtype, value);
  }
  return h;
}

/// y [tokens, H] as a runtime computes it: weights in `layer` must be `dtype` values already.
std::vector<float> run(const Layer& layer, DType dtype, const std::vector<float>& x, Order order,
                       Fault fault = Fault::kNone) {
  std::vector<float> y;
  for (std::size_t first = 0; first < x.size(); first += static_cast<std::size_t>(layer.hidden)) {
    const std::vector<float> h = run_hidden(layer, dtype, &x[first], order, fault);
    for (std::int64_t j = 0; j < layer.hidden; ++j) {
      float sum = dot(order, &layer.down[at(j, layer.width, 0)], h.data(), layer.width);
      if (fault == Fault::kDoubledSum) sum += sum;
      if (fault == Fault::kBiasTwice) sum += bias_at(layer.down_bias, j);
      y.push_back(round_to(dtype, sum + bias_at(layer.down_bias, j)));
    }
  }
  return y;
}

struct Verdict {
  double worst = 0;  // the largest error / bound
  std::int64_t outside = 0;
};

Verdict judge(const ReferenceResult& reference, const std::vector<float>& y) {
  Verdict verdict;
  for (std::size_t i = 0; i < y.size(); ++i) {
    if (reference.bound[i] == HUGE_VAL) continue;
    const double ratio = std::abs(double{y[i]} - reference.y[i]) / reference.bound[i];
    verdict.worst = std::max(verdict.worst, ratio);
    if (!(ratio <= 1)) ++verdict.outside;
  }
  return verdict;
}

// ---- the bound holds for honest runs ----

struct Size {
  std::int64_t hidden, width, tokens;
};

/// One row of the table that the honest test prints.
void report(const std::string& what, DType dtype, const Size& size, double worst) {
  fmt::print("  {:<28} {:<4} H {:>5} I {:>5}: error / bound {:.4f}\n", what, name_of(dtype),
             size.hidden, size.width, worst);
}

double worst_honest(const Layer& layer, DType dtype, const std::vector<float>& x) {
  const ReferenceResult reference = reference_of(layer, dtype, x);
  double worst = 0;
  for (const Order order : kOrders) {
    const Verdict verdict = judge(reference, run(layer, dtype, x, order));
    worst = std::max(worst, verdict.worst);
    EXPECT_EQ(verdict.outside, 0) << "order " << static_cast<int>(order);
  }
  return worst;
}

TEST(Reference, BoundsHonestRunsOfEverySizeTypeAndOrder) {
  Random random(4);
  for (const Size& size : {Size{1, 1, 8},
                           {3, 5, 8},
                           {17, 33, 4},
                           {64, 256, 4},
                           {256, 700, 3},
                           {512, 1408, 2},
                           {2048, 5632, 1}}) {
    for (const DType dtype : kDTypes) {
      const Layer layer = random_layer(random, size.hidden, size.width,
                                       gated(ActivationKind::kSilu), Bias::kNone, dtype);
      const double worst =
          worst_honest(layer, dtype, random.values(size.tokens * size.hidden, 1, dtype));
      report("silu", dtype, size, worst);
      EXPECT_LE(worst, size.hidden < 64 ? 0.95 : 0.5);
      EXPECT_GE(worst, 0.005);
    }
  }
}

TEST(Reference, BoundsHonestRunsOfEveryActivation) {
  Random random(5);
  const Size size{96, 320, 4};
  std::vector<Activation> activations = {gated(ActivationKind::kClampedSwiglu)};
  for (const Known& known : kKnown) {
    activations.push_back(known.activation);
    activations.push_back(known.activation);
    activations.back().gated = false;
  }
  for (const Activation& activation : activations) {
    for (const DType dtype : kDTypes) {
      for (const float scale : {1.0F, 6.0F, 0.02F}) {
        const Layer layer =
            random_layer(random, size.hidden, size.width, activation, Bias::kAll, dtype);
        const double worst = worst_honest(
            layer, dtype, random.values(size.tokens * size.hidden, double{scale}, dtype));
        EXPECT_LE(worst, 0.7) << static_cast<int>(activation.kind) << ' ' << name_of(dtype);
      }
    }
  }
}

TEST(Reference, HasEverySignatureOfAKnownMistakeOutsideItsBound) {
  const std::array mistakes = {299.999546, 1109.225931, 1412.883927,
                               85.084938,  570.792694,  1141.585388};
  for (const DType dtype : kDTypes) {
    const ReferenceResult result = reference_of(fixture_d(), dtype, first_unit(16));
    for (const double y : mistakes) EXPECT_GT(std::abs(y - result.y[0]), 2 * result.bound[0]);
    const Verdict honest = judge(result, run(fixture_d(), dtype, first_unit(16), Order::kForward));
    EXPECT_LE(honest.worst, 0.6) << name_of(dtype);
  }
}

TEST(Reference, BoundsHonestRunsOfTokensWithOutliers) {
  // A few features a thousand times the rest, two of which cancel: as real hidden states have them.
  Random random(11);
  const Size size{1024, 704, 1};
  for (const DType dtype : kDTypes) {
    Layer layer = random_layer(random, size.hidden, size.width, gated(ActivationKind::kSilu),
                               Bias::kNone, dtype);
    std::vector<float> x = random.values(size.hidden, 0.05, dtype);
    x[40] = 50;
    x[41] = -50;
    x[900] = 50;
    for (std::int64_t i = 0; i < size.width; ++i) {
      layer.gate[at(i, size.hidden, 900)] = -layer.gate[at(i, size.hidden, 40)];
    }
    const double worst = worst_honest(layer, dtype, x);
    report("outliers", dtype, size, worst);
    EXPECT_LE(worst, 0.5);
  }
}

// ---- patterns in the data: roundings that aren't independent ----

using Pattern = float (*)(std::int64_t row, std::int64_t column, std::int64_t width);

float constant(std::int64_t, std::int64_t, std::int64_t) { return 0.0713F; }
float ramp(std::int64_t, std::int64_t k, std::int64_t n) {
  return (2 * static_cast<float>(k) + 1) / static_cast<float>(n) - 1;
}
float halves(std::int64_t, std::int64_t k, std::int64_t n) {
  return 2 * k < n ? 0.0713F : -0.0713F;
}
float row_ramp(std::int64_t r, std::int64_t, std::int64_t) {
  return 0.0713F * static_cast<float>(r % 97 - 48) / 48;
}
float alternating(std::int64_t r, std::int64_t k, std::int64_t) {
  return (r + k) % 2 == 0 ? 0.0713F : -0.0713F;
}

std::vector<float> patterned(Pattern pattern, std::int64_t rows, std::int64_t columns,
                             DType dtype) {
  std::vector<float> out;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t k = 0; k < columns; ++k) {
      out.push_back(round_to(dtype, pattern(r, k, columns)));
    }
  }
  return out;
}

TEST(Reference, BoundsHonestRunsOfPatternedWeights) {
  const std::map<std::string, Pattern> patterns = {{"constant", constant},
                                                   {"ramp", ramp},
                                                   {"halves", halves},
                                                   {"row ramp", row_ramp},
                                                   {"alternating", alternating}};
  const Size size{1024, 256, 1};
  Random random(6);
  for (const auto& [name, pattern] : patterns) {
    for (const auto& [down_name, down_pattern] : patterns) {
      for (const DType dtype : kDTypes) {
        Layer layer{size.hidden, size.width, gated(ActivationKind::kSilu), {}, {}, {}, {}, {}, {}};
        layer.gate = patterned(pattern, size.width, size.hidden, dtype);
        layer.up = layer.gate;
        layer.down = patterned(down_pattern, size.hidden, size.width, dtype);
        SCOPED_TRACE(name + " then " + down_name + ' ' + std::string(name_of(dtype)));
        const std::vector<float> flat(static_cast<std::size_t>(size.hidden),
                                      round_to(dtype, 0.0664F));
        const double worst =
            std::max(worst_honest(layer, dtype, flat),
                     worst_honest(layer, dtype, random.values(size.hidden, 1, dtype)));
        EXPECT_LE(worst, 0.9);
      }
    }
  }
}

TEST(Reference, BoundsLongConstantSumsInF32) {
  // All roundings go the same way: the case that an independence model alone would fail.
  const Size size{16384, 16, 1};
  const std::vector<float> x(static_cast<std::size_t>(size.hidden), 0.1F);
  for (const float weight : {0.0713F, 0.1F, 0.3F, 0.7F}) {
    const std::vector<float> matrix(static_cast<std::size_t>(size.hidden * size.width), weight);
    for (const Activation& activation :
         {gated(ActivationKind::kIdentity), plain(ActivationKind::kRelu2)}) {
      const Layer layer{size.hidden, size.width, activation, matrix, matrix, matrix, {}, {}, {}};
      const double worst = worst_honest(layer, DType::kF32, x);
      report("constant", DType::kF32, size, worst);
      EXPECT_LE(worst, 0.7);
    }
  }
}

TEST(Reference, BoundsHonestRunsWithHiddenValuesBelowTheNormalsOfF16) {
  Random random(13);
  const Size size{64, 192, 4};
  const Layer layer = random_layer(random, size.hidden, size.width, gated(ActivationKind::kSilu),
                                   Bias::kNone, DType::kF16);
  const double worst = worst_honest(layer, DType::kF16,
                                    random.values(size.tokens * size.hidden, 0x1p-11, DType::kF16));
  report("subnormal h", DType::kF16, size, worst);
  EXPECT_LE(worst, 0.95);
}

TEST(Reference, AllowsOneUnitRoundoffOfTheTypeAndNotMuchMore) {
  // h = 1 + u_d lies halfway between two neighbours; y = h is off by all of u_d.
  for (const DType dtype : kDTypes) {
    if (dtype == DType::kF32) continue;
    const float unit = dtype == DType::kBf16 ? 0x1p-8F : 0x1p-11F;
    const Layer layer{2, 1, plain(ActivationKind::kIdentity), {}, {1, unit}, {1, 0}, {}, {}, {}};
    const ReferenceResult result = reference_of(layer, dtype, {1, 1});
    const std::vector<float> y = run(layer, dtype, {1, 1}, Order::kForward);
    EXPECT_EQ(result.y[0] - double{y[0]}, double{unit});
    EXPECT_GT(result.bound[0], double{unit});
    EXPECT_LT(result.bound[0], 2.05 * double{unit});
  }
}

// ---- faults lie outside ----

std::string name_of(Fault fault) {
  switch (fault) {
    case Fault::kNone: return "none";
    case Fault::kBlockMissing: return "one block of 8 missing";
    case Fault::kDoubledSum: return "sum doubled";
    case Fault::kGateUpSwapped: return "gate and up swapped";
    case Fault::kBiasTwice: return "down bias twice";
    case Fault::kNoUp: return "h not multiplied by up";
  }
  return "?";
}

TEST(Reference, LeavesStructuralFaultsOutsideTheBound) {
  Random random(7);
  for (const Size& size : {Size{64, 256, 4}, {256, 704, 2}, {2048, 5632, 1}}) {
    for (const DType dtype : kDTypes) {
      const Layer layer = random_layer(random, size.hidden, size.width,
                                       gated(ActivationKind::kSilu), Bias::kAll, dtype);
      const std::vector<float> x = random.values(size.tokens * size.hidden, 1, dtype);
      const ReferenceResult reference = reference_of(layer, dtype, x);
      for (const Fault fault : {Fault::kBlockMissing, Fault::kDoubledSum, Fault::kGateUpSwapped,
                                Fault::kBiasTwice, Fault::kNoUp}) {
        const Verdict verdict = judge(reference, run(layer, dtype, x, Order::kLanes, fault));
        report(name_of(fault), dtype, size, verdict.worst);
        const double share =
            static_cast<double>(verdict.outside) / static_cast<double>(reference.y.size());
        EXPECT_GT(share, 0.5) << name_of(fault) << ' ' << name_of(dtype);
        EXPECT_GT(verdict.worst, 5);
      }
    }
  }
}

TEST(Reference, LeavesTheRowsOfAnotherRankOutsideTheBound) {
  Random random(8);
  for (const DType dtype : kDTypes) {
    const Layer layer =
        random_layer(random, 128, 344, gated(ActivationKind::kSilu), Bias::kNone, dtype);
    const std::vector<float> x = random.values(128, 1, dtype);
    Layer shifted = layer;
    std::rotate(shifted.down.begin(), shifted.down.begin() + 344, shifted.down.end());
    const Verdict verdict =
        judge(reference_of(layer, dtype, x), run(shifted, dtype, x, Order::kLanes));
    EXPECT_GT(verdict.outside, 100);
  }
}

TEST(Reference, LeavesTheWrongGeluOutsideTheBoundInF32) {
  Random random(9);
  for (const Size& size : {Size{64, 256, 4}, {512, 1408, 1}, {2048, 5632, 1}}) {
    Layer layer = random_layer(random, size.hidden, size.width, gated(ActivationKind::kGeluExact),
                               Bias::kNone, DType::kF32);
    const std::vector<float> x = random.values(size.tokens * size.hidden, 1, DType::kF32);
    const ReferenceResult reference = reference_of(layer, DType::kF32, x);
    layer.activation.kind = ActivationKind::kGeluTanh;
    const Verdict verdict = judge(reference, run(layer, DType::kF32, x, Order::kLanes));
    report("tanh instead of exact gelu", DType::kF32, size, verdict.worst);
    EXPECT_GT(verdict.outside, 0);
  }
}

TEST(Reference, SeesOneFlippedSignOfADownWeightInF32) {
  Random random(10);
  for (const Size& size : {Size{64, 256, 1}, {512, 1408, 1}}) {
    for (const DType dtype : kDTypes) {
      Layer layer = random_layer(random, size.hidden, size.width, gated(ActivationKind::kSilu),
                                 Bias::kNone, dtype);
      const std::vector<float> x = random.values(size.hidden, 1, dtype);
      const ReferenceResult reference = reference_of(layer, dtype, x);
      const std::vector<float> h = run_hidden(layer, dtype, x.data(), Order::kLanes, Fault::kNone);
      const auto largest = std::max_element(
          h.begin(), h.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
      float& weight = layer.down[at(7, size.width, largest - h.begin())];
      weight = -weight;
      const Verdict verdict = judge(reference, run(layer, dtype, x, Order::kLanes));
      report("one sign flipped", dtype, size, verdict.worst);
      EXPECT_EQ(verdict.outside, dtype == DType::kF32 ? 1 : verdict.outside);
    }
  }
}

}  // namespace
}  // namespace gatefold
