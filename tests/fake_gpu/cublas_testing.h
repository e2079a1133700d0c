#pragma once

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

// Device memory, layouts and calls for the conformance tests of cuBLAS.

namespace gatefold {

/// Some tests are about what only the stand-ins do: their strictness and their switches.
inline bool on_stand_in() { return std::getenv("GATEFOLD_FAKE_GPU") != nullptr; }

inline std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// `bytes` bytes of device memory, each 0xFF: NaN in every element type.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::int64_t bytes) {
    EXPECT_EQ(cudaMalloc(&data_, as_size(bytes)), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0xff, as_size(bytes)), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  void* data() const { return data_; }
  std::byte* at(std::int64_t offset) const { return static_cast<std::byte*>(data_) + offset; }

 private:
  void* data_ = nullptr;
};

inline std::int64_t bytes_of(cudaDataType type) { return type == CUDA_R_32F ? 4 : 2; }

inline void to_bytes(float value, cudaDataType type, std::byte* out) {
  const __nv_bfloat16 bf16 = __float2bfloat16(value);
  const __half f16 = __float2half(value);
  const void* from = &value;
  if (type == CUDA_R_16BF) from = &bf16;
  if (type == CUDA_R_16F) from = &f16;
  std::memcpy(out, from, as_size(bytes_of(type)));
}

inline float from_bytes(const std::byte* in, cudaDataType type) {
  __nv_bfloat16 bf16;
  __half f16;
  float value = 0;
  std::memcpy(&bf16, in, sizeof bf16);
  std::memcpy(&f16, in, sizeof f16);
  if (type == CUDA_R_16BF) return __bfloat162float(bf16);
  if (type == CUDA_R_16F) return __half2float(f16);
  std::memcpy(&value, in, sizeof value);
  return value;
}

inline void upload(const DeviceBytes& out, cudaDataType type, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * as_size(bytes_of(type)));
  for (std::size_t i = 0; i < values.size(); ++i)
    to_bytes(values[i], type, bytes.data() + i * as_size(bytes_of(type)));
  EXPECT_EQ(cudaMemcpy(out.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice),
            cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

inline std::vector<float> download(const DeviceBytes& in, cudaDataType type, std::int64_t n) {
  std::vector<std::byte> bytes(as_size(n * bytes_of(type)));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(bytes.data(), in.data(), bytes.size(), cudaMemcpyDeviceToHost), cudaSuccess);
  std::vector<float> values(as_size(n));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = from_bytes(bytes.data() + i * as_size(bytes_of(type)), type);
  return values;
}

/// Values whose sums are exact in every order and type (integers), or depend on the order.
inline std::vector<float> some_values(std::int64_t n, std::uint32_t seed, bool integers) {
  std::vector<float> values(as_size(n));
  std::uint32_t state = seed * 2654435761U + 12345U;
  for (float& value : values) {
    state = state * 1664525U + 1013904223U;
    const auto draw = static_cast<int>(state >> 16);
    value = integers ? static_cast<float>(draw % 5 - 2)
                     : (static_cast<float>(draw) - 32768.0F) * (draw % 3 == 0 ? 0x1p-8F : 0x1p-15F);
  }
  return values;
}

/// A matrix as cublasLt sees it, and where its elements lie.
struct Matrix {
  cudaDataType type = CUDA_R_32F;
  std::int64_t rows = 0, cols = 0, ld = 0;
  cublasLtOrder_t order = CUBLASLT_ORDER_COL;
  std::int64_t batch = 1, stride = 0;

  std::int64_t outer() const { return order == CUBLASLT_ORDER_COL ? cols : rows; }
  std::int64_t size() const { return (batch - 1) * stride + outer() * ld; }
  std::int64_t index(std::int64_t b, std::int64_t row, std::int64_t col) const {
    return b * stride + (order == CUBLASLT_ORDER_COL ? row + col * ld : row * ld + col);
  }
};

/// Dense but for `padding` elements after each line and each matrix.
inline Matrix matrix(cudaDataType type, std::int64_t rows, std::int64_t cols,
                     cublasLtOrder_t order = CUBLASLT_ORDER_COL, std::int64_t padding = 0,
                     std::int64_t batch = 1) {
  Matrix m{type, rows, cols, (order == CUBLASLT_ORDER_COL ? rows : cols) + padding, order, batch};
  m.stride = batch > 1 ? m.outer() * m.ld + padding : 0;
  return m;
}

class LayoutOf {
 public:
  explicit LayoutOf(const Matrix& m) {
    EXPECT_EQ(cublasLtMatrixLayoutCreate(&layout_, m.type, static_cast<std::uint64_t>(m.rows),
                                         static_cast<std::uint64_t>(m.cols), m.ld),
              CUBLAS_STATUS_SUCCESS);
    set(CUBLASLT_MATRIX_LAYOUT_ORDER, static_cast<std::int32_t>(m.order));
    set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<std::int32_t>(m.batch));
    set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, m.stride);
  }
  ~LayoutOf() { cublasLtMatrixLayoutDestroy(layout_); }
  LayoutOf(const LayoutOf&) = delete;
  LayoutOf& operator=(const LayoutOf&) = delete;
  cublasLtMatrixLayout_t get() const { return layout_; }

 private:
  template <typename T>
  void set(cublasLtMatrixLayoutAttribute_t attribute, T value) {
    EXPECT_EQ(cublasLtMatrixLayoutSetAttribute(layout_, attribute, &value, sizeof value),
              CUBLAS_STATUS_SUCCESS);
  }
  cublasLtMatrixLayout_t layout_ = nullptr;
};

/// D = alpha op(A) op(B) + beta C, described; with a handle, a workspace and a default stream.
struct Call {
  Matrix a, b, d;
  bool trans_a = false, trans_b = false;
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  cudaDataType scale = CUDA_R_32F;
  std::uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
};

class Library {
 public:
  static constexpr std::int64_t kWorkspace = 4 << 20;

  Library() : workspace_(kWorkspace) { EXPECT_EQ(cublasLtCreate(&handle_), CUBLAS_STATUS_SUCCESS); }
  ~Library() { EXPECT_EQ(cublasLtDestroy(handle_), CUBLAS_STATUS_SUCCESS); }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  cublasLtHandle_t handle() const { return handle_; }
  void* workspace() const { return workspace_.data(); }

  struct Data {
    const void* a = nullptr;
    const void* b = nullptr;
    const void* c = nullptr;
    void* d = nullptr;
    float alpha = 1;
    float beta = 0;
  };
  cublasStatus_t matmul(const Call& call, const Data& data,
                        const cublasLtMatmulAlgo_t* algo = nullptr, cudaStream_t stream = nullptr,
                        std::int64_t workspace = kWorkspace) const {
    const Descriptors with(call);
    return cublasLtMatmul(handle_, with.operation, &data.alpha, data.a, with.a.get(), data.b,
                          with.b.get(), &data.beta, data.c, with.d.get(), data.d, with.d.get(),
                          algo, workspace_.data(), as_size(workspace), stream);
  }

  struct Preferences {
    std::uint64_t workspace = kWorkspace;
    std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
    std::uint32_t alignment = 256;
  };
  cublasStatus_t heuristic(const Call& call, const Preferences& wanted, int requested,
                           std::vector<cublasLtMatmulHeuristicResult_t>* results) const {
    const Descriptors with(call);
    cublasLtMatmulPreference_t preference = nullptr;
    EXPECT_EQ(cublasLtMatmulPreferenceCreate(&preference), CUBLAS_STATUS_SUCCESS);
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      EXPECT_EQ(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
                CUBLAS_STATUS_SUCCESS);
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, wanted.workspace);
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, wanted.reductions);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, wanted.alignment);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, wanted.alignment);
    results->assign(as_size(requested), {});
    int count = -1;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle_, with.operation, with.a.get(), with.b.get(), with.d.get(), with.d.get(), preference,
        requested, results->data(), &count);
    EXPECT_GE(count, 0);
    results->resize(as_size(count));
    EXPECT_EQ(cublasLtMatmulPreferenceDestroy(preference), CUBLAS_STATUS_SUCCESS);
    return status;
  }

  cublasStatus_t check(const Call& call, const cublasLtMatmulAlgo_t& algo) const {
    const Descriptors with(call);
    cublasLtMatmulHeuristicResult_t result{};
    return cublasLtMatmulAlgoCheck(handle_, with.operation, with.a.get(), with.b.get(),
                                   with.d.get(), with.d.get(), &algo, &result);
  }

 private:
  struct Descriptors {
    explicit Descriptors(const Call& call) : a(call.a), b(call.b), d(call.d) {
      EXPECT_EQ(cublasLtMatmulDescCreate(&operation, call.compute, call.scale),
                CUBLAS_STATUS_SUCCESS);
      const std::int32_t ops[] = {call.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                                  call.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N};
      cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &ops[0], 4);
      cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSB, &ops[1], 4);
      cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &call.epilogue, 4);
    }
    ~Descriptors() { cublasLtMatmulDescDestroy(operation); }
    Descriptors(const Descriptors&) = delete;
    Descriptors& operator=(const Descriptors&) = delete;
    cublasLtMatmulDesc_t operation = nullptr;
    LayoutOf a, b, d;
  };
  cublasLtHandle_t handle_ = nullptr;
  DeviceBytes workspace_;
};

/// D of a call on seeded inputs.
inline std::vector<float> product(const Library& library, const Call& call, bool integers,
                                  const cublasLtMatmulAlgo_t* algo = nullptr) {
  const DeviceBytes a(call.a.size() * bytes_of(call.a.type));
  const DeviceBytes b(call.b.size() * bytes_of(call.b.type));
  const DeviceBytes d(call.d.size() * bytes_of(call.d.type));
  upload(a, call.a.type, some_values(call.a.size(), 1, integers));
  upload(b, call.b.type, some_values(call.b.size(), 2, integers));
  EXPECT_EQ(library.matmul(call, {a.data(), b.data(), d.data(), d.data()}, algo),
            CUBLAS_STATUS_SUCCESS);
  return download(d, call.d.type, call.d.size());
}

}  // namespace gatefold
