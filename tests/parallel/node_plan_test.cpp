// Which rows cross between nodes and where they then lie, for any assignment of ranks to nodes.
#include "parallel/node_plan.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>

namespace gatefold {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// Of names of nodes, one a rank: "AAB" is two ranks on A and one on B.
NodeMap map_of(const std::string& names) {
  std::vector<int> lowest;
  for (const char name : names) lowest.push_back(static_cast<int>(names.find(name)));
  return NodeMap(lowest);
}

const std::vector<std::string>& assignments() {
  static const std::vector<std::string> all = {
      "A",    "AA",     "AAB",    "ABB",    "ABA",      "AABB",     "ABAB",    "ABBB",
      "ABCD", "AAABBC", "ABBAAB", "AABBBB", "ABABABAC", "AAAABBBB", "BAABCCCA"};
  return all;
}

/// k different experts for each token.
Choices random_choices(std::int64_t tokens, std::int64_t experts, std::int64_t k, unsigned seed) {
  std::mt19937 random(seed);
  Choices choices;
  choices.resize(tokens, k);
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::set<std::int32_t> ids;
    while (std::ssize(ids) < k) {
      ids.insert(static_cast<std::int32_t>(random() % static_cast<unsigned>(experts)));
    }
    std::ranges::copy(ids, choices.ids.begin() + t * k);
  }
  return choices;
}

TEST(NodeMap, NumbersNodesByTheirLowestRank) {
  const NodeMap map = map_of("BABCB");
  EXPECT_EQ(map.nodes(), 3);
  EXPECT_THAT(map.members(0), ElementsAre(0, 2, 4));
  EXPECT_THAT(map.members(1), ElementsAre(1));
  EXPECT_EQ(map.node(3), 2);
  EXPECT_TRUE(map.neighbours(0, 4));
  EXPECT_FALSE(map.neighbours(0, 1));
}

TEST(NodeMap, SourcesOfANodeGoToDifferentRanksOfAnother) {
  const NodeMap map = map_of("AABBAAABB");
  EXPECT_EQ(map.gateway(0, 1), 2);
  EXPECT_EQ(map.gateway(1, 1), 3);
  EXPECT_EQ(map.gateway(4, 1), 7);
  EXPECT_EQ(map.gateway(5, 1), 8);
  EXPECT_EQ(map.gateway(6, 1), 2);  // the fifth of A: round again
  EXPECT_EQ(map.gateway(8, 0), 5);
}

/// Which of a home's tokens another node wants, by looking at each of its ranks.
std::vector<std::int32_t> wanted(const NodeMap& map, int node, const ExpertPlacement& placement,
                                 int etp, const Choices& tokens, bool all) {
  std::vector<std::int32_t> rows;
  for (std::int64_t t = 0; t < tokens.rows; ++t) {
    bool here = all;
    for (const int rank : map.members(node)) {
      for (const std::int32_t id : tokens.ids_of(t)) {
        here = here || placement.owned(rank / etp).contains(id);
      }
    }
    if (here) rows.push_back(static_cast<std::int32_t>(t));
  }
  return rows;
}

TEST(NodeDispatch, ARowGoesOnceToEachOtherNodeThatHasAnyOfItsExperts) {
  for (const std::string& names : assignments()) {
    const NodeMap map = map_of(names);
    for (int etp = 1; etp <= map.ranks(); ++etp) {
      if (map.ranks() % etp != 0) continue;
      for (const std::int64_t experts : {3, 8}) {  // of 3, ranks may own none
        const ExpertPlacement placement{experts, map.ranks() / etp};
        const Choices tokens = random_choices(23, experts, 2, 7);
        for (int home = 0; home < map.ranks(); ++home) {
          for (const bool all : {false, true}) {
            NodeDispatch dispatch;
            dispatch.make(map, home, placement, etp, tokens, all);
            for (int node = 0; node < map.nodes(); ++node) {
              const auto rows = std::span(dispatch.plan.rows)
                                    .subspan(as_size(dispatch.plan.begin[as_size(node)]),
                                             as_size(dispatch.plan.count(node)));
              const auto expected = node == map.node(home)
                                        ? std::vector<std::int32_t>()
                                        : wanted(map, node, placement, etp, tokens, all);
              EXPECT_THAT(rows, ElementsAreArray(expected))
                  << names << ", etp " << etp << ", home " << home << ", node " << node;
            }
          }
        }
      }
    }
  }
}

TEST(NodeDispatch, NoTokensGoNowhere) {
  NodeDispatch dispatch;
  dispatch.make(map_of("AAB"), 0, {8, 3}, 1, random_choices(0, 8, 2, 1), true);
  EXPECT_THAT(dispatch.plan.begin, ElementsAre(0, 0, 0));
}

TEST(HeldRows, AreWhereTheirHoldersPutThem) {
  for (const std::string& names : assignments()) {
    const NodeMap map = map_of(names);
    std::vector<std::int64_t> own_rows;
    for (int rank = 0; rank < map.ranks(); ++rank) own_rows.push_back((rank * 5 + 2) % 7);
    for (int node = 0; node < map.nodes(); ++node) {
      // Every holder's memory, written as a rank does it: own rows, then what comes, by source.
      std::vector<std::vector<std::string>> memory(own_rows.size());
      std::vector<std::int64_t> came(own_rows.size());
      const auto put = [&](int holder, int source, std::int64_t count) {
        for (std::int64_t i = 0; i < count; ++i) {
          memory[as_size(holder)].push_back(std::to_string(source) + "." + std::to_string(i));
        }
      };
      for (const int rank : map.members(node)) put(rank, rank, own_rows[as_size(rank)]);
      for (int source = 0; source < map.ranks(); ++source) {
        if (map.node(source) == node) continue;
        came[as_size(source)] = own_rows[as_size(source)] / 2;
        put(map.gateway(source, node), source, came[as_size(source)]);
      }
      const std::vector<HeldRows> held = held_rows(map, node, own_rows, came);
      ASSERT_EQ(held.size(), own_rows.size());
      for (int source = 0; source < map.ranks(); ++source) {
        const HeldRows& rows = held[as_size(source)];
        const bool near = map.node(source) == node;
        EXPECT_EQ(map.node(rows.holder), node);
        EXPECT_EQ(rows.count, (near ? own_rows : came)[as_size(source)]);
        for (std::int64_t i = 0; i < rows.count; ++i) {
          EXPECT_EQ(memory[as_size(rows.holder)][as_size(rows.first + i)],
                    std::to_string(source) + "." + std::to_string(i))
              << names << ", node " << node;
        }
      }
    }
  }
}

}  // namespace
}  // namespace gatefold
