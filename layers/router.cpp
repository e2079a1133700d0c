#include "layers/router.h"

#include "layers/weights.h"

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

}  // namespace gatefold
