#pragma once
// What the ranks of one stand-in communicator share: anonymous memory of the process that made the
// id, which the others reach through /proc. It has no name, so a killed rank leaves nothing behind.

#include <nccl.h>
#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace fake_nccl {

constexpr int kMaxRanks = 16;
constexpr std::size_t kRingBytes = std::size_t{1} << 16;

/// A call that can't be obeyed: its result, and why.
struct Refusal {
  ncclResult_t code;
  std::string why;
};

/// Prints the reason as this library's, and gives the code.
ncclResult_t report(const Refusal& refusal);

/// Lies in a ncclUniqueId.
struct SegmentId {
  std::uint64_t magic = 0;
  std::uint64_t nonce = 0;
  pid_t pid = 0;
  int file = -1;
};

/// A one-way stream of bytes between two ranks.
struct Channel {
  std::atomic<std::uint64_t> written;
  std::atomic<std::uint64_t> read;
  std::array<std::byte, kRingBytes> ring;
};

/// Collectives and point-to-point messages don't overtake one another, nor hinder.
enum class Lane { kCollective, kPeer };

struct SplitEntry {
  std::atomic<std::uint64_t> generation;
  int color;
  int key;
  SegmentId id;
};

struct RankEntry {
  std::atomic<std::uint32_t> doorbell;
  std::atomic<int> joined;
  std::atomic<int> finalized;
  std::atomic<int> left;
  pid_t pid;
  std::uint64_t host;
  char bus_id[32];
  SplitEntry splits[2];
};

struct Segment {
  std::atomic<std::uint64_t> nonce;
  std::atomic<int> size;   // of the group; 0 until one has joined
  std::atomic<int> fault;  // the first ncclResult_t that concerns all
  RankEntry ranks[kMaxRanks];
  Channel channels[2][kMaxRanks][kMaxRanks];  // lane, from, to

  Channel& channel(Lane lane, int from, int to) {
    return channels[static_cast<int>(lane)][from][to];
  }
};

/// A rank's hold on a segment. A lock on the rank's byte of the file shows that it lives: the
/// kernel takes it away from a process that ends, however it ends.
class Membership {
 public:
  /// A new segment, open in this process until it ends or forget() is called.
  static SegmentId create();
  static void forget(const SegmentId& id);

  /// Throws Refusal: the maker is gone, another size was given, the rank has joined already.
  Membership(const SegmentId& id, int size, int rank);
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  Segment& shared() const { return *segment_; }
  RankEntry& mine() const { return segment_->ranks[rank_]; }

  /// Neither there any more nor gone in order.
  bool is_dead(int rank) const;
  /// The first dead rank, or -1.
  int dead_rank() const;
  void leave_in_order() { mine().left = 1; }
  /// Lets go of the lock, as a process does that ends.
  void leave();

  void ring(int rank) const;
  void ring_all() const;
  std::uint32_t bell() const { return mine().doorbell.load(); }
  /// Until the bell has rung since `seen` was read, or for a moment. False after a moment.
  bool sleep(std::uint32_t seen) const;

 private:
  /// Fails the whole group.
  [[noreturn]] void refuse(const std::string& why);

  int size_;
  int rank_;
  int file_ = -1;
  Segment* segment_ = nullptr;
};

}  // namespace fake_nccl
