#include "runtime/quoted_name.h"

#include <gtest/gtest.h>

namespace gatefold {
namespace {

TEST(QuotedName, NoControlCharacterReachesATerminal) {
  for (char32_t code = 0; code < 0xa0; ++code) {
    const auto byte = static_cast<char>(code);
    const std::string text = code < 0x80 ? std::string(1, byte) : std::string("\xc2") + byte;
    const bool control = code < 0x20 || code >= 0x7f;
    EXPECT_EQ(printable("a" + text + "b"), control ? "a?b" : "a" + text + "b")
        << static_cast<int>(code);
  }
}

TEST(QuotedName, WhatIsNoUtf8IsMaskedByteByByte) {
  EXPECT_EQ(printable("\x9b[2J"), "?[2J");                  // C1 in eight bits
  EXPECT_EQ(printable("\xc1\x9b \xe0\x82\x9b"), "?? ???");  // C1, too long
  EXPECT_EQ(printable("\xf0\x9f\x98"), "???");
  EXPECT_EQ(printable("\xff\xc3"), "??");
}

TEST(QuotedName, OtherTextStaysAsItIs) {
  const std::string text = "Größe ÷ 2 … 模型 \xf0\x9f\x98\x80";
  EXPECT_EQ(printable(text), text);
  EXPECT_EQ(quoted_name(text), "'" + text + "'");
}

TEST(QuotedName, OneThingIsNoPlural) {
  EXPECT_EQ(counted(0, "layer"), "0 layers");
  EXPECT_EQ(counted(1, "layer"), "1 layer");
  EXPECT_EQ(counted(2, "layer"), "2 layers");
}

}  // namespace
}  // namespace gatefold
