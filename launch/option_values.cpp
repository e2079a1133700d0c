#include "launch/option_values.h"

#include <fmt/format.h>

#include <charconv>
#include <set>
#include <type_traits>

#include "runtime/error.h"
#include "runtime/quoted_name.h"

namespace gatefold {
namespace {

constexpr std::size_t kMostNumbers = 1000;

/// How a range goes on from one number to the next.
struct Step {
  bool times = false;
  std::int64_t by = 0;
};

[[noreturn]] void refuse_range(std::string_view name, std::string_view value, std::string_view why,
                               std::string_view range) {
  refuse_value(fmt::format("{}: {} is no range ({}); write such as 8-4096:x2 or 8-64:+8",
                           shown_value(name, value), quoted_name(range), why));
}

Step parse_step(std::string_view name, std::string_view value, std::string_view range,
                Limits limits) {
  const std::size_t colon = range.find(':');
  if (colon == std::string_view::npos) {
    refuse_range(name, value, "how far apart its numbers are is missing", range);
  }
  const std::string_view step = range.substr(colon + 1);
  if (!step.starts_with('x') && !step.starts_with('+')) {
    refuse_range(name, value, "after the colon comes x or +", range);
  }
  const bool times = step.front() == 'x';
  const std::string_view by = step.substr(1);
  if (by == "0" || (times && by == "1")) {
    refuse_range(name, value, fmt::format("a {} of {} never ends", times ? "factor" : "step", by),
                 range);
  }
  return {times, parse_number<std::int64_t>(name, value, by, times ? 2 : 1, limits.most)};
}

void add_range(std::string_view name, std::string_view value, std::string_view range, Limits limits,
               std::vector<std::int64_t>& numbers) {
  const std::string_view ends = range.substr(0, range.find(':'));
  const std::size_t dash = ends.find('-', 1);
  if (dash == std::string_view::npos) {
    refuse_range(name, value, "there is no - between its ends", range);
  }
  if (dash + 1 == ends.size()) refuse_range(name, value, "its end is missing", range);
  const Step step = parse_step(name, value, range, limits);
  const auto number = [&](std::string_view text) {
    return parse_number(name, value, text, limits.least, limits.most);
  };
  const std::int64_t last = number(ends.substr(dash + 1));
  std::int64_t next = number(ends.substr(0, dash));
  if (last < next) refuse_range(name, value, "it runs backwards", range);
  if (step.times && next == 0) refuse_range(name, value, "0 stays 0", range);
  while (next <= last) {
    numbers.push_back(next);
    if (numbers.size() > kMostNumbers) return;
    if (step.times && next > last / step.by) return;  // before the product overflows
    next = step.times ? next * step.by : next + step.by;
  }
}

}  // namespace

void refuse_value(const std::string& text) { throw Error(ExitCode::kUsage, text); }

std::string shown_value(std::string_view name, std::string_view value) {
  return fmt::format("{} {}", name, quoted_name(value));
}

template <typename Number>
Number parse_number(std::string_view name, std::string_view value, std::string_view text,
                    Number least, Number most) {
  const auto refuse = [&](std::string_view problem, const std::string& why) {
    std::string shown = shown_value(name, value);
    if (text != value && !text.empty()) shown += fmt::format(": {}", quoted_name(text));
    refuse_value(
        fmt::format("{} {} ({}); give a number from {} to {}", shown, problem, why, least, most));
  };
  constexpr std::string_view kNoNumber =
      std::is_integral_v<Number> ? "is not a whole number" : "is not a number";
  if (std::is_unsigned_v<Number> && text.starts_with('-')) {
    refuse("is out of range", fmt::format("the least is {}", least));
  }
  Number number{};
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error == std::errc::invalid_argument) {
    refuse(kNoNumber,
           text.empty() ? "a number is missing" : fmt::format("{} isn't one", quoted_name(text)));
  }
  if (rest != end) {
    refuse(kNoNumber, fmt::format("{} is left over",
                                  quoted_name({rest, static_cast<std::size_t>(end - rest)})));
  }
  if (error == std::errc::result_out_of_range) refuse("is out of range", "no such number fits");
  if (number < least) refuse("is out of range", fmt::format("the least is {}", least));
  if (number > most) refuse("is out of range", fmt::format("the most is {}", most));
  if (number != number) refuse(kNoNumber, "it is NaN");
  return number;
}

template std::int64_t parse_number(std::string_view, std::string_view, std::string_view,
                                   std::int64_t, std::int64_t);
template std::uint64_t parse_number(std::string_view, std::string_view, std::string_view,
                                    std::uint64_t, std::uint64_t);
template double parse_number(std::string_view, std::string_view, std::string_view, double, double);

std::vector<std::string_view> split_list(std::string_view name, std::string_view value) {
  std::vector<std::string_view> items;
  std::string_view rest = value;
  for (;;) {
    const std::size_t comma = rest.find(',');
    items.push_back(rest.substr(0, comma));
    if (items.back().empty()) {
      refuse_value(
          fmt::format("{} has an empty entry (entries stand between commas); leave out the comma",
                      shown_value(name, value)));
    }
    if (comma == std::string_view::npos) return items;
    rest.remove_prefix(comma + 1);
  }
}

void require_distinct(std::string_view name, std::string_view value,
                      const std::vector<std::int64_t>& numbers) {
  std::set<std::int64_t> seen;
  for (const std::int64_t number : numbers) {
    if (seen.insert(number).second) continue;
    refuse_value(fmt::format("{} names {} twice (each counts once); leave one out",
                             shown_value(name, value), number));
  }
}

std::vector<std::int64_t> parse_numbers(std::string_view name, std::string_view value,
                                        Limits limits) {
  std::vector<std::int64_t> numbers;
  for (const std::string_view item : split_list(name, value)) {
    const bool range = item.find_first_of(":-", 1) != std::string_view::npos;
    if (range || item.find("..") != std::string_view::npos) {
      add_range(name, value, item, limits, numbers);
    } else {
      numbers.push_back(parse_number(name, value, item, limits.least, limits.most));
    }
    if (numbers.size() > kMostNumbers) {
      refuse_value(fmt::format("{} is more than {} numbers (nobody waits for so many); give fewer",
                               shown_value(name, value), kMostNumbers));
    }
  }
  require_distinct(name, value, numbers);
  return numbers;
}

}  // namespace gatefold
