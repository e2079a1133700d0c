#include "runtime/activation.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "runtime/activation_math.h"
#include "runtime/error.h"
#include "runtime/tensor_layout.h"

namespace gatefold {
namespace {

constexpr std::array<std::pair<std::string_view, ActivationKind>, 17> kNames{{
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
    {"clamped_swiglu", ActivationKind::kClampedSwiglu},
}};

constexpr std::int64_t kChunkGroups = 16;  // 1024 outputs at a time, 4 KiB that stay in L1

// x + -0 is x for every x, -0 too: rows without a bias run the same loop.
constexpr auto kNoBias = [] {
  std::array<float, kGroup> zeros{};
  zeros.fill(-0.0F);
  return zeros;
}();

struct Bias {
  const float* values;
  std::int64_t step;  // from one group to the next
};

/// c and bias: `groups` groups of 64; values: [groups * (gated ? 32 : 64)].
template <ActivationKind kKind>
void activate_groups(const Activation& act, const float* c, Bias bias, std::int64_t groups,
                     float* values) {
  for (std::int64_t g = 0; g < groups; ++g, c += kGroup) {
    const float* b = bias.values + g * bias.step;
    if (act.gated) {
      for (std::int64_t i = 0; i < kGatedGroup; ++i) {
        const std::int64_t up = kGatedGroup + i;
        values[g * kGatedGroup + i] = gate_times_up<kKind>(act, c[i] + b[i], c[up] + b[up]);
      }
    } else {
      for (std::int64_t i = 0; i < kGroup; ++i) {
        values[g * kGroup + i] = activate<kKind>(act, c[i] + b[i]);
      }
    }
  }
}

template <typename Stored, typename Round>
void round_values(const float* values, std::int64_t count, std::byte* out, Round round) {
  auto* stored = reinterpret_cast<Stored*>(out);
  for (std::int64_t i = 0; i < count; ++i) stored[i] = round(values[i]);
}

void store(DType model, DType storage, const float* values, std::int64_t count, std::byte* out) {
  const bool widened = storage == DType::kF32;
  switch (model) {
    case DType::kF32: return round_values<float>(values, count, out, canonical_nan);
    case DType::kBf16:
      if (!widened) return round_values<std::uint16_t>(values, count, out, float_to_bf16);
      return round_values<float>(values, count, out,
                                 [](float value) { return round_to(DType::kBf16, value); });
    case DType::kF16:
      if (!widened) return round_values<std::uint16_t>(values, count, out, float_to_f16);
      return round_values<float>(values, count, out,
                                 [](float value) { return round_to(DType::kF16, value); });
  }
}

void activate_all(const Activation& act, const ActivationRows& io) {
  alignas(64) std::array<float, kChunkGroups * kGroup> values;
  const std::int64_t outputs = act.gated ? kGatedGroup : kGroup;  // of a group
  const std::int64_t width = io.groups * outputs;
  const std::int64_t valid = std::clamp<std::int64_t>(io.valid, 0, width);
  for (std::int64_t row = 0; row < io.rows; ++row) {
    std::byte* h = io.h + row * io.h_ld * size_of(io.storage);
    for (std::int64_t first = 0; first < io.groups; first += kChunkGroups) {
      const std::int64_t groups = std::min(kChunkGroups, io.groups - first);
      const float* c = io.c + row * io.ld + first * kGroup;
      const Bias bias =
          io.bias == nullptr ? Bias{kNoBias.data(), 0} : Bias{io.bias + first * kGroup, kGroup};
      with_kind(act.kind, [&]<ActivationKind kKind>() {
        activate_groups<kKind>(act, c, bias, groups, values.data());
      });
      store(io.model, io.storage, values.data(), groups * outputs,
            h + first * outputs * size_of(io.storage));
    }
    std::fill_n(h + valid * size_of(io.storage), (width - valid) * size_of(io.storage),
                std::byte{0});
  }
}

void check(const Activation& act) {
  // !(limit > 0) also catches NaN; an infinite limit clamps nothing.
  if (std::isfinite(act.beta) && std::isfinite(act.alpha) && act.limit > 0.0F) return;
  throw Error(
      ExitCode::kData,
      fmt::format("activation with beta {}, alpha {}, limit {} (beta and alpha must be "
                  "finite, the limit positive); check the model's config and its swish_beta",
                  act.beta, act.alpha, act.limit));
}

// One body, compiled for each instruction set: `flatten` inlines it whole, so that all of it is
// vectorised for the caller's target. Unlike GATEFOLD_CLONES this lets a test run each of them.
[[gnu::flatten]] void activate_sse2(const Activation& act, const ActivationRows& io) {
  activate_all(act, io);
}
[[gnu::flatten, gnu::target("avx2")]] void activate_avx2(const Activation& act,
                                                         const ActivationRows& io) {
  activate_all(act, io);
}
[[gnu::flatten, gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]] void activate_avx512(
    const Activation& act, const ActivationRows& io) {
  activate_all(act, io);
}

}  // namespace

std::optional<ActivationKind> activation_from_name(std::string_view name) {
  for (const auto& [known, kind] : kNames) {
    if (known == name) return kind;
  }
  return std::nullopt;
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

std::string activation_names() {
  std::string names;
  for (const auto& [name, kind] : kNames) {
    if (!names.empty()) names += ", ";
    names += name;
  }
  return names;
}

void activate_rows(const Activation& act, const ActivationRows& io, VectorIsa isa) {
  check(act);
  if (io.storage != io.model && io.storage != DType::kF32) {
    throw Error(ExitCode::kBackend,
                fmt::format("hidden values of a {} model stored as {} (only {} itself and f32 hold "
                            "them without a second rounding); ask the device for its storage dtype",
                            name_of(io.model), name_of(io.storage), name_of(io.model)));
  }
  switch (isa) {
    case VectorIsa::kAvx512: return activate_avx512(act, io);
    case VectorIsa::kAvx2: return activate_avx2(act, io);
    case VectorIsa::kSse2: return activate_sse2(act, io);
  }
}

}  // namespace gatefold
