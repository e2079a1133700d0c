#include "runtime/hash.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace gatefold {
namespace {

// Published: the FNV reference vectors, and the first output of SplitMix64 for seed 0.
static_assert(Fnv1a().value() == 0xcbf29ce484222325U);
static_assert(Fnv1a().add("a").value() == 0xaf63dc4c8601ec8cU);
static_assert(Fnv1a().add("foobar").value() == 0x85944171f73967e8U);
static_assert(SplitMix64::mix(SplitMix64::kGamma) == 0xe220a8397b1dcdafU);

TEST(Hash, PiecesMakeTheSameValueAsTheWhole) {
  EXPECT_EQ(Fnv1a().add("foo").add("").add("bar").value(), Fnv1a().add("foobar").value());
}

TEST(Hash, ANumberIsItsLittleEndianBytes) {
  using namespace std::string_view_literals;
  EXPECT_EQ(Fnv1a().add_number(0x6261ffU).value(), Fnv1a().add("\xff\x61\x62\0\0\0\0\0"sv).value());
}

TEST(Hash, BytesAreTakenInOrderAndUnsigned) {
  const std::byte text[] = {std::byte{'a'}, std::byte{'b'}};
  EXPECT_EQ(Fnv1a().add(text).value(), Fnv1a().add("ab").value());
  const std::byte high[] = {std::byte{0xff}};
  EXPECT_EQ(Fnv1a().add(high).value(), Fnv1a().add_unit(0xff).value());
  EXPECT_EQ(Fnv1a().add("\xff").value(), Fnv1a().add_unit(0xff).value());
}

std::uint64_t xxh64_of(std::string_view text) { return xxh64(std::as_bytes(std::span(text))); }

// As the xxhash package has it; these lengths take every branch.
TEST(Xxh64, HasThePublishedValues) {
  EXPECT_EQ(xxh64_of(""), 0xef46db3751d8e999U);
  EXPECT_EQ(xxh64_of("a"), 0xd24ec4f1a98c6e5bU);
  EXPECT_EQ(xxh64_of("abc"), 0x44bc2cf5ad770999U);
  EXPECT_EQ(xxh64_of("xxhash"), 0x32dd38952c4bc720U);
  EXPECT_EQ(xxh64_of("Nobody inspects the spammish repetition"), 0xfbcea83c8a378bf1U);
  EXPECT_EQ(xxh64_of("1234567890123456789012345678901234567890"
                     "1234567890123456789012345678901234567890"),
            0xe04a477f19ee145dU);
}

TEST(Xxh64, EveryBitCounts) {
  std::vector<std::byte> bytes(111);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(37 * i);
  const std::uint64_t value = xxh64(bytes);
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    const auto flip = static_cast<std::byte>(1U << bit % 8);
    bytes[bit / 8] ^= flip;
    EXPECT_NE(xxh64(bytes), value) << "bit " << bit;
    bytes[bit / 8] ^= flip;
  }
}

// Signs of bf16 weights are the top bits of words, which a product alone would never mix down.
TEST(Xxh64, TwoFlippedSignsDoNotCancel) {
  std::vector<std::byte> bytes(4096);
  const std::uint64_t value = xxh64(bytes);
  bytes[7] ^= std::byte{0x80};
  for (std::size_t other = 15; other < bytes.size(); other += 8) {
    bytes[other] ^= std::byte{0x80};
    EXPECT_NE(xxh64(bytes), value) << "bytes 7 and " << other;
    bytes[other] ^= std::byte{0x80};
  }
}

// A piece of a file lies anywhere in memory.
TEST(Xxh64, AlignmentDoesNotCount) {
  std::vector<std::byte> bytes(100);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * i);
  const std::uint64_t value = xxh64(bytes);
  std::vector<std::byte> moved(108);
  for (std::size_t shift = 1; shift < 8; ++shift) {
    std::memcpy(moved.data() + shift, bytes.data(), bytes.size());
    EXPECT_EQ(xxh64(std::span(moved).subspan(shift, bytes.size())), value);
  }
}

}  // namespace
}  // namespace gatefold
