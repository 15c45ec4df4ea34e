// What a store promises one process about its artifacts.
#include "loader/hwr/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "loader/hwr/filesystem.h"
#include "loader/hwr/store_testing.h"
#include "spdlog/spdlog.h"

namespace dlo::hwr {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class StoreTest : public ::testing::Test {
 protected:
  StoreTest() { spdlog::set_level(spdlog::level::off); }

  fs::path root() const { return folder_ / "store"; }
  StoreOptions Options() { return {.root = root(), .file_ops = &ops_}; }
  std::unique_ptr<Store> Open() { return OpenStore(Options()); }

  static PublicationRecord Publish(Store& store, const Identity& identity, uint8_t seed = 1) {
    SmallProducer producer(seed);
    return store.Publish(identity, SmallLayout(), producer, {.deadline = Soon()});
  }
  static LookupResult Lookup(Store& store, const Identity& identity,
                             Validation validation = Validation::kMetadata) {
    return store.Lookup(identity, {.validation = validation, .deadline = Soon()});
  }
  fs::path Artifact(const Identity& identity) const { return root() / "artifacts" / identity.key; }
  static bool IsEmpty(const fs::path& folder) {
    return fs::directory_iterator(folder) == fs::directory_iterator();
  }
  // Changes one byte of a published file and keeps its size, mode and name.
  static void Flip(const fs::path& file, int64_t offset) {
    chmod(file.c_str(), 0644);
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(offset);
    const char byte = static_cast<char>(stream.get() ^ 1);
    stream.seekp(offset);
    stream.put(byte);
    stream.close();
    chmod(file.c_str(), 0444);
  }

  TempFolder folder_;
  FaultyFileOps ops_;
  const Identity identity_ = SmallIdentity();
};

TEST_F(StoreTest, WhatWasPublishedIsFoundByteForByteWithGapsZero) {
  const auto store = Open();
  EXPECT_EQ(Lookup(*store, identity_).status, LookupStatus::kMiss);
  EXPECT_EQ(Lookup(*store, identity_).failure.reason, Reason::kMiss);
  const PublicationRecord record = Publish(*store, identity_);
  ASSERT_EQ(record.outcome, PublicationOutcome::kPublished) << record.failure.Text();
  EXPECT_EQ(record.bytes, PayloadBytes(SmallLayout()));
  for (const Validation validation : {Validation::kMetadata, Validation::kFull}) {
    const LookupResult found = Lookup(*store, identity_, validation);
    ASSERT_EQ(found.status, LookupStatus::kHit) << found.failure.Text();
    EXPECT_TRUE(HasBytesOf(*found.lease, 1));
    EXPECT_EQ(found.lease->identity().document, identity_.document);
    EXPECT_EQ(found.lease->FindComponent("vae"), 1);
    EXPECT_EQ(found.lease->FindComponent("none"), -1);
    EXPECT_TRUE(found.lease->file(0).CheckUnchanged().ok());
  }
}

TEST_F(StoreTest, FilesAreReadOnlyAndFoldersTheOwnersAlone) {
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  for (const auto& entry : fs::recursive_directory_iterator(root())) {
    const auto mode = static_cast<unsigned>(entry.status().permissions());
    if (entry.is_directory()) {
      EXPECT_EQ(mode, 0700u) << entry.path();
    } else {
      const bool published = entry.path().parent_path() == Artifact(identity_);
      EXPECT_EQ(mode, published ? 0444u : 0600u) << entry.path();
    }
  }
}

TEST_F(StoreTest, TwoBuildsOfOneIdentityAreByteIdentical) {
  const auto one = Open();
  const auto two = OpenStore({.root = folder_ / "other"});
  ASSERT_EQ(Publish(*one, identity_).outcome, PublicationOutcome::kPublished);
  ASSERT_EQ(Publish(*two, identity_).outcome, PublicationOutcome::kPublished);
  EXPECT_EQ(Snapshot(Artifact(identity_)),
            Snapshot(folder_ / ("other/artifacts/" + identity_.key)));
  EXPECT_EQ(Snapshot(Artifact(identity_)).size(), 4u);
}

TEST_F(StoreTest, ASecondPublicationFindsTheFirst) {
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  SmallProducer producer;
  EXPECT_EQ(store->Publish(identity_, SmallLayout(), producer, {}).outcome,
            PublicationOutcome::kAlreadyPresent);
  EXPECT_EQ(producer.calls, 0);
}

TEST_F(StoreTest, AWriteThroughALeaseEndsTheProcess) {
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  const LookupResult found = Lookup(*store, identity_);
  Child child([&] {
    signal(SIGSEGV, SIG_DFL);  // A sanitizer has a handler of its own.
    *const_cast<volatile std::byte*>(found.lease->part(0, 0).data()) = std::byte{1};
    return 0;
  });
  EXPECT_EQ(child.Wait(), -SIGSEGV);
  EXPECT_TRUE(HasBytesOf(*found.lease, 1));
}

TEST_F(StoreTest, AFlippedByteIsFoundByFullValidationAndRebuilt) {
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  // Of a copy, as a mapping of the file itself would show the flipped byte.
  const fs::path payload = Artifact(identity_) / "transformer.bin";
  const LookupResult old = Lookup(*store, identity_);
  ASSERT_EQ(old.status, LookupStatus::kHit);
  Flip(payload, 5000);

  const LookupResult metadata = Lookup(*store, identity_);
  EXPECT_EQ(metadata.status, LookupStatus::kHit) << "size and modes are as they were";
  const LookupResult full = Lookup(*store, identity_, Validation::kFull);
  ASSERT_EQ(full.status, LookupStatus::kInvalid);
  EXPECT_EQ(full.failure.reason, Reason::kChecksumMismatch);
  EXPECT_THAT(full.failure.message, HasSubstr("transformer.bin, part 1"));
  EXPECT_FALSE(fs::exists(Artifact(identity_)));
  EXPECT_TRUE(IsEmpty(root() / "deny")) << "moved away, there is nothing to deny";
  EXPECT_FALSE(IsEmpty(root() / "quarantine"));

  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  const LookupResult again = Lookup(*store, identity_, Validation::kFull);
  ASSERT_EQ(again.status, LookupStatus::kHit) << again.failure.Text();
  EXPECT_TRUE(HasBytesOf(*again.lease, 1));
  // Who had it mapped has it still, with the other byte, and nobody clears it away.
  EXPECT_NE(old.lease->backing_fingerprint(), again.lease->backing_fingerprint());
  EXPECT_EQ(old.lease->part(0, 2)[0], SmallProducer::At(1, 0, 2, 0));
  EXPECT_EQ(*store->ClearQuarantine(absl::ZeroDuration(), Soon()), 0);
}

TEST_F(StoreTest, AnOldLeaseReadsItsBytesAfterItsArtifactWasMovedAway) {
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  LookupResult old = Lookup(*store, identity_);
  // Something beside the payload that makes the artifact invalid.
  std::ofstream(Artifact(identity_) / "more") << "x";
  EXPECT_EQ(Lookup(*store, identity_).status, LookupStatus::kInvalid);
  EXPECT_TRUE(HasBytesOf(*old.lease, 1));
  EXPECT_TRUE(old.lease->file(0).CheckUnchanged().ok());
  old.lease.reset();
  EXPECT_EQ(*store->ClearQuarantine(absl::Hours(1), Soon()), 0) << "it is too young";
  EXPECT_EQ(*store->ClearQuarantine(absl::ZeroDuration(), Soon()), 1);
  EXPECT_TRUE(IsEmpty(root() / "quarantine"));
}

struct Damage {
  const char* name;
  void (*apply)(const fs::path& artifact);
};

class DamagedArtifactTest : public StoreTest, public ::testing::WithParamInterface<Damage> {};

TEST_P(DamagedArtifactTest, IsRefusedMovedAwayAndRebuilt) {
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  GetParam().apply(Artifact(identity_));
  const LookupResult found = Lookup(*store, identity_);
  EXPECT_EQ(found.status, LookupStatus::kInvalid) << found.failure.Text();
  EXPECT_TRUE(found.failure.retryable());
  EXPECT_EQ(Lookup(*store, identity_).status, LookupStatus::kMiss);
  EXPECT_FALSE(IsEmpty(root() / "quarantine"));
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  const LookupResult again = Lookup(*store, identity_);
  ASSERT_EQ(again.status, LookupStatus::kHit) << again.failure.Text();
  EXPECT_TRUE(HasBytesOf(*again.lease, 1));
}

void ReplaceBy(const fs::path& file, const std::string& bytes) {
  fs::remove(file);
  std::ofstream(file, std::ios::binary) << bytes;
  chmod(file.c_str(), 0444);
}

std::string Content(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

INSTANTIATE_TEST_SUITE_P(
    Damages, DamagedArtifactTest,
    ::testing::Values(
        Damage{"SymlinkedPayload",
               [](const fs::path& a) {
                 fs::rename(a / "vae.bin", a.parent_path().parent_path() / "vae.bin");
                 fs::create_symlink(a.parent_path().parent_path() / "vae.bin", a / "vae.bin");
               }},
        Damage{"SymlinkedArtifact",
               [](const fs::path& a) {
                 fs::rename(a, a.parent_path().parent_path() / "elsewhere");
                 fs::create_directory_symlink(a.parent_path().parent_path() / "elsewhere", a);
               }},
        Damage{"FileInItsPlace",
               [](const fs::path& a) {
                 fs::remove_all(a);
                 std::ofstream(a) << "x";
               }},
        Damage{"ExtraFile", [](const fs::path& a) { std::ofstream(a / "extra") << "x"; }},
        Damage{"ExtraFolder", [](const fs::path& a) { fs::create_directory(a / "extra"); }},
        Damage{"MissingPayload", [](const fs::path& a) { fs::remove(a / "vae.bin"); }},
        Damage{"MissingManifest", [](const fs::path& a) { fs::remove(a / "manifest.json"); }},
        Damage{"MissingMarker", [](const fs::path& a) { fs::remove(a / "READY.json"); }},
        Damage{"EmptyFolder",
               [](const fs::path& a) {
                 fs::remove_all(a);
                 fs::create_directory(a);
                 chmod(a.c_str(), 0700);
               }},
        Damage{"SecondLinkOfAPayload",
               [](const fs::path& a) {
                 fs::create_hard_link(a / "vae.bin", a.parent_path().parent_path() / "link");
               }},
        Damage{"SecondLinkOfTheManifest",
               [](const fs::path& a) {
                 fs::create_hard_link(a / "manifest.json", a.parent_path().parent_path() / "link");
               }},
        Damage{"WritablePayload",
               [](const fs::path& a) { chmod((a / "vae.bin").c_str(), 0644); }},
        Damage{"GroupWritableFolder", [](const fs::path& a) { chmod(a.c_str(), 0770); }},
        Damage{"ForeignFolder",
               [](const fs::path& a) {
                 // Only the superuser can give a folder away; others make it a foreign mode.
                 if (chown(a.c_str(), 12345, 12345) != 0) chmod(a.c_str(), 0777);
               }},
        Damage{"ForeignPayload",
               [](const fs::path& a) {
                 if (chown((a / "vae.bin").c_str(), 12345, 12345) != 0) {
                   chmod((a / "vae.bin").c_str(), 0666);
                 }
               }},
        Damage{"ShortPayload",
               [](const fs::path& a) {
                 chmod((a / "vae.bin").c_str(), 0644);
                 fs::resize_file(a / "vae.bin", 4095);
                 chmod((a / "vae.bin").c_str(), 0444);
               }},
        Damage{"PayloadIsAFifo",
               [](const fs::path& a) {
                 fs::remove(a / "vae.bin");
                 mkfifo((a / "vae.bin").c_str(), 0444);
               }},
        Damage{"ManifestIsAFolder",
               [](const fs::path& a) {
                 fs::remove(a / "manifest.json");
                 fs::create_directory(a / "manifest.json");
               }},
        Damage{"ManifestWithABlankMore",
               [](const fs::path& a) {
                 ReplaceBy(a / "manifest.json", Content(a / "manifest.json") + " ");
               }},
        Damage{"EmptyMarker", [](const fs::path& a) { ReplaceBy(a / "READY.json", ""); }},
        Damage{"HugeMarker",
               [](const fs::path& a) {
                 ReplaceBy(a / "READY.json", std::string(kReadyBytesMax + 1, ' '));
               }},
        Damage{"ArtifactOfAnotherKey",
               [](const fs::path& a) {
                 // All of another identity's artifact, under this key.
                 TempFolder other;
                 const auto store = OpenStore({.root = other / "store"});
                 SmallProducer producer;
                 const Identity identity = SmallIdentity("another source");
                 store->Publish(identity, SmallLayout(), producer, {});
                 fs::remove_all(a);
                 fs::copy(other / ("store/artifacts/" + identity.key), a,
                          fs::copy_options::recursive);
                 chmod(a.c_str(), 0700);
               }}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_F(StoreTest, AnErrorOfTheDiskIsNoCorruption) {
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  ops_.fail = [](const std::string& what) { return what == "read" ? EIO : 0; };
  for (const Validation validation : {Validation::kMetadata, Validation::kFull}) {
    const LookupResult found = Lookup(*store, identity_, validation);
    EXPECT_EQ(found.status, LookupStatus::kFailed);
    EXPECT_EQ(found.failure.reason, Reason::kIoError);
    EXPECT_TRUE(found.failure.retryable());
  }
  ops_.fail = nullptr;
  EXPECT_EQ(Lookup(*store, identity_, Validation::kFull).status, LookupStatus::kHit);
}

TEST_F(StoreTest, ACorruptArtifactIsOutOfUseHoweverLittleCanBeWritten) {
  const auto store = Open();
  const auto corrupt = [&] {
    ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
    std::ofstream(Artifact(identity_) / "extra") << "x";
  };
  corrupt();
  // No room for a marker: it is moved away all the same.
  ops_.fail = [&](const std::string& what) {
    return what == "create " + identity_.key + ".json" ? ENOSPC : 0;
  };
  LookupResult found = Lookup(*store, identity_);
  EXPECT_EQ(found.status, LookupStatus::kInvalid);
  EXPECT_THAT(found.failure.message, HasSubstr("moved to quarantine"));
  EXPECT_FALSE(fs::exists(Artifact(identity_)));

  // It cannot be moved: the marker keeps it out of use, also once it looks right again.
  ops_.fail = nullptr;
  corrupt();
  ops_.fail = [&](const std::string& what) { return what == "rename " + identity_.key ? EIO : 0; };
  found = Lookup(*store, identity_);
  EXPECT_EQ(found.status, LookupStatus::kInvalid);
  EXPECT_THAT(found.failure.message, HasSubstr("denied, and still in its place"));
  fs::remove(Artifact(identity_) / "extra");
  found = Lookup(*store, identity_);
  EXPECT_EQ(found.status, LookupStatus::kInvalid);
  EXPECT_EQ(found.failure.reason, Reason::kDenied);
  EXPECT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kFailed)
      << "what cannot be moved is in the way";
  ops_.fail = nullptr;
  found = Lookup(*store, identity_);
  EXPECT_EQ(found.status, LookupStatus::kInvalid);
  EXPECT_THAT(found.failure.message, HasSubstr("moved to quarantine"));
  EXPECT_TRUE(IsEmpty(root() / "deny"));

  // Neither: whoever looked says so and does not use it.
  corrupt();
  ops_.fail = [&](const std::string& what) {
    return what.find(identity_.key) != std::string::npos ? EIO : 0;
  };
  found = Lookup(*store, identity_);
  EXPECT_EQ(found.status, LookupStatus::kInvalid);
  EXPECT_THAT(found.failure.message, HasSubstr("neither be denied"));
}

TEST_F(StoreTest, AWeakLookDoesNotWinAgainstAStrongerOneThatDeniesMeanwhile) {
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  bool denied = false;
  ops_.on_read = [&] {
    if (std::exchange(denied, true)) return;
    std::ofstream(root() / "deny" / (identity_.key + ".json")) << "{}";
  };
  const LookupResult found = Lookup(*store, identity_);
  EXPECT_TRUE(denied);
  EXPECT_EQ(found.status, LookupStatus::kInvalid);
  EXPECT_EQ(found.failure.reason, Reason::kDenied);
  EXPECT_FALSE(found.lease.has_value());
}

TEST_F(StoreTest, AMarkerWithoutAnArtifactSaysNothing) {
  const auto store = Open();
  std::ofstream(root() / "deny" / (identity_.key + ".json")) << "{}";
  EXPECT_EQ(Lookup(*store, identity_).status, LookupStatus::kMiss);
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  EXPECT_EQ(Lookup(*store, identity_).status, LookupStatus::kHit);
}

TEST_F(StoreTest, APassedFullCheckIsPaidOnceForTheSameFiles) {
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  const auto bytes = [&](const std::function<LookupResult()>& look) {
    ops_.bytes_read = 0;
    EXPECT_EQ(look().status, LookupStatus::kHit);
    return ops_.bytes_read.load();
  };
  const auto full = [&] { return Lookup(*store, identity_, Validation::kFull); };
  const int64_t payload = PayloadBytes(SmallLayout());
  EXPECT_GE(bytes(full), payload);
  EXPECT_LT(bytes(full), payload) << "it is remembered";
  EXPECT_GE(bytes([&] { return store->Verify(identity_.key, {}); }), payload)
      << "who verifies wants to know";
  EXPECT_LT(bytes(full), payload);
  // The same bytes, but somebody has had his hands on the file.
  chmod((Artifact(identity_) / "vae.bin").c_str(), 0644);
  chmod((Artifact(identity_) / "vae.bin").c_str(), 0444);
  EXPECT_GE(bytes(full), payload);
  EXPECT_LT(bytes(full), payload);
  // A record that is not as it was written.
  const fs::path record = root() / "checks" / (identity_.key + ".json");
  std::ofstream(record, std::ios::app) << " ";
  EXPECT_GE(bytes(full), payload);
}

TEST_F(StoreTest, AChangedFileIsCheckedAgainAlthoughACheckIsRemembered) {
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  ASSERT_EQ(Lookup(*store, identity_, Validation::kFull).status, LookupStatus::kHit);
  Flip(Artifact(identity_) / "vae.bin", 4000);  // in the gap behind the last tensor
  const LookupResult found = Lookup(*store, identity_, Validation::kFull);
  EXPECT_EQ(found.status, LookupStatus::kInvalid);
  EXPECT_THAT(found.failure.message, HasSubstr("behind its end"));
}

TEST_F(StoreTest, TheProducersErrorIsNotRetryableAndLeavesNothing) {
  const auto store = Open();
  SmallProducer producer;
  producer.failure = absl::InternalError("no such tensor");
  PublicationRecord record = store->Publish(identity_, SmallLayout(), producer, {});
  EXPECT_EQ(record.outcome, PublicationOutcome::kFailed);
  EXPECT_EQ(record.failure.reason, Reason::kProducerFailed);
  EXPECT_FALSE(record.failure.retryable());
  EXPECT_THAT(record.failure.message, HasSubstr("no such tensor"));
  EXPECT_TRUE(IsEmpty(root() / "staging"));
  EXPECT_EQ(Lookup(*store, identity_).status, LookupStatus::kMiss);
}

TEST_F(StoreTest, ASourceThatChangesIsNotPublished) {
  const auto store = Open();
  for (const int at : {0, 1}) {
    SmallProducer producer;
    int checks = 0;
    producer.on_check = [&] {
      return checks++ == at ? absl::FailedPreconditionError("a changed") : absl::OkStatus();
    };
    const PublicationRecord record = store->Publish(identity_, SmallLayout(), producer, {});
    EXPECT_EQ(record.failure.reason, Reason::kSourceChanged);
    EXPECT_EQ(producer.calls, at == 0 ? 0 : 4);
    EXPECT_EQ(Lookup(*store, identity_).status, LookupStatus::kMiss);
    EXPECT_TRUE(IsEmpty(root() / "staging"));
  }
}

TEST_F(StoreTest, ALayoutThatIsNotTheIdentitysIsRefused) {
  const auto store = Open();
  ArtifactLayout layout = SmallLayout();
  layout[0].name = "other";
  SmallProducer producer;
  EXPECT_EQ(store->Publish(identity_, layout, producer, {}).failure.reason, Reason::kInvalidConfig);
  layout[0].name = "../up";
  EXPECT_EQ(store->Publish(identity_, layout, producer, {}).failure.reason, Reason::kInvalidConfig);
  EXPECT_EQ(producer.calls, 0);
}

class RacedStoreTest : public StoreTest {
 protected:
  // While `producer` produces, somebody who has taken the builder's lock away, which nobody should,
  // publishes the bytes of seed 1.
  void PublishAnotherDuring(SmallProducer& producer) {
    producer.on_produce = [this](int, int) {
      if (std::exchange(raced_, true)) return;
      fs::remove(root() / "locks/build.lock");
      const auto other = OpenStore({.root = root()});
      fs::path staging;
      for (const auto& entry : fs::directory_iterator(root() / "staging")) staging = entry.path();
      fs::rename(staging, folder_ / "kept");  // the other one would clear it away
      ASSERT_EQ(Publish(*other, identity_, 1).outcome, PublicationOutcome::kPublished);
      fs::rename(folder_ / "kept", staging);
    };
  }

 private:
  bool raced_ = false;
};

TEST_F(RacedStoreTest, OfTwoDifferingBuildsTheFirstStays) {
  const auto store = Open();
  SmallProducer producer(2);
  PublishAnotherDuring(producer);
  const PublicationRecord record = store->Publish(identity_, SmallLayout(), producer, {});
  EXPECT_EQ(record.outcome, PublicationOutcome::kFailed);
  EXPECT_EQ(record.failure.reason, Reason::kIdentityCollision);
  EXPECT_FALSE(record.failure.retryable());
  const LookupResult found = Lookup(*store, identity_, Validation::kFull);
  ASSERT_EQ(found.status, LookupStatus::kHit);
  EXPECT_TRUE(HasBytesOf(*found.lease, 1));
  EXPECT_FALSE(IsEmpty(root() / "quarantine")) << "the second one is kept for whoever looks";
}

TEST_F(RacedStoreTest, OfTwoEqualBuildsTheSecondJoins) {
  const auto store = Open();
  SmallProducer producer(1);
  PublishAnotherDuring(producer);
  EXPECT_EQ(store->Publish(identity_, SmallLayout(), producer, {}).outcome,
            PublicationOutcome::kJoined);
  EXPECT_TRUE(IsEmpty(root() / "staging"));
}

// --- opening

TEST_F(StoreTest, APolicyThatDiffersByOneNumberIsRefusedAndNothingChanges) {
  const StorePolicy policy = {
      .max_store_bytes = 1 << 30, .max_artifact_bytes = 1 << 20, .min_free_bytes = 7};
  StoreOptions options = Options();
  options.policy = policy;
  ASSERT_NE(OpenStore(options), nullptr);
  const auto before = Snapshot(root());
  for (int64_t StorePolicy::* field :
       {&StorePolicy::max_store_bytes, &StorePolicy::max_artifact_bytes,
        &StorePolicy::min_free_bytes}) {
    options.policy = policy;
    options.policy.*field += 1;
    const Failure failure = OpenFailure(options);
    EXPECT_EQ(failure.reason, Reason::kPolicyMismatch);
    EXPECT_FALSE(failure.retryable());
  }
  EXPECT_EQ(Snapshot(root()), before);
}

TEST_F(StoreTest, OnlyTheLimitsThatAreAskedForAreCompared) {
  const StorePolicy policy = {
      .max_store_bytes = 1 << 30, .max_artifact_bytes = 1 << 20, .min_free_bytes = 7};
  StoreOptions options = Options();
  options.policy = policy;
  ASSERT_NE(OpenStore(options), nullptr);
  for (const StorePolicy& asked :
       {policy, StorePolicy(), StorePolicy{.max_store_bytes = policy.max_store_bytes},
        StorePolicy{.max_artifact_bytes = policy.max_artifact_bytes},
        StorePolicy{.min_free_bytes = policy.min_free_bytes}}) {
    for (const bool read_only : {false, true}) {
      options.policy = asked;
      options.read_only = read_only;
      const auto store = OpenStore(options);
      ASSERT_NE(store, nullptr);
      EXPECT_EQ(store->policy(), policy);
    }
  }
  options.policy = {.max_store_bytes = policy.max_store_bytes, .min_free_bytes = 8};
  EXPECT_EQ(OpenFailure(options).reason, Reason::kPolicyMismatch);
}

std::string MountTable(const std::string& type, const std::string& at = "/") {
  return "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n30 22 0:40 / " + at + " rw - " +
         type + " source rw\n";
}

TEST_F(StoreTest, AFilesystemThatIsNotLocalIsRefusedBeforeAnythingIsMade) {
  for (const char* type : {"nfs4", "fuse.sshfs", "9p", "cephfs", "lustre", "cifs", "unheard-of"}) {
    StoreOptions options = Options();
    options.mount_table = [&] { return MountTable(type, folder_.path().native()); };
    const Failure failure = OpenFailure(options);
    EXPECT_EQ(failure.reason, Reason::kFilesystemRefused) << type;
    EXPECT_FALSE(failure.retryable());
    EXPECT_THAT(failure.message, HasSubstr(type));
  }
  StoreOptions options = Options();
  options.mount_table = [] { return std::string(); };
  EXPECT_EQ(OpenFailure(options).reason, Reason::kFilesystemRefused);
  EXPECT_FALSE(fs::exists(root()));
}

TEST_F(StoreTest, AStoreThatMovedToAnotherFilesystemIsRefused) {
  StoreOptions options = Options();
  options.mount_table = [&] { return MountTable("xfs"); };
  ASSERT_NE(OpenStore(options), nullptr);
  options.mount_table = [&] { return MountTable("tmpfs"); };
  EXPECT_EQ(OpenFailure(options).reason, Reason::kStorageClassMismatch);
}

TEST_F(StoreTest, AFolderThatOthersMayWriteToIsRefused) {
  ASSERT_NE(Open(), nullptr);
  for (const fs::path& folder : {root(), root() / "artifacts", root() / "deny"}) {
    for (const mode_t mode : {0770, 0702}) {
      chmod(folder.c_str(), mode);
      const Failure failure = OpenFailure(Options());
      EXPECT_EQ(failure.reason, Reason::kNotPrivate) << folder;
      EXPECT_FALSE(failure.retryable());
    }
    chmod(folder.c_str(), 0700);
  }
  fs::remove(root() / "deny");
  fs::create_directory_symlink(folder_.path(), root() / "deny");
  EXPECT_EQ(OpenFailure(Options()).reason, Reason::kNotPrivate) << "a link";
}

TEST_F(StoreTest, AFolderWithOtherThingsInItIsNotTakenForAStore) {
  folder_.Write("store/letter.txt", "dear");
  chmod(root().c_str(), 0700);
  const Failure failure = OpenFailure(Options());
  EXPECT_EQ(failure.reason, Reason::kInvalidConfig);
  EXPECT_THAT(failure.message, HasSubstr("letter.txt"));
  EXPECT_EQ(Snapshot(root()).size(), 1u);
}

TEST_F(StoreTest, ARootWhoseParentIsMissingIsRefused) {
  EXPECT_EQ(OpenFailure({.root = folder_ / "no/such/store"}).reason, Reason::kInvalidConfig);
  EXPECT_EQ(OpenFailure({.root = ""}).reason, Reason::kInvalidConfig);
}

TEST_F(StoreTest, DamagedDocumentsAreRefused) {
  ASSERT_NE(Open(), nullptr);
  for (const char* name : {"domain.json", "domain-policy.json"}) {
    const std::string good = Content(root() / name);
    for (const std::string& bad :
         {std::string(), std::string("{}"), good + " ", good.substr(1), std::string(5000, ' ')}) {
      std::ofstream(root() / name, std::ios::trunc) << bad;
      EXPECT_FALSE(OpenFailure(Options()).message.empty()) << name << " " << bad;
    }
    std::ofstream(root() / name, std::ios::trunc) << good;
  }
  EXPECT_NE(Open(), nullptr);
}

TEST_F(StoreTest, EverySpellingOfARootIsOneStore) {
  const std::string id = Open()->domain_id();
  fs::create_directory_symlink(root(), folder_ / "link");
  EXPECT_EQ(OpenStore({.root = folder_ / "link"})->domain_id(), id);
  EXPECT_EQ(OpenStore({.root = root() / ".." / "store" / ""})->domain_id(), id);
  EXPECT_EQ(OpenStore({.root = fs::relative(root())})->domain_id(), id);
}

TEST_F(StoreTest, LookingReadOnlyLeavesTheTreeAsItIs) {
  EXPECT_EQ(OpenFailure({.root = root(), .read_only = true}).reason, Reason::kNotFound);
  EXPECT_FALSE(fs::exists(root()));
  {
    const auto store = Open();
    ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
    ASSERT_EQ(Publish(*store, SmallIdentity("corrupt")).outcome, PublicationOutcome::kPublished);
    ASSERT_EQ(Publish(*store, SmallIdentity("denied")).outcome, PublicationOutcome::kPublished);
    std::ofstream(Artifact(SmallIdentity("corrupt")) / "extra") << "x";
    std::ofstream(root() / "deny" / (SmallIdentity("denied").key + ".json")) << "{}";
    ASSERT_TRUE(store->Pin(identity_.key).ok());
    fs::create_directory(root() / "staging/left.over");
    fs::remove(root() / "checks");
  }
  const auto before = Snapshot(root());
  const auto time = fs::last_write_time(Artifact(identity_));
  const auto store = OpenStore({.root = root(), .read_only = true});
  const LookupResult lease = Lookup(*store, identity_, Validation::kFull);
  EXPECT_EQ(lease.status, LookupStatus::kHit) << lease.failure.Text();
  EXPECT_EQ(Lookup(*store, SmallIdentity("corrupt")).status, LookupStatus::kInvalid);
  EXPECT_EQ(Lookup(*store, SmallIdentity("denied")).status, LookupStatus::kInvalid);
  EXPECT_EQ(Lookup(*store, SmallIdentity("none")).status, LookupStatus::kMiss);
  EXPECT_EQ(Publish(*store, SmallIdentity("none")).outcome, PublicationOutcome::kFailed);
  EXPECT_FALSE(store->Evict(identity_.key, Soon()).ok());
  EXPECT_FALSE(store->Pin(identity_.key).ok());
  EXPECT_FALSE(store->ClearQuarantine(absl::ZeroDuration(), Soon()).ok());

  const absl::StatusOr<StoreInventory> inventory = store->Inventory();
  ASSERT_TRUE(inventory.ok()) << inventory.status();
  std::map<std::string, const StoreEntry*> entries;
  for (const StoreEntry& entry : inventory->entries) entries[entry.name] = &entry;
  ASSERT_EQ(entries.size(), 4u);
  const StoreEntry& ready = *entries.at(identity_.key);
  EXPECT_EQ(ready.state, EntryState::kReady);
  EXPECT_TRUE(ready.pinned);
  EXPECT_TRUE(ready.leased);
  EXPECT_EQ(ready.identity, identity_.document);
  EXPECT_GT(ready.bytes, PayloadBytes(SmallLayout()));
  EXPECT_EQ(entries.at(SmallIdentity("denied").key)->state, EntryState::kDenied);
  EXPECT_EQ(entries.at("left.over")->state, EntryState::kStaging);
  EXPECT_FALSE(entries.at(SmallIdentity("corrupt").key)->leased);

  EXPECT_EQ(Snapshot(root()), before);
  EXPECT_EQ(fs::last_write_time(Artifact(identity_)), time);
}

// While it looks, what it looks at can be leased and evicted, without waiting.
TEST_F(StoreTest, AnInventoryIsInNobodysWay) {
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  FaultyFileOps ops;
  const auto lister = OpenStore({.root = root(), .read_only = true, .file_ops = &ops});
  std::vector<LookupStatus> seen;
  ops.on_read = [&] {
    seen.push_back(store->Lookup(identity_, {.deadline = absl::InfinitePast()}).status);
  };
  ASSERT_TRUE(lister->Inventory().ok());
  EXPECT_THAT(seen, ::testing::Contains(LookupStatus::kHit));
  EXPECT_THAT(seen, ::testing::Each(LookupStatus::kHit));
  ops.on_read = [&] { store->Evict(identity_.key, absl::Now()).IgnoreError(); };
  ASSERT_TRUE(lister->Inventory().ok());
  EXPECT_EQ(Lookup(*store, identity_).status, LookupStatus::kMiss);
}

// --- room

TEST_F(StoreTest, AFolderThatHandsItsGroupDownHoldsArtifactsToo) {
  ASSERT_EQ(chmod(fs::path(folder_ / "").c_str(), 02700), 0);
  const auto store = Open();
  ASSERT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  struct stat info;
  ASSERT_EQ(stat(Artifact(identity_).c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 02700u);
  EXPECT_EQ(Lookup(*store, identity_).status, LookupStatus::kHit);
}

class StoreRoomTest : public StoreTest {
 protected:
  // Of one artifact with its metadata.
  int64_t ArtifactBytes() {
    TempFolder other;
    const auto store = OpenStore({.root = other / "store"});
    Publish(*store, identity_);
    int64_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(other / ("store/artifacts/" + identity_.key))) {
      bytes += static_cast<int64_t>(entry.file_size());
    }
    return bytes;
  }
  std::unique_ptr<Store> OpenWith(const StorePolicy& policy) {
    StoreOptions options = Options();
    options.policy = policy;
    return OpenStore(options);
  }
  bool Has(const std::string& source) { return fs::exists(Artifact(SmallIdentity(source))); }
  // Room for that many artifacts, and the documents.
  int64_t RoomFor(int artifacts) { return artifacts * ArtifactBytes() + 1000; }
};

TEST_F(StoreRoomTest, TheLeastRecentlyLeasedGoesFirst) {
  const auto store = OpenWith({.max_store_bytes = RoomFor(2)});
  for (const char* source : {"a", "b"}) {
    ASSERT_EQ(Publish(*store, SmallIdentity(source)).outcome, PublicationOutcome::kPublished);
  }
  // Leases take no time here; make b's the older one by more than a clock tick.
  const timespec old[2] = {{.tv_sec = 1'000'000}, {.tv_sec = 1'000'000}};
  for (const char* source : {"a", "b"}) {
    ASSERT_EQ(utimensat(AT_FDCWD, Artifact(SmallIdentity(source)).c_str(), old, 0), 0);
  }
  ASSERT_EQ(Lookup(*store, SmallIdentity("a")).status, LookupStatus::kHit);
  PublicationRecord record = Publish(*store, SmallIdentity("c"));
  ASSERT_EQ(record.outcome, PublicationOutcome::kPublished) << record.failure.Text();
  EXPECT_EQ(record.evicted, 1);
  EXPECT_TRUE(Has("a"));
  EXPECT_FALSE(Has("b"));
  EXPECT_TRUE(Has("c"));
  EXPECT_TRUE(IsEmpty(root() / "staging"));
}

TEST_F(StoreRoomTest, LeasedAndPinnedOnesStay) {
  const auto store = OpenWith({.max_store_bytes = RoomFor(2)});
  for (const char* source : {"a", "b"}) {
    ASSERT_EQ(Publish(*store, SmallIdentity(source)).outcome, PublicationOutcome::kPublished);
  }
  LookupResult lease = Lookup(*store, SmallIdentity("a"));
  ASSERT_TRUE(store->Pin(SmallIdentity("b").key).ok());
  PublicationRecord record = Publish(*store, SmallIdentity("c"));
  EXPECT_EQ(record.outcome, PublicationOutcome::kFailed);
  EXPECT_EQ(record.failure.reason, Reason::kStoreLimit);
  EXPECT_TRUE(record.failure.retryable());
  EXPECT_EQ(store->Evict(SmallIdentity("a").key, Soon()).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(store->Evict(SmallIdentity("b").key, Soon()).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Has("a") && Has("b"));

  lease.lease.reset();
  EXPECT_EQ(Publish(*store, SmallIdentity("c")).outcome, PublicationOutcome::kPublished);
  EXPECT_FALSE(Has("a"));
  ASSERT_TRUE(store->Unpin(SmallIdentity("b").key).ok());
  EXPECT_TRUE(store->Evict(SmallIdentity("b").key, Soon()).ok());
  EXPECT_EQ(store->Evict(SmallIdentity("b").key, Soon()).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store->Unpin(SmallIdentity("b").key).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store->Pin(SmallIdentity("b").key).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store->Evict("../artifacts", Soon()).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(StoreRoomTest, NothingIsEvictedForWhatWouldNotFitEvenSo) {
  const auto store = OpenWith({.max_store_bytes = RoomFor(3)});
  for (const char* source : {"a", "b", "c"}) {
    ASSERT_EQ(Publish(*store, SmallIdentity(source)).outcome, PublicationOutcome::kPublished);
  }
  ASSERT_TRUE(store->Pin(SmallIdentity("b").key).ok());
  const LookupResult lease = Lookup(*store, SmallIdentity("c"));
  // With "a" gone one would fit, not two.
  EXPECT_EQ(store->EvictToFit(RoomFor(2), Soon()).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Has("a") && Has("b") && Has("c"));
  EXPECT_EQ(Publish(*store, SmallIdentity("d")).outcome, PublicationOutcome::kPublished);
  EXPECT_FALSE(Has("a"));
}

TEST_F(StoreRoomTest, QuarantineMakesRoomBeforeAnArtifactDoes) {
  const auto store = OpenWith({.max_store_bytes = RoomFor(2)});
  for (const char* source : {"a", "b"}) {
    ASSERT_EQ(Publish(*store, SmallIdentity(source)).outcome, PublicationOutcome::kPublished);
  }
  std::ofstream(Artifact(SmallIdentity("b")) / "extra") << "x";
  ASSERT_EQ(Lookup(*store, SmallIdentity("b")).status, LookupStatus::kInvalid);
  EXPECT_EQ(Publish(*store, SmallIdentity("c")).outcome, PublicationOutcome::kPublished);
  EXPECT_TRUE(Has("a"));
  EXPECT_TRUE(IsEmpty(root() / "quarantine"));
}

TEST_F(StoreRoomTest, TooLargeAnArtifactAndTooLittleFreeSpaceAreTold) {
  const int64_t bytes = ArtifactBytes();
  {
    const auto store = OpenWith({.max_artifact_bytes = bytes - 1});
    const PublicationRecord record = Publish(*store, identity_);
    EXPECT_EQ(record.failure.reason, Reason::kArtifactTooLarge);
  }
  fs::remove_all(root());
  {
    const auto store = OpenWith({.max_artifact_bytes = bytes});
    EXPECT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
  }
  fs::remove_all(root());
  const auto store = OpenWith({.min_free_bytes = 1000});
  ops_.free_bytes = bytes + 999;
  const PublicationRecord record = Publish(*store, identity_);
  EXPECT_EQ(record.failure.reason, Reason::kFreeSpace);
  EXPECT_EQ(record.failure.stage, Stage::kCapacity);
  ops_.free_bytes = bytes + 1000;
  EXPECT_EQ(Publish(*store, identity_).outcome, PublicationOutcome::kPublished);
}

// --- filesystem.h

TEST(FilesystemTest, TheMostSpecificMountPointCounts) {
  const std::string table =
      "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
      "30 22 0:40 / /data rw - nfs4 host:/data rw\n"
      "31 30 0:41 / /data/local rw master:3 propagate_from:2 - xfs /dev/vdb rw\n"
      "32 22 0:42 / /with\\040blank rw - tmpfs tmpfs rw\n"
      "33 22 0:43 / /twice rw - ext4 /dev/vdc rw\n"
      "34 22 0:44 / /twice rw - fuse.sshfs host: rw\n"
      "rubbish\n";
  EXPECT_EQ(*FilesystemOf("/home", table), "ext4");
  EXPECT_EQ(*FilesystemOf("/data", table), "nfs4");
  EXPECT_EQ(*FilesystemOf("/data/x", table), "nfs4");
  EXPECT_EQ(*FilesystemOf("/database", table), "ext4");
  EXPECT_EQ(*FilesystemOf("/data/local/x", table), "xfs");
  EXPECT_EQ(*FilesystemOf("/with blank/x", table), "tmpfs");
  EXPECT_EQ(*FilesystemOf("/twice/x", table), "fuse.sshfs") << "the later one is on top";
  EXPECT_FALSE(FilesystemOf("/home", "rubbish\n").ok());
}

TEST(FilesystemTest, ANumberTellsWhatTheMountTableTells) {
  const fs::path folder = fs::canonical(fs::temp_directory_path());
  ASSERT_TRUE(FilesystemAt(folder).ok());
  EXPECT_EQ(*FilesystemAt(folder / "not there yet"), *FilesystemAt(folder));
  struct statfs info;
  ASSERT_EQ(statfs(folder.c_str(), &info), 0);
  const absl::StatusOr<std::string> by_number = FilesystemOfNumber(info.f_type);
  ASSERT_TRUE(by_number.ok()) << by_number.status();
  EXPECT_EQ(ClassOf(*by_number), ClassOf(*FilesystemAt(folder)));
  EXPECT_THAT(FilesystemOfNumber(0x6969).status().message(), HasSubstr("0x6969")) << "NFS";
}

TEST(FilesystemTest, OnlyKnownLocalTypesAreAllowed) {
  EXPECT_EQ(ClassOf("ext4"), StorageClass::kDisk);
  EXPECT_EQ(ClassOf("overlay"), StorageClass::kDisk);
  EXPECT_EQ(ClassOf("tmpfs"), StorageClass::kTmpfs);
  for (const char* type : {"nfs", "nfs4", "9p", "fuse", "fuse.gcsfuse", "virtiofs", "", "EXT4"}) {
    EXPECT_EQ(ClassOf(type), StorageClass::kRefused) << type;
  }
}

}  // namespace
}  // namespace dlo::hwr
