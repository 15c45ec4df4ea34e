#include "models/model_startup.h"

#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "loader/hwr/startup.h"
#include "models/host_weight_identity.h"

namespace dlo {
namespace {

using hwr::Decision;
using hwr::Phase;
using hwr::PhaseTimer;
using hwr::Reason;

// Gives the parts of a model that was loaded from the checkpoint.
class ModelProducer : public hwr::PartProducer {
 public:
  ModelProducer(ModelBuilder& builder, const HostWeightArtifact& artifact)
      : builder_(builder), artifact_(artifact) {}

  absl::Status Produce(int component, int part, absl::Span<std::byte> to) override {
    return builder_.CopyPart(artifact_.layout[component].name, part, to);
  }
  absl::Status CheckSources() override { return artifact_.sources.CheckUnchanged(); }

 private:
  ModelBuilder& builder_;
  const HostWeightArtifact& artifact_;
};

class ModelStartup {
 public:
  ModelStartup(const ModelStartupOptions& options, ModelBuilder& builder)
      : options_(options), builder_(builder), startup_(Settings(options)) {}

  absl::Status Run() {
    Decision decision = Decide();
    if (decision == Decision::kRestore) decision = Restore();
    if (decision == Decision::kLoad || decision == Decision::kFreshLoad) {
      decision = Load(/*fresh=*/decision == Decision::kFreshLoad);
    }
    Count();
    if (decision == Decision::kFail) return error_.ok() ? startup_.status() : error_;
    return absl::OkStatus();
  }

  const hwr::StartupRecord& record() const { return startup_.record(); }

 private:
  static hwr::StartupSettings Settings(const ModelStartupOptions& options) {
    return {.mode = options.store.mode,
            .validation = options.store.validation,
            .store = StoreOptionsOf(options.store),
            .wait = options.store.wait,
            .threads = options.threads};
  }

  void Tell() {
    if (options_.on_state) options_.on_state(hwr::StartupStateName(startup_.state()));
  }

  Decision Decide() {
    if (options_.store.mode == hwr::Mode::kDisabled || !options_.direct.empty()) {
      return startup_.SkipDirect(options_.direct);
    }
    const Decision decision = startup_.Resolve(
        [this](const hwr::DigestCache& digests) -> absl::StatusOr<hwr::Startup::Identified> {
          ASSIGN_OR_RETURN(
              artifact_, DescribeHostWeights(options_.root, {.dtype = options_.dtype,
                                                             .quantization = options_.quantization,
                                                             .from_hub = options_.store.from_hub,
                                                             .cache = &digests,
                                                             .threads = options_.threads}));
          return hwr::Startup::Identified{artifact_->identity, artifact_->sources.bytes_hashed()};
        });
    Tell();
    return decision;
  }

  // Nothing is touched that a load from the checkpoint could find changed.
  absl::Status Plan() {
    const hwr::Lease& lease = startup_.lease();
    if (lease.identity().document != artifact_->identity.document) {
      return absl::InternalError("the store gave an artifact of another identity");
    }
    if (lease.layout() != artifact_->layout || lease.layout() != builder_.layout()) {
      return absl::FailedPreconditionError(
          absl::StrCat("artifact ", lease.identity().key, " has another layout than the model"));
    }
    return absl::OkStatus();
  }

  // Every part is still what the artifact has mapped.
  absl::Status CheckPointers(const hwr::Lease& lease) {
    const hwr::ArtifactLayout& layout = lease.layout();
    for (int c = 0; c < static_cast<int>(layout.size()); ++c) {
      for (int p = 0; p < static_cast<int>(layout[c].parts.size()); ++p) {
        if (layout[c].parts[p].bytes == 0) continue;
        if (builder_.part_data(layout[c].name, p) == lease.part(c, p).data()) continue;
        return absl::InternalError(absl::StrCat("part ", p, " of ", layout[c].name,
                                                " is no longer in the artifact's pages"));
      }
    }
    return absl::OkStatus();
  }

  Decision Restore() {
    absl::Status status;
    {
      const PhaseTimer timer(startup_.record(), Phase::kPlan);
      status = Plan();
    }
    if (!status.ok()) return startup_.Fail(Reason::kPlanFailed, status);
    startup_.Planned();
    Tell();
    status = artifact_->sources.CheckUnchanged();
    if (!status.ok()) return startup_.Fail(Reason::kSourceChanged, status);

    startup_.BeginCommit();
    Tell();
    {
      const PhaseTimer timer(startup_.record(), Phase::kCommit);
      status = builder_.Restore(startup_.lease());
    }
    if (!status.ok()) return Discard(Reason::kCommitFailed, status);
    {
      const PhaseTimer timer(startup_.record(), Phase::kFinalize);
      status = CheckPointers(startup_.lease());
    }
    if (!status.ok()) return Discard(Reason::kFinalizationFailed, status);

    hwr::LeaseCarrier carrier = startup_.Committed();
    Tell();
    return Enable(carrier);
  }

  Decision Enable(hwr::LeaseCarrier& carrier) {
    absl::StatusOr<hwr::Lease> taken = carrier.Take();
    if (!taken.ok()) return Discard(Reason::kBackendFailed, taken.status());
    auto lease = std::make_shared<const hwr::Lease>(*std::move(taken));
    startup_.BackendOwns();
    Tell();
    absl::Status status;
    {
      const PhaseTimer timer(startup_.record(), Phase::kEnable);
      status = builder_.Enable(lease);
      if (status.ok()) status = CheckPointers(*lease);
    }
    if (!status.ok()) {
      // What the builder has goes first.
      builder_.Discard();
      lease.reset();
      return startup_.Fail(Reason::kBackendFailed, status);
    }
    startup_.BackendReady();
    Tell();
    startup_.InService();
    return Decision::kRestore;
  }

  Decision Discard(Reason reason, const absl::Status& status) {
    builder_.Discard();
    return startup_.Fail(reason, status);
  }

  Decision Load(bool fresh) {
    // What will be published is finished in private memory. Where nothing will be, that would only
    // cost memory.
    const bool may_map = !fresh && !startup_.may_publish();
    {
      const PhaseTimer timer(startup_.record(), Phase::kLoad);
      error_ = builder_.Load(may_map);
    }
    if (error_.ok()) {
      const PhaseTimer timer(startup_.record(), Phase::kEnable);
      error_ = builder_.Enable(nullptr);
    }
    if (!error_.ok()) return Discard(Reason::kCanonicalLoadFailed, error_);
    if (!fresh && startup_.may_publish()) {
      ModelProducer producer(builder_, *artifact_);
      startup_.Publish(artifact_->layout, producer);
    }
    startup_.InService();
    return Decision::kLoad;
  }

  void Count() {
    startup_.record().bytes_read = builder_.read_bytes();
    startup_.record().bytes_mapped = builder_.mapped_bytes();
    startup_.record().bytes_pinned = builder_.pinned_bytes();
  }

  const ModelStartupOptions& options_;
  ModelBuilder& builder_;
  hwr::Startup startup_;
  std::optional<HostWeightArtifact> artifact_;
  absl::Status error_;  // of a load from the checkpoint
};

}  // namespace

hwr::StoreOptions StoreOptionsOf(const HostWeightStoreOptions& options, bool read_only) {
  return {.root = options.root,
          .policy = {.max_store_bytes = options.max_store_bytes,
                     .min_free_bytes = options.min_free_bytes},
          .read_only = read_only,
          .wait = options.wait};
}

absl::Status BuildModel(const ModelStartupOptions& options, ModelBuilder& builder,
                        StartupReport* report) {
  const absl::Time start = absl::Now();
  ModelStartup startup(options, builder);
  absl::Status status = startup.Run();
  report->record = startup.record();
  report->components = builder.backings();
  report->time = absl::Now() - start;
  return status;
}

}  // namespace dlo
