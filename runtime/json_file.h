#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace gatefold {

/// What a JSON file may hold at most, and how messages speak of it.
struct JsonRules {
  std::uint64_t max_bytes = 0;
  int max_depth = 0;        // objects and arrays within each other
  std::string_view kind;    // "an index"
  std::string_view remedy;  // for text that is no good: "download or write the index again"
};

/// Checks what a plain parse would pass over or choke on: the text is one JSON value in UTF-8
/// without byte order mark or NUL, keys are unique within their object, and nothing is nested
/// deeper than the rules allow. What passes can be parsed without an exception.
/// Throws Error 65 that begins with `where`.
void check_json_text(std::string_view text, const std::string& where, const JsonRules& rules);

/// The checked text of a regular file. Throws Error 66 where the path is none (a directory, device
/// or pipe) or can't be read, 65 where the text is too large or fails check_json_text().
std::string read_json_text(const std::string& path, const JsonRules& rules);

}  // namespace gatefold
