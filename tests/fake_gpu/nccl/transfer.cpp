#include "tests/fake_gpu/nccl/transfer.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <tuple>

#include "tests/fake_gpu/fake_cudart.h"

namespace fake_nccl {
namespace {

constexpr int kPatience = 25;  // moments in which nothing moved

/// One direction of one lane: the launch's messages in order, through the ring.
class Stream {
 public:
  Stream(Channel& channel, bool sending) : channel_(channel), sending_(sending) {}

  void add(const Message& message) { messages_.push_back(message); }

  /// Moves what can be moved; true if anything could. Throws Refusal where headers differ.
  bool advance(int rank) {
    bool moved = false;
    while (!messages_.empty()) {
      Message& message = messages_.front();
      const std::size_t end = sizeof(Header) + message.header.bytes;
      while (at_ < sizeof(Header) && step(header_bytes(message), sizeof(Header))) moved = true;
      if (at_ < sizeof(Header)) break;
      if (!sending_) compare(message, rank);
      while (at_ < end && step(message.data - sizeof(Header), end)) moved = true;
      if (at_ < end) break;
      messages_.pop_front();
      at_ = 0;
    }
    return moved;
  }

  bool starved() const { return !messages_.empty() && channel_.read == channel_.written; }
  /// A send is done when the receiver has taken it, as on a GPU without buffers between.
  bool done() const {
    return messages_.empty() && (!sending_ || channel_.read == channel_.written);
  }

 private:
  std::byte* header_bytes(Message& message) {
    Header& header = sending_ ? message.header : theirs_;
    return reinterpret_cast<std::byte*>(&header);
  }

  /// Moves a contiguous run of base[at_, end) to or from the ring; false if there is no room.
  bool step(std::byte* base, std::size_t end) {
    const std::uint64_t filled = channel_.written - channel_.read;
    const std::uint64_t position = sending_ ? channel_.written.load() : channel_.read.load();
    const std::uint64_t offset = position % kRingBytes;
    const std::uint64_t room = sending_ ? kRingBytes - filled : filled;
    const std::uint64_t bytes = std::min({room, kRingBytes - offset, std::uint64_t{end - at_}});
    if (bytes == 0) return false;
    std::byte* ring = channel_.ring.data() + offset;
    std::memcpy(sending_ ? ring : base + at_, sending_ ? base + at_ : ring, bytes);
    at_ += bytes;
    (sending_ ? channel_.written : channel_.read) += bytes;
    return true;
  }

  void compare(const Message& message, int rank) const {
    const auto text = [](const Header& h) {
      return std::string(h.name) + " of " + std::to_string(h.count) + " elements of type " +
             std::to_string(h.type) + " (op " + std::to_string(h.op) + ", root " +
             std::to_string(h.root) + ", " + std::to_string(h.bytes) + " bytes)";
    };
    if (std::memcmp(&message.header, &theirs_, sizeof(Header)) == 0) return;
    throw Refusal{ncclInvalidUsage, "rank " + std::to_string(rank) + " does " +
                                        text(message.header) + ", but rank " +
                                        std::to_string(message.peer) + " does " + text(theirs_)};
  }

  Channel& channel_;
  bool sending_;
  std::deque<Message> messages_;
  std::size_t at_ = 0;  // of the front message, its header included
  Header theirs_{};
};

class Transfer {
 public:
  Transfer(Membership& members, int rank, const std::vector<Operation>& operations)
      : members_(members), rank_(rank) {
    for (const Operation& operation : operations) {
      for (const Message& m : operation.sends) stream(m, true).add(m);
      for (const Message& m : operation.receives) stream(m, false).add(m);
    }
  }

  /// A peer that we wait for has something else for us, which this launch doesn't take: it waits
  /// for us as we for it. -1 where there is none.
  int crossed_peer() const {
    for (const auto& [key, stream] : streams_) {
      const auto& [lane, peer, sending] = key;
      const Lane other = lane == Lane::kPeer ? Lane::kCollective : Lane::kPeer;
      const Channel& unasked = members_.shared().channel(other, peer, rank_);
      const bool taken = streams_.count({other, peer, false}) > 0;
      if (!sending && stream.starved() && !taken && unasked.written != unasked.read) return peer;
    }
    return -1;
  }

  /// One round over all streams. True when everything is done.
  bool advance(bool& moved) {
    bool done = true;
    for (auto& [key, stream] : streams_) {
      if (stream.advance(rank_)) {
        moved = true;
        members_.ring(std::get<1>(key));
      }
      done = done && stream.done();
    }
    return done;
  }

 private:
  Stream& stream(const Message& m, bool sending) {
    Channel& channel = sending ? members_.shared().channel(m.lane, rank_, m.peer)
                               : members_.shared().channel(m.lane, m.peer, rank_);
    return streams_.try_emplace({m.lane, m.peer, sending}, channel, sending).first->second;
  }

  Membership& members_;
  int rank_;
  std::map<std::tuple<Lane, int, bool>, Stream> streams_;
};

}  // namespace

bool transfer(Membership& members, int rank, std::vector<Operation>& operations,
              const std::atomic<bool>& aborted) {
  for (Operation& operation : operations) {
    if (operation.start) operation.start();
  }
  Transfer all(members, rank, operations);
  for (int idle = 0;;) {
    const std::uint32_t bell = members.bell();
    bool moved = false;
    if (all.advance(moved)) break;
    if (aborted) return false;
    if (const int fault = members.shared().fault; fault != 0) {
      throw Refusal{static_cast<ncclResult_t>(fault), "another rank found a fault"};
    }
    if (moved) idle = 0;
    if (moved || members.sleep(bell)) continue;
    const int crossed = ++idle < kPatience ? -1 : all.crossed_peer();
    if (crossed >= 0) {
      throw Refusal{ncclInvalidUsage, "rank " + std::to_string(rank) + " and rank " +
                                          std::to_string(crossed) +
                                          " wait for each other: one in a collective, one in a "
                                          "message"};
    }
    const int dead = cudaFakeSetting("SILENT_DEATH", 0) != 0 ? -1 : members.dead_rank();
    if (dead >= 0) {
      throw Refusal{ncclRemoteError, "rank " + std::to_string(rank) + " lost its peer, rank " +
                                         std::to_string(dead)};
    }
  }
  for (Operation& operation : operations) {
    if (operation.finish) operation.finish();
  }
  return true;
}

}  // namespace fake_nccl
