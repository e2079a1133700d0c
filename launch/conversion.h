#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "launch/model_folder.h"
#include "launch/options.h"
#include "layers/model_config.h"
#include "layers/relaid_source.h"
#include "runtime/checkpoint.h"
#include "runtime/range.h"

namespace gatefold {

/// Of a tensor in memory at a time: small enough for a cache, large enough for a system call.
inline constexpr std::int64_t kPieceBytes = 1 << 20;
/// Of one that is turned: its rows become columns that are read a few thousand bytes at a time.
inline constexpr std::int64_t kTurnedPieceBytes = 16 << 20;

/// What `convert` makes of a model: which tensors in which files, and where their bytes come from.
/// A function of the model and the options, never of how many ranks there are.
class Conversion {
 public:
  /// Reads --model's config and headers. Tensors go by name into the shards, within one the widest
  /// types come first, as the safetensors library has them. With --layout the mixtures of experts
  /// of the layers that are there are laid out anew, where they lie otherwise. With --dtype what is
  /// stored in f32, bf16 or f16 is converted, but for the routers' correction biases, which
  /// families keep in f32. Throws Error 64 (a layout that the family doesn't have, more shards than
  /// tensors), 65, 66.
  explicit Conversion(const Options& options);

  const ModelConfig& config() const { return config_; }
  const Checkpoint& checkpoint() const { return checkpoint_; }
  const std::vector<FolderShard>& shards() const { return shards_; }
  /// __metadata__ of each shard: what the model's files say, the first that says it.
  std::map<std::string, std::string> metadata() const;
  /// config.json, byte for byte but where --dtype changes what it says.
  std::string config_text() const;
  /// Of all tensors behind each other.
  std::int64_t bytes() const { return bytes_; }
  /// Those that are laid out anew.
  std::int64_t relaid_layers() const { return relaid_layers_; }
  /// Tensors that --dtype leaves as they are.
  std::int64_t kept() const { return kept_; }

  /// Takes bytes that begin `offset` bytes into the data of shard number `shard`.
  using Write =
      std::function<void(std::size_t shard, std::int64_t offset, std::span<const std::byte> bytes)>;
  /// Makes the elements that begin within `part` of all bytes(), in such pieces; how many
  /// finite ones were beyond f16 and are infinite now. Throws Error 65, 66 where they can't be read
  /// (any more).
  std::int64_t make(Range part, const Write& write) const;

 private:
  /// A tensor to write, and what of: read through source_ or, byte for byte, from the checkpoint.
  struct Planned {
    FolderTensor tensor;
    bool made = false;
    std::optional<DType> stored;  // where it is converted
    std::int64_t piece_bytes = kPieceBytes;
  };
  /// The same, and where it goes.
  struct Place {
    const FolderTensor* tensor = nullptr;
    std::size_t shard = 0;
    std::int64_t offset = 0;  // in the shard's data
    std::int64_t begin = 0;   // in all bytes
    bool made = false;
    std::optional<DType> stored;
    std::int64_t piece_bytes = kPieceBytes;
  };

  void open_source(const Options& options);
  void relay(ExpertLayout layout);
  std::map<std::string, TensorInfo> made_tensors(std::set<std::string>& used) const;
  Planned planned(FolderTensor tensor, bool made);
  void plan(const Options& options);
  void read(const Place& place, std::int64_t unit, Range units, std::byte* out) const;
  struct Stage;
  std::int64_t make(const Place& place, Range bytes, Stage& stage, const Write& write) const;

  ModelConfig config_;
  Checkpoint checkpoint_;
  std::unique_ptr<TensorSource> source_;                       // the same tensors, plain; or
  const RelaidSource* relaid_ = nullptr;                       // this around them
  std::map<std::string, std::vector<std::string>> quantised_;  // with their parts
  std::optional<DType> dtype_;
  std::vector<FolderShard> shards_;
  std::vector<Place> places_;  // in the order of their bytes
  std::int64_t bytes_ = 0;
  std::int64_t relaid_layers_ = 0;
  std::int64_t kept_ = 0;
};

}  // namespace gatefold
