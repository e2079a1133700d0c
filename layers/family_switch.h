#pragma once

#include <string_view>

namespace gatefold {

/// A yes or no that a family fixes (no key) or leaves to a config field.
struct FamilySwitch {
  std::string_view key = {};
  bool otherwise = false;  // without a key, or where the field is absent
};
inline constexpr FamilySwitch kNever{};
inline constexpr FamilySwitch kAlways{.key = {}, .otherwise = true};

}  // namespace gatefold
