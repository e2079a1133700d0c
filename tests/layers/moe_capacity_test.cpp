// A mixture of experts with a capacity: what is dropped adds nothing and changes nothing else, and
// every grid gives the bits of one device.
#include <gmock/gmock.h>

#include "integer_moe.h"
#include "parallel/agreement.h"
#include "plain_capacity.h"

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
using testing::Kept;
using testing::MemoryMoe;
using testing::name_of;
using testing::OneDevice;
using testing::options_for;
using testing::plainly_kept;
using testing::same_rows;
using testing::TestedMoe;
using MoeCapacity = testing::MoeTest;

/// Where everything takes long: on a stand-in for a GPU.
bool slow() {
  static const bool is = testing::on_cuda() && testing::on_stand_in(*testing::testing_device());
  return is;
}

Dispatcher dispatcher_for(const Grid& grid) {
  const bool odd = (grid.tp().size() + grid.ep()) % 2 == 1;
  return odd ? Dispatcher::kAllGather : Dispatcher::kAllToAll;
}

TEST_F(MoeCapacity, WhatIsDroppedAddsNothingAndTheOthersWeighWhatTheyDid) {
  const std::int64_t tokens = 24;
  const auto x = integers(tokens * 70, 9, 2);
  const auto x_bytes = in_dtype(x, DType::kF32);
  const Capacity capacities[] = {
      {.rows = 2, .drop = DropBy::kProbability, .sequence_length = 8, .pad = true},
      {.rows = 1},
      {.factor = 0.8, .drop = DropBy::kProbability}};
  for (const bool one : {false, true}) {
    const IntegerMoe integer(70, 20, 5, 3, !one);
    const Choices given = given_choices(tokens, 5, 3, one);
    for (const Capacity& capacity : std::span(capacities).first(one || slow() ? 1 : 3)) {
      if (one && slow()) continue;
      const Kept kept = plainly_kept(given, capacity, 5);
      const std::vector<float> expected = integer.expected(x, given, kept);
      MoeSpec spec = integer.moe().spec;
      spec.capacity = capacity;
      for_every_grid([&](const Grid& grid) {
        TestedMoe layer(spec, integer.moe().source, grid,
                        options_for(DType::kF32, dispatcher_for(grid)));
        for (const auto& split : testing::token_splits(tokens, grid.dp_size())) {
          const Range own = split_tokens(tokens, grid.dp_size(), split)[as_size(grid.dp_index())];
          const Choices mine = given.part(own);
          const auto y = as_floats(layer.forward(x_bytes, own, &mine), DType::kF32);
          EXPECT_EQ(y, std::vector<float>(expected.begin() + own.begin * 70,
                                          expected.begin() + own.end * 70))
              << name_of(grid) << ", " << text_of(capacity);
          EXPECT_EQ(layer.moe().counts().dropped, std::ranges::count(kept, 0));
          const Range home = layer.moe().home(own.size());
          const auto first = kept.begin() + (own.begin + home.begin) * 3;
          EXPECT_TRUE(
              std::ranges::equal(layer.moe().kept(), std::span(first, as_size(home.size() * 3))));
        }
      });
    }
  }
}

TEST_F(MoeCapacity, EveryGridAndSplitGivesTheBitsOfOneDevice) {
  MemoryMoe first({.hidden = 96, .intermediate = 40, .experts = 8, .top_k = 2});
  MemoryMoe best({.hidden = 64, .intermediate = 24, .experts = 5, .top_k = 3, .shared = 1});
  first.spec.capacity = Capacity{.factor = 0.6};
  best.spec.capacity = Capacity{.factor = 0.75, .drop = DropBy::kProbability};
  OneDevice one_first(first);
  OneDevice one_best(best);
  for_every_grid([&](const Grid& grid) {
    const MoeOptions options = options_for(DType::kBf16, dispatcher_for(grid));
    if (!slow()) compare_with_one_device(one_first, grid, options, {0, 65});
    compare_with_one_device(one_best, grid, options, {1, 17});
  });
}

TEST_F(MoeCapacity, PaddingAndACapacityOfAllTokensChangeNoBit) {
  const MemoryMoe moe({.hidden = 96, .intermediate = 40, .experts = 8, .top_k = 2, .shared = 1});
  MoeSpec tight = moe.spec;
  MoeSpec padded = moe.spec;
  MoeSpec ample = moe.spec;
  tight.capacity = Capacity{.factor = 0.6};
  padded.capacity = Capacity{.factor = 0.6, .pad = true};
  ample.capacity = Capacity{.factor = 8, .drop = DropBy::kProbability, .pad = true};
  const Grid grid(*world_, 1, world_->size());
  const MoeOptions options = options_for(DType::kBf16);
  TestedMoe dropless(moe, grid, options);
  TestedMoe tight_layer(tight, moe.source, grid, options);
  TestedMoe padded_layer(padded, moe.source, grid, options);
  TestedMoe ample_layer(ample, moe.source, grid, options);
  for (const std::int64_t tokens :
       slow() ? std::vector<std::int64_t>{65} : std::vector<std::int64_t>{0, 1, 3, 65}) {
    const auto x = batch(moe, DType::kBf16, tokens);
    const Range own = split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())];
    const auto all = dropless.forward(x, own);
    EXPECT_EQ(dropless.moe().counts().dropped, 0);
    EXPECT_TRUE(dropless.moe().kept().empty());
    EXPECT_TRUE(ample_layer.forward(x, own) == all) << tokens;
    EXPECT_EQ(ample_layer.moe().counts().dropped, 0);
    EXPECT_TRUE(padded_layer.forward(x, own) == tight_layer.forward(x, own)) << tokens;
    EXPECT_EQ(tight_layer.moe().counts().dropped, padded_layer.moe().counts().dropped);
    EXPECT_TRUE(tokens != 65 || tight_layer.moe().counts().dropped > 0);
  }
}

TEST_F(MoeCapacity, RanksWithOtherCapacitiesAreRefusedOnAll) {
  const MemoryMoe moe({.hidden = 64, .intermediate = 24, .experts = 8, .top_k = 2});
  const bool last = world_->rank() + 1 == world_->size();
  const Grid grid(*world_, 1, world_->size());
  const auto refused = [&](const std::optional<Capacity>& ours, const char* first,
                           const char* second) {
    MoeSpec spec = moe.spec;
    spec.capacity = last ? ours : Capacity{.factor = 1.25};
    try {
      TestedMoe layer(spec, moe.source, grid, options_for(DType::kF32));
      EXPECT_EQ(world_->size(), 1) << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      EXPECT_THAT(error.what(), HasSubstr("the capacity of experts"));
      EXPECT_THAT(error.what(), HasSubstr(first));
      EXPECT_THAT(error.what(), HasSubstr(second));
    }
  };
  const char* theirs = "1.25 x the mean rows of an expert, by position";
  refused(Capacity{.factor = 1.5}, theirs, "1.5 x the mean");
  refused(Capacity{.factor = 1.25, .drop = DropBy::kProbability}, theirs, "by probability");
  refused(std::nullopt, theirs, "none");
}

TEST_F(MoeCapacity, ARankThatFailsEndsTheStepOnAllAndTheNextIsRight) {
  MemoryMoe moe({.hidden = 64, .intermediate = 24, .experts = 8, .top_k = 2});
  moe.spec.capacity = Capacity{.factor = 0.5, .drop = DropBy::kProbability};
  OneDevice one(moe);
  const std::int64_t tokens = 17;
  const MoeOptions options = options_for(DType::kF32);
  const Grid grid(*world_, 1, world_->size());
  const Range own = split_tokens(tokens, grid.dp_size())[as_size(grid.dp_index())];
  const auto x = batch(moe, DType::kF32, tokens);
  TestedMoe layer(moe, grid, options);
  Choices given = given_choices(own.size(), 8, 2, false);
  if (world_->rank() + 1 == world_->size()) given.ids.back() = 8;
  try {
    layer.forward(x, own, &given);
    ADD_FAILURE() << "accepted expert 8";
  } catch (const AgreedError& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
    EXPECT_THAT(error.what(), HasSubstr("expert 8 in row"));
  }
  EXPECT_TRUE(same_rows(layer.forward(x, own), one.outcome(options, tokens).y, own, 256));
}

}  // namespace
}  // namespace gatefold
