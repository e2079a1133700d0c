#include "tests/faults/expert_faults.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "tests/faults/hooked_communicator.h"
#include "tests/faults/weight_faults.h"
#include "tests/runtime/counting_device.h"

namespace gatefold {
namespace {

using Transfers = std::span<const Transfer>;

/// One token's routing, in host memory.
struct TokenChoice {
  const RouteRule& rule;
  std::span<const float> logits;      // [E]
  std::span<const float> correction;  // [E], may be empty
  std::span<std::int32_t> ids;        // [k]
  std::span<float> weights;           // [k]
};
using Alter = void (*)(const TokenChoice& token);

template <typename T>
std::vector<T> host_copy(Device& device, const T* data, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(data == nullptr ? 0 : count));
  device.download(reinterpret_cast<std::byte*>(values.data()),
                  reinterpret_cast<const std::byte*>(data),
                  static_cast<std::int64_t>(values.size() * sizeof(T)));
  return values;
}

template <typename T>
void to_device(Device& device, T* data, const std::vector<T>& values) {
  device.upload(reinterpret_cast<std::byte*>(data),
                reinterpret_cast<const std::byte*>(values.data()),
                static_cast<std::int64_t>(values.size() * sizeof(T)));
}

/// A device whose choices of experts go through a function.
class HookedRouter final : public testing::CountingDevice {
 public:
  HookedRouter(Device& inner, Alter alter) : CountingDevice(inner), alter_(alter) {}

  void choose_experts(const RouteRule& rule, const float* logits, const float* correction,
                      std::int64_t rows, std::int32_t* ids, float* weights) override {
    Device& device = counted();
    device.choose_experts(rule, logits, correction, rows, ids, weights);
    const auto l = host_copy(device, logits, rows * rule.experts);
    const auto c = host_copy(device, correction, rule.experts);
    auto i = host_copy(device, ids, rows * rule.top_k);
    auto w = host_copy(device, weights, rows * rule.top_k);
    const auto e = static_cast<std::size_t>(rule.experts);
    const auto k = static_cast<std::size_t>(rule.top_k);
    for (std::size_t row = 0; row < static_cast<std::size_t>(rows); ++row) {
      alter_({rule, std::span(l).subspan(row * e, e), c, std::span(i).subspan(row * k, k),
              std::span(w).subspan(row * k, k)});
    }
    to_device(device, ids, i);
    to_device(device, weights, w);
  }

 private:
  Alter alter_;
};

/// A device that adds to the correction bias it saw first only `share` of what has come since.
class OtherBias final : public testing::CountingDevice {
 public:
  OtherBias(Device& inner, float share) : CountingDevice(inner), share_(share) {}

  void choose_experts(const RouteRule& rule, const float* logits, const float* correction,
                      std::int64_t rows, std::int32_t* ids, float* weights) override {
    Device& device = counted();
    std::vector<float> bias = host_copy(device, correction, rule.experts);
    if (first_.empty()) first_ = bias;
    for (std::size_t e = 0; e < bias.size(); ++e) {
      bias[e] = first_[e] + share_ * (bias[e] - first_[e]);
    }
    const Buffer other = device.allocate(rule.experts * size_of(DType::kF32));
    to_device(device, other.as<float>(), bias);
    device.choose_experts(rule, logits, other.as<float>(), rows, ids, weights);
    device.synchronize();
  }

 private:
  float share_;
  std::vector<float> first_;  // [E]
};

Seams bias_seams(float share) {
  Seams seams;
  seams.wrap_device = [share](Device& device, int) -> std::unique_ptr<Device> {
    return std::make_unique<OtherBias>(device, share);
  };
  return seams;
}

/// weight / sum * scaling, of s + bias instead of s: of sigmoid scores, normalised.
void weigh_by_choice(const TokenChoice& token) {
  float sum = token.rule.epsilon;
  for (std::size_t i = 0; i < token.ids.size(); ++i) {
    const auto id = static_cast<std::size_t>(token.ids[i]);
    token.weights[i] = 1.0F / (1.0F + std::exp(-token.logits[id])) + token.correction[id];
    sum += token.weights[i];
  }
  for (float& w : token.weights) w = w / sum * token.rule.scaling;
}

/// Where logits are equal, without changing any weight.
void choose_highest_of_equals(const TokenChoice& token) {
  std::vector<bool> taken(token.logits.size());
  for (std::int32_t& id : token.ids) {
    const float value = token.logits[static_cast<std::size_t>(id)];
    std::size_t highest = token.logits.size() - 1;
    while (taken[highest] || token.logits[highest] != value) --highest;
    taken[highest] = true;
    id = static_cast<std::int32_t>(highest);
  }
}

Seams router_seams(Alter alter) {
  Seams seams;
  seams.wrap_device = [alter](Device& device, int) -> std::unique_ptr<Device> {
    return std::make_unique<HookedRouter>(device, alter);
  };
  return seams;
}

Seams spec_seams(const std::function<void(MoeSpec& spec, int rank)>& alter) {
  Seams seams;
  seams.alter_experts = alter;
  return seams;
}

/// Of an even number of rows; of an odd one the middle row is torn.
void swap_halves(const Transfer& t) {
  std::swap_ranges(t.data, t.data + t.bytes / 2, t.data + (t.bytes + 1) / 2);
}

Seams swapping_seams(const Fault& fault) {
  Seams seams;
  seams.wrap_exchanges = [fault](Communicator& inner) -> std::unique_ptr<Communicator> {
    return std::make_unique<HookedCommunicator>(
        inner, [fault, call = 0](Communicator& group, Transfers sends, Transfers receives) mutable {
          group.exchange(sends, receives);
          if (group.rank() != fault.rank || !is_at(fault, ++call)) return;
          for (const Transfer& t : receives) {
            if (t.peer != group.rank()) swap_halves(t);
          }
        });
  };
  return seams;
}

}  // namespace

bool is_at(const Fault& fault, int call) {
  if (fault.point == "dispatch") return call == 1;
  if (fault.point == "combine") return call == 2;
  return true;
}

Seams expert_seams(const Fault& fault) {
  if (fault.is("expert_off_by_one")) {
    return spec_seams([fault](MoeSpec& spec, int rank) {
      if (rank == fault.rank) std::ranges::rotate(spec.experts, spec.experts.begin() + 1);
    });
  }
  if (fault.is("shared_per_rank")) {
    return spec_seams([](MoeSpec& spec, int) { spec.shared.push_back(spec.shared.front()); });
  }
  if (fault.is("scaling_twice")) {
    return spec_seams([](MoeSpec& spec, int) { spec.route.scaling *= spec.route.scaling; });
  }
  if (fault.is("less_capacity")) {
    return spec_seams([](MoeSpec& spec, int) { --spec.capacity.value().rows; });
  }
  if (fault.is("drops_otherwise")) {
    return spec_seams([](MoeSpec& spec, int) { spec.capacity->drop = DropBy::kProbability; });
  }
  if (fault.is("stale_bias")) return bias_seams(0.0F);
  if (fault.is("reversed_bias")) return bias_seams(-1.0F);
  if (fault.is("biased_weights")) return router_seams(weigh_by_choice);
  if (fault.is("ties_to_highest")) return router_seams(choose_highest_of_equals);
  if (fault.is("halves_swapped")) return swapping_seams(fault);
  return {};
}

HookedSource::Read expert_low_bit(const Fault& fault, const MoeSpec& spec, int rank) {
  std::set<std::string> names;
  if (rank == fault.rank && fault.point == "router") names.insert(spec.router.name);
  if (rank == fault.rank && fault.point == "experts") {
    for (const FfnSpec& expert : spec.experts) names.insert(expert.down.name);
  }
  return flip_low_bit(std::move(names));
}

}  // namespace gatefold
