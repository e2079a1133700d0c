#include "launch/options.h"

#include <gmock/gmock.h>

#include <cstdint>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/launch/option_parsing.h"

namespace gatefold {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Pair;
using testing::parse;

Options options_of(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"verify", "--model", "m"});
  const ParseResult result = parse(arguments);
  EXPECT_EQ(result.exit_code, 0) << result.text;
  return result.options.value_or(Options{});
}

struct BadLine {
  std::vector<std::string> arguments;
  std::string says;
};

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += word + ' ';
  return text;
}

/// Code 64, one line, `problem (why); what to do`.
void expect_refused(const BadLine& bad) {
  SCOPED_TRACE(joined(bad.arguments));
  const ParseResult result = parse(bad.arguments);
  EXPECT_EQ(result.exit_code, 64);
  EXPECT_FALSE(result.options.has_value());
  EXPECT_THAT(result.text, HasSubstr(bad.says));
  EXPECT_EQ(result.text.find('\n'), std::string::npos) << result.text;
  EXPECT_THAT(result.text, HasSubstr("("));
  EXPECT_THAT(result.text, HasSubstr("; "));
}

TEST(Options, ABadValueOfAnyOptionIsRefusedWithTheReason) {
  const std::vector<BadLine> lines = {
      {{"--tp", "4x"}, "'x' is left over"},
      {{"--tp", "four"}, "not a whole number"},
      {{"--tp", "1.5"}, "'.5' is left over"},
      {{"--tp", "0x4"}, "'x4' is left over"},
      {{"--tp", " 4"}, "not a whole number"},
      {{"--tp", "+4"}, "not a whole number"},
      {{"--tp", "0"}, "the least is 1"},
      {{"--tp", "-1"}, "the least is 1"},
      {{"--tp", "99999999999999999999"}, "out of range"},
      {{"--tp", "4294967297"}, "out of range"},
      {{"--tp", ""}, "no value"},
      {{"--tp="}, "no value"},
      {{"--tp"}, "no value"},
      {{"--tp", "--seed", "3"}, "--tp has no value"},
      {{"--ep", "0"}, "the least is 1"},
      {{"--expert-blocks", "0"}, "the least is 1"},
      {{"--dispatcher", "allreduce"}, "valid: alltoall, allgather"},
      {{"--tokens", "0"}, "the least is 1"},
      {{"--tokens", "-5"}, "the least is 1"},
      {{"--tokens", "9223372036854775808"}, "out of range"},
      {{"--blocks", "0"}, "the least is 1"},
      {{"--threads", "-1"}, "the least is 0"},
      {{"--sequence-length", "0"}, "the least is 1"},
      {{"--sequence-length", "48"}, "doesn't divide 64 tokens"},
      {{"--seed", "-1"}, "the least is 0"},
      {{"--seed", "18446744073709551616"}, "out of range"},
      {{"--timeout", "0"}, "out of range"},
      {{"--timeout", "-3"}, "out of range"},
      {{"--timeout", "inf"}, "out of range"},
      {{"--timeout", "nan"}, "NaN"},
      {{"--timeout", "1e999"}, "out of range"},
      {{"--timeout", "5s"}, "'s' is left over"},
      {{"--dtype", "fp8"}, "valid: f32, bf16, f16"},
      {{"--dtype", "f8_e4m3"}, "--dtype 'f8_e4m3' is how files hold weights"},
      {{"--dtype", "BF16"}, "valid: f32, bf16, f16"},
      {{"--device", "gpu"}, "valid: auto, cpu, cuda"},
      {{"--comm", "tcp"}, "valid: auto, mpi, nccl"},
      {{"--reduce", "exactly"}, "valid: exact, fast"},
      {{"--layers", "3-0"}, "runs backwards"},
      {{"--layers", "0-3,2"}, "names 2 twice"},
      {{"--layers", "0-3,"}, "empty entry"},
      {{"--layers", "a"}, "not a whole number"},
      {{"--layers", "1-2-3"}, "'-3' is left over"},
      {{"--layers", "-1"}, "the least is 0"},
      {{"--layers", "5-"}, "a number is missing"},
      {{"--layers", "0-99999999999"}, "out of range"},
      {{"--token-split", "5,,1"}, "empty entry"},
      {{"--token-split", "5,-2"}, "the least is 0"},
      {{"--token-split", "5;2"}, "';2' is left over"},
      {{"--set", "hidden_size"}, "no key and value"},
      {{"--set", "=4"}, "no key and value"},
      {{"--set", "a=1", "--set", "a=2"}, "a second time"},
  };
  for (BadLine line : lines) {
    line.arguments.insert(line.arguments.begin(), {"verify", "--model", "m"});
    expect_refused(line);
  }
}

TEST(Options, EveryNumberGoesFromItsLeastToItsMost) {
  struct Bounds {
    std::vector<std::string> line;
    std::string below, least, most, above;
  };
  const std::vector<std::string> make = {"make-model", "--config", "c", "--output", "d"};
  const auto with = [](std::vector<std::string> line, const std::string& option) {
    line.push_back(option);
    return line;
  };
  const auto verify = [&](const std::string& option) {
    return with({"verify", "--config", "c"}, option);
  };
  const auto bench = [&](const std::string& option) {
    return with({"bench", "--config", "c"}, option);
  };
  const std::vector<Bounds> table = {
      {verify("--tokens"), "0", "1", "2147483648", "2147483649"},
      {verify("--sequence-length"), "0", "1", "64", "2147483649"},
      {verify("--token-split"), "-1", "0", "2147483648", "2147483649"},
      {verify("--layers"), "-1", "0", "99999", "100000"},
      {verify("--tp"), "0", "1", "1048576", "1048577"},
      {verify("--blocks"), "0", "1", "65536", "65537"},
      {verify("--threads"), "-1", "0", "4096", "4097"},
      {verify("--seed"), "-1", "0", "18446744073709551615", "18446744073709551616"},
      {verify("--timeout"), "0.0009", "0.001", "1e7", "10000001"},
      {verify("--capacity-factor"), "0", "1e-9", "1e9", "1000000001"},
      {verify("--capacity"), "0", "1", "2147483648", "2147483649"},
      {{"balance", "--steps"}, "0", "1", "100000", "100001"},
      {{"balance", "--rate"}, "0", "1e-9", "1", "1.001"},
      {{"balance", "--skew"}, "-0.01", "0", "0.99", "0.991"},
      {with({"run", "--config", "c"}, "--ablate"), "-1", "0", "1099511627775", "1099511627776"},
      {bench("--iterations"), "0", "1", "1000000", "1000001"},
      {bench("--warmup"), "-1", "0", "1000000", "1000001"},
      {with(make, "--shards"), "0", "1", "99999", "100000"},
      {{"make-model", "--from-dense", "d", "--copy", "--output", "o", "--experts"},
       "0",
       "1",
       "2048",
       "2049"},
  };
  for (const Bounds& row : table) {
    expect_refused({with(row.line, row.below), "the least is "});
    for (const std::string& value : {row.least, row.most}) {
      EXPECT_TRUE(parse(with(row.line, value)).options) << joined(row.line) << value;
    }
    expect_refused({with(row.line, row.above), "is out of range"});
  }
}

TEST(Options, ALineThatMakesNoSenseAsAWholeIsRefused) {
  const std::vector<BadLine> lines = {
      {{}, "no command"},
      {{"--model", "m"}, "the command belongs"},
      {{"--model", "m", "verify"}, "the command belongs"},
      {{"verfy"}, "did you mean verify?"},
      {{"vxrxfy"}, "did you mean verify?"},
      {{"vxxxfy"}, "choose one"},
      {{"frobnicate"}, "choose one"},
      {{"verify"}, "no model"},
      {{"verify", "--model", "m", "--config", "c"}, "both given"},
      {{"verify", "--model", "m", "--tokens", "64", "--input", "f"}, "both given"},
      {{"verify", "--model", "m", "--tp", "1", "--tp", "1"}, "given 2 times"},
      {{"verify", "--model", "m", "--quiet", "--quiet"}, "given 2 times"},
      {{"verify", "--model", "m", "--quiet", "--verbose"}, "contradict"},
      {{"verify", "--model", "m", "--quiet=1"}, "takes no value"},
      {{"verify", "--model", "m", "--device", "cpu", "--comm", "nccl"}, "both given"},
      {{"verify", "--model", "m", "--toke", "5"}, "did you mean --tokens?"},
      {{"verify", "--model", "m", "--sequence", "5"}, "did you mean --sequence-length?"},
      {{"verify", "--model", "m", "--dtpye=f32"}, "did you mean --dtype?"},
      {{"verify", "--model", "m", "-tp", "5"}, "did you mean --tp?"},
      {{"verify", "--model", "m", "--frobnicate"}, "unknown option"},
      {{"verify", "--model", "m", "n"}, "'n' is not expected"},
      {{"verify", "run", "--model", "m"}, "'run' is not expected"},
      {{"verify", "--model", "m", "--", "--tp", "3"}, "'--' is not expected"},
      {{"verify", "--model", "m", "++"}, "'++' is not expected"},
      {{"run", "--model", "m", "--ablate", "3,5,3"}, "names 3 twice"},
      {{"make-model", "--output", "d"}, "no config"},
      {{"make-model", "--config", "c"}, "no output"},
      {{"convert", "--output", "d"}, "no model"},
      {{"convert", "--model", "d"}, "no output"},
      {{"make-model", "--from-dense", "d", "--experts", "8", "--split"}, "no output"},
      {{"make-model", "--from-dense", "d", "--config", "c"}, "both given"},
      {{"make-model", "--from-dense", "d", "--split"}, "without --experts"},
      {{"make-model", "--from-dense", "d", "--experts", "8"}, "neither --split nor --copy"},
      {{"make-model", "--from-dense", "d", "--experts", "8", "--split", "--copy"},
       "--split and --copy"},
      {{"make-model", "--config", "c", "--experts", "8"}, "--experts without --from-dense"},
      {{"make-model", "--config", "c", "--copy"}, "--copy without --from-dense"},
      {{"make-model", "--from-dense", "d", "--experts", "8", "--copy", "--seed", "0", "--output",
        "o"},
       "--seed and --from-dense"},
      {{"make-model", "--config", "c", "--output", "o", "--layout", "S3"},
       "valid: per-expert, stacked, stacked-transposed, stacked-alternating, fused"},
  };
  for (const BadLine& line : lines) expect_refused(line);
}

TEST(Options, AnOptionOfAnotherCommandIsRefusedByName) {
  const std::vector<BadLine> lines = {
      {{"verify", "--model", "m", "--hot"}, "verify does not take --hot"},
      {{"run", "--model", "m", "--iterations", "3"}, "run does not take --iterations"},
      {{"inspect", "--model", "m", "--warmup", "3"}, "inspect does not take --warmup"},
      {{"run", "--model", "m", "--no-check"}, "run does not take --no-check"},
      {{"bench", "--model", "m", "--ablate", "3"}, "bench does not take --ablate"},
      {{"bench", "--model", "m", "--output", "f"}, "bench does not take --output"},
      {{"run", "--model", "m", "--shards", "3"}, "run does not take --shards"},
      {{"verify", "--model", "m", "--from-dense", "d"}, "verify does not take --from-dense"},
      {{"make-model", "--model", "m", "--output", "d"}, "make-model does not take --model"},
      {{"make-model", "--config", "c", "--output", "d", "--tokens", "5"},
       "make-model does not take --tokens"},
      {{"make-model", "--config", "c", "--output", "d", "--reduce", "fast"},
       "make-model does not take --reduce"},
      {{"make-model", "--config", "c", "--output", "d", "--tp", "1"},
       "make-model does not take --tp"},
      {{"make-model", "--config", "c", "--output", "d", "--blocks", "5"},
       "make-model does not take --blocks"},
      {{"make-model", "--config", "c", "--output", "d", "--device", "cpu"},
       "make-model does not take --device"},
      {{"verify", "--model", "m", "--dp", "2"}, "verify does not take --dp"},
      {{"inspect", "--model", "m", "--scaling", "weak"}, "inspect does not take --scaling"},
      {{"verify", "--model", "m", "--skew", "0.1"}, "verify does not take --skew"},
      {{"bench", "--model", "m", "--rate", "0.1"}, "bench does not take --rate"},
      {{"balance", "--reduce", "exact"}, "balance does not take --reduce"},
      {{"balance", "--dispatcher", "alltoall"}, "balance does not take --dispatcher"},
      {{"balance", "--capacity", "5"}, "balance does not take --capacity"},
      {{"balance", "--output", "f"}, "balance does not take --output"},
  };
  for (const BadLine& line : lines) expect_refused(line);
}

TEST(Options, AMessageStaysOneLineWhateverWasTyped) {
  expect_refused({{"verify", "--model", "m", "--tp", "1\n2"}, "--tp"});
  expect_refused({{"verify", "--model", "m", "--x\ny"}, "--x?y"});
  const ParseResult result = parse({"verify", "--model", "m", "--tp", std::string(100000, '9')});
  EXPECT_LT(result.text.size(), 1000U);
}

TEST(Options, EveryOptionArrives) {
  std::istringstream words(
      "run --config c.json --set hidden_size=8 --set a=b=c --layers 7,0-3 --tokens 6 "
      "--sequence-length 3 --token-split=5,1 --dtype f16 --ablate 275,300 --tp 4 --ep 1 "
      "--expert-blocks 2 --dispatcher allgather --device cpu --comm mpi --reduce fast --blocks=16 "
      "--threads 2 --seed 18446744073709551615 --timeout 1.5 --output y --json j --csv c "
      "--verbose --dry-run");
  const ParseResult result =
      parse({std::istream_iterator<std::string>(words), std::istream_iterator<std::string>()});
  ASSERT_TRUE(result.options) << result.text;
  const Options& o = *result.options;
  EXPECT_EQ(o.command, Command::kRun);
  EXPECT_EQ(o.config, "c.json");
  EXPECT_THAT(o.set, ElementsAre(Pair("hidden_size", "8"), Pair("a", "b=c")));
  EXPECT_THAT(o.layers, ElementsAre(7, 0, 1, 2, 3));
  EXPECT_EQ(o.tokens, 6);
  EXPECT_TRUE(o.tokens_given);
  EXPECT_EQ(o.sequence_length, 3);
  EXPECT_THAT(o.token_split, ElementsAre(5, 1));
  EXPECT_EQ(o.dtype, DType::kF16);
  EXPECT_THAT(o.ablate, ElementsAre(275, 300));
  EXPECT_EQ(o.tp, 4);
  EXPECT_EQ(o.device, DeviceKind::kCpu);
  EXPECT_EQ(o.comm, CommKind::kMpi);
  EXPECT_EQ(o.reduce, Reduce::kFast);
  EXPECT_EQ(o.blocks, 16);
  EXPECT_EQ(o.threads, 2);
  EXPECT_EQ(o.seed, UINT64_MAX);
  EXPECT_EQ(o.timeout, 1.5);
  EXPECT_THAT(
      o.echo(),
      ElementsAre(Pair("command", "run"), Pair("model", ""), Pair("config", "c.json"),
                  Pair("machine", "false"), Pair("from-dense", ""), Pair("experts", "none"),
                  Pair("split", "false"), Pair("copy", "false"), Pair("layout", "family"),
                  Pair("set", "hidden_size=8 a=b=c"), Pair("layers", "7,0-3"), Pair("tokens", "6"),
                  Pair("input", ""), Pair("sequence-length", "3"), Pair("token-split", "5,1"),
                  Pair("dtype", "f16"), Pair("ablate", "275,300"), Pair("capacity-factor", "none"),
                  Pair("capacity", "none"), Pair("drop", "position"), Pair("per-sequence", "false"),
                  Pair("pad", "false"), Pair("tp", "4"), Pair("ep", "1"), Pair("dp", "auto"),
                  Pair("device", "cpu"), Pair("comm", "mpi"), Pair("reduce", "fast"),
                  Pair("blocks", "16"), Pair("expert-blocks", "2"), Pair("dispatcher", "allgather"),
                  Pair("routing", "router"), Pair("steps", "300"), Pair("rate", "0.001"),
                  Pair("skew", "0.5"), Pair("threads", "2"), Pair("seed", "18446744073709551615"),
                  Pair("timeout", "1.5"), Pair("output", "y"), Pair("json", "j"), Pair("csv", "c"),
                  Pair("shards", "1"), Pair("measure", "false"), Pair("scaling", "strong"),
                  Pair("iterations", "20"), Pair("warmup", "3"), Pair("hot", "false"),
                  Pair("no-check", "false"), Pair("quiet", "false"), Pair("verbose", "true"),
                  Pair("dry-run", "true")));
}

TEST(Options, WhatOnlyOneCommandKnowsArrivesThere) {
  const ParseResult bench = parse({"bench", "--config", "c", "--iterations", "5", "--warmup", "0",
                                   "--hot", "--no-check", "--quiet"});
  ASSERT_TRUE(bench.options) << bench.text;
  EXPECT_EQ(bench.options->iterations, 5);
  EXPECT_EQ(bench.options->warmup, 0);
  EXPECT_TRUE(bench.options->hot);
  EXPECT_FALSE(bench.options->check);
  EXPECT_TRUE(bench.options->quiet);
  const ParseResult made = parse({"make-model", "--config", "c", "--output", "d", "--shards", "3"});
  ASSERT_TRUE(made.options) << made.text;
  EXPECT_EQ(made.options->shards, 3);
  const ParseResult experts =
      parse({"make-model", "--from-dense", "m", "--experts", "8", "--split", "--output", "d"});
  ASSERT_TRUE(experts.options) << experts.text;
  EXPECT_EQ(experts.options->from_dense, "m");
  EXPECT_EQ(experts.options->experts, 8);
  EXPECT_TRUE(experts.options->split);
  EXPECT_FALSE(experts.options->copy);
  EXPECT_FALSE(experts.options->layout);
  const ParseResult stacked =
      parse({"make-model", "--config", "c", "--output", "d", "--layout", "fused"});
  ASSERT_TRUE(stacked.options) << stacked.text;
  EXPECT_EQ(stacked.options->layout, ExpertLayout::kStacked);
  const ParseResult converted = parse({"convert", "--model", "m", "--output", "d", "--shards", "2",
                                       "--measure", "--layout", "per-expert"});
  ASSERT_TRUE(converted.options) << converted.text;
  EXPECT_TRUE(converted.options->measure);
  EXPECT_EQ(converted.options->layout, ExpertLayout::kPerExpert);
  const ParseResult balanced = parse({"balance", "--steps", "7", "--rate", "0.5", "--skew", "0"});
  ASSERT_TRUE(balanced.options) << balanced.text;
  EXPECT_EQ(balanced.options->steps, 7);
  EXPECT_EQ(balanced.options->rate, 0.5);
  EXPECT_EQ(balanced.options->skew, 0);
  EXPECT_EQ(balanced.options->tokens, 2048) << "its own default";
  EXPECT_FALSE(balanced.options->tokens_given);
}

TEST(Options, BenchTakesListsAndRanges) {
  std::vector<std::string> line = {"bench", "--config", "a", "--config", "b"};
  for (const auto& [option, value] : {std::pair{"--tokens", "1,8-64:x2,100-121:+10"},
                                      {"--tp", "1,2"},
                                      {"--ep", "4"},
                                      {"--dp", "2,1"},
                                      {"--reduce", "fast,exact"},
                                      {"--dispatcher", "allgather,alltoall"},
                                      {"--dtype", "bf16,f32"},
                                      {"--scaling", "weak"}}) {
    line.insert(line.end(), {option, value});
  }
  const ParseResult result = parse(line);
  ASSERT_TRUE(result.options) << result.text;
  const Options& o = *result.options;
  EXPECT_THAT(o.sweep.configs, ElementsAre("a", "b"));
  EXPECT_THAT(o.sweep.tokens, ElementsAre(1, 8, 16, 32, 64, 100, 110, 120));
  EXPECT_THAT(o.sweep.tp, ElementsAre(1, 2));
  EXPECT_THAT(o.sweep.ep, ElementsAre(4));
  EXPECT_THAT(o.sweep.dp, ElementsAre(2, 1));
  EXPECT_THAT(o.sweep.reduces, ElementsAre(Reduce::kFast, Reduce::kExact));
  EXPECT_THAT(o.sweep.dispatchers, ElementsAre(Dispatcher::kAllGather, Dispatcher::kAllToAll));
  EXPECT_THAT(o.sweep.dtypes, ElementsAre(DType::kBf16, DType::kF32));
  EXPECT_EQ(o.scaling, Scaling::kWeak);
  EXPECT_THAT(o.echo(),
              IsSupersetOf({Pair("config", "a b"), Pair("tokens", "1,8,16,32,64,100,110,120"),
                            Pair("tp", "1,2"), Pair("reduce", "fast,exact"),
                            Pair("dispatcher", "allgather,alltoall"), Pair("dtype", "bf16,f32"),
                            Pair("scaling", "weak")}));
}

TEST(Options, ARangeThatIsNoneAndAListElsewhereAreRefused) {
  const std::vector<BadLine> lines = {
      {{"--tokens", "8-64"}, "how far apart its numbers are is missing"},
      {{"--tokens", "8-64:2"}, "after the colon comes x or +"},
      {{"--tokens", "8-64:"}, "after the colon comes x or +"},
      {{"--tokens", "8:x2"}, "there is no - between its ends"},
      {{"--tokens", "8..64"}, "there is no - between its ends"},
      {{"--tokens", "8-"}, "its end is missing"},
      {{"--tokens", "8-64:x1.5"},
       "'1.5' is not a whole number ('.5' is left over); give a number from 2"},
      {{"--tokens", "8-64:+-8"}, "'-8' is out of range (the least is 1)"},
      {{"--tokens", "8-64x2"}, "how far apart its numbers are is missing"},
      {{"--tokens", "1,4k"}, "--tokens '1,4k': '4k' is not a whole number ('k' is left over)"},
      {{"--dp", "2-4"}, "how far apart its numbers are is missing"},
      {{"--layers", "0:3"}, "'0:3' is no range of layers"},
      {{"--layers", "0..3"}, "'0..3' is no range of layers"},
      {{"--layers", "1,0-3:x2"}, "'0-3:x2' is no range of layers"},
      {{"--routing", "uniform,zipf:1"}, "is a list (all points of a benchmark have one routing)"},
      {{"--routing", "zipf:1,2"}, "'1,2' is not a number (',2' is left over)"},
      {{"--tokens", "64-8:x2"}, "it runs backwards"},
      {{"--tokens", "8-64:x1"}, "a factor of 1 never ends"},
      {{"--tokens", "8-64:x0"}, "a factor of 0 never ends"},
      {{"--tokens", "8-64:+0"}, "a step of 0 never ends"},
      {{"--tokens", "0-64:x2"}, "the least is 1"},
      {{"--tokens", "8-64:x"}, "a number is missing"},
      {{"--tokens", "8-64:x2:x2"}, "':x2' is left over"},
      {{"--tokens", "-8-64:x2"}, "the least is 1"},
      {{"--tokens", "8,8"}, "names 8 twice"},
      {{"--tokens", "8-64:x2,32"}, "names 32 twice"},
      {{"--tokens", "1-2147483648:+1"}, "more than 1000 numbers"},
      {{"--tokens", "1,,2"}, "empty entry"},
      {{"--tp", "1,two"}, "not a whole number"},
      {{"--reduce", "exact,exact"}, "names exact twice"},
      {{"--reduce", "exact,quick"}, "valid: exact, fast"},
      {{"--tokens", "1,2", "--token-split", "1"}, "--token-split with several points"},
      {{"--token-split", "1", "--scaling", "weak"}, "--token-split with --scaling weak"},
      {{"--input", "f", "--scaling", "weak"}, "--input with --scaling weak"},
      {{"--tokens", "48,50", "--sequence-length", "16"}, "doesn't divide 50 tokens"},
      {{"--scaling", "strong,weak"}, "valid: strong, weak"},
  };
  for (BadLine line : lines) {
    line.arguments.insert(line.arguments.begin(), {"bench", "--model", "m"});
    expect_refused(line);
  }
  for (const char* option : {"--tokens", "--tp", "--ep"}) {
    expect_refused({{"verify", "--model", "m", option, "1,2"}, "only bench takes several values"});
    expect_refused({{"verify", "--model", "m", option, "8-64:x2"}, "is left over"});
  }
  expect_refused({{"run", "--model", "m", "--reduce", "exact,fast"}, "only bench takes several"});
  expect_refused({{"verify", "--model", "m", "--dtype", "f32,f16"}, "only bench takes several"});
  expect_refused({{"verify", "--config", "c", "--config", "d"}, "given 2 times"});
}

TEST(Options, ARangeEndsBeforeItsNumbersOverflow) {
  const ParseResult result =
      parse({"bench", "--config", "c", "--tokens", "1-2147483648:x2147483647"});
  ASSERT_TRUE(result.options) << result.text;
  EXPECT_THAT(result.options->sweep.tokens, ElementsAre(1, 2147483647));
}

TEST(Options, DefaultsAreThoseOfTheManual) {
  const Options o = options_of({});
  EXPECT_EQ(o.tokens, 64);
  EXPECT_FALSE(o.tokens_given);
  EXPECT_EQ(o.tp, 0);
  EXPECT_EQ(o.blocks, 8);
  EXPECT_EQ(o.seed, 0U);
  EXPECT_EQ(o.timeout, 300);
  EXPECT_EQ(o.reduce, Reduce::kExact);
  EXPECT_FALSE(o.dtype.has_value());
  EXPECT_TRUE(o.layers.empty());
  EXPECT_TRUE(o.check);
}

TEST(Options, ValuesAreTakenAsTheyAre) {
  EXPECT_EQ(options_of({"--json", "[a,b]"}).json, "[a,b]");
  EXPECT_EQ(options_of({"--json=a=b"}).json, "a=b");
  EXPECT_EQ(options_of({"--json", "-"}).json, "-");
  EXPECT_THAT(options_of({"--set", "a="}).set, ElementsAre(Pair("a", "")));
}

TEST(Options, WhatOnlyTheModelOrTheMachineCanTellIsNotRefusedHere) {
  EXPECT_EQ(options_of({"--input", "f", "--sequence-length", "48"}).sequence_length, 48);
  EXPECT_EQ(options_of({"--comm", "nccl"}).comm, CommKind::kNccl);
}

TEST(Options, TheEchoNamesEveryOptionOnceInAFixedOrder) {
  const Options plain = options_of({});
  const Options other = options_of({"--layers", "0-3,7,8", "--set", "a=1", "--tp", "2", "--quiet"});
  const auto before = plain.echo();
  const auto after = other.echo();
  ASSERT_EQ(before.size(), after.size());
  std::set<std::string> names;
  std::vector<std::string> changed;
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(before[i].first, after[i].first);
    EXPECT_TRUE(names.insert(before[i].first).second) << before[i].first;
    if (before[i].second != after[i].second) {
      changed.push_back(after[i].first + "=" + after[i].second);
    }
  }
  EXPECT_THAT(changed, ElementsAre("set=a=1", "layers=0-3,7-8", "tp=2", "quiet=true"));
  for (const char* name : {"command", "model", "config", "tokens", "seed", "timeout", "shards",
                           "iterations", "warmup", "hot", "dry-run", "threads", "ablate"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
}

TEST(Options, TheMachineIsMeasuredWithoutAModel) {
  const ParseResult machine =
      parse({"bench", "--machine", "--iterations", "5", "--device", "cpu", "--comm", "mpi",
             "--threads", "1", "--warmup", "0", "--timeout", "9", "--quiet", "--json", "j"});
  ASSERT_TRUE(machine.options) << machine.text;
  EXPECT_TRUE(machine.options->machine);
  for (const auto& [name, value] : machine.options->echo()) {
    EXPECT_TRUE(name != "config" && name != "tokens" && name != "tp") << name;
  }
  for (const std::vector<std::string>& more :
       std::vector<std::vector<std::string>>{{"--model", "m"},
                                             {"--config", "c"},
                                             {"--tokens", "8"},
                                             {"--tp", "2"},
                                             {"--dtype", "f32"},
                                             {"--seed", "1"},
                                             {"--hot"},
                                             {"--no-check"},
                                             {"--dry-run"}}) {
    std::vector<std::string> arguments = {"bench", "--machine"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ParseResult refused = parse(arguments);
    EXPECT_EQ(refused.exit_code, 64);
    EXPECT_THAT(refused.text, HasSubstr("bench --machine does not take " + more.front()));
  }
  EXPECT_THAT(parse({"verify", "--machine"}).text, HasSubstr("verify does not take --machine"));
  EXPECT_THAT(parse({"bench"}).text, HasSubstr("no model"));
}

TEST(Options, ARoutingIsAKnownPatternWithAWholeNumber) {
  const auto routed = [](const std::string& value) {
    return parse({"bench", "--config", "c", "--input", "x", "--routing", value});
  };
  for (const char* good :
       {"router", "uniform", "zipf:0", "zipf:1.25", "zipf:16", "one-hot", "file"}) {
    const ParseResult result = routed(good);
    ASSERT_TRUE(result.options) << result.text;
    EXPECT_THAT(result.options->echo(), ::testing::Contains(Pair("routing", good)));
  }
  for (const char* bad : {"zipf", "zipf:", "zipf:-1", "zipf:17", "zipf:x", "zipf:1x", "zipf:nan",
                          "Uniform", "uniform:1", "file:f", "random"}) {
    const ParseResult result = routed(bad);
    EXPECT_EQ(result.exit_code, 64) << bad;
    EXPECT_THAT(result.text, HasSubstr(std::string("--routing '") + bad + "'"));
  }
  EXPECT_THAT(parse({"bench", "--config", "c", "--routing", "file"}).text,
              HasSubstr("--routing file without --input"));
  EXPECT_THAT(parse({"verify", "--config", "c", "--routing", "uniform"}).text,
              HasSubstr("verify does not take --routing"));
}

}  // namespace
}  // namespace gatefold
