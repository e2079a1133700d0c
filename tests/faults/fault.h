#pragma once

#include <string>

namespace gatefold {

/// What GATEFOLD_FAULT=<name>[@<point>][:<rank>] asks for: "shards_swapped", "kill@exchange:2".
struct Fault {
  std::string name;   // empty: none
  std::string point;  // where a mishap happens; empty for faults of arithmetic
  int rank = 1;       // for faults of one rank

  bool is(const std::string& other) const { return name == other; }
};

/// Throws std::invalid_argument for what is not of that form.
Fault parse_fault(const std::string& text);

}  // namespace gatefold
