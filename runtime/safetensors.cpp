#include "runtime/safetensors.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "runtime/error.h"
#include "runtime/hash.h"

namespace gatefold {
namespace {

constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::uint64_t kLengthBytes = 8;
using LengthField = std::array<std::byte, kLengthBytes>;  // little-endian, as this machine is
constexpr std::uint64_t kMaxOffset = INT64_MAX;
constexpr std::string_view kMetadataKey = "__metadata__";

struct StoredType {
  std::string_view name;
  std::uint64_t bits;
};
constexpr std::array<StoredType, 22> kStoredTypes{{
    {"BOOL", 8}, {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},
    {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8},     {"F8_E4M3FNUZ", 8},
    {"U16", 16}, {"I16", 16},    {"F16", 16},    {"F8_E5M2FNUZ", 8}, {"BF16", 16},
    {"I32", 32}, {"U32", 32},    {"F32", 32},    {"C64", 64},        {"F64", 64},
    {"I64", 64}, {"U64", 64},
}};

[[noreturn]] void fail_data(const std::string& where, const std::string& problem,
                            std::string_view remedy = "download or write the file again") {
  throw Error(ExitCode::kData, fmt::format("{}: {}; {}", where, problem, remedy));
}

/// Bytes of a dense tensor; nothing where the product overflows or ends within a byte.
std::optional<std::uint64_t> bytes_of(const std::vector<std::int64_t>& shape, std::uint64_t bits) {
  std::uint64_t elements = 1;
  bool empty = false;
  for (const std::int64_t dimension : shape) {
    // An empty tensor's other dimensions are checked all the same: someone may multiply them.
    const auto factor = static_cast<std::uint64_t>(std::max<std::int64_t>(dimension, 1));
    if (elements > kMaxOffset / factor) return std::nullopt;
    elements *= factor;
    empty = empty || dimension == 0;
  }
  if (empty) return 0;
  if (elements > kMaxOffset / bits || elements * bits % 8 != 0) return std::nullopt;
  return elements * bits / 8;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t dimension : shape) {
    text += fmt::format("{}{}", text.empty() ? '[' : ',', dimension);
  }
  return text.empty() ? "[]" : text + ']';
}

/// Builds a SafetensorsHeader from parse events. Values are taken only where the format has one,
/// so nesting can't grow: the first bracket in a wrong place ends the parse.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(const std::string& where, SafetensorsHeader& header)
      : where_(where), header_(header) {}

  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool number_integer(std::int64_t value) override {
    unexpected(fmt::format("the negative number {}", value));
  }
  bool number_float(double, const std::string& text) override {
    unexpected(fmt::format("the number {}", quoted_name(text)));
  }
  bool binary(nlohmann::json::binary_t&) override { unexpected("binary data"); }

  bool number_unsigned(std::uint64_t value) override {
    if (state_ != State::kShape && state_ != State::kOffsets) unexpected("a number");
    if (value > kMaxOffset) unexpected(fmt::format("the number {}", value));
    if (state_ == State::kShape) {
      entry_.shape.push_back(static_cast<std::int64_t>(value));
    } else {
      if (++offsets_ > 2) unexpected("a third number");
      (offsets_ == 1 ? entry_.begin : entry_.end) = value;
    }
    return true;
  }

  bool string(std::string& value) override {
    if (state_ == State::kMetadata) {
      header_.metadata[metadata_key_] = std::move(value);
    } else if (state_ == State::kTensor && field_ == Field::kDtype) {
      if (!stored_bits(value)) {
        fail_tensor(fmt::format("has dtype {} (no type of the format)", quoted_name(value)));
      }
      entry_.dtype = std::move(value);
    } else {
      unexpected("a string");
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (state_ == State::kStart) {
      state_ = State::kRoot;
    } else if (state_ == State::kRoot) {
      state_ = key_ == kMetadataKey ? State::kMetadata : State::kTensor;
      entry_ = {};
      seen_.fill(false);
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& name) override {
    if (state_ == State::kRoot) {
      const bool repeated = name == kMetadataKey ? std::exchange(metadata_seen_, true)
                                                 : header_.tensors.contains(name);
      if (repeated) fail(fmt::format("{} is there twice (keys are unique)", quoted_name(name)));
      key_ = std::move(name);
    } else if (state_ == State::kMetadata) {
      if (header_.metadata.contains(name)) {
        fail(fmt::format("__metadata__ has {} twice (keys are unique)", quoted_name(name)));
      }
      metadata_key_ = std::move(name);
    } else {
      set_field(name);
    }
    return true;
  }

  bool end_object() override {
    if (state_ == State::kTensor) add_tensor();
    state_ = state_ == State::kRoot ? State::kEnd : State::kRoot;
    return true;
  }

  bool start_array(std::size_t) override {
    if (state_ != State::kTensor || field_ == Field::kDtype) unexpected("an array");
    state_ = field_ == Field::kShape ? State::kShape : State::kOffsets;
    offsets_ = 0;
    return true;
  }

  bool end_array() override {
    if (state_ == State::kOffsets && offsets_ != 2) {
      fail_tensor(fmt::format("has {} data_offsets (a begin and an end are needed)", offsets_));
    }
    state_ = State::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception& error) override {
    const std::string_view text = error.what();
    const auto colon = text.find("] ");
    fail(fmt::format("header is not JSON (byte {}: {})", position,
                     quoted_name(colon == text.npos ? text : text.substr(colon + 2))));
  }

 private:
  enum class State { kStart, kRoot, kMetadata, kTensor, kShape, kOffsets, kEnd };
  enum class Field { kDtype, kShape, kOffsets };
  static constexpr std::array<std::string_view, 3> kFields{"dtype", "shape", "data_offsets"};

  [[noreturn]] void fail(const std::string& problem) const { fail_data(where_, problem); }
  [[noreturn]] void fail_tensor(const std::string& problem) const {
    fail(fmt::format("tensor {} {}", quoted_name(key_), problem));
  }

  [[noreturn]] void unexpected(const std::string& found) const {
    switch (state_) {
      case State::kMetadata:
        fail(fmt::format("__metadata__ {} is {} (it maps strings to strings)",
                         quoted_name(metadata_key_), found));
      case State::kTensor:
        fail_tensor(fmt::format("has {} as {}", found, kFields[static_cast<std::size_t>(field_)]));
      case State::kShape:
        fail_tensor(fmt::format("has {} in its shape (whole numbers below 2^63)", found));
      case State::kOffsets:
        fail_tensor(fmt::format("has {} in its data_offsets (two whole numbers)", found));
      case State::kRoot:
        fail(fmt::format("{} is {} (each entry is an object)", quoted_name(key_), found));
      default: break;
    }
    fail(fmt::format("header is {} (it is one JSON object)", found));
  }

  void set_field(const std::string& name) {
    const auto* known = std::find(kFields.begin(), kFields.end(), name);
    if (known == kFields.end()) {
      fail_tensor(fmt::format("has the unknown field {}", quoted_name(name)));
    }
    field_ = static_cast<Field>(known - kFields.begin());
    if (std::exchange(seen_[static_cast<std::size_t>(field_)], true)) {
      fail_tensor(fmt::format("has {} twice (keys are unique)", quoted_name(name)));
    }
  }

  void add_tensor() {
    if (std::ranges::count(seen_, true) != std::ssize(seen_)) {
      fail_tensor("lacks a field (dtype, shape and data_offsets are all needed)");
    }
    if (entry_.begin > entry_.end) {
      fail_tensor(fmt::format("ends at {}, before its begin {}", entry_.end, entry_.begin));
    }
    const auto bytes = bytes_of(entry_.shape, *stored_bits(entry_.dtype));
    if (!bytes) {
      fail_tensor(fmt::format("has shape {} of {} (no 64-bit count of whole bytes)",
                              quoted_name(shape_text(entry_.shape)), entry_.dtype));
    }
    const std::uint64_t range = entry_.end - entry_.begin;
    if (*bytes != range) {
      fail_tensor(fmt::format("has shape {} of {} ({} bytes), but data_offsets [{}, {}] ({} bytes)",
                              quoted_name(shape_text(entry_.shape)), entry_.dtype, *bytes,
                              entry_.begin, entry_.end, range));
    }
    // Ranges that take more bytes than lie before the furthest end must overlap: a header full of
    // tensors over the same bytes is refused at its second one, not after all of them.
    ranges_sum_ += range;
    furthest_end_ = std::max(furthest_end_, entry_.end);
    if (ranges_sum_ > furthest_end_) {
      fail_tensor(fmt::format("[{}, {}) overlaps others (ranges of {} bytes within the first {})",
                              entry_.begin, entry_.end, ranges_sum_, furthest_end_));
    }
    header_.tensors.emplace(key_, std::move(entry_));
  }

  const std::string& where_;
  SafetensorsHeader& header_;
  State state_ = State::kStart;
  Field field_ = Field::kDtype;
  std::string key_;
  std::string metadata_key_;
  bool metadata_seen_ = false;
  SafetensorsEntry entry_;
  std::array<bool, 3> seen_{};  // by Field
  int offsets_ = 0;             // numbers read of data_offsets
  std::uint64_t ranges_sum_ = 0;
  std::uint64_t furthest_end_ = 0;
};

/// Throws unless the tensors tile [0, data_bytes) exactly.
void check_tiling(const SafetensorsHeader& header, std::uint64_t data_bytes,
                  const std::string& where) {
  using Named = std::pair<const std::string, SafetensorsEntry>;
  std::vector<const Named*> order;
  for (const Named& tensor : header.tensors) order.push_back(&tensor);
  std::ranges::sort(order, {}, [](const Named* tensor) {
    return std::pair(tensor->second.begin, tensor->second.end);
  });

  std::uint64_t end = 0;
  std::string previous = "none";
  for (const Named* tensor : order) {
    const auto& [name, entry] = *tensor;
    if (entry.begin < end) {
      fail_data(where, fmt::format("tensor {} [{}, {}) overlaps tensor {} (a byte belongs to one)",
                                   quoted_name(name), entry.begin, entry.end, previous));
    }
    if (entry.begin > end) {
      fail_data(where, fmt::format("data bytes [{}, {}) before tensor {} belong to none (a hole)",
                                   end, entry.begin, quoted_name(name)));
    }
    end = entry.end;
    previous = quoted_name(name);
  }
  if (end != data_bytes) {
    fail_data(where,
              fmt::format("expected {} bytes, file has {} (the last tensor is {})",
                          header.data_start + end, header.data_start + data_bytes, previous));
  }
}

FileDescriptor open_for_reading(const std::string& path) {
  OpenedFile file = open_regular_file(path);
  if (!file.problem.empty()) {
    throw Error(ExitCode::kNoInput,
                fmt::format("cannot open {} ({}); give a readable safetensors file",
                            path.empty() ? "''" : path, file.problem));
  }
  return std::move(file.fd);
}

constexpr std::string_view kAnnounce = "announce each tensor once, with its own shape and type";

struct HeaderText {
  std::string json;
  std::uint64_t data_bytes = 0;
};

HeaderText header_text(const std::string& path,
                       const std::vector<SafetensorsWriter::Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  HeaderText text{.json = "{"};
  const auto add = [&](const std::string& entry) {
    if (text.json.size() > 1) text.json += ',';
    text.json += entry;
  };
  if (!metadata.empty()) {
    add(fmt::format("\"{}\":{}", kMetadataKey, nlohmann::json(metadata).dump()));
  }
  std::set<std::string_view> names;
  for (const auto& [name, dtype, shape] : tensors) {
    if (name == kMetadataKey || !names.insert(name).second) {
      fail_output(path, fmt::format("tensor name {} is taken", quoted_name(name)), kAnnounce);
    }
    const bool negative = std::ranges::any_of(shape, [](auto d) { return d < 0; });
    const auto bits = stored_bits(dtype);
    const auto bytes = bits && !negative ? bytes_of(shape, *bits) : std::nullopt;
    if (!bytes || *bytes > kMaxOffset - text.data_bytes) {
      fail_output(path,
                  fmt::format("tensor {}: no size for shape {} of {}", quoted_name(name),
                              shape_text(shape), quoted_name(dtype)),
                  kAnnounce);
    }
    const std::uint64_t begin = std::exchange(text.data_bytes, text.data_bytes + *bytes);
    add(fmt::format(R"({}:{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}})",
                    nlohmann::json(name).dump(), dtype, shape_text(shape), begin, text.data_bytes));
  }
  text.json += '}';
  text.json.resize((text.json.size() + 7) / 8 * 8, ' ');  // the data starts aligned
  if (text.json.size() > kMaxHeaderBytes) {
    fail_output(path,
                fmt::format("a header of {} bytes, at most {} are readable", text.json.size(),
                            kMaxHeaderBytes),
                "spread the tensors over several files");
  }
  return text;
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                           const std::string& where) {
  SafetensorsHeader header;
  header.data_start = kLengthBytes + json.size();
  if (data_bytes > kMaxOffset - header.data_start) {
    fail_data(where, fmt::format("{} bytes of data (more than a file can hold)", data_bytes));
  }
  // Two things that the parser would let pass: a byte order mark, and anything behind a NUL.
  const auto first = json.find_first_not_of(" \t\r\n");
  if (first == json.npos || json[first] != '{') {
    fail_data(where, "header does not begin with '{' (it is one JSON object)");
  }
  if (json.find('\0') != json.npos) fail_data(where, "header holds a NUL byte (it is JSON text)");

  HeaderReader reader(where, header);
  nlohmann::json::sax_parse(json.begin(), json.end(), &reader);
  check_tiling(header, data_bytes, where);
  return header;
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : path_(path), fd_(open_for_reading(path)) {
  read_header();
}

void SafetensorsFile::read_header() {
  file_bytes_ = size_of_file(fd_.get());
  if (file_bytes_ < kLengthBytes) {
    fail_data(path_, fmt::format("expected at least {} bytes, file has {} (no header length)",
                                 kLengthBytes, file_bytes_));
  }
  LengthField field;
  read_at(0, field);
  const auto length = std::bit_cast<std::uint64_t>(field);
  if (length == 0) {
    fail_data(path_, fmt::format("header length 0 (at least 2), file has {} bytes", file_bytes_));
  }
  if (length > kMaxHeaderBytes) {
    fail_data(path_, fmt::format("header length {} (at most {}), file has {} bytes", length,
                                 kMaxHeaderBytes, file_bytes_));
  }
  if (length > file_bytes_ - kLengthBytes) {
    fail_data(path_, fmt::format("expected at least {} bytes, file has {} (header length {})",
                                 kLengthBytes + length, file_bytes_, length));
  }
  std::string json(length, '\0');
  read_at(kLengthBytes, std::as_writable_bytes(std::span(json)));
  header_ = parse_safetensors_header(json, file_bytes_ - kLengthBytes - length, path_);
  header_hash_ = Fnv1a().add(json).add_number(file_bytes_).value();
}

void SafetensorsFile::read(const std::string& name, std::uint64_t offset,
                           std::span<std::byte> out) const {
  const auto found = header_.tensors.find(name);
  if (found == header_.tensors.end()) {
    fail_data(path_, fmt::format("no tensor {}", quoted_name(name)), "check the name");
  }
  const std::uint64_t bytes = found->second.end - found->second.begin;
  if (offset > bytes || out.size() > bytes - offset) {
    fail_data(path_,
              fmt::format("tensor {} has {} bytes ({} at {} are wanted)", quoted_name(name), bytes,
                          out.size(), offset),
              "check its shape");
  }
  read_at(header_.data_start + found->second.begin + offset, out);
}

void SafetensorsFile::read_at(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got = ::pread(fd_.get(), out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw Error(ExitCode::kNoInput,
                  fmt::format("cannot read {} bytes at {} of {} ({}); check the disk", out.size(),
                              offset, path_, errno_text(errno)));
    }
    if (got == 0) {
      fail_data(path_,
                fmt::format("expected {} bytes, file has {} (it shrank after it was opened)",
                            file_bytes_, size_of_file(fd_.get())),
                "leave it alone while it is read");
    }
    out = out.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
}

SafetensorsHead safetensors_head(const std::string& path,
                                 const std::vector<SafetensorsWriter::Tensor>& tensors,
                                 const std::map<std::string, std::string>& metadata) {
  try {
    const HeaderText header = header_text(path, tensors, metadata);
    const auto length = std::bit_cast<std::array<char, kLengthBytes>>(header.json.size());
    return {std::string(length.data(), length.size()) + header.json, header.data_bytes};
  } catch (const nlohmann::json::exception&) {
    fail_output(path, "a name or a metadata value is not UTF-8", "use UTF-8");
  }
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, const std::vector<Tensor>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path) {
  const SafetensorsHead head = safetensors_head(file_.path(), tensors, metadata);
  expected_ = head.data_bytes;
  file_.write(std::as_bytes(std::span(head.text)));
}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::append(std::span<const std::byte> bytes) {
  if (bytes.size() > expected_ - written_) {
    fail_output(
        file_.path(),
        fmt::format("{} bytes of data, {} were announced", written_ + bytes.size(), expected_),
        kAnnounce);
  }
  file_.write(bytes);
  written_ += bytes.size();
}

void SafetensorsWriter::finish() {
  if (written_ != expected_) {
    fail_output(file_.path(),
                fmt::format("{} bytes of data, {} were announced", written_, expected_), kAnnounce);
  }
  file_.keep();
}

std::string_view safetensors_name(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "F32";
    case DType::kBf16: return "BF16";
    case DType::kF16: return "F16";
  }
  return "?";
}

std::optional<std::uint64_t> stored_bits(std::string_view stored_type) {
  const auto* found = std::ranges::find(kStoredTypes, stored_type, &StoredType::name);
  return found == kStoredTypes.end() ? std::nullopt : std::optional(found->bits);
}

std::optional<DType> dtype_from_safetensors(std::string_view name) {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    if (safetensors_name(dtype) == name) return dtype;
  }
  return std::nullopt;
}

}  // namespace gatefold
