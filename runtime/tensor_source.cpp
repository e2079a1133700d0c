#include "runtime/tensor_source.h"

#include <fmt/format.h>
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "runtime/error.h"
#include "runtime/vector_isa.h"

namespace gatefold {
namespace {

template <DType dtype>
float load(const std::byte* in) {
  if constexpr (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, in, sizeof value);
    return value;
  } else {
    std::uint16_t bits;
    std::memcpy(&bits, in, sizeof bits);
    return dtype == DType::kBf16 ? bf16_to_float(bits) : f16_to_float(bits);
  }
}

template <DType dtype>
void store(float value, std::byte* out) {
  if constexpr (dtype == DType::kF32) {
    std::memcpy(out, &value, sizeof value);
  } else {
    const std::uint16_t bits = dtype == DType::kBf16 ? float_to_bf16(value) : float_to_f16(value);
    std::memcpy(out, &bits, sizeof bits);
  }
}

template <DType from, DType to>
[[gnu::always_inline]] inline void convert_elements(const std::byte* in, std::byte* out,
                                                    std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    store<to>(load<from>(in + i * size_of(from)), out + i * size_of(to));
  }
}

template <DType from>
[[gnu::always_inline]] inline void convert_from(const std::byte* in, DType to, std::byte* out,
                                                std::int64_t n) {
  switch (to) {
    case DType::kF32: return convert_elements<from, DType::kF32>(in, out, n);
    case DType::kBf16: return convert_elements<from, DType::kBf16>(in, out, n);
    case DType::kF16: return convert_elements<from, DType::kF16>(in, out, n);
  }
}

/// Of f32 or bf16 as many as come in eights: the CPU rounds as float_to_f16() does, but for NaN.
template <DType from>
[[gnu::target("avx2,f16c")]] std::int64_t eights_to_f16(const std::byte* in, std::byte* out,
                                                        std::int64_t n) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 values;
    if constexpr (from == DType::kF32) {
      values = _mm256_loadu_ps(reinterpret_cast<const float*>(in + i * 4));
    } else {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i * 2));
      values = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m128i is_nan =
        _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
    const __m128i rounded = _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * 2),
                     _mm_blendv_epi8(rounded, _mm_set1_epi16(0x7e00), is_nan));
  }
  return i;
}

/// How many were rounded.
std::int64_t to_f16_by_the_cpu(DType from, const std::byte* in, std::byte* out, std::int64_t n) {
  static const bool can = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (!can) return 0;
  return from == DType::kF32 ? eights_to_f16<DType::kF32>(in, out, n)
                             : eights_to_f16<DType::kBf16>(in, out, n);
}

GATEFOLD_CLONES
void convert_to_another(DType from, const std::byte* in, DType to, std::byte* out, std::int64_t n) {
  switch (from) {
    case DType::kF32: return convert_from<DType::kF32>(in, to, out, n);
    case DType::kBf16: return convert_from<DType::kBf16>(in, to, out, n);
    case DType::kF16: return convert_from<DType::kF16>(in, to, out, n);
  }
}

}  // namespace

Extent extent_of(const std::vector<std::int64_t>& shape) {
  Extent extent;
  if (shape.empty()) return extent;
  extent.columns = shape.back();
  for (std::size_t i = 0; i + 1 < shape.size(); ++i) extent.rows *= shape[i];
  return extent;
}

void convert(DType from, const std::byte* in, DType to, std::byte* out, std::int64_t n) {
  if (n <= 0) return;
  if (from == to) {
    std::memcpy(out, in, static_cast<std::size_t>(n * size_of(from)));
    return;
  }
  const std::int64_t done = to == DType::kF16 ? to_f16_by_the_cpu(from, in, out, n) : 0;
  convert_to_another(from, in + done * size_of(from), to, out + done * size_of(to), n - done);
}

void read_as(const TensorSource& source, const std::string& name, Range rows, Range cols,
             DType dtype, std::byte* out) {
  const auto info = source.find(name);
  if (!info) {
    throw Error(ExitCode::kData,
                fmt::format("no tensor '{}' in {}; check that config.json and the files belong "
                            "together",
                            name, source.description()));
  }
  if (info->dtype == dtype || rows.empty() || cols.empty()) {
    source.read(name, rows, cols, out);
    return;
  }
  // Through a bounded buffer, so that a large matrix doesn't need its stored size once more.
  constexpr std::int64_t kStageElements = std::int64_t{1} << 18;  // stays in a cache
  const std::int64_t step = std::clamp<std::int64_t>(kStageElements / cols.size(), 1, rows.size());
  std::vector<std::byte> stage(static_cast<std::size_t>(step * cols.size() * size_of(info->dtype)));
  for (std::int64_t row = rows.begin; row < rows.end; row += step) {
    const Range part{row, std::min(row + step, rows.end)};
    source.read(name, part, cols, stage.data());
    convert(info->dtype, stage.data(), dtype,
            out + (row - rows.begin) * cols.size() * size_of(dtype), part.size() * cols.size());
  }
}

void read_as_float(const TensorSource& source, const std::string& name, Range rows, Range cols,
                   float* out) {
  read_as(source, name, rows, cols, DType::kF32, reinterpret_cast<std::byte*>(out));
}

}  // namespace gatefold
