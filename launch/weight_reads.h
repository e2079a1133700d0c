#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// A piece of a stored tensor, as one read asks for it.
struct Piece {
  std::uint64_t tensor = 0;  // a hash of its name
  Range rows;
  Range columns;

  friend bool operator<(const Piece& a, const Piece& b);
};

/// A piece and what was read of it: the form in which ranks exchange them.
struct PieceRead {
  Piece piece;
  std::uint64_t hash = 0;  // of the bytes
};

/// What was read of which pieces of tensors. A few dozen bytes a piece.
class ReadLog {
 public:
  /// Nothing is kept of an empty piece, nor of a second read that is as the first.
  void add(const std::string& name, Range rows, Range columns, std::span<const std::byte> bytes);

  std::vector<PieceRead> reads() const;
  /// Pieces that had other bytes when they were read again.
  const std::vector<Piece>& changed() const { return changed_; }
  /// "'model.layers.0.mlp.up_proj.weight' [rows 0-191, columns 0-575]", for pieces of this log.
  std::string text(const Piece& piece) const;

 private:
  std::map<std::uint64_t, std::string> names_;
  std::map<Piece, std::uint64_t> hashes_;
  std::vector<Piece> changed_;
};

/// Passes each read on and logs what came. One thread at a time.
class RecordingSource final : public TensorSource {
 public:
  RecordingSource(const TensorSource& inner, ReadLog& log) : inner_(inner), log_(log) {}
  std::optional<TensorInfo> find(const std::string& name) const override {
    return inner_.find(name);
  }
  void read(const std::string& name, Range rows, Range cols, std::byte* out) const override;
  std::string description() const override { return inner_.description(); }

 private:
  const TensorSource& inner_;
  ReadLog& log_;
};

/// What one device read on rank 0 has pieces that another rank's reads may not have.
enum class Cut {
  kCanonical,  // the same for every number of ranks: each piece must be there
  kByRanks,    // a piece that isn't there is compared with nothing
};

/// Reads of any rank that differ from one device's.
struct ReadComparison {
  std::int64_t differing = 0;
  std::vector<std::int64_t> ranks;  // that have some
  std::string first;                // the smallest piece of the lowest of them, in words
};

/// Compares what each rank has read, `mine`, with what rank 0 has read for one device, `one_device`
/// (elsewhere ignored). The result is the same on all ranks. Collective.
ReadComparison compare_reads(Communicator& world, const ReadLog& mine, const ReadLog& one_device,
                             Cut cut);

}  // namespace gatefold
