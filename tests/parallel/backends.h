#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "parallel/communicator.h"

namespace gatefold {

/// What the communicator's suite runs on.
struct Backend {
  const char* name;
  std::function<std::unique_ptr<Communicator>()> make;
  bool split_in_two = false;  // test the halves of what make() gives
  /// Or one on top of it, if this is set.
  std::function<std::unique_ptr<Communicator>(Communicator&)> on_top = {};
};

/// Each program that links the suite says which.
std::vector<Backend> backends();

}  // namespace gatefold
