#include "parallel/mpi_windows.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "parallel/mpi_check.h"
#include "runtime/error.h"
#include "runtime/file_descriptor.h"
#include "runtime/output_file.h"
#include "runtime/range.h"

namespace gatefold {
namespace {

constexpr std::size_t kReasonBytes = 256;

std::int64_t page_bytes() { return ::sysconf(_SC_PAGESIZE); }

/// Where Open MPI puts memory that ranks share, which it has a name for.
const char* backing_directory() {
  const char* chosen = std::getenv("OMPI_MCA_osc_sm_backing_directory");
  return chosen != nullptr ? chosen : "/dev/shm";
}

/// The counts' lines come first, then the segments.
std::int64_t counts_bytes(std::size_t ranks) {
  return round_up(static_cast<std::int64_t>(ranks) * SharedWindow::kLine, page_bytes());
}

/// What a window takes; more than any node has where that is no number.
std::int64_t window_bytes(std::int64_t segment, std::size_t ranks) {
  std::int64_t bytes = 0;
  const bool overflow = __builtin_mul_overflow(segment, static_cast<std::int64_t>(ranks), &bytes) ||
                        __builtin_add_overflow(bytes, counts_bytes(ranks), &bytes);
  return overflow ? std::numeric_limits<std::int64_t>::max() : bytes;
}

/// A new file of zeros, and its name, which its owner has to take away again.
struct NamedFile {
  FileDescriptor fd;
  TemporaryPath path;
};
/// False where it fails, and errno says why.
bool make_file(std::int64_t bytes, NamedFile& file) {
  // At random: a killed job's file may have been named by this process's number.
  std::string name = fmt::format("{}/gatefold-XXXXXX", backing_directory());
  file.fd.reset(::mkostemp(name.data(), O_CLOEXEC));
  if (file.fd.get() < 0) return false;
  file.path = TemporaryPath(name, TemporaryKind::kFile);
  return ::ftruncate(file.fd.get(), bytes) == 0;
}

/// By errno.
std::string failure(const char* what, std::int64_t bytes) {
  return fmt::format("{} bytes in {} can't be {} ({})", bytes, backing_directory(), what,
                     errno_text(errno));
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

Mapping::Mapping(int fd, std::int64_t bytes) : bytes_(static_cast<std::size_t>(bytes)) {
  if (fd < 0) return;
  void* data = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data != MAP_FAILED) data_ = static_cast<std::byte*>(data);
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

MpiWindows::~MpiWindows() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized == 0 && node_ != MPI_COMM_NULL) MPI_Comm_free(&node_);
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
  Wish wish{bytes, static_cast<std::int64_t>(ranks_.size()), bytes < 0 ? 1 : 0};
  check(MPI_Allreduce(MPI_IN_PLACE, &wish, 3, MPI_INT64_T, MPI_MAX, group_.comm), "MPI_Allreduce");
  if (wish.negative != 0) {
    throw Error(ExitCode::kUsage,
                fmt::format("memory of {} bytes to share on some rank (a size is 0 or more); pass "
                            "the bytes of a rank's segment",
                            bytes));
  }
  if (wish.most_on_a_node == 1) {
    log_.refused = "no two ranks of a group share a node";
    return nullptr;
  }
  const std::int64_t most = std::numeric_limits<std::int64_t>::max() - page_bytes();
  const std::int64_t segment_bytes =
      round_up(std::clamp<std::int64_t>(wish.bytes, 1, most), page_bytes());
  const std::int64_t all = window_bytes(segment_bytes, ranks_.size());
  const bool makes = node_rank_ == 0;
  if (refused(makes ? lack_of_room(all) : "")) return nullptr;
  // Each step is the ranks' own, and all agree on it before the next.
  NamedFile file;
  std::string why;
  if (makes && !make_file(all, file)) why = failure("made", all);
  if (refused(why)) return nullptr;
  const std::string name = name_on_node(file.path.path());
  if (!makes) file.fd.reset(::open(name.c_str(), O_RDWR | O_CLOEXEC));
  Mapping memory(file.fd.get(), all);
  if (memory.data() == nullptr) {
    why = failure("mapped", all);
  } else {
    const std::int64_t counts = counts_bytes(ranks_.size());
    int status = touch(memory.data() + counts + node_rank_ * segment_bytes, segment_bytes);
    if (status == 0 && makes) status = touch(memory.data(), counts);
    if (status != 0) errno = status, why = failure("held", all);
  }
  if (refused(why)) return nullptr;
  log_.shared = true;
  if (std::ssize(ranks_) < group_.size) log_.several_nodes = true;
  return make_window(segment_bytes, std::move(memory));
}

/// Empty where there is room.
std::string MpiWindows::lack_of_room(std::int64_t bytes) const {
  struct statvfs space {};
  const char* directory = backing_directory();
  if (::statvfs(directory, &space) != 0) {
    return fmt::format("{} can't be used ({})", directory, errno_text(errno));
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

/// What the node's first rank has called its file.
std::string MpiWindows::name_on_node(const std::string& own) const {
  std::array<char, PATH_MAX> name{};
  own.copy(name.data(), name.size() - 1);
  check(MPI_Bcast(name.data(), static_cast<int>(name.size()), MPI_CHAR, 0, node_), "MPI_Bcast");
  return name.data();
}

std::unique_ptr<SharedWindow> MpiWindows::make_window(std::int64_t segment_bytes,
                                                      Mapping memory) const {
  SharedWindow::Parts parts;
  parts.counts = memory.data();
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
  parts.memory = std::make_shared<Mapping>(std::move(memory));
  return std::make_unique<SharedWindow>(std::move(parts));
}

}  // namespace gatefold
