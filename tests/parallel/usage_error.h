#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "runtime/error.h"

namespace gatefold::testing {

/// The text of the usage error that `call` must throw.
inline std::string usage_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

}  // namespace gatefold::testing
