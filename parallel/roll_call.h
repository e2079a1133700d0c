#pragma once

#include <mpi.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <vector>

namespace gatefold {

/// Finds the ranks of a job that are lost, whatever operation the others are in: a thread of each
/// rank answers, so one that is only slow, or waits for another, isn't taken for lost. Takes an MPI
/// that several threads may call.
class RollCall {
 public:
  /// How long a rank may take to answer: several looks of its thread, and what else its core does.
  static constexpr std::chrono::duration<double> kPatience{1.0};

  /// Before this nobody is missed. Collective over the job. Throws Error 70.
  void begin();
  /// Before the end of MPI.
  void end();

  /// Answers the ranks that have called. For a thread that comes by several times a second.
  void answer();
  /// Calls all ranks; those that don't answer in time, in the world's numbers. Returns
  /// early, with none, once `enough` says so.
  std::vector<int> missing(const std::function<bool()>& enough = nullptr);

 private:
  void answer_all() const;

  std::mutex mutex_;  // of all that follows, and of MPI calls on comm_
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace gatefold
