#include "launch/baselines.h"

#include <algorithm>

#include "launch/timing.h"
#include "layers/seeded_source.h"

namespace gatefold {

AllReduceBaseline::AllReduceBaseline(Communicator& group, Device& device, std::int64_t rows,
                                     std::int64_t hidden, DType dtype)
    : group_(group),
      device_(device),
      count_(rows * hidden),
      dtype_count_(ceil_div(count_ * size_of(dtype), size_of(DType::kF32))) {
  if (group.size() == 1) return;
  values_ = device.allocate(count_ * size_of(DType::kF32));
  if (count_ > 0) device.fill(values_.data(), std::byte{0}, values_.bytes());
}

void AllReduceBaseline::reserve(std::int64_t passes) {
  if (group_.size() == 1) return;
  fp32_seconds.reserve(static_cast<std::size_t>(passes));
  dtype_seconds.reserve(static_cast<std::size_t>(passes));
}

double AllReduceBaseline::timed(Communicator& world, std::int64_t count) {
  meet(world);
  const double start = now();
  group_.all_reduce(values_.as<float>(), count);
  group_.wait();  // with its deadline
  device_.synchronize();
  return now() - start;
}

void AllReduceBaseline::time(Communicator& world, bool counted) {
  if (group_.size() == 1) return;  // as are all groups of the world
  const double fp32 = timed(world, count_);
  const double in_dtype = timed(world, dtype_count_);
  if (!counted) return;
  fp32_seconds.push_back(fp32);
  dtype_seconds.push_back(in_dtype);
}

namespace {

/// Of a mixture, as wide as all that a token goes through.
FfnSpec dense_of_equal_work(const LayerSpec& spec) {
  if (const auto* dense = std::get_if<FfnSpec>(&spec)) return *dense;
  const MoeSpec& moe = std::get<MoeSpec>(spec);
  FfnSpec wide = moe.experts.front();
  wide.intermediate_size = moe.route.top_k * moe.intermediate_size();
  for (const FfnSpec& shared : moe.shared) wide.intermediate_size += shared.intermediate_size;
  return wide;
}

}  // namespace

PlainLayer::PlainLayer(Device& device, const LayerSpec& spec, DType dtype, std::int64_t copies)
    : device_(device), spec_(dense_of_equal_work(spec)), dtype_(dtype) {
  const std::int64_t width = spec_.intermediate_size;
  for (std::int64_t i = 0; i < copies; ++i) {
    Weights weights;
    weights.up = made(width, spec_.hidden_size);
    if (spec_.gated()) {
      weights.gate = made(width, spec_.hidden_size);
      weights.gate_up = made(2 * width, spec_.hidden_size);
    }
    weights.down = made(spec_.hidden_size, width);
    copies_.push_back(std::move(weights));
  }
}

/// Of values and not of zeros, which a GPU multiplies faster.
Weight PlainLayer::made(std::int64_t outputs, std::int64_t inputs) {
  const DType storage = device_.storage(dtype_);
  std::vector<float> values(static_cast<std::size_t>(kGroup * inputs));
  seeded_tokens(0, {0, kGroup}, inputs, dtype_, values.data());
  std::vector<std::byte> rows(values.size() * static_cast<std::size_t>(size_of(storage)));
  convert(DType::kF32, reinterpret_cast<const std::byte*>(values.data()), storage, rows.data(),
          kGroup * inputs);
  Weight weight =
      device_.allocate_weight({outputs, inputs, false}, dtype_, GemmKernel::kLibraryWhole);
  for (std::int64_t first = 0; first < outputs; first += kGroup) {
    device_.store_rows(weight, first, std::min(kGroup, outputs - first), rows.data());
  }
  return weight;
}

void PlainLayer::take(std::int64_t rows, std::int64_t read_bytes, int threads) {
  rows_ = rows;
  if (read_bytes != read_bytes_) {
    read_.reset();  // before there is another
    if (read_bytes > 0) read_ = read_load(device_, read_bytes, threads);
    read_bytes_ = read_bytes;
  }
  const DType storage = device_.storage(dtype_);
  const std::int64_t hidden = spec_.hidden_size;
  const std::int64_t width = spec_.intermediate_size;
  for (const WeightShape& shape :
       {WeightShape{width, hidden, false}, WeightShape{2 * width, hidden, false},
        WeightShape{hidden, width, false}}) {
    device_.prepare(shape, storage, GemmKernel::kLibraryWhole, rows);
  }
  const auto filled = [&](std::int64_t bytes) {
    Buffer buffer = device_.allocate(bytes);
    device_.fill(buffer.data(), std::byte{0x3c}, bytes);  // small numbers in every type
    return buffer;
  };
  x_ = filled(rows * round_up(hidden, kInnerStep) * size_of(storage));
  h_ = filled(rows * round_up(width, kInnerStep) * size_of(storage));
  out_ = filled(rows * round_up(std::max(2 * width, hidden), kGroup) * size_of(DType::kF32));
  one_.clear();
  two_.clear();
  down_seconds_.clear();
  read_seconds_.clear();
}

void PlainLayer::reserve(std::int64_t passes) {
  for (auto* seconds : {&one_, &two_, &down_seconds_, &read_seconds_}) {
    seconds->reserve(static_cast<std::size_t>(passes));
  }
}

void PlainLayer::multiply(const Weight& weight, const Buffer& in, std::int64_t width) {
  const Tiles tiles{in.data(), rows_, rows_, round_up(width, kInnerStep)};
  device_.gemm_merge(weight, tiles, {out_.as<float>(), rows_, 0, 0, 0, 0}, 0, 0);
  device_.synchronize();
}

void PlainLayer::time(std::int64_t pass, bool counted) {
  const Weights& weights = copies_[static_cast<std::size_t>(pass) % copies_.size()];
  const std::int64_t hidden = spec_.hidden_size;
  const double start = now();
  if (spec_.gated()) multiply(weights.gate_up, x_, hidden);
  const double at_once = now();
  if (spec_.gated()) multiply(weights.gate, x_, hidden);
  multiply(weights.up, x_, hidden);
  const double in_turn = now();
  multiply(weights.down, h_, spec_.intermediate_size);
  const double multiplied = now();
  if (read_) read_->pass();
  const double end = now();
  if (!counted) return;
  one_.push_back(spec_.gated() ? at_once - start : in_turn - at_once);
  two_.push_back(in_turn - at_once);
  down_seconds_.push_back(multiplied - in_turn);
  read_seconds_.push_back(end - multiplied);
}

std::vector<double> PlainLayer::seconds() const {
  if (one_.empty()) return {};
  std::vector<double> sum = median(one_) <= median(two_) ? one_ : two_;
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += down_seconds_[i] + read_seconds_[i];
  return sum;
}

}  // namespace gatefold
