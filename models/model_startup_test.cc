#include "models/model_startup.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "loader/hwr/descriptor.h"
#include "loader/test_folder.h"
#include "models/host_weight_identity.h"
#include "models/wan/wan_test_repository.h"
#include "models/wan/wan_weight_needs.h"
#include "spdlog/spdlog.h"
#include "tests/support/hash_checkpoint.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;
using hwr::Mode;
using hwr::Reason;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A model of any family: its weights are the bytes of its parts, here or in a lease.
class PlainBuilder : public ModelBuilder {
 public:
  explicit PlainBuilder(const fs::path& root) : artifact_(*DescribeHostWeights(root, {})) {
    layout_ = artifact_.layout;
  }

  absl::Status Restore(const hwr::Lease& lease) override {
    did.push_back("restore");
    for (int c = 0; c < static_cast<int>(layout_.size()); ++c) {
      for (int p = 0; p < static_cast<int>(layout_[c].parts.size()); ++p) {
        data_[{layout_[c].name, p}] = lease.part(c, p).data();
      }
    }
    return absl::OkStatus();
  }
  absl::Status Load(bool may_map) override {
    did.push_back(may_map ? "load or map" : "load");
    CheckpointProducer producer(artifact_);
    for (int c = 0; c < static_cast<int>(layout_.size()); ++c) {
      for (int p = 0; p < static_cast<int>(layout_[c].parts.size()); ++p) {
        std::vector<std::byte>& part = parts_[{layout_[c].name, p}];
        part.resize(artifact_.layout[c].parts[p].bytes);
        if (absl::Status status = producer.Produce(c, p, absl::MakeSpan(part)); !status.ok()) {
          return status;
        }
      }
    }
    return absl::OkStatus();
  }
  absl::Status Enable(std::shared_ptr<const hwr::Lease> lease) override {
    lease_ = std::move(lease);
    return absl::OkStatus();
  }
  void Discard() override { did.push_back("discard"); }

  hwr::ArtifactLayout layout() const override { return layout_; }
  absl::Status CopyPart(const std::string& component, int part, absl::Span<std::byte> to) override {
    const std::vector<std::byte>& bytes = parts_.at({component, part});
    if (to.size() != bytes.size()) return absl::InvalidArgumentError("another size");
    std::memcpy(to.data(), bytes.data(), bytes.size());
    return absl::OkStatus();
  }
  const std::byte* part_data(const std::string& component, int part) override {
    return data_.at({component, part});
  }

  int64_t read_bytes() const override { return 0; }
  int64_t mapped_bytes() const override { return 0; }
  int64_t pinned_bytes() const override { return 0; }
  std::vector<HostBacking> backings() const override { return {}; }

  hwr::ArtifactLayout layout_;
  std::vector<std::string> did;

 private:
  const HostWeightArtifact artifact_;
  std::map<std::pair<std::string, int>, std::vector<std::byte>> parts_;
  std::map<std::pair<std::string, int>, const std::byte*> data_;
  std::shared_ptr<const hwr::Lease> lease_;
};

class ModelStartupTest : public ::testing::Test {
 protected:
  ModelStartupTest() {
    spdlog::set_level(spdlog::level::off);
    for (const ComponentNeeds& needs : WanWeightNeeds(*ReadWanConfig(root()), DType::kF32)) {
      EXPECT_TRUE(WriteHashCheckpoint(root() / needs.folder, needs.specs, needs.name).ok());
    }
  }
  const fs::path& root() const { return repository_.root(); }
  fs::path store() const { return folder_ / "store"; }

  absl::Status Build(PlainBuilder& builder, Mode mode, absl::Duration wait = absl::Seconds(20)) {
    report_ = {};
    return BuildModel({.root = root(), .store = {.mode = mode, .root = store(), .wait = wait}},
                      builder, &report_);
  }
  // An artifact of the model.
  void Publish() {
    PlainBuilder builder(root());
    ASSERT_EQ(Build(builder, Mode::kPreferred), absl::OkStatus());
    ASSERT_EQ(report_.record.publication.outcome, hwr::PublicationOutcome::kPublished)
        << report_.record.publication.failure.Text();
  }

  WanTestRepository repository_;
  TempFolder folder_;
  StartupReport report_;
};

TEST_F(ModelStartupTest, AMissIsLoadedAndPublishedAndTheNextStartRestoresIt) {
  PlainBuilder cold(root());
  ASSERT_EQ(Build(cold, Mode::kPreferred), absl::OkStatus());
  EXPECT_THAT(cold.did, ElementsAre("load"));
  EXPECT_EQ(report_.record.publication.outcome, hwr::PublicationOutcome::kPublished);
  PlainBuilder warm(root());
  ASSERT_EQ(Build(warm, Mode::kRequired), absl::OkStatus());
  EXPECT_THAT(warm.did, ElementsAre("restore"));
  EXPECT_EQ(report_.record.outcome, hwr::Outcome::kLocalHit);
}

TEST_F(ModelStartupTest, AnArtifactWithAnotherLayoutThanTheBuildersOwnIsNotCommitted) {
  Publish();
  const auto name = [](hwr::ArtifactLayout& layout) { layout[0].name = "other"; };
  const auto parts = [](hwr::ArtifactLayout& layout) { layout[1].parts.pop_back(); };
  const auto bytes = [](hwr::ArtifactLayout& layout) { layout[1].parts[1].bytes += 256; };
  const auto tensor = [](hwr::ArtifactLayout& layout) {
    layout[1].parts[1].tensors[0].dtype = DType::kF16;
  };
  const std::vector<std::function<void(hwr::ArtifactLayout&)>> changes = {name, parts, bytes,
                                                                          tensor};
  for (const auto& change : changes) {
    PlainBuilder required(root());
    change(required.layout_);
    EXPECT_FALSE(Build(required, Mode::kRequired).ok());
    EXPECT_THAT(required.did, IsEmpty()) << "nothing is touched";
    EXPECT_EQ(report_.record.attempts.back().reason, Reason::kPlanFailed);
  }
  PlainBuilder preferred(root());
  bytes(preferred.layout_);
  EXPECT_EQ(Build(preferred, Mode::kPreferred), absl::OkStatus());
  EXPECT_THAT(preferred.did, ElementsAre("load or map"));
  EXPECT_EQ(report_.record.attempts.back().reason, Reason::kPlanFailed);
  EXPECT_FALSE(report_.record.recovered);
  EXPECT_EQ(report_.record.publication.outcome, hwr::PublicationOutcome::kNotAttempted);
}

TEST_F(ModelStartupTest, ACheckpointMayBeMappedWhereNothingWillBePublished) {
  Publish();
  const hwr::Descriptor artifact(
      open((store() / "artifacts" / report_.record.key).c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(flock(artifact.get(), LOCK_EX | LOCK_NB), 0);
  PlainBuilder builder(root());
  ASSERT_EQ(Build(builder, Mode::kPreferred, absl::Milliseconds(100)), absl::OkStatus());
  EXPECT_THAT(builder.did, ElementsAre("load or map"));
  EXPECT_EQ(report_.record.attempts.back().reason, Reason::kLockTimeout);
  PlainBuilder disabled(root());
  ASSERT_EQ(Build(disabled, Mode::kDisabled), absl::OkStatus());
  EXPECT_THAT(disabled.did, ElementsAre("load or map"));
}

// A limit that the store was not made with, and one that it was.
TEST_F(ModelStartupTest, OnlyLimitsThatAreAskedForAreCompared) {
  const hwr::Store::OpenResult made = hwr::Store::Open(
      {.root = store(), .policy = {.max_store_bytes = 1 << 30, .max_artifact_bytes = 1 << 29}});
  ASSERT_TRUE(std::holds_alternative<std::unique_ptr<hwr::Store>>(made));
  for (const int64_t limit : {int64_t{0}, int64_t{1} << 30, int64_t{1} << 20}) {
    PlainBuilder builder(root());
    const absl::Status status =
        BuildModel({.root = root(),
                    .store = {.mode = Mode::kPreferred, .root = store(), .max_store_bytes = limit}},
                   builder, &report_);
    EXPECT_EQ(status.ok(), limit != 1 << 20) << status;
  }
}

}  // namespace
}  // namespace dlo
