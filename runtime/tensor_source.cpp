#include "runtime/tensor_source.h"

#include <fmt/format.h>

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

}  // namespace

Extent extent_of(const std::vector<std::int64_t>& shape) {
  Extent extent;
  if (shape.empty()) return extent;
  extent.columns = shape.back();
  for (std::size_t i = 0; i + 1 < shape.size(); ++i) extent.rows *= shape[i];
  return extent;
}

GATEFOLD_CLONES
void convert(DType from, const std::byte* in, DType to, std::byte* out, std::int64_t n) {
  if (n <= 0) return;
  if (from == to) {
    std::memcpy(out, in, static_cast<std::size_t>(n * size_of(from)));
    return;
  }
  switch (from) {
    case DType::kF32: return convert_from<DType::kF32>(in, to, out, n);
    case DType::kBf16: return convert_from<DType::kBf16>(in, to, out, n);
    case DType::kF16: return convert_from<DType::kF16>(in, to, out, n);
  }
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
