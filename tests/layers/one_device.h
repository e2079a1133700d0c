// What one device gives for a mixture of experts, and how a grid's part of it is compared.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "from_rank_0.h"
#include "tested_moe.h"

namespace gatefold::testing {

inline std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

struct MoeOutcome {
  std::vector<std::byte> y;
  Choices routing;
};

/// The tokens that layers of this width are compared on.
inline std::vector<std::byte> batch(const MemoryMoe& moe, DType dtype, std::int64_t tokens) {
  return in_dtype(noise(tokens * moe.spec.hidden_size, 77, 1.7F), dtype);
}

/// What a world of one gives for batches, each computed once, by rank 0 for all.
class OneDevice {
 public:
  /// `moe` must outlive it.
  explicit OneDevice(const MemoryMoe& moe) : moe_(moe), grid_(*alone_, 1, 1) {}

  const MemoryMoe& moe() const { return moe_; }
  /// Collective. `options` may differ in the dtype, and in what makes no difference.
  const MoeOutcome& outcome(const MoeOptions& options, std::int64_t tokens) {
    const DType dtype = options.linear.dtype;
    MoeOutcome& known = outcomes_[{dtype, tokens}];
    if (known.routing.top_k > 0) return known;
    if (is_rank_0()) {
      std::unique_ptr<TestedMoe>& layer = layers_[dtype];
      if (layer == nullptr) layer = std::make_unique<TestedMoe>(moe_, grid_, options);
      known.y = layer->forward(batch(moe_, dtype, tokens), {0, tokens});
      known.routing = layer->moe().routing();
    }
    from_rank_0(known.y);
    from_rank_0(known.routing.ids);
    from_rank_0(known.routing.weights);
    known.routing.rows = tokens;
    known.routing.top_k = moe_.spec.route.top_k;
    return known;
  }

 private:
  const MemoryMoe& moe_;
  std::unique_ptr<Communicator> alone_ = make_self_communicator();
  Grid grid_;
  std::map<DType, std::unique_ptr<TestedMoe>> layers_;
  std::map<std::pair<DType, std::int64_t>, MoeOutcome> outcomes_;
};

/// Even, all tokens in the last group, and 5 : 2 : 1 : 0 : 5 …
inline std::vector<std::vector<std::int64_t>> token_splits(std::int64_t tokens,
                                                           std::int64_t groups) {
  std::vector<std::int64_t> last(as_size(groups), 0);
  last.back() = tokens;
  constexpr std::array<std::int64_t, 4> kParts = {5, 2, 1, 0};
  std::vector<std::int64_t> uneven;
  std::int64_t left = tokens;
  for (std::int64_t g = 0; g < groups; ++g) {
    uneven.push_back(g + 1 == groups ? left : std::min(left, tokens * kParts[as_size(g % 4)] / 8));
    left -= uneven.back();
  }
  return {{}, last, uneven};
}

inline bool same_rows(const std::vector<std::byte>& part, const std::vector<std::byte>& whole,
                      Range rows, std::int64_t row_bytes) {
  return std::equal(part.begin(), part.end(), whole.begin() + rows.begin * row_bytes,
                    whole.begin() + rows.end * row_bytes);
}

/// The layer's choices for its home rows are those of one device, ids and weights.
inline bool same_choices(const Choices& part, const Choices& whole, Range rows) {
  const auto begin = static_cast<std::ptrdiff_t>(rows.begin * whole.top_k);
  const auto end = static_cast<std::ptrdiff_t>(rows.end * whole.top_k);
  const auto bits = [](float value) { return std::bit_cast<std::uint32_t>(value); };
  return part.rows == rows.size() &&
         std::equal(part.ids.begin(), part.ids.end(), whole.ids.begin() + begin,
                    whole.ids.begin() + end) &&
         std::equal(part.weights.begin(), part.weights.end(), whole.weights.begin() + begin,
                    whole.weights.begin() + end,
                    [&](float a, float b) { return bits(a) == bits(b); });
}

/// Every split of some tokens over a grid gives the bits of one device, and its choices.
inline void compare_with_one_device(OneDevice& one, const Grid& grid, const MoeOptions& options,
                                    const std::vector<std::int64_t>& token_counts) {
  const MemoryMoe& moe = one.moe();
  const DType dtype = options.linear.dtype;
  const std::int64_t row_bytes = moe.spec.hidden_size * size_of(dtype);
  TestedMoe layer(moe, grid, options);
  for (const std::int64_t tokens : token_counts) {
    const std::vector<std::byte> x = batch(moe, dtype, tokens);
    const MoeOutcome& expected = one.outcome(options, tokens);
    for (const auto& split : token_splits(tokens, grid.dp_size())) {
      const Range own = split_tokens(tokens, grid.dp_size(), split)[as_size(grid.dp_index())];
      const auto y = layer.forward(x, own);
      EXPECT_TRUE(same_rows(y, expected.y, own, row_bytes))
          << name_of(grid) << ", " << tokens << " tokens, split "
          << ::testing::PrintToString(split);
      const Range home = layer.moe().home(own.size());
      EXPECT_TRUE(same_choices(layer.moe().routing(), expected.routing,
                               {own.begin + home.begin, own.begin + home.end}))
          << name_of(grid) << ", " << tokens << " tokens";
    }
  }
}

}  // namespace gatefold::testing
