#include "launch/option_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <set>

#include "runtime/error.h"
#include "runtime/safetensors.h"

namespace gatefold {
namespace {

constexpr unsigned kWithTokens = kEveryCommand & ~bit(Command::kMakeModel);
// bench times both ways to reduce.
constexpr unsigned kReduces = kWithTokens & ~bit(Command::kBench);

// Bounds that nobody reaches, so that no product of two sizes overflows.
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 31;
constexpr std::int64_t kMaxRanks = std::int64_t{1} << 20;
constexpr std::int64_t kMaxBlocks = std::int64_t{1} << 16;
constexpr std::int64_t kMaxLayer = 99999;
constexpr std::int64_t kMaxCount = 1000000;
constexpr double kMaxSeconds = 1e7;

[[noreturn]] void fail(const std::string& text) { throw Error(ExitCode::kUsage, text); }

// What every message about a value starts with: --tp '4x'
std::string shown(std::string_view name, std::string_view value) {
  return fmt::format("{} {}", name, quoted_name(value));
}

struct Limits {
  std::int64_t least = 0;
  std::int64_t most = 0;
};

/// The number that is the whole of `text`. `name` and `value` are what the user wrote.
template <typename Number>
Number parse_number(std::string_view name, std::string_view value, std::string_view text,
                    Number least, Number most) {
  const auto refuse = [&](std::string_view problem, const std::string& why) {
    fail(fmt::format("{} {} ({}); give a number from {} to {}", shown(name, value), problem, why,
                     least, most));
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

std::vector<std::string_view> split_list(std::string_view name, std::string_view value) {
  std::vector<std::string_view> items;
  std::string_view rest = value;
  for (;;) {
    const std::size_t comma = rest.find(',');
    items.push_back(rest.substr(0, comma));
    if (items.back().empty()) {
      fail(fmt::format("{} has an empty entry (numbers stand between commas); leave out the comma",
                       shown(name, value)));
    }
    if (comma == std::string_view::npos) return items;
    rest.remove_prefix(comma + 1);
  }
}

void add_once(std::string_view name, std::string_view value, std::int64_t number,
              std::set<std::int64_t>& seen, std::vector<std::int64_t>& list) {
  if (!seen.insert(number).second) {
    fail(fmt::format("{} names {} twice (each counts once); leave one out", shown(name, value),
                     number));
  }
  list.push_back(number);
}

/// "0-3,7"
std::vector<std::int64_t> parse_layers(std::string_view name, std::string_view value) {
  std::vector<std::int64_t> layers;
  std::set<std::int64_t> seen;
  for (const std::string_view item : split_list(name, value)) {
    const std::size_t dash = item.find('-', 1);
    const auto number = [&](std::string_view text) {
      return parse_number<std::int64_t>(name, value, text, 0, kMaxLayer);
    };
    const std::int64_t first = number(item.substr(0, dash));
    const std::int64_t last =
        dash == std::string_view::npos ? first : number(item.substr(dash + 1));
    if (last < first) {
      fail(fmt::format("{} runs backwards ({} comes after {}); write {}-{}", shown(name, value),
                       first, last, last, first));
    }
    for (std::int64_t layer = first; layer <= last; ++layer) {
      add_once(name, value, layer, seen, layers);
    }
  }
  return layers;
}

OptionRow text_row(OptionRow row, std::string Options::*field) {
  row.set = [field](Options& o, std::string_view, std::string_view value) { o.*field = value; };
  row.show = [field](const Options& o) { return o.*field; };
  return row;
}

/// `otherwise` is how the default, 0 or -1, reads in the echo where it isn't a number to use.
OptionRow number_row(OptionRow row, std::int64_t Options::*field, Limits limits,
                     std::string_view otherwise = {}) {
  row.set = [field, limits](Options& o, std::string_view name, std::string_view value) {
    o.*field = parse_number(name, value, value, limits.least, limits.most);
  };
  row.show = [field, otherwise](const Options& o) {
    return o.*field == 0 && !otherwise.empty() ? std::string(otherwise) : fmt::to_string(o.*field);
  };
  return row;
}

OptionRow flag_row(OptionRow row, bool Options::*field, bool when_given = true) {
  row.set = [field, when_given](Options& o, std::string_view, std::string_view) {
    o.*field = when_given;
  };
  row.show = [field, when_given](const Options& o) {
    return std::string(o.*field == when_given ? "true" : "false");
  };
  return row;
}

template <typename Enum>
using Names = std::vector<std::pair<std::string_view, Enum>>;

template <typename Enum>
Enum parse_choice(std::string_view name, std::string_view value, const Names<Enum>& names) {
  std::vector<std::string_view> valid;
  for (const auto& [text, choice] : names) {
    if (text == value) return choice;
    valid.push_back(text);
  }
  fail(fmt::format("{} is unknown (valid: {}); choose one of these", shown(name, value),
                   fmt::join(valid, ", ")));
}

template <typename Enum>
OptionRow choice_row(OptionRow row, Enum Options::*field, Names<Enum> names) {
  row.set = [field, names](Options& o, std::string_view name, std::string_view value) {
    o.*field = parse_choice(name, value, names);
  };
  row.show = [field, names](const Options& o) {
    for (const auto& [text, choice] : names) {
      if (choice == o.*field) return std::string(text);
    }
    return std::string("?");
  };
  return row;
}

/// Comma-separated numbers from 0 on.
OptionRow list_row(OptionRow row, std::vector<std::int64_t> Options::*field, std::int64_t most,
                   std::string_view otherwise) {
  row.set = [field, most](Options& o, std::string_view name, std::string_view value) {
    for (const std::string_view item : split_list(name, value)) {
      (o.*field).push_back(parse_number<std::int64_t>(name, value, item, 0, most));
    }
  };
  row.show = [field, otherwise](const Options& o) {
    return (o.*field).empty() ? std::string(otherwise)
                              : fmt::format("{}", fmt::join(o.*field, ","));
  };
  return row;
}

void set_override(Options& options, std::string_view name, std::string_view value) {
  const std::size_t equals = value.find('=');
  if (equals == std::string_view::npos || equals == 0) {
    fail(
        fmt::format("{} has no key and value (it overrides a field of config.json); write "
                    "--set hidden_size=1024",
                    shown(name, value)));
  }
  const std::string key(value.substr(0, equals));
  const auto same = [&key](const auto& pair) { return pair.first == key; };
  if (std::ranges::any_of(options.set, same)) {
    fail(fmt::format("{} sets {} a second time (which one counts would be a guess); leave one out",
                     shown(name, value), key));
  }
  options.set.emplace_back(key, value.substr(equals + 1));
}

std::string shown_overrides(const Options& options) {
  std::vector<std::string> pairs;
  for (const auto& [key, value] : options.set) pairs.push_back(key + "=" + value);
  return fmt::format("{}", fmt::join(pairs, " "));
}

constexpr std::string_view kModelGroup = "What to compute";
constexpr std::string_view kWhereGroup = "Where and how";
constexpr std::string_view kOutputGroup = "What comes out";

std::vector<OptionRow> model_rows() {
  const auto row = [](std::string_view name, std::string_view value, std::string help,
                      unsigned commands = kEveryCommand) {
    return OptionRow{name, value, kModelGroup, commands, std::move(help)};
  };
  std::vector<OptionRow> rows;
  rows.push_back(text_row(
      row("--model", "DIR", "Hugging Face directory: config.json and *.safetensors", kWithTokens),
      &Options::model));
  rows.push_back(
      text_row(row("--config", "FILE", "a config.json alone: weights are made from --seed"),
               &Options::config));
  rows.push_back(row("--set", "KEY=VALUE", "override a field of config.json; may be repeated"));
  rows.back().repeatable = true;
  rows.back().set = set_override;
  rows.back().show = shown_overrides;
  rows.push_back(row("--layers", "LIST",
                     "such as 0-3,7; default: all with --model, 0 with "
                     "--config (make-model, inspect: all)"));
  rows.back().set = [](Options& o, std::string_view name, std::string_view value) {
    o.layers = parse_layers(name, value);
  };
  rows.back().show = [](const Options& o) {
    return o.layers.empty() ? "default" : layer_text(o.layers);
  };
  rows.push_back(number_row(row("--tokens", "N", "seeded tokens (64)", kWithTokens),
                            &Options::tokens, {1, kMaxTokens}, "none"));
  rows.back().set = [set = rows.back().set](Options& o, std::string_view name,
                                            std::string_view value) {
    set(o, name, value);
    o.tokens_given = true;
  };
  rows.push_back(
      text_row(row("--input", "FILE",
                   "tokens from tensor x [T, H] or [B, S, H] of a safetensors file", kWithTokens),
               &Options::input));
  rows.push_back(
      number_row(row("--sequence-length", "S", "tokens of a sequence: T = B*S", kWithTokens),
                 &Options::sequence_length, {1, kMaxTokens}, "none"));
  rows.push_back(
      list_row(row("--token-split", "LIST",
                   "tokens of each dp group, such as 5,2,1,0; default: even", kWithTokens),
               &Options::token_split, kMaxTokens, "even"));
  rows.push_back(row("--dtype", "TYPE", "f32, bf16 or f16; default: the model's"));
  rows.back().set = [](Options& o, std::string_view name, std::string_view value) {
    o.dtype = parse_choice<DType>(
        name, value, {{"f32", DType::kF32}, {"bf16", DType::kBf16}, {"f16", DType::kF16}});
  };
  rows.back().show = [](const Options& o) {
    return std::string(o.dtype ? name_of(*o.dtype) : std::string_view("model"));
  };
  rows.push_back(row("--ablate", "LIST",
                     "hidden channels to set to 0 before down, such as 275,300; also writes delta, "
                     "the whole y less this one",
                     bit(Command::kRun)));
  rows.back().set = [](Options& o, std::string_view name, std::string_view value) {
    std::set<std::int64_t> seen;
    for (const std::string_view item : split_list(name, value)) {
      const auto channel =
          parse_number<std::int64_t>(name, value, item, 0, (std::int64_t{1} << 40) - 1);
      add_once(name, value, channel, seen, o.ablate);
    }
  };
  rows.back().show = [](const Options& o) {
    return o.ablate.empty() ? "none" : fmt::format("{}", fmt::join(o.ablate, ","));
  };
  return rows;
}

std::vector<OptionRow> where_rows() {
  const auto row = [](std::string_view name, std::string_view value, std::string help,
                      unsigned commands = kEveryCommand) {
    return OptionRow{name, value, kWhereGroup, commands, std::move(help)};
  };
  return {
      number_row(row("--tp", "N",
                     "ranks that share a layer; default: the largest divisor of the world "
                     "that is at most --blocks",
                     kWithTokens),
                 &Options::tp, {1, kMaxRanks}, "auto"),
      number_row(row("--ep", "N", "ranks that share the experts: 1, experts come with MoE models",
                     kWithTokens),
                 &Options::ep, {1, kMaxRanks}),
      choice_row<DeviceKind>(
          row("--device", "KIND", "auto, cpu or cuda", kWithTokens), &Options::device,
          {{"auto", DeviceKind::kAuto}, {"cpu", DeviceKind::kCpu}, {"cuda", DeviceKind::kCuda}}),
      choice_row<CommKind>(
          row("--comm", "KIND", "auto, mpi or nccl", kWithTokens), &Options::comm,
          {{"auto", CommKind::kAuto}, {"mpi", CommKind::kMpi}, {"nccl", CommKind::kNccl}}),
      choice_row<Reduce>(row("--reduce", "HOW",
                             "exact: the same bits for every number of ranks (default); fast: the "
                             "libraries' own sums",
                             kReduces),
                         &Options::reduce, {{"exact", Reduce::kExact}, {"fast", Reduce::kFast}}),
      number_row(
          row("--blocks", "V", "canonical blocks of the intermediate width (8)", kWithTokens),
          &Options::blocks, {1, kMaxBlocks}),
      number_row(row("--threads", "N", "threads of a rank; default: OpenMP's choice", kWithTokens),
                 &Options::threads, {0, 4096}, "auto"),
      [&] {
        OptionRow seed = row("--seed", "S", "of seeded weights and tokens (0)");
        seed.set = [](Options& o, std::string_view name, std::string_view value) {
          o.seed = parse_number<std::uint64_t>(name, value, value, 0, UINT64_MAX);
        };
        seed.show = [](const Options& o) { return fmt::to_string(o.seed); };
        return seed;
      }(),
      [&] {
        OptionRow timeout =
            row("--timeout", "S", "seconds without progress that end the job (300)");
        timeout.set = [](Options& o, std::string_view name, std::string_view value) {
          o.timeout = parse_number<double>(name, value, value, 0.001, kMaxSeconds);
        };
        timeout.show = [](const Options& o) { return fmt::to_string(o.timeout); };
        return timeout;
      }(),
  };
}

std::vector<OptionRow> output_rows() {
  const auto row = [](std::string_view name, std::string_view value, std::string help,
                      unsigned commands = kEveryCommand) {
    return OptionRow{name, value, kOutputGroup, commands, std::move(help)};
  };
  constexpr unsigned kBench = bit(Command::kBench);
  constexpr unsigned kWrites = bit(Command::kRun) | bit(Command::kMakeModel);
  return {
      text_row(row("--output", "PATH", "run: a safetensors file for y; make-model: a new directory",
                   kWrites),
               &Options::output),
      text_row(row("--json", "FILE", "the table, every option and version as JSON"),
               &Options::json),
      text_row(row("--csv", "FILE", "the table as CSV"), &Options::csv),
      number_row(row("--shards", "N", "files that the weights are spread over (1)",
                     bit(Command::kMakeModel)),
                 &Options::shards, {1, 99999}),
      number_row(row("--iterations", "N", "timed passes (20)", kBench), &Options::iterations,
                 {1, kMaxCount}),
      number_row(row("--warmup", "N", "passes before that (3)", kBench), &Options::warmup,
                 {0, kMaxCount}),
      flag_row(row("--hot", "", "time the same weights again and again, out of the caches", kBench),
               &Options::hot),
      flag_row(row("--no-check", "", "don't verify what is timed", kBench), &Options::check, false),
      flag_row(row("--quiet", "", "print the closing lines only"), &Options::quiet),
      flag_row(row("--verbose", "", "also print where each rank runs"), &Options::verbose),
      flag_row(row("--dry-run", "", "print the plan, who owns what, and compute nothing"),
               &Options::dry_run),
  };
}

}  // namespace

std::string layer_text(const std::vector<std::int64_t>& layers) {
  std::string text;
  for (std::size_t i = 0; i < layers.size();) {
    std::size_t end = i + 1;
    while (end < layers.size() && layers[end] == layers[end - 1] + 1) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : ",", layers[i]);
    if (end > i + 1) text += fmt::format("-{}", layers[end - 1]);
    i = end;
  }
  return text;
}

const std::vector<OptionRow>& option_table() {
  static const std::vector<OptionRow> table = [] {
    std::vector<OptionRow> rows = model_rows();
    for (auto more : {where_rows(), output_rows()}) {
      rows.insert(rows.end(), more.begin(), more.end());
    }
    return rows;
  }();
  return table;
}

}  // namespace gatefold
