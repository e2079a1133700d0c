#include "launch/option_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "launch/option_values.h"
#include "layers/moe_config.h"
#include "runtime/quoted_name.h"
#include "runtime/routing.h"
#include "runtime/safetensors.h"

namespace gatefold {
namespace {

constexpr unsigned kWithTokens = kOfLayers & ~bit(Command::kMakeModel);
constexpr unsigned kBalance = bit(Command::kBalance);
constexpr unsigned kWithLayers = kWithTokens & ~kBalance;

// Bounds that nobody reaches, so that no product of two sizes overflows.
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 31;
constexpr std::int64_t kMaxRanks = std::int64_t{1} << 20;
constexpr std::int64_t kMaxBlocks = std::int64_t{1} << 16;
constexpr std::int64_t kMaxLayer = 99999;
constexpr std::int64_t kMaxCount = 1000000;
constexpr std::int64_t kMaxSteps = 100000;  // of kMaxTokens new tokens each
constexpr double kMaxSeconds = 1e7;

/// "0-3,7"
std::vector<std::int64_t> parse_layers(std::string_view name, std::string_view value) {
  std::vector<std::int64_t> layers;
  for (const std::string_view item : split_list(name, value)) {
    if (item.find(':') != std::string_view::npos || item.find("..") != std::string_view::npos) {
      refuse_value(
          fmt::format("{}: {} is no range of layers (a - between its ends is all that it "
                      "has); write such as 0-3,7",
                      shown_value(name, value), quoted_name(item)));
    }
    const std::size_t dash = item.find('-', 1);
    const auto number = [&](std::string_view text) {
      return parse_number<std::int64_t>(name, value, text, 0, kMaxLayer);
    };
    const std::int64_t first = number(item.substr(0, dash));
    const std::int64_t last =
        dash == std::string_view::npos ? first : number(item.substr(dash + 1));
    if (last < first) {
      refuse_value(fmt::format("{} runs backwards ({} comes after {}); write {}-{}",
                               shown_value(name, value), first, last, last, first));
    }
    for (std::int64_t layer = first; layer <= last; ++layer) layers.push_back(layer);
  }
  require_distinct(name, value, layers);
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

OptionRow real_row(OptionRow row, double Options::*field, double least, double most) {
  row.set = [field, least, most](Options& o, std::string_view name, std::string_view value) {
    o.*field = parse_number<double>(name, value, value, least, most);
  };
  row.show = [field](const Options& o) { return fmt::to_string(o.*field); };
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
  refuse_value(fmt::format("{} is unknown (valid: {}); choose one of these",
                           shown_value(name, value), fmt::join(valid, ", ")));
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

/// Only bench takes several values: to try each with each of the others.
void refuse_several(const Options& options, std::string_view name, std::string_view value) {
  if (options.command == Command::kBench || value.find(',') == std::string_view::npos) return;
  refuse_value(fmt::format("{} is a list (only bench takes several values); give one",
                           shown_value(name, value)));
}

/// What bench takes several of. `field` has the first, for whoever needs one.
OptionRow swept_number_row(OptionRow row, std::int64_t Options::*field,
                           std::vector<std::int64_t> Sweep::*list, Limits limits,
                           std::string_view otherwise = {}) {
  row = number_row(std::move(row), field, limits, otherwise);
  row.set = [field, list, limits](Options& o, std::string_view name, std::string_view value) {
    refuse_several(o, name, value);
    if (o.command != Command::kBench) {
      o.*field = parse_number(name, value, value, limits.least, limits.most);
      return;
    }
    o.sweep.*list = parse_numbers(name, value, limits);
    o.*field = (o.sweep.*list).front();
  };
  row.show = [list, show = row.show](const Options& o) {
    return (o.sweep.*list).empty() ? show(o) : fmt::format("{}", fmt::join(o.sweep.*list, ","));
  };
  return row;
}

/// `show_default`: how the option reads where it isn't given.
template <typename Enum, typename SetFirst>
OptionRow swept_choice_row(OptionRow row, std::vector<Enum> Sweep::*list, Names<Enum> names,
                           SetFirst set_first,
                           std::function<std::string(const Options&)> show_default) {
  row.set = [=](Options& o, std::string_view name, std::string_view value) {
    refuse_several(o, name, value);
    std::vector<Enum> choices;
    for (const std::string_view item : split_list(name, value)) {
      choices.push_back(parse_choice(name, item, names));
      if (std::ranges::count(choices, choices.back()) == 1) continue;
      refuse_value(fmt::format("{} names {} twice (each counts once); leave one out",
                               shown_value(name, value), item));
    }
    set_first(o, choices.front());
    if (o.command == Command::kBench) o.sweep.*list = std::move(choices);
  };
  row.show = [=](const Options& o) {
    std::vector<std::string_view> shown;
    for (const Enum choice : o.sweep.*list) {
      shown.push_back(std::ranges::find(names, choice, &Names<Enum>::value_type::second)->first);
    }
    return shown.empty() ? show_default(o) : fmt::format("{}", fmt::join(shown, ","));
  };
  return row;
}

template <typename Enum>
OptionRow swept_choice_row(OptionRow row, Enum Options::*field, std::vector<Enum> Sweep::*list,
                           Names<Enum> names) {
  const OptionRow one = choice_row<Enum>({}, field, names);
  return swept_choice_row<Enum>(
      std::move(row), list, std::move(names), [field](Options& o, Enum first) { o.*field = first; },
      one.show);
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
    refuse_value(
        fmt::format("{} has no key and value (it overrides a field of config.json); write "
                    "--set hidden_size=1024",
                    shown_value(name, value)));
  }
  const std::string key(value.substr(0, equals));
  const auto same = [&key](const auto& pair) { return pair.first == key; };
  if (std::ranges::any_of(options.set, same)) {
    refuse_value(
        fmt::format("{} sets {} a second time (which one counts would be a guess); leave one out",
                    shown_value(name, value), key));
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
  rows.push_back(
      text_row(row("--model", "DIR", "Hugging Face directory: config.json and *.safetensors",
                   kWithTokens | bit(Command::kConvert)),
               &Options::model));
  rows.push_back(text_row(row("--config", "FILE",
                              "a config.json alone: weights are made from --seed; bench takes "
                              "several",
                              kOfLayers),
                          &Options::config));
  rows.back().repeatable = bit(Command::kBench);
  rows.back().set = [](Options& o, std::string_view, std::string_view value) {
    if (o.config.empty()) o.config = value;
    o.sweep.configs.emplace_back(value);
  };
  rows.back().show = [](const Options& o) {
    return o.sweep.configs.empty() ? o.config : fmt::format("{}", fmt::join(o.sweep.configs, " "));
  };
  rows.push_back(
      flag_row(row("--machine", "",
                   "measure the machine and no model: GEMM peaks, memory, messages, collectives",
                   bit(Command::kBench) | kMachine),
               &Options::machine));
  constexpr unsigned kMakes = bit(Command::kMakeModel);
  rows.push_back(
      text_row(row("--from-dense", "DIR", "a dense model, whose layers become mixtures", kMakes),
               &Options::from_dense));
  rows.push_back(number_row(row("--experts", "N", "that each of its layers becomes", kMakes),
                            &Options::experts, {1, kMaxExperts}, "none"));
  rows.push_back(
      flag_row(row("--split", "",
                   "give each expert 1/N of the layer's neurons, and a token all experts", kMakes),
               &Options::split));
  rows.push_back(flag_row(
      row("--copy", "", "give each expert all of the layer, and a token one expert", kMakes),
      &Options::copy));
  rows.push_back(
      row("--layout", "HOW",
          "how experts are stored: per-expert, stacked (fused; a family's own stack where "
          "it has one), stacked-transposed or stacked-alternating, as far as the family "
          "knows it; default: its own way; convert: as they are stored",
          kMakes | bit(Command::kConvert)));
  rows.back().set = [](Options& o, std::string_view name, std::string_view value) {
    Names<ExpertLayout> names;
    for (const ExpertLayout layout :
         {ExpertLayout::kPerExpert, ExpertLayout::kStacked, ExpertLayout::kStackedTransposed,
          ExpertLayout::kStackedAlternating}) {
      names.emplace_back(name_of(layout), layout);
    }
    names.emplace_back("fused", ExpertLayout::kStacked);  // as others call it
    o.layout = parse_choice(name, value, names);
  };
  rows.back().show = [](const Options& o) {
    const std::string_view otherwise = o.command == Command::kConvert ? "stored" : "family";
    return std::string(o.layout ? name_of(*o.layout) : otherwise);
  };
  rows.push_back(
      row("--set", "KEY=VALUE", "override a field of config.json; may be repeated", kOfLayers));
  rows.back().repeatable = kEveryCommand;
  rows.back().set = set_override;
  rows.back().show = shown_overrides;
  rows.push_back(row("--layers", "LIST",
                     "such as 0-3,7; default: all with --model, the first of each kind with "
                     "--config (make-model, inspect: all; balance: the first with a router)",
                     kOfLayers));
  rows.back().set = [](Options& o, std::string_view name, std::string_view value) {
    o.layers = parse_layers(name, value);
  };
  rows.back().show = [](const Options& o) {
    return o.layers.empty() ? "default" : layer_text(o.layers);
  };
  rows.push_back(swept_number_row(
      row("--tokens", "N",
          "seeded tokens (64; balance: 2048 new ones a step); bench takes several: 1,8,64 or "
          "8-4096:x2 or 8-64:+8",
          kWithTokens),
      &Options::tokens, &Sweep::tokens, {1, kMaxTokens}, "none"));
  rows.back().set = [set = rows.back().set](Options& o, std::string_view name,
                                            std::string_view value) {
    set(o, name, value);
    o.tokens_given = true;
  };
  rows.push_back(
      text_row(row("--input", "FILE",
                   "tokens from tensor x [T, H] or [B, S, H] of a safetensors file", kWithTokens),
               &Options::input));
  rows.push_back(number_row(
      row("--sequence-length", "S",
          "tokens of a sequence: T = B*S; default: what the shape of --input says", kWithTokens),
      &Options::sequence_length, {1, kMaxTokens}, "none"));
  rows.push_back(
      list_row(row("--token-split", "LIST",
                   "tokens of each dp group, such as 5,2,1,0; default: even", kWithTokens),
               &Options::token_split, kMaxTokens, "even"));
  rows.push_back(swept_choice_row<DType>(
      row("--dtype", "TYPE",
          "f32, bf16 or f16; default: the model's (convert: as stored); bench takes several; "
          "make-model also f8_e4m3, mxfp4: its weights, with scales of blocks"),
      &Sweep::dtypes, {{"f32", DType::kF32}, {"bf16", DType::kBf16}, {"f16", DType::kF16}},
      [](Options& o, DType first) { o.dtype = first; },
      [](const Options& o) {
        if (o.quantised) return std::string(name_of(*o.quantised));
        return std::string(o.dtype ? name_of(*o.dtype) : std::string_view("model"));
      }));
  rows.back().set = [set = rows.back().set](Options& o, std::string_view name,
                                            std::string_view value) {
    constexpr BlockFormat kFormats[] = {BlockFormat::kF8E4M3, BlockFormat::kMxfp4};
    const auto named = [&](BlockFormat format) { return name_of(format) == value; };
    const auto* const format = std::ranges::find_if(kFormats, named);
    if (format == std::end(kFormats)) return set(o, name, value);
    if (o.command != Command::kMakeModel) {
      refuse_value(
          fmt::format("{} is how files hold weights (layers compute in f32, bf16 or f16, and only "
                      "make-model writes it); choose one of these",
                      shown_value(name, value)));
    }
    o.quantised = *format;
  };
  rows.push_back(row("--ablate", "LIST",
                     "hidden channels to set to 0 before down, such as 275,300; also writes delta, "
                     "the whole y less this one",
                     bit(Command::kRun)));
  rows.back().set = [](Options& o, std::string_view name, std::string_view value) {
    for (const std::string_view item : split_list(name, value)) {
      o.ablate.push_back(
          parse_number<std::int64_t>(name, value, item, 0, (std::int64_t{1} << 40) - 1));
    }
    require_distinct(name, value, o.ablate);
  };
  rows.back().show = [](const Options& o) {
    return o.ablate.empty() ? "none" : fmt::format("{}", fmt::join(o.ablate, ","));
  };
  return rows;
}

std::vector<OptionRow> capacity_rows_of_table() {
  const auto row = [](std::string_view name, std::string_view value, std::string help) {
    return OptionRow{name, value, kModelGroup, kWithLayers, std::move(help)};
  };
  std::vector<OptionRow> rows;
  rows.push_back(row("--capacity-factor", "F",
                     "an expert takes ceil(T*k/E * F) rows of all T tokens, and what it is sent "
                     "beyond that is dropped; default: nothing is"));
  rows.back().set = [](Options& o, std::string_view name, std::string_view value) {
    o.capacity_factor = parse_number<double>(name, value, value, 1e-9, 1e9);
  };
  rows.back().show = [](const Options& o) {
    return o.capacity_factor > 0 ? fmt::to_string(o.capacity_factor) : std::string("none");
  };
  rows.push_back(row("--capacity", "N",
                     "an expert takes N rows; config: as many as the model's config says "
                     "(expert_capacity of Switch Transformers)"));
  rows.back().set = [](Options& o, std::string_view name, std::string_view value) {
    o.capacity =
        value == "config" ? -1 : parse_number<std::int64_t>(name, value, value, 1, kMaxTokens);
  };
  rows.back().show = [](const Options& o) {
    if (o.capacity < 0) return std::string("config");
    return o.capacity > 0 ? fmt::to_string(o.capacity) : std::string("none");
  };
  rows.push_back(choice_row<DropBy>(
      row("--drop", "BY",
          "which rows an expert keeps: position, the first tokens (default), or probability, those "
          "of the largest routing weights"),
      &Options::drop,
      {{name_of(DropBy::kPosition), DropBy::kPosition},
       {name_of(DropBy::kProbability), DropBy::kProbability}}));
  rows.back().set = [set = rows.back().set](Options& o, std::string_view name,
                                            std::string_view value) {
    set(o, name, value);
    o.drop_given = true;
  };
  rows.push_back(flag_row(
      row("--per-sequence", "", "count each sequence of --sequence-length tokens by itself"),
      &Options::per_sequence));
  rows.push_back(flag_row(
      row("--pad", "", "let every expert multiply as many rows as it could have; no bit changes"),
      &Options::pad));
  return rows;
}

std::vector<OptionRow> where_rows() {
  const auto row = [](std::string_view name, std::string_view value, std::string help,
                      unsigned commands = kEveryCommand) {
    return OptionRow{name, value, kWhereGroup, commands, std::move(help)};
  };
  return {
      swept_number_row(
          row("--tp", "N",
              "ranks that share a dense layer; default: the largest divisor of the world that is "
              "at most --blocks, 1 for models with experts; bench takes several",
              kWithLayers),
          &Options::tp, &Sweep::tp, {1, kMaxRanks}, "auto"),
      swept_number_row(
          row("--ep", "N",
              "parts that the experts are cut into, each on world / N ranks; default: the largest "
              "divisor of the world that is at most their number, or more where --expert-blocks "
              "wouldn't do for the ranks of a part; bench takes several",
              kWithLayers),
          &Options::ep, &Sweep::ep, {1, kMaxRanks}, "auto"),
      swept_number_row(
          row("--dp", "N",
              "groups that share the tokens: a point takes N times the ranks of its --tp and "
              "--ep (1); takes several",
              bit(Command::kBench)),
          &Options::dp, &Sweep::dp, {1, kMaxRanks}, "auto"),
      choice_row<DeviceKind>(
          row("--device", "KIND", "cpu, cuda, or auto: cuda where every rank sees a GPU",
              kWithTokens | kMachine),
          &Options::device,
          {{"auto", DeviceKind::kAuto}, {"cpu", DeviceKind::kCpu}, {"cuda", DeviceKind::kCuda}}),
      choice_row<CommKind>(
          row("--comm", "KIND",
              "what carries tensors: mpi, nccl, or auto: between GPUs nccl where every rank has "
              "one "
              "of its own, between CPUs memory that the ranks of a node share, and mpi beyond",
              kWithTokens | kMachine),
          &Options::comm,
          {{"auto", CommKind::kAuto}, {"mpi", CommKind::kMpi}, {"nccl", CommKind::kNccl}}),
      swept_choice_row<Reduce>(
          row("--reduce", "HOW",
              "exact: the same bits for every number of ranks (default); fast: the libraries' own "
              "sums; bench takes both",
              kWithLayers),
          &Options::reduce, &Sweep::reduces, {{"exact", Reduce::kExact}, {"fast", Reduce::kFast}}),
      number_row(
          row("--blocks", "V", "canonical blocks of the intermediate width (8)", kWithLayers),
          &Options::blocks, {1, kMaxBlocks}),
      number_row(row("--expert-blocks", "V",
                     "blocks of an expert's width; default: the largest power of two up to 8 that "
                     "leaves them 192 wide",
                     kWithLayers),
                 &Options::expert_blocks, {1, kMaxBlocks}, "auto"),
      swept_choice_row<Dispatcher>(
          row("--dispatcher", "HOW",
              "how rows get to their experts: alltoall (default), or allgather: all rows to all "
              "ranks; bench takes both",
              kWithLayers),
          &Options::dispatcher, &Sweep::dispatchers,
          {{"alltoall", Dispatcher::kAllToAll}, {"allgather", Dispatcher::kAllGather}}),
      [&] {
        OptionRow routing =
            row("--routing", "HOW",
                "where tokens go: router (default); uniform; zipf:S, the experts' weights being "
                "1/rank^S; one-hot, all to the same; file, as --input's topk_ids say",
                bit(Command::kBench));
        routing.set = [](Options& o, std::string_view name, std::string_view value) {
          o.routing = parse_routing(name, value);
        };
        routing.show = [](const Options& o) { return text_of(o.routing); };
        return routing;
      }(),
      number_row(row("--steps", "N", "updates of the correction bias (300)", kBalance),
                 &Options::steps, {1, kMaxSteps}),
      real_row(row("--rate", "U", "what an update moves each expert's bias by (0.001)", kBalance),
               &Options::rate, 1e-9, 1),
      [&] {
        OptionRow skew =
            real_row(row("--skew", "S",
                         "what seeded tokens have in common: 0 (nothing) to 0.99 (0.5)", kBalance),
                     &Options::skew, 0, 0.99);
        skew.set = [set = skew.set](Options& o, std::string_view name, std::string_view value) {
          set(o, name, value);
          o.skew_given = true;
        };
        return skew;
      }(),
      number_row(row("--threads", "N", "threads of a rank; default: OpenMP's choice",
                     kWithTokens | kMachine),
                 &Options::threads, {0, 4096}, "auto"),
      [&] {
        OptionRow seed = row("--seed", "S", "of seeded weights and tokens (0)", kOfLayers);
        seed.set = [](Options& o, std::string_view name, std::string_view value) {
          o.seed = parse_number<std::uint64_t>(name, value, value, 0, UINT64_MAX);
          o.seed_given = true;
        };
        seed.show = [](const Options& o) { return fmt::to_string(o.seed); };
        return seed;
      }(),
      [&] {
        OptionRow timeout = row("--timeout", "S", "seconds without progress that end the job (300)",
                                kEveryCommand | kMachine);
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
  constexpr unsigned kTimes = kBench | kMachine;
  constexpr unsigned kAll = kEveryCommand | kMachine;
  constexpr unsigned kConverts = bit(Command::kConvert);
  constexpr unsigned kFolder = bit(Command::kMakeModel) | kConverts;
  return {
      text_row(row("--output", "PATH",
                   "run: a safetensors file for y; make-model, convert: a new directory",
                   bit(Command::kRun) | kFolder),
               &Options::output),
      text_row(row("--json", "FILE", "the table, every option and version as JSON", kAll),
               &Options::json),
      text_row(row("--csv", "FILE", "the table as CSV", kAll), &Options::csv),
      number_row(row("--shards", "N", "files that the weights are spread over (1)", kFolder),
                 &Options::shards, {1, 99999}),
      flag_row(row("--measure", "",
                   "also time converting beside a plain copy, and reading quantised weights beside "
                   "plain ones",
                   kConverts),
               &Options::measure),
      choice_row<Scaling>(
          row("--scaling", "HOW",
              "strong: --tokens in all (default); weak: --tokens for each rank of a point", kBench),
          &Options::scaling, {{"strong", Scaling::kStrong}, {"weak", Scaling::kWeak}}),
      number_row(row("--iterations", "N", "timed passes (20)", kTimes), &Options::iterations,
                 {1, kMaxCount}),
      number_row(row("--warmup", "N", "passes before that (3)", kTimes), &Options::warmup,
                 {0, kMaxCount}),
      flag_row(row("--hot", "",
                   "time one copy of the weights again and again, which caches may hold", kBench),
               &Options::hot),
      flag_row(row("--no-check", "", "don't verify what is timed", kBench), &Options::check, false),
      flag_row(row("--quiet", "", "print the closing lines only", kAll), &Options::quiet),
      flag_row(row("--verbose", "", "also print where each rank runs, and every column", kAll),
               &Options::verbose),
      flag_row(row("--dry-run", "", "print the plan, who owns what, and compute nothing",
                   kEveryCommand & ~kBalance),
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
    for (auto more : {capacity_rows_of_table(), where_rows(), output_rows()}) {
      rows.insert(rows.end(), more.begin(), more.end());
    }
    return rows;
  }();
  return table;
}

}  // namespace gatefold
