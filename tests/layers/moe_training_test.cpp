// The training form of a mixture of experts: the y of the inference form, the same losses for every
// grid and split, and a map by which every row finds home.
#include <gmock/gmock.h>
#include <mpi.h>

#include <bit>
#include <numeric>

#include "plain_capacity.h"

namespace gatefold {
namespace {

using testing::as_floats;
using testing::as_size;
using testing::batch;
using ::testing::HasSubstr;
using testing::in_dtype;
using testing::Kept;
using testing::MemoryMoe;
using testing::MoeTest;
using testing::name_of;
using testing::noise;
using testing::options_for;
using testing::plainly_kept;
using testing::TestedMoe;

constexpr BalanceTerms kTerms{BalanceLoss::kMegatron, 0.01, true, 0.001};

/// A router of sigmoids with groups, or of softmaxes.
MemoryMoe trained_moe(bool sigmoid) {
  MemoryMoe moe({.hidden = 64,
                 .intermediate = 24,
                 .experts = sigmoid ? 8 : 5,
                 .top_k = 3,
                 .shared = 1,
                 .correction = sigmoid});
  moe.spec.balance = kTerms;
  if (!sigmoid) return moe;
  moe.spec.route.groups = 4;
  moe.spec.route.kept_groups = 2;
  moe.spec.route.normalize = true;
  return moe;
}

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<std::uint32_t>(value));
  return bits;
}

void expect_same_sums(const std::vector<LoadSums>& got, const std::vector<LoadSums>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t s = 0; s < got.size(); ++s) {
    EXPECT_EQ(got[s].tokens, expected[s].tokens);
    EXPECT_EQ(got[s].chosen, expected[s].chosen);
    EXPECT_EQ(got[s].best, expected[s].best);
    EXPECT_EQ(bits_of(got[s].scores), bits_of(expected[s].scores));
    EXPECT_EQ(bits_of({got[s].squares}), bits_of({expected[s].squares}));
  }
}

TEST_F(MoeTest, TheTrainingFormGivesTheSameYAndTheSameLossesOnEveryGrid) {
  const std::int64_t tokens = 24;
  for (const bool sigmoid : {false, true}) {
    const MemoryMoe moe = trained_moe(sigmoid);
    const MoeOptions options = options_for(sigmoid ? DType::kBf16 : DType::kF32);
    const std::int64_t row = 64 * size_of(options.linear.dtype);
    const auto x = batch(moe, options.linear.dtype, tokens);
    const auto alone = make_self_communicator();
    const Grid one_grid(*alone, 1, 1);
    TestedMoe one(moe, one_grid, options);
    SavedForBackward expected;
    const auto y = one.forward_training(x, {0, tokens}, 6, expected);
    EXPECT_TRUE(y == one.forward(x, {0, tokens}));
    ASSERT_EQ(expected.sequences.size(), 4U);
    EXPECT_EQ(expected.loss,
              0.01 * mean_sequence_loss(BalanceLoss::kMegatron, expected.sequences, 3) +
                  0.001 * z_loss(whole_batch(expected.sequences)));
    EXPECT_GT(expected.loss, 0.01);
    const auto scores = one.read<float>(expected.scores, tokens * moe.spec.route.experts);
    const auto log_sums = one.read<float>(expected.log_sums, tokens);
    for_every_grid([&](const Grid& grid) {
      SCOPED_TRACE(name_of(grid));
      TestedMoe layer(moe, grid, options);
      SavedForBackward saved;
      for (const auto& split : testing::token_splits(tokens, grid.dp_size())) {
        const Range own = split_tokens(tokens, grid.dp_size(), split)[as_size(grid.dp_index())];
        const auto got = layer.forward_training(x, own, 6, saved);
        EXPECT_TRUE(testing::same_rows(got, y, own, row));
        expect_same_sums(saved.sequences, expected.sequences);
        EXPECT_EQ(saved.loss, expected.loss);
        const Range part = layer.moe().home(own.size());
        const Range home{own.begin + part.begin, own.begin + part.end};
        EXPECT_EQ(saved.rows, home.size());
        EXPECT_TRUE(testing::same_choices(saved.routing, expected.routing, home));
        EXPECT_TRUE(
            testing::same_rows(layer.read<std::byte>(saved.x, home.size() * row), x, home, row));
        const std::int64_t e = moe.spec.route.experts;
        EXPECT_EQ(bits_of(layer.read<float>(saved.scores, home.size() * e)),
                  bits_of({scores.begin() + home.begin * e, scores.begin() + home.end * e}));
        EXPECT_EQ(bits_of(layer.read<float>(saved.log_sums, home.size())),
                  bits_of({log_sums.begin() + home.begin, log_sums.begin() + home.end}));
      }
    });
  }
}

/// Which tokens every rank is home to.
std::vector<Range> homes_of(Communicator& world, Range home) {
  std::vector<Range> homes(as_size(world.size()));
  homes[as_size(world.rank())] = home;
  all_gather<Range>(world, homes);
  return homes;
}

/// What every rank has sent to a group: numbers of tokens.
std::vector<std::vector<std::int64_t>> sent_to(Communicator& world, const RowMap& map,
                                               const std::vector<Range>& homes, int group,
                                               std::int64_t tokens) {
  const auto most = as_size(tokens);
  std::vector<std::vector<std::int64_t>> all(as_size(world.size()));
  for (int source = 0; source < world.size(); ++source) {
    // Every rank tells what it sent to every group, and each keeps what concerns its own.
    std::vector<std::int64_t> told((most + 1) * (map.sent_begin.size() - 1), -1);
    if (source == world.rank()) {
      for (std::size_t g = 0; g + 1 < map.sent_begin.size(); ++g) {
        std::size_t at = g * (most + 1);
        for (std::int64_t i = map.sent_begin[g]; i < map.sent_begin[g + 1]; ++i) {
          told[at++] = homes[as_size(source)].begin + map.sent[as_size(i)];
        }
      }
    }
    world.broadcast(reinterpret_cast<std::byte*>(told.data()),
                    static_cast<std::int64_t>(told.size() * sizeof(std::int64_t)), source);
    for (std::size_t at = as_size(group) * (most + 1); told[at] >= 0; ++at) {
      all[as_size(source)].push_back(told[at]);
    }
  }
  return all;
}

/// Over all ranks' tokens: an expert's rows of the map are those that it has kept, in token order.
void expect_rows_home(const Grid& grid, const RowMap& map, Range home, const Choices& routing,
                      const Kept& kept) {
  const auto homes = homes_of(grid.world(), home);
  const int group = grid.world().rank() / grid.etp().size();
  const auto sent = sent_to(grid.world(), map, homes, group, routing.rows);
  std::vector<std::int64_t> came;
  for (std::size_t source = 0; source < sent.size(); ++source) {
    EXPECT_EQ(map.rows_of_source[source], std::ssize(sent[source]));
    came.insert(came.end(), sent[source].begin(), sent[source].end());
  }
  const Range experts = ExpertPlacement{8, static_cast<int>(grid.ep())}.owned(group);
  ASSERT_EQ(std::ssize(map.expert_begin), experts.size() + 1);
  for (std::int64_t expert = experts.begin; expert < experts.end; ++expert) {
    auto at = map.expert_begin[as_size(expert - experts.begin)];
    for (std::int64_t token = 0; token < routing.rows; ++token) {
      const auto ids = routing.ids_of(token);
      const auto choice = std::ranges::find(ids, expert) - ids.begin();
      if (choice == std::ssize(ids) || kept[as_size(token * routing.top_k + choice)] == 0) continue;
      ASSERT_LT(at, map.expert_begin[as_size(expert - experts.begin) + 1]);
      EXPECT_EQ(came[as_size(map.received[as_size(at)])], token);
      EXPECT_EQ(map.weights[as_size(at)], routing.weight(token, as_size(choice)));
      ++at;
    }
    EXPECT_EQ(at, map.expert_begin[as_size(expert - experts.begin) + 1]);
  }
}

TEST_F(MoeTest, TheMapOfATrainingStepLeadsEveryRowOfAnExpertHome) {
  const std::int64_t tokens = 23;
  const MemoryMoe moe = trained_moe(true);
  const MoeOptions options = options_for(DType::kF32);
  const auto x = batch(moe, DType::kF32, tokens);
  const auto alone = make_self_communicator();
  const Grid one_grid(*alone, 1, 1);
  TestedMoe one(moe, one_grid, options);
  one.forward(x, {0, tokens});
  const Choices routing = one.moe().routing();
  for_every_grid([&](const Grid& grid) {
    SCOPED_TRACE(name_of(grid));
    TestedMoe layer(moe, grid, options);
    SavedForBackward saved;
    const Range own = split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())];
    layer.forward_training(x, own, 0, saved);
    EXPECT_TRUE(saved.kept.empty());
    const Range part = layer.moe().home(own.size());
    expect_rows_home(grid, saved.map, {own.begin + part.begin, own.begin + part.end}, routing,
                     Kept(routing.ids.size(), 1));
  });
}

TEST_F(MoeTest, ATrainingStepWithACapacityKeepsWhatIsComputedAndScoresWhatWasChosen) {
  const std::int64_t tokens = 24;
  const MemoryMoe moe = trained_moe(true);
  const MoeOptions options = options_for(DType::kF32);
  const auto x = batch(moe, DType::kF32, tokens);
  const auto alone = make_self_communicator();
  const Grid one_grid(*alone, 1, 1);
  TestedMoe dropless(moe, one_grid, options);
  SavedForBackward all;
  dropless.forward_training(x, {0, tokens}, 6, all);
  for (const Capacity& capacity :
       {Capacity{.factor = 0.7},
        Capacity{.rows = 2, .drop = DropBy::kProbability, .sequence_length = 6, .pad = true}}) {
    const Kept kept = plainly_kept(all.routing, capacity, 8);
    ASSERT_GT(std::ranges::count(kept, 0), 0);
    MoeSpec spec = moe.spec;
    spec.capacity = capacity;
    TestedMoe one(spec, moe.source, one_grid, options);
    const auto y = one.forward(x, {0, tokens});
    for_every_grid([&](const Grid& grid) {
      SCOPED_TRACE(name_of(grid) + ", " + text_of(capacity));
      TestedMoe layer(spec, moe.source, grid, options);
      SavedForBackward saved;
      for (const auto& split : testing::token_splits(tokens, grid.dp_size())) {
        const Range own = split_tokens(tokens, grid.dp_size(), split)[as_size(grid.dp_index())];
        EXPECT_TRUE(testing::same_rows(layer.forward_training(x, own, 6, saved), y, own, 64 * 4));
        expect_same_sums(saved.sequences, all.sequences);
        EXPECT_EQ(saved.loss, all.loss);
        const Range part = layer.moe().home(own.size());
        const Range home{own.begin + part.begin, own.begin + part.end};
        EXPECT_TRUE(testing::same_choices(saved.routing, all.routing, home));
        EXPECT_EQ(saved.kept, Kept(kept.begin() + home.begin * 3, kept.begin() + home.end * 3));
        expect_rows_home(grid, saved.map, home, all.routing, kept);
      }
      // What was saved stays when the layer goes on.
      const Kept before = saved.kept;
      layer.forward(in_dtype(noise(tokens * 64, 5, 1.7F), DType::kF32),
                    split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())]);
      EXPECT_EQ(saved.kept, before);
    });
  }
}

TEST_F(MoeTest, InferenceAllocatesNothingOfTheTrainingForm) {
  const std::int64_t tokens = 24;
  const MemoryMoe moe = trained_moe(true);
  const MoeOptions options = options_for(DType::kF32);
  const Grid grid(*world_, 1, world_->size());
  const Range own = split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())];
  const auto x = batch(moe, DType::kF32, tokens);
  testing::CountingDevice device(testing::testing_device());
  const testing::DeviceGroup world(grid.world(), device);
  const testing::DeviceGroup tp(grid.tp(), device);
  const testing::DeviceGroup etp(grid.etp(), device);
  testing::OnDevice<std::byte> in(device, {x.begin() + own.begin * 256, x.begin() + own.end * 256});
  testing::OnDevice<std::byte> out(device, std::vector<std::byte>(as_size(own.size() * 256)));
  const RowCount rows{own.size(), tokens};
  const auto allocated = [&](const auto& step) {
    const std::int64_t bytes = device.allocated_bytes();
    step();
    return device.allocated_bytes() - bytes;
  };
  Moe layer(moe.spec, moe.source, {&device, world.get(), tp.get(), etp.get()}, options);
  const auto inference = [&] { layer.forward(in.data(), rows, out.data()); };
  SavedForBackward saved;
  const auto training = [&] { layer.forward(in.data(), rows, out.data(), 6, saved); };
  EXPECT_GT(allocated(inference), 0);
  EXPECT_EQ(allocated(inference), 0);
  const std::int64_t kept = own.size() * (64 + 8 + 1) * size_of(DType::kF32);
  EXPECT_EQ(allocated(training), kept) << "x, scores, log-sums";
  EXPECT_EQ(allocated(training), 0);
  EXPECT_EQ(allocated(inference), 0);
  layer.wait();
}

TEST_F(MoeTest, ATrainingStepOfAGivenRoutingCountsItAndScoresTheRouters) {
  const std::int64_t tokens = 6;
  const MemoryMoe moe = trained_moe(false);
  const MoeOptions options = options_for(DType::kF32);
  const Grid grid(*world_, 1, world_->size());
  const Range own = split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())];
  const auto x = batch(moe, DType::kF32, tokens);
  TestedMoe layer(moe, grid, options);
  SavedForBackward routed;
  layer.forward_training(x, own, 0, routed);
  Choices given;
  given.resize(own.size(), 3);
  for (std::size_t i = 0; i < given.ids.size(); ++i) {
    given.ids[i] = static_cast<std::int32_t>(i % 3 + 2);
    given.weights[i] = 0.25F;
  }
  layer.forward(in_dtype(noise(tokens * 64, 5, 1.7F), DType::kF32), own);  // leaves its own logits
  SavedForBackward replayed;
  layer.forward_training(x, own, 0, replayed, &given);
  ASSERT_EQ(replayed.sequences.size(), 1U);
  EXPECT_THAT(replayed.sequences[0].chosen, ::testing::ElementsAre(0, 0, 6, 6, 6));
  EXPECT_THAT(replayed.sequences[0].best, ::testing::ElementsAre(0, 0, 6, 0, 0));
  EXPECT_EQ(bits_of(replayed.sequences[0].scores), bits_of(routed.sequences[0].scores));
}

TEST_F(MoeTest, SequencesThatArentWholeAreRefusedAndTheNextStepIsRight) {
  const MemoryMoe moe = trained_moe(false);
  const Grid grid(*world_, 1, world_->size());
  const Range own = split_tokens(6, grid.dp_size())[as_size(grid.dp_index())];
  const auto x = batch(moe, DType::kF32, 6);
  TestedMoe layer(moe, grid, options_for(DType::kF32));
  SavedForBackward saved;
  try {
    layer.forward_training(x, own, 4, saved);
    ADD_FAILURE() << "accepted sequences of 4 tokens in 6";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_THAT(error.what(), HasSubstr("sequences of 4 tokens in a batch of 6"));
  }
  EXPECT_TRUE(layer.forward_training(x, own, 3, saved) == layer.forward(x, own));
}

TEST_F(MoeTest, ABiasThatIsUpdatedFromASavedStepMovesTheNextOne) {
  const std::int64_t tokens = 24;
  const MemoryMoe moe = trained_moe(true);
  const Grid grid(*world_, 1, world_->size());
  const Range own = split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())];
  const auto x = batch(moe, DType::kF32, tokens);
  TestedMoe layer(moe, grid, options_for(DType::kF32));
  SavedForBackward saved;
  layer.forward_training(x, own, 0, saved);
  const double before = busiest_expert(whole_batch(saved.sequences));
  for (int step = 0; step < 40; ++step) {
    std::vector<float> bias = layer.moe().correction_bias();
    update_correction_bias(whole_batch(saved.sequences), 0.02F, bias);
    layer.set_correction_bias(bias);
    layer.forward_training(x, own, 0, saved);
  }
  EXPECT_LT(busiest_expert(whole_batch(saved.sequences)), before);
}

TEST_F(MoeTest, OneRanksOtherLengthOfSequencesEndsTheStepOnAllAndTheNextIsRight) {
  if (world_->size() == 1) GTEST_SKIP() << "one rank has no others with another length";
  const MemoryMoe moe = trained_moe(false);
  const MoeOptions options = options_for(DType::kF32);
  const std::int64_t tokens = 24;
  const auto x = batch(moe, DType::kF32, tokens);
  const Grid grid(*world_, 1, world_->size());
  const Range own = split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())];
  TestedMoe layer(moe, grid, options);
  SavedForBackward saved;
  const auto y = layer.forward_training(x, own, 6, saved);
  const bool last = world_->rank() + 1 == world_->size();
  for (const auto& [length, text] :
       {std::pair{4, "sequences of 4 tokens on rank "}, {7, "sequences of 7 tokens in a batch"}}) {
    try {
      layer.forward_training(x, own, last ? length : 6, saved);
      ADD_FAILURE() << "accepted " << length;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
    EXPECT_TRUE(layer.forward_training(x, own, 6, saved) == y);
  }
}

}  // namespace
}  // namespace gatefold
