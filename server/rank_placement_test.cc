#include "server/rank_placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <fstream>

namespace dlo {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<int> ThreadsOf(const std::vector<RankPlacement>& placement) {
  std::vector<int> threads;
  for (const RankPlacement& place : placement) threads.push_back(place.threads);
  return threads;
}

TEST(RankPlacementTest, RanksShareTheCoresEvenlyAndHaveAtLeastOneThread) {
  const HostCores eight = {{{0, 1, 2, 3, 4, 5, 6, 7}}};
  EXPECT_THAT(ThreadsOf(*PlaceRanks({.num_ranks = 4}, eight)), ElementsAre(2, 2, 2, 2));
  EXPECT_THAT(ThreadsOf(*PlaceRanks({.num_ranks = 3}, eight)), ElementsAre(2, 2, 2));
  EXPECT_THAT(ThreadsOf(*PlaceRanks({.num_ranks = 2}, {{{0}}})), ElementsAre(1, 1));
  // One rank is torch's own choice, as is what the user set by OMP_NUM_THREADS.
  EXPECT_THAT(ThreadsOf(*PlaceRanks({.num_ranks = 1}, eight)), ElementsAre(0));
  EXPECT_THAT(ThreadsOf(*PlaceRanks({.num_ranks = 2, .threads_set = true}, eight)),
              ElementsAre(0, 0));
  EXPECT_THAT(ThreadsOf(*PlaceRanks({.num_ranks = 2, .threads = 3, .threads_set = true}, eight)),
              ElementsAre(3, 3));
}

TEST(RankPlacementTest, OnSeveralNumaNodesEachRankStaysOnOne) {
  const HostCores two = {{{0, 1, 2, 3}, {4, 5}}};
  const auto four = *PlaceRanks({.num_ranks = 4}, two);
  EXPECT_THAT(four[0].cores, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(four[1].cores, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(four[2].cores, ElementsAre(4, 5));
  EXPECT_THAT(four[3].cores, ElementsAre(4, 5));
  EXPECT_THAT(ThreadsOf(four), ElementsAre(2, 2, 1, 1));
  EXPECT_THAT((*PlaceRanks({.num_ranks = 1}, two))[0].cores, IsEmpty());
  EXPECT_THAT((*PlaceRanks({.num_ranks = 2}, {{{0, 1}}}))[0].cores, IsEmpty());
}

TEST(RankPlacementTest, WithCudaEachRankSeesADeviceOfItsOwn) {
  const HostCores host = {{{0, 1}, {2, 3}}};
  const auto own = *PlaceRanks({.num_ranks = 2, .cuda = true}, host);
  EXPECT_THAT(own[1].environment, ElementsAre("CUDA_VISIBLE_DEVICES=1"));
  EXPECT_THAT(own[1].cores, IsEmpty());
  const auto chosen = *PlaceRanks({.num_ranks = 2, .cuda = true, .visible_devices = "5,3,1"}, host);
  EXPECT_THAT(chosen[0].environment, ElementsAre("CUDA_VISIBLE_DEVICES=5"));
  EXPECT_THAT(chosen[1].environment, ElementsAre("CUDA_VISIBLE_DEVICES=3"));
  EXPECT_THAT((*PlaceRanks({.num_ranks = 1, .cuda = true}, host))[0].environment, IsEmpty());
  EXPECT_THAT(
      PlaceRanks({.num_ranks = 2, .cuda = true, .visible_devices = "5"}, host).status().message(),
      HasSubstr("CUDA_VISIBLE_DEVICES is \"5\""));
}

TEST(RankPlacementTest, CoreListsAreParsedAndNonsenseIsSkipped) {
  EXPECT_THAT(ParseCoreList("0-3,8\n"), ElementsAre(0, 1, 2, 3, 8));
  EXPECT_THAT(ParseCoreList("5"), ElementsAre(5));
  EXPECT_THAT(ParseCoreList(""), IsEmpty());
  EXPECT_THAT(ParseCoreList("x,3-y,-,2"), ElementsAre(2));
}

TEST(RankPlacementTest, TheHostsNodesAreReadAndUnusableCoresLeftOut) {
  std::string pattern = (std::filesystem::temp_directory_path() / "nodes-XXXXXX").string();
  const std::filesystem::path root = mkdtemp(pattern.data());
  const HostCores plain = ReadHostCores(root);
  ASSERT_EQ(plain.nodes.size(), 1u);
  EXPECT_GE(plain.count(), 1);
  // The first usable core on one node, the others and one that does not exist on another.
  const std::vector<int>& usable = plain.nodes[0];
  std::ofstream(root / "online") << "0-1\n";
  for (const char* node : {"node0", "node1"}) std::filesystem::create_directory(root / node);
  std::ofstream(root / "node0/cpulist") << usable[0] << "\n";
  {
    std::ofstream rest(root / "node1/cpulist");
    for (size_t i = 1; i < usable.size(); ++i) rest << usable[i] << ",";
    rest << "65000\n";
  }
  const HostCores split = ReadHostCores(root);
  EXPECT_EQ(split.nodes.size(), usable.size() > 1 ? 2u : 1u);
  EXPECT_THAT(split.nodes[0], ElementsAre(usable[0]));
  EXPECT_EQ(split.count(), plain.count());
  std::filesystem::remove_all(root);
}

}  // namespace
}  // namespace dlo
