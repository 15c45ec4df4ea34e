#include "base/topology.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dlo {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int> Values(const std::vector<Rank>& ranks) {
  std::vector<int> values;
  for (Rank rank : ranks) values.push_back(rank.value);
  return values;
}

std::vector<std::vector<int>> Values(const std::vector<std::vector<Rank>>& groups) {
  std::vector<std::vector<int>> values;
  for (const std::vector<Rank>& group : groups) values.push_back(Values(group));
  return values;
}

std::string Show(const ParallelConfig& c) {
  return absl::StrCat("dp ", c.dp, " tp ", c.tp, " ulysses ", c.ulysses, " ring ", c.ring, " cfg ",
                      c.cfg, " hsdp ", c.hsdp_shard);
}

// Calls `check` for every topology with degrees of 1 to 3.
void ForSmallTopologies(const std::function<void(const Topology&)>& check) {
  for (int dp = 1; dp <= 3; ++dp) {
    for (int tp = 1; tp <= 3; ++tp) {
      for (int ulysses = 1; ulysses <= 3; ++ulysses) {
        for (int ring = 1; ring <= 3; ++ring) {
          for (int cfg = 1; cfg <= 3; ++cfg) {
            const ParallelConfig config{
                .dp = dp, .tp = tp, .ulysses = ulysses, .ring = ring, .cfg = cfg};
            SCOPED_TRACE(Show(config));
            auto topology = Topology::Create(config);
            ASSERT_TRUE(topology.ok()) << topology.status();
            check(*topology);
          }
        }
      }
    }
  }
}

constexpr GroupKind kAllKinds[] = {GroupKind::kWorld,   GroupKind::kReplica, GroupKind::kTp,
                                   GroupKind::kUlysses, GroupKind::kRing,    GroupKind::kSp,
                                   GroupKind::kCfg,     GroupKind::kDp,      GroupKind::kHsdp};

int SizeOf(const ParallelConfig& c, GroupKind kind) {
  switch (kind) {
    case GroupKind::kWorld:
      return c.dp * c.cfg * c.ring * c.ulysses * c.tp;
    case GroupKind::kReplica:
      return c.cfg * c.ring * c.ulysses * c.tp;
    case GroupKind::kTp:
      return c.tp;
    case GroupKind::kUlysses:
      return c.ulysses;
    case GroupKind::kRing:
      return c.ring;
    case GroupKind::kSp:
      return c.ulysses * c.ring;
    case GroupKind::kCfg:
      return c.cfg;
    case GroupKind::kDp:
      return c.dp;
    case GroupKind::kHsdp:
      return c.hsdp_shard;
  }
  return 0;
}

TEST(Topology, RanksAndCoordinatesAreOneToOneInTheDocumentedOrder) {
  ForSmallTopologies([](const Topology& topology) {
    const ParallelConfig& c = topology.config();
    std::set<int> seen;
    for (int dp = 0; dp < c.dp; ++dp) {
      for (int cfg = 0; cfg < c.cfg; ++cfg) {
        for (int ring = 0; ring < c.ring; ++ring) {
          for (int ulysses = 0; ulysses < c.ulysses; ++ulysses) {
            for (int tp = 0; tp < c.tp; ++tp) {
              const RankCoordinates at{
                  .dp = dp, .cfg = cfg, .ring = ring, .ulysses = ulysses, .tp = tp};
              const Rank rank = topology.At(at);
              const int sp = ulysses + c.ulysses * ring;
              EXPECT_EQ(rank.value, tp + c.tp * (sp + c.ulysses * c.ring * (cfg + c.cfg * dp)));
              EXPECT_EQ(topology.Coordinates(rank), at);
              seen.insert(rank.value);
            }
          }
        }
      }
    }
    ASSERT_EQ(static_cast<int>(seen.size()), topology.world_size());
    EXPECT_EQ(*seen.begin(), 0);
    EXPECT_EQ(*seen.rbegin(), topology.world_size() - 1);
  });
}

TEST(Topology, GroupsOfEveryKindPartitionTheWorldIntoEqualParts) {
  ForSmallTopologies([](const Topology& topology) {
    for (GroupKind kind : kAllKinds) {
      std::vector<int> members;
      for (const std::vector<Rank>& group : topology.Groups(kind)) {
        EXPECT_EQ(static_cast<int>(group.size()), SizeOf(topology.config(), kind));
        EXPECT_TRUE(std::is_sorted(group.begin(), group.end()));
        for (Rank rank : group) {
          EXPECT_EQ(topology.Group(kind, rank), group);
          members.push_back(rank.value);
        }
      }
      std::sort(members.begin(), members.end());
      ASSERT_EQ(static_cast<int>(members.size()), topology.world_size()) << GroupKindName(kind);
      for (int rank = 0; rank < topology.world_size(); ++rank) EXPECT_EQ(members[rank], rank);
    }
  });
}

TEST(Topology, ReplicasAreContiguousAndTheirFirstRankIsThePrimary) {
  ForSmallTopologies([](const Topology& topology) {
    const int size = topology.ranks_per_replica();
    int primaries = 0;
    for (int value = 0; value < topology.world_size(); ++value) {
      const Rank rank{value};
      const RankCoordinates at = topology.Coordinates(rank);
      EXPECT_EQ(topology.ReplicaOf(rank), Replica{value / size});
      EXPECT_EQ(topology.ReplicaOf(rank).value, at.dp);
      EXPECT_EQ(topology.Primary(topology.ReplicaOf(rank)), Rank{value / size * size});
      EXPECT_EQ(topology.IsPrimary(rank), at == RankCoordinates{.dp = at.dp});
      primaries += topology.IsPrimary(rank);
    }
    EXPECT_EQ(primaries, topology.config().dp);
  });
}

// The rank formula, by hand on one example with every axis.
TEST(Topology, UlyssesRanksAreNeighboursAndRingRanksAreStrided) {
  auto topology = Topology::Create({.dp = 2, .ulysses = 2, .ring = 2, .cfg = 2});
  ASSERT_TRUE(topology.ok());
  EXPECT_EQ(Values(topology->Groups(GroupKind::kUlysses)).front(), (std::vector<int>{0, 1}));
  EXPECT_EQ(Values(topology->Groups(GroupKind::kRing)).front(), (std::vector<int>{0, 2}));
  EXPECT_EQ(Values(topology->Group(GroupKind::kRing, Rank{5})), (std::vector<int>{5, 7}));
  EXPECT_EQ(Values(topology->Group(GroupKind::kSp, Rank{6})), (std::vector<int>{4, 5, 6, 7}));
  EXPECT_EQ(Values(topology->Group(GroupKind::kCfg, Rank{3})), (std::vector<int>{3, 7}));
  EXPECT_EQ(Values(topology->Group(GroupKind::kDp, Rank{3})), (std::vector<int>{3, 11}));
  EXPECT_EQ(Values(topology->Group(GroupKind::kReplica, Rank{9})),
            (std::vector<int>{8, 9, 10, 11, 12, 13, 14, 15}));
  EXPECT_EQ(topology->Primary(Replica{1}), Rank{8});
}

TEST(Topology, HsdpGroupsAreContiguousInsideAReplica) {
  auto topology = Topology::Create({.ulysses = 2, .ring = 2, .cfg = 2, .hsdp_shard = 4});
  ASSERT_TRUE(topology.ok()) << topology.status();
  EXPECT_THAT(Values(topology->Groups(GroupKind::kHsdp)),
              ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(4, 5, 6, 7)));
}

TEST(Topology, WeightGroupIsDpThenSpThenNoneAndNeverTp) {
  struct Row {
    ParallelConfig config;
    std::optional<GroupKind> group;
  };
  const Row rows[] = {
      {{}, std::nullopt},
      {{.dp = 4}, GroupKind::kDp},
      {{.ulysses = 4}, GroupKind::kSp},
      {{.ulysses = 2, .ring = 2}, GroupKind::kSp},
      {{.ring = 3}, GroupKind::kSp},
      {{.dp = 2, .ulysses = 2}, GroupKind::kDp},
      {{.dp = 2, .tp = 2}, GroupKind::kDp},
      {{.tp = 4}, std::nullopt},
      {{.cfg = 2}, std::nullopt},
      {{.tp = 2, .ulysses = 2}, GroupKind::kSp},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(Show(row.config));
    auto topology = Topology::Create(row.config);
    ASSERT_TRUE(topology.ok());
    EXPECT_EQ(topology->WeightGroup(WeightTransfer::kAllGather), row.group);
    EXPECT_EQ(topology->WeightGroup(WeightTransfer::kRankLocal), std::nullopt);
    EXPECT_EQ(topology->WeightGroup(WeightTransfer::kNone), std::nullopt);
    // AllGather over a group of one gathers nothing and runs as rank-local.
    EXPECT_EQ(topology->EffectiveTransfer(WeightTransfer::kAllGather),
              row.group.has_value() ? WeightTransfer::kAllGather : WeightTransfer::kRankLocal);
    EXPECT_EQ(topology->EffectiveTransfer(WeightTransfer::kNone), WeightTransfer::kNone);
  }
}

TEST(Topology, DispatchDomainsSpanReplicasOnlyWhenTheWeightGroupDoes) {
  auto topology = Topology::Create({.dp = 3, .ulysses = 2});
  ASSERT_TRUE(topology.ok());
  EXPECT_THAT(topology->DispatchDomains(WeightTransfer::kAllGather),
              ElementsAre(ElementsAre(Replica{0}, Replica{1}, Replica{2})));
  EXPECT_THAT(
      topology->DispatchDomains(WeightTransfer::kRankLocal),
      ElementsAre(ElementsAre(Replica{0}), ElementsAre(Replica{1}), ElementsAre(Replica{2})));
  EXPECT_THAT(topology->DispatchDomains(WeightTransfer::kNone), testing::SizeIs(3));
  auto sp = Topology::Create({.ulysses = 4});
  EXPECT_THAT(sp->DispatchDomains(WeightTransfer::kAllGather),
              ElementsAre(ElementsAre(Replica{0})));
}

// With dp x sp the ranks of one replica hold the same shard: there are sp copies of the weights.
TEST(Topology, WeightGroupsOfDpAndSpHoldOneRankOfEachReplica) {
  auto topology = Topology::Create({.dp = 2, .ulysses = 2});
  EXPECT_THAT(Values(topology->Groups(*topology->WeightGroup(WeightTransfer::kAllGather))),
              ElementsAre(ElementsAre(0, 2), ElementsAre(1, 3)));
}

constexpr WeightTransfer kNone = WeightTransfer::kNone;
constexpr WeightTransfer kAllGather = WeightTransfer::kAllGather;
constexpr WeightTransfer kRankLocal = WeightTransfer::kRankLocal;
constexpr OnlineQuantization kFp8 = OnlineQuantization::kPerTensorFp8;
constexpr OnlineQuantization kOther = OnlineQuantization::kOther;
constexpr int kIntMax = std::numeric_limits<int>::max();

struct CombinationRow {
  const char* what;
  ParallelConfig parallel;
  CombinationSettings settings;
  // What each line of the refusal names, in order; empty: accepted.
  std::vector<std::vector<std::string>> refusals;
};

// Every row of the tables "Feature compatibility" and "Parallelism compatibility" and of "Combined
// dimensions" and "Request and loading constraints" in the description of the system we implement,
// in its order. Its one row without a counterpart here is model-level or ordinary layerwise
// offload, which we do not have: --transfer is a single choice.
const CombinationRow kCombinations[] = {
    {"nothing", {}, {}, {}},
    {"DP, AllGather", {.dp = 4}, {.transfer = kAllGather}, {}},
    {"DP, rank-local", {.dp = 4}, {.transfer = kRankLocal}, {}},
    {"DP, resident", {.dp = 4}, {.transfer = kNone}, {}},
    {"SP, AllGather", {.ulysses = 2, .ring = 2}, {.transfer = kAllGather}, {}},
    {"SP, rank-local", {.ulysses = 4}, {.transfer = kRankLocal}, {}},
    {"TP, AllGather, ordinary loader", {.dp = 2, .tp = 2}, {.transfer = kAllGather}, {}},
    {"TP, rank-local, ordinary loader", {.tp = 2}, {.transfer = kRankLocal}, {}},
    {"TP, mmap where it can be",
     {.tp = 2},
     {.transfer = kRankLocal, .checkpoint_mmap = SourceMode::kPreferred},
     {}},
    {"TP, mmap required",
     {.tp = 2},
     {.transfer = kRankLocal, .checkpoint_mmap = SourceMode::kRequired},
     {{"required checkpoint mapping", "--tp 2", "make it preferred"}}},
    {"TP, mmap required, AllGather",
     {.dp = 2, .tp = 2},
     {.transfer = kAllGather, .checkpoint_mmap = SourceMode::kRequired},
     {{"required checkpoint mapping", "--tp 2", "--tp 1"}}},
    {"HSDP, AllGather",
     {.ulysses = 4, .hsdp_shard = 4},
     {.transfer = kAllGather},
     {{"HSDP shard size 4", "--transfer allgather", "use --transfer rank-local",
       "HSDP shard size 1"}}},
    {"HSDP, rank-local", {.ulysses = 4, .hsdp_shard = 4}, {.transfer = kRankLocal}, {}},
    {"HSDP alone", {.ulysses = 4, .hsdp_shard = 2}, {.transfer = kNone}, {}},
    {"HSDP, mmap required",
     {.ulysses = 2, .hsdp_shard = 2},
     {.transfer = kRankLocal, .checkpoint_mmap = SourceMode::kRequired},
     {{"required checkpoint mapping", "HSDP shard size 2", "HSDP shard size 1"}}},
    {"FP8 per tensor, AllGather", {.dp = 2}, {.transfer = kAllGather, .quantization = kFp8}, {}},
    {"FP8 per tensor, rank-local", {.dp = 2}, {.transfer = kRankLocal, .quantization = kFp8}, {}},
    {"other quantization, AllGather",
     {.dp = 2},
     {.transfer = kAllGather, .quantization = kOther},
     {{"online quantization other", "--transfer allgather", "use --transfer rank-local"}}},
    {"other quantization, rank-local", {}, {.transfer = kRankLocal, .quantization = kOther}, {}},
    {"quantization, mmap required",
     {},
     {.transfer = kRankLocal, .quantization = kFp8, .checkpoint_mmap = SourceMode::kRequired},
     {{"required checkpoint mapping", "online quantization fp8", "preferred"}}},
    {"residents, AllGather",
     {.dp = 2},
     {.transfer = kAllGather, .resident_layers = 4},
     {{"--resident-layers 4", "--transfer allgather", "use --transfer rank-local",
       "--resident-layers 0"}}},
    {"residents, AllGather of one rank",
     {},
     {.transfer = kAllGather, .resident_layers = 4},
     {{"--resident-layers 4", "--transfer allgather", "use --transfer rank-local"}}},
    {"residents, rank-local", {.dp = 2}, {.transfer = kRankLocal, .resident_layers = 4}, {}},
    {"residents, rank-local, no resident path",
     {},
     {.transfer = kRankLocal, .resident_layers = 4, .resident_path = false},
     {{"--resident-layers 4", "declares no blocks", "--resident-layers 0"}}},
    {"residents without streaming",
     {},
     {.resident_layers = 4},
     {{"--resident-layers 4", "--transfer none", "--transfer rank-local"}}},
    {"more residents than blocks",
     {},
     {.transfer = kRankLocal, .resident_layers = 41, .blocks = 40},
     {{"--resident-layers 41", "40 blocks", "at most"}}},
    {"as many residents as blocks",
     {},
     {.transfer = kRankLocal, .resident_layers = 40, .blocks = 40},
     {}},
    {"negative residents",
     {},
     {.transfer = kRankLocal, .resident_layers = -2},
     {{"--resident-layers -2", "at least 0", "--resident-layers 0"}}},
    {"as many residents as fit, with AllGather",
     {.dp = 2},
     {.transfer = kAllGather, .resident_layers = kResidentLayersAuto},
     {{"--resident-layers auto with --transfer allgather", "--transfer rank-local"}}},
    {"AllGather without a group", {}, {.transfer = kAllGather}, {}},
    {"AllGather with TP alone", {.tp = 2}, {.transfer = kAllGather}, {}},
    {"DP and SP, AllGather", {.dp = 2, .ulysses = 2}, {.transfer = kAllGather}, {}},
    {"DP, TP and SP, rank-local", {.dp = 2, .tp = 2, .ulysses = 2}, {.transfer = kRankLocal}, {}},
    {"HSDP and DP",
     {.dp = 2, .ulysses = 2, .hsdp_shard = 2},
     {.transfer = kRankLocal},
     {{"HSDP shard size 2", "--dp 2", "use --dp 1"}}},
    {"HSDP and TP",
     {.tp = 2, .hsdp_shard = 2},
     {.transfer = kNone},
     {{"HSDP shard size 2", "--tp 2", "use --tp 1"}}},
    {"HSDP, DP, TP, AllGather: one line each",
     {.dp = 2, .tp = 2, .hsdp_shard = 2},
     {.transfer = kAllGather},
     {{"HSDP shard size 2", "--transfer allgather"},
      {"HSDP shard size 2", "--dp 2"},
      {"HSDP shard size 2", "--tp 2"}}},
    {"mmap, AllGather",
     {.dp = 2},
     {.transfer = kAllGather, .checkpoint_mmap = SourceMode::kRequired},
     {}},
    {"mmap, rank-local",
     {.dp = 2},
     {.transfer = kRankLocal, .checkpoint_mmap = SourceMode::kRequired},
     {}},
    {"host weight runtime, rank-local, TP and SP",
     {.tp = 2, .ulysses = 2},
     {.transfer = kRankLocal, .host_weight_runtime = SourceMode::kRequired},
     {}},
    {"host weight runtime required, AllGather",
     {.dp = 2},
     {.transfer = kAllGather, .host_weight_runtime = SourceMode::kRequired},
     {{"host weight runtime", "--transfer allgather", "use --transfer rank-local"}}},
    {"host weight runtime preferred, AllGather: not used",
     {.dp = 2},
     {.transfer = kAllGather, .host_weight_runtime = SourceMode::kPreferred},
     {}},
    {"host weight runtime required, HSDP",
     {.ulysses = 2, .hsdp_shard = 2},
     {.transfer = kRankLocal, .host_weight_runtime = SourceMode::kRequired},
     {{"host weight runtime", "HSDP shard size 2", "HSDP shard size 1"}}},
    {"host weight runtime required, quantization",
     {},
     {.transfer = kRankLocal, .quantization = kFp8, .host_weight_runtime = SourceMode::kRequired},
     {{"host weight runtime", "online quantization fp8", "preferred"}}},

    // Sizes that do not divide.
    {"heads and TP",
     {.tp = 3},
     {.attention_heads = 40},
     {{"--tp 3", "40 attention heads", "--sp"}}},
    {"heads and Ulysses",
     {.ulysses = 16},
     {.attention_heads = 40},
     {{"--sp 16", "40 attention heads", "ring"}}},
    {"heads, TP and Ulysses",
     {.tp = 8, .ulysses = 2},
     {.attention_heads = 40},
     {{"--sp 2", "--tp 8", "5 attention heads", "ring"}}},
    {"heads that divide", {.tp = 2, .ulysses = 4, .ring = 3}, {.attention_heads = 40}, {}},
    {"branches and CFG",
     {.cfg = 3},
     {.guidance_branches = 2},
     {{"--cfg 3", "2 guidance branches", "--dp"}}},
    {"branches that share", {.cfg = 2}, {.guidance_branches = 2}, {}},
    {"launched ranks that differ",
     {.dp = 2, .ulysses = 2},
     {.launched_ranks = 8},
     {{"--dp 2 x", "--sp 2", "needs 4 ranks", "8 were started", "none is derived"}}},
    {"launched ranks that agree", {.dp = 4, .ulysses = 2}, {.launched_ranks = 8}, {}},
    {"HSDP that does not divide a replica",
     {.ulysses = 4, .hsdp_shard = 3},
     {.transfer = kRankLocal},
     {{"HSDP shard size 3", "4 ranks of a replica", "divisor", "--sp"}}},
    {"HSDP of a single rank",
     {.hsdp_shard = 4},
     {.transfer = kRankLocal},
     {{"HSDP shard size 4", "1 ranks of a replica", "--sp"}}},

    // Degrees out of range.
    {"degrees below 1",
     {.dp = 0, .tp = -1, .ulysses = -7, .ring = 0, .cfg = 0, .hsdp_shard = 0},
     {},
     {{"--dp 0", "at least 1"},
      {"--tp -1", "at least 1"},
      {"--sp (ulysses) -7", "at least 1"},
      {"--sp (ring) 0", "at least 1"},
      {"--cfg 0", "at least 1"},
      {"HSDP shard size 0", "at least 1"}}},
    {"a world that overflows",
     {.dp = kIntMax, .tp = kIntMax, .ulysses = kIntMax, .ring = kIntMax, .cfg = kIntMax},
     {},
     {{"--dp 2147483647", "--cfg 2147483647", "more than 4096 ranks", "lower"}}},
    {"a world one too large", {.dp = 4097}, {}, {{"--dp 4097", "4096"}}},
    {"the largest world", {.dp = 4096}, {}, {}},
};

TEST(CheckCombination, TableOfWhatCombinesWithWhat) {
  for (const CombinationRow& row : kCombinations) {
    SCOPED_TRACE(row.what);
    const absl::Status status = CheckCombination(row.parallel, row.settings);
    if (row.refusals.empty()) {
      EXPECT_TRUE(status.ok()) << status;
      continue;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    const std::vector<std::string> lines = absl::StrSplit(std::string(status.message()), '\n');
    ASSERT_EQ(lines.size(), row.refusals.size()) << status;
    for (size_t i = 0; i < lines.size(); ++i) {
      for (const std::string& part : row.refusals[i]) EXPECT_THAT(lines[i], HasSubstr(part));
    }
  }
}

// A combination that is refused has a way out: what is refused is never all values of a setting.
TEST(CheckCombination, EveryRefusedTransferHasAnAcceptedNeighbour) {
  for (int dp : {1, 2}) {
    for (int tp : {1, 2}) {
      for (int ulysses : {1, 2}) {
        for (int shard : {1, 2}) {
          const ParallelConfig config{.dp = dp, .tp = tp, .ulysses = ulysses, .hsdp_shard = shard};
          if (!Topology::Create(config).ok()) continue;
          SCOPED_TRACE(Show(config));
          const bool allgather = CheckCombination(config, {.transfer = kAllGather}).ok();
          const bool rank_local = CheckCombination(config, {.transfer = kRankLocal}).ok();
          EXPECT_EQ(allgather, shard == 1);
          EXPECT_EQ(rank_local, shard == 1 || (dp == 1 && tp == 1));
        }
      }
    }
  }
}

TEST(Topology, CreateRefusesWhatCheckCombinationRefuses) {
  EXPECT_THAT(Topology::Create({.dp = 0}).status().message(), HasSubstr("--dp 0"));
  EXPECT_THAT(Topology::Create({.dp = 65536, .tp = 65536}).status().message(),
              AllOf(HasSubstr("--dp 65536"), HasSubstr("--tp 65536")));
  EXPECT_FALSE(Topology::Create({.ulysses = 3, .hsdp_shard = 2}).ok());
}

TEST(CheckAvailable, OnlyDataParallelismHasAnEngine) {
  EXPECT_TRUE(CheckAvailable({}).ok());
  EXPECT_TRUE(CheckAvailable({.dp = 8}).ok());
  const ParallelConfig configs[] = {
      {.tp = 2}, {.ulysses = 2}, {.ring = 2}, {.cfg = 2}, {.ulysses = 2, .hsdp_shard = 2}};
  const char* names[] = {"--tp 2", "--sp 2", "--sp (ring) 2", "--cfg 2", "HSDP shard size 2"};
  for (int i = 0; i < 5; ++i) {
    const absl::Status status = CheckAvailable(configs[i]);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(status.message(), AllOf(HasSubstr(names[i]), HasSubstr("not available yet")));
  }
}

}  // namespace
}  // namespace dlo
