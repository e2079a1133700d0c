#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace gatefold {

/// The text with a question mark for each control character and each byte that isn't UTF-8: what
/// may be written to a terminal, whatever a path or a tensor's name holds.
std::string printable(std::string_view text);

/// A name from a file, quoted for a message: shortened and printable.
std::string quoted_name(std::string_view name);

/// "1 layer", "2 layers".
std::string counted(std::int64_t count, std::string_view noun);

}  // namespace gatefold
