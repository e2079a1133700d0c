#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/block_format.h"
#include "runtime/checkpoint.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// A checkpoint whose quantised weights are read as plain ones, under their plain names: code times
/// scale, each product rounded once. Just the rectangle's codes and scales are read, a few hundred
/// kB at a time: whole groups of MXFP4, and whole rows where those are shorter than a page. What
/// has no scales is as in the checkpoint.
class DequantisedSource final : public TensorSource {
 public:
  DequantisedSource(std::unique_ptr<Checkpoint> checkpoint, BlockSize f8_block);

  /// Throws Error 65 also for a weight without scales, scales without a weight, and shapes and
  /// types that don't fit each other.
  std::optional<TensorInfo> find(const std::string& name) const override;
  /// `out` must be aligned to the element.
  void read(const std::string& name, Range rows, Range cols, std::byte* out) const override;
  std::string description() const override;

  /// The quantised weights, each with the tensors of the checkpoint that it is made of.
  std::map<std::string, std::vector<std::string>> quantised() const;
  /// How many weights the checkpoint has in this format.
  std::int64_t count(BlockFormat format) const;

 private:
  struct Blocks;  // one weight's codes and scales
  Blocks blocks_of(const std::string& name, BlockFormat format) const;
  Blocks f8_blocks(const std::string& name) const;
  Blocks mxfp4_blocks(const std::string& name) const;
  void read_f8(const Blocks& blocks, Range rows, Range cols, float* out) const;
  void read_mxfp4(const Blocks& blocks, Range rows, Range cols, std::uint16_t* out) const;
  void read_turned(const Blocks& blocks, Range rows, Range across, std::uint16_t* out) const;
  [[noreturn]] void fail(const std::string& problem, std::string_view remedy) const;

  std::unique_ptr<Checkpoint> checkpoint_;
  BlockSize f8_block_;
  std::map<std::string, BlockFormat, std::less<>> formats_;  // by plain name
};

}  // namespace gatefold
