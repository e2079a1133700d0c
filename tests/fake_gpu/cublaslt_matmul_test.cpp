// cublasLtMatmul against plain loops, its order on a stream, and what it refuses. Values are small
// integers, so that every sum is exact.
#include <gmock/gmock.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <future>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "tests/fake_gpu/cublas_testing.h"

namespace gatefold {
namespace {

constexpr cublasLtOrder_t kColumns = CUBLASLT_ORDER_COL;
constexpr cublasLtOrder_t kRows = CUBLASLT_ORDER_ROW;
constexpr cublasStatus_t kInvalid = CUBLAS_STATUS_INVALID_VALUE;
constexpr cublasStatus_t kUnsupported = CUBLAS_STATUS_NOT_SUPPORTED;

struct Shape {
  std::int64_t m, n, k;
};

Call make_call(Shape s, cudaDataType in = CUDA_R_32F, cudaDataType out = CUDA_R_32F,
               std::int64_t batch = 1, std::int64_t padding = 0) {
  return {.a = matrix(in, s.m, s.k, kColumns, padding, batch),
          .b = matrix(in, s.k, s.n, kColumns, padding, batch),
          .d = matrix(out, s.m, s.n, kColumns, padding, batch)};
}

/// What D should hold, padding (NaN) included.
std::vector<float> expected(const Call& call, const std::vector<float>& a,
                            const std::vector<float>& b, const std::vector<float>& c, float alpha,
                            float beta) {
  std::vector<float> d(as_size(call.d.size()), std::nanf(""));
  const std::int64_t k = call.trans_a ? call.a.rows : call.a.cols;
  for (std::int64_t batch = 0; batch < call.d.batch; ++batch)
    for (std::int64_t row = 0; row < call.d.rows; ++row)
      for (std::int64_t col = 0; col < call.d.cols; ++col) {
        float sum = 0;
        for (std::int64_t i = 0; i < k; ++i)
          sum +=
              a[as_size(call.trans_a ? call.a.index(batch, i, row) : call.a.index(batch, row, i))] *
              b[as_size(call.trans_b ? call.b.index(batch, col, i) : call.b.index(batch, i, col))];
        const std::size_t at = as_size(call.d.index(batch, row, col));
        d[at] = alpha * sum + (beta == 0 ? 0 : beta * c[at]);
      }
  return d;
}

void expect_product(const Library& library, const Call& call, float alpha, float beta) {
  const DeviceBytes a(call.a.size() * bytes_of(call.a.type));
  const DeviceBytes b(call.b.size() * bytes_of(call.b.type));
  const DeviceBytes c(call.d.size() * bytes_of(call.d.type));
  const DeviceBytes d(call.d.size() * bytes_of(call.d.type));
  const std::vector<float> a_values = some_values(call.a.size(), 1, true);
  const std::vector<float> b_values = some_values(call.b.size(), 2, true);
  const std::vector<float> c_values = some_values(call.d.size(), 3, true);
  upload(a, call.a.type, a_values);
  upload(b, call.b.type, b_values);
  if (beta != 0) upload(c, call.d.type, c_values);  // else NaN, which nobody may read
  ASSERT_EQ(library.matmul(call, {a.data(), b.data(), c.data(), d.data(), alpha, beta}),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_THAT(download(d, call.d.type, call.d.size()),
              testing::Pointwise(testing::NanSensitiveFloatEq(),
                                 expected(call, a_values, b_values, c_values, alpha, beta)));
}

TEST(CublasLtMatmul, MultipliesInEachOrderAndTransposition) {
  const Library library;
  for (int i = 0; i < 32; ++i) {
    const auto order = [i](int bit) { return (i >> bit & 1) != 0 ? kRows : kColumns; };
    SCOPED_TRACE(i);
    Call call;
    call.trans_a = (i & 8) != 0;
    call.trans_b = (i & 16) != 0;
    const auto two = [](std::int64_t rows, std::int64_t cols, bool flip, cublasLtOrder_t lines) {
      return matrix(CUDA_R_16BF, flip ? cols : rows, flip ? rows : cols, lines, 8);
    };
    call.a = two(24, 40, call.trans_a, order(0));
    call.b = two(40, 16, call.trans_b, order(1));
    call.d = matrix(CUDA_R_32F, 24, 16, order(2), 4);
    expect_product(library, call, 1, 0);
  }
}

TEST(CublasLtMatmul, MultipliesEachTypeInBatches) {
  const Library library;
  for (const auto& [in, out] : {std::pair{CUDA_R_32F, CUDA_R_32F},
                                {CUDA_R_16BF, CUDA_R_32F},
                                {CUDA_R_16BF, CUDA_R_16BF},
                                {CUDA_R_16F, CUDA_R_32F},
                                {CUDA_R_16F, CUDA_R_16F}}) {
    SCOPED_TRACE(std::to_string(in) + " to " + std::to_string(out));
    expect_product(library, make_call({32, 24, 8}, in, out, 3, 8), 1, 0);
    expect_product(library, make_call({1, 16, 24}, in, out), 1, 0);
  }
}

TEST(CublasLtMatmul, SharesAMatrixOfABatchThatHasStrideZero) {
  const Library library;
  Call call = make_call({16, 8, 32}, CUDA_R_16BF, CUDA_R_32F, 4);
  call.a.stride = 0;
  expect_product(library, call, 1, 0);
}

TEST(CublasLtMatmul, ScalesTheProductAndAddsC) {
  const Library library;
  expect_product(library, make_call({16, 8, 32}), 2, 1);
  expect_product(library, make_call({16, 8, 32}, CUDA_R_16BF, CUDA_R_32F, 2), -1, 0.5F);
}

TEST(CublasLtMatmul, AddsInPlaceWhereCIsD) {
  const Library library;
  const Call call = make_call({8, 8, 8});
  const DeviceBytes a(call.a.size() * 4);
  const DeviceBytes d(call.d.size() * 4);
  upload(a, CUDA_R_32F, std::vector<float>(64, 1));
  upload(d, CUDA_R_32F, std::vector<float>(64, 3));
  ASSERT_EQ(library.matmul(call, {a.data(), a.data(), d.data(), d.data(), 1, 1}),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_THAT(download(d, CUDA_R_32F, 64), testing::Each(11.0F));
}

TEST(CublasLtMatmul, WaitsForItsStreamAndReturnsBefore) {
  const Library library;
  const Call call = make_call({8, 8, 8});
  const DeviceBytes a(call.a.size() * 4);
  const DeviceBytes d(call.d.size() * 4);
  upload(a, CUDA_R_32F, std::vector<float>(64, 1));
  float* twos = nullptr;  // pinned, or a copy would wait
  float* found = nullptr;
  ASSERT_EQ(cudaMallocHost(reinterpret_cast<void**>(&twos), 256), cudaSuccess);
  ASSERT_EQ(cudaMallocHost(reinterpret_cast<void**>(&found), 256), cudaSuccess);
  std::fill_n(twos, 64, 2.0F);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  std::promise<void> gate;
  const auto wait = [](void* promise) {
    static_cast<std::promise<void>*>(promise)->get_future().wait_for(std::chrono::seconds(60));
  };
  ASSERT_EQ(cudaLaunchHostFunc(stream, wait, &gate), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(a.data(), twos, 256, cudaMemcpyHostToDevice, stream), cudaSuccess);
  EXPECT_EQ(library.matmul(call, {a.data(), a.data(), d.data(), d.data()}, nullptr, stream),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(cudaMemcpyAsync(found, d.data(), 256, cudaMemcpyDeviceToHost, stream), cudaSuccess);
  // What went to another stream has run by now, and multiplied ones.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  gate.set_value();
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(std::vector<float>(found, found + 64), std::vector<float>(64, 32));
  EXPECT_EQ(cudaFreeHost(twos), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(found), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

/// A matmul and a heuristic have one opinion of what can't be.
void expect_refused(const Library& library, const Call& call, cublasStatus_t status) {
  const DeviceBytes memory(1 << 20);
  EXPECT_EQ(library.matmul(
                call, {memory.at(0), memory.at(1 << 18), memory.at(1 << 19), memory.at(1 << 19)}),
            status);
  std::vector<cublasLtMatmulHeuristicResult_t> results;
  EXPECT_EQ(library.heuristic(call, {}, 4, &results), status);
  EXPECT_TRUE(results.empty());
}

TEST(CublasLtMatmul, RefusesShapesThatDontFitEachOther) {
  const Library library;
  const Call good = make_call({16, 8, 32});
  Call call = good;
  call.a.ld = 15;
  expect_refused(library, call, kInvalid);
  call = good;
  call.d.ld = 15;
  expect_refused(library, call, kInvalid);
  call = good;
  call.b.rows = 31;
  expect_refused(library, call, kInvalid);
  call = good;
  call.trans_a = true;
  expect_refused(library, call, kInvalid);
  call = good;
  call.d.cols = 7;
  expect_refused(library, call, kInvalid);
  call = good;
  call.a.order = kRows;  // leading dimension 16 of 32 columns
  expect_refused(library, call, kInvalid);
}

TEST(CublasLtMatmul, RefusesBatchesOfDifferentLength) {
  const Library library;
  Call call = make_call({16, 8, 32}, CUDA_R_32F, CUDA_R_32F, 4);
  call.b.batch = 3;
  expect_refused(library, call, kInvalid);
}

TEST(CublasLtMatmul, RefusesTypesThatNoKernelHas) {
  const Library library;
  Call call = make_call({16, 8, 32}, CUDA_R_32F, CUDA_R_16BF);
  expect_refused(library, call, kUnsupported);
  call = make_call({16, 8, 32}, CUDA_R_16BF, CUDA_R_16F);
  expect_refused(library, call, kUnsupported);
  call = make_call({16, 8, 32});
  call.b.type = CUDA_R_16BF;
  expect_refused(library, call, kUnsupported);
  call = make_call({16, 8, 32}, CUDA_R_16BF, CUDA_R_32F);
  call.scale = CUDA_R_16BF;
  expect_refused(library, call, kUnsupported);
}

TEST(CublasLtMatmul, RefusesNullOperands) {
  const Library library;
  const Call call = make_call({16, 8, 32});
  const DeviceBytes memory(1 << 14);
  const void* in = memory.at(0);
  void* out = memory.at(1 << 13);
  EXPECT_EQ(library.matmul(call, {nullptr, in, out, out}), kInvalid);
  EXPECT_EQ(library.matmul(call, {in, nullptr, out, out}), kInvalid);
  EXPECT_EQ(library.matmul(call, {in, in, out, nullptr}), kInvalid);
}

class CublasLtStrictness : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_stand_in()) GTEST_SKIP() << "the real library doesn't look";
  }
};

TEST_F(CublasLtStrictness, ComputesTf32OnlyWhereAsked) {
  const Library library;
  Call call = make_call({8, 8, 8});
  const DeviceBytes a(call.a.size() * 4);
  const DeviceBytes d(call.d.size() * 4);
  upload(a, CUDA_R_32F, std::vector<float>(64, 1 + 0x1p-12F));
  ASSERT_EQ(library.matmul(call, {a.data(), a.data(), d.data(), d.data()}), CUBLAS_STATUS_SUCCESS);
  EXPECT_THAT(download(d, CUDA_R_32F, 64), testing::Each(testing::Gt(8.0F)));
  call.compute = CUBLAS_COMPUTE_32F_FAST_TF32;
  ASSERT_EQ(library.matmul(call, {a.data(), a.data(), d.data(), d.data()}), CUBLAS_STATUS_SUCCESS);
  EXPECT_THAT(download(d, CUDA_R_32F, 64), testing::Each(8.0F));
}

TEST_F(CublasLtStrictness, RefusesOverlaps) {
  const Library library;
  const Call call = make_call({8, 8, 8});
  const DeviceBytes memory(1 << 12);
  const void* a = memory.at(0);
  const void* b = memory.at(256);
  EXPECT_EQ(library.matmul(call, {a, b, memory.at(512), memory.at(256)}), kInvalid);
  EXPECT_EQ(library.matmul(call, {a, b, memory.at(512), memory.at(512 + 64)}), kInvalid);
  Call batched = make_call({8, 8, 8}, CUDA_R_32F, CUDA_R_32F, 2);
  batched.d.stride = 63;
  EXPECT_EQ(library.matmul(batched, {a, a, memory.at(1024), memory.at(1024)}), kInvalid);
}

TEST_F(CublasLtStrictness, RefusesWhatItDoesNotCompute) {
  const Library library;
  Call call = make_call({8, 8, 8});
  call.epilogue = CUBLASLT_EPILOGUE_GELU;
  expect_refused(library, call, kUnsupported);
  call = make_call({8, 8, 8});
  call.d.rows = call.a.rows = 0;
  expect_refused(library, call, kInvalid);
  call = make_call({8, 8, 8});
  call.a.stride = -1;
  expect_refused(library, call, kInvalid);
  call.a.stride = 0;
  call.d.order = CUBLASLT_ORDER_COL32;
  expect_refused(library, call, kUnsupported);
}

/// The device is broken after each of these: a process of its own.
using CublasLtStrictnessDeathTest = CublasLtStrictness;

void multiply_and_exit(std::int64_t a_bytes, bool on_host) {
  const Library library;
  const Call call = make_call({8, 8, 8});
  const DeviceBytes a(a_bytes);
  const DeviceBytes d(256);
  const std::vector<float> host(64);
  const void* in = on_host ? host.data() : a.data();
  const cublasStatus_t status = library.matmul(call, {in, d.data(), d.data(), d.data()});
  const bool broken = cudaDeviceSynchronize() == cudaErrorIllegalAddress;
  std::_Exit(status == CUBLAS_STATUS_EXECUTION_FAILED && broken ? 3 : 4);
}

TEST_F(CublasLtStrictnessDeathTest, BreaksTheDeviceOverHostMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(multiply_and_exit(256, true), testing::ExitedWithCode(3),
              "A isn't 256 bytes of one device allocation");
}

TEST_F(CublasLtStrictnessDeathTest, BreaksTheDeviceOverMemoryThatEndsTooSoon) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(multiply_and_exit(255, false), testing::ExitedWithCode(3), "A isn't 256 bytes");
}

}  // namespace
}  // namespace gatefold
