#pragma once

#include <string>
#include <vector>

#include "launch/options.h"

namespace gatefold::testing {

/// What the program makes of these arguments behind its name.
inline ParseResult parse(const std::vector<std::string>& arguments) {
  std::vector<const char*> argv = {"gatefold"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  return parse_options(static_cast<int>(argv.size()), argv.data());
}

}  // namespace gatefold::testing
