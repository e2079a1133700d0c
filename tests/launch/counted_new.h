#pragma once

#include <cstdint>

namespace gatefold::testing {

/// How often this process has called operator new. In a program that counted_new.cpp is linked
/// into.
std::int64_t allocations();

}  // namespace gatefold::testing
