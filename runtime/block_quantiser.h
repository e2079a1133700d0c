#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "runtime/block_format.h"
#include "runtime/range.h"
#include "runtime/safetensors.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// The smallest power of two, times which `most` is no less than `largest`; 1 for zeros.
float block_scale(float largest, float most);

/// A plain weight as the two tensors of codes and scales that DequantisedSource reads it from. The
/// scale of a block is the smallest power of two with which nothing is beyond the largest code, so
/// that every product is exact, in bf16 too, and weights that are products of codes and powers of
/// two come back as they were. Others are rounded once, to the nearest, ties to even.
class BlockQuantiser {
 public:
  /// `source`, which has `name`, must outlive this. Throws Error 64 for a tensor that has no such
  /// blocks: a vector, or for MXFP4 no whole number of groups.
  BlockQuantiser(const TensorSource& source, std::string name, BlockFormat format, BlockSize block);

  SafetensorsWriter::Tensor codes() const;
  SafetensorsWriter::Tensor scales() const;

  using Sink = std::function<void(std::span<const std::byte>)>;
  /// The codes' bytes in order, a few hundred kB at a time; returns the scales'. Throws Error 65
  /// for a weight that isn't finite: no scale fits it.
  std::vector<std::byte> write(const Sink& codes) const;

 private:
  std::vector<std::byte> write_f8(const Sink& codes) const;
  std::vector<std::byte> write_mxfp4(const Sink& codes) const;
  void require_finite(float largest) const;

  const TensorSource* source_;
  std::string name_;
  BlockFormat format_;
  BlockSize block_;
  std::vector<std::int64_t> shape_;  // of the plain weight
  std::int64_t matrices_ = 1;
  std::int64_t rows_ = 0;     // of one of them
  std::int64_t columns_ = 0;  // of one of them
};

}  // namespace gatefold
