#include "runtime/hash.h"

#include <array>
#include <bit>
#include <cstring>

namespace gatefold {
namespace {

constexpr std::uint64_t kPrime1 = 0x9e3779b185ebca87U;
constexpr std::uint64_t kPrime2 = 0xc2b2ae3d27d4eb4fU;
constexpr std::uint64_t kPrime3 = 0x165667b19e3779f9U;
constexpr std::uint64_t kPrime4 = 0x85ebca77c2b2ae63U;
constexpr std::uint64_t kPrime5 = 0x27d4eb2f165667c5U;

template <typename Word>
std::uint64_t load(const std::byte* at) {
  Word word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// Each step is one-to-one in the word and in the chain: a changed word can't be lost on the way.
std::uint64_t step(std::uint64_t chain, std::uint64_t word) {
  return std::rotl(chain + word * kPrime2, 31) * kPrime1;
}

/// The stripes of 32 bytes, taken off the front of `bytes`.
std::uint64_t add_stripes(std::span<const std::byte>& bytes) {
  std::array<std::uint64_t, 4> chains{kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1};
  for (; bytes.size() >= 32; bytes = bytes.subspan(32)) {
    for (std::size_t i = 0; i < 4; ++i) {
      chains[i] = step(chains[i], load<std::uint64_t>(bytes.data() + 8 * i));
    }
  }
  std::uint64_t value = std::rotl(chains[0], 1) + std::rotl(chains[1], 7) +
                        std::rotl(chains[2], 12) + std::rotl(chains[3], 18);
  for (const std::uint64_t chain : chains) value = (value ^ step(0, chain)) * kPrime1 + kPrime4;
  return value;
}

}  // namespace

std::uint64_t xxh64(std::span<const std::byte> bytes) {
  const std::uint64_t size = bytes.size();
  std::uint64_t value = (size >= 32 ? add_stripes(bytes) : kPrime5) + size;
  for (; bytes.size() >= 8; bytes = bytes.subspan(8)) {
    value ^= step(0, load<std::uint64_t>(bytes.data()));
    value = std::rotl(value, 27) * kPrime1 + kPrime4;
  }
  if (bytes.size() >= 4) {
    value ^= load<std::uint32_t>(bytes.data()) * kPrime1;
    value = std::rotl(value, 23) * kPrime2 + kPrime3;
    bytes = bytes.subspan(4);
  }
  for (const std::byte b : bytes) {
    value ^= std::to_integer<std::uint64_t>(b) * kPrime5;
    value = std::rotl(value, 11) * kPrime1;
  }
  value = (value ^ (value >> 33)) * kPrime2;
  value = (value ^ (value >> 29)) * kPrime3;
  return value ^ (value >> 32);
}

}  // namespace gatefold
