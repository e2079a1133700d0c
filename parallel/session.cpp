#include "parallel/session.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <mpi.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "parallel/mpi_check.h"
#include "parallel/mpi_interop.h"
#include "parallel/roll_call.h"
#include "parallel/versions.h"
#include "runtime/error.h"
#include "runtime/output_file.h"
#include "runtime/quoted_name.h"

namespace gatefold {

void print_error(const std::string& line) noexcept {
  std::fputs((printable(line) + '\n').c_str(), stderr);
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

/// Nobody else's: it tells the watchdog to stop.
const int kStopSignal = SIGRTMAX;

/// What asks a program to end. Not what it was started to ignore, by nohup or a shell's &.
sigset_t watched_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, kStopSignal);
  for (const int signal : {SIGHUP, SIGINT, SIGTERM}) {
    struct sigaction action {};
    sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_IGN) sigaddset(&signals, signal);
  }
  return signals;
}

/// While it lives, neither this thread nor those that it starts are interrupted by `signals`.
class BlockedSignals {
 public:
  explicit BlockedSignals(const sigset_t& signals) {
    pthread_sigmask(SIG_BLOCK, &signals, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_{};
};

/// Ends the process on a signal, and the job when `progress` stands still. A wait of the
/// communicator gives up by itself at the timeout, with a better message; this is for everything
/// else that can hang: MPI's start and end, and its own collectives.
/// A thread and not a signal handler, because a handler waits for a write or fsync of the thread
/// that it interrupts, and mpirun gives a rank one second until it kills it.
class Watchdog {
 public:
  Watchdog(const Progress& progress, RollCall& roll_call, const std::atomic<int>& rank,
           double timeout_seconds)
      : progress_(progress),
        roll_call_(roll_call),
        rank_(rank),
        timeout_(timeout_seconds),
        thread_([this] { watch(); }) {}
  ~Watchdog() {
    stop_ = true;
    pthread_kill(thread_.native_handle(), kStopSignal);
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void watch();
  [[noreturn]] void end_process(int signal) const;
  std::vector<int> call_roll(std::uint64_t last_ticks) const;
  [[noreturn]] void end_job(const std::vector<int>& missing) const;

  const Progress& progress_;
  RollCall& roll_call_;
  const std::atomic<int>& rank_;
  double timeout_;
  std::atomic<bool> stop_ = false;
  const sigset_t signals_ = watched_signals();
  const BlockedSignals blocked_{signals_};
  std::thread thread_;  // last: it uses all of the above
};

/// Where nobody reads them, as behind a pager, the end comes without them.
void print_last_words(const std::string& line) noexcept {
  constexpr int kPatience = 200;  // ms
  pollfd stream{STDERR_FILENO, POLLOUT, 0};
  if (poll(&stream, 1, kPatience) != 0) print_error(line);
}

void Watchdog::watch() {
  using Clock = std::chrono::steady_clock;
  constexpr timespec kStep{0, 200'000'000};
  const std::chrono::duration<double> patience(timeout_ + 2);
  auto last_change = Clock::now();
  std::uint64_t last_ticks = progress_.ticks();
  std::optional<std::vector<int>> missing;  // asked for once, early enough to end in time
  for (;;) {
    const int signal = sigtimedwait(&signals_, nullptr, &kStep);
    if (stop_) return;
    if (signal > 0 && signal != kStopSignal) end_process(signal);
    roll_call_.answer();
    if (progress_.ticks() != last_ticks) {
      last_ticks = progress_.ticks();
      last_change = Clock::now();
      missing.reset();
    } else if (Clock::now() - last_change > patience) {
      end_job(missing.value_or(std::vector<int>()));
    } else if (Clock::now() - last_change > patience - RollCall::kPatience && !missing) {
      missing = call_roll(last_ticks);
    }
  }
}

std::vector<int> Watchdog::call_roll(std::uint64_t last_ticks) const {
  // A signal comes first: a peer may have ended the job, and mpirun gives this rank a second.
  int signal = 0;
  std::vector<int> missing = roll_call_.missing([&] {
    constexpr timespec kNow{0, 0};
    if (signal <= 0) signal = sigtimedwait(&signals_, nullptr, &kNow);
    return signal > 0 || progress_.ticks() != last_ticks;
  });
  if (signal > 0 && signal != kStopSignal) end_process(signal);
  return missing;
}

void Watchdog::end_process(int signal) const {
  remove_temporaries();
  const char* what = signal == SIGHUP ? "hung up" : signal == SIGINT ? "interrupted" : "terminated";
  print_last_words(fmt::format("[rank {}] {} while in: {}", rank_.load(), what, progress_.phase()));
  // mpirun gives its ranks a second, but kills all once the first has ended: let those that have
  // more to remove be done.
  if (launched_processes() > 1) std::this_thread::sleep_for(std::chrono::milliseconds(600));
  _exit(kSignalled + signal);
}

void Watchdog::end_job(const std::vector<int>& missing) const {
  print_last_words(fmt::format(
      "[rank {}] gatefold: no progress for {} s in {}{}{} (a peer or a GPU is lost or stuck); "
      "ending the job",
      rank_.load(), timeout_, progress_.phase(),
      missing.empty() ? "" : ", nor an answer from rank ", fmt::join(missing, ", ")));
  Session::abort_job(static_cast<int>(ExitCode::kTimeout));
}

}  // namespace

struct Session::State {
  State(int launched, double timeout_seconds)
      : timeout(timeout_seconds), rank(launched), watchdog(progress, roll_call, rank, timeout) {}

  double timeout;
  bool threads = false;  // may all call MPI
  Progress progress;
  RollCall roll_call;
  std::atomic<int> rank;
  Watchdog watchdog;
  std::unique_ptr<Communicator> world;
};

namespace {

Error alone_among(int launched, int world) {
  return Error(ExitCode::kUsage,
               fmt::format("the launcher started {} processes but this one is alone in a world of "
                           "{} (the launcher and this program use different MPI libraries, or srun "
                           "ran without --mpi=pmix); start it with the mpirun it was built with",
                           launched, world));
}

/// What Open MPI ends in MPI_Init, with 1 and a page of text: srun told no process of the others.
bool srun_without_pmi() {
  const char* tasks = std::getenv("SLURM_STEP_NUM_TASKS");
  if (tasks == nullptr || std::atoi(tasks) <= 1 || !mpi_version().starts_with("Open MPI")) {
    return false;
  }
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    for (const char* told : {"PMI", "PALS_", "OMPI_COMM_WORLD_"}) {
      if (text.starts_with(told)) return false;
    }
  }
  return true;
}

}  // namespace

Session::Session(int* argc, char*** argv, double timeout_seconds)
    : state_(std::make_unique<State>(launched_rank(), timeout_seconds)) {
  if (srun_without_pmi()) throw alone_among(launched_processes(), 1);
  state_->progress.enter("the start of MPI");
  int provided = 0;
  check(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  int rank = 0;
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  state_->rank = rank;
  state_->threads = provided == MPI_THREAD_MULTIPLE;
  if (!state_->threads && rank == 0) {
    // The watchdog's MPI_Abort is then outside MPI's promises, but better than a hang.
    print_error("gatefold: MPI offers no MPI_THREAD_MULTIPLE; the watchdog may fail");
  }
}

Session::~Session() {
  state_->world.reset();
  state_->roll_call.end();
  state_->progress.enter("the end of MPI");
  MPI_Finalize();
}

Communicator& Session::world() const { return *state_->world; }
Progress& Session::progress() const { return state_->progress; }

void Session::start(WithinNode within) {
  if (state_->threads) {
    state_->roll_call.begin();
    state_->progress.set_roll_call(
        [roll_call = &state_->roll_call] { return roll_call->missing(); });
  }
  MpiOptions options{state_->timeout, &state_->progress};
  options.within_node = within;
  state_->world = make_mpi_communicator(MPI_COMM_WORLD, options);
  const int launched = launched_processes();
  if (launched > 1 && state_->world->size() != launched) {
    throw alone_among(launched, state_->world->size());
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
