#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>

#include "tests/fake_gpu/nccl/transfer.h"

namespace fake_nccl {
namespace {

float to_math(__half value) { return __half2float(value); }
float to_math(__nv_bfloat16 value) { return __bfloat162float(value); }
template <typename T>
T to_math(T value) {
  return value;
}

template <typename T, typename M>
T from_math(M value) {
  return static_cast<T>(value);
}
template <>
__half from_math<__half, float>(float value) {
  return __float2half(value);
}
template <>
__nv_bfloat16 from_math<__nv_bfloat16, float>(float value) {
  return __float2bfloat16(value);
}

template <typename M>
M combine(ncclRedOp_t op, M a, M b) {
  switch (op) {
    case ncclProd: return a * b;
    case ncclMax: return std::max(a, b);
    case ncclMin: return std::min(a, b);
    default: return a + b;
  }
}

template <typename T>
void reduce_typed(ncclRedOp_t op, const std::vector<const std::byte*>& parts, std::size_t count,
                  std::byte* out) {
  for (std::size_t i = 0; i < count; ++i) {
    T sum;
    std::memcpy(&sum, parts[0] + i * sizeof(T), sizeof(T));
    for (std::size_t r = 1; r < parts.size(); ++r) {
      T next;
      std::memcpy(&next, parts[r] + i * sizeof(T), sizeof(T));
      sum = from_math<T>(combine(op, to_math(sum), to_math(next)));
    }
    std::memcpy(out + i * sizeof(T), &sum, sizeof(T));
  }
}

}  // namespace

std::size_t type_bytes(ncclDataType_t type) {
  constexpr std::size_t kBytes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < ncclNumTypes ? kBytes[type] : 0;
}

bool can_reduce(ncclDataType_t type, ncclRedOp_t op) {
  const bool known_type = type == ncclInt32 || type == ncclInt64 || type == ncclUint64 ||
                          type == ncclFloat16 || type == ncclFloat32 || type == ncclFloat64 ||
                          type == ncclBfloat16;
  return known_type && op >= ncclSum && op <= ncclMin;
}

void reduce(ncclDataType_t type, ncclRedOp_t op, const std::vector<const std::byte*>& parts,
            std::size_t count, std::byte* out) {
  switch (type) {
    case ncclInt32: return reduce_typed<std::int32_t>(op, parts, count, out);
    case ncclInt64: return reduce_typed<std::int64_t>(op, parts, count, out);
    case ncclUint64: return reduce_typed<std::uint64_t>(op, parts, count, out);
    case ncclFloat16: return reduce_typed<__half>(op, parts, count, out);
    case ncclFloat32: return reduce_typed<float>(op, parts, count, out);
    case ncclFloat64: return reduce_typed<double>(op, parts, count, out);
    default: return reduce_typed<__nv_bfloat16>(op, parts, count, out);
  }
}

}  // namespace fake_nccl
