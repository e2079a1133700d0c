// What help says: every command's own options, and no others.
#include <gmock/gmock.h>

#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/launch/option_parsing.h"

namespace gatefold {
namespace {

using ::testing::HasSubstr;
using testing::parse;

TEST(Options, HelpAndVersionAreNoErrors) {
  const ParseResult version = parse({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_FALSE(version.options.has_value());
  EXPECT_THAT(version.text, ::testing::MatchesRegex("gatefold [0-9]+\\.[0-9]+\\.[0-9]+\n"));
  for (const char* flag : {"--help", "-h"}) {
    const ParseResult help = parse({flag});
    EXPECT_EQ(help.exit_code, 0);
    EXPECT_THAT(help.text, HasSubstr("make-model"));
  }
}

TEST(Options, ACommandsHelpListsItsOwnOptionsOnly) {
  const std::set<std::string> all = {"--dtype", "--timeout", "--json",
                                     "--csv",   "--quiet",   "--verbose"};
  const std::set<std::string> of_layers = {"--config", "--set", "--layers", "--seed"};
  const std::set<std::string> with_tokens = {"--model",  "--tokens",          "--input",
                                             "--device", "--sequence-length", "--token-split",
                                             "--comm",   "--threads"};
  const std::set<std::string> with_outputs = {"--dry-run",  "--tp",
                                              "--ep",       "--blocks",
                                              "--reduce",   "--expert-blocks",
                                              "--capacity", "--capacity-factor",
                                              "--drop",     "--per-sequence",
                                              "--pad",      "--dispatcher"};
  struct Own {
    std::string command;
    std::vector<const std::set<std::string>*> common;
    std::set<std::string> options;
  };
  const Own commands[] = {
      {"verify", {&of_layers, &with_tokens, &with_outputs}, {}},
      {"run", {&of_layers, &with_tokens, &with_outputs}, {"--ablate", "--output"}},
      {"bench",
       {&of_layers, &with_tokens, &with_outputs},
       {"--dp", "--scaling", "--iterations", "--warmup", "--hot", "--no-check", "--machine",
        "--routing"}},
      {"inspect", {&of_layers, &with_tokens, &with_outputs}, {}},
      {"balance", {&of_layers, &with_tokens}, {"--steps", "--rate", "--skew"}},
      {"convert", {}, {"--model", "--output", "--shards", "--layout", "--measure", "--dry-run"}},
      {"make-model",
       {&of_layers},
       {"--output", "--shards", "--from-dense", "--experts", "--split", "--copy", "--layout",
        "--dry-run"}},
  };
  for (const Own& own : commands) {
    std::set<std::string> expected = all;
    expected.insert(own.options.begin(), own.options.end());
    for (const auto* common : own.common) expected.insert(common->begin(), common->end());
    const ParseResult help = parse({own.command, "--help"});
    EXPECT_EQ(help.exit_code, 0);
    std::set<std::string> listed;
    std::istringstream lines(help.text);
    for (std::string line, name; std::getline(lines, line);) {
      if (line.starts_with("  --") && std::istringstream(line) >> name) listed.insert(name);
    }
    EXPECT_EQ(listed, expected) << own.command;
  }
  EXPECT_THAT(parse({"run", "--help"}).text, HasSubstr("--ablate LIST"));
}

}  // namespace
}  // namespace gatefold
