// Which algorithms the heuristic offers, that one stays what it is when pinned, and the switches by
// which the stand-in makes bits depend on what they shouldn't.
#include <gmock/gmock.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "tests/fake_gpu/cublas_testing.h"

namespace gatefold {
namespace {

using Results = std::vector<cublasLtMatmulHeuristicResult_t>;
using testing::ElementsAreArray;
using testing::Not;

Call make_call(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t batch = 1) {
  return {.a = matrix(CUDA_R_16BF, m, k, CUBLASLT_ORDER_COL, 0, batch),
          .b = matrix(CUDA_R_16BF, k, n, CUBLASLT_ORDER_COL, 0, batch),
          .d = matrix(CUDA_R_32F, m, n, CUBLASLT_ORDER_COL, 0, batch)};
}

Results offered(const Library& library, const Call& call, Library::Preferences wanted = {},
                int requested = 16) {
  Results results;
  EXPECT_EQ(library.heuristic(call, wanted, requested, &results), CUBLAS_STATUS_SUCCESS);
  EXPECT_FALSE(results.empty());
  return results;
}

template <typename T>
T configured(const cublasLtMatmulAlgo_t& algo, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  T value{};
  std::size_t written = 0;
  EXPECT_EQ(cublasLtMatmulAlgoConfigGetAttribute(&algo, attribute, &value, sizeof value, &written),
            CUBLAS_STATUS_SUCCESS);
  return value;
}

bool splits_k(const cublasLtMatmulAlgo_t& algo) {
  const bool split = configured<std::int32_t>(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) > 1;
  const bool reduces = configured<std::uint32_t>(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) != 0;
  EXPECT_EQ(split, reduces);
  return split;
}

TEST(CublasLtAlgos, SeveralAreOfferedAndEachGivesTheProduct) {
  const Library library;
  const Call call = make_call(512, 64, 256);
  const std::vector<float> whole = product(library, call, true);
  std::set<std::string> distinct;
  for (const auto& result : offered(library, call)) {
    EXPECT_EQ(result.state, CUBLAS_STATUS_SUCCESS);
    EXPECT_LE(result.workspaceSize, as_size(Library::kWorkspace));
    EXPECT_EQ(library.check(call, result.algo), CUBLAS_STATUS_SUCCESS);
    distinct.emplace(reinterpret_cast<const char*>(&result.algo), sizeof result.algo);
    EXPECT_THAT(product(library, call, true, &result.algo), ElementsAreArray(whole));
  }
  EXPECT_GE(distinct.size(), 2U);
}

TEST(CublasLtAlgos, NoMoreAreWrittenThanAskedFor) {
  const Library library;
  EXPECT_EQ(offered(library, make_call(512, 64, 256), {}, 1).size(), 1U);
}

TEST(CublasLtAlgos, WithoutReductionSchemesNoneSplitsK) {
  const Library library;
  for (const std::int64_t n : {1, 16, 64})
    for (const auto& result :
         offered(library, make_call(256, n, 4096), {.reductions = CUBLASLT_REDUCTION_SCHEME_NONE}))
      EXPECT_FALSE(splits_k(result.algo));
}

TEST(CublasLtAlgos, WithoutWorkspaceNoneNeedsOne) {
  const Library library;
  const Call call = make_call(64, 16, 4096);
  for (const auto& result : offered(library, call, {.workspace = 0})) {
    EXPECT_EQ(result.workspaceSize, 0U);
    product(library, call, true, &result.algo);
  }
}

TEST(CublasLtAlgos, APinnedOneGivesTheSameBitsFromACopyOfItsBytes) {
  const Library library;
  const Call call = make_call(128, 32, 512);
  for (const auto& result : offered(library, call, {.reductions = 0})) {
    cublasLtMatmulAlgo_t copy{};
    std::memcpy(&copy, &result.algo, sizeof copy);
    const std::vector<float> first = product(library, call, false, &result.algo);
    EXPECT_THAT(product(library, call, false, &copy), ElementsAreArray(first));
  }
}

TEST(CublasLtAlgos, AWorkspaceSmallerThanNeededIsInvalid) {
  const Library library;
  const Call call = make_call(64, 16, 4096);
  const DeviceBytes memory(2 << 20);
  int needy = 0;
  for (const auto& result : offered(library, call)) {
    if (result.workspaceSize == 0) continue;
    ++needy;
    EXPECT_EQ(library.matmul(
                  call, {memory.at(0), memory.at(1 << 20), memory.at(3 << 19), memory.at(3 << 19)},
                  &result.algo, nullptr, static_cast<std::int64_t>(result.workspaceSize) - 1),
              CUBLAS_STATUS_INVALID_VALUE);
  }
  if (on_stand_in()) {
    EXPECT_GE(needy, 1);
  }
}

TEST(CublasLtAlgos, UnalignedLeadingDimensionsLeaveSome) {
  const Library library;
  Call call = make_call(24, 8, 31);
  call.a.ld = 25;
  call.b.ld = 33;
  for (const auto& result : offered(library, call)) product(library, call, true, &result.algo);
}

TEST(CublasLtAlgos, NothingToWriteIsInvalid) {
  const Library library;
  Results results;
  EXPECT_EQ(library.heuristic(make_call(8, 8, 8), {}, 0, &results), CUBLAS_STATUS_INVALID_VALUE);
}

/// Settings of the stand-in, put back afterwards.
class CublasLtSwitches : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_stand_in()) GTEST_SKIP() << "switches of the stand-in";
  }
  void TearDown() override {
    for (const std::string& name : set_) unsetenv(name.c_str());
  }
  void set(const std::string& name, const char* value) {
    set_.push_back("GATEFOLD_FAKE_GPU_" + name);
    setenv(set_.back().c_str(), value, 1);
  }
  /// The first algorithm without split-K, which the switches act on.
  static cublasLtMatmulAlgo_t pinned(const Library& library, const Call& call) {
    return offered(library, call, {.reductions = 0}).front().algo;
  }

 private:
  std::vector<std::string> set_;
};

TEST_F(CublasLtSwitches, EachAlgorithmHasBitsOfItsOwn) {
  const Library library;
  const Call call = make_call(64, 32, 1024);
  std::set<std::vector<float>> distinct;
  const Results results = offered(library, call);
  for (const auto& result : results) distinct.insert(product(library, call, false, &result.algo));
  EXPECT_GE(results.size(), 4U);
  // In-place and by output type are one and the same for a f32 output, in this order of splits.
  EXPECT_GE(distinct.size(), 4U);
}

TEST_F(CublasLtSwitches, FewRowsOrColumnsRankSplitKFirst) {
  const Library library;
  EXPECT_TRUE(splits_k(offered(library, make_call(256, 16, 1024)).front().algo));
  EXPECT_FALSE(splits_k(offered(library, make_call(256, 17, 1024)).front().algo));
}

TEST_F(CublasLtSwitches, RankingCanDifferByRank) {
  const Library library;
  const Call call = make_call(256, 32, 128);
  const Results before = offered(library, call);
  set("GEMM_RANKING", "1,7:0");
  const Results after = offered(library, call);
  EXPECT_EQ(std::memcmp(&before[1].algo, &after[0].algo, sizeof after[0].algo), 0);
}

/// The first of `columns` columns of the product, which has the same inputs whatever their number.
std::vector<float> first_column(const Library& library, std::int64_t columns, std::int64_t batch,
                                const cublasLtMatmulAlgo_t& algo) {
  std::vector<float> d = product(library, make_call(16, columns, 512, batch), false, &algo);
  d.resize(16);
  return d;
}

TEST_F(CublasLtSwitches, BitsDependOnNothingElseUnlessAsked) {
  const Library library;
  const auto algo = pinned(library, make_call(16, 32, 512));
  const std::vector<float> alone = first_column(library, 1, 1, algo);
  EXPECT_THAT(first_column(library, 7, 1, algo), ElementsAreArray(alone));
  EXPECT_THAT(first_column(library, 7, 3, algo), ElementsAreArray(alone));
  set("GEMM_BY_COLUMNS", "1");
  EXPECT_THAT(first_column(library, 7, 1, algo), Not(ElementsAreArray(alone)));
  EXPECT_THAT(first_column(library, 7, 1, algo),
              ElementsAreArray(first_column(library, 7, 1, algo)));
}

TEST_F(CublasLtSwitches, BitsCanDependOnTheBatchCount) {
  const Library library;
  const auto algo = pinned(library, make_call(16, 32, 512));
  const std::vector<float> alone = first_column(library, 2, 1, algo);
  set("GEMM_BY_BATCH", "1");
  EXPECT_THAT(first_column(library, 2, 1, algo), ElementsAreArray(alone));
  EXPECT_THAT(first_column(library, 2, 3, algo), Not(ElementsAreArray(alone)));
}

TEST_F(CublasLtSwitches, BitsCanDependOnThePlaceOrTheCall) {
  const Library library;
  const auto algo = pinned(library, make_call(16, 32, 512));
  const Call call = make_call(16, 2, 512);
  const std::vector<float> before = product(library, call, false, &algo);
  set("GEMM_BY_CALL", "1");
  EXPECT_THAT(product(library, call, false, &algo),
              Not(ElementsAreArray(product(library, call, false, &algo))));
  set("GEMM_BY_CALL", "0");
  set("GEMM_BY_PLACE", "1");
  const std::vector<float> after = product(library, call, false, &algo);
  EXPECT_EQ(after[0], before[0]);
  EXPECT_THAT(after, Not(ElementsAreArray(before)));
}

TEST_F(CublasLtSwitches, BitsCanDependOnOtherRows) {
  const Library library;
  const auto algo = pinned(library, make_call(16, 32, 512));
  const Call call = make_call(16, 2, 512);
  const DeviceBytes a(call.a.size() * 2);
  const DeviceBytes b(call.b.size() * 2);
  const DeviceBytes d(call.d.size() * 4);
  upload(a, CUDA_R_16BF, some_values(call.a.size(), 1, false));
  // The second column of D, beside a first one that changes.
  const auto second = [&](std::uint32_t seed) {
    std::vector<float> values = some_values(512, seed, false);
    const std::vector<float> mine = some_values(512, 9, false);
    values.insert(values.end(), mine.begin(), mine.end());
    upload(b, CUDA_R_16BF, values);
    EXPECT_EQ(library.matmul(call, {a.data(), b.data(), d.data(), d.data()}, &algo),
              CUBLAS_STATUS_SUCCESS);
    const std::vector<float> out = download(d, CUDA_R_32F, call.d.size());
    return std::vector<float>(out.begin() + 16, out.end());
  };
  EXPECT_THAT(second(4), ElementsAreArray(second(5)));
  set("GEMM_BY_CONTENT", "1");
  EXPECT_THAT(second(4), Not(ElementsAreArray(second(5))));
}

TEST_F(CublasLtSwitches, AShapeCanBeUnsupported) {
  const Library library;
  set("GEMM_UNSUPPORTED", "1x2x3,64x16x32");
  Results results;
  EXPECT_EQ(library.heuristic(make_call(64, 16, 32), {}, 4, &results), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(library.heuristic(make_call(64, 16, 33), {}, 4, &results), CUBLAS_STATUS_SUCCESS);
}

TEST_F(CublasLtSwitches, AnAlgorithmOfOtherTypesIsInvalid) {
  const Library library;
  const auto algo = pinned(library, make_call(16, 32, 512));
  Call call = make_call(16, 32, 512);
  call.a.type = call.b.type = CUDA_R_16F;
  EXPECT_EQ(library.check(call, algo), CUBLAS_STATUS_INVALID_VALUE);
  cublasLtMatmulAlgo_t changed = algo;
  const std::int32_t splits = 4;
  cublasLtMatmulAlgoConfigSetAttribute(&changed, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits,
                                       sizeof splits);
  EXPECT_EQ(library.check(make_call(16, 32, 512), changed), CUBLAS_STATUS_INVALID_VALUE);
}

TEST_F(CublasLtSwitches, CallsFailByRequest) {
  const Library library;
  const Call call = make_call(8, 8, 8);
  const DeviceBytes memory(1 << 12);
  std::string every;
  for (int i = 1; i < 1000; ++i) every += (i > 1 ? ",gemm:" : "gemm:") + std::to_string(i);
  set("FAIL", every.c_str());
  EXPECT_EQ(library.matmul(call, {memory.at(0), memory.at(1024), memory.at(2048), memory.at(2048)}),
            CUBLAS_STATUS_EXECUTION_FAILED);
  set("FAIL", "cublas_create:1000,heuristic:1000");
  EXPECT_EQ(library.matmul(call, {memory.at(0), memory.at(1024), memory.at(2048), memory.at(2048)}),
            CUBLAS_STATUS_SUCCESS);
}

}  // namespace
}  // namespace gatefold
