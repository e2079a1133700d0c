#include "launch/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "launch/option_table.h"
#include "runtime/error.h"
#include "runtime/safetensors.h"

namespace gatefold {
namespace {

constexpr std::pair<std::string_view, std::string_view> kCommands[] = {
    {"verify", "Compute layers on all ranks and judge them against one device and float64"},
    {"run", "Compute one layer on the tokens and write y"},
    {"bench", "Time layers, and how they scale over the ranks"},
    {"inspect", "Print what a model's feed-forward layers are made of, and who owns what"},
    {"make-model", "Write a checkpoint of seeded weights, or of experts made of a dense model"},
    {"balance",
     "Balance a router's experts step by step by its correction bias, and show their load"},
    {"convert", "Write a model in another layout, number of files or type"},
};

[[noreturn]] void fail(const std::string& text) { throw Error(ExitCode::kUsage, text); }

// Levenshtein distance.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, replaced}));
    }
  }
  return row.back();
}

/// The name that was probably meant, or nothing.
std::string_view nearest(std::string_view typed, const std::vector<std::string_view>& names) {
  std::string_view best;
  std::size_t least = std::max<std::size_t>(2, typed.size() / 3) + 1;
  for (const std::string_view name : names) {
    const bool shortened = typed.size() > 3 && name.starts_with(typed);
    const std::size_t steps = shortened ? 1 : distance(typed, name);
    if (steps < least) {
      least = steps;
      best = name;
    }
  }
  return best;
}

std::string command_names() {
  std::vector<std::string_view> names;
  for (const auto& [name, help] : kCommands) names.push_back(name);
  return fmt::format("{}", fmt::join(names, ", "));
}

[[noreturn]] void refuse_command(std::string_view typed) {
  if (typed.starts_with("-")) {
    fail(fmt::format("{} stands where the command belongs (it comes first); start with one of {}",
                     quoted_name(typed), command_names()));
  }
  std::vector<std::string_view> names;
  for (const auto& [name, help] : kCommands) names.push_back(name);
  const std::string_view meant = nearest(typed, names);
  fail(fmt::format(
      "unknown command {} (known: {}); {}", quoted_name(typed), command_names(),
      meant.empty() ? std::string("choose one of these") : fmt::format("did you mean {}?", meant)));
}

[[noreturn]] void refuse_extra(std::string_view typed, Command command) {
  if (!typed.starts_with("-")) {
    fail(fmt::format("{} is not expected (a value follows its option); see gatefold {} --help",
                     quoted_name(typed), name_of(command)));
  }
  std::vector<std::string_view> names = {"--help"};
  for (const OptionRow& row : option_table()) {
    if (row.used_by(command)) names.push_back(row.name);
  }
  const std::string name(typed.substr(0, typed.find('=')));
  const std::string_view meant = nearest(name, names);
  fail(fmt::format("unknown option {} ({} has none of this name); {}", quoted_name(name),
                   name_of(command),
                   meant.empty() ? fmt::format("see gatefold {} --help", name_of(command))
                                 : fmt::format("did you mean {}?", meant)));
}

void refuse_extras(const CLI::App& parser, Command command) {
  const std::vector<std::string> extras = parser.remaining();
  if (!extras.empty()) refuse_extra(extras.front(), command);
}

[[noreturn]] void refuse_missing_value(const OptionRow& row) {
  fail(fmt::format("{} has no value (it takes one); write {} {}", row.name, row.name, row.value));
}

/// What CLI11 reads in its own way: --tp= takes the next argument, --quiet=0 is a value, -- and ++
/// end a command's options.
void check_arguments(int argc, const char* const* argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--" || argument == "++") {
      fail(fmt::format("{} is not expected (every value follows its option); leave it out",
                       quoted_name(argument)));
    }
    const std::size_t equals = argument.find('=');
    if (equals == std::string_view::npos) continue;
    for (const OptionRow& row : option_table()) {
      if (row.name != argument.substr(0, equals)) continue;
      if (row.is_flag()) {
        fail(fmt::format("{} takes no value (it is on when it is there); write {}",
                         quoted_name(argument), row.name));
      }
      if (equals + 1 == argument.size()) refuse_missing_value(row);
    }
  }
}

/// One command's parser with every option of the table, so that what belongs to another command
/// can be told from a typo.
CLI::App* declare(CLI::App& app, std::string_view name, std::string_view help, Command command) {
  CLI::App* parser = app.add_subcommand(std::string(name), std::string(help));
  parser->allow_extras();
  for (const OptionRow& row : option_table()) {
    CLI::Option* option =
        row.is_flag() ? parser->add_flag(std::string(row.name), row.help)
                      : parser->add_option(std::string(row.name), CLI::callback_t(), row.help);
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    option->group(row.used_by(command) ? std::string(row.group) : std::string());
    if (!row.is_flag()) option->type_name(std::string(row.value));
  }
  return parser;
}

using Found = std::vector<std::pair<const OptionRow*, std::vector<std::string>>>;

/// The options that are there, each with its values; none of them empty, none an option itself.
Found find_options(const CLI::App& parser) {
  Found found;
  for (const OptionRow& row : option_table()) {
    const std::vector<std::string> values = parser.get_option(std::string(row.name))->results();
    if (values.empty()) continue;
    for (const std::string& value : values) {
      if (value.empty() || (!row.is_flag() && value.starts_with("--"))) refuse_missing_value(row);
    }
    found.emplace_back(&row, values);
  }
  return found;
}

void check_machine(const Options& o, const Found& found) {
  if (!o.machine) return;
  for (const auto& [row, values] : found) {
    if (row->of_machine()) continue;
    fail(
        fmt::format("bench --machine does not take {} (it measures the machine, and no layer); "
                    "leave one of them out",
                    row->name));
  }
}

/// Moves what the parser found into `options`.
void collect(const CLI::App& parser, Options& options) {
  const Found found = find_options(parser);
  refuse_extras(parser, options.command);
  for (const auto& [row, values] : found) {
    if (!row->used_by(options.command)) {
      fail(fmt::format("{} does not take {} (it would have no effect); leave it out",
                       name_of(options.command), row->name));
    }
    if (values.size() > 1 && (row->repeatable & bit(options.command)) == 0) {
      fail(fmt::format("{} is given {} times (which one counts would be a guess); give it once",
                       row->name, values.size()));
    }
    for (const std::string& value : values) row->set(options, row->name, value);
  }
  check_machine(options, found);
}

void check_from_dense(const Options& o) {
  if (o.from_dense.empty()) {
    if (o.experts > 0 || o.split || o.copy) {
      fail(
          fmt::format("{} without --from-dense (it says how a dense model becomes experts); leave "
                      "it out",
                      o.experts > 0 ? "--experts" : (o.split ? "--split" : "--copy")));
    }
    if (o.config.empty()) {
      fail(
          "no config (make-model writes weights for one); give --config FILE, or --from-dense DIR");
    }
    return;
  }
  if (!o.config.empty()) {
    fail("--config and --from-dense are both given (each says what the model is); give one");
  }
  if (o.seed_given) {
    fail(
        "--seed and --from-dense are both given (nothing that is made of a dense model is random); "
        "leave --seed out");
  }
  if (o.experts == 0) {
    fail("--from-dense without --experts (a layer becomes that many); give --experts N");
  }
  if (o.split == o.copy) {
    fail(
        fmt::format("--from-dense with {} (neurons are dealt over the experts, or each has all); "
                    "give one",
                    o.split ? "--split and --copy" : "neither --split nor --copy"));
  }
}

void check_model(const Options& o) {
  if (o.command == Command::kMakeModel) {
    check_from_dense(o);
    if (o.output.empty()) fail("no output (make-model writes a directory); give --output DIR");
    return;
  }
  if (o.machine) return;
  // balance has a config of its own
  if (o.model.empty() && o.config.empty() && o.command == Command::kBalance) return;
  if (o.command == Command::kConvert) {
    if (o.model.empty()) fail("no model (there is nothing to convert); give --model DIR");
    if (o.output.empty()) fail("no output (convert writes a directory); give --output DIR");
    return;
  }
  if (o.model.empty() && o.config.empty()) {
    fail("no model (there is nothing to compute); give --model DIR or --config FILE");
  }
  if (!o.model.empty() && !o.config.empty()) {
    fail("--model and --config are both given (each says which layers to compute); give one");
  }
}

/// What can't go with several points, or with more tokens on more ranks.
void check_sweep(const Options& o) {
  const Sweep& sweep = o.sweep;
  const bool several =
      sweep.tokens.size() > 1 || sweep.tp.size() > 1 || sweep.ep.size() > 1 || sweep.dp.size() > 1;
  const bool weak = o.scaling == Scaling::kWeak;
  if (!o.token_split.empty() && (several || weak)) {
    fail(
        fmt::format("--token-split with {} (it fits one number of tokens and of groups); leave it "
                    "out",
                    weak ? "--scaling weak" : "several points"));
  }
  if (weak && !o.input.empty()) {
    fail("--input with --scaling weak (more ranks take more tokens than it has); use --tokens");
  }
}

void check_capacity(const Options& o) {
  const bool limited = o.capacity_factor > 0 || o.capacity != 0;
  if (o.capacity_factor > 0 && o.capacity != 0) {
    fail(
        "--capacity-factor and --capacity are both given (each says how many rows an expert "
        "takes); give one");
  }
  const std::string_view alone =
      o.drop_given ? "--drop" : (o.per_sequence ? "--per-sequence" : (o.pad ? "--pad" : ""));
  if (!limited && !alone.empty()) {
    fail(
        fmt::format("{} without --capacity-factor or --capacity (nothing is dropped); give one, "
                    "or leave it out",
                    alone));
  }
  if (limited && o.command == Command::kInspect && !o.tokens_given && o.input.empty()) {
    fail("a capacity without tokens (inspect has none to drop); give --tokens or --input");
  }
  if (o.per_sequence && o.sequence_length == 0 && o.input.empty()) {
    fail("--per-sequence without --sequence-length (how long sequences are); give it");
  }
}

/// What only shows when options are seen together.
void check_together(const Options& o) {
  check_model(o);
  if (!o.input.empty() && o.tokens_given) {
    fail("--input and --tokens are both given (the file says how many tokens there are); give one");
  }
  if (!o.input.empty() && o.skew_given) {
    fail("--input and --skew are both given (seeded tokens are skewed, not a file's); give one");
  }
  if (o.routing.kind == RoutingKind::kFile && o.input.empty()) {
    fail("--routing file without --input (whose topk_ids it takes); give --input FILE");
  }
  if (o.input.empty() && o.sequence_length > 0) {
    for (const std::int64_t tokens :
         o.sweep.tokens.empty() ? std::vector<std::int64_t>{o.tokens} : o.sweep.tokens) {
      if (tokens % o.sequence_length == 0) continue;
      fail(fmt::format(
          "--sequence-length {} doesn't divide {} tokens (sequences are whole: T = B*S); "
          "correct one of them",
          o.sequence_length, tokens));
    }
  }
  check_sweep(o);
  check_capacity(o);
  if (o.device == DeviceKind::kCpu && o.comm == CommKind::kNccl) {
    fail("--comm nccl and --device cpu are both given (NCCL moves GPU memory); change one");
  }
  if (o.quiet && o.verbose) {
    fail("--quiet and --verbose are both given (they contradict each other); give one");
  }
}

Command command_of(const std::vector<CLI::App*>& parsers, const CLI::App* chosen) {
  return static_cast<Command>(std::ranges::find(parsers, chosen) - parsers.begin());
}

ParseResult parse(int argc, const char* const* argv) {
  CLI::App app("Tensor-parallel feed-forward layers: the same bits for every number of ranks.",
               "gatefold");
  app.get_formatter()->column_width(28);
  app.set_version_flag("--version", "gatefold " GATEFOLD_VERSION);
  app.require_subcommand(0, 1);
  app.allow_extras();
  app.footer(
      "gatefold COMMAND --help lists a command's options. Several ranks:\n"
      "  mpirun -n 4 gatefold verify --model DIR");
  std::vector<CLI::App*> parsers;
  for (std::size_t i = 0; i < std::size(kCommands); ++i) {
    const auto& [name, help] = kCommands[i];
    parsers.push_back(declare(app, name, help, static_cast<Command>(i)));
  }
  check_arguments(argc, argv);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    const auto chosen = app.get_subcommands();
    if (const auto extras = app.remaining(); !extras.empty()) refuse_command(extras.front());
    if (!chosen.empty()) refuse_extras(*chosen.front(), command_of(parsers, chosen.front()));
    return {{}, chosen.empty() ? app.help() : chosen.front()->help("gatefold"), 0};
  } catch (const CLI::CallForVersion& version) {
    return {{}, std::string(version.what()) + "\n", 0, true};
  }
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  if (chosen.empty()) {
    if (argc > 1) refuse_command(argv[1]);
    fail(fmt::format("no command (known: {}); see gatefold --help", command_names()));
  }
  if (std::string_view(argv[1]) != chosen.front()->get_name()) refuse_command(argv[1]);

  Options options;
  options.command = command_of(parsers, chosen.front());
  // As few as 64 give no load to speak of.
  if (options.command == Command::kBalance) options.tokens = 2048;
  collect(*chosen.front(), options);
  check_together(options);
  return {options, "", 0};
}

/// The option that CLI11 names in an error about a missing value: "--tp: 1 required N missing".
std::string described(const CLI::ParseError& error) {
  const std::string text = error.what();
  for (const OptionRow& row : option_table()) {
    if (text.starts_with(fmt::format("{}:", row.name)) && !row.is_flag()) {
      return fmt::format("{} has no value (it takes one); write {} {}", row.name, row.name,
                         row.value);
    }
  }
  return fmt::format("{} (the command line can't be read); see gatefold --help",
                     text.substr(0, text.find('\n')));
}

}  // namespace

std::string_view name_of(Command command) {
  return kCommands[static_cast<std::size_t>(command)].first;
}

std::string_view name_of(Dispatcher dispatcher) {
  return dispatcher == Dispatcher::kAllToAll ? "alltoall" : "allgather";
}

std::vector<std::pair<std::string, std::string>> Options::echo() const {
  std::vector<std::pair<std::string, std::string>> pairs;
  pairs.emplace_back("command", name_of(command));
  for (const OptionRow& row : option_table()) {
    if (!machine || row.of_machine()) pairs.emplace_back(row.name.substr(2), row.show(*this));
  }
  return pairs;
}

ParseResult parse_options(int argc, const char* const* argv) {
  constexpr int kUsage = static_cast<int>(ExitCode::kUsage);
  try {
    return parse(argc, argv);
  } catch (const Error& error) {
    return {{}, error.what(), kUsage};
  } catch (const CLI::ParseError& error) {
    return {{}, described(error), kUsage};
  }
}

}  // namespace gatefold
