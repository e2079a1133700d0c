#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "parallel/progress.h"
#include "runtime/error.h"

namespace gatefold {

class SharedWindow;

/// Bytes that go to, or come from, one peer. Messages between two ranks match in the order in
/// which both list them; empty ones are skipped by both sides.
struct Transfer {
  int peer = 0;
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
};

/// Error 75: a wait for peers was in vain, so that there is no agreeing with them either.
class NoAnswerError : public Error {
 public:
  explicit NoAnswerError(const std::string& message) : Error(ExitCode::kTimeout, message) {}
  /// Names who is lost, by progress.missing(); where nobody is, `late`, in the world's numbers: the
  /// ranks that this one waits for, as far as it can tell. `what`: "a broadcast".
  NoAnswerError(std::vector<int> late, double seconds, const char* what, const Progress& progress);
};

/// How tensors in host memory go between ranks of one node.
enum class WithinNode { kSharedMemory, kMessages };

/// What the ranks of a group do together. Data is in the memory of the device that layers compute
/// on; for values in host memory there is host(). Collective: every rank of the group makes the
/// same calls in the same order, and calls of several groups in one order on all ranks. Where the
/// device has a stream, calls are work on it, in order with the layers' own: what they bring is
/// there for later work of the device, and for the host after wait(). Waits have a deadline: Error
/// 75 when a peer doesn't answer, 70 when the library reports an error. After either the group
/// can't be used any more.
class Communicator {
 public:
  virtual ~Communicator() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// The number of this group's `rank` among all ranks of the job, for messages. Of host().
  virtual int world_rank(int rank) const { return rank; }
  /// For the header of a report: "Open MPI 4.1.4", "self".
  virtual std::string description() const = 0;

  /// Sends and receives any number of pieces at once (all-to-all-v). A piece for the own rank is
  /// copied to the own rank's matching receive. The caller knows that sizes match.
  virtual void exchange(std::span<const Transfer> sends, std::span<const Transfer> receives) = 0;
  /// Part r of `all`, parts[r] bytes behind each other, comes from rank r; the own part is in
  /// place.
  virtual void all_gather_v(std::byte* all, std::span<const std::int64_t> parts) = 0;
  virtual void broadcast(std::byte* data, std::int64_t bytes, int root) = 0;
  /// No rank leaves it before all have entered; the host waits.
  virtual void barrier() = 0;
  /// Until all that was started is done, the device's work before it too.
  virtual void wait() {}

  /// The library's own sums, in an order of its choosing: for --reduce fast and to measure against.
  /// MPI blocks inside the library: no deadline of ours, but for a Session's watchdog.
  virtual void all_reduce(float* data, std::int64_t count) = 0;
  /// Part r of `data`, counts[r] values behind each other, becomes the sum of all ranks' on rank r;
  /// the rest of it is overwritten with anything.
  virtual void reduce_scatter_v(float* data, std::span<const std::int64_t> counts) = 0;

  /// Room for calls that send and receive up to `bytes` in all on this rank, so that they allocate
  /// nothing. For set-up. Throws Error 71.
  virtual void reserve(std::int64_t /*bytes*/) {}
  /// Ranks of equal `color` form a group, ordered by rank in this one. For set-up; no deadline.
  virtual std::unique_ptr<Communicator> split(int color) = 0;
  /// The ranks that share this one's memory, its host's, as a group. For set-up; no deadline.
  /// Throws Error 70 where neither this one nor its host() can tell.
  virtual std::unique_ptr<Communicator> split_by_host();

  /// Memory of this rank's node, a segment of `bytes` (the same on all ranks) for each of the
  /// group's ranks there. Null, on all ranks alike, where no two share a node, where its memory
  /// hasn't the room and where messages alone are wanted: messages have to do. Collective over the
  /// group, for set-up; no deadline. Throws Error 64 (fewer than 0 bytes on any rank, on all), 70.
  virtual std::unique_ptr<SharedWindow> share(std::int64_t bytes);
  /// In words, for a report: what share() has given to this group and those split from it, or why
  /// not. Empty where that makes no difference.
  virtual std::string sharing() const { return ""; }

  /// The same ranks for data in host memory: this one, unless its data is on a GPU.
  virtual Communicator& host() { return *this; }

  /// What this rank is doing, for the watchdog and for messages.
  Progress& progress() const { return *progress_; }

 protected:
  Communicator(int rank, int size, Progress* progress)
      : rank_(rank), size_(size), progress_(progress) {}
  /// Where this rank's part begins, of parts behind each other.
  std::int64_t before_own(std::span<const std::int64_t> parts) const;

 private:
  int rank_;
  int size_;
  Progress* progress_;
};

using CopyBytes = std::function<void(std::byte* out, const std::byte* in, std::int64_t bytes)>;
void copy_host_bytes(std::byte* out, const std::byte* in, std::int64_t bytes);

/// The part of an exchange that a rank has with itself: its pieces, empty ones skipped, in the
/// order of both lists. Throws Error 70 where the lists don't match.
void copy_own_pieces(int rank, std::span<const Transfer> sends, std::span<const Transfer> receives,
                     const CopyBytes& copy = copy_host_bytes);

/// The group of one: what a single-device run uses.
std::unique_ptr<Communicator> make_self_communicator();

/// Gathers one small value of a trivially copyable type in host memory from every rank, in rank
/// order.
template <typename T>
void all_gather(Communicator& comm, std::span<T> values) {
  const std::int64_t each = static_cast<std::int64_t>(sizeof(T));
  const std::vector<std::int64_t> parts(static_cast<std::size_t>(comm.size()), each);
  comm.host().all_gather_v(reinterpret_cast<std::byte*>(values.data()), parts);
}

}  // namespace gatefold
