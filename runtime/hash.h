#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace gatefold {

/// FNV-1a with 64 bits, fed piece by piece: the pieces' borders don't change the value.
class Fnv1a {
 public:
  constexpr Fnv1a() = default;

  constexpr Fnv1a& add(std::string_view text) {
    for (const char c : text) add_unit(static_cast<unsigned char>(c));
    return *this;
  }
  constexpr Fnv1a& add(std::span<const std::byte> bytes) {
    for (const std::byte b : bytes) add_unit(static_cast<std::uint64_t>(b));
    return *this;
  }
  /// The eight bytes of `number`, the low one first.
  constexpr Fnv1a& add_number(std::uint64_t number) {
    for (int shift = 0; shift < 64; shift += 8) add_unit((number >> shift) & 0xffU);
    return *this;
  }
  /// One step: a byte by the book, but a wider unit is as good where only equality counts.
  constexpr Fnv1a& add_unit(std::uint64_t unit) {
    value_ = (value_ ^ unit) * kPrime;
    return *this;
  }
  constexpr std::uint64_t value() const { return value_; }

 private:
  static constexpr std::uint64_t kPrime = 0x100000001b3U;
  std::uint64_t value_ = 0xcbf29ce484222325U;
};

/// XXH64 with seed 0 (Collet, "xxHash fast digest algorithm", 0.1.1), for megabytes: eight bytes a
/// step, four chains at once.
std::uint64_t xxh64(std::span<const std::byte> bytes);

/// SplitMix64 (Steele, Lea, Flood 2014): value i of a stream is mix(key + i * kGamma), so any slice
/// can be made alone.
struct SplitMix64 {
  static constexpr std::uint64_t kGamma = 0x9e3779b97f4a7c15U;

  static constexpr std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }
};

}  // namespace gatefold
