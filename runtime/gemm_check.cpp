#include "runtime/gemm_check.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <vector>

#include "runtime/hash.h"
#include "runtime/tensor_source.h"

namespace gatefold {
namespace {

/// Values in (-1, 1) of many magnitudes, so that a change of order shows in the bits.
void fill(std::vector<std::byte>& bytes, DType storage, std::uint64_t seed) {
  std::uint64_t state = seed;
  std::array<float, 1024> values{};
  const auto n = static_cast<std::int64_t>(bytes.size()) / size_of(storage);
  for (std::int64_t first = 0; first < n; first += std::ssize(values)) {
    for (float& value : values) {
      const std::uint64_t r = SplitMix64::mix(state += SplitMix64::kGamma);
      value = static_cast<float>(r >> 40) * 0x1p-23F - 1.0F;
      if ((r & 7U) == 0) value *= 0x1p-8F;
    }
    convert(DType::kF32, reinterpret_cast<const std::byte*>(values.data()), storage,
            bytes.data() + first * size_of(storage), std::min(std::ssize(values), n - first));
  }
}

}  // namespace

GemmCheck check_row_bits(std::int64_t rows, std::int64_t inputs, std::int64_t columns,
                         DType storage, const TileGemm& gemm) {
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const std::size_t row_bytes = size(inputs * size_of(storage));
  std::vector<std::byte> tile(size(rows) * row_bytes);
  std::vector<std::byte> weight(size(inputs * columns * size_of(storage)));
  fill(tile, storage, 1);
  fill(weight, storage, 2);

  std::vector<float> first(size(rows * columns));
  std::vector<float> again(first.size());
  const std::size_t result_row = size(columns) * sizeof(float);
  gemm(tile.data(), weight.data(), first.data());

  const auto same_row = [&](std::int64_t of_first, std::int64_t of_again) {
    return std::memcmp(first.data() + of_first * columns, again.data() + of_again * columns,
                       result_row) == 0;
  };

  GemmCheck check{true, 0};
  // Row r moves to place (r + shift) mod rows; shift 0 is the repeat.
  for (const std::int64_t shift :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{7}, rows / 2, rows - 1}) {
    std::vector<std::byte> moved(tile.size());
    for (std::int64_t r = 0; r < rows; ++r) {
      std::memcpy(moved.data() + size((r + shift) % rows) * row_bytes,
                  tile.data() + size(r) * row_bytes, row_bytes);
    }
    gemm(moved.data(), weight.data(), again.data());
    for (std::int64_t r = 0; r < rows; ++r) {
      check.passed = check.passed && same_row(r, (r + shift) % rows);
    }
  }
  // One row keeps its place while all others become zeros, NaN, or other values.
  for (int content = 0; content < 3; ++content) {
    for (const std::int64_t kept : {std::int64_t{0}, rows / 2, rows - 1}) {
      std::vector<std::byte> other(tile.size());
      if (content == 1) std::memset(other.data(), 0xff, other.size());
      if (content == 2) fill(other, storage, 3);
      std::memcpy(other.data() + size(kept) * row_bytes, tile.data() + size(kept) * row_bytes,
                  row_bytes);
      gemm(other.data(), weight.data(), again.data());
      check.passed = check.passed && same_row(kept, kept);
    }
  }
  Fnv1a hash;
  for (const float value : first) hash.add_unit(std::bit_cast<std::uint32_t>(value));
  check.fingerprint = hash.value();
  return check;
}

bool check_column_bits(std::int64_t rows, std::int64_t inputs, std::int64_t columns,
                       std::int64_t piece, DType storage, const TileGemm& whole,
                       const TileGemm& part) {
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  std::vector<std::byte> tile(size(rows * inputs * size_of(storage)));
  std::vector<std::byte> weight(size(inputs * columns * size_of(storage)));
  fill(tile, storage, 4);
  fill(weight, storage, 5);
  std::vector<float> at_once(size(rows * columns));
  std::vector<float> cut(size(rows * piece));
  whole(tile.data(), weight.data(), at_once.data());
  bool same = true;
  // The last piece ends where the columns do, so that every column is compared.
  for (std::int64_t begin = 0; begin < columns; begin += piece) {
    const std::int64_t first = std::min(begin, columns - piece);
    part(tile.data(), weight.data() + first * inputs * size_of(storage), cut.data());
    for (std::int64_t r = 0; r < rows; ++r) {
      same = same && std::memcmp(cut.data() + r * piece, at_once.data() + r * columns + first,
                                 size(piece) * sizeof(float)) == 0;
    }
  }
  return same;
}

WidthsCheck check_widths(std::int64_t rows, std::int64_t inputs, DType storage, std::int64_t base,
                         std::int64_t rest, const std::map<std::int64_t, TileGemm>& gemms) {
  WidthsCheck result{true, true, 0};
  Fnv1a fingerprint;
  for (const auto& [columns, gemm] : gemms) {
    const bool panel = columns == base || columns == rest;
    const GemmCheck check = check_row_bits(rows, inputs, columns, storage, gemm);
    bool& passed = panel ? result.rows : result.columns;
    passed = passed && check.passed;
    if (panel) fingerprint.add_number(check.fingerprint);
    if (columns == base) continue;
    const auto [narrow, wide] = std::minmax(base, columns);
    result.columns = result.columns && check_column_bits(rows, inputs, wide, narrow, storage,
                                                         gemms.at(wide), gemms.at(narrow));
  }
  result.fingerprint = fingerprint.value();
  return result;
}

}  // namespace gatefold
