#include "runtime/communicator.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/communicator_testing.h"
#include "runtime/cpu/thread_communicator.h"
#include "runtime/cuda/nccl_communicator.h"

namespace dlo {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;

// A latch whose wait ThreadSanitizer understands.
class Event {
 public:
  void Set() {
    std::lock_guard<std::mutex> lock(mutex_);
    set_ = true;
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

// Runs `body` as each rank of a group named "g". What it leaves is destroyed when all are done,
// except where the body destroys it itself.
void RunRanks(ThreadWorld& world, int size, absl::Duration operation_timeout,
              const std::function<void(std::unique_ptr<Communicator>&)>& body) {
  std::vector<std::unique_ptr<Communicator>> communicators(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto communicator = world.factory().Create({.name = "g",
                                                  .rank = rank,
                                                  .size = size,
                                                  .setup_timeout = absl::Seconds(60),
                                                  .operation_timeout = operation_timeout});
      ASSERT_TRUE(communicator.ok()) << communicator.status();
      communicators[rank] = *std::move(communicator);
      body(communicators[rank]);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class ThreadCommunicator : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, ThreadCommunicator, testing::Values(1, 2, 3, 4));

TEST_P(ThreadCommunicator, DoesEveryOperationAtEverySize) {
  ThreadWorld world;
  RunRanks(world, GetParam(), absl::Seconds(100),
           [](std::unique_ptr<Communicator>& group) { EXPECT_EQ(CheckCollectives(*group), ""); });
}

TEST(Communicator, NotesItsOperationsInTheFlightRecorder) {
  ThreadWorld world;
  std::vector<std::unique_ptr<FlightRecorder>> recorders;
  for (int rank = 0; rank < 2; ++rank) recorders.push_back(FlightRecorder::Private());
  RunRanks(world, 2, absl::Milliseconds(100), [&](std::unique_ptr<Communicator>& group) {
    FlightRecorder& recorder = *recorders[group->rank()];
    group->Record(&recorder);
    Bytes data(8);
    EXPECT_TRUE(group->Broadcast(absl::MakeSpan(data), 1).ok());
    // The other rank does not come.
    if (group->rank() == 0) {
      EXPECT_FALSE(group->Barrier().ok());
    }
  });
  const FlightLog log = recorders[0]->Read();
  ASSERT_EQ(log.records.size(), 2u);
  EXPECT_EQ(log.records[0].OpText(), "Broadcast #1 of g with peer 1");
  EXPECT_EQ(log.records[0].state, FlightState::kDone);
  EXPECT_EQ(log.records[1].OpText(), "Barrier #2 of g");
  EXPECT_EQ(log.records[1].state, FlightState::kFailed);
  EXPECT_GE(log.records[1].duration, absl::Milliseconds(90));
  EXPECT_EQ(recorders[1]->Read().records.size(), 1u);
}

TEST(Communicator, SumOfBf16IsRoundedOnceFromAnExactSum) {
  ThreadWorld world;
  RunRanks(world, 3, absl::Seconds(60), [](std::unique_ptr<Communicator>& group) {
    // 256 + 1 + 1: adding in bfloat16 would stay at 256 twice.
    const uint16_t values[] = {0x4380, 0x3f80, 0x3f80};
    uint16_t value = values[group->rank()];
    ASSERT_TRUE(group->AllReduceSum({reinterpret_cast<std::byte*>(&value), 2}, DType::kBF16).ok());
    EXPECT_EQ(value, 0x4381);  // 258
  });
}

TEST(Communicator, AStoppedRankIsNamedAtTheDeadline) {
  Event resume;
  std::atomic<int> failed = 0;
  ThreadWorld world([&](const GroupSpec& spec, const CollectiveOp& op) {
    if (spec.rank == 2 && op.sequence == 3) resume.Wait();
    return absl::OkStatus();
  });
  RunRanks(world, 3, absl::Seconds(1), [&](std::unique_ptr<Communicator>& group) {
    Bytes send(100);
    Bytes recv(300);
    absl::Status status;
    for (int i = 0; i < 3 && status.ok(); ++i)
      status = group->AllGather(send, absl::MakeSpan(recv));
    if (group->rank() == 2) return;
    EXPECT_THAT(status.message(), AllOf(HasSubstr(absl::StrCat("rank ", group->rank(),
                                                               " of group "
                                                               "\"g\"")),
                                        HasSubstr("AllGather #3"), HasSubstr("peer 2")));
    // The first to give up blames the stopped rank; the other may see that one leave before.
    if (failed++ == 0 && status.code() == absl::StatusCode::kDeadlineExceeded) {
      EXPECT_THAT(PeersOfError(status), ElementsAre(2));
    }
    if (failed == 2) resume.Set();
    const absl::Status later = group->Barrier();
    EXPECT_EQ(later.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(later.message(), AllOf(HasSubstr("Barrier refused"), HasSubstr("AllGather #3")));
    EXPECT_EQ(group->status(), status);
  });
}

TEST(Communicator, TheDeadlineOfACallEndsItBeforeTheTimeout) {
  Event done;
  ThreadWorld world;
  RunRanks(world, 2, absl::Hours(1), [&](std::unique_ptr<Communicator>& group) {
    if (group->rank() == 1) return done.Wait();
    const absl::Status status = group->Barrier(absl::Now() + absl::Milliseconds(50));
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(status.message(), HasSubstr("nothing more from peer 1 by the deadline"));
    EXPECT_THAT(PeersOfError(status), ElementsAre(1));
    done.Set();
  });
}

TEST(Communicator, ARankThatDiesIsNamedAtOnceByAllOthers) {
  ThreadWorld world;
  RunRanks(world, 4, absl::Hours(1), [](std::unique_ptr<Communicator>& group) {
    if (group->rank() == 1) {
      EXPECT_TRUE(group->Barrier().ok());
      group.reset();
      return;
    }
    EXPECT_TRUE(group->Barrier().ok());
    Bytes send(10);
    Bytes recv(40);
    const absl::Status status = group->AllGather(send, absl::MakeSpan(recv));
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("AllGather #2"), HasSubstr("peer 1")));
    EXPECT_THAT(PeersOfError(status), testing::Contains(1));
  });
}

TEST(Communicator, ARankThatFailsInAnOperationTakesTheGroupDownWithItsReason) {
  ThreadWorld world([](const GroupSpec& spec, const CollectiveOp& op) {
    return spec.rank == 0 && op.sequence == 5 ? absl::ResourceExhaustedError("out of memory")
                                              : absl::OkStatus();
  });
  RunRanks(world, 2, absl::Hours(1), [](std::unique_ptr<Communicator>& group) {
    absl::Status status;
    for (int i = 0; i < 9 && status.ok(); ++i) status = group->Barrier();
    EXPECT_EQ(group->sequence(), 5u);
    if (group->rank() == 0) {
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
      EXPECT_THAT(status.message(), AllOf(HasSubstr("Barrier #5"), HasSubstr("out of memory")));
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
      EXPECT_THAT(PeersOfError(status), ElementsAre(0));
    }
  });
}

TEST(Communicator, AbortFromAnotherThreadEndsAnOperationThatNobodyElseJoins) {
  Event inside;
  Event done;
  ThreadWorld world([&](const GroupSpec& spec, const CollectiveOp& op) {
    inside.Set();
    return absl::OkStatus();
  });
  RunRanks(world, 2, absl::Hours(1), [&](std::unique_ptr<Communicator>& group) {
    if (group->rank() == 1) return done.Wait();
    std::thread aborter([&] {
      inside.Wait();
      group->Abort("the supervisor said so");
    });
    Bytes data(1 << 20);
    const absl::Status status = group->Broadcast(absl::MakeSpan(data), 0);
    aborter.join();
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
    EXPECT_THAT(status.message(),
                AllOf(HasSubstr("Broadcast #1"), HasSubstr("the supervisor said so")));
    EXPECT_EQ(group->Barrier().code(), absl::StatusCode::kFailedPrecondition);
    group->Abort("again");
    EXPECT_EQ(group->status(), status);
    done.Set();
  });
}

TEST(Communicator, AbortBetweenOperationsReachesThePeers) {
  ThreadWorld world;
  RunRanks(world, 2, absl::Hours(1), [](std::unique_ptr<Communicator>& group) {
    ASSERT_TRUE(group->Barrier().ok());
    if (group->rank() == 0) {
      group->Abort("drained");
      EXPECT_THAT(group->status().message(), HasSubstr("after operation #1: drained"));
    } else {
      EXPECT_EQ(group->Barrier().code(), absl::StatusCode::kUnavailable);
    }
  });
}

TEST(Communicator, RanksOutOfStepFailWithBothOperations) {
  ThreadWorld world;
  RunRanks(world, 2, absl::Hours(1), [](std::unique_ptr<Communicator>& group) {
    Bytes data(8);
    const absl::Status status = group->rank() == 0 ? group->Broadcast(absl::MakeSpan(data), 1)
                                                   : group->AllToAll(data, absl::MakeSpan(data));
    if (group->rank() == 0) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
      EXPECT_THAT(status.message(),
                  AllOf(HasSubstr("out of step"), HasSubstr("peer 1 is in AllToAll #1"),
                        HasSubstr("this rank in Broadcast #1")));
    } else {
      EXPECT_FALSE(status.ok());
    }
  });
}

TEST(Communicator, SizesThatDifferFailInsteadOfOverrunning) {
  ThreadWorld world;
  RunRanks(world, 2, absl::Hours(1), [](std::unique_ptr<Communicator>& group) {
    const int64_t bytes = group->rank() == 0 ? 10 : 11;
    Bytes send(bytes);
    Bytes recv(2 * bytes);
    const absl::Status status = group->AllGather(send, absl::MakeSpan(recv));
    EXPECT_FALSE(status.ok());
    if (status.code() == absl::StatusCode::kInternal) {
      EXPECT_THAT(status.message(), AllOf(HasSubstr("10 bytes"), HasSubstr("11 bytes")));
    }
  });
}

TEST(Communicator, ASecondThreadIsRefusedAndHarmsNothing) {
  Event inside;
  Event refused;
  ThreadWorld world([&](const GroupSpec& spec, const CollectiveOp& op) {
    if (spec.rank == 0 && op.sequence == 1) {
      inside.Set();
      refused.Wait();
    }
    return absl::OkStatus();
  });
  RunRanks(world, 2, absl::Seconds(60), [&](std::unique_ptr<Communicator>& group) {
    if (group->rank() == 1) {
      EXPECT_TRUE(group->Barrier().ok());
      return;
    }
    std::thread second([&] {
      inside.Wait();
      const absl::Status status = group->Barrier();
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(status.message(), HasSubstr("another thread is in Barrier #1"));
      refused.Set();
    });
    EXPECT_TRUE(group->Barrier().ok());
    second.join();
    EXPECT_TRUE(group->status().ok());
  });
}

TEST(CommunicatorFactory, RanksThatDoNotComeAreNamed) {
  ThreadWorld world;
  const auto communicator = world.factory().Create(
      {.name = "weights/0", .rank = 1, .size = 3, .setup_timeout = absl::Milliseconds(30)});
  EXPECT_EQ(communicator.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(communicator.status().message(), AllOf(HasSubstr("rank 1 of group \"weights/0\""),
                                                     HasSubstr("rank 0, 2 did not come")));
  EXPECT_THAT(PeersOfError(communicator.status()), ElementsAre(0, 2));
}

TEST(CommunicatorFactory, WrongSpecsAreRefused) {
  ThreadWorld world;
  const GroupSpec specs[] = {{.name = "", .size = 1},
                             {.name = "g", .rank = 2, .size = 2},
                             {.name = "g", .rank = -1, .size = 2},
                             {.name = "g", .size = 0},
                             {.name = "g", .size = 1, .operation_timeout = absl::ZeroDuration()}};
  for (const GroupSpec& spec : specs) {
    EXPECT_EQ(world.factory().Create(spec).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

// Groups of all kinds at once on 8 ranks: each rank finds its own and all of them work.
TEST(RankCommunicators, AreThoseOfTheTopologyAndWorkSideBySide) {
  const ParallelConfig config{.dp = 2, .ulysses = 2, .cfg = 2};
  const Topology topology = *Topology::Create(config);
  ThreadWorld world;
  std::vector<std::thread> threads;
  for (int value = 0; value < topology.world_size(); ++value) {
    threads.emplace_back([&, value] {
      auto all = CreateRankCommunicators(
          topology, Rank{value}, WeightTransfer::kAllGather,
          {.setup = absl::Seconds(60), .operation = absl::Seconds(60)}, world.factory());
      ASSERT_TRUE(all.ok()) << all.status();
      EXPECT_EQ(all->tp, nullptr);
      EXPECT_EQ(all->ring, nullptr);
      EXPECT_EQ(all->hsdp, nullptr);
      EXPECT_EQ(all->weights->name(), absl::StrCat("weights/", value % 4));
      EXPECT_EQ(all->weights->rank(), value / 4);
      EXPECT_EQ(all->replica->name(), absl::StrCat("replica/", value / 4 * 4));
      EXPECT_EQ(all->replica->size(), 4);
      EXPECT_EQ(all->ulysses->rank(), value % 2);
      EXPECT_EQ(all->cfg->rank(), value / 2 % 2);
      for (Communicator* group :
           {all->weights.get(), all->replica.get(), all->ulysses.get(), all->cfg.get()}) {
        EXPECT_TRUE(group->Barrier().ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(RankCommunicators, RankLocalReplicasShareNothing) {
  ThreadWorld world;
  const Topology topology = *Topology::Create({.dp = 4});
  auto all =
      CreateRankCommunicators(topology, Rank{2}, WeightTransfer::kRankLocal, {}, world.factory());
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->weights, nullptr);
  EXPECT_EQ(all->replica, nullptr);
}

TEST(Communicator, ABufferThatIsTooLargeIsAnError) {
  ThreadWorld world;
  auto group = *world.factory().Create({.name = "g"});
  EXPECT_EQ(group->AllocateBuffer(-1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(group->status().ok());
  const absl::Status status = group->AllocateBuffer(int64_t{1} << 60).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("AllocateBuffer #1"));
}

class NoStore : public RendezvousStore {
  absl::Status Set(const std::string&, const std::string&) override { return absl::OkStatus(); }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Time) override {
    return absl::DeadlineExceededError(key);
  }
};

// On a machine without a driver, or a build without CUDA or NCCL, the error says which. Never a
// crash. What runs on a GPU is in cuda/nccl_communicator_test.cc.
TEST(NcclFactory, OpensOrSaysWhatIsMissing) {
  NoStore store;
  auto factory = OpenNcclFactory(store, {.device = 0, .prefix = "p"});
  if (factory.ok()) return;
  EXPECT_EQ(factory.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(factory.status().message(),
              AnyOf(HasSubstr("libdlo_cuda.so"), HasSubstr("CUDA device"), HasSubstr("cuda:0")));
}

}  // namespace
}  // namespace dlo
