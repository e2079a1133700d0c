#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "launch/machine.h"
#include "layers/layer.h"
#include "parallel/communicator.h"
#include "runtime/device.h"

/// What layers are timed beside: the libraries' own way to do the same.
namespace gatefold {

/// The library's all-reduce of [rows, hidden] in fp32, and of as many bytes as that has in `dtype`,
/// as fp32 values too, since MPI knows no bf16.
class AllReduceBaseline {
 public:
  /// A group of one has nothing to time. Throws Error 71.
  AllReduceBaseline(Communicator& group, Device& device, std::int64_t rows, std::int64_t hidden,
                    DType dtype);
  /// Collective over `world`, all groups of it at once.
  void time(Communicator& world, bool counted);

  /// This rank's, of each counted pass; empty in a group of one.
  std::vector<double> fp32_seconds;
  std::vector<double> dtype_seconds;

  /// Room for so many passes.
  void reserve(std::int64_t passes);

 private:
  double timed(Communicator& world, std::int64_t count);

  Communicator& group_;
  Device& device_;
  Buffer values_;
  std::int64_t count_;        // of [rows, hidden]
  std::int64_t dtype_count_;  // fp32 values of as many bytes as `count_` of the dtype
};

/// A layer's matrix products alone, on one rank, each as one whole GEMM of the library: gate and up
/// at once or one after the other, whichever is faster, and down. Of a mixture of experts those of
/// the dense layer that multiplies as much for a token, and a plain read of the experts' weights.
class PlainLayer {
 public:
  /// Weights of `copies` layers. Throws Error 71.
  PlainLayer(Device& device, const LayerSpec& spec, DType dtype, std::int64_t copies);
  /// read_bytes: of the weights that a mixture reads; 0: none apart from the products'.
  void take(std::int64_t rows, std::int64_t read_bytes, int threads);
  void time(std::int64_t pass, bool counted);

  void reserve(std::int64_t passes);
  /// Of each counted pass: by the median faster way.
  std::vector<double> seconds() const;

 private:
  struct Weights {
    Weight gate_up;  // or up alone, where there is no gate
    Weight gate;
    Weight up;
    Weight down;
  };
  Weight made(std::int64_t outputs, std::int64_t inputs);
  void multiply(const Weight& weight, const Buffer& in, std::int64_t width);

  Device& device_;
  FfnSpec spec_;
  DType dtype_;
  std::vector<Weights> copies_;
  std::int64_t rows_ = 0;
  Buffer x_;                 // [rows, H]
  Buffer h_;                 // [rows, I]
  Buffer out_;               // fp32 [rows, the widest]
  std::vector<double> one_;  // gate and up at once
  std::vector<double> two_;  // one after the other
  std::vector<double> down_seconds_;
  std::int64_t read_bytes_ = 0;
  std::optional<Load> read_;
  std::vector<double> read_seconds_;
};

}  // namespace gatefold
