#include "launch/machine.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "launch/timing.h"
#include "layers/seeded_source.h"
#include "runtime/canonical.h"
#include "runtime/memory_stream.h"
#include "runtime/tensor_source.h"

namespace gatefold {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int64_t kLeastSize = 128;
constexpr std::int64_t kMostSize = 8192;
/// A larger GEMM is tried only where the last one took less.
constexpr double kLongPass = 0.020;
/// What is timed lasts this long, by at most so many passes.
constexpr double kBatch = 1e-3;
constexpr double kMostPasses = 1000;
/// Of one measurement.
constexpr std::int64_t kPasses = 20;
constexpr double kSeconds = 0.5;

/// What a GEMM works on, kept by its pass.
struct Gemm {
  Weight weight;
  Buffer in;
  Buffer out;
  Tiles tiles;
};

/// 64 rows of values: a GPU multiplies zeros faster than numbers.
std::vector<std::byte> some_rows(std::int64_t width, DType dtype) {
  std::vector<float> values(static_cast<std::size_t>(kGroup * width));
  seeded_tokens(0, {0, kGroup}, width, dtype, values.data());
  std::vector<std::byte> rows(values.size() * static_cast<std::size_t>(size_of(dtype)));
  convert(DType::kF32, reinterpret_cast<const std::byte*>(values.data()), dtype, rows.data(),
          kGroup * width);
  return rows;
}

double least(const std::vector<double>& seconds) { return *std::ranges::min_element(seconds); }

}  // namespace

Load gemm_load(Device& device, DType model, std::int64_t size) {
  const DType storage = device.storage(model);
  const WeightShape shape{size, size, false};
  const auto gemm = std::make_shared<Gemm>();
  device.prepare(shape, storage, GemmKernel::kLibraryWhole, size);
  gemm->weight = device.allocate_weight(shape, model, GemmKernel::kLibraryWhole);
  gemm->in = device.allocate(size * size * size_of(storage));
  gemm->out = device.allocate(size * size * size_of(DType::kF32));
  gemm->tiles = {gemm->in.data(), size, size, size};
  const std::vector<std::byte> rows = some_rows(size, storage);
  for (std::int64_t first = 0; first < size; first += kGroup) {
    device.store_rows(gemm->weight, first, kGroup, rows.data());
    device.upload(gemm->in.data() + first * size * size_of(storage), rows.data(), std::ssize(rows));
  }
  const auto edge = static_cast<double>(size);
  const std::string type = storage == model
                               ? std::string(name_of(model))
                               : fmt::format("{} as {}", name_of(model), name_of(storage));
  return {fmt::format("{}, {} cubed", type, size), 2 * edge * edge * edge, [&device, gemm] {
            device.gemm_merge(gemm->weight, gemm->tiles,
                              {gemm->out.as<float>(), gemm->tiles.rows, 0, 0, 0, 0}, 0, 0);
            device.synchronize();
          }};
}

std::int64_t best_gemm_size(Device& device, DType model) {
  std::int64_t best = kLeastSize;
  double best_rate = 0;
  for (std::int64_t size = kLeastSize; size <= kMostSize; size *= 2) {
    const Load load = gemm_load(device, model, size);
    const double seconds = least(time_passes(load, 3, kLongPass));
    if (load.work / seconds > best_rate) {
      best_rate = load.work / seconds;
      best = size;
    }
    if (seconds > kLongPass) break;
  }
  return best;
}

std::int64_t cold_bytes(const Device& device, int sharers) {
  const std::int64_t memory = std::int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE);
  const std::int64_t least = (device.in_host_memory() ? 64 : 256) * kMiB;
  const std::int64_t wanted = std::max(2 * device.last_level_cache() / sharers, least);
  return std::min(wanted, memory / 8 / sharers) / kMiB * kMiB;
}

Load read_load(Device& device, std::int64_t bytes, int threads) {
  if (device.in_host_memory()) {
    const auto memory = std::make_shared<Buffer>(device.allocate(bytes));
    const auto sum = std::make_shared<std::uint64_t>();
    touch_memory(memory->data(), bytes, threads);
    return {"memory", static_cast<double>(bytes), [memory, sum, threads] {
              *sum ^= xor_words(memory->data(), memory->bytes(), threads);
            }};
  }
  struct Roots {
    Buffer in;
    Buffer out;
    MergePlan plan;
    std::array<const float*, 8> at{};
  };
  const auto roots = std::make_shared<Roots>();
  const std::int64_t rows = bytes / (8 * kGroup * size_of(DType::kF32));
  const std::int64_t values = rows * kGroup;
  roots->in = device.allocate(8 * values * size_of(DType::kF32));
  roots->out = device.allocate(values * size_of(DType::kBf16));
  device.fill(roots->in.data(), std::byte{0}, roots->in.bytes());
  roots->plan = SumTree({8, 8}).local_plan({0, 8});
  for (std::size_t i = 0; i < roots->at.size(); ++i) {
    roots->at[i] = roots->in.as<float>() + static_cast<std::int64_t>(i) * values;
  }
  const RootSum sum{.roots = roots->at,
                    .plan = &roots->plan,
                    .groups = 1,
                    .rows = rows,
                    .columns = kGroup,
                    .dtype = DType::kBf16,
                    .out = roots->out.data(),
                    .out_row_stride = kGroup};
  return {"memory, by sums of 8", static_cast<double>(roots->in.bytes() + roots->out.bytes()),
          [&device, roots, sum] {
            device.sum_roots(sum);
            device.synchronize();
          }};
}

Load copy_load(Device& device, std::int64_t bytes) {
  const std::int64_t rows = bytes / 2 / kMiB;
  const auto from = std::make_shared<Buffer>(device.allocate(rows * kMiB));
  const auto to = std::make_shared<Buffer>(device.allocate(rows * kMiB));
  const auto copy = [&device, from, to, rows] {
    device.copy_rows(to->data(), kMiB, from->data(), kMiB, rows, kMiB);
    device.synchronize();
  };
  device.fill(from->data(), std::byte{0}, from->bytes());
  return {"memory", 2 * static_cast<double>(from->bytes()), copy};
}

Load host_copy_load(Device& device, std::int64_t bytes, CopyWay way) {
  const auto host = std::make_shared<Buffer>(device.allocate_host(bytes));
  const auto memory = std::make_shared<Buffer>(device.allocate(bytes));
  const bool up = way == CopyWay::kToDevice;
  return {up ? "host to device" : "device to host", static_cast<double>(bytes),
          [&device, host, memory, up] {
            if (up) {
              device.start_upload(memory->data(), host->data(), memory->bytes());
            } else {
              device.start_download(host->data(), memory->data(), memory->bytes());
            }
            device.synchronize();
          }};
}

Schedule schedule(double seconds, std::int64_t most, double limit) {
  const double fitting = seconds > 0 ? std::ceil(kBatch / seconds) : kMostPasses;
  const auto passes = static_cast<std::int64_t>(std::clamp(fitting, 1.0, kMostPasses));
  const double batch = std::max(seconds, 1e-9) * static_cast<double>(passes);
  const auto times = static_cast<std::int64_t>(std::min(limit / batch, 1e6));
  return {std::clamp(times, std::min<std::int64_t>(3, most), most), passes};
}

std::vector<double> time_passes(const Load& load, std::int64_t most, double limit) {
  const auto timed = [&load](std::int64_t passes) {
    const double start = now();
    for (std::int64_t i = 0; i < passes; ++i) load.pass();
    return (now() - start) / static_cast<double>(passes);
  };
  timed(1);
  const Schedule plan = schedule(timed(1), most, limit);
  std::vector<double> seconds;
  for (std::int64_t i = 0; i < plan.times; ++i) seconds.push_back(timed(plan.passes));
  return seconds;
}

double measure_gemm_peak(Device& device, DType model) {
  const Load load = gemm_load(device, model, best_gemm_size(device, model));
  return load.work / least(time_passes(load, kPasses, kSeconds));
}

double measure_read(Device& device, int threads) {
  const Load load = read_load(device, cold_bytes(device, 1), threads);
  return load.work / least(time_passes(load, kPasses, kSeconds));
}

}  // namespace gatefold
