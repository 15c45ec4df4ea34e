// What the streamer counts: bytes by formula, waiting and moving in virtual time, visit by visit,
// without taking memory on the way.
#include "offload/streamer_stats.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/block_streamer.h"
#include "offload/visit_log.h"
#include "runtime/cpu/cpu_device.h"
#include "runtime/sim/sim_device.h"

namespace {

int64_t allocations = 0;  // of this program; the tests here have one thread

}  // namespace

void* operator new(size_t bytes) {
  ++allocations;
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace dlo {
namespace {

constexpr int64_t kMiB = 1 << 20;

class Group : public Communicator {
 public:
  explicit Group(int size) : Communicator("simulated", 0, size, absl::InfiniteDuration()) {}

 private:
  absl::Status Run(const CollectiveOp&) override { return absl::OkStatus(); }
  void Interrupt() override {}
  void Close() override {}
};

enum class Transfer { kDirect, kStaged, kGather };

struct Config {
  Transfer transfer = Transfer::kDirect;
  std::vector<std::vector<int64_t>> block_bytes;
  SimRates rates;
  int slots = 2;
  int group = 1;
};

// A streamer on a device in virtual time.
class Simulated {
 public:
  explicit Simulated(const Config& config)
      : device(config.rates), group_(config.transfer == Transfer::kGather ? config.group : 1) {
    static const std::byte kAnywhere{};
    std::vector<std::vector<HostBlock>> rings;
    std::vector<int64_t> sizes;
    for (const auto& ring : config.block_bytes) {
      sizes.push_back(static_cast<int64_t>(ring.size()));
      rings.emplace_back();
      for (int64_t bytes : ring) {
        HostBlock block{
            .layout = BlockLayout::Of({{.name = "w", .shape = {bytes}, .dtype = DType::kU8}})};
        if (config.transfer == Transfer::kStaged) {
          block.pieces.push_back({&kAnywhere, 0, bytes});
        } else {
          block.bytes = &kAnywhere;
        }
        rings.back().push_back(std::move(block));
      }
    }
    plan = VisitPlan(sizes);
    auto made = BlockStreamer::Create(device, std::move(rings), {.slots = config.slots},
                                      config.transfer == Transfer::kGather ? &group_ : nullptr);
    EXPECT_TRUE(made.ok()) << made.status();
    streamer = *std::move(made);
  }

  // Walks the plan; each visit computes for so long.
  void Walk(absl::Duration compute, VisitLog* log = nullptr) {
    ASSERT_TRUE(streamer->Start(plan, log).ok());
    for (auto c = plan.begin(); !c.done(); c.Next()) {
      auto lease = streamer->Acquire(c.ring());
      ASSERT_TRUE(lease.ok()) << lease.status();
      device.Compute(compute);
    }
  }

  SimDevice device;
  VisitPlan plan;
  std::unique_ptr<BlockStreamer> streamer;

 private:
  Group group_;
};

SimCost Ms(int ms) {
  return [ms](int64_t) { return absl::Milliseconds(ms); };
}

TEST(StreamerStats, HiddenRatioIsTheShareOfTheLongestMovesThatNobodyWaitedFor) {
  EXPECT_EQ(StreamerStats().hidden_ratio(), 1);
  const StreamerStats stats{.copy_time = absl::Seconds(2),
                            .gather_time = absl::Seconds(8),
                            .copy_stall = absl::Seconds(1),
                            .gather_stall = absl::Seconds(1)};
  EXPECT_EQ(stats.hidden_ratio(), 0.75);
  EXPECT_EQ(
      (StreamerStats{.copy_time = absl::Seconds(1), .copy_stall = absl::Seconds(2)}.hidden_ratio()),
      0);
}

// A copy of 5 ms behind computing of 3 ms: 2 ms are waited for at each visit but the first, which
// waits for all of its own.
TEST(StreamerStats, WaitingIsThatWhichCopiesExceedComputingBy) {
  Simulated sim({.block_bytes = {std::vector<int64_t>(10, kMiB)}, .rates = {.copy = Ms(5)}});
  sim.plan.Add(0, 10);
  sim.Walk(absl::Milliseconds(3));
  const StreamerStats stats = sim.streamer->stats();
  EXPECT_EQ(stats.visits, 100);
  EXPECT_EQ(stats.copy_time, absl::Milliseconds(500));
  EXPECT_EQ(stats.copy_stall, absl::Milliseconds(5 + 99 * 2));
  EXPECT_EQ(stats.gather_stall + stats.pack_stall, absl::ZeroDuration());
  EXPECT_EQ(stats.stall(), sim.device.stalled());
  EXPECT_DOUBLE_EQ(stats.hidden_ratio(), 1 - 203.0 / 500);
}

TEST(StreamerStats, NothingButTheFirstBlockIsWaitedForWhereComputingIsLonger) {
  Simulated sim({.transfer = Transfer::kGather,
                 .block_bytes = {std::vector<int64_t>(10, kMiB)},
                 .rates = {.copy = Ms(2), .gather = Ms(1)},
                 .group = 4});
  sim.plan.Add(0, 10);
  sim.Walk(absl::Milliseconds(4));
  const StreamerStats stats = sim.streamer->stats();
  EXPECT_EQ(stats.copy_stall, absl::Milliseconds(2));
  EXPECT_EQ(stats.gather_stall, absl::Milliseconds(1));
  EXPECT_EQ(stats.gather_time, absl::Milliseconds(100));
  EXPECT_DOUBLE_EQ(stats.hidden_ratio(), 1 - 3.0 / 200);
}

// The kind that takes longest is the one that is waited for.
TEST(StreamerStats, WaitingIsBlamedOnTheMoveThatCausesIt) {
  const auto run = [](Transfer transfer, int fill_ms, int deliver_ms) {
    const bool gather = transfer == Transfer::kGather;
    Simulated sim({.transfer = transfer,
                   .block_bytes = {std::vector<int64_t>(10, kMiB)},
                   .rates = {.copy = Ms(gather ? fill_ms : deliver_ms),
                             .gather = Ms(deliver_ms),
                             .pack = Ms(fill_ms)},
                   .group = 2});
    sim.plan.Add(0, 20);
    sim.Walk(absl::Milliseconds(3));
    EXPECT_EQ(sim.streamer->stats().stall(), sim.device.stalled());
    return sim.streamer->stats();
  };
  const StreamerStats packs = run(Transfer::kStaged, 9, 1);
  // 9 ms a visit, of which 3 are computing and the last 1 is the copy that follows the pack.
  EXPECT_EQ(packs.pack_stall, absl::Milliseconds(9 + 199 * 5));
  EXPECT_EQ(packs.copy_stall, absl::Milliseconds(200 * 1));
  const StreamerStats copies = run(Transfer::kStaged, 1, 9);
  EXPECT_EQ(copies.pack_stall, absl::Milliseconds(1));
  EXPECT_EQ(copies.copy_stall, absl::Milliseconds(9 + 199 * 6));
  const StreamerStats gathers = run(Transfer::kGather, 1, 9);
  EXPECT_EQ(gathers.copy_stall, absl::Milliseconds(1));
  EXPECT_EQ(gathers.gather_stall, absl::Milliseconds(9 + 199 * 6));
}

TEST(StreamerStats, AreThoseOfEachRing) {
  Simulated sim({.block_bytes = {{kMiB, kMiB}, {4 * kMiB, 4 * kMiB, 4 * kMiB}},
                 .rates = {.copy = BytesPerSecond(kMiB * 1000)}});  // 1 ms a MiB
  sim.plan.Add(0, 1);
  sim.plan.Add(1, 5);
  sim.Walk(absl::Milliseconds(1));
  EXPECT_EQ(sim.streamer->stats(0).visits, 2);
  EXPECT_EQ(sim.streamer->stats(0).bus_bytes, 2 * kMiB);
  EXPECT_EQ(sim.streamer->stats(0).copy_stall, absl::Milliseconds(1));
  EXPECT_EQ(sim.streamer->stats(1).visits, 15);
  EXPECT_EQ(sim.streamer->stats(1).bus_bytes, 15 * 4 * kMiB);
  EXPECT_EQ(sim.streamer->stats(1).copy_time, absl::Milliseconds(60));
  EXPECT_EQ(sim.streamer->stats(1).copy_stall, absl::Milliseconds(15 * 3));
}

TEST(StreamerStats, StartAfreshWithEachPlan) {
  Simulated sim({.block_bytes = {{kMiB, kMiB, kMiB}}, .rates = {.copy = Ms(5)}});
  sim.plan.Add(0, 50);
  sim.Walk(absl::Milliseconds(3));
  const absl::Duration first = sim.streamer->stats().copy_time;
  sim.Walk(absl::Milliseconds(3));
  EXPECT_EQ(sim.streamer->stats().copy_time, first);
  EXPECT_EQ(sim.streamer->stats().visits, 150);
}

// The log agrees with the stats, is in the plan's order, and nests: fill, delivery, computing.
TEST(StreamerStats, LogHasEveryVisitInOrder) {
  std::mt19937 random(3);
  const auto pick = [&random](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int trial = 0; trial < 50; ++trial) {
    Config config{
        .transfer = static_cast<Transfer>(pick(0, 2)),
        .rates = {.copy = Ms(pick(1, 9)), .gather = Ms(pick(1, 9)), .pack = Ms(pick(1, 9))},
        .slots = pick(2, 4),
        .group = 3};
    config.block_bytes.resize(2);
    for (auto& ring : config.block_bytes) ring.resize(pick(1, 7), kMiB);
    Simulated sim(config);
    sim.plan.Add(0, pick(1, 20));
    sim.plan.Add(1, pick(1, 20));
    VisitLog log(1000);
    sim.Walk(absl::Milliseconds(pick(1, 9)), &log);
    const StreamerStats stats = sim.streamer->stats();
    ASSERT_EQ(log.size(), sim.plan.num_visits());
    EXPECT_EQ(log.dropped(), 0);
    absl::Duration stall, moves;
    auto c = sim.plan.begin();
    for (int64_t i = 0; i < log.size(); ++i, c.Next()) {
      const VisitTimes& t = log[i];
      EXPECT_EQ(t.visit, i);
      EXPECT_EQ(t.ring, c.ring());
      EXPECT_EQ(t.block, c.block());
      EXPECT_LE(t.fill_begin, t.fill_end);
      EXPECT_LE(t.fill_end, t.deliver_begin);
      EXPECT_LE(t.deliver_begin, t.deliver_end);
      EXPECT_LE(t.deliver_end, t.compute_begin);
      EXPECT_LE(t.wait_begin, t.compute_begin);
      EXPECT_LE(t.compute_begin, t.compute_end);
      if (i > 0) {
        EXPECT_LE(log[i - 1].compute_end, t.wait_begin);
      }
      if (i >= config.slots) {
        EXPECT_LE(log[i - config.slots].compute_end, t.deliver_begin);
      }
      stall += t.compute_begin - t.wait_begin;
      moves += t.fill_end - t.fill_begin + t.deliver_end - t.deliver_begin;
    }
    EXPECT_EQ(stall, stats.stall());
    EXPECT_EQ(moves, stats.copy_time + stats.gather_time + stats.pack_time);
  }
}

TEST(VisitLog, KeepsTheNewest) {
  VisitLog log(3);
  EXPECT_EQ(log.size(), 0);
  for (int64_t v = 0; v < 5; ++v) log.Add({.visit = v});
  EXPECT_EQ(log.size(), 3);
  EXPECT_EQ(log.dropped(), 2);
  EXPECT_EQ(log[0].visit, 2);
  EXPECT_EQ(log[2].visit, 4);
  log.Clear();
  EXPECT_EQ(log.size(), 0);
  EXPECT_EQ(log.dropped(), 0);
}

TEST(StreamerStats, NoVisitTakesMemory) {
  for (const Transfer transfer : {Transfer::kDirect, Transfer::kStaged, Transfer::kGather}) {
    Simulated sim({.transfer = transfer, .block_bytes = {{kMiB, kMiB, 3 * kMiB}}, .group = 2});
    sim.plan.Add(0, 300);
    VisitLog log(100);
    ASSERT_TRUE(sim.streamer->Start(sim.plan, &log).ok());
    const int64_t before = allocations;
    for (int64_t v = 0; v < sim.plan.num_visits(); ++v) {
      auto lease = sim.streamer->Acquire(0);
      if (!lease.ok()) break;
    }
    EXPECT_EQ(allocations, before);
    EXPECT_EQ(sim.streamer->stats().visits, sim.plan.num_visits());
  }
}

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Section 6 of the architecture page, and the traffic of a step, from the tensors' sizes alone.
TEST(Formulas, MemoryAndTrafficOnEveryTopology) {
  const std::vector<std::vector<std::vector<int64_t>>> models = {
      {{5000}},                                    // a ring of one block
      {{4096, 4096, 4096, 4096}},                  // equal blocks that divide evenly
      {{1, 255, 257, 70000, 3}},                   // an odd count of unequal ones
      {{300, 300}, {9001, 9001, 9001}, {123456}},  // a text encoder and two experts
  };
  for (const auto& model : models) {
    for (const int slots : {2, 3, 4}) {
      for (int group = 1; group <= 8; ++group) {
        for (const Transfer transfer : {Transfer::kDirect, Transfer::kStaged, Transfer::kGather}) {
          if ((transfer == Transfer::kGather) != (group > 1)) continue;
          SCOPED_TRACE(absl::StrCat("slots ", slots, " group ", group, " transfer ",
                                    static_cast<int>(transfer)));
          const int64_t g = group;
          int64_t largest_shard = 0, streamed = 0, one_copy = 0, padding = 0;
          std::vector<std::vector<int64_t>> shards;
          for (const auto& ring : model) {
            shards.emplace_back();
            for (const int64_t bytes : ring) {
              const int64_t total = RoundUp(bytes, 256);  // one tensor
              const int64_t shard = RoundUp((total + g - 1) / g, 256);
              shards.back().push_back(shard);
              largest_shard = std::max(largest_shard, shard);
              streamed += total;
              one_copy += total;
              padding += g * shard - total;
              EXPECT_LT(g * shard - total, g * 256);
            }
          }

          Simulated sim(
              {.transfer = transfer, .block_bytes = model, .slots = slots, .group = group});
          int64_t device_bytes = slots * g * largest_shard;
          if (transfer == Transfer::kGather) device_bytes += 2 * largest_shard;
          EXPECT_EQ(sim.streamer->device_bytes(), device_bytes);
          EXPECT_EQ(sim.device.memory().used_bytes, device_bytes);
          const int64_t staging = transfer == Transfer::kStaged ? 2 * largest_shard : 0;
          EXPECT_EQ(sim.streamer->staging_bytes(), staging);
          EXPECT_EQ(sim.device.memory().host_bytes, staging);

          // Host shards over the group: one copy and the padding.
          int64_t host = 0;
          for (size_t r = 0; r < model.size(); ++r) {
            for (size_t b = 0; b < model[r].size(); ++b) {
              const BlockLayout layout =
                  BlockLayout::Of({{.name = "w", .shape = {model[r][b]}, .dtype = DType::kU8}});
              EXPECT_EQ(layout.shard_bytes(g), shards[r][b]);
              host += g * layout.shard_bytes(g);
            }
          }
          EXPECT_EQ(host, one_copy + padding);

          // Per step: streamed / g (with the padding) over the bus, (g - 1) times as much over the
          // fabric, whatever is computed meanwhile.
          constexpr int64_t kSteps = 3;
          for (size_t r = 0; r < model.size(); ++r) sim.plan.Add(static_cast<int>(r), kSteps);
          for (const int branches : {1, 2}) {
            sim.Walk(absl::Milliseconds(branches));
            const StreamerStats stats = sim.streamer->stats();
            EXPECT_EQ(stats.bus_bytes, kSteps * (streamed + padding) / g);
            EXPECT_EQ(stats.fabric_bytes, kSteps * (streamed + padding) / g * (g - 1));
            int64_t packed = 0;
            for (const auto& ring : model) {
              for (const int64_t bytes : ring) packed += bytes;
            }
            EXPECT_EQ(stats.packed_bytes, transfer == Transfer::kStaged ? kSteps * packed : 0);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace dlo
