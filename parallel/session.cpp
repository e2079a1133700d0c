#include "parallel/session.h"

#include <fmt/format.h>
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "parallel/mpi_check.h"
#include "parallel/mpi_interop.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

// A signal handler gets no argument, so what it prints must be reachable from here.
const Progress* signal_progress = nullptr;
int signal_rank = 0;

void write_text(const char* text) {
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text, std::strlen(text));
}

/// Async-signal-safe: the rank in decimal, digit by digit.
void on_terminate(int) {
  char digits[16] = "";
  char* at = digits + sizeof(digits) - 1;
  int rest = signal_rank;
  do {
    *--at = static_cast<char>('0' + rest % 10);
    rest /= 10;
  } while (rest != 0);
  write_text("[rank ");
  write_text(at);
  write_text("] terminated while in: ");
  write_text(signal_progress != nullptr ? signal_progress->phase() : "start");
  write_text("\n");
  _exit(static_cast<int>(ExitCode::kTerminated));
}

}  // namespace

int launched_processes() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const char* value = std::getenv(name);
    if (value != nullptr) return std::atoi(value);
  }
  return 0;
}

struct Session::State {
  Progress progress;
  std::unique_ptr<Communicator> world;
  int rank = 0;

  std::mutex mutex;
  std::condition_variable stop_changed;
  bool stop = false;
  std::thread watchdog;

  void watch(double timeout_seconds);
};

/// A wait of the communicator gives up by itself at the timeout, with a better message; this is for
/// everything else that can hang, inside MPI's own collectives too.
void Session::State::watch(double timeout_seconds) {
  using Clock = std::chrono::steady_clock;
  const std::chrono::duration<double> patience(timeout_seconds + 2);
  auto last_change = Clock::now();
  std::uint64_t last_ticks = progress.ticks();
  std::unique_lock lock(mutex);
  while (!stop_changed.wait_for(lock, std::chrono::milliseconds(200), [this] { return stop; })) {
    if (progress.ticks() != last_ticks) {
      last_ticks = progress.ticks();
      last_change = Clock::now();
    } else if (Clock::now() - last_change > patience) {
      fmt::print(stderr,
                 "[rank {}] gatefold: no progress for {} s in {} (a peer is lost or stuck); "
                 "ending the job\n",
                 rank, timeout_seconds, progress.phase());
      abort_job(static_cast<int>(ExitCode::kTimeout));
    }
  }
}

Session::Session(int* argc, char*** argv) : state_(std::make_unique<State>()) {
  int provided = 0;
  check(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  check(MPI_Comm_rank(MPI_COMM_WORLD, &state_->rank), "MPI_Comm_rank");
  if (provided < MPI_THREAD_MULTIPLE && state_->rank == 0) {
    // The watchdog's MPI_Abort is then outside MPI's promises, but better than a hang.
    fmt::print(stderr, "gatefold: MPI offers no MPI_THREAD_MULTIPLE; the watchdog may fail\n");
  }
  signal_progress = &state_->progress;
  signal_rank = state_->rank;
  std::signal(SIGTERM, on_terminate);
}

Session::~Session() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->stop_changed.notify_all();
  if (state_->watchdog.joinable()) state_->watchdog.join();
  std::signal(SIGTERM, SIG_DFL);
  signal_progress = nullptr;
  state_->world.reset();
  MPI_Finalize();
}

Communicator& Session::world() const { return *state_->world; }

void Session::start(double timeout_seconds) {
  state_->watchdog = std::thread([this, timeout_seconds] { state_->watch(timeout_seconds); });
  state_->world = make_mpi_communicator(MPI_COMM_WORLD, {timeout_seconds, &state_->progress});
  const int launched = launched_processes();
  if (launched > 1 && state_->world->size() != launched) {
    throw Error(
        ExitCode::kUsage,
        fmt::format("the launcher started {} processes but this one is alone in a world of "
                    "{} (the launcher and this program use different MPI libraries, or srun "
                    "ran without --mpi=pmix); start it with the mpirun it was built with",
                    launched, state_->world->size()));
  }
}

void Session::abort_job(int code) {
  // MPI_Abort can hang when the network is gone; then the process ends alone.
  std::thread([code] {
    std::this_thread::sleep_for(std::chrono::seconds(5));
    _exit(code);
  }).detach();
  MPI_Abort(MPI_COMM_WORLD, code);
  _exit(code);
}

}  // namespace gatefold
