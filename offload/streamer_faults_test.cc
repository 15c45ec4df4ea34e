// What a streamer does when the machine fails underneath it. Faults are injected at the seams: the
// CPU device's hooks and those of ThreadWorld.
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/block_streamer.h"
#include "offload/testing/host_model.h"
#include "runtime/cpu/cpu_device.h"
#include "runtime/cpu/thread_communicator.h"

namespace dlo {
namespace {

using testing::HasSubstr;

// Fails the n-th call (from 1), while it is set.
class Fault {
 public:
  void At(int n) {
    left_ = n;
    armed_ = true;
  }
  void Never() { armed_ = false; }
  absl::Status Check(absl::StatusCode code, const char* text) {
    if (armed_ && --left_ == 0) return absl::Status(code, text);
    return absl::OkStatus();
  }

 private:
  std::atomic<bool> armed_ = false;
  std::atomic<int> left_ = 0;
};

// Walks a plan to its end; the first error, or INTERNAL for a wrong block.
absl::Status WalkAll(BlockStreamer& streamer, const VisitPlan& plan) {
  absl::Status status = streamer.Start(plan);
  if (!status.ok()) return status;
  for (auto c = plan.begin(); !c.done(); c.Next()) {
    auto lease = streamer.Acquire(c.ring());
    if (!lease.ok()) return lease.status();
    if (!HostModel::Matches(*lease, c.ring())) return absl::InternalError("a wrong block");
  }
  return absl::OkStatus();
}

class StreamerFaults : public testing::Test {
 protected:
  StreamerFaults() {
    plan_.Add(0, 3);
    plan_.Add(1, 2);
  }

  std::unique_ptr<Device> DeviceWithMoveFault(CpuMove::Kind kind) {
    return MakeCpuDevice(0, {.moves = {.before = [this, kind](const CpuMove& move) {
                               if (move.kind != kind) return absl::OkStatus();
                               return fault_.Check(absl::StatusCode::kInternal, "the bus broke");
                             }}});
  }

  Fault fault_;
  const HostModel model_{{{40, 700, 3}, {9}}};
  VisitPlan plan_ = model_.Plan();
};

TEST_F(StreamerFaults, AMoveThatFailsFailsItsVisitAndTheNextPlanRuns) {
  struct Case {
    CpuMove::Kind kind;
    bool staged;
  };
  for (const auto& [kind, staged] :
       {Case{CpuMove::Kind::kCopy, false}, Case{CpuMove::Kind::kCopy, true},
        Case{CpuMove::Kind::kPack, true}}) {
    auto device = DeviceWithMoveFault(kind);
    auto streamer =
        *BlockStreamer::Create(*device, staged ? model_.Staged() : model_.Whole(), {}, nullptr);
    const DeviceMemory idle = device->memory();
    for (int n = 1; n <= plan_.num_visits(); ++n) {
      fault_.At(n);
      const absl::Status status = WalkAll(*streamer, plan_);
      // Of visit n - 1, in the plan's order.
      auto at = plan_.begin();
      for (int i = 1; i < n; ++i) at.Next();
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
      EXPECT_EQ(status.message(), absl::StrCat("block ", at.block(), " of ring ", at.ring(),
                                               " (visit ", n - 1, "): the bus broke"));
      EXPECT_EQ(streamer->Acquire(0).status(), status);  // until the next Start
      fault_.Never();
      EXPECT_EQ(WalkAll(*streamer, plan_), absl::OkStatus());
      EXPECT_EQ(device->memory().used_bytes, idle.used_bytes);
      EXPECT_EQ(device->memory().host_bytes, idle.host_bytes);
    }
    streamer.reset();
    EXPECT_EQ(device->memory().used_bytes, 0);
    EXPECT_EQ(device->memory().host_bytes, 0);
  }
}

// Slots, shard and staging buffers: whichever cannot be had, nothing of the others stays.
TEST_F(StreamerFaults, CreateLeavesNothingBehindWhereverMemoryEnds) {
  struct Case {
    bool staged;
    bool gather;
    int device_buffers;
    int host_buffers;
  };
  ThreadWorld world;
  auto alone = *world.factory().Create({.name = "weights", .rank = 0, .size = 1});
  for (const auto& [staged, gather, device_buffers, host_buffers] :
       {Case{false, false, 3, 0}, Case{true, false, 3, 2}, Case{false, true, 5, 0}}) {
    Fault host_fault;
    auto device = MakeCpuDevice(
        0, {.moves = {},
            .allocate =
                [this](int64_t) {
                  return fault_.Check(absl::StatusCode::kResourceExhausted, "no device memory");
                },
            .allocate_host =
                [&host_fault](int64_t) {
                  return host_fault.Check(absl::StatusCode::kResourceExhausted, "cannot pin");
                }});
    const auto create = [&, staged = staged, gather = gather] {
      return BlockStreamer::Create(*device, staged ? model_.Staged() : model_.Whole(), {.slots = 3},
                                   gather ? alone.get() : nullptr);
    };
    for (int n = 1; n <= device_buffers; ++n) {
      fault_.At(n);
      EXPECT_THAT(create().status().message(), HasSubstr("no device memory")) << n;
      EXPECT_EQ(device->memory().used_bytes, 0);
      EXPECT_EQ(device->memory().host_bytes, 0);
    }
    fault_.Never();
    for (int n = 1; n <= host_buffers; ++n) {
      host_fault.At(n);
      EXPECT_THAT(create().status().message(), HasSubstr("cannot pin")) << n;
      EXPECT_EQ(device->memory().used_bytes, 0);
      EXPECT_EQ(device->memory().host_bytes, 0);
    }
    host_fault.Never();
    auto streamer = create();
    ASSERT_TRUE(streamer.ok()) << streamer.status();
    EXPECT_EQ(WalkAll(**streamer, plan_), absl::OkStatus());
  }
}

TEST_F(StreamerFaults, APlanThatFoundNoRoomWasNotWalked) {
  auto device = MakeCpuDevice(0, {.moves = {}, .allocate = [this](int64_t) {
                                    return fault_.Check(absl::StatusCode::kResourceExhausted,
                                                        "no device memory");
                                  }});
  auto streamer = *BlockStreamer::Create(*device, model_.Whole(), {}, nullptr);
  ASSERT_EQ(streamer->Stop(), absl::OkStatus());
  fault_.At(1);
  EXPECT_EQ(streamer->Start(plan_).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(streamer->Finish().code(), absl::StatusCode::kResourceExhausted);
  fault_.Never();
  EXPECT_EQ(WalkAll(*streamer, plan_), absl::OkStatus());
}

// A kernel that throws in block k, and the request after it.
TEST_F(StreamerFaults, AnExceptionWhileABlockIsLeasedHarmsNoLaterRequest) {
  auto device = MakeCpuDevice(0);
  for (bool staged : {false, true}) {
    auto streamer = *BlockStreamer::Create(*device, staged ? model_.Staged() : model_.Whole(),
                                           {.slots = 2}, nullptr);
    const DeviceMemory idle = device->memory();
    for (int64_t throw_at = 0; throw_at < plan_.num_visits(); ++throw_at) {
      const auto forward = [&] {
        ASSERT_TRUE(streamer->Start(plan_).ok());
        for (auto c = plan_.begin(); !c.done(); c.Next()) {
          auto lease = streamer->Acquire(c.ring());
          ASSERT_TRUE(lease.ok());
          if (c.visit() == throw_at) throw std::runtime_error("a kernel failed");
        }
      };
      EXPECT_THROW(forward(), std::runtime_error);
      EXPECT_EQ(WalkAll(*streamer, plan_), absl::OkStatus());
      EXPECT_EQ(device->memory().used_bytes, idle.used_bytes);
      EXPECT_EQ(device->memory().host_bytes, idle.host_bytes);
    }
  }
}

// Cancelled before its first block, between any two, and after the last; abandoned with moves under
// way, whose memory may go only when they are done with it.
TEST_F(StreamerFaults, ACancelledPlanCanBeAbandonedAtEveryVisit) {
  for (bool staged : {false, true}) {
    for (int64_t stop = 0; stop <= plan_.num_visits(); ++stop) {
      std::atomic<int> under_way = 0;
      auto device = MakeCpuDevice(0, {.moves = {.before =
                                                    [&](const CpuMove&) {
                                                      ++under_way;
                                                      std::this_thread::yield();
                                                      return absl::OkStatus();
                                                    },
                                                .after =
                                                    [&](const CpuMove&) {
                                                      --under_way;
                                                      return absl::OkStatus();
                                                    }}});
      {
        // The model's memory ends with the streamer's use of it.
        const HostModel model({{40, 700, 3}, {9}});
        auto streamer = *BlockStreamer::Create(*device, staged ? model.Staged() : model.Whole(),
                                               {.slots = 3}, nullptr);
        ASSERT_TRUE(streamer->Start(plan_).ok());
        auto c = plan_.begin();
        for (int64_t v = 0; v < stop; ++v, c.Next()) ASSERT_TRUE(streamer->Acquire(c.ring()).ok());
        EXPECT_EQ(streamer->stats().visits, stop);
      }
      EXPECT_EQ(under_way, 0);
      EXPECT_EQ(device->memory().used_bytes, 0);
      EXPECT_EQ(device->memory().host_bytes, 0);
    }
  }
}

// Two ranks as threads: rank 1 does `fault`, both walk. Returns what each one's walk ended with.
struct GroupEnd {
  std::vector<absl::Status> status{2};
  std::vector<std::vector<int>> blamed{2};
  std::vector<int64_t> device_bytes = {-1, -1};  // after the streamer went
};

struct RankOfGroup {
  int rank;
  Communicator* communicator;
  BlockStreamer* streamer;
};

GroupEnd RunGroup(const HostModel& model, const VisitPlan& plan, absl::Duration timeout,
                  const ThreadWorld::FaultHook& world_hook, const CpuDeviceHooks& hooks_of_rank_1,
                  const std::function<absl::Status(RankOfGroup)>& walk) {
  GroupEnd end;
  ThreadWorld world(world_hook);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      auto communicator = *world.factory().Create(
          {.name = "weights", .rank = rank, .size = 2, .operation_timeout = timeout});
      const HostModel::Shards shards = model.Shard(rank, 2);
      auto device = MakeCpuDevice(0, rank == 1 ? hooks_of_rank_1 : CpuDeviceHooks{});
      auto streamer = *BlockStreamer::Create(*device, shards.rings, {}, communicator.get());
      end.status[rank] = walk({rank, communicator.get(), streamer.get()});
      end.blamed[rank] = PeersOfError(communicator->status());
      streamer.reset();
      end.device_bytes[rank] = device->memory().used_bytes;
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return end;
}

class GroupFaults : public StreamerFaults {};

TEST_F(GroupFaults, AGatherThatTimesOutNamesTheRankThatDidNotCome) {
  absl::Notification rank_0_gave_up;
  const GroupEnd end = RunGroup(
      model_, plan_, absl::Milliseconds(200),
      [&](const GroupSpec& group, const CollectiveOp& op) {
        if (group.rank == 1 && op.sequence == 4) rank_0_gave_up.WaitForNotification();
        return absl::OkStatus();
      },
      {},
      [&](RankOfGroup rank) {
        const absl::Status status = WalkAll(*rank.streamer, plan_);
        if (rank.rank == 0) rank_0_gave_up.Notify();
        return status;
      });
  EXPECT_EQ(end.status[0].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(end.status[0].message(), HasSubstr("block 0 of ring 0 (visit 3): rank 0 of group"));
  EXPECT_THAT(end.blamed[0], testing::ElementsAre(1));
  EXPECT_FALSE(end.status[1].ok());
  EXPECT_THAT(end.device_bytes, testing::Each(0));
}

TEST_F(GroupFaults, APeerThatDiesMidGatherFailsTheVisitAtOnce) {
  const GroupEnd end = RunGroup(
      model_, plan_, absl::Minutes(5),
      [&](const GroupSpec& group, const CollectiveOp& op) {
        if (group.rank == 1 && op.sequence == 6) return absl::InternalError("killed");
        return absl::OkStatus();
      },
      {}, [&](RankOfGroup rank) { return WalkAll(*rank.streamer, plan_); });
  EXPECT_EQ(end.status[0].code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(end.status[0].message(), HasSubstr("(visit 5)"));
  EXPECT_THAT(end.blamed[0], testing::ElementsAre(1));
  EXPECT_EQ(end.status[1].code(), absl::StatusCode::kInternal);
  EXPECT_THAT(end.device_bytes, testing::Each(0));
}

// A rank whose own copy fails leaves the group, so that nobody waits for it until the deadline.
TEST_F(GroupFaults, ACopyThatFailsOnOneRankFailsTheOthersAtOnce) {
  fault_.At(4);
  const GroupEnd end =
      RunGroup(model_, plan_, absl::Minutes(5), {},
               {.moves = {.before =
                              [this](const CpuMove& move) {
                                if (move.kind != CpuMove::Kind::kCopy) return absl::OkStatus();
                                return fault_.Check(absl::StatusCode::kInternal, "the bus broke");
                              }}},
               [&](RankOfGroup rank) { return WalkAll(*rank.streamer, plan_); });
  EXPECT_THAT(end.status[1].message(), HasSubstr("(visit 3): the bus broke"));
  EXPECT_EQ(end.status[0].code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(end.blamed[0], testing::ElementsAre(1));
  EXPECT_THAT(end.device_bytes, testing::Each(0));
}

// A rank whose request was cancelled, or failed, after any number of visits walks on without
// computing; the other one gets all its blocks, and so does the next request of both.
TEST_F(GroupFaults, ACancelledRankWalksOnAndItsNeighbourFinishes) {
  for (int64_t stop = 0; stop <= plan_.num_visits(); ++stop) {
    const GroupEnd end =
        RunGroup(model_, plan_, absl::Minutes(5), {}, {}, [&](RankOfGroup rank) -> absl::Status {
          if (rank.rank == 1) {
            absl::Status status = rank.streamer->Start(plan_);
            for (int64_t v = 0; status.ok() && v < stop; ++v) {
              // A forward that throws while it holds the block.
              try {
                auto lease = rank.streamer->Acquire(v < 9 ? 0 : 1);
                status = lease.status();
                if (v == stop - 1) throw std::runtime_error("a kernel failed");
              } catch (const std::runtime_error&) {
                break;
              }
            }
            if (status.ok()) status = rank.streamer->Finish();
            if (!status.ok()) return status;
          } else if (absl::Status status = WalkAll(*rank.streamer, plan_); !status.ok()) {
            return status;
          }
          return WalkAll(*rank.streamer, plan_);
        });
    EXPECT_THAT(end.status, testing::Each(absl::OkStatus())) << "stop " << stop;
    EXPECT_THAT(end.device_bytes, testing::Each(0));
  }
}

}  // namespace
}  // namespace dlo
