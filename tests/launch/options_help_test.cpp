// What help says: every command's own options, and no others.
#include <gmock/gmock.h>

#include <set>
#include <sstream>
#include <string>

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
  const std::set<std::string> all = {"--dtype", "--timeout", "--json",   "--csv",
                                     "--quiet", "--verbose", "--dry-run"};
  const std::set<std::string> of_layers = {"--config", "--set", "--layers", "--seed"};
  const std::set<std::string> with_tokens = {"--model",
                                             "--tokens",
                                             "--input",
                                             "--sequence-length",
                                             "--token-split",
                                             "--tp",
                                             "--ep",
                                             "--device",
                                             "--comm",
                                             "--blocks",
                                             "--expert-blocks",
                                             "--dispatcher",
                                             "--threads",
                                             "--capacity",
                                             "--capacity-factor",
                                             "--drop",
                                             "--per-sequence",
                                             "--pad"};
  struct Own {
    std::string command;
    bool takes_tokens;
    bool knows_layers;
    std::set<std::string> options;
  };
  const Own commands[] = {
      {"verify", true, true, {"--reduce"}},
      {"run", true, true, {"--reduce", "--ablate", "--output"}},
      {"bench",
       true,
       true,
       {"--reduce", "--dp", "--scaling", "--iterations", "--warmup", "--hot", "--no-check",
        "--machine", "--routing"}},
      {"inspect", true, true, {"--reduce"}},
      {"convert", false, false, {"--model", "--output", "--shards", "--layout", "--measure"}},
      {"make-model",
       false,
       true,
       {"--output", "--shards", "--from-dense", "--experts", "--split", "--copy", "--layout"}},
  };
  for (const Own& own : commands) {
    std::set<std::string> expected = all;
    expected.insert(own.options.begin(), own.options.end());
    if (own.knows_layers) expected.insert(of_layers.begin(), of_layers.end());
    if (own.takes_tokens) expected.insert(with_tokens.begin(), with_tokens.end());
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
