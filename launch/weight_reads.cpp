#include "launch/weight_reads.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "parallel/agreement.h"
#include "runtime/hash.h"
#include "runtime/quoted_name.h"

namespace gatefold {
namespace {

auto order(const Piece& p) {
  return std::make_tuple(p.tensor, p.rows.begin, p.rows.end, p.columns.begin, p.columns.end);
}

std::int64_t elements(const Piece& p) { return p.rows.size() * p.columns.size(); }

constexpr std::string_view kChanged =
    "twice with different values (its files change, or aren't read as they are); leave them alone "
    "and start again";
constexpr std::string_view kNotAsRank0 =
    "with other values than rank 0 (its weights aren't rank 0's); copy the same checkpoint and "
    "program to every host";
constexpr std::string_view kNotExpected =
    "and one device didn't (how blocks are read doesn't depend on the ranks); report it";

/// What is wrong with one rank's reads: how many, and the smallest piece of them in words.
struct Differences {
  int rank = 0;
  std::int64_t count = 0;
  Piece smallest;
  std::string text;

  void add(const ReadLog& log, const Piece& piece, std::string_view how) {
    if (count++ > 0 && elements(piece) >= elements(smallest)) return;
    smallest = piece;
    text = fmt::format("rank {} read {} {}", rank, log.text(piece), how);
  }
};

void add_changed(Differences& found, const ReadLog& log) {
  for (const Piece& piece : log.changed()) found.add(log, piece, kChanged);
}

void add_differing(Differences& found, const ReadLog& log, std::span<const PieceRead> expected,
                   Cut cut) {
  for (const PieceRead& read : log.reads()) {
    const auto same = std::lower_bound(
        expected.begin(), expected.end(), read.piece,
        [](const PieceRead& other, const Piece& piece) { return other.piece < piece; });
    if (same == expected.end() || read.piece < same->piece) {
      if (cut == Cut::kCanonical) found.add(log, read.piece, kNotExpected);
    } else if (same->hash != read.hash) {
      found.add(log, read.piece, found.rank == 0 ? kChanged : kNotAsRank0);
    }
  }
}

/// Rank `root`'s `values`, on all ranks. Collective.
template <typename Vector>
Vector broadcast_all(Communicator& world, Vector values, int root) {
  auto count = static_cast<std::int64_t>(values.size());
  world.broadcast(reinterpret_cast<std::byte*>(&count), sizeof(count), root);
  run_agreed(world, [&] { values.resize(static_cast<std::size_t>(count)); });
  const auto bytes = count * static_cast<std::int64_t>(sizeof(*values.data()));
  world.broadcast(reinterpret_cast<std::byte*>(values.data()), bytes, root);
  return values;
}

}  // namespace

bool operator<(const Piece& a, const Piece& b) { return order(a) < order(b); }

void ReadLog::add(const std::string& name, Range rows, Range columns,
                  std::span<const std::byte> bytes) {
  if (rows.empty() || columns.empty()) return;
  const Piece piece{Fnv1a().add(name).value(), rows, columns};
  names_.try_emplace(piece.tensor, name);
  const std::uint64_t hash = xxh64(bytes);
  const auto [known, is_new] = hashes_.try_emplace(piece, hash);
  if (!is_new && known->second != hash) changed_.push_back(piece);
}

std::vector<PieceRead> ReadLog::reads() const {
  std::vector<PieceRead> reads;
  reads.reserve(hashes_.size());
  for (const auto& [piece, hash] : hashes_) reads.push_back({piece, hash});
  return reads;
}

std::string ReadLog::text(const Piece& piece) const {
  return fmt::format("{} [rows {}-{}, columns {}-{}]", quoted_name(names_.at(piece.tensor)),
                     piece.rows.begin, piece.rows.end - 1, piece.columns.begin,
                     piece.columns.end - 1);
}

void RecordingSource::read(const std::string& name, Range rows, Range cols, std::byte* out) const {
  inner_.read(name, rows, cols, out);
  if (rows.empty() || cols.empty()) return;
  const std::int64_t bytes = rows.size() * cols.size() * size_of(inner_.find(name)->dtype);
  log_.add(name, rows, cols, {out, static_cast<std::size_t>(bytes)});
}

ReadComparison compare_reads(Communicator& world, const ReadLog& mine, const ReadLog& one_device,
                             Cut cut) {
  const int rank = world.rank();
  std::vector<PieceRead> expected;
  run_agreed(world, [&] {
    if (rank == 0) expected = one_device.reads();
  });
  expected = broadcast_all(world, std::move(expected), 0);
  Differences found;
  found.rank = rank;
  run_agreed(world, [&] {
    add_changed(found, mine);
    if (rank == 0) add_changed(found, one_device);
    add_differing(found, mine, expected, cut);
  });

  std::vector<std::int64_t> counts(static_cast<std::size_t>(world.size()));
  counts[static_cast<std::size_t>(rank)] = found.count;
  all_gather<std::int64_t>(world, counts);
  ReadComparison total;
  for (int r = 0; r < world.size(); ++r) {
    const std::int64_t count = counts[static_cast<std::size_t>(r)];
    total.differing += count;
    if (count > 0) total.ranks.push_back(r);
  }
  if (total.differing == 0) return total;
  const int lowest = static_cast<int>(total.ranks.front());
  total.first = broadcast_all(world, lowest == rank ? found.text : "", lowest);
  return total;
}

}  // namespace gatefold
