#include "runtime/hash.h"

#include <gtest/gtest.h>

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

TEST(Hash, BytesAreUnsigned) {
  const std::byte high[] = {std::byte{0xff}};
  EXPECT_EQ(Fnv1a().add(high).value(), Fnv1a().add_unit(0xff).value());
  EXPECT_EQ(Fnv1a().add("\xff").value(), Fnv1a().add_unit(0xff).value());
}

}  // namespace
}  // namespace gatefold
