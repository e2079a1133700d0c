#include "launch/program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "launch/bench.h"
#include "launch/convert.h"
#include "launch/machine_bench.h"
#include "launch/outputs.h"
#include "launch/version.h"
#include "parallel/agreement.h"
#include "parallel/session.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

/// A descriptor that the caller closed must not become one of MPI's sockets, with the report in it.
void hold_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // The lowest free number is `stream`; writing to it fails.
    if (::fcntl(stream, F_GETFD) < 0) static_cast<void>(::open("/dev/null", O_RDONLY));
  }
}

/// Prints help, version or an error; the exit code.
int show(const ParseResult& parsed) {
  if (parsed.exit_code != 0) {
    print_error("gatefold: " + parsed.text);
    return parsed.exit_code;
  }
  const std::string text = parsed.text + (parsed.version ? parts_text() : "");
  const bool printed = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (printed && std::fflush(stdout) == 0) return static_cast<int>(ExitCode::kOk);
  print_error("gatefold: can't print (standard output is closed or full); reopen it");
  return static_cast<int>(ExitCode::kOutput);
}

bool same_everywhere(Communicator& world, std::string_view text) {
  std::vector<std::uint64_t> all(static_cast<std::size_t>(world.size()));
  all[static_cast<std::size_t>(world.rank())] = fingerprint(std::as_bytes(std::span(text)));
  all_gather<std::uint64_t>(world, all);
  for (const std::uint64_t one : all) {
    if (one != all.front()) return false;
  }
  return true;
}

/// For when at least one rank has nothing to run: help for all, or an error.
int end_without_command(Communicator& world, const ParseResult& parsed) {
  if (same_everywhere(world, parsed.text)) {
    return world.rank() == 0 ? show(parsed) : parsed.exit_code;
  }
  run_agreed(world, [&] {
    if (parsed.exit_code != 0) throw Error(ExitCode::kUsage, parsed.text);
  });
  throw Error(ExitCode::kUsage,
              "some ranks print help or their version (the others would wait for them); start all "
              "ranks with the same arguments");
}

/// All ranks were started alike, or all throw which option differs.
void require_same_options(Communicator& world, const Options& options) {
  require_equal(world, "gatefold", GATEFOLD_VERSION);
  const auto echo = options.echo();
  std::string all;
  for (const auto& [name, value] : echo) all += name + '=' + value + '\n';
  if (same_everywhere(world, all)) return;
  for (const auto& [name, value] : echo) {
    require_equal(world, name == "command" ? name : "--" + name, value.empty() ? "none" : value);
  }
}

int run_command(Job& job) {
  switch (job.options().command) {
    case Command::kVerify: return verify(job);
    case Command::kRun: return run(job);
    case Command::kBench: break;  // has jobs of its own
    case Command::kInspect: return inspect(job);
    case Command::kMakeModel: return make_model(job);
    case Command::kBalance: return balance(job);
    case Command::kConvert: break;  // computes nothing
  }
  return static_cast<int>(ExitCode::kUsage);
}

/// What all ranks know of: what they agreed on, and a usage error, which is every rank's own.
bool known_to_all(const Error& error) {
  return error.code() == ExitCode::kUsage || dynamic_cast<const AgreedError*>(&error) != nullptr;
}

/// Prints the error once, or ends the job for a fault that peers can't know of; the exit code.
int end_with(const Error& error, int rank, int ranks) {
  const int code = static_cast<int>(error.code());
  if (ranks == 1 || known_to_all(error)) {
    if (rank == 0) print_error(fmt::format("gatefold: {}", error.what()));
    return code;
  }
  // A peer that knows why nobody answers ends the job first.
  if (error.code() == ExitCode::kTimeout)
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  print_error(fmt::format("[rank {}] gatefold: {}", rank, error.what()));
  Session::abort_job(code);
}

/// The same with the exception that is being handled.
int end_with_current(int rank, int ranks) {
  try {
    throw;
  } catch (const Error& error) {
    return end_with(error, rank, ranks);
  } catch (const std::bad_alloc&) {
    return end_with(Error(ExitCode::kOutOfMemory,
                          "out of memory (the job needs more than this process may have); use more "
                          "ranks or fewer tokens"),
                    rank, ranks);
  } catch (const std::exception& error) {
    return end_with(
        Error(ExitCode::kBackend, fmt::format("{} (an unforeseen error); report it", error.what())),
        rank, ranks);
  }
}

/// Thrown where the error has been told: unwinds what is left.
struct Ended {
  int code;
};

int run_ranks(Communicator& world, const ParseResult& parsed, const Seams& seams) {
  if (!all_true(world, parsed.options.has_value())) return end_without_command(world, parsed);
  require_same_options(world, *parsed.options);
  run_agreed(world, [&] {
    if (world.rank() == 0) check_outputs(*parsed.options);
  });
  const auto ended = [&world](const auto& command) {
    try {
      return command();
    } catch (...) {
      world.progress().tick();  // the watchdog knows less
      // While the job is alive: its end waits for a GPU, which may be stuck.
      throw Ended{end_with_current(world.rank(), world.size())};
    }
  };
  if (parsed.options->machine) {
    MachineBench bench(*parsed.options, world);
    return ended([&] { return bench.run(); });
  }
  if (parsed.options->command == Command::kBench) {
    Bench bench(*parsed.options, world, seams);
    return ended([&] { return bench.run(); });
  }
  if (parsed.options->command == Command::kConvert) {
    return ended([&] { return convert(*parsed.options, world); });
  }
  Job job(*parsed.options, world, seams);
  return ended([&] { return run_command(job); });
}

}  // namespace

int run_program(int argc, char** argv, const Seams& seams, const std::string& revision) {
  hold_standard_streams();
  std::signal(SIGPIPE, SIG_IGN);  // a closed pipe is an error like others
  std::signal(SIGXFSZ, SIG_IGN);  // as is a file that may not grow
  ParseResult parsed = parse_options(argc, argv);
  if (parsed.options) parsed.options->revision = revision;
  // Alone there is nobody to agree with, and help must not need a working MPI.
  if (!parsed.options && launched_processes() <= 1) return show(parsed);

  // As the launcher says, until MPI does.
  int rank = launched_rank();
  int ranks = std::max(1, launched_processes());
  std::optional<Session> session;
  try {
    session.emplace(&argc, &argv, parsed.options.value_or(Options{}).timeout);
    const bool by_messages = parsed.options && parsed.options->comm == CommKind::kMpi;
    session->start(by_messages ? WithinNode::kMessages : WithinNode::kSharedMemory);
    rank = session->world().rank();
    ranks = session->world().size();
    return run_ranks(session->world(), parsed, seams);
  } catch (const Ended& ended) {
    return ended.code;
  } catch (...) {
    if (session) session->progress().tick();  // the watchdog knows less
    return end_with_current(rank, ranks);
  }
}

}  // namespace gatefold
