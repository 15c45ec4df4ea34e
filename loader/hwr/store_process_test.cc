// What a store promises whatever its processes do: many at once, stopped ones, and ones that die at
// any step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "loader/hwr/folder_io.h"
#include "loader/hwr/store.h"
#include "loader/hwr/store_testing.h"
#include "spdlog/spdlog.h"

namespace dlo::hwr {
namespace {

namespace fs = std::filesystem;
using Fault = FaultyFileOps::Fault;

class StoreProcessTest : public ::testing::Test {
 protected:
  StoreProcessTest() { spdlog::set_level(spdlog::level::off); }

  fs::path root() const { return folder_ / "store"; }
  std::unique_ptr<Store> Open() { return OpenStore({.root = root()}); }
  fs::path Artifact(const Identity& identity) const { return root() / "artifacts" / identity.key; }

  static PublicationRecord Publish(Store& store, const Identity& identity, uint8_t seed = 1) {
    SmallProducer producer(seed);
    return store.Publish(identity, SmallLayout(), producer, {.deadline = Soon()});
  }

  TempFolder folder_;
  const Identity identity_ = SmallIdentity();
};

TEST_F(StoreProcessTest, OfManyProcessesOneBuildsAndAllMapTheSamePages) {
  constexpr int kProcesses = 6;
  Pipe go, results;
  std::vector<std::unique_ptr<Child>> children;
  for (int i = 0; i < kProcesses; ++i) {
    children.push_back(std::make_unique<Child>([&] {
      go.Receive();
      const auto store = OpenStore({.root = root()});
      const PublicationRecord record = Publish(*store, identity_);
      const LookupResult found = store->Lookup(identity_, {.deadline = Soon()});
      if (!found.lease || !HasBytesOf(*found.lease, 1)) return 1;
      results.Send(absl::StrCat(PublicationOutcomeName(record.outcome), " ",
                                found.lease->backing_fingerprint()));
      return 0;
    }));
  }
  for (int i = 0; i < kProcesses; ++i) go.Send("");
  int built = 0;
  std::set<std::string> fingerprints;
  for (int i = 0; i < kProcesses; ++i) {
    const std::vector<std::string> words = absl::StrSplit(results.Receive(), ' ');
    ASSERT_EQ(words.size(), 2u);
    if (words[0] == "published") {
      ++built;
    } else {
      EXPECT_TRUE(words[0] == "joined" || words[0] == "already-present") << words[0];
    }
    fingerprints.insert(words[1]);
  }
  for (const auto& child : children) EXPECT_EQ(child->Wait(), 0);
  EXPECT_EQ(built, 1);
  EXPECT_EQ(fingerprints.size(), 1u);
}

TEST_F(StoreProcessTest, BuildersOfDifferentKeysKeepTheLimitTogether) {
  // Room for two artifacts and a little; one builder at a time makes room before it begins.
  int64_t one = 0;
  {
    const auto store = OpenStore({.root = folder_ / "other"});
    Publish(*store, identity_);
    for (const auto& entry : fs::recursive_directory_iterator(folder_ / "other/artifacts")) {
      if (entry.is_regular_file()) one += static_cast<int64_t>(entry.file_size());
    }
  }
  const StorePolicy policy = {.max_store_bytes = 2 * one + 1000};
  OpenStore({.root = root(), .policy = policy});
  constexpr int kProcesses = 6;
  Pipe go;
  std::vector<std::unique_ptr<Child>> children;
  for (int i = 0; i < kProcesses; ++i) {
    children.push_back(std::make_unique<Child>([&, i] {
      go.Receive();
      const auto store = OpenStore({.root = root(), .policy = policy});
      SmallProducer producer;
      int result = 0;
      producer.on_produce = [&](int, int) {
        if (store->Inventory()->bytes > policy.max_store_bytes) result = 2;
      };
      const PublicationRecord record = store->Publish(SmallIdentity(absl::StrCat(i)), SmallLayout(),
                                                      producer, {.deadline = Soon()});
      return record.outcome == PublicationOutcome::kPublished ? result : 1;
    }));
  }
  for (int i = 0; i < kProcesses; ++i) go.Send("");
  for (const auto& child : children) EXPECT_EQ(child->Wait(), 0);
  EXPECT_LE(OpenStore({.root = root(), .policy = policy})->Inventory()->bytes,
            policy.max_store_bytes);
}

TEST_F(StoreProcessTest, AChildOfForkDoesNotFreeItsParentsLocksWhenItEnds) {
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  {
    const LookupResult found = store->Lookup(identity_, {});
    ASSERT_TRUE(found.lease.has_value());
    // Not even where its copies of all objects are destroyed.
    Child child([&] {
      const_cast<LookupResult&>(found).lease.reset();
      return 0;
    });
    EXPECT_EQ(child.Wait(), 0);
    EXPECT_EQ(Open()->Evict(identity_.key, Soon()).code(), absl::StatusCode::kFailedPrecondition);
  }
  SmallProducer producer;
  producer.on_produce = [&](int, int) {
    Child child([] { return 0; });
    child.Wait();
    SmallProducer second;
    EXPECT_EQ(
        Open()
            ->Publish(SmallIdentity("third"), SmallLayout(), second, {.deadline = absl::Now()})
            .failure.reason,
        Reason::kActiveBuild);
  };
  EXPECT_EQ(store->Publish(SmallIdentity("second"), SmallLayout(), producer, {}).outcome,
            PublicationOutcome::kPublished);
  EXPECT_TRUE(Open()->Evict(identity_.key, Soon()).ok());
}

TEST_F(StoreProcessTest, TheLeaseOfAProcessThatIsKilledIsFree) {
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  Pipe ready;
  Child child([&]() -> int {
    const LookupResult found = Open()->Lookup(identity_, {});
    ready.Send(found.lease ? "leased" : "none");
    while (true) pause();
  });
  ASSERT_EQ(ready.Receive(), "leased");
  EXPECT_EQ(store->Evict(identity_.key, Soon()).code(), absl::StatusCode::kFailedPrecondition);
  kill(child.pid(), SIGKILL);
  child.Wait();
  EXPECT_TRUE(store->Evict(identity_.key, Soon()).ok());
}

TEST_F(StoreProcessTest, AStoppedProcessDelaysOthersNoLongerThanTheyWait) {
  Pipe ready;
  // Stops while it holds the lock of a store that is being made.
  Child maker([&] {
    FaultyFileOps ops;
    ops.fail = [&](const std::string& what) {
      if (what == "create domain.json.part") {
        ready.Send("locked");
        raise(SIGSTOP);
      }
      return 0;
    };
    Store::Open({.root = root(), .file_ops = &ops});
    return 0;
  });
  ASSERT_EQ(ready.Receive(), "locked");
  const absl::Time start = absl::Now();
  const Failure failure = OpenFailure({.root = root(), .wait = absl::Milliseconds(200)});
  EXPECT_EQ(failure.reason, Reason::kDomainUnavailable);
  EXPECT_TRUE(failure.retryable());
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(200));
  kill(maker.pid(), SIGCONT);
  EXPECT_EQ(maker.Wait(), 0);

  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  Child builder([&] {
    SmallProducer producer;
    producer.on_produce = [&](int, int) {
      if (producer.calls > 1) return;
      ready.Send("building");
      raise(SIGSTOP);
    };
    return Open()->Publish(SmallIdentity("slow"), SmallLayout(), producer, {}).outcome ==
                   PublicationOutcome::kPublished
               ? 0
               : 1;
  });
  ASSERT_EQ(ready.Receive(), "building");
  SmallProducer producer;
  const PublicationRecord record =
      store->Publish(SmallIdentity("other"), SmallLayout(), producer, {.deadline = Soon(200)});
  EXPECT_EQ(record.failure.reason, Reason::kActiveBuild);
  EXPECT_TRUE(record.failure.retryable());
  EXPECT_GE(record.waited, absl::Milliseconds(150));
  EXPECT_EQ(producer.calls, 0);
  // Hits do not wait for a builder.
  EXPECT_EQ(store->Lookup(identity_, {.deadline = absl::Now()}).status, LookupStatus::kHit);
  kill(builder.pid(), SIGCONT);
  EXPECT_EQ(builder.Wait(), 0);
}

TEST_F(StoreProcessTest, ALookUpWaitsNoLongerThanItsDeadlineForALockedArtifact) {
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  const Descriptor folder(open(Artifact(identity_).c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(TryLock(folder.get(), LockKind::kExclusive));
  const LookupResult found = store->Lookup(identity_, {.deadline = Soon(100)});
  EXPECT_EQ(found.status, LookupStatus::kTimeout);
  EXPECT_EQ(found.failure.reason, Reason::kLockTimeout);
  EXPECT_TRUE(found.failure.retryable());
}

TEST_F(StoreProcessTest, EvictionAndLookUpsRaceWithoutHarm) {
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  std::vector<std::unique_ptr<Child>> readers;
  const fs::path stop = folder_ / "stop";
  for (int i = 0; i < 3; ++i) {
    readers.push_back(std::make_unique<Child>([&] {
      const auto mine = Open();
      int hits = 0;
      while (!fs::exists(stop) || hits == 0) {
        // Most of the time nobody holds a lease, so that the artifact can be evicted.
        for (int other = 0; other < 50; ++other) {
          mine->Lookup(SmallIdentity(absl::StrCat(other)), {.deadline = Soon()});
        }
        const LookupResult found = mine->Lookup(identity_, {.deadline = Soon()});
        if (found.status == LookupStatus::kHit) {
          ++hits;
          if (!HasBytesOf(*found.lease, 1)) return 1;
        } else if (found.status != LookupStatus::kMiss) {
          return 2;
        }
      }
      return 0;
    }));
  }
  int evicted = 0;
  const absl::Time deadline = Soon();
  while (evicted < 20 && absl::Now() < deadline) {
    if (store->Evict(identity_.key, Soon()).ok()) {
      ++evicted;
      ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
    }
  }
  std::ofstream(stop) << "";
  for (const auto& reader : readers) EXPECT_EQ(reader->Wait(), 0);
  EXPECT_EQ(evicted, 20);
}

// --- every step of a build, failing or being the last

// What a process does that starts with nothing: makes the store and publishes. Returns 0 if all
// went well, 1 if it failed and said so as it must, else 2.
int MakeAndPublish(const fs::path& root, FaultyFileOps& ops, const Identity& identity, int code) {
  Store::OpenResult opened = Store::Open({.root = root, .file_ops = &ops});
  if (const Failure* failure = std::get_if<Failure>(&opened)) {
    if (code == ENOSPC && failure->reason != Reason::kNoSpace) return 2;
    return failure->retryable() && !failure->message.empty() ? 1 : 2;
  }
  Store& store = *std::get<std::unique_ptr<Store>>(opened);
  SmallProducer producer;
  const PublicationRecord record =
      store.Publish(identity, SmallLayout(), producer, {.deadline = Soon()});
  if (record.outcome == PublicationOutcome::kPublished) return 0;
  if (record.outcome != PublicationOutcome::kFailed || !record.failure.retryable()) return 2;
  if (code == ENOSPC && record.failure.reason != Reason::kNoSpace &&
      record.failure.reason != Reason::kUncertain) {
    return 2;
  }
  return 1;
}

class FaultTest : public StoreProcessTest, public ::testing::WithParamInterface<bool> {
 protected:
  // A root with a store in it already, or none.
  void Reset() {
    fs::remove_all(root());
    if (GetParam()) Open();
  }
  int CountSteps() {
    Reset();
    FaultyFileOps ops;
    ops.Arm(-1, Fault::kNone);
    EXPECT_EQ(MakeAndPublish(root(), ops, identity_, 0), 0);
    return ops.count();
  }
  // No look-up sees a part of an artifact: what it finds is whole, or nothing is there.
  void ExpectWholeOrNothing(Store& store) {
    const LookupResult found =
        store.Lookup(identity_, {.validation = Validation::kFull, .deadline = Soon()});
    if (found.status == LookupStatus::kHit) {
      EXPECT_TRUE(HasBytesOf(*found.lease, 1));
    } else {
      EXPECT_EQ(found.status, LookupStatus::kMiss) << found.failure.Text();
    }
  }
  // The next builder has its way, and its artifact is that of an undisturbed build.
  void ExpectNextBuilderSucceeds(Store& store) {
    const PublicationRecord record = Publish(store, identity_);
    EXPECT_TRUE(record.outcome == PublicationOutcome::kPublished ||
                record.outcome == PublicationOutcome::kAlreadyPresent)
        << record.failure.Text();
    EXPECT_EQ(Snapshot(Artifact(identity_)), undisturbed_);
    EXPECT_EQ(fs::directory_iterator(root() / "staging"), fs::directory_iterator());
    EXPECT_EQ(fs::directory_iterator(root() / "deny"), fs::directory_iterator());
  }
  void Prepare() {
    steps_ = CountSteps();
    ASSERT_GT(steps_, 20);
    undisturbed_ = Snapshot(Artifact(identity_));
    ASSERT_EQ(undisturbed_.size(), 4u);
  }

  int steps_ = 0;
  std::map<std::string, std::string> undisturbed_;
};

TEST_P(FaultTest, EachStepThatFailsIsToldAndLeavesNothingHalfDone) {
  Prepare();
  int failed = 0;
  for (const int code : {EIO, ENOSPC}) {
    for (int step = 0; step < steps_; ++step) {
      Reset();
      FaultyFileOps ops;
      ops.Arm(step, Fault::kFail, code);
      const int result = MakeAndPublish(root(), ops, identity_, code);
      SCOPED_TRACE(absl::StrCat("step ", step, " (", ops.last(), ") with errno ", code));
      EXPECT_NE(result, 2);
      failed += result;
      const auto store = Open();
      if (result == 1) {
        EXPECT_EQ(store->Lookup(identity_, {.deadline = Soon()}).status, LookupStatus::kMiss);
      }
      ExpectWholeOrNothing(*store);
      ExpectNextBuilderSucceeds(*store);
    }
  }
  EXPECT_GT(failed, steps_) << "most steps matter";
}

TEST_P(FaultTest, DyingBeforeOrAfterAnyStepLeavesNothingHalfDone) {
  Prepare();
  int published = 0;
  for (const Fault fault : {Fault::kKillBefore, Fault::kKillAfter}) {
    for (int step = 0; step < steps_; ++step) {
      Reset();
      Child child([&] {
        FaultyFileOps ops;
        ops.Arm(step, fault);
        return MakeAndPublish(root(), ops, identity_, 0);
      });
      SCOPED_TRACE(absl::StrCat("step ", step, fault == Fault::kKillBefore ? " not" : "", " done"));
      EXPECT_EQ(child.Wait(), -SIGKILL);
      const auto store = Open();
      ExpectWholeOrNothing(*store);
      published += fs::exists(Artifact(identity_)) ? 1 : 0;
      ExpectNextBuilderSucceeds(*store);
    }
  }
  EXPECT_GT(published, 0) << "the last steps come after the artifact has its name";
  EXPECT_LT(published, 2 * steps_ / 2);
}

INSTANTIATE_TEST_SUITE_P(Roots, FaultTest, ::testing::Bool(), [](const auto& info) {
  return info.param ? std::string("StoreThatIsThere") : std::string("StoreThatIsMade");
});

// Moving a corrupt artifact away is made of steps, too.
TEST_F(StoreProcessTest, DyingWhileACorruptArtifactIsMovedAwayNeverBringsItBack) {
  int steps = 0;
  const auto corrupt = [&] {
    fs::remove_all(root());
    const auto store = Open();
    Publish(*store, identity_);
    std::ofstream(Artifact(identity_) / "extra") << "x";
  };
  {
    corrupt();
    FaultyFileOps ops;
    ops.Arm(-1, Fault::kNone);
    const auto store = OpenStore({.root = root(), .file_ops = &ops});
    const int before = ops.count();
    EXPECT_EQ(store->Lookup(identity_, {}).status, LookupStatus::kInvalid);
    steps = ops.count() - before;
  }
  ASSERT_GT(steps, 5);
  for (const Fault fault : {Fault::kKillBefore, Fault::kKillAfter}) {
    for (int step = 0; step < steps; ++step) {
      SCOPED_TRACE(step);
      corrupt();
      Child child([&] {
        FaultyFileOps ops;
        const auto store = OpenStore({.root = root(), .file_ops = &ops});
        ops.Arm(step, fault);
        store->Lookup(identity_, {});
        return 0;
      });
      EXPECT_EQ(child.Wait(), -SIGKILL);
      const auto store = Open();
      EXPECT_NE(store->Lookup(identity_, {.deadline = Soon()}).status, LookupStatus::kHit);
      EXPECT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
      const LookupResult found = store->Lookup(identity_, {.deadline = Soon()});
      ASSERT_EQ(found.status, LookupStatus::kHit) << found.failure.Text();
      EXPECT_TRUE(HasBytesOf(*found.lease, 1));
    }
  }
}

}  // namespace
}  // namespace dlo::hwr
