// A mixture of experts gives the same bits as often as it is asked, whatever came between and
// however late its ranks are: twenty layers, each twenty times, on more ranks than there are cores.
#include <gtest/gtest.h>
#include <mpi.h>

#include <array>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "one_device.h"
#include "parallel/grid.h"
#include "parallel/mpi_interop.h"

namespace gatefold::testing {
namespace {

constexpr int kPicks = 20;
constexpr int kRepeats = 20;
constexpr std::int64_t kBlocks = 8;

/// What one of the twenty computes.
struct Pick {
  std::int64_t tp, ep;
  MoeShape shape;
  MoeOptions options;
  std::int64_t tokens;
  std::size_t split;  // of token_splits()
};

/// The same on every rank and in every run: a generator's numbers are fixed by the standard, a
/// distribution's are not.
template <typename T, std::size_t kCount>
T one_of(const std::array<T, kCount>& values, std::mt19937& random) {
  return values[random() % kCount];
}

Pick pick(int number, std::int64_t ranks) {
  std::mt19937 random(static_cast<std::uint32_t>(1000 + number));
  std::vector<std::int64_t> divisors;
  for (std::int64_t d = 1; d <= ranks; ++d) {
    if (ranks % d == 0) divisors.push_back(d);
  }
  Pick made{};
  made.tp = divisors[random() % divisors.size()];
  made.ep = divisors[random() % divisors.size()];
  made.shape = {.hidden = one_of<std::int64_t, 3>({64, 96, 200}, random),
                .intermediate = one_of<std::int64_t, 2>({16, 40}, random),
                .experts = one_of<std::int64_t, 4>({4, 5, 8, 60}, random),
                .top_k = one_of<std::int64_t, 4>({1, 2, 3, 4}, random),
                .bias = random() % 2 == 0,
                .shared = one_of<std::int64_t, 3>({0, 1, 2}, random)};
  made.shape.shared_gate = made.shape.shared > 0 && random() % 2 == 0;
  made.shape.correction = random() % 2 == 0;
  made.options = options_for(
      one_of<DType, 3>({DType::kF32, DType::kBf16, DType::kF16}, random),
      one_of<Dispatcher, 2>({Dispatcher::kAllToAll, Dispatcher::kAllGather}, random), kBlocks);
  made.tokens = one_of<std::int64_t, 5>({1, 3, 17, 33, 64}, random);
  made.split = random() % 3;
  return made;
}

std::string text(int number, const Pick& pick) {
  return "pick " + std::to_string(number) + ": tp " + std::to_string(pick.tp) + ", ep " +
         std::to_string(pick.ep) + ", " + std::to_string(pick.shape.experts) + " experts, " +
         std::to_string(pick.tokens) + " tokens, split " + std::to_string(pick.split);
}

/// A layer over a grid that knows what one device gives for a batch.
class Repeated {
 public:
  Repeated(const Pick& pick, Communicator& world)
      : pick_(pick),
        moe_(pick.shape),
        grid_(world, pick.tp, pick.ep),
        one_(moe_),
        layer_(moe_, grid_, pick.options) {}

  /// Whether y and the routing of so many tokens are those of one device.
  bool is_right(std::int64_t tokens) {
    const DType dtype = pick_.options.linear.dtype;
    const MoeOutcome& expected = one_.outcome(pick_.options, tokens);
    const auto split = token_splits(tokens, grid_.dp_size())[pick_.split];
    const Range own = split_tokens(tokens, grid_.dp_size(), split)[as_size(grid_.dp_index())];
    const auto y = layer_.forward(batch(moe_, dtype, tokens), own);
    const Range home = layer_.moe().home(own.size());
    return same_rows(y, expected.y, own, pick_.shape.hidden * size_of(dtype)) &&
           same_choices(layer_.moe().routing(), expected.routing,
                        {own.begin + home.begin, own.begin + home.end});
  }

 private:
  Pick pick_;
  MemoryMoe moe_;
  Grid grid_;
  OneDevice one_;
  TestedMoe layer_;
};

TEST(MoeRepeats, TwentyPicksTwentyTimesEachGiveTheBitsOfOneDevice) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  std::mt19937 lateness(static_cast<std::uint32_t>(world->rank()));
  for (int number = 0; number < kPicks; ++number) {
    const Pick chosen = pick(number, world->size());
    Repeated repeated(chosen, *world);
    int right = 0;
    for (int i = 0; i < kRepeats; ++i) {
      std::this_thread::sleep_for(std::chrono::microseconds(lateness() % 2000));
      if (repeated.is_right(chosen.tokens)) ++right;
      // What another batch leaves behind is nobody's.
      if (i % 5 == 0 && !repeated.is_right(chosen.tokens / 2)) --right;
    }
    EXPECT_EQ(right, kRepeats) << text(number, chosen);
  }
}

}  // namespace
}  // namespace gatefold::testing
