#include "layers/router.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "layers/weights.h"
#include "runtime/error.h"

namespace gatefold {

Router::Router(const MoeSpec& spec, const TensorSource& source, Device& device)
    : rule_(spec.route), hidden_(spec.hidden_size), device_(&device) {
  router_ = load_router(source, spec.router, rule_.experts, hidden_, device);
  if (spec.router_bias) {
    bias_ = load_router(source, *spec.router_bias, 1, rule_.experts, device);
  }
  if (spec.correction_bias) {
    correction_bias_ = load_router(source, *spec.correction_bias, 1, rule_.experts, device);
  }
}

void Router::reserve(std::int64_t rows) {
  const auto grow = [this](Buffer& buffer, std::int64_t values) {
    const std::int64_t bytes = values * size_of(DType::kF32);
    if (buffer.bytes() < bytes) buffer = device_->allocate(bytes);
  };
  grow(logits_, rows * rule_.experts);
  grow(ids_, rows * rule_.top_k);
  grow(weights_, rows * rule_.top_k);
}

void Router::route(const std::byte* x, DType dtype, std::int64_t rows, Choices& chosen) {
  reserve(rows);
  const auto or_null = [](const Buffer& b) { return b.bytes() > 0 ? b.as<float>() : nullptr; };
  device_->router_logits({x, dtype, rows, hidden_, router_.as<float>(), or_null(bias_),
                          rule_.experts, logits_.as<float>()});
  device_->choose_experts(rule_, logits_.as<float>(), or_null(correction_bias_), rows,
                          ids_.as<std::int32_t>(), weights_.as<float>());
  chosen.resize(rows, rule_.top_k);
  const std::int64_t bytes = rows * rule_.top_k * 4;
  device_->download(reinterpret_cast<std::byte*>(chosen.ids.data()), ids_.data(), bytes);
  device_->download(reinterpret_cast<std::byte*>(chosen.weights.data()), weights_.data(), bytes);
}

void Router::score(std::int64_t rows, float* scores, float* log_sums) {
  device_->score_logits({rule_.score, rule_.experts, logits_.as<float>(), rows, scores, log_sums});
}

std::vector<float> Router::correction_bias() const {
  if (correction_bias_.bytes() == 0) return {};
  std::vector<float> bias(static_cast<std::size_t>(rule_.experts));
  device_->download(reinterpret_cast<std::byte*>(bias.data()), correction_bias_.data(),
                    rule_.experts * size_of(DType::kF32));
  return bias;
}

void Router::set_correction_bias(std::span<const float> bias) {
  const auto fail = [](const std::string& problem, const char* why, const char* what) {
    throw Error(ExitCode::kUsage, fmt::format("{} ({}); {}", problem, why, what));
  };
  if (correction_bias_.bytes() == 0) {
    fail("a correction bias for a router without one", "it chooses by scores alone",
         "balance it by a loss");
  }
  if (std::ssize(bias) != rule_.experts) {
    fail(fmt::format("a correction bias of {} values", bias.size()),
         "one belongs to each of the router's experts", "give as many");
  }
  const auto odd = std::ranges::find_if(bias, [](float value) { return !std::isfinite(value); });
  if (odd != bias.end()) {
    fail(fmt::format("a correction bias of {} for expert {}", *odd, odd - bias.begin()),
         "it would choose experts by accident", "give a finite one");
  }
  device_->upload(correction_bias_.data(), reinterpret_cast<const std::byte*>(bias.data()),
                  rule_.experts * size_of(DType::kF32));
}

}  // namespace gatefold
