#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "layers/ffn_spec.h"
#include "parallel/communicator.h"
#include "runtime/canonical.h"
#include "runtime/device.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// How sums over ranks are made.
enum class Reduce {
  kExact,  // the canonical tree: the same bits for every number of ranks
  kFast,   // whole GEMMs and the library's own all-reduce
};

/// Keep all owned weights on the device, or load each block when it is needed and drop it.
enum class Residency { kResident, kStreamed };

struct LinearOptions {
  DType dtype = DType::kBf16;  // of inputs and outputs
  /// Of a row-parallel layer's outputs, where they are to stay fp32 sums; unset: dtype.
  std::optional<DType> output_dtype;
  std::int64_t blocks = 8;  // V
  Reduce reduce = Reduce::kExact;
  Residency residency = Residency::kResident;
  /// Chosen by choose_kernel(); unset: the layer's constructor runs the self-check itself.
  std::optional<GemmKernel> kernel;
};

/// Where a layer runs.
struct Place {
  Device* device = nullptr;
  Communicator* tp = nullptr;
};

/// Which blocks there are and whose they are: the canonical ones, or one per rank in fast mode.
struct BlockPlan {
  Blocks blocks;
  std::vector<Range> runs;          // the blocks of each rank of the group
  std::vector<std::int64_t> owned;  // this rank's non-empty blocks, in order
  Reduce reduce = Reduce::kExact;

  /// `width` is the side that is cut. Throws Error 64 where the group has more ranks than blocks.
  static BlockPlan make(std::int64_t width, const LinearOptions& options, const Communicator& tp);
  Range columns(std::size_t i) const { return blocks.columns(owned[i]); }
};

/// Which side of a weight [out, in] is cut into blocks.
enum class CutAlong { kOutputs, kInputs };

/// A matrix [outputs, inputs] with its bias; gated layers have gate's beside up's.
struct WeightTensors {
  std::int64_t outputs = 0;
  std::int64_t inputs = 0;
  TensorRef matrix;
  std::optional<TensorRef> bias;
  std::optional<TensorRef> gate;
  std::optional<TensorRef> gate_bias;
};

/// The two weights of a feed-forward network: gate and up at once, and down.
WeightTensors gate_up_tensors(const FfnSpec& spec);
WeightTensors down_tensors(const FfnSpec& spec);

struct BlockWeight {
  Weight weight;
  Buffer bias;  // fp32 in the order of packed columns; empty if there is none
  const float* bias_data() const { return bias.bytes() > 0 ? bias.as<float>() : nullptr; }
};

/// The shape of block `columns` of these tensors.
WeightShape block_shape(const WeightTensors& tensors, CutAlong cut, Range columns);

/// This rank's blocks of one layer's weight. Reads just their bytes, a few megabytes at a time.
class BlockWeights {
 public:
  /// `source` must outlive streamed weights. Biases are loaded for CutAlong::kOutputs only: a
  /// row-parallel bias is added once, after the sum. Throws Error 65, 66, 71.
  BlockWeights(WeightTensors tensors, CutAlong cut, const TensorSource& source, const Place& place,
               const BlockPlan& plan, const LinearOptions& options);

  std::size_t count() const { return plan_.owned.size(); }
  WeightShape shape(std::size_t i) const { return block_shape(tensors_, cut_, plan_.columns(i)); }
  const BlockWeight& at(std::size_t i);
  /// Of a streamed weight no block stays in memory; a resident one stays as it is.
  void let_go() { streamed_.reset(); }
  GemmKernel kernel() const { return kernel_; }

 private:
  BlockWeight load(std::size_t i) const;
  void load_rows(Weight& weight, const TensorRef& ref, Range rows, Range columns,
                 std::int64_t first_row) const;
  Buffer load_bias(Range rows, const WeightShape& shape) const;

  WeightTensors tensors_;
  CutAlong cut_;
  const TensorSource* source_;
  Place place_;
  BlockPlan plan_;
  DType dtype_;
  GemmKernel kernel_;
  std::vector<BlockWeight> resident_;
  std::optional<BlockWeight> streamed_;
  std::size_t streamed_index_ = 0;
};

/// The layer's activation with a learnable beta, where it has one, read from `source` in fp32.
/// Throws Error 65 where that isn't finite.
Activation load_activation(const FfnSpec& spec, const TensorSource& source);

/// A bias [ref rows] as fp32 on the device, rounded to `dtype` first and padded with zeros to whole
/// groups.
Buffer load_vector(const TensorSource& source, const TensorRef& ref, std::int64_t size, DType dtype,
                   Device& device);

/// A router's matrix [outputs, inputs], or a bias of it as [1, outputs], as fp32 on the device:
/// never rounded. Throws Error 65 with the tensor, row and column of a number that isn't finite: it
/// would choose experts by accident.
Buffer load_router(const TensorSource& source, const TensorRef& ref, std::int64_t outputs,
                   std::int64_t inputs, Device& device);

}  // namespace gatefold
