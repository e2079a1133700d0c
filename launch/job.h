#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "launch/options.h"
#include "launch/report.h"
#include "launch/tokens.h"
#include "layers/kernel_choice.h"
#include "layers/layer.h"
#include "layers/model_config.h"
#include "parallel/device_communicator.h"
#include "parallel/grid.h"
#include "runtime/device.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// Places where a test may put something of its own between the parts, to prove that verification
/// can fail. All empty in the program itself.
struct Seams {
  /// Around the weights of the distributed layer. Of a dense one `columns` are this rank's of the
  /// width I, and `rank` counts within its group.
  std::function<std::unique_ptr<TensorSource>(const TensorSource&, const LayerSpec&, Range columns,
                                              int rank)>
      wrap_source;
  /// What the distributed layer computes, where it is a mixture of experts, and on what.
  std::function<void(MoeSpec& spec, int rank)> alter_experts;
  std::function<std::unique_ptr<Device>(Device&, int rank)> wrap_device;
  /// Around the group in which a layer exchanges: of a dense one its tp, with experts the world.
  std::function<std::unique_ptr<Communicator>(Communicator&)> wrap_exchanges;
  std::function<void(std::vector<std::byte>& y, int rank, int ranks)> after_forward;
  std::function<bool(int rank)> fail_self_check;
};

/// What verify, run, bench and inspect set up in the same way from the options: the model, the
/// grid, the device. Every step is agreed between ranks: all go on, or all throw the same Error.
class Job {
 public:
  /// Collective over `world`, which must outlive the job. `device`: one that is there already, for
  /// several jobs of one process.
  Job(const Options& options, Communicator& world, Seams seams = {},
      std::shared_ptr<Device> device = nullptr);

  const Options& options() const { return options_; }
  const Seams& seams() const { return seams_; }
  Communicator& world() const { return *world_; }
  /// For tensors of the device.
  Communicator& tp() const { return tp_.empty() ? grid_->tp() : *tp_.back(); }
  /// The same, of a mixture of experts too where the model has some.
  MoePlace place() const;
  const Grid& grid() const { return *grid_; }
  Device& device() const { return *device_; }
  const std::shared_ptr<Device>& shared_device() const { return device_; }
  const ModelConfig& config() const { return config_; }
  const TensorSource& source() const { return *source_; }
  DType dtype() const { return dtype_; }
  const std::vector<std::int64_t>& layers() const { return layers_; }

  /// Layer `layer` as it lies in the source, checked against it. Collective.
  LayerSpec layer_spec(std::int64_t layer) const;
  /// The same where it must be dense. Throws Error 64 where it is a mixture of experts.
  FfnSpec dense_spec(std::int64_t layer) const;
  /// How many tokens there are, from the options or the header of --input; reads no token.
  /// Collective.
  std::int64_t token_count(std::int64_t hidden) const;
  /// --input, or --tokens seeded ones of width `hidden`. Throws Error 71 where x and y of them are
  /// more than the machine's memory. Collective.
  TokenBatch tokens(std::int64_t hidden) const { return tokens(hidden, token_count(hidden)); }
  /// The same with the first `count` of them. Collective.
  TokenBatch tokens(std::int64_t hidden, std::int64_t count) const;
  /// The routing of the batch that --input brings, for a layer with this rule; no rows where it
  /// brings none. Throws Error 65. Collective.
  Choices given_routing(const RouteRule& rule, const TokenBatch& batch) const;
  /// What of `tokens` tokens, and of the width I, is this rank's.
  Range own_tokens(std::int64_t tokens) const;
  Range own_columns(const FfnSpec& spec) const;
  /// How many rows an expert takes, by the options; nothing: all.
  std::optional<Capacity> capacity() const;
  /// V of the experts of a mixture.
  std::int64_t expert_blocks() const;
  /// The kernel that all ranks use for this layer's canonical tiles.
  KernelChoice kernel(const LayerSpec& spec) const;
  MlpOptions mlp_options(const KernelChoice& kernel) const;
  MoeOptions layer_options(const KernelChoice& kernel) const;
  /// Whether the weights of `spec` are kept on the device or read when they are needed: a mixture
  /// of experts that is more than the machines' memory is streamed, and then experts without tokens
  /// aren't read. The same on all ranks. Collective.
  Residency residency(const LayerSpec& spec) const;
  /// A report with the header that every command shows. Collective.
  Report report() const;
  std::string carrier() const;  // of tensors, and why; collective

 private:
  Communicator& experts_world() const {
    return experts_world_.empty() ? *world_ : *experts_world_.back();
  }
  void read_config();
  void read_sequences();
  void make_grid();
  void check_expert_blocks(std::int64_t etp) const;
  void check_memory(const LayerSpec& spec) const;
  void open_source();
  void add_places(Report& report) const;

  Options options_;
  Communicator* world_;
  Seams seams_;
  ModelConfig config_;
  std::optional<ModelConfig> dense_;            // --from-dense: what config_ is made of
  std::unique_ptr<TensorSource> dense_source_;  // and source_
  std::unique_ptr<TensorSource> source_;
  DType dtype_ = DType::kF32;
  std::vector<std::int64_t> layers_;
  std::unique_ptr<Grid> grid_;
  std::shared_ptr<Device> device_;
  CommChoice comm_;
  std::vector<std::unique_ptr<Communicator>> tp_;  // each around the one before, on the device
  std::vector<std::unique_ptr<Communicator>> experts_world_;  // likewise, with experts
  std::unique_ptr<Communicator> etp_on_device_;
  std::unique_ptr<Device> wrapped_device_;
};

/// The report as publish() of outputs.h has it. Collective.
void publish(const Job& job, const Report& report);
/// "moe, 8 of 128 + 1": what a table calls a layer.
std::string kind_text(const LayerSpec& spec);
/// --dry-run: prints which rank would own what; returns the exit code. Collective.
int print_plan(const Job& job, Report& report);

/// FNV-1a, 64 bits: the fingerprint of an output.
std::uint64_t fingerprint(std::span<const std::byte> bytes);

/// The commands, but for bench. Each returns the exit code of a finished job; errors are thrown.
/// Collective.
int verify(Job& job);
int run(Job& job);
int inspect(Job& job);
int make_model(Job& job);
int balance(Job& job);

}  // namespace gatefold
