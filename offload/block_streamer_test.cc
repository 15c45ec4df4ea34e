// The streamer on real CPU streams: contents, order, errors. Its laws of time are in
// streamer_laws_test.cc.
#include "offload/block_streamer.h"

#include <algorithm>
#include <random>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/testing/host_model.h"
#include "runtime/cpu/thread_communicator.h"

namespace dlo {
namespace {

using testing::HasSubstr;

class Streamer : public testing::Test {
 protected:
  std::unique_ptr<BlockStreamer> Make(std::vector<std::vector<HostBlock>> rings, int slots = 2) {
    auto streamer = BlockStreamer::Create(*device_, std::move(rings), {.slots = slots}, nullptr);
    EXPECT_TRUE(streamer.ok()) << streamer.status();
    return *std::move(streamer);
  }

  std::unique_ptr<Device> device_ = *OpenDevice(DeviceKind::kCpu, 0);
};

TEST(VisitPlan, WalksRunsInOrderAndComparesByContent) {
  VisitPlan plan({2, 0, 3});
  plan.Add(0, 2);
  plan.Add(1, 5);  // an empty ring asks for nothing
  plan.Add(2, 1);
  std::vector<std::pair<int, int64_t>> visits;
  for (auto c = plan.begin(); !c.done(); c.Next()) {
    EXPECT_EQ(c.visit(), static_cast<int64_t>(visits.size()));
    visits.emplace_back(c.ring(), c.block());
  }
  EXPECT_THAT(visits, testing::ElementsAre(std::pair(0, 0), std::pair(0, 1), std::pair(0, 0),
                                           std::pair(0, 1), std::pair(2, 0), std::pair(2, 1),
                                           std::pair(2, 2)));
  EXPECT_EQ(plan.num_visits(), 7);
  EXPECT_EQ(plan.digest(), "2,0,3:0x2,2x1");
  VisitPlan same({2, 0, 3});
  same.Add(0, 1);
  same.Add(0, 1);
  same.Add(2, 1);
  EXPECT_EQ(plan, same);
}

TEST_F(Streamer, DeliversEveryBlockOfThePlan) {
  const HostModel model({{40, 700, 3}, {9}, {64, 64}});
  VisitPlan plan = model.Plan();
  plan.Add(0, 1);
  plan.Add(1, 3);  // a ring of one block follows itself
  plan.Add(0, 2);
  plan.Add(2, 4);
  for (int slots : {2, 3, 5}) {
    for (bool staged : {false, true}) {
      auto streamer = Make(staged ? model.Staged() : model.Whole(), slots);
      for (int request = 0; request < 2; ++request) {
        ASSERT_TRUE(streamer->Start(plan).ok());
        for (auto c = plan.begin(); !c.done(); c.Next()) {
          auto lease = streamer->Acquire(c.ring());
          ASSERT_TRUE(lease.ok()) << lease.status();
          EXPECT_EQ(lease->block(), c.block());
          EXPECT_TRUE(HostModel::Matches(*lease, c.ring())) << "visit " << c.visit();
        }
        EXPECT_EQ(streamer->stats().visits, plan.num_visits());
        EXPECT_EQ(streamer->Acquire(0).status().code(), absl::StatusCode::kFailedPrecondition);
      }
    }
  }
}

// One component's blocks in pages of a file, the other's in memory of our own.
TEST_F(Streamer, PackedAndWholeBlocksShareSlotsAndPlan) {
  const HostModel model({{40, 700, 3}, {900}, {64, 64}});
  VisitPlan plan = model.Plan();
  plan.Add(0, 2);
  plan.Add(1, 3);
  plan.Add(2, 2);
  plan.Add(0, 1);
  for (int slots : {2, 3, 5}) {
    for (size_t packed_ring : {0, 1, 2}) {
      auto rings = model.Whole();
      rings[packed_ring] = model.Staged()[packed_ring];
      int64_t largest = 0;
      for (const HostBlock& block : rings[packed_ring]) {
        largest = std::max(largest, block.layout.total_bytes());
      }
      auto streamer = Make(rings, slots);
      EXPECT_EQ(streamer->staging_bytes(), 2 * largest);
      ASSERT_TRUE(streamer->Start(plan).ok());
      for (auto c = plan.begin(); !c.done(); c.Next()) {
        auto lease = streamer->Acquire(c.ring());
        ASSERT_TRUE(lease.ok()) << lease.status();
        EXPECT_EQ(lease->block(), c.block());
        EXPECT_TRUE(HostModel::Matches(*lease, c.ring())) << "visit " << c.visit();
      }
      EXPECT_GT(streamer->stats().packed_bytes, 0);
      EXPECT_LT(streamer->stats().packed_bytes, streamer->stats().bus_bytes);
    }
  }
}

// A block must stay whole as long as it is leased, however far the moves have run ahead.
TEST_F(Streamer, ALeasedBlockIsNotOverwritten) {
  const HostModel model({{300, 300, 300}});
  VisitPlan plan = model.Plan();
  plan.Add(0, 200);
  auto streamer = Make(model.Whole());
  ASSERT_TRUE(streamer->Start(plan).ok());
  std::mt19937 random(1);
  for (int64_t v = 0; v < plan.num_visits(); ++v) {
    auto lease = streamer->Acquire(0);
    ASSERT_TRUE(lease.ok());
    if (random() % 4 == 0) std::this_thread::yield();
    ASSERT_TRUE(HostModel::Matches(*lease, 0));
    ASSERT_TRUE(HostModel::Matches(*lease, 0));
  }
}

TEST_F(Streamer, AnAbandonedPlanLeavesNothingBehind) {
  const HostModel model({{100, 200}, {50}});
  VisitPlan plan = model.Plan();
  plan.Add(0, 3);
  plan.Add(1, 2);
  auto streamer = Make(model.Staged());
  for (int64_t stop_after = 0; stop_after < plan.num_visits(); ++stop_after) {
    ASSERT_TRUE(streamer->Start(plan).ok());
    auto c = plan.begin();
    for (int64_t v = 0; v < stop_after; ++v, c.Next())
      ASSERT_TRUE(streamer->Acquire(c.ring()).ok());
    ASSERT_TRUE(streamer->Start(plan).ok());
    for (c = plan.begin(); !c.done(); c.Next()) {
      auto lease = streamer->Acquire(c.ring());
      ASSERT_TRUE(lease.ok());
      EXPECT_TRUE(HostModel::Matches(*lease, c.ring()));
    }
  }
}

TEST_F(Streamer, FinishWalksTheRest) {
  const HostModel model({{100, 200}});
  VisitPlan plan = model.Plan();
  plan.Add(0, 5);
  auto streamer = Make(model.Whole());
  ASSERT_TRUE(streamer->Start(plan).ok());
  ASSERT_TRUE(streamer->Acquire(0).ok());
  ASSERT_TRUE(streamer->Finish().ok());
  EXPECT_EQ(streamer->stats().visits, 10);
}

TEST_F(Streamer, NotesEachVisitInTheFlightRecorder) {
  const HostModel model({{4, 4}});
  const auto recorder = FlightRecorder::Private();
  auto streamer = *BlockStreamer::Create(*device_, model.Whole(),
                                         {.slots = 2, .recorder = recorder.get()}, nullptr);
  VisitPlan plan = model.Plan();
  plan.Add(0, 2);
  ASSERT_TRUE(streamer->Start(plan).ok());
  {
    const auto lease = streamer->Acquire(0);
    ASSERT_TRUE(lease.ok()) << lease.status();
    EXPECT_EQ(recorder->place().visit, 1);
    EXPECT_EQ(recorder->Read().records.back().state, FlightState::kBegun);
  }
  ASSERT_TRUE(streamer->Finish().ok());
  const FlightLog log = recorder->Read();
  ASSERT_EQ(log.records.size(), 4u);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(log.records[i].OpText(), "visit " + std::to_string(i + 1));
    EXPECT_EQ(log.records[i].state, FlightState::kDone);
  }
}

TEST_F(Streamer, BytesMovedAreTheStreamedBytesOfEachPass) {
  const HostModel model({{100, 200}});
  int64_t streamed = 0, packed = 0;
  const auto rings = model.Staged();
  for (const HostBlock& block : rings[0]) {
    streamed += block.layout.total_bytes();
    for (const PackPiece& piece : block.pieces) packed += piece.bytes;
  }
  VisitPlan plan = model.Plan();
  plan.Add(0, 7);
  auto whole = Make(model.Whole()), staged = Make(model.Staged());
  for (BlockStreamer* s : {whole.get(), staged.get()}) {
    ASSERT_TRUE(s->Start(plan).ok());
    ASSERT_TRUE(s->Finish().ok());
    EXPECT_EQ(s->stats().bus_bytes, 7 * streamed);
    EXPECT_EQ(s->stats().fabric_bytes, 0);
  }
  EXPECT_EQ(whole->stats().packed_bytes, 0);
  EXPECT_EQ(staged->stats().packed_bytes, 7 * packed);
}

TEST_F(Streamer, DeviceBytesAreSlotsTimesTheLargestBlock) {
  const HostModel model({{100, 1000, 3}, {500}});
  const int64_t largest = model.Whole()[0][1].layout.total_bytes();
  for (int slots : {2, 3}) {
    auto streamer = Make(model.Whole(), slots);
    EXPECT_EQ(streamer->device_bytes(), slots * largest);
    EXPECT_EQ(device_->memory().used_bytes, slots * largest);
    streamer.reset();
    EXPECT_EQ(device_->memory().used_bytes, 0);
  }
}

// Ranks as threads, each with its shard of every block.
class GatheringStreamer : public testing::TestWithParam<int> {};

TEST_P(GatheringStreamer, EveryRankSeesEveryBlockWhole) {
  const int size = GetParam();
  const HostModel model({{40, 700, 3, 129}, {9, 64}});
  VisitPlan plan = model.Plan();
  plan.Add(0, 6);
  plan.Add(1, 1);
  plan.Add(0, 3);
  ThreadWorld world;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      auto communicator = world.factory().Create({.name = "weights", .rank = rank, .size = size});
      ASSERT_TRUE(communicator.ok()) << communicator.status();
      const HostModel::Shards shards = model.Shard(rank, size);
      auto device = *OpenDevice(DeviceKind::kCpu, 0);
      for (int slots : {2, 3}) {
        auto streamer =
            BlockStreamer::Create(*device, shards.rings, {.slots = slots}, communicator->get());
        ASSERT_TRUE(streamer.ok()) << streamer.status();
        ASSERT_TRUE((*streamer)->Start(plan).ok());
        auto c = plan.begin();
        // The last rank has nothing to compute after a while and only walks.
        const int64_t stop = rank == size - 1 ? 5 : plan.num_visits();
        for (; c.visit() < stop; c.Next()) {
          auto lease = (*streamer)->Acquire(c.ring());
          ASSERT_TRUE(lease.ok()) << lease.status();
          ASSERT_TRUE(HostModel::Matches(*lease, c.ring())) << "visit " << c.visit();
        }
        ASSERT_TRUE((*streamer)->Finish().ok());
        EXPECT_EQ((*streamer)->stats().visits, plan.num_visits());
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}
INSTANTIATE_TEST_SUITE_P(Sizes, GatheringStreamer, testing::Values(2, 3, 4));

TEST(GatheringStreamerFaults, AGroupThatBreaksFailsTheVisitAndSaysWhy) {
  const HostModel model({{64, 64}});
  VisitPlan plan = model.Plan();
  plan.Add(0, 50);
  ThreadWorld world;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      auto communicator = *world.factory().Create({.name = "weights", .rank = rank, .size = 2});
      const HostModel::Shards shards = model.Shard(rank, 2);
      auto device = *OpenDevice(DeviceKind::kCpu, 0);
      auto streamer = *BlockStreamer::Create(*device, shards.rings, {}, communicator.get());
      ASSERT_TRUE(streamer->Start(plan).ok());
      absl::Status status;
      for (int64_t v = 0; status.ok() && v < plan.num_visits(); ++v) {
        if (rank == 1 && v == 20) communicator->Abort("the test wants it");
        status = streamer->Acquire(0).status();
      }
      EXPECT_FALSE(status.ok()) << "rank " << rank;
      EXPECT_THAT(status.message(), HasSubstr("of ring 0 (visit "));
      EXPECT_EQ(streamer->Acquire(0).status(), status);  // it stays broken
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST_F(Streamer, MisuseIsAnErrorNotACrash) {
  const HostModel model({{10, 10}, {10}});
  auto streamer = Make(model.Whole());
  EXPECT_EQ(streamer->Acquire(0).status().code(),
            absl::StatusCode::kFailedPrecondition);  // no plan yet
  EXPECT_EQ(streamer->Start(VisitPlan({2})).code(), absl::StatusCode::kInvalidArgument);
  VisitPlan plan = model.Plan();
  plan.Add(1, 1);
  plan.Add(0, 1);
  ASSERT_TRUE(streamer->Start(plan).ok());
  EXPECT_THAT(streamer->Acquire(0).status().message(), HasSubstr("ring 1 at visit 0"));
  {
    auto lease = streamer->Acquire(1);
    ASSERT_TRUE(lease.ok());
    EXPECT_THAT(streamer->Acquire(0).status().message(), HasSubstr("still leased"));
    EXPECT_EQ(streamer->Start(plan).code(), absl::StatusCode::kFailedPrecondition);
  }
  EXPECT_TRUE(streamer->Acquire(0).ok());
}

TEST_F(Streamer, WrongBlocksAreRefusedByName) {
  const HostModel model({{10, 10}});
  const auto create = [&](std::vector<std::vector<HostBlock>> rings, int slots) {
    return BlockStreamer::Create(*device_, std::move(rings), {.slots = slots}, nullptr).status();
  };
  EXPECT_THAT(create(model.Whole(), 1).message(), HasSubstr("offload.slots is 1"));
  EXPECT_THAT(create({{}}, 2).message(), HasSubstr("no block"));
  auto both = model.Whole();
  both[0][1].pieces = model.Staged()[0][1].pieces;
  EXPECT_THAT(create(both, 2).message(), HasSubstr("block 1 of ring 0"));
  auto neither = model.Whole();
  neither[0][1].bytes = nullptr;
  EXPECT_THAT(create(neither, 2).message(), HasSubstr("block 1 of ring 0"));
  auto outside = model.Staged();
  outside[0][1].pieces[0].offset = 1 << 20;
  EXPECT_THAT(create(outside, 2).message(), HasSubstr("outside"));
  auto empty = model.Whole();
  empty[0][0].layout = BlockLayout();
  EXPECT_THAT(create(empty, 2).message(), HasSubstr("no bytes"));
  EXPECT_EQ(device_->memory().used_bytes, 0);
}

}  // namespace
}  // namespace dlo
