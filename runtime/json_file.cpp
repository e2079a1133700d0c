#include "runtime/json_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "runtime/error.h"
#include "runtime/file_descriptor.h"
#include "runtime/quoted_name.h"

namespace gatefold {
namespace {

using Json = nlohmann::json;

/// Looks at the text's structure, keeps nothing of it but the keys of the objects around.
class Inspector final : public nlohmann::json_sax<Json> {
 public:
  Inspector(const std::string& where, const JsonRules& rules) : where_(where), rules_(rules) {}

  [[noreturn]] void fail(const std::string& problem) const {
    throw Error(ExitCode::kData, fmt::format("{}: {}; {}", where_, problem, rules_.remedy));
  }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return enter(); }
  bool end_object() override { return leave(); }
  bool start_array(std::size_t) override { return enter(); }
  bool end_array() override { return leave(); }
  bool key(string_t& name) override {
    if (!keys_.back().insert(name).second) {
      fail(fmt::format("{} is there twice (keys are unique)", quoted_name(name)));
    }
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const Json::exception& error) override {
    const std::string_view reason = error.what();
    const auto tag_end = reason.find("] ");  // the JSON library's own tag
    fail(fmt::format("not JSON ({})",
                     quoted_name(tag_end == reason.npos ? reason : reason.substr(tag_end + 2))));
  }

 private:
  bool enter() {
    keys_.emplace_back();
    if (keys_.size() > static_cast<std::size_t>(rules_.max_depth)) {
      fail(fmt::format("nested deeper than {} levels (no {} is)", rules_.max_depth,
                       rules_.kind.substr(rules_.kind.find(' ') + 1)));
    }
    return true;
  }
  bool leave() {
    keys_.pop_back();
    return true;
  }

  const std::string& where_;
  const JsonRules& rules_;
  std::vector<std::set<std::string>> keys_;  // one set per level; an array's stays empty
};

/// Up to `most` bytes and one more, which says that there are too many.
std::string read_up_to(const std::string& path, int fd, std::uint64_t most,
                       const JsonRules& rules) {
  // Files of /proc say 0, and some of them are read in one piece or not at all.
  std::string text(std::min(most, std::max<std::uint64_t>(size_of_file(fd), 4095)) + 1, '\0');
  std::size_t used = 0;
  for (;;) {
    const ssize_t got = ::read(fd, text.data() + used, text.size() - used);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw Error(ExitCode::kNoInput, fmt::format("{}: can't be read ({}); give {}", path,
                                                  errno_text(errno), rules.kind));
    }
    used += static_cast<std::size_t>(got);
    if (got == 0 || used > most) break;
    if (used == text.size()) text.resize(std::min<std::size_t>(2 * used, most + 1));
  }
  text.resize(used);
  return text;
}

}  // namespace

void check_json_text(std::string_view text, const std::string& where, const JsonRules& rules) {
  Inspector inspector(where, rules);
  if (text.starts_with("\xef\xbb\xbf")) {
    inspector.fail("begins with a byte order mark (it is JSON text)");
  }
  if (text.find('\0') != text.npos) inspector.fail("holds a NUL byte (it is JSON text)");
  Json::sax_parse(text.begin(), text.end(), &inspector);
}

std::string read_json_text(const std::string& path, const JsonRules& rules) {
  const OpenedFile file = open_regular_file(path);
  if (!file.problem.empty()) {
    throw Error(ExitCode::kNoInput,
                fmt::format("{}: can't be opened ({}); give {}", path.empty() ? "''" : path,
                            file.problem, rules.kind));
  }
  const auto refuse_size = [&] {
    throw Error(ExitCode::kData,
                fmt::format("{}: larger than {} bytes ({} has at most {}); check the path", path,
                            rules.max_bytes, rules.kind, rules.max_bytes));
  };
  if (size_of_file(file.fd.get()) > rules.max_bytes) refuse_size();
  std::string text = read_up_to(path, file.fd.get(), rules.max_bytes, rules);
  if (text.size() > rules.max_bytes) refuse_size();
  check_json_text(text, path, rules);
  return text;
}

}  // namespace gatefold
