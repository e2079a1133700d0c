#pragma once

#include <cstdint>

#include "tests/fake_gpu/cublaslt_problem.h"

namespace gatefold_fake {

/// How one algorithm orders the sum over k. Different algorithms give different bits, as they do on
/// a GPU.
struct SumOrder {
  std::int64_t panel = 0;  // k is cut into panels, each summed by itself
  std::int64_t lanes = 1;  // interleaved sums inside a panel, added as a tree
  std::int64_t splits = 1;
  bool rounds_splits = false;  // each split's sum goes through the output type
};

/// Where a sum's bits come from besides its own operands: what a self-check must notice. Settings
/// GATEFOLD_FAKE_GPU_GEMM_BY_<name>.
struct Disturbance {
  bool rows = false;     // ROWS: m
  bool columns = false;  // COLUMNS: n
  bool batch = false;    // BATCH: the batch count
  bool place = false;    // PLACE: the element's row and column and batch index
  bool content = false;  // CONTENT: what the first row of A and the first column of B hold
  bool call = false;     // CALL: how many calls there were before
};

struct Matmul {
  Problem problem;
  SumOrder order;
  Disturbance disturbance;
  std::int64_t call = 0;
  float alpha = 1;
  float beta = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;
  void* d = nullptr;
  void* workspace = nullptr;
  std::int64_t workspace_bytes = 0;
  bool breaks = false;  // ends as a kernel does that touches memory it doesn't own
};

/// All of it, at once, on the calling thread. The workspace is overwritten.
void multiply(const Matmul& matmul);

}  // namespace gatefold_fake
