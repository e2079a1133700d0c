#pragma once

#include <memory>
#include <string>

#include "parallel/communicator.h"

namespace gatefold {

/// MPI for the length of a program: initialises it, watches over it, finalises it.
/// From its start to the end of MPI, a watchdog thread ends the process at SIGHUP, SIGINT or
/// SIGTERM with the phase on standard error and 128 + the signal's number, and the job with 75 when
/// this rank makes no progress for longer than the timeout.
class Session {
 public:
  /// Throws Error 70 where MPI can't be started, 64 where srun started several processes without
  /// PMI.
  Session(int* argc, char*** argv, double timeout_seconds);
  /// Finalises MPI; collective.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  /// All processes of the job. Its waits have the session's timeout.
  Communicator& world() const;
  /// Of this rank, from the start on.
  Progress& progress() const;

  /// Makes world(), whose ranks of one node share memory or not. Call once, before anything else.
  /// Collective.
  /// Throws Error 64 where the launcher started several processes and each is a world of its own.
  void start(WithinNode within = WithinNode::kSharedMemory);

  /// Ends the whole job at once with `code`: for faults that peers can't be told of. Before MPI has
  /// started it ends this process only.
  [[noreturn]] static void abort_job(int code);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Prints one printable line to standard error. A closed or full stream must not turn an error into
/// another one, so nothing is thrown and nothing checked.
void print_error(const std::string& line) noexcept;

/// How many processes the launcher started, by the environment; 0 if it doesn't say. The first set
/// of OMPI_COMM_WORLD_SIZE, PMI_SIZE, SLURM_STEP_NUM_TASKS; never SLURM_NTASKS, which a batch shell
/// has too.
int launched_processes();
/// Which of them this one is, from OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID; 0 if they are
/// unset.
int launched_rank();

}  // namespace gatefold
