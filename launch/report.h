#pragma once

#include <string>
#include <utility>
#include <vector>

namespace gatefold {

/// One column of a result table.
struct Column {
  std::string name;  // "time"
  std::string unit;  // "us"; may be empty
  std::string json_name;
  bool on_screen = true;  // JSON and CSV have every column
};

/// A cell: its text for the table, and the value for JSON and CSV where that is a number.
struct Cell {
  std::string text;
  bool is_number = false;
  double number = 0;

  static Cell of(std::string text) { return {std::move(text), false, 0}; }
  static Cell of(double number, std::string text) { return {std::move(text), true, number}; }
};

/// A table in nccl-tests' manner: `#` comment lines around aligned columns; the same numbers go to
/// JSON (with every option and version) and CSV.
class Report {
 public:
  /// Facts for the header, shown as "# name  value" and kept in the JSON under "environment". One
  /// of a name that is there takes its place.
  void fact(const std::string& name, const std::string& value);
  /// A fact that only the JSON has.
  void detail(const std::string& name, const std::string& value);
  /// A comment line in words ("# …"), before the rows or, once there is a row, after them.
  void note(const std::string& text);
  void columns(std::vector<Column> columns);
  void row(std::vector<Cell> cells);
  /// Options as echoed into the JSON under "options".
  void options(std::vector<std::pair<std::string, std::string>> echo);

  std::string text() const;
  /// The notes after the rows alone.
  std::string closing_text() const;
  /// {"options", "environment", "rows", "notes"}. NaN and infinity become null.
  std::string json() const;
  /// A header of json_names, then the rows, numbers in full precision.
  std::string csv() const;

 private:
  std::string table() const;

  std::vector<std::pair<std::string, std::string>> facts_;
  std::vector<std::pair<std::string, std::string>> details_;
  std::vector<std::pair<std::string, std::string>> options_;
  std::vector<std::string> notes_before_;
  std::vector<std::string> notes_after_;
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

/// Writes `text` to `path` by a temporary file and a rename. Throws Error 74.
void write_file(const std::string& path, const std::string& text);
/// Throws Error 74 unless a file at `path` can be written (its directory exists and is writable,
/// and the path is no directory or device), so that a long run doesn't end in a lost result.
void require_writable(const std::string& path);

/// The value with a decimal prefix and `digits` significant digits: human(11010048, "", 4) is
/// "11.01 M", human(528482304, "B") "528 MB". Whole numbers below 1000 stay whole.
std::string human(double value, const std::string& unit, int digits = 3);

}  // namespace gatefold
