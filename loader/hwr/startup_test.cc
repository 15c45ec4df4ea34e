#include "loader/hwr/startup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "loader/hwr/store_testing.h"
#include "spdlog/spdlog.h"

namespace dlo::hwr {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// A lease goes from hand to hand; nothing can copy it or write it down.
static_assert(!std::is_copy_constructible_v<Lease> && !std::is_copy_assignable_v<Lease>);
static_assert(!std::is_copy_constructible_v<LeaseCarrier>);
static_assert(!std::is_trivially_copyable_v<LeaseCarrier>);

class StartupTest : public ::testing::Test {
 protected:
  StartupTest() { spdlog::set_level(spdlog::level::off); }

  fs::path root() const { return folder_ / "store"; }
  StartupSettings Settings(Mode mode) {
    return {.mode = mode, .store = {.root = root(), .file_ops = &ops_}, .wait = absl::Seconds(20)};
  }
  Startup::Identify Identify() {
    return [this](const DigestCache&) -> absl::StatusOr<Startup::Identified> {
      ++identified_;
      return Startup::Identified{identity_, 42};
    };
  }
  void Populate() {
    const auto store = OpenStore({.root = root()});
    SmallProducer producer;
    ASSERT_EQ(store->Publish(identity_, SmallLayout(), producer, {}).outcome,
              PublicationOutcome::kPublished);
  }
  // Whether nobody holds a lease of the artifact.
  bool IsFree() {
    const auto inventory = OpenStore({.root = root(), .read_only = true})->Inventory();
    return !inventory->entries.empty() && !inventory->entries[0].leased;
  }
  static const Attempt& Last(const Startup& startup) { return startup.record().attempts.back(); }

  TempFolder folder_;
  FaultyFileOps ops_;
  const Identity identity_ = SmallIdentity();
  int identified_ = 0;
};

TEST_F(StartupTest, AHitGoesThroughEveryStateIntoService) {
  Populate();
  for (const Mode mode : {Mode::kPreferred, Mode::kRequired}) {
    Startup startup(Settings(mode));
    ASSERT_EQ(startup.Resolve(Identify()), Decision::kRestore);
    EXPECT_EQ(startup.state(), StartupState::kLeaseOwnedByLoader);
    EXPECT_TRUE(HasBytesOf(startup.lease(), 1));
    startup.Planned();
    startup.BeginCommit();
    LeaseCarrier carrier = startup.Committed();
    EXPECT_EQ(startup.state(), StartupState::kCarrierOwned);
    absl::StatusOr<Lease> lease = carrier.Take();
    ASSERT_TRUE(lease.ok());
    startup.BackendOwns();
    startup.BackendReady();
    EXPECT_EQ(startup.record().outcome, Outcome::kUndecided);
    startup.InService();
    EXPECT_EQ(startup.record().outcome, Outcome::kLocalHit);
    EXPECT_EQ(startup.record().bytes_mapped, PayloadBytes(SmallLayout()));
    EXPECT_EQ(startup.record().bytes_hashed, 42);
    EXPECT_EQ(startup.record().key, identity_.key);
    EXPECT_EQ(startup.record().publication.outcome, PublicationOutcome::kNotAttempted);
    EXPECT_FALSE(startup.may_publish());
    EXPECT_TRUE(HasBytesOf(*lease, 1));
    EXPECT_FALSE(IsFree());
    ASSERT_EQ(startup.record().attempts.size(), 1u);
    EXPECT_EQ(Last(startup).result, AttemptResult::kHit);
  }
  EXPECT_TRUE(IsFree());
}

TEST_F(StartupTest, DisabledTouchesNothing) {
  // A root that would fail whatever were done with it.
  StartupSettings settings = Settings(Mode::kDisabled);
  settings.store.root = "/proc/self/no/such/place";
  ops_.fail = [](const std::string&) -> int {
    ADD_FAILURE() << "touched";
    return EIO;
  };
  settings.store.mount_table = []() -> std::string {
    ADD_FAILURE() << "looked at";
    return "";
  };
  {
    Startup startup(settings);
    EXPECT_EQ(startup.Resolve(Identify()), Decision::kLoad);
    EXPECT_EQ(startup.record().outcome, Outcome::kDisabled);
    EXPECT_TRUE(startup.record().attempts.empty());
    EXPECT_FALSE(startup.may_publish());
    startup.InService();
    EXPECT_EQ(startup.record().outcome, Outcome::kDisabled);
  }
  for (const Mode mode : {Mode::kPreferred, Mode::kRequired}) {
    // What the runtime is not for: AllGather, or no transfer at all.
    settings.mode = mode;
    Startup startup(settings);
    EXPECT_EQ(startup.SkipDirect("transfer allgather"), Decision::kLoad);
    EXPECT_EQ(startup.record().outcome, Outcome::kDisabled);
    EXPECT_FALSE(startup.may_publish());
  }
  EXPECT_EQ(identified_, 0);
}

TEST_F(StartupTest, AMissLoadsAndPublishesInPreferredAndFailsInRequired) {
  {
    Startup startup(Settings(Mode::kRequired));
    EXPECT_EQ(startup.Resolve(Identify()), Decision::kFail);
    EXPECT_EQ(startup.state(), StartupState::kFailed);
    EXPECT_EQ(startup.record().outcome, Outcome::kFailed);
    EXPECT_EQ(startup.status().code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(Last(startup).next, NextAction::kFailStartup);
    EXPECT_FALSE(startup.may_publish()) << "required never publishes";
  }
  Startup startup(Settings(Mode::kPreferred));
  ASSERT_EQ(startup.Resolve(Identify()), Decision::kLoad);
  EXPECT_EQ(startup.state(), StartupState::kCanonical);
  EXPECT_EQ(Last(startup).result, AttemptResult::kMiss);
  EXPECT_EQ(Last(startup).reason, Reason::kMiss);
  EXPECT_EQ(Last(startup).next, NextAction::kCanonicalFallback);
  ASSERT_TRUE(startup.may_publish());
  SmallProducer producer;
  EXPECT_EQ(startup.Publish(SmallLayout(), producer).outcome, PublicationOutcome::kPublished);
  EXPECT_FALSE(startup.may_publish()) << "once";
  startup.InService();
  EXPECT_EQ(startup.record().outcome, Outcome::kCanonicalFallback)
      << "that it published does not revise how it started";
  EXPECT_FALSE(startup.record().recovered);

  Startup warm(Settings(Mode::kRequired));
  EXPECT_EQ(warm.Resolve(Identify()), Decision::kRestore);
}

TEST_F(StartupTest, AFailedPublicationDoesNotFailTheStart) {
  Startup startup(Settings(Mode::kPreferred));
  ASSERT_EQ(startup.Resolve(Identify()), Decision::kLoad);
  SmallProducer producer;
  ops_.fail = [](const std::string& what) { return what == "allocate " ? ENOSPC : 0; };
  EXPECT_EQ(startup.Publish(SmallLayout(), producer).failure.reason, Reason::kNoSpace);
  startup.InService();
  EXPECT_EQ(startup.record().outcome, Outcome::kCanonicalFallback);
}

// Not even if that one hangs.
TEST_F(StartupTest, AStartDoesNotWaitForAnotherThatPublishes) {
  Startup first(Settings(Mode::kPreferred));
  ASSERT_EQ(first.Resolve(Identify()), Decision::kLoad);
  SmallProducer producer;
  producer.on_produce = [&](int, int) {
    if (producer.calls > 1) return;
    StartupSettings settings = Settings(Mode::kPreferred);
    settings.wait = absl::InfiniteDuration();
    Startup second(settings);
    ASSERT_EQ(second.Resolve(Identify()), Decision::kLoad);
    SmallProducer idle;
    EXPECT_EQ(second.Publish(SmallLayout(), idle).outcome, PublicationOutcome::kBusy);
    EXPECT_EQ(idle.calls, 0);
    second.InService();
  };
  EXPECT_EQ(first.Publish(SmallLayout(), producer).outcome, PublicationOutcome::kPublished);
}

TEST_F(StartupTest, ACorruptArtifactIsReplacedInPreferred) {
  Populate();
  fs::remove(root() / "artifacts" / identity_.key / "READY.json");
  {
    Startup startup(Settings(Mode::kRequired));
    EXPECT_EQ(startup.Resolve(Identify()), Decision::kFail);
    EXPECT_EQ(startup.status().code(), absl::StatusCode::kDataLoss);
  }
  Populate();
  fs::remove(root() / "artifacts" / identity_.key / "READY.json");
  Startup startup(Settings(Mode::kPreferred));
  ASSERT_EQ(startup.Resolve(Identify()), Decision::kLoad);
  EXPECT_EQ(Last(startup).reason, Reason::kManifestCorrupt);
  EXPECT_TRUE(Last(startup).retryable);
  ASSERT_TRUE(startup.may_publish());
  SmallProducer producer;
  EXPECT_EQ(startup.Publish(SmallLayout(), producer).outcome, PublicationOutcome::kPublished);
}

TEST_F(StartupTest, WhatSomebodyMustLookAtFailsInPreferredToo) {
  Populate();
  const auto fails = [&](const StartupSettings& settings, Reason reason) {
    Startup startup(settings);
    EXPECT_EQ(startup.Resolve(Identify()), Decision::kFail) << ReasonName(reason);
    EXPECT_EQ(Last(startup).reason, reason);
    EXPECT_FALSE(Last(startup).retryable);
    EXPECT_EQ(startup.record().outcome, Outcome::kFailed);
    EXPECT_FALSE(startup.status().ok());
  };
  StartupSettings settings = Settings(Mode::kPreferred);
  settings.store.policy.max_store_bytes = 1;
  fails(settings, Reason::kPolicyMismatch);
  settings = Settings(Mode::kPreferred);
  settings.store.mount_table = [] { return "1 0 0:1 / / rw - nfs4 host:/ rw\n"; };
  fails(settings, Reason::kFilesystemRefused);
  settings.store.mount_table = [] { return "1 0 0:1 / / rw - tmpfs tmpfs rw\n"; };
  fails(settings, Reason::kStorageClassMismatch);
  settings = Settings(Mode::kPreferred);
  settings.store.root = folder_ / "no/such/folder/store";
  fails(settings, Reason::kInvalidConfig);
  fs::permissions(root(), fs::perms::all);
  fails(Settings(Mode::kPreferred), Reason::kNotPrivate);
}

TEST_F(StartupTest, WhatMayPassIsSurvivedInPreferredAndFailsInRequired) {
  Populate();
  ops_.fail = [](const std::string& what) { return what == "read" ? EIO : 0; };
  for (const Mode mode : {Mode::kPreferred, Mode::kRequired}) {
    Startup startup(Settings(mode));
    EXPECT_EQ(startup.Resolve(Identify()),
              mode == Mode::kPreferred ? Decision::kLoad : Decision::kFail);
    EXPECT_EQ(Last(startup).reason, Reason::kIoError);
    EXPECT_TRUE(Last(startup).retryable);
    EXPECT_FALSE(startup.may_publish()) << "there may be a good one";
  }
}

TEST_F(StartupTest, AnIdentityThatCannotBeComputedIsSurvivedInPreferred) {
  const std::vector<std::pair<absl::Status, Reason>> failures = {
      {absl::NotFoundError("no file"), Reason::kSourceMissing},
      {absl::FailedPreconditionError("changed"), Reason::kSourceChanged},
      {absl::InternalError("else"), Reason::kIdentityFailed}};
  for (const auto& [status, reason] : failures) {
    for (const Mode mode : {Mode::kPreferred, Mode::kRequired}) {
      Startup startup(Settings(mode));
      EXPECT_EQ(startup.Resolve([&, s = status](const DigestCache&) { return s; }),
                mode == Mode::kPreferred ? Decision::kLoad : Decision::kFail);
      EXPECT_EQ(Last(startup).reason, reason);
      EXPECT_EQ(Last(startup).stage, Stage::kIdentity);
      EXPECT_FALSE(startup.may_publish());
      EXPECT_THAT(Last(startup).message, HasSubstr(std::string(status.message())));
    }
  }
}

TEST_F(StartupTest, AnIneligibleModelNeverTouchesTheStore) {
  Startup startup(Settings(Mode::kPreferred));
  EXPECT_EQ(startup.Ineligible("the weights are quantised"), Decision::kLoad);
  EXPECT_EQ(startup.record().outcome, Outcome::kCanonicalFallback);
  EXPECT_FALSE(startup.may_publish());
  Startup required(Settings(Mode::kRequired));
  EXPECT_EQ(required.Ineligible("the weights are quantised"), Decision::kFail);
  EXPECT_THAT(required.status().message(), HasSubstr("quantised"));
  EXPECT_FALSE(fs::exists(root()));
}

TEST_F(StartupTest, AFailedPlanFreesTheLeaseAndLoadsIntoTheUntouchedModel) {
  Populate();
  for (const Reason reason : {Reason::kPlanFailed, Reason::kSourceChanged}) {
    for (const bool planned : {false, true}) {
      for (const Mode mode : {Mode::kPreferred, Mode::kRequired}) {
        Startup startup(Settings(mode));
        ASSERT_EQ(startup.Resolve(Identify()), Decision::kRestore);
        if (planned) startup.Planned();
        EXPECT_FALSE(IsFree());
        EXPECT_EQ(startup.Fail(reason, absl::FailedPreconditionError("why")),
                  mode == Mode::kPreferred ? Decision::kLoad : Decision::kFail);
        EXPECT_TRUE(IsFree());
        EXPECT_EQ(Last(startup).reason, reason);
        EXPECT_FALSE(startup.record().recovered);
        EXPECT_FALSE(startup.may_publish());
      }
    }
  }
}

TEST_F(StartupTest, AFailureAfterCommitBeganAsksForANewModel) {
  Populate();
  for (const StartupState until : {StartupState::kCommitStarted, StartupState::kCarrierOwned,
                                   StartupState::kBackendOwned, StartupState::kBackendReady}) {
    for (const Mode mode : {Mode::kPreferred, Mode::kRequired}) {
      SCOPED_TRACE(StartupStateName(until));
      Startup startup(Settings(mode));
      ASSERT_EQ(startup.Resolve(Identify()), Decision::kRestore);
      startup.Planned();
      startup.BeginCommit();
      {
        std::optional<LeaseCarrier> carrier;
        absl::StatusOr<Lease> backend = absl::UnknownError("not taken");
        if (until != StartupState::kCommitStarted) carrier.emplace(startup.Committed());
        if (until > StartupState::kCarrierOwned) {
          backend = carrier->Take();
          startup.BackendOwns();
        }
        if (until == StartupState::kBackendReady) startup.BackendReady();
        ASSERT_EQ(startup.state(), until);
        EXPECT_FALSE(IsFree());
      }  // whoever had the lease lets it go first
      EXPECT_EQ(startup.Fail(Reason::kBackendFailed, absl::InternalError("no room for slots")),
                mode == Mode::kPreferred ? Decision::kFreshLoad : Decision::kFail);
      EXPECT_TRUE(IsFree());
      EXPECT_FALSE(startup.may_publish());
      EXPECT_EQ(startup.record().recovered, mode == Mode::kPreferred);
      if (mode == Mode::kRequired) continue;
      EXPECT_EQ(Last(startup).next, NextAction::kFreshCanonicalLoad);
      startup.InService();
      EXPECT_EQ(startup.record().outcome, Outcome::kCanonicalFallback);
    }
  }
}

TEST_F(StartupTest, AFailureOfTheFreshLoadEndsIt) {
  Populate();
  Startup startup(Settings(Mode::kPreferred));
  ASSERT_EQ(startup.Resolve(Identify()), Decision::kRestore);
  startup.Planned();
  startup.BeginCommit();
  ASSERT_EQ(startup.Fail(Reason::kCommitFailed, absl::InternalError("a")), Decision::kFreshLoad);
  EXPECT_EQ(startup.Fail(Reason::kCanonicalLoadFailed, absl::NotFoundError("no such file")),
            Decision::kFail);
  EXPECT_EQ(startup.status(), absl::NotFoundError("no such file"));
  EXPECT_EQ(startup.record().outcome, Outcome::kFailed);
  EXPECT_EQ(startup.record().attempts.size(), 3u);
}

TEST_F(StartupTest, EveryOtherOrderIsAProgrammersErrorAndEndsTheProcess) {
  Populate();
  const std::vector<std::pair<const char*, std::function<void(Startup&)>>> actions = {
      {"Planned", [](Startup& s) { s.Planned(); }},
      {"BeginCommit", [](Startup& s) { s.BeginCommit(); }},
      {"Committed", [](Startup& s) { s.Committed(); }},
      {"BackendOwns", [](Startup& s) { s.BackendOwns(); }},
      {"BackendReady", [](Startup& s) { s.BackendReady(); }},
      {"InService", [](Startup& s) { s.InService(); }},
  };
  // The one that is allowed after so many of them; from the last state on, none.
  for (size_t done = 0; done <= actions.size(); ++done) {
    for (size_t next = 0; next < actions.size(); ++next) {
      if (next == done) continue;
      SCOPED_TRACE(absl::StrCat(done, " then ", actions[next].first));
      Child child([&] {
        Startup startup(Settings(Mode::kPreferred));
        if (startup.Resolve(Identify()) != Decision::kRestore) return 1;
        for (size_t i = 0; i < done; ++i) actions[i].second(startup);
        actions[next].second(startup);
        return 0;
      });
      EXPECT_EQ(child.Wait(), -SIGABRT);
    }
  }
  const std::vector<std::function<void(Startup&)>> others = {
      [&](Startup& s) { s.Resolve(Identify()); }, [](Startup& s) { s.SkipDirect(""); },
      [](Startup& s) { s.Ineligible(""); },
      [](Startup& s) {
        SmallProducer producer;
        s.Publish(SmallLayout(), producer);
      }};
  for (const auto& action : others) {
    Child child([&] {
      Startup startup(Settings(Mode::kPreferred));
      if (startup.Resolve(Identify()) != Decision::kRestore) return 1;
      action(startup);
      return 0;
    });
    EXPECT_EQ(child.Wait(), -SIGABRT);
  }
}

class CarrierTest : public StartupTest {
 protected:
  LeaseCarrier Carrier() {
    const auto store = OpenStore({.root = root()});
    LookupResult found = store->Lookup(identity_, {});
    return LeaseCarrier(*std::move(found.lease));
  }
};

TEST_F(CarrierTest, GivesItsLeaseOnce) {
  Populate();
  LeaseCarrier carrier = Carrier();
  EXPECT_TRUE(carrier.holds());
  absl::StatusOr<Lease> lease = carrier.Take();
  ASSERT_TRUE(lease.ok());
  EXPECT_FALSE(carrier.holds());
  EXPECT_EQ(carrier.Take().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(HasBytesOf(*lease, 1));
}

TEST_F(CarrierTest, FreesALeaseThatNobodyTookAndMovesAsOne) {
  Populate();
  {
    LeaseCarrier first = Carrier();
    LeaseCarrier second(std::move(first));
    EXPECT_FALSE(first.holds());  // NOLINT(bugprone-use-after-move)
    EXPECT_EQ(first.Take().status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(second.holds());
    EXPECT_FALSE(IsFree());
  }
  EXPECT_TRUE(IsFree());
  {
    LeaseCarrier carrier = Carrier();
    const absl::StatusOr<Lease> lease = carrier.Take();
    EXPECT_FALSE(IsFree());
  }
  EXPECT_TRUE(IsFree());
}

TEST(OutcomeTest, NamesReadBackAndAreLabels) {
  for (const Mode mode : {Mode::kDisabled, Mode::kPreferred, Mode::kRequired}) {
    EXPECT_EQ(*ParseMode(ModeName(mode)), mode);
  }
  for (const Validation validation : {Validation::kMetadata, Validation::kFull}) {
    EXPECT_EQ(*ParseValidation(ValidationName(validation)), validation);
  }
  EXPECT_FALSE(ParseMode("sometimes").ok());
  EXPECT_FALSE(ParseValidation("").ok());
  std::set<absl::string_view> names;
  for (int i = 0; i <= static_cast<int>(Reason::kUncertain); ++i) {
    const absl::string_view name = ReasonName(static_cast<Reason>(i));
    EXPECT_FALSE(name.empty()) << i;
    EXPECT_TRUE(names.insert(name).second) << name;
  }
}

}  // namespace
}  // namespace dlo::hwr
