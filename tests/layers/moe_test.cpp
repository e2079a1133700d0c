// A mixture of experts on inputs whose answers are known exactly, and bit for bit against a world
// of one for every grid, split, dispatcher and number of experts.
#include "layers/moe.h"

#include <gmock/gmock.h>
#include <mpi.h>

#include <cmath>
#include <limits>
#include <memory>
#include <set>

#include "integer_moe.h"
#include "one_device.h"
#include "parallel/agreement.h"
#include "parallel/grid.h"

namespace gatefold {
namespace {

using testing::as_floats;
using testing::as_size;
using testing::batch;
using testing::compare_with_one_device;
using testing::given_choices;
using ::testing::HasSubstr;
using testing::in_dtype;
using testing::IntegerMoe;
using testing::integers;
using testing::MemoryMoe;
using testing::MoeOutcome;
using testing::MoeTest;
using testing::name_of;
using testing::noise;
using testing::OneDevice;
using testing::options_for;
using testing::same_choices;
using testing::same_rows;
using testing::TestedMoe;

/// Where everything takes long: on a stand-in for a GPU.
bool slow() {
  static const bool is = testing::on_cuda() && testing::on_stand_in(*testing::testing_device());
  return is;
}

/// `some` always, and `others` where they don't take minutes.
std::vector<std::int64_t> few(std::vector<std::int64_t> some, std::vector<std::int64_t> others) {
  if (!slow()) some.insert(some.end(), others.begin(), others.end());
  return some;
}

/// Both, or one of them for each grid.
std::vector<Dispatcher> dispatchers(const Grid& grid) {
  if (!slow()) return {Dispatcher::kAllToAll, Dispatcher::kAllGather};
  const bool odd = (grid.tp().size() + grid.ep()) % 2 == 1;
  return {odd ? Dispatcher::kAllGather : Dispatcher::kAllToAll};
}

TEST_F(MoeTest, EveryGridSplitAndDispatcherGivesTheBitsOfOneDevice) {
  const MemoryMoe eight({.hidden = 96, .intermediate = 40, .experts = 8, .top_k = 2});
  OneDevice one(eight);
  for_every_grid([&](const Grid& grid) {
    const bool odd = (grid.tp().size() + grid.ep()) % 2 == 1;
    compare_with_one_device(one, grid,
                            options_for(odd ? DType::kF32 : DType::kBf16,
                                        odd ? Dispatcher::kAllGather : Dispatcher::kAllToAll),
                            few({0, 1, 65}, {3, 17, 64, 257}));
  });
}

TEST_F(MoeTest, SoDoExpertsThatDontDivideByTheRanks) {
  const MemoryMoe five({.hidden = 64, .intermediate = 24, .experts = 5, .top_k = 3, .shared = 1});
  const MemoryMoe four({.hidden = 200, .intermediate = 16, .experts = 4, .top_k = 4, .bias = true});
  const MemoryMoe sixty({.hidden = 64,
                         .intermediate = 8,
                         .experts = 60,
                         .top_k = 4,
                         .shared = 1,
                         .shared_gate = true});
  OneDevice one_five(five);
  OneDevice one_four(four);
  OneDevice one_sixty(sixty);
  for_every_grid([&](const Grid& grid) {
    for (const Dispatcher dispatcher : dispatchers(grid)) {
      compare_with_one_device(one_five, grid, options_for(DType::kBf16, dispatcher), {17});
      compare_with_one_device(one_four, grid, options_for(DType::kF32, dispatcher), few({3}, {64}));
      if (slow() && grid.tp().size() > 1) continue;
      compare_with_one_device(one_sixty, grid, options_for(DType::kF32, dispatcher),
                              few({17}, {1, 64}));
    }
  });
}

TEST_F(MoeTest, SoDoCorrectedGroupedAndInputWeighingRouters) {
  MemoryMoe corrected({.hidden = 64,
                       .intermediate = 24,
                       .experts = 8,
                       .top_k = 3,
                       .shared = 2,
                       .correction = true});
  corrected.spec.route.groups = 4;
  corrected.spec.route.kept_groups = 2;
  corrected.spec.route.group_score = GroupScore::kTwoBest;
  corrected.spec.route.normalize = true;
  corrected.spec.route.epsilon = 1e-20F;
  corrected.spec.route.scaling = 2.5F;
  MemoryMoe on_inputs({.hidden = 64,
                       .intermediate = 24,
                       .experts = 4,
                       .top_k = 1,
                       .shared = 1,
                       .weight_on = WeightOn::kInput});
  on_inputs.spec.route.score = Score::kSigmoidOfChosen;
  OneDevice one_corrected(corrected);
  OneDevice one_on_inputs(on_inputs);
  for_every_grid([&](const Grid& grid) {
    compare_with_one_device(one_corrected, grid, options_for(DType::kBf16), few({3}, {64}));
    compare_with_one_device(one_on_inputs, grid, options_for(DType::kBf16), few({3}, {64}));
  });
}

TEST_F(MoeTest, TwoThreadsGiveTheBitsOfOne) {
  if (testing::on_cuda()) GTEST_SKIP() << "a GPU has no threads of ours";
  const MemoryMoe moe({.hidden = 96, .intermediate = 40, .experts = 8, .top_k = 2, .shared = 1});
  const std::int64_t tokens = 65;
  const auto x = in_dtype(noise(tokens * 96, 3, 1.7F), DType::kBf16);
  const Grid grid(*world_, 1, world_->size());
  const Range own = split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())];
  TestedMoe one(moe, grid, options_for(DType::kBf16), 1);
  TestedMoe two(moe, grid, options_for(DType::kBf16), 2);
  EXPECT_TRUE(one.forward(x, own) == two.forward(x, own));
}

/// Remembers which tensors were read.
class NamedReads final : public TensorSource {
 public:
  explicit NamedReads(const TensorSource& inner) : inner_(inner) {}
  std::optional<TensorInfo> find(const std::string& name) const override {
    return inner_.find(name);
  }
  void read(const std::string& name, Range rows, Range cols, std::byte* out) const override {
    names_.insert(name);
    inner_.read(name, rows, cols, out);
  }
  std::string description() const override { return inner_.description(); }
  const std::set<std::string>& names() const { return names_; }
  void forget() const { names_.clear(); }

 private:
  const TensorSource& inner_;
  mutable std::set<std::string> names_;
};

TEST_F(MoeTest, StreamedExpertsGiveTheSameBitsAndThoseWithoutTokensArentRead) {
  const MemoryMoe moe({.hidden = 96, .intermediate = 40, .experts = 8, .top_k = 2, .shared = 1});
  const NamedReads source(moe.source);
  const std::int64_t tokens = 3;
  const auto x = in_dtype(noise(tokens * 96, 77, 1.7F), DType::kBf16);
  MoeOptions options = options_for(DType::kBf16);
  for_every_grid([&](const Grid& grid) {
    const Range own = split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())];
    Choices given;
    given.resize(own.size(), 2);
    for (std::int64_t t = 0; t < own.size(); ++t) {
      given.ids[as_size(2 * t)] = 6;
      given.ids[as_size(2 * t + 1)] = 1;
      given.weights[as_size(2 * t)] = given.weights[as_size(2 * t + 1)] = 0.5F;
    }
    options.linear.residency = Residency::kResident;
    TestedMoe resident(moe.spec, moe.source, grid, options);
    options.linear.residency = Residency::kStreamed;
    TestedMoe streamed(moe.spec, source, grid, options);
    EXPECT_TRUE(resident.forward(x, own, &given) == streamed.forward(x, own, &given))
        << name_of(grid);
  });
  for (std::int64_t e = 0; e < 8; ++e) {
    const bool used = e == 1 || e == 6;
    const bool read = source.names().contains("expert" + std::to_string(e) + ".down");
    // Other ranks read experts that live there.
    const bool all_here = world_->size() == 1;
    EXPECT_TRUE(all_here ? used == read : used || !read) << "expert " << e;
  }
}

TEST_F(MoeTest, NoPartOfAStreamedExpertStaysInMemoryAfterItsRows) {
  const MemoryMoe moe({.hidden = 64, .intermediate = 24, .experts = 8, .top_k = 2});
  const NamedReads source(moe.source);
  MoeOptions options = options_for(DType::kF32, Dispatcher::kAllToAll, 1);
  options.linear.residency = Residency::kStreamed;
  const Grid grid(*world_, 1, world_->size());
  const auto x = in_dtype(noise(32 * 64, 77, 1.7F), DType::kF32);
  const Range own = split_tokens(32, grid.dp_size())[as_size(grid.dp_index())];
  TestedMoe layer(moe.spec, source, grid, options);
  layer.forward(x, own);
  const std::set<std::string> first = source.names();
  source.forget();
  layer.forward(x, own);
  for (const std::string& name : first) {
    if (!name.starts_with("expert")) continue;
    EXPECT_TRUE(source.names().contains(name)) << name << " was kept";
  }
}

// ---- known answers ----

TEST_F(MoeTest, AGivenRoutingOfIntegersGivesTheExactSumOfExperts) {
  const std::int64_t tokens = 23;
  for (const std::int64_t experts : few({5, 8}, {4})) {
    const IntegerMoe integer(70, 20, experts, 3, experts != 5);
    for (const bool one : {false, true}) {
      const auto x = integers(tokens * 70, 9, 2);
      const Choices given = given_choices(tokens, experts, 3, one);
      const std::vector<float> expected = integer.expected(x, given);
      const auto x_bytes = in_dtype(x, DType::kF32);
      for_every_grid([&](const Grid& grid) {
        for (const Dispatcher dispatcher : dispatchers(grid)) {
          TestedMoe layer(integer.moe(), grid, options_for(DType::kF32, dispatcher));
          const Range own = split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())];
          const Choices mine = given.part(own);
          const auto y = as_floats(layer.forward(x_bytes, own, &mine), DType::kF32);
          const std::vector<float> wanted(expected.begin() + own.begin * 70,
                                          expected.begin() + own.end * 70);
          EXPECT_EQ(y, wanted) << name_of(grid) << ", " << experts << " experts";
        }
      });
    }
  }
}

TEST_F(MoeTest, ANanTokenIsNanInItsOwnRowOnly) {
  const MemoryMoe moe({.hidden = 64, .intermediate = 24, .experts = 8, .top_k = 3, .shared = 1});
  const std::int64_t tokens = 9;
  std::vector<float> x = noise(tokens * 64, 3, 1.7F);
  const auto clean = in_dtype(x, DType::kF32);
  x[4 * 64 + 5] = std::numeric_limits<float>::quiet_NaN();
  const auto dirty = in_dtype(x, DType::kF32);
  const Grid grid(*world_, 1, world_->size());
  const Range own = split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())];
  TestedMoe layer(moe, grid, options_for(DType::kF32));
  const auto before = as_floats(layer.forward(clean, own), DType::kF32);
  const auto after = as_floats(layer.forward(dirty, own), DType::kF32);
  for (std::int64_t t = own.begin; t < own.end; ++t) {
    for (std::int64_t c = 0; c < 64; ++c) {
      const auto i = as_size((t - own.begin) * 64 + c);
      EXPECT_TRUE(t == 4 ? std::isnan(after[i]) : after[i] == before[i]) << "token " << t;
    }
  }
}

TEST_F(MoeTest, AGivenRoutingMustNameDifferentExpertsThatAreThere) {
  const MemoryMoe moe({.hidden = 64, .intermediate = 24, .experts = 8, .top_k = 2});
  const Grid grid(*world_, world_->size(), 1);
  if (world_->size() > 4) return;  // etp beyond the blocks
  TestedMoe layer(moe, grid, options_for(DType::kF32));
  const auto x = in_dtype(noise(3 * 64, 3, 1.7F), DType::kF32);
  for (const auto& [id, text] : std::vector<std::pair<std::int32_t, std::string>>{
           {8, "expert 8 in row 1"}, {-1, "expert -1 in row 1"}, {2, "it is there twice"}}) {
    Choices given = given_choices(3, 8, 2, false);
    given.ids = {0, 1, 2, id, 4, 5};
    try {
      layer.forward(x, {0, 3}, &given);
      ADD_FAILURE() << "accepted " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kData);
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  }
}

TEST_F(MoeTest, AGivenRoutingThatIsWrongOnOneRankEndsTheStepOnAllAndTheNextIsRight) {
  const MemoryMoe moe({.hidden = 64, .intermediate = 24, .experts = 8, .top_k = 2});
  OneDevice one(moe);
  const std::int64_t tokens = 17;
  const MoeOptions options = options_for(DType::kF32);
  const Grid grid(*world_, 1, world_->size());
  const Range own = split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())];
  const auto x = batch(moe, DType::kF32, tokens);
  TestedMoe layer(moe, grid, options);
  Choices given = given_choices(own.size(), 8, 2, false);
  const int last = world_->size() - 1;
  if (world_->rank() == last) given.ids.back() = 8;
  try {
    layer.forward(x, own, &given);
    ADD_FAILURE() << "accepted expert 8 of rank " << last;
  } catch (const AgreedError& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
    EXPECT_THAT(error.what(), HasSubstr("expert 8 in row"));
    EXPECT_THAT(error.what(), HasSubstr(last > 0 ? "rank " + std::to_string(last) : ""));
  }
  EXPECT_TRUE(same_rows(layer.forward(x, own), one.outcome(options, tokens).y, own, 256));
}

TEST_F(MoeTest, AGivenRoutingOnSomeRanksOnlyIsRefusedOnAllAndTheNextStepIsRight) {
  if (world_->size() == 1) GTEST_SKIP() << "one rank has no others without a routing";
  const MemoryMoe moe({.hidden = 64, .intermediate = 24, .experts = 8, .top_k = 2});
  OneDevice one(moe);
  const std::int64_t tokens = 17;
  const MoeOptions options = options_for(DType::kF32);
  const Grid grid(*world_, 1, world_->size());
  const Range own = split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())];
  const auto x = batch(moe, DType::kF32, tokens);
  TestedMoe layer(moe, grid, options);
  const Choices given = given_choices(own.size(), 8, 2, false);
  for (const int alone : {0, world_->size() - 1}) {
    try {
      layer.forward(x, own, world_->rank() == alone ? &given : nullptr);
      ADD_FAILURE() << "accepted a routing of rank " << alone << " alone";
    } catch (const AgreedError& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      EXPECT_THAT(error.what(),
                  HasSubstr("rank " + std::to_string(alone) + " has a given routing and rank "));
    }
    EXPECT_TRUE(same_rows(layer.forward(x, own), one.outcome(options, tokens).y, own, 256));
  }
}

TEST_F(MoeTest, ASpecWhosePartsDontFitIsRefused) {
  const MemoryMoe moe({.hidden = 64, .intermediate = 24, .experts = 8, .top_k = 2, .shared = 1});
  if (world_->size() > 4) return;  // beyond the blocks
  const Grid grid(*world_, 1, 1);
  const auto refused = [&](const auto& change, const std::string& text) {
    MoeSpec spec = moe.spec;
    change(spec);
    try {
      TestedMoe layer(spec, moe.source, grid, options_for(DType::kF32));
      ADD_FAILURE() << "accepted " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  };
  refused([](MoeSpec& spec) { spec.experts.pop_back(); }, "7 experts and a router for 8");
  refused([](MoeSpec& spec) { spec.experts.clear(); }, "0 experts and a router for 8");
  refused([](MoeSpec& spec) { spec.experts.push_back(spec.experts[0]); }, "9 experts");
  refused([](MoeSpec& spec) { spec.experts[3].intermediate_size = 25; }, "an expert of 64x25");
  refused([](MoeSpec& spec) { spec.experts[7].hidden_size = 65; }, "an expert of 65x24");
  refused([](MoeSpec& spec) { spec.shared[0].hidden_size = 65; }, "a shared expert of 65");
}

TEST_F(MoeTest, MemoryThatLacksOnOneRankEndsTheStepOnAllAndTheNextIsRight) {
  const MemoryMoe moe({.hidden = 64,
                       .intermediate = 24,
                       .experts = 8,
                       .top_k = 2,
                       .shared = 1,
                       .shared_gate = true});
  OneDevice one(moe);
  const std::int64_t tokens = 17;
  const MoeOptions options = options_for(DType::kF32);
  const auto x = batch(moe, DType::kF32, tokens);
  // Of what ranks share they learn together that there is too little: here all is a device's.
  MpiOptions messages;
  messages.within_node = WithinNode::kMessages;
  const auto ranks = make_mpi_communicator(MPI_COMM_WORLD, messages);
  const Grid grid(*ranks, ranks->size() % 2 == 0 ? 2 : 1, ranks->size());
  const Range own = split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())];
  testing::ShortOfMemory device(testing::testing_device());
  const testing::DeviceGroup world(grid.world(), device);
  const testing::DeviceGroup tp(grid.tp(), device);
  const testing::DeviceGroup etp(grid.etp(), device);
  testing::OnDevice<std::byte> in(device, {x.begin() + own.begin * 256, x.begin() + own.end * 256});
  testing::OnDevice<std::byte> out(device, std::vector<std::byte>(as_size(own.size() * 256)));
  const auto succeeds = [&](Moe& layer) {
    try {
      layer.forward(in.data(), {own.size(), tokens}, out.data());
      layer.wait();
      return true;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kOutOfMemory) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("no memory left (planted)"));
      return false;
    }
  };
  int left = 0;
  for (bool enough = false; !enough; ++left) {
    Moe layer(moe.spec, moe.source, {&device, world.get(), tp.get(), etp.get()}, options);
    device.left = world_->rank() + 1 == world_->size() ? left : -1;
    enough = succeeds(layer);
    device.left = -1;
    EXPECT_TRUE(succeeds(layer)) << left;
    EXPECT_TRUE(same_rows(out.get(), one.outcome(options, tokens).y, own, 256)) << left;
  }
  EXPECT_GT(left, 8) << "what a step allocates";
}

TEST(DefaultExpertBlocks, AreAPowerOfTwoOfBlocksThatArentNarrow) {
  EXPECT_EQ(default_expert_blocks(2048), 8);
  EXPECT_EQ(default_expert_blocks(14336), 8);
  EXPECT_EQ(default_expert_blocks(1408), 4);
  EXPECT_EQ(default_expert_blocks(768), 4);
  EXPECT_EQ(default_expert_blocks(512), 2);
  EXPECT_EQ(default_expert_blocks(383), 1);
  EXPECT_EQ(default_expert_blocks(1), 1);
}

}  // namespace
}  // namespace gatefold
