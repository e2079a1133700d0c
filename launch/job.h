#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "launch/options.h"
#include "launch/report.h"
#include "layers/mlp.h"
#include "layers/model_config.h"
#include "parallel/grid.h"
#include "runtime/device.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// Seams that a caller may put something of its own into: the fault tests do, to prove that
/// verification can fail. All empty in the program itself.
struct Seams {
  std::function<std::unique_ptr<TensorSource>(std::unique_ptr<TensorSource>, const FfnSpec&,
                                              const BlockPlan&, int rank)>
      wrap_source;
  std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)> wrap_tp;
  std::function<void(std::vector<std::byte>& y, DType dtype, int rank, int ranks)> after_forward;
  std::function<bool(int rank)> fail_self_check;
};

/// Input tokens, the same on every rank.
struct TokenBatch {
  std::vector<std::byte> x;  // [tokens, H] in `dtype`
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  DType dtype = DType::kF32;
  std::int64_t nan_rows = 0;
  std::int64_t first_nan_row = -1;

  std::vector<float> as_float(Range rows) const;
};

/// Everything that verify, run, bench and inspect set up in the same way from the options: the
/// model, the grid, the device. Each step is agreed between ranks.
struct Job {
  Job(const Options& options, Communicator& world, const Seams& seams = {});

  Options options;
  Communicator* world = nullptr;
  Seams seams;
  ModelConfig config;
  std::unique_ptr<TensorSource> source;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> layers;
  std::unique_ptr<Grid> grid;
  std::unique_ptr<Device> device;

  /// Layer `layer` as it lies in the source. Agreed.
  FfnSpec layer_spec(std::int64_t layer) const;
  /// --input, or --tokens seeded ones of width `hidden`. Agreed.
  TokenBatch tokens(std::int64_t hidden) const;
  /// The kernel that all ranks use for this layer. Collective.
  KernelChoice kernel(const FfnSpec& spec) const;
  /// A report with the header that every command shows.
  Report report() const;
};

/// The commands. Each returns the exit code of a finished job; errors are thrown. Collective.
int verify(Job& job);
int run(Job& job);
int bench(Job& job);
int inspect(Job& job);
int make_model(Job& job);

}  // namespace gatefold
