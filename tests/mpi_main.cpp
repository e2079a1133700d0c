// main() of every multi-rank test: all ranks run the same tests, a failure on any rank fails all.
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdio>

namespace {

/// After each test all ranks meet and learn whether any failed; other ranks print failures only.
class AgreeAfterEachTest : public testing::EmptyTestEventListener {
 public:
  explicit AgreeAfterEachTest(int rank) : rank_(rank) {}

  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "[rank %d] %s:%d: %s\n", rank_,
                 result.file_name() != nullptr ? result.file_name() : "?", result.line_number(),
                 result.message());
  }
  void OnTestEnd(const testing::TestInfo& info) override {
    int failed = info.result()->Failed() ? 1 : 0;
    int any = 0;
    MPI_Allreduce(&failed, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    if (any != 0) failures_ = true;
  }
  bool failures() const { return failures_; }

 private:
  int rank_;
  bool failures_ = false;
};

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  testing::InitGoogleTest(&argc, argv);
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  auto* agree = new AgreeAfterEachTest(rank);  // owned by GoogleTest
  if (rank != 0) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(agree);
  const int result = RUN_ALL_TESTS();
  int mine = result != 0 || agree->failures() ? 1 : 0;
  if (testing::UnitTest::GetInstance()->test_to_run_count() == 0) mine = 1;  // nothing ran
  int verdict = 0;
  MPI_Allreduce(&mine, &verdict, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return verdict;
}
