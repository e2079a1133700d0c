#include "runtime/memory_stream.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "runtime/range.h"

namespace gatefold {
namespace {

constexpr std::int64_t kPiece = 1 << 16;

std::uint64_t xor_piece(const std::byte* data, std::int64_t bytes) {
  constexpr std::int64_t kLanes = 32;
  const auto* words = reinterpret_cast<const std::uint64_t*>(data);
  const std::int64_t count = bytes / 8;
  std::array<std::uint64_t, kLanes> lanes{};
  const std::int64_t whole = count / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
      lanes[lane] ^= words[i + static_cast<std::int64_t>(lane)];
    }
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t lane : lanes) sum ^= lane;
  for (std::int64_t i = whole; i < count; ++i) sum ^= words[i];
  return sum;
}

}  // namespace

int team_size(int threads) { return threads > 0 ? threads : omp_get_max_threads(); }

void touch_memory(std::byte* data, std::int64_t bytes, int threads) {
#pragma omp parallel for num_threads(team_size(threads)) schedule(static)
  for (std::int64_t i = 0; i < ceil_div(bytes, kPiece); ++i) {
    const std::int64_t size = std::min(kPiece, bytes - i * kPiece);
    std::memset(data + i * kPiece, 0, static_cast<std::size_t>(size));
  }
}

std::uint64_t xor_words(const std::byte* data, std::int64_t bytes, int threads) {
  std::uint64_t sum = 0;
#pragma omp parallel for num_threads(team_size(threads)) schedule(static) reduction(^ : sum)
  for (std::int64_t i = 0; i < ceil_div(bytes, kPiece); ++i) {
    sum ^= xor_piece(data + i * kPiece, std::min(kPiece, bytes - i * kPiece));
  }
  return sum;
}

}  // namespace gatefold
