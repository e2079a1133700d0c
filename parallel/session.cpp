#include "parallel/session.h"

#include <fmt/format.h>
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "parallel/mpi_check.h"
#include "parallel/mpi_interop.h"
#include "runtime/error.h"
#include "runtime/output_file.h"

namespace gatefold {
namespace {

// A signal handler gets no argument, so what it prints must be reachable from here.
const Progress* signal_progress = nullptr;
int signal_rank = 0;

/// A line put together without allocation, for a signal handler; what doesn't fit is left out.
class SignalLine {
 public:
  void add(const char* text) {
    while (*text != '\0' && size_ < sizeof(text_)) text_[size_++] = *text++;
  }
  void add(int number) {
    char digits[16] = "";
    char* at = digits + sizeof(digits) - 1;
    do {
      *--at = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number != 0);
    add(at);
  }
  void write_out() const {
    [[maybe_unused]] const auto written = write(STDERR_FILENO, text_, size_);
  }

 private:
  char text_[160];
  std::size_t size_ = 0;
};

/// Async-signal-safe. One write, so that the lines of several ranks don't mix.
void on_terminate(int) {
  SignalLine line;
  line.add("[rank ");
  line.add(signal_rank);
  line.add("] terminated while in: ");
  line.add(signal_progress != nullptr ? signal_progress->phase() : "start");
  line.add("\n");
  line.write_out();
  remove_temporaries();
  _exit(static_cast<int>(ExitCode::kTerminated));
}

}  // namespace

void print_error(const std::string& line) noexcept {
  std::fputs((line + '\n').c_str(), stderr);
  std::fflush(stderr);
}

int launched_processes() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const char* value = std::getenv(name);
    if (value != nullptr) return std::atoi(value);
  }
  return 0;
}

int launched_rank() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    const char* value = std::getenv(name);
    if (value != nullptr) return std::atoi(value);
  }
  return 0;
}

namespace {

/// While it lives, SIGTERM ends the process with a line that says what it was doing.
class TerminateHandler {
 public:
  TerminateHandler(const Progress& progress, int rank) {
    signal_progress = &progress;
    signal_rank = rank;
    std::signal(SIGTERM, on_terminate);
  }
  ~TerminateHandler() {
    std::signal(SIGTERM, SIG_DFL);
    signal_progress = nullptr;
  }
  TerminateHandler(const TerminateHandler&) = delete;
  TerminateHandler& operator=(const TerminateHandler&) = delete;
};

/// Ends the job when `progress` stands still. A wait of the communicator gives up by itself at the
/// timeout, with a better message; this is for everything else that can hang: MPI's start and end,
/// and its own collectives.
class Watchdog {
 public:
  Watchdog(const Progress& progress, int rank, double timeout_seconds)
      : progress_(progress), rank_(rank), timeout_(timeout_seconds), thread_([this] { watch(); }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    stop_changed_.notify_all();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void watch();
  [[noreturn]] void end_job() const;

  const Progress& progress_;
  int rank_;
  double timeout_;
  std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

void Watchdog::watch() {
  using Clock = std::chrono::steady_clock;
  const std::chrono::duration<double> patience(timeout_ + 2);
  auto last_change = Clock::now();
  std::uint64_t last_ticks = progress_.ticks();
  std::unique_lock lock(mutex_);
  while (!stop_changed_.wait_for(lock, std::chrono::milliseconds(200), [this] { return stop_; })) {
    if (progress_.ticks() != last_ticks) {
      last_ticks = progress_.ticks();
      last_change = Clock::now();
    } else if (Clock::now() - last_change > patience) {
      end_job();
    }
  }
}

void Watchdog::end_job() const {
  print_error(
      fmt::format("[rank {}] gatefold: no progress for {} s in {} (a peer is lost or stuck); "
                  "ending the job",
                  rank_, timeout_, progress_.phase()));
  Session::abort_job(static_cast<int>(ExitCode::kTimeout));
}

}  // namespace

struct Session::State {
  State(int rank, double timeout_seconds)
      : timeout(timeout_seconds), handler(progress, rank), watchdog(progress, rank, timeout) {}

  double timeout;
  Progress progress;
  TerminateHandler handler;
  Watchdog watchdog;
  std::unique_ptr<Communicator> world;
};

Session::Session(int* argc, char*** argv, double timeout_seconds)
    : state_(std::make_unique<State>(launched_rank(), timeout_seconds)) {
  state_->progress.enter("the start of MPI");
  int provided = 0;
  check(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  int rank = 0;
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  signal_rank = rank;
  if (provided < MPI_THREAD_MULTIPLE && rank == 0) {
    // The watchdog's MPI_Abort is then outside MPI's promises, but better than a hang.
    print_error("gatefold: MPI offers no MPI_THREAD_MULTIPLE; the watchdog may fail");
  }
}

Session::~Session() {
  state_->world.reset();
  state_->progress.enter("the end of MPI");
  MPI_Finalize();
}

Communicator& Session::world() const { return *state_->world; }

void Session::start() {
  state_->world = make_mpi_communicator(MPI_COMM_WORLD, {state_->timeout, &state_->progress});
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
  remove_temporaries();  // no destructor runs
  int started = 0;
  MPI_Initialized(&started);
  if (started == 0) _exit(code);
  // MPI_Abort can hang when the network is gone; then the process ends alone.
  std::thread([code] {
    std::this_thread::sleep_for(std::chrono::seconds(5));
    _exit(code);
  }).detach();
  MPI_Abort(MPI_COMM_WORLD, code);
  _exit(code);
}

}  // namespace gatefold
