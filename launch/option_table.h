#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/options.h"

namespace gatefold {

/// One bit per command.
constexpr unsigned bit(Command command) { return 1U << static_cast<unsigned>(command); }
constexpr unsigned kEveryCommand = 0x7f;
/// Those that know layers, whose weights they compute with or make.
constexpr unsigned kOfLayers = kEveryCommand & ~bit(Command::kConvert);
/// bench --machine, which has no model: as if it were a command of its own.
constexpr unsigned kMachine = 0x80;

/// One option: its name, who uses it, how it is read and how it is shown.
struct OptionRow {
  std::string_view name;   // "--tp"
  std::string_view value;  // what stands for the value in the help; empty for a flag
  std::string_view group;
  unsigned commands = kEveryCommand;
  std::string help;
  /// Reads `value`, which came with `name`. Throws Error 64.
  std::function<void(Options&, std::string_view name, std::string_view value)> set = {};
  std::function<std::string(const Options&)> show = {};
  unsigned repeatable = 0;  // the commands that take it several times

  bool is_flag() const { return value.empty(); }
  bool used_by(Command command) const { return (commands & bit(command)) != 0; }
  bool of_machine() const { return (commands & kMachine) != 0; }
};

/// All options. A new one is one more row here, and a field of Options.
const std::vector<OptionRow>& option_table();

}  // namespace gatefold
