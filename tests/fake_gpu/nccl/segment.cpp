#include "tests/fake_gpu/nccl/segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>

namespace fake_nccl {
namespace {

constexpr std::uint64_t kMagic = 0x6761746566616b65;

struct flock byte_lock(int rank) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

Segment* map(int file) {
  void* memory = mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) {
    throw Refusal{ncclSystemError, std::string("mmap failed: ") + std::strerror(errno)};
  }
  return static_cast<Segment*>(memory);
}

}  // namespace

ncclResult_t report(const Refusal& refusal) {
  std::fprintf(stderr, "fake NCCL: %s\n", refusal.why.c_str());
  std::fflush(stderr);
  return refusal.code;
}

SegmentId Membership::create() {
  SegmentId id;
  id.magic = kMagic;
  id.pid = getpid();
  id.file = memfd_create("fake_nccl", MFD_CLOEXEC);
  if (id.file < 0 || ftruncate(id.file, sizeof(Segment)) != 0 ||
      getrandom(&id.nonce, sizeof(id.nonce), 0) != sizeof(id.nonce)) {
    throw Refusal{ncclSystemError, std::string("no shared memory: ") + std::strerror(errno)};
  }
  Segment* segment = map(id.file);
  segment->nonce = id.nonce;
  munmap(segment, sizeof(Segment));
  return id;
}

void Membership::forget(const SegmentId& id) {
  if (id.pid == getpid()) close(id.file);
}

Membership::Membership(const SegmentId& id, int size, int rank) : size_(size), rank_(rank) {
  if (id.magic != kMagic) throw Refusal{ncclInvalidArgument, "this is no unique id"};
  const std::string path = "/proc/" + std::to_string(id.pid) + "/fd/" + std::to_string(id.file);
  file_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat status {};
  if (file_ < 0 || fstat(file_, &status) != 0 ||
      status.st_size != static_cast<off_t>(sizeof(Segment))) {
    if (file_ >= 0) close(file_);
    throw Refusal{ncclRemoteError, "the process that made the unique id is gone, or has closed it"};
  }
  segment_ = map(file_);
  if (segment_->nonce != id.nonce) {
    throw Refusal{ncclRemoteError, "the process that made the unique id has closed it"};
  }
  int other = 0;
  if (!segment_->size.compare_exchange_strong(other, size) && other != size) {
    refuse("rank " + std::to_string(rank) + " joins a group of " + std::to_string(size) +
           " ranks, another joined one of " + std::to_string(other));
  }
  struct flock lock = byte_lock(rank);
  if (mine().joined != 0 || fcntl(file_, F_OFD_SETLK, &lock) != 0) {
    refuse("rank " + std::to_string(rank) + " joined twice: process " + std::to_string(mine().pid) +
           " and process " + std::to_string(getpid()));
  }
  mine().pid = getpid();
}

void Membership::refuse(const std::string& why) {
  int none = 0;
  segment_->fault.compare_exchange_strong(none, ncclInvalidUsage);
  leave();
  munmap(segment_, sizeof(Segment));
  throw Refusal{ncclInvalidUsage, why};
}

Membership::~Membership() {
  leave();
  munmap(segment_, sizeof(Segment));
}

bool Membership::is_dead(int rank) const {
  const RankEntry& entry = segment_->ranks[rank];
  if (rank == rank_ || entry.joined == 0) return false;
  struct flock lock = byte_lock(rank);
  fcntl(file_, F_OFD_GETLK, &lock);
  return lock.l_type == F_UNLCK && entry.left == 0;
}

int Membership::dead_rank() const {
  for (int r = 0; r < size_; ++r) {
    if (is_dead(r)) return r;
  }
  return -1;
}

void Membership::leave() {
  if (file_ < 0) return;
  close(file_);
  file_ = -1;
  ring_all();
}

void Membership::ring(int rank) const {
  std::atomic<std::uint32_t>& bell = segment_->ranks[rank].doorbell;
  ++bell;
  syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Membership::ring_all() const {
  for (int r = 0; r < size_; ++r) ring(r);
}

bool Membership::sleep(std::uint32_t seen) const {
  const timespec moment{0, 20'000'000};
  const long status = syscall(SYS_futex, &mine().doorbell, FUTEX_WAIT, seen, &moment, nullptr, 0);
  return status == 0 || errno != ETIMEDOUT;
}

}  // namespace fake_nccl
