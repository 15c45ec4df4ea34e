// A Wan model's start with the Host Weight Runtime: what comes from where, what is tried next, and
// that nothing is touched that is not to be. Real stores and checkpoints; faults are made in their
// files at the moment that the start enters a state.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/sha256.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/hwr/store.h"
#include "loader/safetensors.h"
#include "loader/test_folder.h"
#include "models/host_weight_identity.h"
#include "models/model_card.h"
#include "models/umt5/umt5_specs.h"
#include "models/wan/transformer_specs.h"
#include "models/wan/vae_specs.h"
#include "models/wan/wan_pipeline.h"
#include "models/wan/wan_plan.h"
#include "runtime/cpu/thread_communicator.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;
using hwr::Mode;
using hwr::Outcome;
using hwr::PublicationOutcome;
using hwr::Reason;
using testing::HasSubstr;
using testing::IsEmpty;

class Frames : public GenerationObserver {
 public:
  void OnStage(Stage) override {}
  void OnStep(int, int) override {}
  absl::Status OnFrames(const FrameSpan& span) override {
    bytes.append(reinterpret_cast<const char*>(span.rgb.data()), span.rgb.size() * sizeof(float));
    return absl::OkStatus();
  }
  bool cancelled() const override { return false; }

  std::string bytes;
};

// A start and what came of it.
struct Started {
  absl::Status status;
  std::unique_ptr<VideoPipeline> pipeline;
  StartupReport report;

  const hwr::StartupRecord& record() const { return report.record; }
  // Reasons of the attempts, in their order.
  std::vector<Reason> reasons() const {
    std::vector<Reason> reasons;
    for (const hwr::Attempt& attempt : report.record.attempts) reasons.push_back(attempt.reason);
    return reasons;
  }
  std::vector<std::string> backings() const {
    std::vector<std::string> backings;
    for (const HostBacking& component : report.components) backings.push_back(component.backing);
    return backings;
  }
};

const std::vector<std::string> kAllFromArtifact(3, "artifact");
const std::vector<std::string> kAllInMemory(3, "memory");

class WanStartup : public testing::Test {
 protected:
  explicit WanStartup(const std::string& golden = "wan21") {
    fs::copy(fs::path(DLO_SOURCE_DIR) / "tests/goldens/pipelines" / golden / "repo", root(),
             fs::copy_options::recursive);
    for (const auto& entry : fs::recursive_directory_iterator(root())) {
      fs::permissions(entry.path(), fs::perms::owner_write, fs::perm_options::add);
    }
    // Digests of files that have just changed are not kept.
    const absl::Time copied = absl::Now();
    while (absl::Now() - copied < absl::Milliseconds(150)) absl::SleepFor(absl::Milliseconds(10));
  }

  fs::path root() const { return folder_ / "repo"; }
  fs::path store() const { return folder_ / "store"; }
  fs::path Weights(const std::string& component) const {
    return root() / component / "diffusion_pytorch_model.safetensors";
  }

  // Stored as float32, runs as bfloat16.
  PipelineOptions Options(Mode mode) const {
    return {.root = root(),
            .dtype = DType::kBF16,
            .threads = 1,
            .stream_slots = 2,
            .host_weights = {.mode = mode, .root = store(), .wait = absl::Seconds(30)}};
  }
  Started Start(PipelineOptions options) {
    Started started;
    options.report = &started.report;
    auto pipeline = LoadWanPipeline(options);
    started.status = pipeline.status();
    if (pipeline.ok()) started.pipeline = *std::move(pipeline);
    return started;
  }
  Started Start(Mode mode) { return Start(Options(mode)); }
  // `act` is done when the start enters the state.
  Started StartWith(Mode mode, const std::string& state, const std::function<void()>& act) {
    PipelineOptions options = Options(mode);
    options.on_startup_state = [&](absl::string_view entered) {
      if (entered == state) act();
    };
    return Start(std::move(options));
  }
  // An artifact of the repository as it is.
  void Publish() {
    const Started started = Start(Mode::kPreferred);
    ASSERT_TRUE(started.status.ok()) << started.status;
    ASSERT_EQ(started.record().publication.outcome, PublicationOutcome::kPublished)
        << started.record().publication.failure.Text();
    key_ = started.record().key;
  }

  std::string Video(VideoPipeline& pipeline) {
    auto card = ReadModelCard(root());
    EXPECT_TRUE(card.ok()) << card.status();
    VideoRequest request = {"a yellow star moving down", "blurred", {}};
    EXPECT_THAT(
        (*card)->Resolve({.width = 64, .height = 64, .num_frames = 5, .num_inference_steps = 2},
                         /*random_seed=*/3, &request.settings),
        IsEmpty());
    Frames frames;
    const auto stats = pipeline.Generate(request, frames);
    EXPECT_TRUE(stats.ok()) << stats.status();
    return std::move(frames.bytes);
  }
  // Of the checkpoint as it is, without a store.
  std::string CanonicalVideo() {
    const Started started = Start(Mode::kDisabled);
    EXPECT_TRUE(started.status.ok()) << started.status;
    return Video(*started.pipeline);
  }

  std::unique_ptr<hwr::Store> OpenStore(bool read_only = true) const {
    auto opened = hwr::Store::Open({.root = store(), .read_only = read_only});
    if (auto* open = std::get_if<std::unique_ptr<hwr::Store>>(&opened)) return std::move(*open);
    ADD_FAILURE() << std::get<hwr::Failure>(opened).Text();
    return nullptr;
  }
  std::vector<std::string> Artifacts() const {
    std::vector<std::string> keys;
    const auto inventory = OpenStore()->Inventory();
    EXPECT_TRUE(inventory.ok()) << inventory.status();
    for (const hwr::StoreEntry& entry : inventory->entries) {
      if (entry.state == hwr::EntryState::kReady) keys.push_back(entry.key);
    }
    return keys;
  }
  // Whether a process has a lease of the artifact.
  bool Leased() const {
    const auto inventory = OpenStore()->Inventory();
    EXPECT_TRUE(inventory.ok()) << inventory.status();
    return std::any_of(inventory->entries.begin(), inventory->entries.end(),
                       [](const hwr::StoreEntry& entry) { return entry.leased; });
  }
  fs::path Payload(const std::string& name) const { return store() / "artifacts" / key_ / name; }
  void Cut(const fs::path& payload) const {
    fs::permissions(payload, fs::perms::owner_write, fs::perm_options::add);
    fs::resize_file(payload, 0);
  }

  TempFolder folder_;
  std::string key_;
};

// ---- What comes from where ----

TEST_F(WanStartup, RequiredWithoutAnArtifactFailsAndPublishesNothing) {
  const Started started = Start(Mode::kRequired);
  EXPECT_FALSE(started.status.ok());
  EXPECT_THAT(std::string(started.status.message()), HasSubstr("miss"));
  EXPECT_EQ(started.record().outcome, Outcome::kFailed);
  EXPECT_THAT(started.reasons(), testing::Contains(Reason::kMiss));
  EXPECT_EQ(started.record().bytes_read, 0);
  EXPECT_EQ(started.record().publication.outcome, PublicationOutcome::kNotAttempted);
  EXPECT_THAT(Artifacts(), IsEmpty());
}

TEST_F(WanStartup, PreferredFallsBackAndPublishesAndTheNextRequiredStartReadsNothing) {
  const std::string canonical = CanonicalVideo();
  Started cold = Start(Mode::kPreferred);
  ASSERT_TRUE(cold.status.ok()) << cold.status;
  EXPECT_EQ(cold.record().outcome, Outcome::kCanonicalFallback);
  EXPECT_THAT(cold.reasons(), testing::ElementsAre(Reason::kMiss));
  EXPECT_GT(cold.record().bytes_hashed, 0);
  EXPECT_GT(cold.record().bytes_read, 0);
  EXPECT_EQ(cold.record().bytes_mapped, 0);
  EXPECT_EQ(cold.backings(), kAllInMemory);
  ASSERT_EQ(cold.record().publication.outcome, PublicationOutcome::kPublished)
      << cold.record().publication.failure.Text();
  EXPECT_GT(cold.record().publication.bytes, 0);
  EXPECT_THAT(Artifacts(), testing::ElementsAre(cold.record().key));
  // It goes on with what it loaded.
  EXPECT_FALSE(Leased());
  EXPECT_EQ(Video(*cold.pipeline), canonical);

  Started warm = Start(Mode::kRequired);
  ASSERT_TRUE(warm.status.ok()) << warm.status;
  EXPECT_EQ(warm.record().outcome, Outcome::kLocalHit);
  EXPECT_EQ(warm.record().key, cold.record().key);
  EXPECT_FALSE(warm.record().recovered);
  EXPECT_EQ(warm.record().bytes_hashed, 0);
  EXPECT_EQ(warm.record().bytes_read, 0);
  EXPECT_GT(warm.record().bytes_mapped, 0);
  EXPECT_EQ(warm.record().publication.outcome, PublicationOutcome::kNotAttempted);
  EXPECT_EQ(warm.backings(), kAllFromArtifact);
  EXPECT_TRUE(Leased());
  EXPECT_EQ(Video(*warm.pipeline), canonical);
  warm.pipeline.reset();
  EXPECT_FALSE(Leased());
}

TEST_F(WanStartup, APreferredHitPublishesNothing) {
  Publish();
  const Started warm = Start(Mode::kPreferred);
  ASSERT_TRUE(warm.status.ok()) << warm.status;
  EXPECT_EQ(warm.record().outcome, Outcome::kLocalHit);
  EXPECT_EQ(warm.record().bytes_read, 0);
  EXPECT_EQ(warm.record().publication.outcome, PublicationOutcome::kNotAttempted);
}

TEST_F(WanStartup, ResidentLayersAndOtherSlotsComeFromTheSameArtifact) {
  Publish();
  const std::string canonical = CanonicalVideo();
  PipelineOptions options = Options(Mode::kRequired);
  options.resident_layers = 1;
  options.stream_slots = 3;
  const Started started = Start(options);
  ASSERT_TRUE(started.status.ok()) << started.status;
  EXPECT_EQ(started.record().key, key_);
  EXPECT_EQ(Video(*started.pipeline), canonical);
}

TEST_F(WanStartup, AnotherDTypeIsAnotherArtifact) {
  Publish();
  PipelineOptions options = Options(Mode::kRequired);
  options.dtype = DType::kF32;
  const Started started = Start(options);
  EXPECT_FALSE(started.status.ok());
  EXPECT_THAT(started.reasons(), testing::Contains(Reason::kMiss));
}

TEST_F(WanStartup, AQuantisedArtifactIsAnotherAndGivesTheVideoOfAQuantisedLoad) {
  Publish();
  PipelineOptions options = Options(Mode::kRequired);
  options.quantization = OnlineQuantization::kPerTensorFp8;
  EXPECT_THAT(Start(options).reasons(), testing::Contains(Reason::kMiss));
  options.host_weights.mode = Mode::kPreferred;
  const Started loaded = Start(options);
  ASSERT_TRUE(loaded.status.ok()) << loaded.status;
  ASSERT_EQ(loaded.record().publication.outcome, PublicationOutcome::kPublished);
  options.host_weights.mode = Mode::kRequired;
  const Started restored = Start(options);
  ASSERT_TRUE(restored.status.ok()) << restored.status;
  EXPECT_NE(restored.record().key, key_);
  EXPECT_EQ(restored.backings(), kAllFromArtifact);
  EXPECT_EQ(restored.record().bytes_read, 0);
  EXPECT_EQ(Video(*restored.pipeline), Video(*loaded.pipeline));
}

TEST_F(WanStartup, ACopyOfTheCheckpointElsewhereHasTheSameArtifact) {
  Publish();
  fs::copy(root(), folder_ / "copy", fs::copy_options::recursive);
  PipelineOptions options = Options(Mode::kRequired);
  options.root = folder_ / "copy";
  const Started started = Start(options);
  ASSERT_TRUE(started.status.ok()) << started.status;
  EXPECT_EQ(started.record().key, key_);
}

// Where this process has the file mapped, and which bytes are there.
struct MappedBytes {
  std::string address;
  std::string sha256;
  bool operator==(const MappedBytes&) const = default;
};
std::map<std::string, MappedBytes> MappedPayloads(const fs::path& artifact) {
  std::map<std::string, MappedBytes> payloads;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (!absl::StrContains(line, artifact.native())) continue;
    // "begin-end r--s offset device inode path"
    const std::vector<std::string> fields = absl::StrSplit(line, ' ', absl::SkipEmpty());
    EXPECT_EQ(fields[1], "r--s") << line;
    const std::vector<std::string> range = absl::StrSplit(fields[0], '-');
    const uint64_t begin = std::stoull(range[0], nullptr, 16);
    const uint64_t end = std::stoull(range[1], nullptr, 16);
    payloads[fs::path(fields[5]).filename()] = {
        range[0], Sha256Of({reinterpret_cast<const char*>(begin), end - begin})};
  }
  return payloads;
}

TEST_F(WanStartup, RestoredBytesAndTheirAddressesStayAsTheyWereBoundAtTheCommit) {
  Publish();
  std::map<std::string, std::map<std::string, MappedBytes>> seen;
  PipelineOptions options = Options(Mode::kRequired);
  options.on_startup_state = [&](absl::string_view state) {
    seen[std::string(state)] = MappedPayloads(store() / "artifacts" / key_);
  };
  const Started started = Start(options);
  ASSERT_TRUE(started.status.ok()) << started.status;
  ASSERT_EQ(seen.count("CARRIER_OWNED"), 1u);
  const auto at_commit = seen.at("CARRIER_OWNED");
  ASSERT_EQ(at_commit.size(), 3u);  // text encoder, transformer, VAE
  EXPECT_EQ(seen.at("BACKEND_READY"), at_commit);
  Video(*started.pipeline);
  EXPECT_EQ(MappedPayloads(store() / "artifacts" / key_), at_commit);
  // And they are the artifact's, of which every byte is checked here.
  EXPECT_EQ(OpenStore()->Verify(key_, {}).status, hwr::LookupStatus::kHit);
}

TEST_F(WanStartup, StatesAreEnteredInTheOrderOfTheTransaction) {
  Publish();
  std::vector<std::string> states;
  PipelineOptions options = Options(Mode::kRequired);
  options.on_startup_state = [&](absl::string_view state) { states.emplace_back(state); };
  ASSERT_TRUE(Start(options).status.ok());
  EXPECT_THAT(states,
              testing::ElementsAre("LEASE_OWNED_BY_LOADER", "RESTORE_PLANNED", "COMMIT_STARTED",
                                   "CARRIER_OWNED", "BACKEND_OWNED", "BACKEND_READY"));
}

// ---- The store is left alone ----

// Every access to files below a folder, but for stat.
class Watch {
 public:
  explicit Watch(const fs::path& folder) : fd_(inotify_init1(IN_NONBLOCK | IN_CLOEXEC)) {
    Add(folder);
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      if (entry.is_directory()) Add(entry.path());
    }
    Count();  // what listing them has caused
  }
  ~Watch() { close(fd_); }
  int64_t Count() {
    char buffer[65536];
    int64_t bytes = 0;
    for (ssize_t n; (n = read(fd_, buffer, sizeof(buffer))) > 0;) bytes += n;
    return bytes;
  }

 private:
  void Add(const fs::path& folder) {
    EXPECT_GE(inotify_add_watch(fd_, folder.c_str(), IN_ALL_EVENTS), 0);
  }
  const int fd_;
};

class WanStartupGate : public WanStartup {
 protected:
  // The same with a store that has the artifact, and with a root that cannot be looked at.
  void ExpectUntouched(PipelineOptions options, size_t components = 3) {
    Watch watch(store());
    for (const fs::path& place : {store(), fs::path(folder_.Write("file", "")) / "store"}) {
      options.host_weights.root = place;
      const Started started = Start(options);
      ASSERT_TRUE(started.status.ok()) << started.status;
      EXPECT_EQ(started.record().outcome, Outcome::kDisabled);
      EXPECT_THAT(started.record().attempts, IsEmpty());
      EXPECT_EQ(started.record().key, "");
      EXPECT_EQ(started.record().bytes_hashed, 0);
      EXPECT_EQ(started.record().publication.outcome, PublicationOutcome::kNotAttempted);
      EXPECT_EQ(started.report.components.size(), components);
    }
    EXPECT_EQ(watch.Count(), 0);
  }
};

TEST_F(WanStartupGate, ModeDisabled) {
  Publish();
  ExpectUntouched(Options(Mode::kDisabled));
}

TEST_F(WanStartupGate, AllWeightsOnTheDevice) {
  Publish();
  for (const Mode mode : {Mode::kPreferred, Mode::kRequired}) {
    PipelineOptions options = Options(mode);
    options.stream_slots = 0;
    ExpectUntouched(options);
  }
}

TEST_F(WanStartupGate, RanksThatGatherTheirWeights) {
  Publish();
  for (const Mode mode : {Mode::kPreferred, Mode::kRequired}) {
    Watch watch(store());
    ThreadWorld world;
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        PipelineOptions options = Options(mode);
        options.weight_group =
            *world.factory().Create({.name = "weights/0", .rank = rank, .size = 2});
        const Started started = Start(options);
        ASSERT_TRUE(started.status.ok()) << started.status;
        EXPECT_EQ(started.record().outcome, Outcome::kDisabled);
        EXPECT_THAT(started.record().attempts, IsEmpty());
        EXPECT_EQ(started.record().bytes_hashed, 0);
      });
    }
    for (std::thread& rank : ranks) rank.join();
    EXPECT_EQ(watch.Count(), 0);
  }
}

TEST_F(WanStartupGate, AStoreThatIsUsedIsSeenToBe) {
  Publish();
  Watch watch(store());
  ASSERT_TRUE(Start(Mode::kRequired).status.ok());
  EXPECT_GT(watch.Count(), 0);
}

// ---- Failures before service ----

TEST_F(WanStartup, ASourceReplacedBetweenPlanAndCommitTouchesNoModel) {
  Publish();
  // Another checkpoint of the same shapes.
  const auto replace = [this] {
    std::fstream file(Weights("transformer"), std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(-4, std::ios::end);
    const float value = 0.75F;
    file.write(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  const Started required = StartWith(Mode::kRequired, "RESTORE_PLANNED", replace);
  EXPECT_FALSE(required.status.ok());
  EXPECT_EQ(required.record().outcome, Outcome::kFailed);
  EXPECT_THAT(required.reasons(), testing::Contains(Reason::kSourceChanged));
  EXPECT_EQ(required.record().bytes_mapped, 0);
  EXPECT_FALSE(Leased());
}

TEST_F(WanStartup, PreferredLoadsTheSourceThatIsThereAndPublishesNothingUnderTheOldName) {
  Publish();
  const auto replace = [this] {
    const fs::path file = Weights("transformer");
    fs::copy_file(file, folder_ / "new");
    std::fstream(folder_ / "new", std::ios::binary | std::ios::in | std::ios::out)
        .seekp(-4, std::ios::end)
        .write("\0\0\x40\x3F", 4);
    fs::rename(folder_ / "new", file);
  };
  const Started preferred = StartWith(Mode::kPreferred, "RESTORE_PLANNED", replace);
  ASSERT_TRUE(preferred.status.ok()) << preferred.status;
  EXPECT_EQ(preferred.record().outcome, Outcome::kCanonicalFallback);
  EXPECT_THAT(preferred.reasons(), testing::Contains(Reason::kSourceChanged));
  EXPECT_FALSE(preferred.record().recovered);
  EXPECT_EQ(preferred.backings(), kAllInMemory);
  EXPECT_NE(preferred.record().publication.outcome, PublicationOutcome::kPublished);
  EXPECT_FALSE(Leased());
  EXPECT_EQ(Video(*preferred.pipeline), CanonicalVideo());
}

// A checkpoint whose blocks could stay in its pages.
class WanStartupFailure : public WanStartup {
 protected:
  WanStartupFailure() : WanStartup("wan21-bf16") { Publish(); }

  void ExpectFreshLoad(const Started& started, Reason reason) {
    ASSERT_TRUE(started.status.ok()) << started.status;
    EXPECT_EQ(started.record().outcome, Outcome::kCanonicalFallback);
    EXPECT_TRUE(started.record().recovered);
    EXPECT_THAT(started.reasons(), testing::Contains(reason));
    EXPECT_GT(started.record().bytes_read, 0);
    EXPECT_EQ(started.record().bytes_mapped, 0);
    EXPECT_EQ(started.backings(), kAllInMemory);
    EXPECT_EQ(started.record().publication.outcome, PublicationOutcome::kNotAttempted);
    EXPECT_FALSE(Leased());
    EXPECT_THAT(MappedPayloads(store()), IsEmpty());
    EXPECT_EQ(Video(*started.pipeline), CanonicalVideo());
  }
  void ExpectFailure(const Started& started, Reason reason) {
    EXPECT_FALSE(started.status.ok());
    EXPECT_EQ(started.record().outcome, Outcome::kFailed);
    EXPECT_THAT(started.reasons(), testing::Contains(reason));
    EXPECT_EQ(started.record().bytes_read, 0);
    EXPECT_FALSE(Leased());
    EXPECT_THAT(MappedPayloads(store()), IsEmpty());
  }
};

TEST_F(WanStartupFailure, WithoutAStoreTheBlocksWouldBeMapped) {
  EXPECT_THAT(Start(Mode::kDisabled).backings(), testing::Contains("checkpoint"));
}

// What is published has been finished in private memory.
TEST_F(WanStartupFailure, AMissIsLoadedIntoPrivateMemoryAndPublished) {
  fs::remove_all(store());
  const Started started = Start(Mode::kPreferred);
  ASSERT_TRUE(started.status.ok()) << started.status;
  EXPECT_EQ(started.record().publication.outcome, PublicationOutcome::kPublished);
  EXPECT_EQ(started.backings(), kAllInMemory);
}

TEST_F(WanStartupFailure, WhereNothingIsPublishedBlocksAreMappedAsWithoutAStore) {
  const hwr::Descriptor artifact(
      open((store() / "artifacts" / key_).c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(flock(artifact.get(), LOCK_EX | LOCK_NB), 0);
  PipelineOptions options = Options(Mode::kPreferred);
  options.host_weights.wait = absl::Milliseconds(100);
  const Started started = Start(options);
  ASSERT_TRUE(started.status.ok()) << started.status;
  EXPECT_EQ(started.record().outcome, Outcome::kCanonicalFallback);
  EXPECT_THAT(started.reasons(), testing::ElementsAre(Reason::kLockTimeout));
  EXPECT_EQ(started.record().publication.outcome, PublicationOutcome::kNotAttempted);
  EXPECT_EQ(started.backings(), Start(Mode::kDisabled).backings());
  EXPECT_EQ(Video(*started.pipeline), CanonicalVideo());
}

// The last component's bytes go when the first ones are bound.
TEST_F(WanStartupFailure, ACommitThatFailsHalfWayIsFollowedByOneFreshLoad) {
  ExpectFreshLoad(
      StartWith(Mode::kPreferred, "COMMIT_STARTED", [this] { Cut(Payload("vae.bin")); }),
      Reason::kCommitFailed);
}

TEST_F(WanStartupFailure, ACommitThatFailsHalfWayFailsARequiredStart) {
  ExpectFailure(StartWith(Mode::kRequired, "COMMIT_STARTED", [this] { Cut(Payload("vae.bin")); }),
                Reason::kCommitFailed);
}

TEST_F(WanStartupFailure, ABackendThatFailsIsFollowedByOneFreshLoad) {
  ExpectFreshLoad(
      StartWith(Mode::kPreferred, "BACKEND_OWNED", [this] { Cut(Payload("text_encoder.bin")); }),
      Reason::kBackendFailed);
}

TEST_F(WanStartupFailure, ABackendThatFailsFailsARequiredStart) {
  ExpectFailure(
      StartWith(Mode::kRequired, "BACKEND_OWNED", [this] { Cut(Payload("text_encoder.bin")); }),
      Reason::kBackendFailed);
}

TEST_F(WanStartupFailure, AFreshLoadThatFailsTooFailsTheStart) {
  const Started started = StartWith(Mode::kPreferred, "COMMIT_STARTED", [this] {
    Cut(Payload("vae.bin"));
    fs::resize_file(Weights("vae"), 16);
  });
  EXPECT_FALSE(started.status.ok());
  EXPECT_EQ(started.record().outcome, Outcome::kFailed);
  EXPECT_THAT(started.reasons(), testing::Contains(Reason::kCommitFailed));
}

TEST_F(WanStartupFailure, PreferredDoesNotPassOverWhatSomebodyMustLookAt) {
  PipelineOptions options = Options(Mode::kPreferred);
  options.host_weights.max_store_bytes = 1 << 30;  // the store was made with no limit
  const Started other_policy = Start(options);
  EXPECT_FALSE(other_policy.status.ok());
  EXPECT_EQ(other_policy.record().outcome, Outcome::kFailed);
  EXPECT_THAT(other_policy.reasons(), testing::Contains(Reason::kPolicyMismatch));
  EXPECT_EQ(other_policy.record().bytes_read, 0);

  fs::permissions(store(), fs::perms::all);
  const Started not_private = Start(Mode::kPreferred);
  EXPECT_FALSE(not_private.status.ok());
  EXPECT_THAT(not_private.reasons(), testing::Contains(Reason::kNotPrivate));
  fs::permissions(store(), fs::perms::owner_all);
  EXPECT_TRUE(Start(Mode::kPreferred).status.ok());
}

TEST_F(WanStartupFailure, AnArtifactThatIsCutWhileItServesFailsRequestsWithItsName) {
  const Started started = Start(Mode::kRequired);
  ASSERT_TRUE(started.status.ok()) << started.status;
  Cut(Payload("transformer.bin"));
  auto card = ReadModelCard(root());
  VideoRequest request = {"a star", "", {}};
  ASSERT_THAT(
      (*card)->Resolve({.width = 64, .height = 64, .num_frames = 5, .num_inference_steps = 2},
                       /*random_seed=*/3, &request.settings),
      IsEmpty());
  for (int i = 0; i < 2; ++i) {
    Frames frames;
    const absl::Status status = started.pipeline->Generate(request, frames).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()), HasSubstr("transformer.bin"));
  }
}

// ---- Teardown ----

// In the place of a lease: looks at the device when it goes.
struct LeaseProbe {
  const Device* device;
  DeviceMemory* when_let_go;
  ~LeaseProbe() { *when_let_go = device->memory(); }
};

TEST_F(WanStartup, TheLeaseIsLetGoWhenNothingCanReadItsBytesAnyMore) {
  auto config = ReadWanConfig(root());
  ASSERT_TRUE(config.ok()) << config.status();
  std::unique_ptr<Device> device = *OpenDevice(DeviceKind::kCpu, 0);
  const auto load = [&](const std::string& name, const std::vector<TensorSpec>& specs,
                        WeightPlacement::Kind kind) {
    auto checkpoint = Checkpoint::Open(root() / name);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    auto weights =
        ComponentWeights::Load(*checkpoint, specs, *device, {.partial = true}, {.kind = kind});
    EXPECT_TRUE(weights.ok()) << weights.status();
    return *std::move(weights);
  };
  using Kind = WeightPlacement::Kind;
  ComponentWeights text =
      load("text_encoder", Umt5DeviceSpecs(config->text_encoder, DType::kBF16), Kind::kStreamed);
  ComponentWeights transformer =
      load("transformer", WanTransformerSpecs(config->transformer, DType::kBF16), Kind::kStreamed);
  ComponentWeights vae = load("vae", WanVaeSpecs(config->vae, false), Kind::kStaged);
  auto streamer = BlockStreamer::Create(*device, {text.host_blocks(), transformer.host_blocks()},
                                        {.slots = 2}, nullptr);
  ASSERT_TRUE(streamer.ok()) << streamer.status();
  text.StreamFrom(**streamer, kWanTextRing);
  transformer.StreamFrom(**streamer, kWanTransformerRing);
  ASSERT_TRUE(vae.BringIn().ok());
  // A plan that nobody walks to its end: moves are under way.
  VideoSettings settings;
  auto card = ReadModelCard(root());
  (*card)->Resolve({}, 0, &settings);
  ASSERT_TRUE((*streamer)->Start(*WanVisitPlan(*config, settings)).ok());

  auto text_checkpoint =
      std::make_shared<const Checkpoint>(*Checkpoint::Open(root() / "text_encoder"));
  auto tokens =
      HostTable::Create(text_checkpoint, Umt5TokenTable(config->text_encoder, DType::kBF16));
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  DeviceMemory when_let_go;
  when_let_go.used_bytes = -1;
  auto probe = std::make_shared<LeaseProbe>(device.get(), &when_let_go);
  std::vector<WanTransformer> experts;
  experts.emplace_back(config->transformer, std::move(transformer));
  EXPECT_GT(device->memory().used_bytes, 0);
  EXPECT_GT(device->memory().host_bytes, 0);
  {
    const WanPipeline pipeline(WanComponents{
        .config = *config,
        .device = std::move(device),
        .lease = std::shared_ptr<const hwr::Lease>(std::move(probe), nullptr),
        .streamer = *std::move(streamer),
        .tokenizer = nullptr,
        .text_encoder = Umt5Encoder(config->text_encoder, std::move(text), *std::move(tokens)),
        .experts = std::move(experts),
        .vae_weights = std::move(vae)});
  }
  EXPECT_EQ(when_let_go.used_bytes, 0);
  EXPECT_EQ(when_let_go.host_bytes, 0);
}

}  // namespace
}  // namespace dlo
