#include "runtime/quoted_name.h"

namespace gatefold {
namespace {

struct Character {
  char32_t code = 0;
  std::size_t bytes = 1;
};

/// The UTF-8 character that `text` begins with; code 0 for a byte that begins none.
Character first_character(std::string_view text) {
  const auto byte = [text](std::size_t i) -> char32_t {
    return static_cast<unsigned char>(text[i]);
  };
  const char32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t bytes = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  if (lead < 0xc0 || lead > 0xf7 || text.size() < bytes) return {};
  char32_t code = lead & (0x7fU >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3fU);
  }
  constexpr char32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  return code < kLeast[bytes] ? Character{} : Character{code, bytes};
}

/// C0, DEL and C1: a terminal obeys them.
bool is_control(char32_t code) { return code < 0x20 || (code >= 0x7f && code < 0xa0); }

}  // namespace

std::string printable(std::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const Character next = first_character(text);
    shown += is_control(next.code) ? "?" : text.substr(0, next.bytes);
    text.remove_prefix(next.bytes);
  }
  return shown;
}

std::string quoted_name(std::string_view name) {
  constexpr std::size_t kShown = 160;
  const bool cut = name.size() > kShown;
  if (cut) {
    std::size_t end = kShown;  // not within a UTF-8 character
    while (end > kShown - 4 && (static_cast<unsigned char>(name[end]) & 0xc0U) == 0x80U) --end;
    name = name.substr(0, end);
  }
  std::string text = "'";
  return text.append(printable(name)).append(cut ? "…'" : "'");
}

std::string counted(std::int64_t count, std::string_view noun) {
  std::string text = std::to_string(count);
  text.append(" ").append(noun);
  return count == 1 ? text : text + 's';
}

}  // namespace gatefold
