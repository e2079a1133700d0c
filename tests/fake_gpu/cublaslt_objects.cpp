// Stand-in for cublasLt's descriptors. Like the real ones they check the size of a value and not
// the value: what is wrong with it shows when a heuristic or a matmul looks at all of them.
#include "tests/fake_gpu/cublaslt_objects.h"

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>

namespace gatefold_fake {
namespace {

struct Attribute {
  int id;
  std::size_t offset;
  std::size_t bytes;
  bool read_only = false;
};

#define GATEFOLD_ATTRIBUTE(id, type, member) \
  Attribute { id, offsetof(type, member), sizeof(type::member) }

constexpr Attribute kLayoutAttributes[] = {
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_TYPE, Layout, type),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_ORDER, Layout, order),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_ROWS, Layout, rows),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_COLS, Layout, cols),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_LD, Layout, ld),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, Layout, batch_count),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, Layout, batch_stride),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_PLANE_OFFSET, Layout, plane_offset),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_BATCH_MODE, Layout, batch_mode),
};
constexpr Attribute kOperationAttributes[] = {
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, Operation, compute),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_DESC_SCALE_TYPE, Operation, scale),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_DESC_POINTER_MODE, Operation, pointer_mode),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_DESC_TRANSA, Operation, trans_a),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_DESC_TRANSB, Operation, trans_b),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_DESC_TRANSC, Operation, trans_c),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_DESC_FILL_MODE, Operation, fill),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_DESC_EPILOGUE, Operation, epilogue),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, Operation, sm_count_target),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_DESC_BIAS_POINTER, Operation, bias),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, Operation, a_scale),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, Operation, b_scale),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_DESC_C_SCALE_POINTER, Operation, c_scale),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, Operation, d_scale),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, Operation, amax_d),
};
constexpr Attribute kPreferenceAttributes[] = {
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_PREF_SEARCH_MODE, Preference, search_mode),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, Preference, max_workspace),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, Preference, reduction_mask),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, Preference, min_alignment[0]),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, Preference, min_alignment[1]),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, Preference, min_alignment[2]),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, Preference, min_alignment[3]),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT, Preference, max_waves),
    GATEFOLD_ATTRIBUTE(CUBLASLT_MATMUL_PREF_IMPL_MASK, Preference, impl_mask),
};
constexpr Attribute kAlgoAttributes[] = {
    {CUBLASLT_ALGO_CONFIG_ID, offsetof(Algo, id), sizeof(Algo::id), true},
    GATEFOLD_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_TILE_ID, Algo, tile),
    GATEFOLD_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, Algo, split_k),
    GATEFOLD_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, Algo, reduction),
    GATEFOLD_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, Algo, swizzling),
    GATEFOLD_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, Algo, custom),
    GATEFOLD_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_STAGES_ID, Algo, stages),
    GATEFOLD_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, Algo, inner_shape),
    GATEFOLD_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, Algo, cluster_shape),
};
#undef GATEFOLD_ATTRIBUTE

const Attribute* find(std::span<const Attribute> attributes, int id) {
  for (const Attribute& attribute : attributes)
    if (attribute.id == id) return &attribute;
  return nullptr;
}

template <typename Object>
cublasStatus_t set(Object* object, std::span<const Attribute> attributes, int id, const void* value,
                   std::size_t bytes) {
  const Attribute* attribute = find(attributes, id);
  if (object == nullptr || attribute == nullptr || attribute->read_only || value == nullptr ||
      bytes != attribute->bytes)
    return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(reinterpret_cast<std::byte*>(object) + attribute->offset, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

template <typename Object>
cublasStatus_t get(const Object* object, std::span<const Attribute> attributes, int id, void* value,
                   std::size_t bytes, std::size_t* written) {
  const Attribute* attribute = find(attributes, id);
  const bool asks_size = bytes == 0;
  if (object == nullptr || attribute == nullptr || (asks_size && written == nullptr) ||
      (!asks_size && (value == nullptr || bytes != attribute->bytes)))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (!asks_size)
    std::memcpy(value, reinterpret_cast<const std::byte*>(object) + attribute->offset, bytes);
  if (written != nullptr) *written = attribute->bytes;
  return CUBLAS_STATUS_SUCCESS;
}

template <typename Object, typename Opaque>
cublasStatus_t init(Opaque* opaque, std::size_t bytes, const Object& object) {
  if (opaque == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (bytes < sizeof(Object)) return CUBLAS_STATUS_ALLOC_FAILED;
  std::memcpy(opaque, &object, sizeof object);
  return CUBLAS_STATUS_SUCCESS;
}

template <typename Object, typename Opaque>
cublasStatus_t create(Opaque** out, const Object& object) {
  if (out == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  auto opaque = std::make_unique<Opaque>();
  init(opaque.get(), sizeof(Opaque), object);
  *out = opaque.release();
  return CUBLAS_STATUS_SUCCESS;
}

/// Destroying null is allowed, as it is in the real library.
template <typename Object, typename Opaque>
cublasStatus_t destroy(Opaque* opaque) {
  const std::unique_ptr<Opaque> owner(opaque);
  if (opaque == nullptr) return CUBLAS_STATUS_SUCCESS;
  Object* object = object_of<Object>(opaque);
  if (object == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  object->tag = Tag::kNone;
  return CUBLAS_STATUS_SUCCESS;
}

Layout make_layout(cudaDataType type, std::uint64_t rows, std::uint64_t cols, std::int64_t ld) {
  Layout layout;
  layout.type = static_cast<std::uint32_t>(type);
  layout.rows = rows;
  layout.cols = cols;
  layout.ld = ld;
  return layout;
}

Operation make_operation(cublasComputeType_t compute, cudaDataType scale) {
  Operation operation;
  operation.compute = compute;
  operation.scale = scale;
  return operation;
}

}  // namespace
}  // namespace gatefold_fake

using namespace gatefold_fake;

extern "C" {

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t bytes,
                                                 cudaDataType type, uint64_t rows, uint64_t cols,
                                                 int64_t ld) {
  return init(layout, bytes, make_layout(type, rows, cols, ld));
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
  return create(layout, make_layout(type, rows, cols, ld));
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return destroy<Layout>(layout);
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t bytes) {
  return set(object_of<Layout>(layout), kLayoutAttributes, attribute, value, bytes);
}
cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                void* value, size_t bytes, size_t* written) {
  return get(object_of<Layout>(layout), kLayoutAttributes, attribute, value, bytes, written);
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t operation, size_t bytes,
                                               cublasComputeType_t compute, cudaDataType_t scale) {
  return init(operation, bytes, make_operation(compute, scale));
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation,
                                        cublasComputeType_t compute, cudaDataType_t scale) {
  return create(operation, make_operation(compute, scale));
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
  return destroy<Operation>(operation);
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  return set(object_of<Operation>(operation), kOperationAttributes, attribute, value, bytes);
}
cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t attribute, void* value,
                                              size_t bytes, size_t* written) {
  return get(object_of<Operation>(operation), kOperationAttributes, attribute, value, bytes,
             written);
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference,
                                                     size_t bytes) {
  return init(preference, bytes, Preference{});
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return create(preference, Preference{});
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return destroy<Preference>(preference);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  return set(object_of<Preference>(preference), kPreferenceAttributes, attribute, value, bytes);
}
cublasStatus_t cublasLtMatmulPreferenceGetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    void* value, size_t bytes, size_t* written) {
  return get(object_of<Preference>(preference), kPreferenceAttributes, attribute, value, bytes,
             written);
}

cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t* algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  return set(object_of<Algo>(algo), kAlgoAttributes, attribute, value, bytes);
}
cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    void* value, size_t bytes, size_t* written) {
  return get(object_of<Algo>(algo), kAlgoAttributes, attribute, value, bytes, written);
}

}  // extern "C"
