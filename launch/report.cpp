#include "launch/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>

#include "runtime/output_file.h"
#include "runtime/quoted_name.h"

namespace gatefold {
namespace {

using Json = nlohmann::ordered_json;

/// Characters, not bytes: an ellipsis or a multiplication sign must not shift a column.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0U) != 0x80U; }));
}

std::string right_aligned(const std::string& text, std::size_t width) {
  const std::size_t used = width_of(text);
  return std::string(width > used ? width - used : 0, ' ') + text;
}

bool is_whole(double number) { return std::trunc(number) == number && std::abs(number) < 0x1p53; }

/// NaN and infinity, which are no JSON numbers, become null when they are written.
Json json_value(const Cell& cell) {
  if (!cell.is_number) return cell.text;
  if (is_whole(cell.number)) return static_cast<std::int64_t>(cell.number);
  return cell.number;
}

/// An option's text: a number or a truth value as such.
Json json_option(const std::string& text) {
  const Json value = Json::parse(text, nullptr, false);
  return value.is_number() || value.is_boolean() ? value : Json(text);
}

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted.append(c == '"' ? 2 : 1, c);
  return quoted + '"';
}

std::string csv_value(const Cell& cell) {
  if (!cell.is_number) return csv_field(cell.text);
  if (is_whole(cell.number)) return fmt::format("{}", static_cast<std::int64_t>(cell.number));
  return fmt::format("{}", cell.number);
}

std::string comment(const std::string& text) {
  return text.empty() ? "#\n" : "# " + printable(text) + '\n';
}

}  // namespace

namespace {

using Pairs = std::vector<std::pair<std::string, std::string>>;

void put(Pairs& pairs, const std::string& name, const std::string& value) {
  const auto known = std::ranges::find(pairs, name, &Pairs::value_type::first);
  if (known != pairs.end()) {
    known->second = value;
  } else {
    pairs.emplace_back(name, value);
  }
}

}  // namespace

void Report::fact(const std::string& name, const std::string& value) { put(facts_, name, value); }

void Report::detail(const std::string& name, const std::string& value) {
  put(details_, name, value);
}

void Report::note(const std::string& text) {
  (rows_.empty() ? notes_before_ : notes_after_).push_back(text);
}

void Report::columns(std::vector<Column> columns) { columns_ = std::move(columns); }

void Report::row(std::vector<Cell> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

void Report::options(std::vector<std::pair<std::string, std::string>> echo) {
  options_ = std::move(echo);
}

std::string Report::text() const {
  std::string text;
  std::size_t name_width = 0;
  for (const auto& [name, value] : facts_) name_width = std::max(name_width, width_of(name));
  for (const auto& [name, value] : facts_) {
    text += comment(
        fmt::format("{}{}  {}", name, std::string(name_width - width_of(name), ' '), value));
  }
  for (const std::string& note : notes_before_) text += comment(note);
  if (!columns_.empty()) text += table();
  return text + closing_text();
}

std::string Report::table() const {
  std::vector<std::size_t> widths;
  bool units = false;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    std::size_t width = std::max(width_of(columns_[c].name), width_of(columns_[c].unit));
    for (const auto& row : rows_) width = std::max(width, width_of(row[c].text));
    widths.push_back(width);
    units = units || (columns_[c].on_screen && !columns_[c].unit.empty());
  }
  const auto line = [&](char first, const auto& cell) {
    std::string text(1, first);
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      if (!columns_[c].on_screen) continue;
      text += (text.size() == 1 ? " " : "  ") + right_aligned(printable(cell(c)), widths[c]);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text + '\n';
  };
  std::string text = comment("") + line('#', [&](std::size_t c) { return columns_[c].name; });
  if (units) text += line('#', [&](std::size_t c) { return columns_[c].unit; });
  for (const auto& row : rows_) text += line(' ', [&](std::size_t c) { return row[c].text; });
  return text;
}

std::string Report::closing_text() const {
  std::string text;
  for (const std::string& note : notes_after_) text += comment(note);
  return text;
}

std::string Report::json() const {
  Json root;
  root["options"] = Json::object();
  for (const auto& [name, value] : options_) root["options"][name] = json_option(value);
  root["environment"] = Json::object();
  for (const auto* pairs : {&facts_, &details_}) {
    for (const auto& [name, value] : *pairs) root["environment"][name] = value;
  }
  root["rows"] = Json::array();
  for (const auto& row : rows_) {
    Json object = Json::object();
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      object[columns_[c].json_name] = json_value(row[c]);
    }
    root["rows"].push_back(std::move(object));
  }
  root["notes"] = Json::array();
  for (const auto* notes : {&notes_before_, &notes_after_}) {
    for (const std::string& note : *notes) root["notes"].push_back(note);
  }
  // Paths may hold any bytes; JSON is UTF-8.
  return root.dump(2, ' ', false, Json::error_handler_t::replace) + '\n';
}

std::string Report::csv() const {
  std::string text;
  const auto add_line = [&](const auto& field) {
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      if (c > 0) text += ',';
      text += field(c);
    }
    text += '\n';
  };
  add_line([this](std::size_t c) { return csv_field(columns_[c].json_name); });
  for (const auto& row : rows_) add_line([&](std::size_t c) { return csv_value(row[c]); });
  return text;
}

void write_file(const std::string& path, const std::string& text) {
  OutputFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.keep();
}

void require_writable(const std::string& path) { const OutputFile probe(path); }

std::string human(double value, const std::string& unit, int digits) {
  static constexpr std::string_view kPrefixes[] = {"", "k", "M", "G", "T", "P", "E"};
  const auto joined = [&unit](std::string number, std::string_view prefix) {
    const std::string tail = std::string(prefix) + unit;
    return tail.empty() ? number : number + ' ' + tail;
  };
  if (!std::isfinite(value)) return joined(fmt::format("{}", value), "");
  if (is_whole(value) && std::abs(value) < 1000) return joined(fmt::format("{:.0f}", value), "");

  // Rounded first: 999999 with three digits is 1.00 M.
  const std::string rounded = fmt::format("{:.{}e}", value, digits - 1);
  const int exponent = std::stoi(rounded.substr(rounded.find('e') + 1));
  const int prefix = std::clamp(exponent / 3, 0, static_cast<int>(std::size(kPrefixes)) - 1);
  const int decimals = std::max(0, digits - 1 - (exponent - 3 * prefix));
  return joined(fmt::format("{:.{}f}", value / std::pow(1000.0, prefix), decimals),
                kPrefixes[static_cast<std::size_t>(prefix)]);
}

}  // namespace gatefold
