#include "runtime/block_codecs.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "runtime/vector_isa.h"

namespace gatefold {
namespace {

/// Two bf16 in the order in which a byte's halves come: a table is faster than arithmetic on bytes.
constexpr std::array<std::uint32_t, 256> make_pairs() {
  std::array<std::uint32_t, 256> pairs{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    const std::uint32_t low = float_to_bf16(f4_e2m1_to_float(byte & 15U));
    const std::uint32_t high = float_to_bf16(f4_e2m1_to_float(byte >> 4));
    pairs[byte] = low | (high << 16);
  }
  return pairs;
}
constexpr std::array<std::uint32_t, 256> kPairs = make_pairs();
static_assert(std::endian::native == std::endian::little);

}  // namespace

GATEFOLD_CLONES
void decode_f8_e4m3(const std::byte* codes, Range cols, std::int64_t block, const float* scales,
                    float* out) {
  for (std::int64_t at = cols.begin; at < cols.end;) {
    const std::int64_t end = std::min((at / block + 1) * block, cols.end);
    const float scale = *scales++;
    const std::byte* in = codes + (at - cols.begin);
    float* to = out + (at - cols.begin);
    for (std::int64_t i = 0; i < end - at; ++i) {
      const float value = f8_e4m3_to_float(static_cast<std::uint8_t>(in[i])) * scale;
      const auto bits = std::bit_cast<std::uint32_t>(value);
      to[i] = std::bit_cast<float>(select((bits & 0x7fffffffU) > 0x7f800000U, 0x7fc00000U, bits));
    }
    at = end;
  }
}

GATEFOLD_CLONES
void decode_mxfp4(const std::byte* codes, const std::byte* scales, std::int64_t groups,
                  std::uint16_t* out) {
  for (std::int64_t g = 0; g < groups; ++g) {
    std::array<std::uint32_t, kMxGroupBytes> pairs;
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      pairs[i] = kPairs[static_cast<std::uint8_t>(codes[i])];
    }
    const auto values = std::bit_cast<std::array<std::uint16_t, kMxGroup>>(pairs);
    const float scale = f8_e8m0_to_float(static_cast<std::uint8_t>(scales[g]));
    for (std::size_t i = 0; i < values.size(); ++i) {
      out[i] = float_to_bf16(bf16_to_float(values[i]) * scale);
    }
    codes += kMxGroupBytes;
    out += kMxGroup;
  }
}

GATEFOLD_CLONES
void transpose_group(const std::uint16_t* in, std::int64_t in_step, std::uint16_t* out,
                     std::int64_t out_step) {
  // Neighbouring rows into wider elements, twice, so that a column is eight moves and not 32.
  std::array<std::array<std::uint64_t, kMxGroup>, kMxGroup / 4> fours;
  for (std::size_t r = 0; r < fours.size(); ++r) {
    const std::uint16_t* rows = in + static_cast<std::int64_t>(4 * r) * in_step;
    for (std::size_t c = 0; c < kMxGroup; ++c) {
      const std::uint16_t* column = rows + c;
      const std::uint32_t low = column[0] | static_cast<std::uint32_t>(column[in_step]) << 16;
      const std::uint32_t high =
          column[2 * in_step] | static_cast<std::uint32_t>(column[3 * in_step]) << 16;
      fours[r][c] = low | static_cast<std::uint64_t>(high) << 32;
    }
  }
  for (std::size_t c = 0; c < kMxGroup; ++c) {
    std::array<std::uint64_t, kMxGroup / 4> column;
    for (std::size_t r = 0; r < fours.size(); ++r) column[r] = fours[r][c];
    std::memcpy(out + static_cast<std::int64_t>(c) * out_step, column.data(), sizeof(column));
  }
}

}  // namespace gatefold
