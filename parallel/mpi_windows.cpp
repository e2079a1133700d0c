#include "parallel/mpi_windows.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <numeric>

#include "parallel/mpi_check.h"
#include "runtime/range.h"

namespace gatefold {
namespace {

constexpr std::size_t kReasonBytes = 256;

std::int64_t page_bytes() { return ::sysconf(_SC_PAGESIZE); }

/// Where Open MPI puts its windows' memory.
const char* backing_directory() {
  const char* chosen = std::getenv("OMPI_MCA_osc_sm_backing_directory");
  return chosen != nullptr ? chosen : "/dev/shm";
}

/// The counts' lines and the segments, from a page's begin on wherever in a page MPI begins.
std::int64_t counts_bytes(std::size_t ranks) {
  return round_up(static_cast<std::int64_t>(ranks) * SharedWindow::kLine, page_bytes());
}
std::byte* page_begin(std::byte* memory) {
  const auto address = reinterpret_cast<std::intptr_t>(memory);
  return memory + (round_up(address, page_bytes()) - address);
}

/// Has the kernel give pages now, near this rank: where it has none, a later touch of one would be
/// a SIGBUS. 0 or an errno.
int touch(std::byte* pages, std::int64_t bytes) {
  if (bytes == 0) return 0;
  if (::madvise(pages, static_cast<std::size_t>(bytes), MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  std::memset(pages, 0, static_cast<std::size_t>(bytes));  // a kernel before 5.14
  return 0;
}

std::vector<int> translated(MPI_Comm from, MPI_Comm to, int size) {
  MPI_Group inner = MPI_GROUP_NULL;
  MPI_Group outer = MPI_GROUP_NULL;
  check(MPI_Comm_group(from, &inner), "MPI_Comm_group");
  check(MPI_Comm_group(to, &outer), "MPI_Comm_group");
  std::vector<int> inner_ranks(static_cast<std::size_t>(size));
  std::iota(inner_ranks.begin(), inner_ranks.end(), 0);
  std::vector<int> ranks(inner_ranks.size());
  check(MPI_Group_translate_ranks(inner, size, inner_ranks.data(), outer, ranks.data()),
        "MPI_Group_translate_ranks");
  MPI_Group_free(&inner);
  MPI_Group_free(&outer);
  return ranks;
}

}  // namespace

MpiWindows::~MpiWindows() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) return;
  // After an error the other ranks may not be here, and the memory goes with the process.
  const bool in_vain =
      std::ranges::any_of(windows_, [](const Window& window) { return window.use->in_vain; });
  if (abandoned_ || in_vain || node_ == MPI_COMM_NULL || std::uncaught_exceptions() > 0) return;
  for (Window& window : windows_) MPI_Win_free(&window.win);
  MPI_Comm_free(&node_);
}

/// The ranks that share this one's memory. The first time only.
void MpiWindows::find_node() {
  if (node_ != MPI_COMM_NULL) return;
  MPI_Comm host = MPI_COMM_NULL;
  check(MPI_Comm_split_type(group_.comm, MPI_COMM_TYPE_SHARED, group_.rank, MPI_INFO_NULL, &host),
        "MPI_Comm_split_type");
  check(MPI_Comm_split(host, group_.node, group_.rank, &node_), "MPI_Comm_split");
  MPI_Comm_free(&host);
  int size = 0;
  check(MPI_Comm_rank(node_, &node_rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(node_, &size), "MPI_Comm_size");
  ranks_ = translated(node_, group_.comm, size);
  world_ranks_ = translated(node_, MPI_COMM_WORLD, size);
}

std::unique_ptr<SharedWindow> MpiWindows::share(std::int64_t bytes) {
  find_node();
  free_unused();
  Wish wish{bytes, static_cast<std::int64_t>(ranks_.size())};
  check(MPI_Allreduce(MPI_IN_PLACE, &wish, 2, MPI_INT64_T, MPI_MAX, group_.comm), "MPI_Allreduce");
  if (wish.most_on_a_node == 1) {
    log_.refused = "no two ranks of a group share a node";
    return nullptr;
  }
  const std::int64_t segment_bytes = round_up(std::max<std::int64_t>(1, wish.bytes), page_bytes());
  const std::int64_t all = page_bytes() + counts_bytes(ranks_.size()) +
                           segment_bytes * static_cast<std::int64_t>(ranks_.size());
  if (refused(node_rank_ == 0 ? lack_of_room(all) : "")) return nullptr;
  Window window;
  std::byte* memory = nullptr;
  const std::string failure = allocate(all, window, memory);
  std::string why = failure;
  if (why.empty()) {
    const std::int64_t counts = counts_bytes(ranks_.size());
    std::byte* own = page_begin(memory) + counts + node_rank_ * segment_bytes;
    int status = touch(own, segment_bytes);
    if (status == 0 && node_rank_ == 0) status = touch(page_begin(memory), counts);
    if (status != 0) {
      why = fmt::format("{} can't hold {} bytes more ({})", backing_directory(), all,
                        std::strerror(status));
    }
  }
  if (refused(why)) {
    if (failure.empty()) MPI_Win_free(&window.win);
    return nullptr;
  }
  windows_.push_back(window);
  log_.shared = true;
  if (std::ssize(ranks_) < group_.size) log_.several_nodes = true;
  return make_window(segment_bytes, memory, window.use);
}

/// The windows that no rank uses any more: all ranks are here, so that MPI can free them.
void MpiWindows::free_unused() {
  if (windows_.empty()) return;
  std::vector<std::uint8_t> used;
  for (const Window& window : windows_) used.push_back(window.use->over ? 0 : 1);
  check(MPI_Allreduce(MPI_IN_PLACE, used.data(), static_cast<int>(used.size()), MPI_UINT8_T,
                      MPI_MAX, group_.comm),
        "MPI_Allreduce");
  std::vector<Window> kept;
  for (std::size_t i = 0; i < windows_.size(); ++i) {
    if (used[i] != 0) {
      kept.push_back(windows_[i]);
    } else {
      check(MPI_Win_free(&windows_[i].win), "MPI_Win_free");
    }
  }
  windows_ = std::move(kept);
}

/// Asked before MPI is, which complains aloud. Empty where there is room.
std::string MpiWindows::lack_of_room(std::int64_t bytes) const {
  struct statvfs space {};
  const char* directory = backing_directory();
  if (::statvfs(directory, &space) != 0) {
    return fmt::format("{} can't be used ({})", directory, std::strerror(errno));
  }
  const auto free = static_cast<std::int64_t>(space.f_bavail * space.f_frsize);
  if (free >= bytes) return "";
  return fmt::format("{} has {} of {} bytes free", directory, free, bytes);
}

/// Whether a rank of the group has a reason not to share; the log then has the lowest such rank's.
bool MpiWindows::refused(const std::string& why_here) {
  int first = why_here.empty() ? group_.size : group_.rank;
  check(MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, group_.comm), "MPI_Allreduce");
  if (first == group_.size) return false;
  std::array<char, kReasonBytes> reason{};
  why_here.copy(reason.data(), kReasonBytes - 1);
  check(MPI_Bcast(reason.data(), static_cast<int>(kReasonBytes), MPI_CHAR, first, group_.comm),
        "MPI_Bcast");
  log_.refused = reason.data();
  return true;
}

/// All of it on the node's first rank, which leaves the layout to us. What failed, in words.
std::string MpiWindows::allocate(std::int64_t bytes, Window& window, std::byte*& memory) const {
  void* base = nullptr;
  const int status = MPI_Win_allocate_shared(node_rank_ == 0 ? bytes : 0, 1, MPI_INFO_NULL, node_,
                                             &base, &window.win);
  if (status != MPI_SUCCESS) {
    return fmt::format("MPI_Win_allocate_shared of {} bytes failed", bytes);
  }
  check(MPI_Win_set_errhandler(window.win, MPI_ERRORS_RETURN), "MPI_Win_set_errhandler");
  MPI_Aint size = 0;
  int unit = 0;
  check(MPI_Win_shared_query(window.win, 0, &size, &unit, &base), "MPI_Win_shared_query");
  memory = static_cast<std::byte*>(base);
  return "";
}

std::unique_ptr<SharedWindow> MpiWindows::make_window(std::int64_t segment_bytes, std::byte* memory,
                                                      const std::shared_ptr<Use>& use) const {
  SharedWindow::Parts parts;
  parts.counts = page_begin(memory);
  parts.segments = parts.counts + counts_bytes(ranks_.size());
  parts.segment_bytes = segment_bytes;
  parts.group_size = group_.size;
  parts.own = group_.rank;
  parts.ranks = ranks_;
  parts.world_ranks = world_ranks_;
  parts.timeout_seconds = group_.timeout_seconds;
  parts.progress = group_.progress;
  // MPI may have to push on what this rank has sent before, which a peer may wait for.
  parts.move_messages = [node = node_] {
    int found = 0;
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, node, &found, MPI_STATUS_IGNORE);
  };
  parts.release = [use](bool in_vain) { *use = {true, in_vain}; };
  return std::make_unique<SharedWindow>(std::move(parts));
}

}  // namespace gatefold
