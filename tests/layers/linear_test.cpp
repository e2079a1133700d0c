// Sharded linear layers against plain loops. Weights differ in every element, so that a shard too
// many, too few or twice shows; integers make every sum exact, whatever its order.
#include "layers/linear.h"

#include <gmock/gmock.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "group_test.h"
#include "memory_source.h"
#include "parallel/agreement.h"
#include "runtime/activation_math.h"
#include "tests/parallel/usage_error.h"
#include "tests/runtime/counting_device.h"

namespace gatefold {
namespace {

using testing::as_floats;
using testing::in_dtype;
using testing::MemorySource;
using testing::noise;
using testing::OnDevice;
using testing::usage_error;

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::vector<float> integers(std::int64_t n, std::uint32_t seed) {
  std::vector<float> values(as_size(n));
  std::uint32_t state = seed * 2654435761U + 1U;
  for (float& value : values) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<float>((state >> 16) % 7) - 3.0F;
  }
  return values;
}

struct Shape {
  std::int64_t outputs;
  std::int64_t inputs;
  bool bias;
};

/// A weight "w" [out, in] and a bias "b" [out] in memory, with y = x Wᵀ + b by plain loops.
struct Problem {
  Shape shape;
  std::vector<float> w;
  std::vector<float> b;
  MemorySource source;

  explicit Problem(const Shape& of, bool exact = true) : shape(of) {
    const std::int64_t n = shape.outputs * shape.inputs;
    w = exact ? integers(n, 1) : noise(n, 1, 0.3F);
    b = exact ? integers(shape.outputs, 2) : noise(shape.outputs, 2, 0.3F);
    source.set("w", {shape.outputs, shape.inputs}, w);
    source.set("b", {shape.outputs}, b);
  }
  WeightTensors tensors() const {
    WeightTensors t;
    t.outputs = shape.outputs;
    t.inputs = shape.inputs;
    t.matrix.name = "w";
    if (shape.bias) t.bias = TensorRef{"b"};
    return t;
  }
  std::vector<float> x(std::int64_t rows) const { return integers(rows * shape.inputs, 3); }
  /// Rows x columns of y in `dtype`.
  std::vector<std::byte> y(const std::vector<float>& x, Range rows, Range columns,
                           DType dtype) const {
    std::vector<float> values;
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
      for (std::int64_t o = columns.begin; o < columns.end; ++o) {
        double sum = shape.bias ? static_cast<double>(b[as_size(o)]) : 0.0;
        for (std::int64_t k = 0; k < shape.inputs; ++k) {
          sum += static_cast<double>(x[as_size(r * shape.inputs + k)]) *
                 static_cast<double>(w[as_size(o * shape.inputs + k)]);
        }
        values.push_back(static_cast<float>(sum));
      }
    }
    return in_dtype(values, dtype);
  }
};

std::vector<std::byte> cut(const std::vector<std::byte>& x, std::int64_t width, Range rows,
                           Range columns, DType dtype) {
  const std::int64_t element = size_of(dtype);
  std::vector<std::byte> part;
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const auto row = x.begin() + r * width * element;
    part.insert(part.end(), row + columns.begin * element, row + columns.end * element);
  }
  return part;
}

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all{{40, 24, true}, {100, 33, false}, {6, 70, true},
                                      {70, 6, true},  {1, 1, true},     {200, 130, true}};
  return all;
}

const std::vector<RowCount>& row_counts() {
  static const std::vector<RowCount> all{{0, 0}, {1, 1}, {3, 3}, {17, 60}, {70, 70}};
  return all;
}

class Linear : public testing::GroupTest {
 protected:
  static LinearOptions options(DType dtype, std::int64_t blocks = 8) {
    LinearOptions o;
    o.dtype = dtype;
    o.blocks = blocks;
    return o;
  }
  static Range own_rows(const Place& place, std::int64_t rows) {
    return even_part(rows, place.tp->size(), place.tp->rank());
  }
};

using Output = ColumnParallelLinear::Output;
using Input = RowParallelLinear::Input;

std::string label(const Place& place, const Problem& p, const LinearOptions& options) {
  return std::to_string(p.shape.outputs) + "x" + std::to_string(p.shape.inputs) + ", tp " +
         std::to_string(place.tp->size()) + ", " + std::string(name_of(options.dtype));
}

/// `linear` writes exactly `expected`, and nothing behind it.
template <typename Layer>
void expect_forward(Device& device, Layer& linear, const std::vector<std::byte>& x,
                    const RowCount& rows, std::vector<std::byte> expected) {
  OnDevice<std::byte> in(device, x);
  OnDevice<std::byte> y(device, std::vector<std::byte>(expected.size() + 64, std::byte{0xff}));
  expected.resize(expected.size() + 64, std::byte{0xff});
  linear.forward(in.data(), rows, y.data());
  EXPECT_TRUE(y.get() == expected) << rows.local << " of " << rows.global << " rows";
}

void check_column(const Place& place, const Problem& p, const LinearOptions& options, Output output,
                  Rows input_rows) {
  ColumnParallelLinear linear(p.tensors(), p.source, place, options, output, input_rows);
  const Range columns = linear.output_columns();
  if (output == Output::kGathered) {
    EXPECT_EQ(columns, (Range{0, p.shape.outputs}));
  } else {
    const Blocks blocks{p.shape.outputs, options.blocks};
    EXPECT_EQ(columns,
              blocks.columns(owned_blocks(options.blocks, place.tp->size(), place.tp->rank())));
  }
  for (const RowCount& rows : row_counts()) {
    const std::vector<float> x = p.x(rows.local);
    const Range own = input_rows == Rows::kScattered
                          ? even_part(rows.local, place.tp->size(), place.tp->rank())
                          : Range{0, rows.local};
    const auto input =
        cut(in_dtype(x, options.dtype), p.shape.inputs, own, {0, p.shape.inputs}, options.dtype);
    SCOPED_TRACE(label(place, p, options));
    expect_forward(*place.device, linear, input, rows,
                   p.y(x, {0, rows.local}, columns, options.dtype));
  }
}

TEST_F(Linear, ColumnParallelGivesOwnColumnsOrGathersAllExactly) {
  for_every_group(8, [](const Place& place) {
    for (const Shape& shape : shapes()) {
      const Problem p(shape);
      for (const DType dtype : {DType::kF32, DType::kBf16}) {
        check_column(place, p, options(dtype), Output::kParallel, Rows::kReplicated);
        check_column(place, p, options(dtype), Output::kGathered, Rows::kReplicated);
        check_column(place, p, options(dtype), Output::kGathered, Rows::kScattered);
        check_column(place, p, options(dtype), Output::kParallel, Rows::kScattered);
      }
    }
  });
}

void check_row(const Place& place, const Problem& p, const LinearOptions& options, Input input,
               Rows output_rows) {
  RowParallelLinear linear(p.tensors(), p.source, place, options, input, output_rows);
  const std::int64_t blocks = options.reduce == Reduce::kFast ? place.tp->size() : options.blocks;
  const Range own_columns = Blocks{p.shape.inputs, blocks}.columns(
      owned_blocks(blocks, place.tp->size(), place.tp->rank()));
  for (const RowCount& rows : row_counts()) {
    const std::vector<float> x = p.x(rows.local);
    const Range columns = input == Input::kWhole ? Range{0, p.shape.inputs} : own_columns;
    const auto own_x =
        cut(in_dtype(x, options.dtype), p.shape.inputs, {0, rows.local}, columns, options.dtype);
    const Range own = output_rows == Rows::kScattered
                          ? even_part(rows.local, place.tp->size(), place.tp->rank())
                          : Range{0, rows.local};
    SCOPED_TRACE(label(place, p, options));
    expect_forward(*place.device, linear, own_x, rows,
                   p.y(x, own, {0, p.shape.outputs}, options.dtype));
  }
}

TEST_F(Linear, RowParallelSumsExactlyAndAddsItsBiasOnce) {
  for_every_group(8, [](const Place& place) {
    for (const Shape& shape : shapes()) {
      const Problem p(shape);
      for (const DType dtype : {DType::kF32, DType::kBf16}) {
        check_row(place, p, options(dtype), Input::kParallel, Rows::kReplicated);
        check_row(place, p, options(dtype), Input::kWhole, Rows::kReplicated);
        check_row(place, p, options(dtype), Input::kWhole, Rows::kScattered);
        check_row(place, p, options(dtype), Input::kParallel, Rows::kScattered);
      }
    }
  });
}

TEST_F(Linear, OtherBlockCountsAreAsExact) {
  for (const std::int64_t blocks : {1, 3, 5, 16}) {
    for_every_group(blocks, [blocks](const Place& place) {
      const Problem p({100, 90, true});
      check_row(place, p, options(DType::kF32, blocks), Input::kWhole, Rows::kReplicated);
      check_column(place, p, options(DType::kF32, blocks), Output::kGathered, Rows::kReplicated);
    });
  }
}

TEST_F(Linear, StreamedWeightsAndThePlainKernelAreAsExact) {
  for_every_group(8, [](const Place& place) {
    const Problem p({100, 90, true});
    for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
      LinearOptions streamed = options(dtype);
      streamed.residency = Residency::kStreamed;
      check_row(place, p, streamed, Input::kWhole, Rows::kReplicated);
      check_column(place, p, streamed, Output::kGathered, Rows::kReplicated);
      LinearOptions plain = options(dtype);
      plain.kernel = GemmKernel::kPlain;
      check_row(place, p, plain, Input::kWhole, Rows::kReplicated);
      check_column(place, p, plain, Output::kGathered, Rows::kReplicated);
    }
  });
}

TEST_F(Linear, FastModeIsExactOnIntegersEvenWhereARankOwnsNoColumn) {
  for_every_group(100, [](const Place& place) {
    for (const Shape& shape : {Shape{100, 90, true}, Shape{40, 2, true}, Shape{3, 1, false}}) {
      const Problem p(shape);
      LinearOptions fast = options(DType::kF32);
      fast.reduce = Reduce::kFast;
      for (int again = 0; again < 2; ++again) {  // memory is dirty the second time
        check_row(place, p, fast, Input::kWhole, Rows::kReplicated);
        check_row(place, p, fast, Input::kParallel, Rows::kScattered);
      }
    }
  });
}

TEST_F(Linear, MergedColumnParallelActivatesEachOwnedBlockOfGateAndUp) {
  for_every_group(8, [](const Place& place) {
    for (const Shape& shape : shapes()) {
      const Problem up(shape);
      Problem gate(shape);
      gate.w = integers(shape.outputs * shape.inputs, 11);
      gate.b = integers(shape.outputs, 12);
      MemorySource source = up.source;
      source.set("gate", {shape.outputs, shape.inputs}, gate.w);
      source.set("gate_b", {shape.outputs}, gate.b);
      WeightTensors tensors = up.tensors();
      tensors.gate = TensorRef{"gate"};
      if (shape.bias) tensors.gate_bias = TensorRef{"gate_b"};
      const Activation silu;
      for (const DType dtype : {DType::kF32, DType::kBf16}) {
        MergedColumnParallelLinear linear(tensors, silu, source, place, options(dtype));
        const DType storage = place.device->storage(dtype);
        for (const RowCount& rows : row_counts()) {
          const std::int64_t height = tile_height(*place.device, linear.kernel(), rows);
          linear.reserve(height);
          const std::vector<float> x = up.x(rows.local);
          const std::int64_t padded = round_up(rows.local, height);
          const std::int64_t width = round_up(shape.inputs, kInnerStep);
          const auto memory = [&place](std::int64_t bytes) {
            return OnDevice<std::byte>(*place.device, std::vector<std::byte>(as_size(bytes)));
          };
          OnDevice<std::byte> x_memory = memory(padded * width * size_of(storage));
          const Tiles x_tiles{x_memory.data(), rows.local, height, width};
          OnDevice<std::byte> x_rows(*place.device, in_dtype(x, dtype));
          place.device->tile_rows({.data = x_rows.data(), .stride = shape.inputs}, dtype,
                                  shape.inputs, x_tiles);
          for (std::size_t i = 0; i < linear.blocks(); ++i) {
            const Range columns = linear.plan().columns(i);
            const std::int64_t h_width = linear.shape(i).padded_outputs();
            OnDevice<std::byte> h_memory = memory(padded * h_width * size_of(storage));
            const Tiles h{h_memory.data(), rows.local, height, h_width};
            linear.forward_block(i, x_tiles, h);
            OnDevice<std::byte> y = memory(rows.local * columns.size() * size_of(dtype));
            place.device->untile_rows(h, dtype, columns.size(), y.data(), columns.size());

            const Range all{0, rows.local};
            std::vector<float> expected =
                as_floats(gate.y(x, all, columns, DType::kF32), DType::kF32);
            const std::vector<float> factor =
                as_floats(up.y(x, all, columns, DType::kF32), DType::kF32);
            for (std::size_t e = 0; e < expected.size(); ++e) {
              expected[e] = gate_times_up(silu, expected[e], factor[e]);
            }
            EXPECT_TRUE(y.get() == in_dtype(expected, dtype))
                << shape.outputs << "x" << shape.inputs << ", tp " << place.tp->size() << ", block "
                << i << ", " << rows.local << " rows, " << name_of(dtype);
          }
        }
      }
    }
  });
}

TEST_F(Linear, ReplicatedIsTheSameOnEveryRankWithoutCommunication) {
  for (const Shape& shape : shapes()) {
    const Problem p(shape);
    // Ranks may do different things: here each has its own rows.
    const std::int64_t rows = 1 + 20 * world_->rank();
    const std::vector<float> x = p.x(rows);
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      ReplicatedLinear linear(p.tensors(), p.source, *device_, options(dtype));
      SCOPED_TRACE(std::to_string(shape.outputs) + "x" + std::to_string(shape.inputs));
      expect_forward(*device_, linear, in_dtype(x, dtype), {rows, rows},
                     p.y(x, {0, rows}, {0, shape.outputs}, dtype));
    }
  }
}

TEST_F(Linear, AReplicatedWeightLiesInOnePieceHoweverManyBlocksThereAre) {
  // Eight blocks of five columns would be padded one by one.
  const Problem p({40, 24, true});
  const auto bytes = [&p](std::int64_t blocks) {
    testing::CountingDevice device(testing::testing_device());
    ReplicatedLinear linear(p.tensors(), p.source, device, options(DType::kF32, blocks));
    return device.weight_bytes();
  };
  EXPECT_EQ(bytes(8), bytes(1));
}

/// What `linear` makes of x: y of `y_bytes`.
template <typename Layer>
std::vector<std::byte> forward(Device& device, Layer& linear, const std::vector<std::byte>& x,
                               std::int64_t rows, std::int64_t y_bytes) {
  OnDevice<std::byte> in(device, x);
  OnDevice<std::byte> y(device, std::vector<std::byte>(as_size(y_bytes)));
  linear.forward(in.data(), {rows, rows}, y.data());
  return y.get();
}

TEST_F(Linear, EveryGroupHasTheBitsOfOneRankOnFractions) {
  const Problem p({200, 330, true}, false);
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    ColumnParallelLinear column_alone(p.tensors(), p.source, alone(), options(dtype),
                                      Output::kGathered);
    RowParallelLinear row_alone(p.tensors(), p.source, alone(), options(dtype), Input::kWhole);
    for_every_group(8, [&](const Place& place) {
      ColumnParallelLinear column(p.tensors(), p.source, place, options(dtype), Output::kGathered);
      RowParallelLinear row(p.tensors(), p.source, place, options(dtype), Input::kWhole);
      RowParallelLinear scattered(p.tensors(), p.source, place, options(dtype), Input::kWhole,
                                  Rows::kScattered);
      for (const std::int64_t rows : {1, 19, 66}) {
        const auto x = in_dtype(noise(rows * 330, 5, 1.7F), dtype);
        const std::int64_t row_bytes = 200 * size_of(dtype);
        const auto y_of = [&](auto& linear, std::int64_t own) {
          return forward(*device_, linear, x, rows, own * row_bytes);
        };
        EXPECT_TRUE(y_of(column, rows) == y_of(column_alone, rows))
            << "column, tp " << place.tp->size() << ", " << rows << " rows";
        const std::vector<std::byte> expected = y_of(row_alone, rows);
        EXPECT_TRUE(y_of(row, rows) == expected)
            << "row, tp " << place.tp->size() << ", " << rows << " rows";
        const Range own = own_rows(place, rows);
        EXPECT_TRUE(y_of(scattered, own.size()) == cut(expected, 200, own, {0, 200}, dtype))
            << "scattered, tp " << place.tp->size() << ", " << rows << " rows";
      }
    });
  }
}

/// w [100, 90] and b [100] as the middle one of three experts, whole or at the odd rows of a tensor
/// that alternates.
void add_stacks(MemorySource& source, const std::vector<float>& w, const std::vector<float>& b) {
  std::vector<float> stacked(as_size(3 * 100 * 90), -50.0F);
  std::vector<float> turned = stacked;
  std::vector<float> alternating(as_size(3 * 200 * 90), -50.0F);
  std::vector<float> alternating_turned = alternating;
  for (std::int64_t o = 0; o < 100; ++o) {
    for (std::int64_t k = 0; k < 90; ++k) {
      const float value = w[as_size(o * 90 + k)];
      stacked[as_size((100 + o) * 90 + k)] = value;
      turned[as_size((90 + k) * 100 + o)] = value;
      alternating[as_size((200 + 2 * o + 1) * 90 + k)] = value;
      alternating_turned[as_size((90 + k) * 200 + 2 * o + 1)] = value;
    }
  }
  source.set("stacked", {3, 100, 90}, stacked);
  source.set("stacked_turned", {3, 90, 100}, turned);
  source.set("alternating", {3, 200, 90}, alternating);
  source.set("alternating_turned", {3, 90, 200}, alternating_turned);
  std::vector<float> biases(3 * 200, -50.0F);
  for (std::int64_t o = 0; o < 100; ++o) biases[as_size(200 + 2 * o + 1)] = b[as_size(o)];
  source.set("stacked_bias", {3, 200}, biases);
}

TEST_F(Linear, TransposedAndFusedTensorsLoadTheSameWeights) {
  const Problem p({100, 90, true});
  MemorySource source = p.source;
  std::vector<float> turned(p.w.size());
  for (std::int64_t o = 0; o < 100; ++o) {
    for (std::int64_t k = 0; k < 90; ++k) {
      turned[as_size(k * 100 + o)] = p.w[as_size(o * 90 + k)];
    }
  }
  source.set("turned", {90, 100}, turned);
  std::vector<float> fused = integers(7 * 90, 20);  // 7 rows of something else before it
  fused.insert(fused.end(), p.w.begin(), p.w.end());
  source.set("fused", {107, 90}, fused);
  std::vector<float> fused_turned(as_size(90 * 107), -50.0F);
  for (std::int64_t k = 0; k < 90; ++k) {
    for (std::int64_t o = 0; o < 100; ++o) {
      fused_turned[as_size(k * 107 + 7 + o)] = p.w[as_size(o * 90 + k)];
    }
  }
  source.set("fused_turned", {90, 107}, fused_turned);
  std::vector<float> fused_bias(7, -50.0F);
  fused_bias.insert(fused_bias.end(), p.b.begin(), p.b.end());
  source.set("fused_bias", {107}, fused_bias);

  add_stacks(source, p.w, p.b);
  const TensorRef fused_ref{"fused_bias", false, {107}, 7};
  const TensorRef stacked_ref{"stacked_bias", false, {3, 200}, 1, 2, 1};
  struct Stored {
    TensorRef matrix, bias;
  };
  const std::vector<Stored> places = {
      {{"turned", true, {90, 100}}, fused_ref},
      {{"fused", false, {107, 90}, 7}, fused_ref},
      {{"fused_turned", true, {90, 107}, 7}, fused_ref},
      {{"stacked", false, {3, 100, 90}, 100}, stacked_ref},
      {{"stacked_turned", true, {3, 90, 100}, 0, 1, 90}, stacked_ref},
      {{"alternating", false, {3, 200, 90}, 201, 2}, stacked_ref},
      {{"alternating_turned", true, {3, 90, 200}, 1, 2, 90}, stacked_ref}};

  for_every_group(8, [&](const Place& place) {
    const std::vector<float> x = p.x(5);
    const auto expected = p.y(x, {0, 5}, {0, 100}, DType::kF32);
    for (const auto& [matrix, bias] : places) {
      WeightTensors tensors = p.tensors();
      tensors.matrix = matrix;
      tensors.bias = bias;
      SCOPED_TRACE(matrix.name);
      RowParallelLinear row(tensors, source, place, options(DType::kF32), Input::kWhole);
      expect_forward(*device_, row, in_dtype(x, DType::kF32), {5, 5}, expected);
      ColumnParallelLinear column(tensors, source, place, options(DType::kF32), Output::kGathered);
      expect_forward(*device_, column, in_dtype(x, DType::kF32), {5, 5}, expected);
    }
  });
}

const std::vector<RowCount>& impossible_rows() {
  static const std::vector<RowCount> all{{-1, 4}, {-1, -1}, {4, 3},
                                         {1, 0},  {0, -1},  {INT64_MIN, 0}};
  return all;
}

TEST_F(Linear, RowCountsThatCantBeAreRefusedOnEveryRank) {
  const Problem p({40, 24, true});
  const Place place = all();
  for (const Rows scattered : {Rows::kReplicated, Rows::kScattered}) {
    const LinearOptions o = options(DType::kF32);
    ColumnParallelLinear column(p.tensors(), p.source, place, o, Output::kGathered, scattered);
    RowParallelLinear row(p.tensors(), p.source, place, o, Input::kWhole, scattered);
    ReplicatedLinear replicated(p.tensors(), p.source, *device_, o);
    std::vector<std::byte> memory(1000 * sizeof(float));
    for (const RowCount& rows : impossible_rows()) {
      usage_error([&] { column.forward(memory.data(), rows, memory.data()); });
      usage_error([&] { row.forward(memory.data(), rows, memory.data()); });
      usage_error([&] { replicated.forward(memory.data(), rows, memory.data()); });
    }
  }
  world_->barrier();  // no rank is stuck in a call
}

/// Until there is enough, forward() has one buffer more on the last rank, each time of a new layer.
template <typename Make>
void forward_with_too_little(testing::ShortOfMemory& device, bool last, const RowCount& rows,
                             const std::vector<float>& x, std::int64_t outputs, const Make& make) {
  OnDevice<std::byte> in(device, in_dtype(x, DType::kF32));
  OnDevice<std::byte> out(device, std::vector<std::byte>(as_size(rows.local * outputs * 4)));
  const auto forward = [&](auto& layer) {
    layer.forward(in.data(), rows, out.data());
    device.synchronize();
    return out.get();
  };
  auto ample = make();
  const std::vector<std::byte> expected = forward(ample);
  int left = 0;
  for (bool enough = false; !enough; ++left) {
    auto layer = make();
    device.left = last ? left : -1;
    try {
      forward(layer);
      enough = true;
    } catch (const Error& error) {
      EXPECT_NE(dynamic_cast<const AgreedError*>(&error), nullptr) << error.what();
      EXPECT_EQ(error.code(), ExitCode::kOutOfMemory) << error.what();
    }
    device.left = -1;
    EXPECT_TRUE(forward(layer) == expected) << left;
  }
  EXPECT_GT(left, 1) << "what a forward allocates";
}

TEST_F(Linear, MemoryThatLacksOnOneRankEndsForwardOnAllAndTheNextIsRight) {
  const Problem p({100, 33, true});
  const LinearOptions o = options(DType::kF32);
  testing::ShortOfMemory device(testing::testing_device());
  const testing::DeviceGroup group(*world_, device);
  const Place place{&device, group.get()};
  const bool last = world_->rank() + 1 == world_->size();
  const RowCount rows{17, 17};
  for (const Output output : {Output::kParallel, Output::kGathered}) {
    for (const Rows scattered : {Rows::kReplicated, Rows::kScattered}) {
      forward_with_too_little(device, last, rows, p.x(17), 100, [&] {
        return ColumnParallelLinear(p.tensors(), p.source, place, o, output, scattered);
      });
    }
  }
  for (const Rows scattered : {Rows::kReplicated, Rows::kScattered}) {
    forward_with_too_little(device, last, rows, p.x(17), 100, [&] {
      return RowParallelLinear(p.tensors(), p.source, place, o, Input::kWhole, scattered);
    });
  }
}

TEST_F(Linear, MoreRanksThanBlocksAreRefusedWithBothNumbers) {
  if (world_->size() < 2) return;
  const Problem p({40, 24, true});
  const Place place = all();
  const std::int64_t blocks = world_->size() - 1;
  const std::string ranks = "tp " + std::to_string(world_->size());
  const std::string limit = std::to_string(blocks) + " blocks";
  const auto refused = [&](const std::function<void()>& make) {
    const std::string text = usage_error(make);
    EXPECT_THAT(text, ::testing::HasSubstr(ranks));
    EXPECT_THAT(text, ::testing::HasSubstr(limit));
  };
  const LinearOptions o = options(DType::kF32, blocks);
  refused([&] { ColumnParallelLinear(p.tensors(), p.source, place, o); });
  refused([&] { RowParallelLinear(p.tensors(), p.source, place, o); });
  refused([&] { MergedColumnParallelLinear(p.tensors(), Activation{}, p.source, place, o); });
  world_->barrier();  // no rank is stuck in a constructor
}

TEST_F(Linear, AWholeGemmIsRefusedWhereBitsMustNotDependOnRanks) {
  const Problem p({40, 24, true});
  const Place place = all();
  LinearOptions o = options(DType::kF32);
  o.kernel = GemmKernel::kLibraryWhole;
  usage_error([&] { RowParallelLinear(p.tensors(), p.source, place, o); });
  usage_error([&] { ColumnParallelLinear(p.tensors(), p.source, place, o); });
  world_->barrier();
}

TEST_F(Linear, AMissingTensorIsError65WithItsName) {
  const Problem p({40, 24, true});
  WeightTensors tensors = p.tensors();
  tensors.matrix.name = "absent";
  try {
    RowParallelLinear(tensors, p.source, all(), options(DType::kF32));
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("'absent'"));
  }
  world_->barrier();
}

}  // namespace
}  // namespace gatefold
