#include "layers/moe.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "layers/kernel_choice.h"
#include "parallel/agreement.h"
#include "runtime/error.h"
#include "runtime/phases.h"

namespace gatefold {
namespace {

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::int64_t blocks_of(const MoeSpec& spec, const MoeOptions& options) {
  return options.expert_blocks > 0 ? options.expert_blocks
                                   : default_expert_blocks(spec.intermediate_size());
}

/// What a caller may have got wrong, and nothing later would notice.
void check_spec(const MoeSpec& spec) {
  check(spec.route);
  if (spec.capacity) check(*spec.capacity);
  const auto fail = [&](const std::string& problem, const char* why) {
    throw Error(ExitCode::kUsage, fmt::format("mixture of experts {} has {} ({}); correct its "
                                              "MoeSpec",
                                              spec.layer, problem, why));
  };
  if (std::ssize(spec.experts) != spec.route.experts) {
    fail(fmt::format("{} experts and a router for {}", spec.experts.size(), spec.route.experts),
         "an expert belongs to each row of the router");
  }
  for (const FfnSpec& expert : spec.experts) {
    const bool same = expert.hidden_size == spec.hidden_size &&
                      expert.intermediate_size == spec.intermediate_size();
    if (same) continue;
    fail(fmt::format("an expert of {}x{} among those of {}x{}", expert.hidden_size,
                     expert.intermediate_size, spec.hidden_size, spec.intermediate_size()),
         "all are of one shape");
  }
  for (const FfnSpec& shared : spec.shared) {
    if (shared.hidden_size == spec.hidden_size) continue;
    fail(fmt::format("hidden size {} and a shared expert of {}", spec.hidden_size,
                     shared.hidden_size),
         "their outputs are added up");
  }
}

/// The options with all choices made: V of the experts, and one kernel for all GEMMs.
MoeOptions settled(const MoeSpec& spec, const MoePlace& place, MoeOptions options) {
  check_spec(spec);
  if (options.linear.reduce == Reduce::kFast) {
    throw Error(ExitCode::kUsage,
                "experts with --reduce fast (a mixture of experts is computed in the exact mode "
                "only so far); leave the option out");
  }
  options.expert_blocks = blocks_of(spec, options);
  if (!options.linear.kernel) {
    options.linear.kernel =
        choose_kernel(*place.world, *place.device, options.linear.dtype, moe_shapes(spec, options))
            .kernel;
  }
  return options;
}

LinearOptions of_experts(const MoeOptions& options) {
  LinearOptions linear = options.linear;
  linear.blocks = options.expert_blocks;
  return linear;
}

/// Sums of shared experts stay fp32, and each home gets its own rows.
MlpOptions of_shared(const MoeOptions& options) {
  MlpOptions mlp;
  mlp.linear = options.linear;
  mlp.linear.output_dtype = DType::kF32;
  mlp.output_rows = Rows::kScattered;
  return mlp;
}

/// Every row's experts in ascending order, of `kept` those that it names; empty: all.
void sort_choices(const Choices& routing, std::span<const std::uint8_t> kept, Choices& ascending) {
  ascending.resize(routing.rows, routing.top_k);
  std::ranges::fill(ascending.ids, Choices::kDropped);
  std::ranges::fill(ascending.weights, 0.0F);
  std::vector<std::size_t> order;
  for (std::int64_t row = 0; row < routing.rows; ++row) {
    const auto ids = routing.ids_of(row);
    order.clear();
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (kept.empty() || kept[as_size(row * routing.top_k) + i] != 0) order.push_back(i);
    }
    std::ranges::sort(order, {}, [ids](std::size_t i) { return ids[i]; });
    for (std::size_t i = 0; i < order.size(); ++i) {
      const std::size_t at = as_size(row * routing.top_k) + i;
      ascending.ids[at] = ids[order[i]];
      ascending.weights[at] = routing.weight(row, order[i]);
    }
  }
}

LoadShape load_shape(const RouteRule& rule, std::int64_t tokens, std::int64_t sequence_length) {
  const std::int64_t length =
      sequence_length > 0 ? sequence_length : std::max<std::int64_t>(1, tokens);
  if (sequence_length >= 0 && tokens % length == 0) {
    return {tokens / length, length, rule.experts, rule.top_k};
  }
  throw Error(
      ExitCode::kUsage,
      fmt::format("sequences of {} tokens in a batch of {} (they are whole); correct one of "
                  "them",
                  sequence_length, tokens));
}

}  // namespace

void check_choices(const Choices& given, const RouteRule& rule, std::int64_t rows) {
  const std::int64_t count = rows * rule.top_k;
  const bool whole = std::ssize(given.ids) == count && std::ssize(given.weights) == count;
  if (given.rows != rows || given.top_k != rule.top_k || !whole) {
    throw Error(ExitCode::kData,
                fmt::format("a routing of {} rows with {} experts each (expected {} and {}); give "
                            "topk_ids and topk_weights of this layer and these tokens",
                            given.rows, given.top_k, rows, rule.top_k));
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto ids = std::span(given.ids).subspan(as_size(row * rule.top_k), as_size(rule.top_k));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const bool outside = ids[i] < 0 || ids[i] >= rule.experts;
      const bool again = std::find(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(i),
                                   ids[i]) != ids.begin() + static_cast<std::ptrdiff_t>(i);
      if (!outside && !again) continue;
      throw Error(
          ExitCode::kData,
          fmt::format("expert {} in row {} of a given routing ({}); correct topk_ids", ids[i], row,
                      outside ? fmt::format("experts count from 0 to {}", rule.experts - 1)
                              : std::string("it is there twice")));
    }
  }
}

std::vector<WeightShape> moe_shapes(const MoeSpec& spec, const MoeOptions& options) {
  std::vector<WeightShape> shapes = ffn_shapes(spec.experts.front(), blocks_of(spec, options));
  for (const FfnSpec& shared : spec.shared) {
    for (const WeightShape& shape : ffn_shapes(shared, options.linear.blocks)) {
      if (std::ranges::find(shapes, shape) == shapes.end()) shapes.push_back(shape);
    }
  }
  return shapes;
}

Moe::Moe(const MoeSpec& spec, const TensorSource& source, const MoePlace& place,
         const MoeOptions& options)
    : hidden_(spec.hidden_size),
      balance_(spec.balance),
      place_(place),
      options_(settled(spec, place, options)),
      exchange_(*place.world, *place.device, {spec.route.experts, place.ep()}, place.etp->size(),
                spec.hidden_size, options.linear.dtype, options.dispatcher) {
  require_equal(*place.world, "the capacity of experts",
                spec.capacity ? text_of(*spec.capacity) : std::string("none"));
  if (spec.capacity) dropper_.emplace(*place.world, *spec.capacity, spec.route.experts);
  // Groups for experts and for shared ones aren't the same ranks: none of one may wait for a rank
  // that has failed in the other.
  run_agreed(*place.world, [&] {
    const int group = place.world->rank() / place.etp->size();
    experts_.emplace(spec, ExpertPlacement{spec.route.experts, place.ep()}.owned(group), source,
                     Place{place.device, place.etp}, of_experts(options_));
    router_.emplace(spec, source, *place.device);
    if (spec.shared_gate) {
      shared_gate_ = load_router(source, *spec.shared_gate, 1, hidden_, *place.device);
    }
  });
  run_agreed(*place.world, [&] {
    for (const FfnSpec& shared : spec.shared) {
      shared_.emplace_back(shared, source, Place{place.device, place.tp}, of_shared(options_));
    }
  });
}

Range Moe::home(std::int64_t group_rows) const {
  return even_part(group_rows, place_.tp->size(), place_.tp->rank());
}

void Moe::reserve(const RowCount& rows) {
  // Other ranks share an expert than a batch, and these may have reserved its rows already.
  experts_->share(std::max(rows.global, reserved_.global));
  check_rows(rows);
  if (rows.local <= reserved_.local && rows.global <= reserved_.global) return;
  const RowCount most{std::max(rows.local, reserved_.local),
                      std::max(rows.global, reserved_.global)};
  for (Mlp& shared : shared_) shared.share(most);
  const std::int64_t own = ceil_div(most.local, place_.tp->size());
  Device& device = *place_.device;
  const auto grow = [&device](Buffer& buffer, std::int64_t values) {
    const std::int64_t bytes = values * size_of(DType::kF32);
    if (buffer.bytes() < bytes) buffer = device.allocate(bytes);
  };
  router_->reserve(own);
  if (shared_gate_.bytes() > 0) grow(gate_logits_, own);
  experts_->reserve(most.global);
  shared_rows_.resize(shared_.size());
  for (std::size_t i = 0; i < shared_.size(); ++i) {
    shared_[i].reserve(most);
    grow(shared_rows_[i], own * hidden_);
  }
  reserved_ = most;
}

void Moe::forward(const std::byte* x, const RowCount& rows, std::byte* y,
                  std::int64_t sequence_length, SavedForBackward& saved) {
  LoadShape shape;
  run_agreed(*place_.world,
             [&] { shape = load_shape(router_->rule(), rows.global, sequence_length); });
  step(x, rows, y, &saved);
  sum_losses(shape, saved);
}

void Moe::step(const std::byte* x, const RowCount& rows, std::byte* y, SavedForBackward* saved) {
  const std::optional<Choices> given = std::exchange(replayed_, std::nullopt);
  std::exception_ptr failed;  // on this rank alone: the others learn of it with the plan
  try {
    reserve(rows);
    if (given) {
      check_choices(*given, router_->rule(), rows.local);
      routing_ = given->part(home(rows.local));
    } else {
      route(x, rows);
    }
    if (saved != nullptr) save(x, rows, given.has_value(), *saved);
  } catch (const NoAnswerError&) {
    throw;  // nothing can be agreed on any more
  } catch (const std::exception&) {
    failed = std::current_exception();
    routing_.resize(0, router_->rule().top_k);
  }
  {
    Phases phases(*place_.device);
    phases.enter("plan");
    drop(rows, saved, failed);
    sort_choices(routing_, kept(), ascending_);
    exchange_.plan(ascending_, failed, given.has_value());
    if (saved != nullptr) run_agreed(*place_.world, [&] { exchange_.copy_map(saved->map); });
  }
  run_experts(x, rows, y);
}

void Moe::route(const std::byte* x, const RowCount& rows) {
  Phases phases(*place_.device);
  phases.enter("route");
  const Range own = home(rows.local);
  const DType dtype = options_.linear.dtype;
  router_->route(x + own.begin * hidden_ * size_of(dtype), dtype, own.size(), routing_);
}

void Moe::save(const std::byte* x, const RowCount& rows, bool given, SavedForBackward& saved) {
  Phases phases(*place_.device);
  phases.enter("route");
  const DType dtype = options_.linear.dtype;
  const Range own = home(rows.local);
  const std::int64_t n = own.size();
  const std::byte* own_x = x + own.begin * hidden_ * size_of(dtype);
  Device& device = *place_.device;
  const auto room = [&device](Buffer& buffer, std::int64_t bytes) {
    if (buffer.bytes() < bytes) buffer = device.allocate(bytes);
  };
  const std::int64_t experts = router_->rule().experts;
  const std::int64_t row_bytes = hidden_ * size_of(dtype);
  room(saved.x, n * row_bytes);
  room(saved.scores, n * experts * size_of(DType::kF32));
  room(saved.log_sums, n * size_of(DType::kF32));
  saved.rows = n;
  saved.routing = routing_;
  if (n == 0) return;
  device.copy_rows(saved.x.data(), row_bytes, own_x, row_bytes, n, row_bytes);
  // A given routing has no logits of its own.
  Choices unused;
  if (given) router_->route(own_x, dtype, n, unused);
  router_->score(n, saved.scores.as<float>(), saved.log_sums.as<float>());
}

void Moe::sum_losses(const LoadShape& shape, SavedForBackward& saved) {
  const std::int64_t n = saved.rows;
  Device& device = *place_.device;
  run_agreed(*place_.world, [&] {
    saved.host_scores.resize(as_size(n * shape.experts));
    saved.host_log_sums.resize(as_size(n));
    if (n == 0) return;
    device.download(reinterpret_cast<std::byte*>(saved.host_scores.data()), saved.scores.data(),
                    n * shape.experts * size_of(DType::kF32));
    device.download(reinterpret_cast<std::byte*>(saved.host_log_sums.data()), saved.log_sums.data(),
                    n * size_of(DType::kF32));
  });
  Communicator& world = *place_.world;
  std::vector<std::int64_t> homes(as_size(world.size()));
  homes[as_size(world.rank())] = n;
  all_gather<std::int64_t>(world, homes);
  const std::int64_t first =
      std::accumulate(homes.begin(), homes.begin() + world.rank(), std::int64_t{0});
  saved.sequences = sum_loads(
      world, shape,
      {first, n, saved.host_scores.data(), saved.host_log_sums.data(), saved.routing.ids.data()});
  saved.loss = weighed_losses(balance_, saved.sequences, shape.top_k);
}

std::span<const std::uint8_t> Moe::kept() const {
  return dropper_ ? std::span(dropper_->kept()) : std::span<const std::uint8_t>();
}

/// What one rank fails in here all learn of with the plan, as of what it has failed in before.
void Moe::drop(const RowCount& rows, SavedForBackward* saved, std::exception_ptr& failed) {
  if (saved != nullptr) saved->kept.clear();
  if (!dropper_) return;
  try {
    dropper_->decide(routing_, rows.global, failed != nullptr);
    if (saved != nullptr) saved->kept = dropper_->kept();
  } catch (const NoAnswerError&) {
    throw;
  } catch (const AgreedError&) {
    throw;
  } catch (const std::exception&) {
    failed = std::current_exception();
    routing_.resize(0, router_->rule().top_k);
  }
}

void Moe::run_experts(const std::byte* x, const RowCount& rows, std::byte* y) {
  const std::int64_t row_bytes = hidden_ * size_of(options_.linear.dtype);
  const Range own = home(rows.local);
  exchange_.dispatch(x + own.begin * row_bytes);
  experts_->forward(exchange_, dropper_ ? dropper_->padded_rows() : 0);
  add_shared(x, rows);
  exchange_.combine(shared_views_, y + own.begin * row_bytes);
  if (place_.tp->size() == 1) return;
  Phases phases(*place_.device);
  phases.enter("gather");
  parts_.clear();
  for (int r = 0; r < place_.tp->size(); ++r) {
    parts_.push_back(even_part(rows.local, place_.tp->size(), r).size() * row_bytes);
  }
  place_.tp->all_gather_v(y, parts_);
}

/// Each shared expert's rows of this home, counted once whatever the grid.
void Moe::add_shared(const std::byte* x, const RowCount& rows) {
  shared_views_.clear();
  if (shared_.empty()) return;
  Phases phases(*place_.device);
  phases.enter("shared");
  const Range own = home(rows.local);
  const float* gate = nullptr;
  if (shared_gate_.bytes() > 0) {
    const std::byte* own_x = x + own.begin * hidden_ * size_of(options_.linear.dtype);
    place_.device->router_logits({own_x, options_.linear.dtype, own.size(), hidden_,
                                  shared_gate_.as<float>(), nullptr, 1, gate_logits_.as<float>()});
    gate = gate_logits_.as<float>();
  }
  for (std::size_t i = 0; i < shared_.size(); ++i) {
    shared_[i].forward(x, rows, shared_rows_[i].data());
    shared_views_.push_back({shared_rows_[i].as<float>(), gate});
  }
}

void Moe::wait() {
  place_.world->wait();  // with its deadline
  place_.tp->wait();
  place_.etp->wait();
  place_.device->synchronize();
}

}  // namespace gatefold
