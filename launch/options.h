#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "layers/weights.h"
#include "runtime/dtype.h"

namespace gatefold {

enum class Command { kVerify, kRun, kBench, kInspect, kMakeModel };
enum class DeviceKind { kAuto, kCpu, kCuda };
enum class CommKind { kAuto, kMpi, kNccl };

/// What the command line says, the same options for every command.
struct Options {
  Command command = Command::kVerify;

  // What to compute.
  std::string model;   // directory, or empty
  std::string config;  // config.json alone, or empty
  std::vector<std::pair<std::string, std::string>> set;
  std::vector<std::int64_t> layers;  // empty: all with --model, and for inspect, make-model; else 0
  std::int64_t tokens = 64;
  bool tokens_given = false;
  std::string input;
  std::int64_t sequence_length = 0;       // 0: not given
  std::vector<std::int64_t> token_split;  // empty: even
  std::optional<DType> dtype;             // not given: the model's
  std::vector<std::int64_t> ablate;       // run

  // Where and how.
  std::int64_t tp = 0;  // 0: the largest divisor of the world that the blocks allow
  std::int64_t ep = 1;
  DeviceKind device = DeviceKind::kAuto;
  CommKind comm = CommKind::kAuto;
  Reduce reduce = Reduce::kExact;
  std::int64_t blocks = 8;
  std::int64_t threads = 0;  // per rank; 0: OpenMP's choice
  std::uint64_t seed = 0;
  double timeout = 300;

  // What comes out.
  std::string output;  // safetensors (run), directory (make-model)
  std::string json;
  std::string csv;
  std::int64_t shards = 1;       // make-model
  std::int64_t iterations = 20;  // bench
  std::int64_t warmup = 3;       // bench
  bool hot = false;              // bench: the same weights again and again
  bool check = true;             // bench: verify each point
  bool quiet = false;
  bool verbose = false;
  bool dry_run = false;

  /// Every option as (name, value) text in a fixed order: echoed into --json, and compared between
  /// ranks, which must have been started alike.
  std::vector<std::pair<std::string, std::string>> echo() const;
};

/// What parse_options() decided when there is nothing to run.
struct ParseResult {
  std::optional<Options> options;
  std::string text;   // help, version, or the error in one line, without "gatefold: "
  int exit_code = 0;  // 0 for help and version, 64 for errors
};

/// "verify", "make-model", …
std::string_view name_of(Command command);
/// Layers as --layers takes them: "0-3,7".
std::string layer_text(const std::vector<std::int64_t>& layers);

/// Reads the command line. Strict: every value must be whole and in range, an option counts once
/// (--set may come again), and what a command doesn't use is refused. Never exits, never prints.
ParseResult parse_options(int argc, const char* const* argv);

}  // namespace gatefold
