#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/device.h"

/// What one rank's device can do at best: what layers are judged by.
namespace gatefold {

/// Work that is timed over and over.
struct Load {
  std::string how;             // in words: "bf16, 2048 x 2048 x 2048"
  double work = 0;             // of a pass: FLOP, or bytes that memory has to move
  std::function<void()> pass;  // returns when it is done; allocates nothing
};

/// A [size, size] times B [size, size] by the library, all rows at once, in the type that the
/// device multiplies `model` in. Throws Error 71.
Load gemm_load(Device& device, DType model, std::int64_t size);
/// Of the powers of two from 128 on, the one with the most FLOP/s; no pass of more than some tens
/// of milliseconds is tried twice.
std::int64_t best_gemm_size(Device& device, DType model);

/// Bytes to stream so that caches don't help, where `sharers` ranks of this host do so at once.
std::int64_t cold_bytes(const Device& device, int sharers);
/// A read of device memory: on a CPU every word by all threads (0: OpenMP's choice), on a GPU the
/// sum of eight fp32 tensors, whose one bf16 result counts, too. Throws Error 71.
Load read_load(Device& device, std::int64_t bytes, int threads);
/// A copy from one half of `bytes` of device memory to the other, in whole MiB; each byte counts
/// twice, read and written, as STREAM has it.
Load copy_load(Device& device, std::int64_t bytes);
enum class CopyWay { kToDevice, kToHost };
/// A copy between pinned host memory and the device's; bytes count once.
Load host_copy_load(Device& device, std::int64_t bytes, CopyWay way);

/// How often a pass is timed, and how many passes one time is the mean of.
struct Schedule {
  std::int64_t times = 0;
  std::int64_t passes = 0;
};
/// For a pass that takes `seconds`: as many passes a time as make a millisecond, so that the clock
/// and the start don't count; at most `most` times, but at least three where they are more than
/// `limit` seconds together.
Schedule schedule(double seconds, std::int64_t most, double limit);
/// Seconds of a pass, each time; two passes before aren't counted.
std::vector<double> time_passes(const Load& load, std::int64_t most, double limit);

/// FLOP/s of this rank's fastest GEMM; takes about a second.
double measure_gemm_peak(Device& device, DType model);
/// B/s of this rank's fastest read of cold memory; takes about a second. `threads` as the device
/// has been made with.
double measure_read(Device& device, int threads);

}  // namespace gatefold
