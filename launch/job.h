#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "launch/options.h"
#include "launch/report.h"
#include "layers/kernel_choice.h"
#include "layers/mlp.h"
#include "layers/model_config.h"
#include "parallel/grid.h"
#include "runtime/device.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// Places where a test may put something of its own between the parts, to prove that verification
/// can fail. All empty in the program itself.
struct Seams {
  /// Around the weights of the distributed layer; `columns` are this rank's of the width I.
  std::function<std::unique_ptr<TensorSource>(const TensorSource&, const FfnSpec&, Range columns,
                                              int rank)>
      wrap_source;
  std::function<std::unique_ptr<Communicator>(Communicator&)> wrap_tp;
  std::function<void(std::vector<std::byte>& y, int rank, int ranks)> after_forward;
  std::function<bool(int rank)> fail_self_check;
};

/// Input tokens, the same on every rank.
struct TokenBatch {
  std::vector<std::byte> x;  // [tokens, hidden] in `dtype`
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  std::vector<std::int64_t> shape;  // of x and y in files; rank 0: [B, S, H] where --input has it
  DType dtype = DType::kF32;
  std::string description;
  std::vector<std::int64_t> nan_rows;

  /// Rows as fp32, [rows.size(), hidden].
  std::vector<float> as_float(Range rows) const;
  const std::byte* row(std::int64_t index) const { return x.data() + index * row_bytes(); }
  std::int64_t row_bytes() const { return hidden * size_of(dtype); }
};

/// x and y of one layer in device memory: what lies between Mlp::forward and the host.
class DevicePass {
 public:
  /// Allocates both, copies x [rows.local, H] from the host and fills y with ones, a NaN in every
  /// dtype. Throws Error 71.
  DevicePass(Device& device, const std::byte* host_x, const RowCount& rows, std::int64_t row_bytes);

  /// Allocates nothing where `mlp` has reserved its rows. Collective over the layer's group.
  void forward(Mlp& mlp) { mlp.forward(x_.data(), rows_, y_.data()); }
  /// y [rows.local, H] on the host.
  std::vector<std::byte> y() const;

 private:
  Device& device_;
  RowCount rows_;
  Buffer x_;
  Buffer y_;
};

/// What verify, run, bench and inspect set up in the same way from the options: the model, the
/// grid, the device. Every step is agreed between ranks: all go on, or all throw the same Error.
class Job {
 public:
  /// Collective over `world`, which must outlive the job.
  Job(const Options& options, Communicator& world, Seams seams = {});

  const Options& options() const { return options_; }
  const Seams& seams() const { return seams_; }
  Communicator& world() const { return *world_; }
  /// For tensors of the device.
  Communicator& tp() const { return tp_.empty() ? grid_->tp() : *tp_.back(); }
  const Grid& grid() const { return *grid_; }
  Device& device() const { return *device_; }
  const ModelConfig& config() const { return config_; }
  const TensorSource& source() const { return *source_; }
  DType dtype() const { return dtype_; }
  const std::vector<std::int64_t>& layers() const { return layers_; }

  /// Layer `layer` as it lies in the source, checked against it.
  FfnSpec layer_spec(std::int64_t layer) const;
  /// How many tokens there are, from the options or the header of --input; reads no token.
  /// Collective.
  std::int64_t token_count(std::int64_t hidden) const;
  /// --input, or --tokens seeded ones of width `hidden`. Throws Error 71 where x and y of them are
  /// more than the machine's memory. Collective.
  TokenBatch tokens(std::int64_t hidden) const;
  /// What of `tokens` tokens, and of the width I, is this rank's.
  Range own_tokens(std::int64_t tokens) const;
  Range own_columns(const FfnSpec& spec) const;
  /// The kernel that all ranks use for this layer's canonical tiles.
  KernelChoice kernel(const FfnSpec& spec) const;
  MlpOptions mlp_options(const KernelChoice& kernel) const;
  /// A report with the header that every command shows. Collective.
  Report report() const;

 private:
  void read_config();
  void make_grid();
  void open_source();
  void add_places(Report& report) const;

  Options options_;
  Communicator* world_;
  Seams seams_;
  ModelConfig config_;
  std::unique_ptr<TensorSource> source_;
  DType dtype_ = DType::kF32;
  std::vector<std::int64_t> layers_;
  std::unique_ptr<Grid> grid_;
  std::unique_ptr<Device> device_;
  std::vector<std::unique_ptr<Communicator>> tp_;  // each around the one before, on the device
};

/// The kernels that layers use, for the report's header.
class KernelNames {
 public:
  void add(std::int64_t layer, const std::string& name) { layers_[name].push_back(layer); }
  /// "kernel  NAME", with the layers where they don't all have the same.
  void state(Report& report) const;

 private:
  std::map<std::string, std::vector<std::int64_t>> layers_;
};

/// Rank 0 prints the report (--quiet: its closing notes) and writes --json and --csv. Agreed: a
/// file that can't be written is an Error 74 on all ranks. Collective.
void publish(const Job& job, const Report& report);
/// --dry-run: prints which rank would own what; returns the exit code. Collective.
int print_plan(const Job& job, Report& report);

/// FNV-1a, 64 bits: the fingerprint of an output.
std::uint64_t fingerprint(std::span<const std::byte> bytes);

/// The commands. Each returns the exit code of a finished job; errors are thrown. Collective.
int verify(Job& job);
int run(Job& job);
int bench(Job& job);
int inspect(Job& job);
int make_model(Job& job);

}  // namespace gatefold
