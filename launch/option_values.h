#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// How values of options are read: strictly, and with what the user wrote in every message.
namespace gatefold {

/// Throws Error 64.
[[noreturn]] void refuse_value(const std::string& text);

/// What every message about a value starts with: --tp '4x'
std::string shown_value(std::string_view name, std::string_view value);

struct Limits {
  std::int64_t least = 0;
  std::int64_t most = 0;
};

/// The number that is the whole of `text`. `name` and `value` are what the user wrote. Throws Error
/// 64.
template <typename Number>  // std::int64_t, std::uint64_t or double
Number parse_number(std::string_view name, std::string_view value, std::string_view text,
                    Number least, Number most);

/// The items between commas, none of them empty. Throws Error 64.
std::vector<std::string_view> split_list(std::string_view name, std::string_view value);

/// Throws Error 64 where a number is there twice.
void require_distinct(std::string_view name, std::string_view value,
                      const std::vector<std::int64_t>& numbers);

/// "1,8,64", and in it ranges: "8-4096:x2" is 8, 16, … 4096, and "8-64:+8" is 8, 16, … 64. A range
/// ends at its last value that isn't beyond. Throws Error 64: for no number, one twice, a range
/// that runs backwards or stands still, and for more than 1000 numbers.
std::vector<std::int64_t> parse_numbers(std::string_view name, std::string_view value,
                                        Limits limits);

}  // namespace gatefold
