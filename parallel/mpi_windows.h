#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parallel/shared_window.h"

namespace gatefold {

/// What became of sharing memory, of a communicator and all that were split from it.
struct SharingLog {
  bool shared = false;
  bool several_nodes = false;  // where it was shared
  std::string refused;         // why not, the last time
};

/// The shared windows of one communicator. MPI frees a window by all its ranks together, and a
/// window's owner may end on one rank alone, by an exception: so windows that are done with wait
/// here until all ranks come by again.
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
  /// A peer is lost: nothing here may wait for it any more.
  void abandon() { abandoned_ = true; }

 private:
  struct Use {
    bool over = false;
    bool in_vain = false;  // a peer didn't come
  };
  struct Window {
    MPI_Win win = MPI_WIN_NULL;
    std::shared_ptr<Use> use = std::make_shared<Use>();
  };
  /// What the ranks of the group have to say before a window is made, the larger one of each.
  struct Wish {
    std::int64_t bytes = 0;
    std::int64_t most_on_a_node = 0;
  };

  void find_node();
  void free_unused();
  std::string lack_of_room(std::int64_t bytes) const;
  bool refused(const std::string& why_here);
  std::string allocate(std::int64_t bytes, Window& window, std::byte*& memory) const;
  std::unique_ptr<SharedWindow> make_window(std::int64_t segment_bytes, std::byte* memory,
                                            const std::shared_ptr<Use>& use) const;

  Group group_;
  SharingLog& log_;
  MPI_Comm node_ = MPI_COMM_NULL;
  int node_rank_ = 0;
  std::vector<int> ranks_;        // of the group on this node
  std::vector<int> world_ranks_;  // the same in the world
  std::vector<Window> windows_;
  bool abandoned_ = false;
};

}  // namespace gatefold
