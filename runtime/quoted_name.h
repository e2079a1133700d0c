#pragma once

#include <string>
#include <string_view>

namespace gatefold {

/// A name from a file, quoted for a message: shortened, control characters masked.
std::string quoted_name(std::string_view name);

}  // namespace gatefold
