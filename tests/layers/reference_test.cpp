#include "layers/reference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "plain_layer.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

using namespace plain_layer;

// ---- known numbers ----

TEST(Reference, GivesTheKnownAnswerOfASmallSwiglu) {
  for (const DType dtype : kDTypes) {
    const ReferenceResult result = reference_of(fixture_d(), dtype, first_unit(16));
    EXPECT_NEAR(result.y[0], 285.396347, 1e-6);
    for (std::size_t j = 1; j < 16; ++j) {
      EXPECT_EQ(result.y[j], 0);
      EXPECT_GT(result.bound[j], 0);
      EXPECT_LT(result.bound[j], 1e-7);
    }
  }
}

TEST(Reference, AddsTheDownBiasOnce) {
  Layer layer = fixture_d();
  for (auto* weights : {&layer.gate, &layer.up, &layer.down}) {
    std::fill(weights->begin(), weights->end(), 0.0F);
  }
  layer.down_bias.resize(16);
  layer.down_bias[0] = 100;
  layer.down_bias[1] = 200;
  for (const DType dtype : kDTypes) {
    const ReferenceResult result = reference_of(layer, dtype, first_unit(16));
    EXPECT_EQ(result.y[0], 100);
    EXPECT_EQ(result.y[1], 200);
    EXPECT_EQ(result.y[2], 0);
    EXPECT_LT(result.bound[1], 1);
  }
}

TEST(Reference, AddsGateAndUpBiasesToTheirOwnChannels) {
  Layer layer = fixture_d();
  layer.gate_bias = {0, 0, 0, 1};
  layer.up_bias = {0, 0, 0, -40};
  const ReferenceResult result = reference_of(layer, DType::kF32, first_unit(16));
  EXPECT_NEAR(result.y[0], 128.274132, 1e-5);  // 285.396347 - 40 silu(4)
}

TEST(Reference, TellsTheTwoGelusApartInF32) {
  Layer layer{1, 1, gated(ActivationKind::kGeluExact), {-2}, {1}, {10000}, {}, {}, {}};
  const ReferenceResult exact = reference_of(layer, DType::kF32, {1});
  EXPECT_NEAR(exact.y[0], -455.0026, 1e-4);
  layer.activation.kind = ActivationKind::kGeluTanh;
  const ReferenceResult tanh = reference_of(layer, DType::kF32, {1});
  EXPECT_NEAR(tanh.y[0], -454.0231, 1e-4);
  EXPECT_LT(exact.bound[0] + tanh.bound[0], 0.1);
}

/// With x = [1, 2]: gate is [-1.5, 2], up is [0.5, -3].
Layer hand_layer(Activation activation) {
  return {
      2,         2,       activation, {0.5F, -1, 1, 0.25F}, {0.5F, 0, -1, -0.5F}, {1, 2, -1, 0.5F},
      {0, 0.5F}, {0, -1}, {0.25F, -4}};
}

TEST(Reference, ComputesEveryGatedActivationAsByHand) {
  for (const Known& known : kKnown) {
    const ReferenceResult result = reference_of(hand_layer(known.activation), DType::kF32, {1, 2});
    const double h0 = known.first * 0.5;
    const double h1 = known.second * -3;
    EXPECT_NEAR(result.y[0], h0 + 2 * h1 + 0.25, 1e-14);
    EXPECT_NEAR(result.y[1], -h0 + 0.5 * h1 - 4, 1e-14);
  }
}

/// The same without a gate: up takes the gate's place.
Layer plain_hand_layer(Activation activation) {
  activation.gated = false;
  Layer layer = hand_layer(activation);
  layer.up = std::exchange(layer.gate, {});
  layer.up_bias = std::exchange(layer.gate_bias, {});
  return layer;
}

TEST(Reference, ComputesEveryPlainActivationAsByHand) {
  for (const Known& known : kKnown) {
    const ReferenceResult result =
        reference_of(plain_hand_layer(known.activation), DType::kF32, {1, 2});
    EXPECT_NEAR(result.y[0], known.first + 2 * known.second + 0.25, 1e-14);
    EXPECT_NEAR(result.y[1], -known.first + 0.5 * known.second - 4, 1e-14);
  }
}

TEST(Reference, ClampsGateFromAboveAndUpFromBothSides) {
  struct Case {
    float gate, up;
    double h;
  };
  for (const Case& c : {Case{-1.5F, 0.5F, -0.16250669736879866},
                        {2, -3, -3.871317251751993},
                        {9, -8, -41.99971876986309},
                        {-9, 8, -1.6025420728880808e-05}}) {
    const Layer layer{1,  1, gated(ActivationKind::kClampedSwiglu), {c.gate}, {c.up}, {1}, {},
                      {}, {}};
    EXPECT_NEAR(reference_of(layer, DType::kF32, {1}).y[0], c.h, 1e-13);
  }
}

TEST(Reference, ReadsALearnableBetaFromTheSource) {
  const Layer layer = hand_layer(gated(ActivationKind::kSilu));
  FfnSpec spec = spec_of(layer);
  spec.swish_beta = "beta";
  for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{}, {1}}) {
    TypedSource source = source_of(layer, DType::kF32);
    source.add("beta", DType::kBf16, shape, {0.5F});
    const std::vector<float> x = {1, 2};
    const ReferenceResult result = reference_ffn(spec, source, DType::kF32, x, 1);
    EXPECT_NEAR(result.y[0], -0.48123195123691054 * 0.5 - 6 * 1.4621171572600098 + 0.25, 1e-14);
  }
}

// ---- where the weights lie ----

std::vector<float> transposed(const std::vector<float>& matrix, std::int64_t rows,
                              std::int64_t columns) {
  std::vector<float> out(matrix.size());
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) out[at(c, rows, r)] = matrix[at(r, columns, c)];
  }
  return out;
}

std::vector<float> joined(std::vector<float> first, const std::vector<float>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

void expect_same(const ReferenceResult& a, const ReferenceResult& b) {
  EXPECT_EQ(a.y, b.y);
  EXPECT_EQ(a.bound, b.bound);
}

void expect_refused(const FfnSpec& spec, const TensorSource& source, const std::vector<float>& x,
                    const std::string& message) {
  try {
    reference_ffn(spec, source, DType::kF32, x, 1);
    FAIL() << "expected: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
    EXPECT_THAT(error.what(), testing::HasSubstr(message));
  }
}

TEST(Reference, ReadsFusedAndTransposedTensors) {
  Random random(1);
  const std::int64_t h = 150;
  const std::int64_t i = 37;
  const Layer layer =
      random_layer(random, h, i, gated(ActivationKind::kSilu), Bias::kAll, DType::kBf16);
  const std::vector<float> x = random.values(2 * h, 1, DType::kBf16);
  const ReferenceResult separate = reference_of(layer, DType::kBf16, x);

  FfnSpec spec = spec_of(layer);
  spec.gate = TensorRef{"gate_up", false, {2 * i, h}};
  spec.up = TensorRef{"gate_up", false, {2 * i, h}, i};
  spec.gate_bias = TensorRef{"gate_up.bias", false, {2 * i}};
  spec.up_bias = TensorRef{"gate_up.bias", false, {2 * i}, i};
  TypedSource source = source_of(layer, DType::kBf16);
  source.add("gate_up", DType::kBf16, {2 * i, h}, joined(layer.gate, layer.up));
  source.add("gate_up.bias", DType::kBf16, {2 * i}, joined(layer.gate_bias, layer.up_bias));
  expect_same(reference_ffn(spec, source, DType::kBf16, x, 2), separate);

  spec.gate = TensorRef{"gate_up", true, {h, 2 * i}};
  spec.up = TensorRef{"gate_up", true, {h, 2 * i}, i};
  spec.down = TensorRef{"down", true, {i, h}};
  source.add("gate_up", DType::kBf16, {h, 2 * i},
             transposed(joined(layer.gate, layer.up), 2 * i, h));
  source.add("down", DType::kBf16, {i, h}, transposed(layer.down, h, i));
  expect_same(reference_ffn(spec, source, DType::kBf16, x, 2), separate);
  expect_same(reference_ffn(spec, source, DType::kBf16, x, 2, {.chunk_bytes = 7 * 2 * h}),
              separate);
}

TEST(Reference, ReadsAnExpertOfAStackWhoseGateAndUpAlternate) {
  Random random(1);
  const std::int64_t h = 150;
  const std::int64_t i = 37;
  const Layer layer =
      random_layer(random, h, i, gated(ActivationKind::kSilu), Bias::kAll, DType::kBf16);
  const std::vector<float> x = random.values(2 * h, 1, DType::kBf16);
  const auto stack = [](std::int64_t before, const std::vector<float>& expert) {
    std::vector<float> all(static_cast<std::size_t>(before) * expert.size(), -3.0F);
    all.insert(all.end(), expert.begin(), expert.end());
    return all;
  };
  const auto alternating = [](const std::vector<float>& a, const std::vector<float>& b,
                              std::int64_t width) {
    std::vector<float> rows;
    for (std::size_t at = 0; at < a.size(); at += static_cast<std::size_t>(width)) {
      const auto from = static_cast<std::ptrdiff_t>(at);
      rows.insert(rows.end(), a.begin() + from, a.begin() + from + width);
      rows.insert(rows.end(), b.begin() + from, b.begin() + from + width);
    }
    return rows;
  };
  TypedSource source;
  source.add("gate_up", DType::kBf16, {3, h, 2 * i},
             stack(2, transposed(alternating(layer.gate, layer.up, h), 2 * i, h)));
  source.add("down", DType::kBf16, {2, h, i}, stack(1, layer.down));
  source.add("gate_up_bias", DType::kBf16, {3, 2 * i},
             stack(2, alternating(layer.gate_bias, layer.up_bias, 1)));
  source.add("down_bias", DType::kBf16, {2, h}, stack(1, layer.down_bias));
  FfnSpec spec = spec_of(layer);
  spec.gate = TensorRef{"gate_up", true, {3, h, 2 * i}, 0, 2, 2 * h};
  spec.up = TensorRef{"gate_up", true, {3, h, 2 * i}, 1, 2, 2 * h};
  spec.down = TensorRef{"down", false, {2, h, i}, h};
  spec.gate_bias = TensorRef{"gate_up_bias", false, {3, 2 * i}, 0, 2, 2};
  spec.up_bias = TensorRef{"gate_up_bias", false, {3, 2 * i}, 1, 2, 2};
  spec.down_bias = TensorRef{"down_bias", false, {2, h}, 0, 1, 1};
  const ReferenceResult separate = reference_of(layer, DType::kBf16, x);
  expect_same(reference_ffn(spec, source, DType::kBf16, x, 2), separate);
  spec.down.row_offset += 1;
  expect_refused(spec, source, first_unit(h), "tensor down has shape [2, 150, 37]");
}

TEST(Reference, GivesTheSameBitsForEveryChunkSize) {
  Random random(2);
  const Layer layer =
      random_layer(random, 300, 131, gated(ActivationKind::kGeluTanh), Bias::kAll, DType::kF16);
  const std::vector<float> x = random.values(3 * 300, 1, DType::kF16);
  const TypedSource source = source_of(layer, DType::kF16);
  const ReferenceResult whole = reference_ffn(spec_of(layer), source, DType::kF16, x, 3);
  for (const std::int64_t bytes : {1, 600, 601, 5000, 78600}) {
    expect_same(reference_ffn(spec_of(layer), source, DType::kF16, x, 3, {.chunk_bytes = bytes}),
                whole);
  }
}

TEST(Reference, ReadsNoMoreThanAChunkAtATime) {
  Random random(12);
  const Layer layer =
      random_layer(random, 100, 60, gated(ActivationKind::kSilu), Bias::kAll, DType::kF16);
  const TypedSource source = source_of(layer, DType::kF16);
  const std::vector<float> x = random.values(100, 1, DType::kF16);
  reference_ffn(spec_of(layer), source, DType::kF16, x, 1, {.chunk_bytes = 1300});
  EXPECT_EQ(source.largest_read(), 1200);  // 6 rows of 100, 10 rows of 60
  reference_ffn(spec_of(layer), source, DType::kF16, x, 1);
  EXPECT_EQ(source.largest_read(), 12000);
}

TEST(Reference, GivesTheSameBitsForATokenAloneOrAmongOthers) {
  Random random(3);
  const Layer layer =
      random_layer(random, 200, 90, gated(ActivationKind::kSilu), Bias::kNone, DType::kBf16);
  const std::vector<float> x = random.values(3 * 200, 1, DType::kBf16);
  const ReferenceResult all = reference_of(layer, DType::kBf16, x);
  const ReferenceResult last = reference_of(layer, DType::kBf16, {x.begin() + 400, x.end()});
  EXPECT_TRUE(std::equal(last.y.begin(), last.y.end(), all.y.begin() + 400));
  EXPECT_TRUE(std::equal(last.bound.begin(), last.bound.end(), all.bound.begin() + 400));
}

TEST(Reference, RoundsWeightsAndBiasesToTheTypeThatTheRuntimeUses) {
  Layer layer{1, 1, plain(ActivationKind::kIdentity), {}, {1.005F}, {3.01F}, {}, {0.3F}, {0.7F}};
  for (const DType dtype : kDTypes) {
    const auto value = [dtype](float v) { return double{round_to(dtype, v)}; };
    const std::vector<float> x = {2};
    const ReferenceResult result =
        reference_ffn(spec_of(layer), source_of(layer, DType::kF32), dtype, x, 1);
    EXPECT_NEAR(result.y[0], (value(1.005F) * 2 + value(0.3F)) * value(3.01F) + value(0.7F), 1e-14);
  }
}

TEST(Reference, TakesTensorsOfDifferentStoredTypes) {
  const Layer layer = fixture_d();
  TypedSource source;
  source.add("gate", DType::kBf16, {4, 16}, layer.gate);
  source.add("up", DType::kF32, {4, 16}, layer.up);
  source.add("down", DType::kF16, {16, 4}, layer.down);
  const ReferenceResult result =
      reference_ffn(spec_of(layer), source, DType::kBf16, first_unit(16), 1);
  EXPECT_NEAR(result.y[0], 285.396347, 1e-6);
}

TEST(Reference, TakesNoTokens) {
  EXPECT_TRUE(reference_of(fixture_d(), DType::kF32, {}).y.empty());
}

// ---- the ends of the range ----

TEST(Reference, AllowsInfinityWhereF16MayOverflow) {
  const auto bound = [](float up, float down) {
    const Layer layer{1, 1, plain(ActivationKind::kIdentity), {}, {up}, {down}, {}, {}, {}};
    return reference_of(layer, DType::kF16, {256}).bound[0];
  };
  EXPECT_LT(bound(255, 0.5F), 100);       // h = 65280
  EXPECT_EQ(bound(256, 0.5F), HUGE_VAL);  // h = 65536
  EXPECT_EQ(bound(-256, 0.5F), HUGE_VAL);
  EXPECT_EQ(bound(255.9375F, 0.5F), HUGE_VAL);  // h = 65520 rounds to infinity
  EXPECT_EQ(bound(128, 2), HUGE_VAL);           // y = 65536
  EXPECT_LT(bound(128, 1), 100);
}

TEST(Reference, AllowsInfinityWhereASumMayLeaveFp32) {
  // Partial sums reach 4e38 though y is 0.
  const Layer layer{2,  1, plain(ActivationKind::kIdentity), {}, {2e38F, -2e38F}, {1, 1}, {},
                    {}, {}};
  const ReferenceResult result = reference_of(layer, DType::kF32, {1, 1});
  EXPECT_EQ(result.y[0], 0);
  EXPECT_EQ(result.bound[0], HUGE_VAL);
}

TEST(Reference, KeepsNonFiniteTokensToThemselves) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  for (const Known& known : kKnown) {
    for (const Layer& layer : {hand_layer(known.activation), plain_hand_layer(known.activation)}) {
      const ReferenceResult result =
          reference_of(layer, DType::kBf16, {1, 2, nan, 1, 1, inf, 1, 2});
      EXPECT_TRUE(std::isfinite(result.bound[0]) && std::isfinite(result.bound[1]));
      EXPECT_TRUE(std::isnan(result.y[2]) && std::isnan(result.y[3]));
      for (std::size_t i = 2; i < 6; ++i) EXPECT_EQ(result.bound[i], HUGE_VAL);
      EXPECT_FALSE(std::isfinite(result.y[4]));
      EXPECT_EQ(result.y[6], result.y[0]);
      EXPECT_EQ(result.bound[7], result.bound[1]);
    }
  }
}

TEST(Reference, GivesIeeesAnswerForNonFiniteWeights) {
  Layer layer = hand_layer(gated(ActivationKind::kSilu));
  layer.down[0] = std::numeric_limits<float>::infinity();
  const ReferenceResult result = reference_of(layer, DType::kF32, {1, 2});
  EXPECT_EQ(result.y[0], -HUGE_VAL);  // h[0] < 0
  EXPECT_EQ(result.bound[0], HUGE_VAL);
  EXPECT_TRUE(std::isfinite(result.bound[1]));
}

// ---- refusals ----

TEST(Reference, RefusesWhatDoesNotFit) {
  const Layer layer = fixture_d();
  const TypedSource source = source_of(layer, DType::kF32);
  const std::vector<float> x = first_unit(16);
  const FfnSpec good = spec_of(layer);
  FfnSpec spec = good;
  spec.down.name = "down_proj";
  expect_refused(spec, source, x, "tensor down_proj is missing");
  spec = good;
  spec.up_bias = TensorRef{"up"};
  expect_refused(spec, source, x, "tensor up has shape [4, 16]");
  spec = good;
  spec.up.row_offset = 1;
  expect_refused(spec, source, x, "rows 1 to 5");
  spec = good;
  spec.down.transposed = true;
  expect_refused(spec, source, x, "tensor down has shape [16, 4]");
  spec = good;
  spec.up.stored_shape = {8, 16};
  expect_refused(spec, source, x, "tensor up has shape");
  spec = good;
  spec.swish_beta = "beta";
  expect_refused(spec, source, x, "tensor beta is missing");
  spec = good;
  spec.gate.reset();
  expect_refused(spec, source, x, "lacks a gate tensor");
  expect_refused(good, source, first_unit(15), "15 values");
}

}  // namespace
}  // namespace gatefold
