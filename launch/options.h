#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "launch/routing_pattern.h"
#include "layers/capacity.h"
#include "layers/moe_family.h"
#include "layers/weights.h"
#include "parallel/device_communicator.h"
#include "parallel/token_exchange.h"
#include "runtime/block_format.h"
#include "runtime/dtype.h"

namespace gatefold {

enum class Command { kVerify, kRun, kBench, kInspect, kMakeModel, kBalance, kConvert };
enum class DeviceKind { kAuto, kCpu, kCuda };

/// What a benchmark holds still while ranks are added: all tokens, or those of a rank.
enum class Scaling { kStrong, kWeak };

/// What bench times: each of these with each. Empty: not given.
struct Sweep {
  std::vector<std::string> configs;
  std::vector<std::int64_t> tokens;
  std::vector<DType> dtypes;
  std::vector<std::int64_t> tp;
  std::vector<std::int64_t> ep;
  std::vector<std::int64_t> dp;
  std::vector<Reduce> reduces;
  std::vector<Dispatcher> dispatchers;
};

/// What the command line says, the same options for every command.
struct Options {
  Command command = Command::kVerify;

  // What to compute.
  std::string model;   // directory, or empty
  std::string config;  // config.json alone, or empty
  std::string
      from_dense;  // directory of the dense model that make-model makes experts of, or empty
  std::int64_t experts = 0;  // how many; 0: not given
  bool split = false;        // the neurons of each layer over them
  bool copy = false;         // each layer into each of them
  // make-model; not given: the family's canonical one. convert: as stored.
  std::optional<ExpertLayout> layout;
  std::vector<std::pair<std::string, std::string>> set;
  // Empty: all with --model, and for inspect and make-model; else the first of each kind.
  std::vector<std::int64_t> layers;
  std::int64_t tokens = 64;
  bool tokens_given = false;
  std::string input;
  std::int64_t sequence_length = 0;       // 0: not given
  std::vector<std::int64_t> token_split;  // empty: even
  std::optional<DType> dtype;             // not given: the model's; convert: as stored
  std::optional<BlockFormat> quantised;   // make-model: what --dtype says of its weights
  std::vector<std::int64_t> ablate;       // run

  // How many rows an expert takes; neither: all.
  double capacity_factor = 0;  // 0: not given
  std::int64_t capacity = 0;   // rows; 0: not given, -1: what the config says
  DropBy drop = DropBy::kPosition;
  bool drop_given = false;
  bool per_sequence = false;
  bool pad = false;

  // Where and how.
  std::int64_t tp = 0;  // 0: the largest divisor of the world that the blocks allow
  std::int64_t ep = 0;  // 0: as experts and their blocks allow, see default_ep()
  std::int64_t dp = 0;  // bench; 0: not given
  DeviceKind device = DeviceKind::kAuto;
  CommKind comm = CommKind::kAuto;
  Reduce reduce = Reduce::kExact;
  std::int64_t blocks = 8;
  std::int64_t expert_blocks = 0;  // 0: default_expert_blocks()
  Dispatcher dispatcher = Dispatcher::kAllToAll;
  std::int64_t threads = 0;  // per rank; 0: OpenMP's choice
  std::uint64_t seed = 0;
  bool seed_given = false;
  double timeout = 300;

  RoutingPattern routing;  // bench: where tokens go
  bool machine = false;    // bench: measure the machine, and no layer

  std::int64_t steps = 300;  // balance
  double rate = 1e-3;        // balance: what a step moves each bias by
  double skew = 0.5;         // balance: what tokens have in common
  bool skew_given = false;

  // What comes out.
  std::string output;  // safetensors (run), directory (make-model, convert)
  std::string json;
  std::string csv;
  std::int64_t shards = 1;  // make-model, convert
  bool measure = false;     // convert: beside a plain copy
  Sweep sweep;              // bench
  Scaling scaling = Scaling::kStrong;
  std::int64_t iterations = 20;  // bench
  std::int64_t warmup = 3;       // bench
  bool hot = false;              // bench: the same weights again and again
  bool check = true;             // bench: verify each point
  bool quiet = false;
  bool verbose = false;
  bool dry_run = false;

  std::string revision;  // of the program, for reports; no option

  /// Every option as (name, value) text in a fixed order: echoed into --json, and compared between
  /// ranks, which must have been started alike.
  std::vector<std::pair<std::string, std::string>> echo() const;
};

/// What parse_options() decided when there is nothing to run.
struct ParseResult {
  std::optional<Options> options;
  std::string text;      // help, version, or the error in one line, without "gatefold: "
  int exit_code = 0;     // 0 for help and version, 64 for errors
  bool version = false;  // what is built in, and found by this process, is to follow the text
};

/// "verify", "make-model", …
std::string_view name_of(Command command);
/// "alltoall", "allgather"
std::string_view name_of(Dispatcher dispatcher);
/// Layers as --layers takes them: "0-3,7".
std::string layer_text(const std::vector<std::int64_t>& layers);

/// Reads the command line. Strict: every value must be whole and in range, an option counts once
/// (--set may come again), and what a command doesn't use is refused. Never exits, never prints.
ParseResult parse_options(int argc, const char* const* argv);

}  // namespace gatefold
