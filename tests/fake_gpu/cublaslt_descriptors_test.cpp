// What cublasLt's descriptors accept. None of it needs a device, so the real library runs it
// anywhere, and the stand-in has to agree.
#include <cublasLt.h>
#include <gmock/gmock.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace {

constexpr cublasStatus_t kOk = CUBLAS_STATUS_SUCCESS;
constexpr cublasStatus_t kInvalid = CUBLAS_STATUS_INVALID_VALUE;

/// A value that the enumeration doesn't have.
template <typename Enum>
Enum beyond(int number) {
  return static_cast<Enum>(number);
}

template <typename T>
struct Attribute {
  int id;
  T initial;
};

/// Sets and gets one attribute, with each way to get it wrong; `object` is left as it was.
template <typename T, typename Object, typename Id, typename Set, typename Get>
void expect_attribute(Object* object, Attribute<T> attribute, Set set, Get get) {
  SCOPED_TRACE("attribute " + std::to_string(attribute.id));
  const Id id = static_cast<Id>(attribute.id);
  T value{};
  std::size_t written = 0;
  EXPECT_EQ(get(object, id, nullptr, 0, &written), kOk);
  EXPECT_EQ(written, sizeof(T));
  EXPECT_EQ(get(object, id, &value, sizeof value, &written), kOk);
  EXPECT_EQ(value, attribute.initial);
  EXPECT_EQ(get(object, id, &value, sizeof value, nullptr), kOk);
  EXPECT_EQ(get(object, id, nullptr, 0, nullptr), kInvalid);
  EXPECT_EQ(get(object, id, nullptr, sizeof value, &written), kInvalid);
  EXPECT_EQ(get(object, id, &value, sizeof value + 4, &written), kInvalid);
  value = static_cast<T>(1);
  EXPECT_EQ(set(object, id, nullptr, sizeof value), kInvalid);
  EXPECT_EQ(set(object, id, &value, sizeof value + 4), kInvalid);
  EXPECT_EQ(set(object, id, &value, sizeof value), kOk);
  T after{};
  EXPECT_EQ(get(object, id, &after, sizeof after, &written), kOk);
  EXPECT_EQ(after, value);
  EXPECT_EQ(set(object, id, &attribute.initial, sizeof attribute.initial), kOk);
}

template <typename T>
void expect_layout(cublasLtMatrixLayout_t layout, Attribute<T> attribute) {
  expect_attribute<T, cublasLtMatrixLayoutOpaque_t, cublasLtMatrixLayoutAttribute_t>(
      layout, attribute, cublasLtMatrixLayoutSetAttribute, cublasLtMatrixLayoutGetAttribute);
}

template <typename T>
void expect_operation(cublasLtMatmulDesc_t operation, Attribute<T> attribute) {
  expect_attribute<T, cublasLtMatmulDescOpaque_t, cublasLtMatmulDescAttributes_t>(
      operation, attribute, cublasLtMatmulDescSetAttribute, cublasLtMatmulDescGetAttribute);
}

template <typename T>
void expect_preference(cublasLtMatmulPreference_t preference, Attribute<T> attribute) {
  expect_attribute<T, cublasLtMatmulPreferenceOpaque_t, cublasLtMatmulPreferenceAttributes_t>(
      preference, attribute, cublasLtMatmulPreferenceSetAttribute,
      cublasLtMatmulPreferenceGetAttribute);
}

TEST(CublasLtDescriptors, ALayoutHasItsAttributes) {
  cublasLtMatrixLayout_t layout = nullptr;
  ASSERT_EQ(cublasLtMatrixLayoutCreate(&layout, CUDA_R_16BF, 5, 7, 6), kOk);
  expect_layout<std::uint32_t>(layout, {CUBLASLT_MATRIX_LAYOUT_TYPE, CUDA_R_16BF});
  expect_layout<std::int32_t>(layout, {CUBLASLT_MATRIX_LAYOUT_ORDER, CUBLASLT_ORDER_COL});
  expect_layout<std::uint64_t>(layout, {CUBLASLT_MATRIX_LAYOUT_ROWS, 5});
  expect_layout<std::uint64_t>(layout, {CUBLASLT_MATRIX_LAYOUT_COLS, 7});
  expect_layout<std::int64_t>(layout, {CUBLASLT_MATRIX_LAYOUT_LD, 6});
  expect_layout<std::int32_t>(layout, {CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, 1});
  expect_layout<std::int64_t>(layout, {CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, 0});
  std::size_t written = 0;
  EXPECT_EQ(cublasLtMatrixLayoutGetAttribute(layout, beyond<cublasLtMatrixLayoutAttribute_t>(9),
                                             nullptr, 0, &written),
            kInvalid);
  EXPECT_EQ(cublasLtMatrixLayoutDestroy(layout), kOk);
}

TEST(CublasLtDescriptors, AnOperationHasItsAttributes) {
  cublasLtMatmulDesc_t operation = nullptr;
  ASSERT_EQ(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), kOk);
  expect_operation<std::int32_t>(operation,
                                 {CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, CUBLAS_COMPUTE_32F});
  expect_operation<std::int32_t>(operation, {CUBLASLT_MATMUL_DESC_SCALE_TYPE, CUDA_R_32F});
  expect_operation<std::int32_t>(operation, {CUBLASLT_MATMUL_DESC_POINTER_MODE, 0});
  expect_operation<std::int32_t>(operation, {CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_N});
  expect_operation<std::int32_t>(operation, {CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N});
  expect_operation<std::int32_t>(operation, {CUBLASLT_MATMUL_DESC_TRANSC, CUBLAS_OP_N});
  expect_operation<std::int32_t>(operation, {CUBLASLT_MATMUL_DESC_FILL_MODE, 2});
  expect_operation<std::uint32_t>(operation, {CUBLASLT_MATMUL_DESC_EPILOGUE, 1});
  expect_operation<std::int32_t>(operation, {CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, 0});
  EXPECT_EQ(cublasLtMatmulDescDestroy(operation), kOk);
}

TEST(CublasLtDescriptors, APreferenceHasItsAttributes) {
  cublasLtMatmulPreference_t preference = nullptr;
  ASSERT_EQ(cublasLtMatmulPreferenceCreate(&preference), kOk);
  expect_preference<std::uint32_t>(preference, {CUBLASLT_MATMUL_PREF_SEARCH_MODE, 0});
  expect_preference<std::uint64_t>(preference, {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, 0});
  expect_preference<std::uint32_t>(preference, {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, 7});
  for (const int id :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    expect_preference<std::uint32_t>(preference, {id, 256});
  expect_preference<float>(preference, {CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT, 0});
  expect_preference<std::uint64_t>(preference, {CUBLASLT_MATMUL_PREF_IMPL_MASK, ~std::uint64_t{0}});
  EXPECT_EQ(cublasLtMatmulPreferenceDestroy(preference), kOk);
}

TEST(CublasLtDescriptors, NothingLooksAtAValueBeforeItIsUsed) {
  cublasLtMatrixLayout_t layout = nullptr;
  EXPECT_EQ(cublasLtMatrixLayoutCreate(&layout, beyond<cudaDataType>(77), 4, 4, 3), kOk);
  const std::int32_t order = 9;
  EXPECT_EQ(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, 4), kOk);
  EXPECT_EQ(cublasLtMatrixLayoutDestroy(layout), kOk);
  cublasLtMatmulDesc_t operation = nullptr;
  EXPECT_EQ(cublasLtMatmulDescCreate(&operation, beyond<cublasComputeType_t>(5), CUDA_R_32F), kOk);
  EXPECT_EQ(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &order, 4), kOk);
  EXPECT_EQ(cublasLtMatmulDescDestroy(operation), kOk);
}

TEST(CublasLtDescriptors, NullIsInvalidExceptToDestroy) {
  EXPECT_EQ(cublasLtMatrixLayoutCreate(nullptr, CUDA_R_32F, 1, 1, 1), kInvalid);
  EXPECT_EQ(cublasLtMatmulDescCreate(nullptr, CUBLAS_COMPUTE_32F, CUDA_R_32F), kInvalid);
  EXPECT_EQ(cublasLtMatmulPreferenceCreate(nullptr), kInvalid);
  const std::int64_t ld = 1;
  EXPECT_EQ(cublasLtMatrixLayoutSetAttribute(nullptr, CUBLASLT_MATRIX_LAYOUT_LD, &ld, sizeof ld),
            kInvalid);
  EXPECT_EQ(cublasLtMatrixLayoutDestroy(nullptr), kOk);
  EXPECT_EQ(cublasLtMatmulDescDestroy(nullptr), kOk);
  EXPECT_EQ(cublasLtMatmulPreferenceDestroy(nullptr), kOk);
  EXPECT_EQ(cublasLtCreate(nullptr), kInvalid);
  EXPECT_EQ(cublasLtDestroy(nullptr), kInvalid);
}

TEST(CublasLtDescriptors, WithoutAHandleNothingIsInitialized) {
  cublasLtMatmulDescOpaque_t operation{};
  cublasLtMatrixLayoutOpaque_t layout{};
  cublasLtMatmulPreferenceOpaque_t preference{};
  ASSERT_EQ(cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), kOk);
  ASSERT_EQ(cublasLtMatrixLayoutInit(&layout, CUDA_R_32F, 1, 1, 1), kOk);
  ASSERT_EQ(cublasLtMatmulPreferenceInit(&preference), kOk);
  const float one = 1;
  cublasLtMatmulAlgo_t algo{};
  cublasLtMatmulHeuristicResult_t result{};
  int count = 0;
  int id = 0;
  EXPECT_EQ(cublasLtMatmul(nullptr, &operation, &one, nullptr, &layout, nullptr, &layout, &one,
                           nullptr, &layout, nullptr, &layout, nullptr, nullptr, 0, nullptr),
            CUBLAS_STATUS_NOT_INITIALIZED);
  EXPECT_EQ(cublasLtMatmulAlgoGetHeuristic(nullptr, &operation, &layout, &layout, &layout, &layout,
                                           &preference, 1, &result, &count),
            CUBLAS_STATUS_NOT_INITIALIZED);
  EXPECT_EQ(cublasLtMatmulAlgoInit(nullptr, CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F,
                                   CUDA_R_32F, CUDA_R_32F, 0, &algo),
            CUBLAS_STATUS_NOT_INITIALIZED);
  EXPECT_EQ(cublasLtMatmulAlgoGetIds(nullptr, CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_32F,
                                     CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, 1, &id, &count),
            CUBLAS_STATUS_NOT_INITIALIZED);
}

TEST(CublasLtDescriptors, ACallersOwnMemoryMustBeLargeEnough) {
  cublasLtMatrixLayoutOpaque_t layout{};
  EXPECT_EQ(cublasLtMatrixLayoutInit_internal(&layout, 8, CUDA_R_32F, 4, 4, 4),
            CUBLAS_STATUS_ALLOC_FAILED);
  EXPECT_EQ(cublasLtMatrixLayoutInit(&layout, CUDA_R_32F, 4, 4, 4), kOk);
  EXPECT_EQ(cublasLtMatrixLayoutInit(nullptr, CUDA_R_32F, 4, 4, 4), kInvalid);
}

TEST(CublasLtDescriptors, VersionsAndStatusesAreNamed) {
  EXPECT_EQ(cublasLtGetVersion(), CUBLAS_VERSION);
  EXPECT_EQ(cublasLtGetCudartVersion() / 1000, 13);
  int value = 0;
  EXPECT_EQ(cublasLtGetProperty(MAJOR_VERSION, &value), kOk);
  EXPECT_EQ(value, CUBLAS_VER_MAJOR);
  EXPECT_EQ(cublasLtGetProperty(MINOR_VERSION, nullptr), kInvalid);
  EXPECT_EQ(cublasLtGetProperty(beyond<libraryPropertyType>(9), &value), kInvalid);
  const std::map<int, std::string> texts = {
      {0, "CUBLAS_STATUS_SUCCESS: success"},
      {1, "CUBLAS_STATUS_NOT_INITIALIZED: the library was not initialized"},
      {3, "CUBLAS_STATUS_ALLOC_FAILED: the resource allocation failed"},
      {7,
       "CUBLAS_STATUS_INVALID_VALUE: an unsupported value or parameter was passed to the function"},
      {8,
       "CUBLAS_STATUS_ARCH_MISMATCH: the function requires an architectural feature absent from "
       "the device"},
      {11, "CUBLAS_STATUS_MAPPING_ERROR: an access to GPU memory space failed"},
      {13, "CUBLAS_STATUS_EXECUTION_FAILED: the function failed to launch on the GPU"},
      {14, "CUBLAS_STATUS_INTERNAL_ERROR: an internal operation failed"},
      {15, "CUBLAS_STATUS_NOT_SUPPORTED: the requested functionality is not supported"},
      {16, "CUBLAS_STATUS_LICENSE_ERROR: the license check failed"},
      {99, "unrecognized status: unrecognized status"},
  };
  for (const auto& [number, text] : texts) {
    const auto status = static_cast<cublasStatus_t>(number);
    EXPECT_EQ(std::string(cublasLtGetStatusName(status)) + ": " + cublasLtGetStatusString(status),
              text);
  }
}

}  // namespace
