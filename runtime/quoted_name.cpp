#include "runtime/quoted_name.h"

namespace gatefold {

std::string quoted_name(std::string_view name) {
  constexpr std::size_t kShown = 160;
  const bool cut = name.size() > kShown;
  if (cut) {
    std::size_t end = kShown;  // not within a UTF-8 character
    while (end > kShown - 4 && (static_cast<unsigned char>(name[end]) & 0xc0U) == 0x80U) --end;
    name = name.substr(0, end);
  }
  std::string text = "'";
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    text += byte < 0x20 || byte == 0x7f ? '?' : c;
  }
  return text + (cut ? "…'" : "'");
}

}  // namespace gatefold
