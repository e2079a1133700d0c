#pragma once

#include <string>

namespace gatefold {

/// One line each: what is built in, in which version, and what GPUs this process finds, or why
/// none.
std::string parts_text();

}  // namespace gatefold
