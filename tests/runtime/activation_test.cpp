#include "runtime/activation.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "runtime/activation_math.h"
#include "runtime/error.h"
#include "runtime/hash.h"

namespace gatefold {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kMax = std::numeric_limits<float>::max();

constexpr std::array kKinds{ActivationKind::kIdentity,  ActivationKind::kRelu,
                            ActivationKind::kRelu2,     ActivationKind::kSilu,
                            ActivationKind::kGeluExact, ActivationKind::kGeluTanh,
                            ActivationKind::kQuickGelu, ActivationKind::kClampedSwiglu};

Activation of(ActivationKind kind) { return {.kind = kind}; }

double sigmoid(double t) { return 1.0 / (1.0 + std::exp(-t)); }

/// The argument of the sigmoid of a kind that has one.
double sigmoid_argument(const Activation& act, double z) {
  switch (act.kind) {
    case ActivationKind::kSilu: return static_cast<double>(act.beta) * z;
    case ActivationKind::kGeluTanh: return 2.0 * std::sqrt(2.0 / M_PI) * (z + 0.044715 * z * z * z);
    case ActivationKind::kQuickGelu: return 1.702 * z;
    case ActivationKind::kClampedSwiglu: return static_cast<double>(act.alpha) * z;
    default: return 0.0;
  }
}

/// act(z) in float64, by the formulas of the header's table.
double reference(const Activation& act, float gate) {
  const double z = act.kind == ActivationKind::kClampedSwiglu && gate > act.limit
                       ? static_cast<double>(act.limit)
                       : static_cast<double>(gate);
  switch (act.kind) {
    case ActivationKind::kIdentity: return z;
    case ActivationKind::kRelu: return z > 0.0 ? z : 0.0;
    case ActivationKind::kRelu2: return z > 0.0 ? z * z : 0.0;
    case ActivationKind::kGeluExact: return z * 0.5 * std::erfc(-z * std::sqrt(0.5));
    default: return z * sigmoid(sigmoid_argument(act, z));
  }
}

/// |got - want| in units of fp32's last place at `want`; 0 where want is beyond fp32 and got
/// infinite.
double ulps(float got, double want) {
  const auto rounded = static_cast<float>(want);
  if (std::isinf(rounded) && got == rounded) return 0.0;
  const double magnitude = std::max(std::abs(want), 0x1p-126);
  const double unit = std::ldexp(1.0, std::ilogb(magnitude) - 23);
  const double error = std::abs(static_cast<double>(got) - want) / unit;
  return std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
}

/// Calls visit(z) for every finite bf16, and for fp32 values of every exponent and, denser, those
/// down to -160 where the tails of all kinds end.
void sweep(const std::function<void(float)>& visit) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float z = bf16_to_float(static_cast<std::uint16_t>(bits));
    if (std::isfinite(z)) visit(z);
  }
  for (std::uint64_t bits = 0; bits < 0x1'0000'0000U; bits += 16411) {
    const float z = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    if (std::isfinite(z)) visit(z);
  }
  for (int i = 0; i < 300'000; ++i) visit(static_cast<float>(i) * -5.3e-4F);
}

struct Worst {
  double error = 0.0;
  float at = 0.0F;
  void add(double value, float z) {
    if (value > error) {
      error = value;
      at = z;
    }
  }
};

TEST(ActivationMaths, ExpIsWithinOneUnitFromOverflowToTheLastSubnormal) {
  Worst worst;
  sweep([&](float x) { worst.add(ulps(exp_fp32(x), std::exp(static_cast<double>(x))), x); });
  EXPECT_LE(worst.error, 1.0) << "at " << worst.at;
}

TEST(ActivationMaths, LogIsWithinTwoUnitsOfNormalNumbers) {
  Worst worst;
  const auto add = [&](float x) {
    if (std::isnormal(x)) worst.add(ulps(log_fp32(x), std::log(static_cast<double>(x))), x);
  };
  sweep([&](float z) { add(std::abs(z)); });
  for (int i = 0; i < 300'000; ++i)
    add(std::bit_cast<float>(0x3f000000U + 80U * static_cast<std::uint32_t>(i)));
  EXPECT_LE(worst.error, 2.0) << "at " << worst.at;
  EXPECT_EQ(log_fp32(1.0F), 0.0F);
  EXPECT_TRUE(std::isnan(log_fp32(kNan)));
}

TEST(ActivationMaths, ExpEndsExactly) {
  EXPECT_EQ(exp_fp32(0.0F), 1.0F);
  EXPECT_EQ(exp_fp32(-0.0F), 1.0F);
  EXPECT_EQ(exp_fp32(-kInf), 0.0F);
  EXPECT_EQ(exp_fp32(-kMax), 0.0F);
  EXPECT_EQ(exp_fp32(-103.98F), 0.0F);
  EXPECT_EQ(exp_fp32(-103.9F), 0x1p-149F);
  EXPECT_LT(exp_fp32(88.72F), kInf);
  EXPECT_EQ(exp_fp32(88.73F), kInf);
  EXPECT_EQ(exp_fp32(kMax), kInf);
  EXPECT_EQ(exp_fp32(kInf), kInf);
  EXPECT_TRUE(std::isnan(exp_fp32(kNan)));
  EXPECT_TRUE(std::isnan(exp_fp32(-kNan)));
}

TEST(ActivationMaths, SigmoidIsWithinThreeUnitsAndEndsExactly) {
  Worst worst;
  sweep([&](float t) { worst.add(ulps(sigmoid_fp32(t), sigmoid(static_cast<double>(t))), t); });
  EXPECT_LE(worst.error, 2.5) << "at " << worst.at;
  EXPECT_EQ(sigmoid_fp32(0.0F), 0.5F);
  EXPECT_EQ(sigmoid_fp32(kInf), 1.0F);
  EXPECT_EQ(sigmoid_fp32(-kInf), 0.0F);
  EXPECT_TRUE(std::isnan(sigmoid_fp32(kNan)));
  EXPECT_TRUE(std::isnan(sigmoid_fp32(-kNan)));
}

TEST(ActivationMaths, SqrtSoftplusIsWithinThreeUnitsAndEndsExactly) {
  const auto exact = [](float x) {
    const double l = x;
    return std::sqrt(l > 0 ? l + std::log1p(std::exp(-l)) : std::log1p(std::exp(l)));
  };
  Worst worst;
  sweep([&](float x) {
    // Where log1p of doubles ends before its square root does.
    const double want = x < -700 ? std::exp(0.5 * double{x}) : exact(x);
    worst.add(ulps(sqrt_softplus_fp32(x), want), x);
  });
  EXPECT_LE(worst.error, 2.5) << "at " << worst.at;
  EXPECT_EQ(sqrt_softplus_fp32(16777216.0F), 4096.0F);
  EXPECT_EQ(sqrt_softplus_fp32(kInf), kInf);
  EXPECT_EQ(sqrt_softplus_fp32(-kInf), 0.0F);
  EXPECT_TRUE(std::isnan(sqrt_softplus_fp32(kNan)));
  EXPECT_TRUE(std::isnan(sqrt_softplus_fp32(-kNan)));
}

struct Accuracy {
  Activation act;
  double units;               // allowed error ...
  double units_per_argument;  // ... plus this for each unit of a negative sigmoid argument
  int bf16_differences;       // among all bf16 inputs, after rounding to bf16
};

class ActivationAccuracy : public testing::TestWithParam<Accuracy> {};

TEST_P(ActivationAccuracy, IsWithinItsBoundOfTheFormulaInFloat64) {
  const Accuracy& bound = GetParam();
  const Activation& act = bound.act;
  Worst worst;
  sweep([&](float z) {
    double allowed = bound.units;
    if (bound.units_per_argument > 0.0) {
      const double argument = sigmoid_argument(act, static_cast<double>(z));
      allowed += bound.units_per_argument * std::max(0.0, -argument);
    }
    worst.add(ulps(activate(act, z), reference(act, z)) / allowed, z);
  });
  EXPECT_LE(worst.error, 1.0) << "at " << worst.at;
}

TEST_P(ActivationAccuracy, RoundsToTheSameBf16) {
  const Activation& act = GetParam().act;
  int differences = 0;
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float z = bf16_to_float(static_cast<std::uint16_t>(bits));
    if (!std::isfinite(z)) continue;
    const auto exact = static_cast<float>(reference(act, z));
    differences += float_to_bf16(activate(act, z)) != float_to_bf16(exact) ? 1 : 0;
  }
  EXPECT_LE(differences, GetParam().bf16_differences);
}

INSTANTIATE_TEST_SUITE_P(
    EveryKind, ActivationAccuracy,
    testing::Values(Accuracy{of(ActivationKind::kIdentity), 0.25, 0.0, 0},
                    Accuracy{of(ActivationKind::kRelu), 0.25, 0.0, 0},
                    Accuracy{of(ActivationKind::kRelu2), 0.5, 0.0, 0},
                    Accuracy{of(ActivationKind::kSilu), 2.5, 0.0, 0},
                    Accuracy{{.kind = ActivationKind::kSilu, .beta = 0.7F}, 2.0, 2.0, 0},
                    Accuracy{{.kind = ActivationKind::kSilu, .beta = -1.5F}, 2.0, 2.0, 0},
                    Accuracy{of(ActivationKind::kGeluExact), 6.0, 0.0, 0},
                    Accuracy{of(ActivationKind::kGeluTanh), 2.7, 2.7, 0},
                    Accuracy{of(ActivationKind::kQuickGelu), 2.0, 2.0, 1},
                    Accuracy{of(ActivationKind::kClampedSwiglu), 2.0, 2.0, 1}));

TEST(ActivationMaths, GivesThePublishedNumbers) {
  // h * 10000 for gate -2, up 1; and act(1), seven digits each.
  EXPECT_NEAR(activate(of(ActivationKind::kGeluExact), -2.0F) * 10000.0F, -455.0026F, 6e-5F);
  EXPECT_NEAR(activate(of(ActivationKind::kGeluTanh), -2.0F) * 10000.0F, -454.0231F, 9e-5F);
  EXPECT_NEAR(activate(of(ActivationKind::kGeluExact), 1.0F), 0.8413447F, 1e-7F);
  EXPECT_NEAR(activate(of(ActivationKind::kGeluTanh), 1.0F), 0.8411920F, 1e-7F);
  EXPECT_NEAR(activate(of(ActivationKind::kQuickGelu), 1.0F), 0.8457958F, 1e-7F);
  EXPECT_NEAR(activate(of(ActivationKind::kSilu), 1.0F), 0.7310586F, 1e-7F);
  EXPECT_EQ(activate(of(ActivationKind::kRelu2), 3.0F), 9.0F);
  EXPECT_EQ(activate(of(ActivationKind::kRelu), -3.0F), 0.0F);
  EXPECT_EQ(gate_times_up(of(ActivationKind::kIdentity), 3.0F, -5.0F), -15.0F);
}

TEST(ActivationMaths, HasTheSameBitsInEveryBuild) {
  // FNV-1a over act(z) of 65536 fp32 inputs of every exponent: a contracted product or another
  // compiler's idea of the order of operations changes it.
  Fnv1a hash;
  for (const ActivationKind kind : kKinds) {
    for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
      const float z = std::bit_cast<float>((bits << 16) | (bits * 40503U & 0xffffU));
      if (!std::isfinite(z)) continue;
      hash.add_unit(std::bit_cast<std::uint32_t>(activate(of(kind), z)));
    }
  }
  EXPECT_EQ(hash.value(), 0xe4ebda146bbbe01U);
}

TEST(ActivationMaths, ZeroGivesZeroAndNanGivesNan) {
  for (const ActivationKind kind : kKinds) {
    SCOPED_TRACE(static_cast<int>(kind));
    const Activation act = of(kind);
    for (const float zero : {0.0F, -0.0F}) {
      EXPECT_EQ(activate(act, zero), 0.0F);
      EXPECT_EQ(gate_times_up(act, zero, 3.0F), 0.0F);
    }
    for (const float nan : {kNan, -kNan, std::bit_cast<float>(0x7f800001U)}) {
      EXPECT_TRUE(std::isnan(activate(act, nan)));
      EXPECT_TRUE(std::isnan(gate_times_up(act, nan, 1.0F)));
      EXPECT_TRUE(std::isnan(gate_times_up(act, 1.0F, nan)));
    }
  }
}

TEST(ActivationMaths, InfinitiesGiveWhatTheFormulasGive) {
  for (const ActivationKind kind : kKinds) {
    SCOPED_TRACE(static_cast<int>(kind));
    const Activation act = of(kind);
    const bool clamped = kind == ActivationKind::kClampedSwiglu;
    EXPECT_EQ(activate(act, kInf), clamped ? activate(act, act.limit) : kInf);
    const float got = activate(act, -kInf);
    if (kind == ActivationKind::kIdentity) {
      EXPECT_EQ(got, -kInf);
    } else if (kind == ActivationKind::kRelu || kind == ActivationKind::kRelu2) {
      EXPECT_EQ(got, 0.0F);
    } else {
      EXPECT_TRUE(std::isnan(got));  // -inf * 0
      EXPECT_TRUE(std::isnan(reference(act, -kInf)));
    }
  }
}

TEST(ActivationMaths, HugeInputsNeitherOverflowNorTurnNan) {
  for (const ActivationKind kind : {ActivationKind::kSilu, ActivationKind::kGeluExact,
                                    ActivationKind::kGeluTanh, ActivationKind::kQuickGelu}) {
    SCOPED_TRACE(static_cast<int>(kind));
    for (const float z : {1e3F, 1e9F, 1e19F, 1e30F, kMax}) {
      EXPECT_EQ(activate(of(kind), z), z);
      EXPECT_EQ(activate(of(kind), -z), 0.0F);
    }
  }
}

TEST(ClampedSwiglu, ClampsBothSidesOfUpOnlyTheTopOfGateAndThenAddsOne) {
  const Activation act = of(ActivationKind::kClampedSwiglu);
  const auto glu = [&](float g) { return activate(act, g); };
  EXPECT_EQ(gate_times_up(act, 10.0F, 10.0F), glu(7.0F) * 8.0F);
  EXPECT_EQ(gate_times_up(act, 10.0F, -10.0F), glu(7.0F) * -6.0F);
  EXPECT_EQ(gate_times_up(act, 2.0F, 6.5F), glu(2.0F) * 7.5F);
  EXPECT_NE(glu(-10.0F), glu(-7.0F));
  EXPECT_NEAR(glu(7.0F), 7.0 * sigmoid(1.702 * 7.0), 1e-6);
  EXPECT_NEAR(glu(-10.0F), -10.0 * sigmoid(-17.02), 1e-12);
}

TEST(ClampedSwiglu, IsMonotoneInUpAndConstantBeyondTheLimit) {
  const Activation act = of(ActivationKind::kClampedSwiglu);
  float before = gate_times_up(act, 1.5F, -kInf);
  EXPECT_EQ(before, gate_times_up(act, 1.5F, -7.0F));
  for (int i = -900; i <= 900; ++i) {
    const float h = gate_times_up(act, 1.5F, static_cast<float>(i) * 0.01F);
    ASSERT_GE(h, before) << i;
    before = h;
  }
  EXPECT_EQ(gate_times_up(act, 1.5F, kInf), gate_times_up(act, 1.5F, 7.0F));
}

TEST(ActivationNames, AreTheOnesThatConfigsUse) {
  const std::vector<std::pair<std::string_view, ActivationKind>> names{
      {"silu", ActivationKind::kSilu},
      {"swish", ActivationKind::kSilu},
      {"gelu", ActivationKind::kGeluExact},
      {"gelu_python", ActivationKind::kGeluExact},
      {"gelu_new", ActivationKind::kGeluTanh},
      {"gelu_pytorch_tanh", ActivationKind::kGeluTanh},
      {"gelu_accurate", ActivationKind::kGeluTanh},
      {"gelu_python_tanh", ActivationKind::kGeluTanh},
      {"gelu_fast", ActivationKind::kGeluTanh},
      {"quick_gelu", ActivationKind::kQuickGelu},
      {"relu", ActivationKind::kRelu},
      {"relu2", ActivationKind::kRelu2},
      {"linear", ActivationKind::kIdentity},
      {"identity", ActivationKind::kIdentity},
      {"none", ActivationKind::kIdentity},
      {"bilinear", ActivationKind::kIdentity},
      {"clamped_swiglu", ActivationKind::kClampedSwiglu}};
  std::string listed;
  for (const auto& [name, kind] : names) {
    EXPECT_EQ(activation_from_name(name), kind) << name;
    if (!listed.empty()) listed += ", ";
    listed += name;
  }
  EXPECT_EQ(activation_names(), listed);
  for (const std::string_view unknown : {"", "gelu_10", "SiLU", "silu ", "mish"}) {
    EXPECT_EQ(activation_from_name(unknown), std::nullopt) << unknown;
  }
}

// --- whole rows ---

struct Types {
  DType model;
  DType storage;
};
constexpr std::array kTypes{Types{DType::kF32, DType::kF32}, Types{DType::kBf16, DType::kBf16},
                            Types{DType::kBf16, DType::kF32}, Types{DType::kF16, DType::kF16},
                            Types{DType::kF16, DType::kF32}};

std::vector<VectorIsa> isas() {
  std::vector<VectorIsa> all{VectorIsa::kSse2};
  if (vector_isa() >= VectorIsa::kAvx2) all.push_back(VectorIsa::kAvx2);
  if (vector_isa() >= VectorIsa::kAvx512) all.push_back(VectorIsa::kAvx512);
  return all;
}

/// Values of every size, with special ones strewn in.
std::vector<float> inputs(std::int64_t count, unsigned seed) {
  constexpr std::array kSpecial{0.0F,   -0.0F,  kInf,    -kInf,   kNan,    -kNan,  kMax,
                                -kMax,  1e-42F, -1e-42F, 7.0F,    -7.0F,   -87.5F, -95.0F,
                                -104.F, 70.0F,  158.0F,  -158.0F, 65519.0F};
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) {
    const std::uint32_t dice = generator() % 16;
    value = dice == 0   ? kSpecial[generator() % kSpecial.size()]
            : dice == 1 ? normal(generator) * 40.0F
                        : normal(generator) * 2.0F;
  }
  return values;
}

void store_as(DType dtype, float value, std::byte* out) {
  const std::uint16_t half = dtype == DType::kBf16 ? float_to_bf16(value) : float_to_f16(value);
  if (dtype == DType::kF32) {
    std::memcpy(out, &value, sizeof value);
  } else {
    std::memcpy(out, &half, sizeof half);
  }
}

/// One row of h, element by element, without padding.
std::vector<std::byte> scalar_row(const Activation& act, Types types, const float* c,
                                  const float* bias, std::int64_t columns) {
  const std::int64_t size = size_of(types.storage);
  std::vector<std::byte> row(static_cast<std::size_t>(columns * size));
  for (std::int64_t i = 0; i < columns; ++i) {
    const auto at = [&](std::int64_t k) { return bias == nullptr ? c[k] : c[k] + bias[k]; };
    const std::int64_t gate = i / 32 * 64 + i % 32;
    const float h = act.gated ? gate_times_up(act, at(gate), at(gate + 32)) : activate(act, at(i));
    store_as(types.storage, round_to(types.model, h), row.data() + i * size);
  }
  return row;
}

constexpr std::byte kCanary{0xa5};

/// Runs activate_rows on `rows` rows with strides wider than needed, into canaries.
std::vector<std::byte> run(const Activation& act, Types types, const std::vector<float>& c,
                           std::int64_t rows, const float* bias, std::int64_t groups,
                           std::int64_t valid, VectorIsa isa) {
  const std::int64_t h_ld = groups * (act.gated ? 32 : 64) + 3;
  std::vector<std::byte> h(static_cast<std::size_t>(rows * h_ld * size_of(types.storage)), kCanary);
  activate_rows(act,
                {.c = c.data(),
                 .rows = rows,
                 .ld = static_cast<std::int64_t>(c.size()) / rows,
                 .groups = groups,
                 .bias = bias,
                 .h = h.data(),
                 .h_ld = h_ld,
                 .valid = valid,
                 .model = types.model,
                 .storage = types.storage},
                isa);
  return h;
}

/// `row` cut to `valid` columns, zeros up to the end of the groups, then three canary elements.
std::vector<std::byte> padded(std::vector<std::byte> row, std::int64_t valid, std::int64_t width,
                              std::int64_t size) {
  row.resize(static_cast<std::size_t>(valid * size));
  row.resize(static_cast<std::size_t>(width * size), std::byte{0});
  row.resize(static_cast<std::size_t>((width + 3) * size), kCanary);
  return row;
}

class ActivateRows : public testing::TestWithParam<ActivationKind> {};

TEST_P(ActivateRows, HasTheScalarBitsForEveryLengthAndInstructionSet) {
  constexpr std::int64_t kLd = 5 * 64 + 7;
  const std::vector<float> c = inputs(2 * kLd, 1);
  for (const bool gated : {true, false}) {
    const Activation act{.kind = GetParam(), .gated = gated, .beta = 1.3F};
    const std::int64_t outputs = gated ? 32 : 64;
    for (const Types types : kTypes) {
      const std::int64_t size = size_of(types.storage);
      const auto first = scalar_row(act, types, c.data(), nullptr, 160);
      const auto second = scalar_row(act, types, c.data() + kLd, nullptr, 160);
      for (std::int64_t length = 1; length <= 130; ++length) {
        const std::int64_t groups = (length + outputs - 1) / outputs;
        auto want = padded(first, length, groups * outputs, size);
        const auto more = padded(second, length, groups * outputs, size);
        want.insert(want.end(), more.begin(), more.end());
        for (const VectorIsa isa : isas()) {
          ASSERT_EQ(run(act, types, c, 2, nullptr, groups, length, isa), want)
              << "gated " << gated << ", " << name_of(types.model) << " as "
              << name_of(types.storage) << ", length " << length << ", isa "
              << static_cast<int>(isa);
        }
      }
    }
  }
}

TEST_P(ActivateRows, AddsTheBiasOverManyGroups) {
  constexpr std::int64_t kGroups = 35;  // more than two chunks
  const std::vector<float> c = inputs(kGroups * 64, 2);
  const std::vector<float> bias = inputs(kGroups * 64, 3);
  for (const bool gated : {true, false}) {
    const Activation act{.kind = GetParam(), .gated = gated};
    const std::int64_t width = kGroups * (gated ? 32 : 64);
    for (const Types types : kTypes) {
      const auto row = scalar_row(act, types, c.data(), bias.data(), width);
      for (const std::int64_t valid : {width, width - 1, width - 70, std::int64_t{0}}) {
        const auto want = padded(row, valid, width, size_of(types.storage));
        for (const VectorIsa isa : isas()) {
          ASSERT_EQ(run(act, types, c, 1, bias.data(), kGroups, valid, isa), want)
              << "valid " << valid << ", isa " << static_cast<int>(isa);
        }
      }
    }
  }
}

TEST_P(ActivateRows, WritesZerosIntoPaddingWhateverLiesThere) {
  for (const bool gated : {true, false}) {
    const Activation act{.kind = GetParam(), .gated = gated};
    for (const float garbage : {kNan, kInf, -1.0F}) {
      const std::vector<float> c(2 * 64, garbage);
      for (const Types types : kTypes) {
        const auto h = run(act, types, c, 1, nullptr, 2, 5, vector_isa());
        const auto size = static_cast<std::size_t>(size_of(types.storage));
        const std::size_t width = gated ? 64 : 128;
        for (std::size_t i = 5 * size; i < width * size; ++i) ASSERT_EQ(h[i], std::byte{0}) << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKind, ActivateRows, testing::ValuesIn(kKinds));

std::uint32_t first_bits(const std::vector<std::byte>& h, DType storage) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, h.data(), static_cast<std::size_t>(size_of(storage)));
  return bits;
}

TEST(ActivateRowsNan, HasOnePatternInEveryType) {
  const Activation act{.kind = ActivationKind::kIdentity, .gated = false};
  for (const std::uint32_t nan : {0x7fc00001U, 0xffc00000U, 0x7f800001U, 0xffffffffU}) {
    const std::vector<float> c(64, std::bit_cast<float>(nan));
    const auto bits = [&](DType model, DType storage) {
      return first_bits(run(act, {model, storage}, c, 1, nullptr, 1, 64, vector_isa()), storage);
    };
    EXPECT_EQ(bits(DType::kF32, DType::kF32), 0x7fc00000U);
    EXPECT_EQ(bits(DType::kF16, DType::kF16), 0x7e00U);
    EXPECT_EQ(bits(DType::kBf16, DType::kBf16), 0x7fc0U);
    EXPECT_EQ(bits(DType::kBf16, DType::kF32), 0x7fc00000U);
    EXPECT_EQ(bits(DType::kF16, DType::kF32), 0x7fc00000U);
  }
}

TEST(ActivateRowsRounding, RoundsTheBiasSumAndTheResultOnceEach) {
  const Activation act{.kind = ActivationKind::kIdentity, .gated = false};
  std::vector<float> c(64, 0.0F);
  std::vector<float> bias(64, 0.0F);
  c[0] = 1.0F;
  bias[0] = 0x1p-24F;  // a tie in fp32: to even, so to 1
  c[1] = 0x1.01p0F;    // a tie in bf16: to even, so to 1
  c[2] = 0x1.0101p0F;  // just above it
  bias[3] = -0.0F;
  const auto h = run(act, {DType::kBf16, DType::kF32}, c, 1, bias.data(), 1, 64, vector_isa());
  std::array<float, 4> got{};
  std::memcpy(got.data(), h.data(), sizeof got);
  EXPECT_THAT(got, testing::ElementsAre(1.0F, 1.0F, 0x1.02p0F, 0.0F));
}

TEST(ActivateRowsRounding, LeavesMinusZeroAloneWithoutABias) {
  const Activation act{.kind = ActivationKind::kIdentity, .gated = false};
  const std::vector<float> c(64, -0.0F);
  const auto h = run(act, {DType::kF32, DType::kF32}, c, 1, nullptr, 1, 64, vector_isa());
  EXPECT_EQ(first_bits(h, DType::kF32), 0x80000000U);
}

ExitCode code_of(const Activation& act, Types types) {
  try {
    run(act, types, std::vector<float>(64, 1.0F), 1, nullptr, 1, 1, vector_isa());
  } catch (const Error& error) {
    return error.code();
  }
  return ExitCode::kOk;
}

TEST(ActivateRowsErrors, RefusesASecondRoundingAndParametersOutOfRange) {
  const Types f32{DType::kF32, DType::kF32};
  EXPECT_EQ(code_of({}, {DType::kBf16, DType::kF16}), ExitCode::kBackend);
  EXPECT_EQ(code_of({}, {DType::kF32, DType::kBf16}), ExitCode::kBackend);
  EXPECT_EQ(code_of({.beta = kNan}, f32), ExitCode::kData);
  EXPECT_EQ(code_of({.alpha = kInf}, f32), ExitCode::kData);
  EXPECT_EQ(code_of({.limit = kNan}, f32), ExitCode::kData);
  EXPECT_EQ(code_of({.limit = 0.0F}, f32), ExitCode::kData);
  EXPECT_EQ(code_of({.limit = kInf}, f32), ExitCode::kOk);
}

}  // namespace
}  // namespace gatefold
