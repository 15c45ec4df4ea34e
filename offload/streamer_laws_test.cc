// How long streaming takes, exactly, in virtual time. Laws:
// ../shared/reference/peers-and-physics.md, section E.2.
#include <algorithm>
#include <functional>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "offload/block_streamer.h"
#include "runtime/sim/sim_device.h"

namespace dlo {
namespace {

constexpr int64_t kBlockBytes = 1 << 20;

// A group of `size` ranks, of which one is simulated: the others do the same at the same time.
class SimGroup : public Communicator {
 public:
  explicit SimGroup(int size) : Communicator("simulated", 0, size, absl::InfiniteDuration()) {}

 private:
  absl::Status Run(const CollectiveOp&) override {
    return absl::UnimplementedError("moves are simulated by the stream");
  }
  void Interrupt() override {}
  void Close() override {}
};

SimCost Fixed(absl::Duration duration) {
  return [duration](int64_t) { return duration; };
}
// So many microseconds for each 256 KiB.
SimCost PerQuarterMiB(int us) {
  return [us](int64_t bytes) { return absl::Microseconds(us * bytes / (1 << 18)); };
}

// Rings of equal blocks; addresses are never touched.
std::vector<std::vector<HostBlock>> Rings(const std::vector<std::vector<int64_t>>& block_bytes,
                                          bool staged = false) {
  std::vector<std::vector<HostBlock>> rings;
  for (const auto& ring : block_bytes) {
    rings.emplace_back();
    for (int64_t bytes : ring) {
      HostBlock block{.layout =
                          BlockLayout::Of({{.name = "w", .shape = {bytes}, .dtype = DType::kU8}})};
      static const std::byte kAnywhere{};
      if (staged) {
        block.pieces.push_back({&kAnywhere, 0, bytes});
      } else {
        block.bytes = &kAnywhere;
      }
      rings.back().push_back(std::move(block));
    }
  }
  return rings;
}

struct Walk {
  std::vector<absl::Duration> ends;  // when each visit's computing was done
  StreamerStats stats;
};

// Walks `passes` over one ring.
Walk Simulate(const SimRates& rates, const std::vector<int64_t>& blocks, int64_t passes, int slots,
              int group, bool staged, const std::function<absl::Duration(int64_t visit)>& compute) {
  SimDevice device(rates);
  SimGroup communicator(group);
  auto streamer = BlockStreamer::Create(device, Rings({blocks}, staged), {.slots = slots},
                                        group > 1 ? &communicator : nullptr);
  EXPECT_TRUE(streamer.ok()) << streamer.status();
  VisitPlan plan({static_cast<int64_t>(blocks.size())});
  plan.Add(0, passes);
  EXPECT_TRUE((*streamer)->Start(plan).ok());
  Walk run;
  for (int64_t v = 0; v < plan.num_visits(); ++v) {
    auto lease = (*streamer)->Acquire(0);
    EXPECT_TRUE(lease.ok()) << lease.status();
    device.Compute(compute(v));
    run.ends.push_back(device.now());
  }
  run.stats = (*streamer)->stats();
  return run;
}

// Once the pipeline is full, the time from one visit to the next.
absl::Duration Period(const Walk& run) {
  const size_t n = run.ends.size();
  return (run.ends[n - 1] - run.ends[n - 41]) / 40;
}

std::vector<int64_t> Equal(int n) { return std::vector<int64_t>(n, kBlockBytes); }

TEST(Laws, RankLocalTakesTheLongerOfComputeAndCopy) {
  for (int copy_ms : {1, 3, 5, 8}) {
    for (int compute_ms : {1, 3, 5, 8}) {
      for (int slots : {2, 3}) {
        const Walk run =
            Simulate({.copy = Fixed(absl::Milliseconds(copy_ms))}, Equal(10), 10, slots, 1, false,
                     [&](int64_t) { return absl::Milliseconds(compute_ms); });
        EXPECT_EQ(Period(run), absl::Milliseconds(std::max(copy_ms, compute_ms)))
            << copy_ms << " " << compute_ms << " " << slots;
      }
    }
  }
}

TEST(Laws, StagedRankLocalTakesTheLongestOfComputeCopyAndPack) {
  for (int pack_ms : {1, 4, 9}) {
    for (int copy_ms : {1, 4, 9}) {
      for (int compute_ms : {1, 4, 9}) {
        const Walk run = Simulate({.copy = Fixed(absl::Milliseconds(copy_ms)),
                                   .pack = Fixed(absl::Milliseconds(pack_ms))},
                                  Equal(10), 10, 2, 1, true,
                                  [&](int64_t) { return absl::Milliseconds(compute_ms); });
        EXPECT_EQ(Period(run), absl::Milliseconds(std::max({pack_ms, copy_ms, compute_ms})));
      }
    }
  }
}

// Two slots and two shard buffers suffice: h + g <= 2p and g + C <= 2p hold at p = max(h, g, C).
TEST(Laws, AllGatherTakesTheLongestOfComputeCopyAndGatherNotTheirSum) {
  for (int copy_ms : {1, 4, 6, 9}) {
    for (int gather_ms : {1, 4, 6, 9}) {
      for (int compute_ms : {1, 4, 6, 9}) {
        for (int slots : {2, 3}) {
          const Walk run = Simulate({.copy = Fixed(absl::Milliseconds(copy_ms)),
                                     .gather = Fixed(absl::Milliseconds(gather_ms))},
                                    Equal(10), 10, slots, 4, false,
                                    [&](int64_t) { return absl::Milliseconds(compute_ms); });
          EXPECT_EQ(Period(run), absl::Milliseconds(std::max({copy_ms, gather_ms, compute_ms})))
              << copy_ms << " " << gather_ms << " " << compute_ms << " " << slots;
        }
      }
    }
  }
}

// Copying a shard, gathering and computing one after the other is what the reference's chained
// prefetch costs at worst; ours beside it.
TEST(Laws, DecouplingBeatsTheChain) {
  const Walk run =
      Simulate({.copy = Fixed(absl::Milliseconds(6)), .gather = Fixed(absl::Milliseconds(5))},
               Equal(10), 10, 2, 4, false, [](int64_t) { return absl::Milliseconds(4); });
  EXPECT_EQ(Period(run), absl::Milliseconds(6));
  EXPECT_LT(Period(run),
            absl::Milliseconds(
                6 + 5));  // chained: copy and gather of a block hide behind computing together
}

// The protocol's own recurrence: when each move can begin at the earliest.
std::vector<absl::Duration> Recurrence(const std::vector<absl::Duration>& fill,
                                       const std::vector<absl::Duration>& deliver,
                                       const std::vector<absl::Duration>& compute, int64_t slots) {
  const size_t n = compute.size();
  std::vector<absl::Duration> f(n), d(n), c(n);
  const auto at = [](const std::vector<absl::Duration>& times, int64_t i) {
    return i < 0 ? absl::ZeroDuration() : times[i];
  };
  for (int64_t v = 0; v < static_cast<int64_t>(n); ++v) {
    f[v] = std::max(at(f, v - 1), at(d, v - 2)) + fill[v];
    d[v] = std::max({at(d, v - 1), f[v], at(c, v - slots)}) + deliver[v];
    c[v] = std::max(at(c, v - 1), d[v]) + compute[v];
  }
  return c;
}

TEST(Laws, HeterogeneousBlocksFollowTheRecurrenceExactly) {
  std::mt19937 random(7);
  const auto pick = [&random](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int trial = 0; trial < 200; ++trial) {
    const int group = 4, slots = pick(2, 4), copy_us = pick(1, 40), gather_us = pick(1, 40);
    std::vector<int64_t> blocks(pick(1, 9));
    for (int64_t& bytes : blocks) bytes = int64_t{pick(1, 16)} << 20;
    std::vector<absl::Duration> compute(blocks.size() * 5);
    for (auto& c : compute) c = absl::Microseconds(pick(0, 400));
    std::vector<absl::Duration> fill, deliver;
    for (size_t v = 0; v < compute.size(); ++v) {
      const int64_t shard = blocks[v % blocks.size()] / group;
      fill.push_back(PerQuarterMiB(copy_us)(shard));
      deliver.push_back(PerQuarterMiB(gather_us)(shard * (group - 1)));
    }
    const Walk run =
        Simulate({.copy = PerQuarterMiB(copy_us), .gather = PerQuarterMiB(gather_us)}, blocks, 5,
                 slots, group, false, [&](int64_t v) { return compute[v]; });
    EXPECT_EQ(run.ends, Recurrence(fill, deliver, compute, slots)) << "trial " << trial;
  }
}

TEST(Laws, GuidanceBranchesAddComputeAndNoBytes) {
  const SimRates rates = {.copy = Fixed(absl::Milliseconds(5)),
                          .gather = Fixed(absl::Milliseconds(1))};
  const Walk one =
      Simulate(rates, Equal(8), 10, 2, 2, false, [](int64_t) { return absl::Milliseconds(3); });
  const Walk two =
      Simulate(rates, Equal(8), 10, 2, 2, false, [](int64_t) { return absl::Milliseconds(6); });
  EXPECT_EQ(one.stats.bus_bytes, two.stats.bus_bytes);
  EXPECT_EQ(one.stats.fabric_bytes, two.stats.fabric_bytes);
  EXPECT_EQ(Period(one), absl::Milliseconds(5));
  EXPECT_EQ(Period(two), absl::Milliseconds(6));  // twice the work for a fifth more time
}

TEST(Laws, TrafficPerStepAndRankIsTheFormula) {
  for (int group : {2, 3, 4, 8}) {
    const Walk run =
        Simulate({}, Equal(8), 5, 2, group, false, [](int64_t) { return absl::Milliseconds(1); });
    const int64_t shard =
        BlockLayout::Of({{.name = "w", .shape = {kBlockBytes}, .dtype = DType::kU8}})
            .shard_bytes(group);
    EXPECT_EQ(run.stats.bus_bytes, 5 * 8 * shard);
    EXPECT_EQ(run.stats.fabric_bytes, 5 * 8 * shard * (group - 1));
  }
}

TEST(Laws, DeviceBytesAreSlotsAndTwoShards) {
  for (int group : {2, 3, 4}) {
    for (int slots : {2, 3}) {
      SimDevice device({});
      SimGroup communicator(group);
      auto streamer = BlockStreamer::Create(device, Rings({{5 << 20, 3 << 20}, {1 << 20}}),
                                            {.slots = slots}, &communicator);
      ASSERT_TRUE(streamer.ok());
      const int64_t shard =
          BlockLayout::Of({{.name = "w", .shape = {5 << 20}, .dtype = DType::kU8}})
              .shard_bytes(group);
      EXPECT_EQ((*streamer)->device_bytes(), slots * shard * group + 2 * shard);
      EXPECT_EQ(device.memory().used_bytes, (*streamer)->device_bytes());
    }
  }
}

// MiniMax-H3 on eight B300, from the published study (section E.5): 50 blocks of 1.326 GB, 49
// updates, 40.7 GB/s to each device.
TEST(PublishedRows, MiniMaxH3RankLocalAgainstAllGather) {
  const std::vector<int64_t> blocks(50, 1'326'000'000);
  const auto wave_s = [&](int group, double compute_ms) {
    const Walk run =
        Simulate({.copy = BytesPerSecond(40.7e9), .gather = BytesPerSecond(582e9)}, blocks, 49, 2,
                 group, false, [&](int64_t) { return absl::Milliseconds(compute_ms); });
    return absl::ToDoubleSeconds(run.ends.back());
  };
  // DP1xSP8: 79.6 s rank-local, 34.6 s with AllGather.
  EXPECT_NEAR(wave_s(1, 14.1), 79.6, 79.6 * 0.01);
  EXPECT_NEAR(wave_s(8, 14.1), 34.6, 34.6 * 0.01);
  // DP4xSP2: both hidden behind computing.
  EXPECT_NEAR(wave_s(1, 38.7), wave_s(2, 38.7), 0.2);
}

// Cosmos3-Super on four B300: 128 blocks of 0.969 GB, 35 steps. A quarter of a block copies in 5.96
// ms and gathers in 1.25 ms: 26.7 s decoupled, 32.3 s chained as the reference does it.
TEST(PublishedRows, Cosmos3SuperIsBoundByItsCopies) {
  const Walk run =
      Simulate({.copy = Fixed(absl::Microseconds(5960)), .gather = Fixed(absl::Microseconds(1250))},
               std::vector<int64_t>(128, 969'000'000), 35, 2, 4, false,
               [](int64_t) { return absl::Milliseconds(3); });
  EXPECT_NEAR(absl::ToDoubleSeconds(run.ends.back()), 26.7, 0.05);
  EXPECT_NEAR((5.96 + 1.25) * 128 * 35 / 1000, 32.3, 0.05);
}

}  // namespace
}  // namespace dlo
