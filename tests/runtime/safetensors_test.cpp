#include "runtime/safetensors.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <vector>

#include "tests/runtime/file_testing.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using testing::ContainsRegex;
using testing::HasSubstr;

class Safetensors : public testing::Test, protected TestFolder {
 protected:
  Safetensors() : TestFolder("safetensors") {}
};

struct HeaderCase {
  std::string json;
  std::uint64_t data_bytes = 0;
  std::string message;  // part of it
};

/// A header of one tensor `a`.
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return header_json({tensor_entry(dtype, shape, offsets)});
}

void expect_refused(const std::vector<HeaderCase>& cases) {
  for (const auto& [json, data_bytes, message] : cases) {
    SCOPED_TRACE(json.substr(0, 200));
    const std::string text = error_of(ExitCode::kData, [&, n = data_bytes] {
      parse_safetensors_header(json, n, "some.safetensors");
    });
    EXPECT_THAT(text, testing::StartsWith("some.safetensors: "));
    EXPECT_THAT(text, HasSubstr(message));
  }
}

TEST(SafetensorsHeader, WhatIsNotOneJsonObjectIsRefused) {
  using namespace std::string_literals;
  expect_refused({
      {"", 0, "begin with '{'"},
      {"   ", 0, "begin with '{'"},
      {"\xff", 0, "begin with '{'"},
      {"null", 0, "begin with '{'"},
      {"[]", 0, "begin with '{'"},
      {"\xef\xbb\xbf{}", 0, "begin with '{'"},
      {"{", 0, "not JSON"},
      {"{}x", 0, "not JSON"},
      {"{}{}", 0, "not JSON"},
      {"{}\0"s, 0, "NUL"},
      {"{}\0garbage"s, 0, "NUL"},
      {"{\"a\":", 0, "not JSON"},
      {"{'a':1}", 0, "not JSON"},
      {"{/* */}", 0, "not JSON"},
      {"{\"\xff\":{}}", 0, "not JSON"},
      {"{\"a\xc3\x28\":{}}", 0, "not JSON"},
      {R"({"\ud800":{}})", 0, "not JSON"},
      {R"({"a":NaN})", 0, "not JSON"},
      {R"({"a":1e999})", 0, "not JSON"},
      {"{\"" + std::string(1'000'000, 'x'), 0, "not JSON"},
  });
}

TEST(SafetensorsHeader, DeepNestingIsRefusedAtItsFirstLevel) {
  const std::string brackets(100'000, '[');
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += R"({"a":)";
  expect_refused({
      {brackets, 0, "begin with '{'"},
      {R"({"a":)" + brackets, 0, "an array"},
      {R"({"a":{"shape":)" + brackets, 0, "an array in its shape"},
      {R"({"a":{"x":)" + brackets, 0, "unknown field 'x'"},
      {R"({"__metadata__":{"k":)" + brackets, 0, "an array"},
      {objects, 0, "unknown field 'a'"},
      {R"({"__metadata__":)" + objects, 0, "an object"},
  });
}

TEST(SafetensorsHeader, WrongTypesAreRefusedByName) {
  expect_refused({
      {R"({"a":null})", 0, "'a' is null"},
      {R"({"a":true})", 0, "'a' is a boolean"},
      {R"({"a":3})", 0, "'a' is a number"},
      {R"({"a":"F32"})", 0, "'a' is a string"},
      {R"({"a":{}})", 0, "tensor 'a' lacks a field"},
      {R"({"a":{"dtype":"U8","shape":[0]}})", 0, "tensor 'a' lacks a field"},
      {R"({"a":{"dtype":"U8","data_offsets":[0,0]}})", 0, "tensor 'a' lacks a field"},
      {R"({"a":{"shape":[0],"data_offsets":[0,0]}})", 0, "tensor 'a' lacks a field"},
      {R"({"a":{"dtype":3,"shape":[],"data_offsets":[0,1]}})", 1, "a number as dtype"},
      {R"({"a":{"dtype":["U8"],"shape":[],"data_offsets":[0,1]}})", 1, "an array as dtype"},
      {R"({"a":{"dtype":null,"shape":[],"data_offsets":[0,1]}})", 1, "null as dtype"},
      {R"({"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", 1, "a number as shape"},
      {R"({"a":{"dtype":"U8","shape":{},"data_offsets":[0,1]}})", 1, "an object as shape"},
      {R"({"a":{"dtype":"U8","shape":"[]","data_offsets":[0,1]}})", 1, "a string as shape"},
      {R"({"a":{"dtype":"U8","shape":[],"data_offsets":1}})", 1, "a number as data_offsets"},
      {one("U8", "[\"1\"]", "[0,1]"), 1, "a string in its shape"},
      {one("U8", "[null]", "[0,1]"), 1, "null in its shape"},
      {one("U8", "[true]", "[0,1]"), 1, "a boolean in its shape"},
      {one("U8", "[{}]", "[0,1]"), 1, "an object in its shape"},
      {one("U8", "[]", "[\"0\",1]"), 1, "a string in its data_offsets"},
      {one("U8", "[]", "[[0,1]]"), 1, "an array in its data_offsets"},
      {one("U8", "[]", "[]"), 1, "has 0 data_offsets"},
      {one("U8", "[]", "[1]"), 1, "has 1 data_offsets"},
      {one("U8", "[]", "[0,1,1]"), 1, "a third number"},
      {R"({"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"strides":[]}})", 1,
       "unknown field 'strides'"},
      {R"({"__metadata__":null})", 0, "'__metadata__' is null"},
      {R"({"__metadata__":"x"})", 0, "'__metadata__' is a string"},
      {R"({"__metadata__":{"k":1}})", 0, "__metadata__ 'k' is a number"},
      {R"({"__metadata__":{"k":null}})", 0, "__metadata__ 'k' is null"},
      {R"({"__metadata__":{"k":{}}})", 0, "__metadata__ 'k' is an object"},
      {R"({"__metadata__":{"k":["x"]}})", 0, "__metadata__ 'k' is an array"},
      {R"({"__metadata__":{"dtype":"U8","shape":[],"data_offsets":[0,1]}})", 1, "an array"},
  });
}

TEST(SafetensorsHeader, NumbersThatAreNoSizesAreRefused) {
  expect_refused({
      {one("U8", "[-1]", "[0,1]"), 1, "the negative number -1 in its shape"},
      {one("U8", "[-0]", "[0,0]"), 0, "in its shape"},
      {one("U8", "[1.0]", "[0,1]"), 1, "the number '1.0' in its shape"},
      {one("U8", "[1e0]", "[0,1]"), 1, "the number '1e0' in its shape"},
      {one("U8", "[9223372036854775808]", "[0,1]"), 1, "9223372036854775808 in its shape"},
      {one("U8", "[18446744073709551615]", "[0,1]"), 1, "18446744073709551615 in its shape"},
      {one("U8", "[18446744073709551616]", "[0,0]"), 0, "'18446744073709551616' in its shape"},
      {one("U8", "[]", "[-1,0]"), 1, "the negative number -1 in its data_offsets"},
      {one("U8", "[]", "[0,1.0]"), 1, "the number '1.0' in its data_offsets"},
      {one("U8", "[]", "[0,18446744073709551615]"), 1, "18446744073709551615 in its data_offsets"},
      {one("U8", "[]", "[18446744073709551615,0]"), 1, "18446744073709551615 in its data_offsets"},
      {one("U8", "[]", "[0,1e400]"), 1, "not JSON"},
      {"{}", std::uint64_t{0} - 1, "more than a file can hold"},
  });
}

TEST(SafetensorsHeader, AShapeThatDoesNotGiveItsBytesIsRefused) {
  expect_refused({
      {one("F32", "[2,18446744073709551614]", "[0,16]"), 16, "18446744073709551614 in its shape"},
      {one("F32", "[2,9223372036854775807]", "[0,16]"), 16, "no 64-bit count"},
      {one("F32", "[4294967296,4294967296]", "[0,0]"), 0, "no 64-bit count"},
      {one("U8", "[4294967296,2147483648]", "[0,0]"), 0, "no 64-bit count"},
      {one("U64", "[2305843009213693952]", "[0,0]"), 0, "no 64-bit count"},
      {one("U8", "[0,4611686018427387904,4]", "[0,0]"), 0, "no 64-bit count"},
      {one("U8", "[4611686018427387904,4,0]", "[0,0]"), 0, "no 64-bit count"},
      {one("F32", "[2,2]", "[0,4]"), 4, "(16 bytes), but data_offsets [0, 4] (4 bytes)"},
      {one("F32", "[1000,1000]", "[0,4]"), 4, "(4000000 bytes), but"},
      {one("F32", "[]", "[0,0]"), 0, "(4 bytes), but"},
      {one("F32", "[0]", "[0,4]"), 4, "(0 bytes), but"},
      {one("BF16", "[2]", "[0,8]"), 8, "(4 bytes), but"},
      {one("F4", "[3]", "[0,2]"), 2, "no 64-bit count of whole bytes"},
      {one("U8", "[4]", "[4,0]"), 4, "tensor 'a' ends at 0, before its begin 4"},
  });
}

TEST(SafetensorsHeader, UnknownTypesAreRefused) {
  expect_refused({
      {one("F31", "[1]", "[0,4]"), 4, "tensor 'a' has dtype 'F31'"},
      {one("f32", "[1]", "[0,4]"), 4, "dtype 'f32'"},
      {one("float32", "[1]", "[0,4]"), 4, "dtype 'float32'"},
      {one("", "[1]", "[0,4]"), 4, "dtype ''"},
  });
}

TEST(SafetensorsHeader, RepeatedKeysAreRefused) {
  const std::string a = tensor_entry("U8", "[1]", "[0,1]");
  expect_refused({
      {header_json({a, a}), 1, "'a' is there twice"},
      {header_json({a, tensor_entry("U8", "[1]", "[1,2]")}), 2, "'a' is there twice"},
      {header_json({a, tensor_entry("U8", "[1]", "[1,2]", "\\u0061")}), 2, "'a' is there twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "'__metadata__' is there twice"},
      {R"({"__metadata__":{"k":"1","k":"1"}})", 0, "__metadata__ has 'k' twice"},
      {R"({"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}})", 1, "'dtype' twice"},
      {R"({"a":{"dtype":"U8","shape":[],"shape":[],"data_offsets":[0,1]}})", 1, "'shape' twice"},
      {R"({"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"data_offsets":[0,1]}})", 1,
       "'data_offsets' twice"},
  });
}

TEST(SafetensorsHeader, TensorsThatDoNotTileTheDataAreRefused) {
  const auto u8 = [](int begin, int end, const std::string& name) {
    return tensor_entry("U8", fmt::format("[{}]", end - begin), fmt::format("[{},{}]", begin, end),
                        name);
  };
  std::vector<std::string> ten;
  for (int i = 0; i < 10; ++i) ten.push_back(u8(0, 16, fmt::format("t{}", i)));
  expect_refused({
      {header_json(ten), 16, "tensor 't1' [0, 16) overlaps"},
      {header_json(ten), 160, "tensor 't1' [0, 16) overlaps"},
      {header_json({u8(0, 8, "a"), u8(4, 12, "b")}), 12, "tensor 'b' [4, 12) overlaps"},
      // A far third one first, so that the overlap shows only when all are known.
      {header_json({u8(100, 104, "c"), u8(0, 4, "a"), u8(2, 6, "b")}), 104,
       "tensor 'b' [2, 6) overlaps tensor 'a'"},
      {header_json({u8(0, 8, "a"), u8(4, 4, "b")}), 8, "tensor 'b' [4, 4) overlaps tensor 'a'"},
      {header_json({u8(4, 8, "a")}), 8, "data bytes [0, 4) before tensor 'a'"},
      {header_json({u8(0, 4, "a"), u8(5, 8, "b")}), 8, "data bytes [4, 5) before tensor 'b'"},
      {header_json({u8(0, 4, "a"), u8(8, 8, "b")}), 4, "data bytes [4, 8) before tensor 'b'"},
      {header_json({u8(0, 4, "a")}), 5, "the last tensor is 'a'"},
      {header_json({u8(0, 4, "a")}), 2, "the last tensor is 'a'"},
      {header_json({u8(0, 4, "a")}), 0, "the last tensor is 'a'"},
      {"{}", 1, "expected 10 bytes, file has 11"},
  });
  const std::string json = header_json({u8(0, 4, "a")});
  const std::size_t start = 8 + json.size();
  expect_refused({{json, 3, fmt::format("expected {} bytes, file has {}", start + 4, start + 3)},
                  {json, 5, fmt::format("expected {} bytes, file has {}", start + 4, start + 5)}});
}

TEST(SafetensorsHeader, ManyTensorsOverTheSameBytesAreRefusedAtTheSecond) {
  std::vector<std::string> entries;
  for (int i = 0; i < 300'000; ++i) {
    entries.push_back(tensor_entry("U8", "[4]", "[0,4]", std::to_string(i)));
  }
  const std::string json = header_json(entries);
  const auto start = std::chrono::steady_clock::now();
  expect_refused({{json, 4, "tensor '1' [0, 4) overlaps"}});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(SafetensorsHeader, NamesInMessagesAreShortAndHarmless) {
  const std::string bell = header_json({tensor_entry("F31", "[]", "[0,1]", "\\u0007\\u001b[2J")});
  expect_refused({{bell, 1, "tensor '??[2J'"}});
  EXPECT_LT(quoted_name(std::string(100'000, 'x')).size(), 170U);
  for (std::size_t cut = 150; cut < 170; ++cut) {
    const std::string name = std::string(cut, 'x') + "\xf0\x9f\x98\x80" + std::string(50, 'x');
    const std::string text = quoted_name(name);
    const bool whole = text.find("\xf0\x9f\x98\x80") != text.npos;
    EXPECT_EQ(whole, text.find('\xf0') != text.npos) << "a character was cut in two: " << text;
  }
}

TEST(SafetensorsHeader, UnusualButValidHeadersLoad) {
  const std::vector<HeaderCase> cases = {
      {"{}", 0, ""},
      {R"({"__metadata__":{}})", 0, ""},
      {R"({"__metadata__":{"format":"pt","":""}})", 0, ""},
      {one("F32", "[1]", "[0,4]") + "      ", 4, "a"},
      {one("F32", "[1]", "[0,4]") + "\n\t \r", 4, "a"},
      {fmt::format("  \n\t{}", one("F32", "[1]", "[0,4]")), 4, "a"},
      {one("F32", "[]", "[0,4]"), 4, "a"},
      {one("F32", "[2,0]", "[0,0]"), 0, "a"},
      {one("F32", "[0,16]", "[0,0]"), 0, "a"},
      {one("F32", "[0,9223372036854775807]", "[0,0]"), 0, "a"},
      {one("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "a"},
      {one("F4", "[2,3]", "[0,3]"), 3, "a"},
      {one("F6_E2M3", "[4]", "[0,3]"), 3, "a"},
      {R"({ "a" : { "shape" : [ 1 ] , "data_offsets" : [ 0 , 1 ] , "dtype" : "U8" } })", 1, "a"},
      {header_json({tensor_entry("U8", "[1]", "[0,1]", "")}), 1, ""},
      {header_json({tensor_entry("U8", "[1]", "[0,1]", "\xe2\x82\xac")}), 1, "\xe2\x82\xac"},
      {header_json({tensor_entry("U8", "[1]", "[0,1]", "\\u20ac")}), 1, "\xe2\x82\xac"},
      {header_json({tensor_entry("U8", "[1]", "[0,1]", "a\\u0000b")}), 1, std::string("a\0b", 3)},
      {header_json({tensor_entry("U8", "[3]", "[5,8]", "a"),
                    tensor_entry("U8", "[0]", "[5,5]", "e"),
                    tensor_entry("U8", "[5]", "[0,5]", "b"), R"("__metadata__":{"k":"v"})"}),
       8, "e"},
  };
  for (const auto& [json, data_bytes, name] : cases) {
    SCOPED_TRACE(json);
    const auto header = parse_safetensors_header(json, data_bytes, "x");
    EXPECT_EQ(header.data_start, 8 + json.size());
    if (json.find("dtype") != json.npos) {
      EXPECT_TRUE(header.tensors.contains(name));
    }
  }
}

TEST(SafetensorsHeader, EveryTypeOfTheFormatLoadsWithItsSize) {
  const std::vector<std::pair<std::string, int>> bits = {
      {"BOOL", 8},        {"F4", 4},         {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
      {"I8", 8},          {"F8_E5M2", 8},    {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"I16", 16},
      {"U16", 16},        {"F16", 16},       {"BF16", 16},   {"I32", 32},    {"U32", 32},
      {"F32", 32},        {"C64", 64},       {"F64", 64},    {"I64", 64},    {"U64", 64},
      {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}};
  for (const auto& [dtype, width] : bits) {
    SCOPED_TRACE(dtype);
    const auto bytes = static_cast<std::uint64_t>(width);  // 8 elements
    const std::string json = one(dtype, "[2,4]", fmt::format("[0,{}]", bytes));
    const auto header = parse_safetensors_header(json, bytes, "x");
    EXPECT_EQ(header.tensors.at("a").dtype, dtype);
    EXPECT_EQ(header.tensors.at("a").shape, (std::vector<std::int64_t>{2, 4}));
    const std::string wrong = one(dtype, "[2,4]", fmt::format("[0,{}]", bytes + 1));
    error_of(ExitCode::kData, [&] { parse_safetensors_header(wrong, bytes + 1, "x"); });
  }
}

TEST(SafetensorsHeader, OnlyThreeTypesHaveACounterpart) {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    EXPECT_EQ(dtype_from_safetensors(safetensors_name(dtype)), dtype);
  }
  EXPECT_EQ(safetensors_name(DType::kBf16), "BF16");
  for (const char* other : {"I64", "F8_E4M3", "BOOL", "F64", "bf16", ""}) {
    EXPECT_EQ(dtype_from_safetensors(other), std::nullopt) << other;
  }
}

// Two tensors and some metadata; what truncations are made of.
constexpr std::string_view kJson =
    R"({"__metadata__":{"k":"v"},"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
    R"("b":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}  )";
constexpr std::string_view kData = "0123456789abcdef";

std::string read_tensor(const SafetensorsFile& file, const std::string& name, std::uint64_t offset,
                        std::size_t bytes) {
  std::string out(bytes, '?');
  file.read(name, offset, std::as_writable_bytes(std::span(out)));
  return out;
}

TEST_F(Safetensors, AFileGivesBackWhatItHolds) {
  const SafetensorsFile file(put(safetensors_text(kJson, kData)));
  EXPECT_EQ(file.path(), path());
  EXPECT_EQ(file.header().metadata.at("k"), "v");
  EXPECT_EQ(file.header().tensors.size(), 2U);
  EXPECT_EQ(read_tensor(file, "b", 0, 4), "0123");
  EXPECT_EQ(read_tensor(file, "w", 0, 12), "456789abcdef");
  EXPECT_EQ(read_tensor(file, "w", 10, 2), "ef");
  EXPECT_EQ(read_tensor(file, "w", 12, 0), "");
}

TEST_F(Safetensors, OneReadAsksForJustItsBytes) {
  const SafetensorsFile file(put(safetensors_text(kJson, kData)));
  io_faults().reads.clear();
  read_tensor(file, "w", 3, 5);
  const auto start = static_cast<off_t>(file.header().data_start);
  EXPECT_THAT(io_faults().reads, testing::ElementsAre(std::pair(start + 4 + 3, std::size_t{5})));
}

TEST_F(Safetensors, ReadingOutsideATensorIsRefused) {
  const SafetensorsFile file(put(safetensors_text(kJson, kData)));
  const auto refused = [&](const std::string& name, std::uint64_t offset, std::size_t bytes) {
    return error_of(ExitCode::kData, [&] { read_tensor(file, name, offset, bytes); });
  };
  EXPECT_THAT(refused("nope", 0, 1), HasSubstr("no tensor 'nope'"));
  EXPECT_THAT(refused("b", 0, 5), HasSubstr("tensor 'b' has 4 bytes (5 at 0"));
  EXPECT_THAT(refused("b", 5, 0), HasSubstr("tensor 'b' has 4 bytes"));
  EXPECT_THAT(refused("b", std::uint64_t{0} - 1, 2), HasSubstr("tensor 'b' has 4 bytes"));
}

TEST_F(Safetensors, AFileCutAtAnyByteIsRefusedWithBothSizes) {
  const std::string whole = safetensors_text(kJson, kData);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    SCOPED_TRACE(size);
    const std::string file = put(whole.substr(0, size));
    const std::string text = error_of(ExitCode::kData, [&] { SafetensorsFile{file}; });
    EXPECT_THAT(text, ContainsRegex("expected (at least )?[0-9]+ bytes"));
    EXPECT_THAT(text, HasSubstr(fmt::format("file has {} ", size)));
    EXPECT_THAT(text, HasSubstr(file));
  }
  error_of(ExitCode::kData, [&] { SafetensorsFile{put(whole + "x")}; });
  SafetensorsFile{put(whole)};
}

TEST_F(Safetensors, AFileCutAfterOpeningIsRefusedAtEveryByte) {
  const std::string whole = safetensors_text(kJson, kData);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    SCOPED_TRACE(size);
    const SafetensorsFile file(put(whole));
    fs::resize_file(path(), size);
    const std::string text = error_of(ExitCode::kData, [&] { read_tensor(file, "w", 0, 12); });
    EXPECT_THAT(text,
                HasSubstr(fmt::format("expected {} bytes, file has {} ", whole.size(), size)));
    if (size >= file.header().data_start + 4) {
      EXPECT_EQ(read_tensor(file, "b", 0, 4), "0123");
    }
  }
}

TEST_F(Safetensors, ImpossibleHeaderLengthsAreRefused) {
  struct Case {
    std::uint64_t length;
    std::string message;
  };
  const std::vector<Case> cases = {
      {0, "header length 0"},
      {3, "expected at least 11 bytes, file has 10"},
      {100'000'000, "expected at least 100000008 bytes, file has 10"},
      {100'000'001, "header length 100000001 (at most 100000000), file has 10 bytes"},
      {0xffffff000000003cU, "header length 18446742974197923900 (at most 100000000)"},
      {std::uint64_t{1} << 63, "header length 9223372036854775808"},
      {std::uint64_t{0} - 8, "header length 18446744073709551608"},
      {std::uint64_t{0} - 1, "header length 18446744073709551615"},
  };
  for (const auto& [length, message] : cases) {
    const std::string file = put(little_endian(length) + "{}");
    EXPECT_THAT(error_of(ExitCode::kData, [&] { SafetensorsFile{file}; }), HasSubstr(message));
  }
  const std::string large = put(little_endian(100'000'001));
  fs::resize_file(large, 300'000'000);  // sparse: the length would fit
  EXPECT_THAT(error_of(ExitCode::kData, [&] { SafetensorsFile{large}; }),
              HasSubstr("header length 100000001 (at most 100000000)"));
}

TEST_F(Safetensors, APaddedHeaderOfAlmostAHundredThousandBytesLoads) {
  std::string json = R"({"__metadata__":{"pad":")" + std::string(99'000, 'x') + "\"}," +
                     tensor_entry("U8", "[1]", "[0,1]") + "}";
  json.resize(99'996, ' ');
  const SafetensorsFile file(put(safetensors_text(json, "z")));
  EXPECT_EQ(read_tensor(file, "a", 0, 1), "z");
}

TEST_F(Safetensors, AMalformedFileNamesPathAndTensor) {
  const std::string file = put(safetensors_text(one("F32", "[1000,1000]", "[0,4]"), "0123"));
  const std::string text = error_of(ExitCode::kData, [&] { SafetensorsFile{file}; });
  EXPECT_THAT(text, HasSubstr(file));
  EXPECT_THAT(text, HasSubstr("tensor 'a'"));
}

TEST_F(Safetensors, PathsThatAreNoReadableFilesAreNoInput) {
  fs::create_directory(path("directory"));
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  fs::create_symlink(path("nowhere"), path("dangling"));
  for (const std::string& name :
       {path("missing"), path("directory"), path("fifo"), path("dangling"), path("directory/x"),
        std::string(), std::string("/dev/null"), std::string("/dev/full")}) {
    SCOPED_TRACE(name);
    EXPECT_THAT(error_of(ExitCode::kNoInput, [&] { SafetensorsFile{name}; }),
                HasSubstr(fmt::format("cannot open {}", name.empty() ? "''" : name)));
  }
}

TEST_F(Safetensors, AFileWithoutReadPermissionIsNoInput) {
  const std::string file = put(safetensors_text(kJson, kData));
  fs::permissions(file, fs::perms::none);
  const bool root = ::geteuid() == 0;
  if (root) {
    ASSERT_EQ(::seteuid(65534), 0);
  }
  const std::string text = error_of(ExitCode::kNoInput, [&] { SafetensorsFile{file}; });
  if (root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  EXPECT_THAT(text, HasSubstr("Permission denied"));
}

TEST_F(Safetensors, InterruptedAndShortReadsAreCarriedOn) {
  const std::string file = put(safetensors_text(kJson, kData));
  io_faults().at_most = 1;
  io_faults().interruptions = 3;
  const SafetensorsFile opened(file);
  io_faults().interruptions = 2;
  EXPECT_EQ(read_tensor(opened, "w", 0, 12), "456789abcdef");
}

TEST_F(Safetensors, AnErrorOfTheDiskIsNoInputWithItsText) {
  const std::string file = put(safetensors_text(kJson, kData));
  const SafetensorsFile opened(file);
  io_faults().read_error = EIO;
  EXPECT_THAT(error_of(ExitCode::kNoInput, [&] { read_tensor(opened, "w", 0, 12); }),
              HasSubstr("Input/output error"));
  EXPECT_THAT(error_of(ExitCode::kNoInput, [&] { SafetensorsFile{file}; }), HasSubstr(file));
}

TEST_F(Safetensors, TheHashTellsHeadersAndSizesApart) {
  const std::string json = one("U8", "[4]", "[0,4]");
  const std::string other = one("I8", "[4]", "[0,4]");
  const auto hash = [&](const std::string& text) {
    return SafetensorsFile(put(text)).header_hash();
  };
  EXPECT_EQ(hash(safetensors_text(json, "0123")), hash(safetensors_text(json, "4567")));
  EXPECT_NE(hash(safetensors_text(json, "0123")), hash(safetensors_text(other, "0123")));
  EXPECT_NE(hash(safetensors_text(json, "0123")), hash(safetensors_text(json + " ", "0123")));
}

TEST_F(Safetensors, FilesCanBeMoved) {
  std::vector<SafetensorsFile> files;
  files.emplace_back(put(safetensors_text(kJson, kData)));
  files.emplace_back(put(safetensors_text("{}", ""), "y.safetensors"));
  EXPECT_EQ(read_tensor(files[0], "b", 0, 4), "0123");
}

}  // namespace
}  // namespace gatefold
