#include "launch/reading_speed.h"

#include <algorithm>
#include <functional>
#include <map>
#include <vector>

#include "launch/timing.h"
#include "layers/model_config.h"
#include "layers/model_files.h"
#include "parallel/agreement.h"
#include "runtime/checkpoint.h"
#include "runtime/dequantised_source.h"
#include "runtime/range.h"

namespace gatefold {
namespace {

/// In fp32: layers stage as much.
constexpr std::int64_t kElements = (8 << 20) / 4;

ModelFiles open(const std::string& directory) {
  return open_model_files(directory, read_model_config(directory + "/config.json"));
}

struct Piece {
  std::string name;
  Range rows;
  Range cols;
};

class Reading {
 public:
  Reading(const std::string& from, const std::string& to, DType dtype)
      : quantised_(open(from)), plain_(open(to)), dtype_(dtype) {
    const Checkpoint checkpoint(from);
    for (const auto& [name, parts] : quantised_.plain->quantised()) {
      if (!plain_.source->find(name)) continue;  // laid out anew
      for (const std::string& part : parts) {
        const SafetensorsEntry& entry = *checkpoint.stored(part);
        stored_ += static_cast<std::int64_t>(entry.end - entry.begin);
      }
      add(name, parts.front() != name);
    }
  }

  bool empty() const { return pieces_.empty(); }
  const TensorSource& quantised() const { return *quantised_.source; }
  const TensorSource& plain() const { return *plain_.source; }
  std::int64_t bytes() const { return bytes_; }    // of dtype
  std::int64_t stored() const { return stored_; }  // of codes and scales

  /// This rank's share. Collective.
  void read(Communicator& world, const TensorSource& source) {
    const auto first = [&](int rank) {
      return pieces_.size() * static_cast<std::size_t>(rank) /
             static_cast<std::size_t>(world.size());
    };
    run_agreed(world, [&] {
      for (std::size_t i = first(world.rank()); i < first(world.rank() + 1); ++i) {
        const Piece& piece = pieces_[i];
        const std::int64_t n = piece.rows.size() * piece.cols.size();
        staged_.resize(static_cast<std::size_t>(n * size_of(dtype_)));
        read_as(source, piece.name, piece.rows, piece.cols, dtype_, staged_.data());
        world.progress().tick();
      }
    });
  }

 private:
  /// Rows at a time; where outputs are columns, columns of one matrix.
  void add(const std::string& name, bool turned) {
    const std::vector<std::int64_t> shape = quantised_.source->find(name)->shape;
    const Extent extent = extent_of(shape);
    bytes_ += extent.rows * extent.columns * size_of(dtype_);
    const std::int64_t inputs = turned ? shape[shape.size() - 2] : extent.rows;
    for (std::int64_t row = 0; turned && row < extent.rows; row += inputs) {
      const std::int64_t step = std::max<std::int64_t>(1, kElements / inputs);
      for (std::int64_t c = 0; c < extent.columns; c += step) {
        pieces_.push_back({name, {row, row + inputs}, {c, std::min(c + step, extent.columns)}});
      }
    }
    const std::int64_t step = std::max<std::int64_t>(1, kElements / extent.columns);
    for (std::int64_t row = 0; !turned && row < extent.rows; row += step) {
      pieces_.push_back({name, {row, std::min(row + step, extent.rows)}, {0, extent.columns}});
    }
  }

  ModelFiles quantised_;
  ModelFiles plain_;
  DType dtype_;
  std::vector<Piece> pieces_;
  std::vector<std::byte> staged_;
  std::int64_t bytes_ = 0;
  std::int64_t stored_ = 0;
};

}  // namespace

std::optional<ReadingSpeed> measure_reading(Communicator& world, const std::string& from,
                                            const std::string& to, DType dtype) {
  std::optional<Reading> reading;
  run_agreed(world, [&] { reading.emplace(from, to, dtype); });
  if (reading->empty()) return std::nullopt;
  std::vector<double> quantised, plain;
  const auto time = [&](const TensorSource& source, std::vector<double>& seconds) {
    seconds.push_back(timed(world, [&] { reading->read(world, source); }));
  };
  for (int i = 0; i <= ReadingSpeed::kTurns; ++i) {
    if (i % 2 == 0) time(reading->quantised(), quantised);
    time(reading->plain(), plain);
    if (i % 2 == 1) time(reading->quantised(), quantised);
  }
  quantised.erase(quantised.begin());
  plain.erase(plain.begin());
  const auto bytes = static_cast<double>(reading->bytes());
  const auto stored = static_cast<double>(reading->stored());
  ReadingSpeed speed;
  speed.quantised = bytes / median(quantised);
  speed.plain = bytes / median(plain);
  speed.ratio = median_ratio(plain, quantised);
  speed.quantised_stored = stored / median(quantised);
  speed.stored_ratio = speed.ratio * stored / bytes;
  return speed;
}

}  // namespace gatefold
