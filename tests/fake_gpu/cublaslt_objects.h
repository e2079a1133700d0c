#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <type_traits>

// What the stand-in keeps behind cublasLt's opaque types. Sizes are the real ones, so a caller may
// have them on its stack, and an algorithm may be sent to another process byte by byte.

namespace gatefold_fake {

/// First member of each object: a destroyed or foreign one is noticed.
enum class Tag : std::uint32_t {
  kNone,
  kLayout = 0x4c41594f,
  kOperation = 0x4f504552,
  kPreference = 0x50524546,
  kAlgo = 0x414c474f,
};

struct Layout {
  static constexpr Tag kTag = Tag::kLayout;
  Tag tag = kTag;
  std::uint32_t type = CUDA_R_32F;
  std::int32_t order = CUBLASLT_ORDER_COL;
  std::int32_t batch_count = 1;
  std::uint64_t rows = 0;
  std::uint64_t cols = 0;
  std::int64_t ld = 0;
  std::int64_t batch_stride = 0;
  std::int64_t plane_offset = 0;
  std::uint32_t batch_mode = 0;
};

struct Operation {
  static constexpr Tag kTag = Tag::kOperation;
  Tag tag = kTag;
  std::int32_t compute = CUBLAS_COMPUTE_32F;
  std::int32_t scale = CUDA_R_32F;
  std::int32_t pointer_mode = CUBLASLT_POINTER_MODE_HOST;
  std::int32_t trans_a = CUBLAS_OP_N;
  std::int32_t trans_b = CUBLAS_OP_N;
  std::int32_t trans_c = CUBLAS_OP_N;
  std::int32_t fill = CUBLAS_FILL_MODE_FULL;
  std::uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  std::int32_t sm_count_target = 0;
  const void* bias = nullptr;
  const void* a_scale = nullptr;
  const void* b_scale = nullptr;
  const void* c_scale = nullptr;
  const void* d_scale = nullptr;
  void* amax_d = nullptr;
};

struct Preference {
  static constexpr Tag kTag = Tag::kPreference;
  Tag tag = kTag;
  std::uint32_t search_mode = CUBLASLT_SEARCH_BEST_FIT;
  std::uint64_t max_workspace = 0;
  std::uint32_t reduction_mask = CUBLASLT_REDUCTION_SCHEME_MASK;
  std::uint32_t min_alignment[4] = {256, 256, 256, 256};  // A, B, C, D
  float max_waves = 0;
  std::uint64_t impl_mask = ~std::uint64_t{0};
};

struct Algo {
  static constexpr Tag kTag = Tag::kAlgo;
  Tag tag = kTag;
  std::int32_t id = -1;
  std::uint32_t tile = CUBLASLT_MATMUL_TILE_UNDEFINED;
  std::int32_t split_k = 1;
  std::uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_NONE;
  std::uint32_t swizzling = 0;
  std::uint32_t custom = 0;
  std::uint32_t stages = CUBLASLT_MATMUL_STAGES_UNDEFINED;
  std::uint16_t inner_shape = 0;
  std::uint16_t cluster_shape = 0;
  std::int32_t compute = 0;  // what cublasLtMatmulAlgoInit was told
  std::int32_t input_type = 0;
  std::int32_t output_type = 0;
};

/// The object behind an opaque pointer, or null where there is none or it is another kind.
template <typename Object, typename Opaque>
Object* object_of(Opaque* opaque) {
  using Qualified = std::conditional_t<std::is_const_v<Opaque>, const Object, Object>;
  static_assert(sizeof(Object) <= sizeof(Opaque) && std::is_trivially_copyable_v<Object>);
  auto* object = reinterpret_cast<Qualified*>(opaque);
  return object != nullptr && object->tag == Object::kTag ? const_cast<Object*>(object) : nullptr;
}

}  // namespace gatefold_fake
