#pragma once

#include <cstddef>
#include <cstdint>

/// What benchmarks do to plain host memory, with as many threads as a CPU device of `threads` has
/// (0: OpenMP's choice), each on a contiguous part, so that pages lie where their reader runs.
namespace gatefold {

/// How many threads that are.
int team_size(int threads);
void touch_memory(std::byte* data, std::int64_t bytes, int threads);
/// The exclusive or of all eight-byte words: a read of which nothing can be left out.
std::uint64_t xor_words(const std::byte* data, std::int64_t bytes, int threads);

}  // namespace gatefold
