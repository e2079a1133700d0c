#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parallel/shared_window.h"

namespace gatefold {

/// Memory of a file, as long as this is there.
class Mapping {
 public:
  Mapping() = default;
  /// Of so many bytes from the file's begin, for reading and writing. Empty where it fails, and
  /// errno says why.
  Mapping(int fd, std::int64_t bytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;

  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// What became of sharing memory, of a communicator and all that were split from it.
struct SharingLog {
  bool shared = false;
  bool several_nodes = false;  // where it was shared
  std::string refused;         // why not, the last time
};

/// Makes the shared windows of one communicator. They are files that all ranks of a node have
/// mapped and none has a name for any more, not MPI's windows: of what may fail in making one,
/// another rank would learn nothing from MPI, and wait in it.
class MpiWindows {
 public:
  struct Group {
    MPI_Comm comm = MPI_COMM_NULL;
    int rank = 0;
    int size = 1;
    double timeout_seconds = 0;
    Progress* progress = nullptr;
    int node = 0;  // MpiOptions'
  };
  /// The log must outlive it.
  MpiWindows(const Group& group, SharingLog& log) : group_(group), log_(log) {}
  ~MpiWindows();
  MpiWindows(const MpiWindows&) = delete;
  MpiWindows& operator=(const MpiWindows&) = delete;

  /// See Communicator::share().
  std::unique_ptr<SharedWindow> share(std::int64_t bytes);

 private:
  /// What the ranks of the group have to say before a window is made, the larger one of each.
  struct Wish {
    std::int64_t bytes = 0;
    std::int64_t most_on_a_node = 0;
    std::int64_t negative = 0;
  };

  void find_node();
  std::string lack_of_room(std::int64_t bytes) const;
  bool refused(const std::string& why_here);
  std::string name_on_node(const std::string& own) const;
  std::unique_ptr<SharedWindow> make_window(std::int64_t segment_bytes, Mapping memory) const;

  Group group_;
  SharingLog& log_;
  MPI_Comm node_ = MPI_COMM_NULL;
  int node_rank_ = 0;
  std::vector<int> ranks_;        // of the group on this node
  std::vector<int> world_ranks_;  // the same in the world
};

}  // namespace gatefold
