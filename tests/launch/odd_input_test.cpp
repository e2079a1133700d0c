// What the program makes of input that is wrong, empty or unusual.
#include "tests/launch/program_testing.h"

namespace gatefold {
namespace {

using ::testing::ElementsAre;

class OddInput : public Program {};

TEST_F(OddInput, AFileWithoutTokensIsRefused) {
  const std::string model = " --model " + kFixture + " --input " + path("x.safetensors");
  write_tensors(path("x.safetensors"), {{"x", "F32", {0, 576}}}, {{}});
  for (const char* command : {"run", "verify", "bench", "inspect"}) {
    expect_one_complaint(alone(command + model), 65, "x of shape [0, 576] holds no tokens");
  }
  write_tensors(path("x.safetensors"), {{"x", "F32", {3, 0, 576}}}, {{}});
  expect_one_complaint(on_ranks(2, "run --dry-run" + model), 65, "[3, 0, 576] holds no tokens");
}

TEST_F(OddInput, YKeepsTheShapeOfX) {
  write_small_model({1, 2, 3, 4});
  for (const std::vector<std::int64_t>& shape :
       std::vector<std::vector<std::int64_t>>{{6, 16}, {2, 3, 16}, {6, 1, 16}}) {
    write_tensors(path("x.safetensors"), {{"x", "F32", shape}}, {std::vector<float>(96, 0.5F)});
    const Outcome outcome =
        on_ranks(2, "run --ablate 3 --model " + path("model") + " --input " +
                        path("x.safetensors") + " --output " + path("y.safetensors"));
    ASSERT_EQ(outcome.code, 0) << outcome.error;
    const SafetensorsFile file(path("y.safetensors"));
    EXPECT_EQ(file.header().tensors.at("y").shape, shape);
    EXPECT_EQ(file.header().tensors.at("delta").shape, shape);
  }
  const Outcome seeded =
      alone("run --tokens 5 --model " + path("model") + " --output " + path("y.safetensors"));
  ASSERT_EQ(seeded.code, 0) << seeded.error;
  EXPECT_THAT(SafetensorsFile(path("y.safetensors")).header().tensors.at("y").shape,
              ElementsAre(5, 16));
}

}  // namespace
}  // namespace gatefold
