// The start of a worker's weights as a transaction with one owner of the lease at a time:
//
//   UNRESOLVED                resolve: identity, store, lookup
//     -> LEASE_OWNED_BY_LOADER   plan: checks, nothing is touched
//     -> RESTORE_PLANNED         commit begins, before the first change
//     -> COMMIT_STARTED          tensors are bound to the mapping
//     -> CARRIER_OWNED           the backend takes the lease, before asynchronous work
//     -> BACKEND_OWNED           slots, first fetch
//     -> BACKEND_READY
//     -> IN_SERVICE              from here on failures are ordinary ones
//
//   Startup startup({.mode = Mode::kPreferred});
//   switch (startup.Resolve(identify)) {
//     case Decision::kRestore: plan with startup.lease(); startup.Planned(); ...
//     case Decision::kLoad: load; if (startup.may_publish()) startup.Publish(layout, producer);
//     case Decision::kFreshLoad: (only from Fail) discard the model; load, no store, no mapping
//     case Decision::kFail: return startup.status();
//   }
//
// Any other order is a programmer's error and ends the process. Each transition is logged with the
// resolution id. A failure goes to Fail, which frees a lease that is still here, and says what
// comes next:
//
//   before COMMIT_STARTED   preferred: kLoad into the untouched model; required: kFail
//   from COMMIT_STARTED on  preferred: kFreshLoad, once; required: kFail
//
// Belongs to one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "loader/hwr/identity.h"
#include "loader/hwr/lease.h"
#include "loader/hwr/outcome.h"
#include "loader/hwr/store.h"

namespace dlo::hwr {

enum class StartupState : uint8_t {
  kUnresolved,
  kLeaseOwnedByLoader,
  kRestorePlanned,
  kCommitStarted,
  kCarrierOwned,
  kBackendOwned,
  kBackendReady,
  kCanonical,  // no lease: loads from the checkpoint
  kInService,
  kFailed
};
absl::string_view StartupStateName(StartupState state);  // "LEASE_OWNED_BY_LOADER"

enum class Decision : uint8_t {
  kRestore,    // bind the lease's bytes
  kLoad,       // load from the checkpoint, into private memory, so that it can be published
  kFreshLoad,  // the same with a new model; no store, no mapping, no publication
  kFail
};

struct StartupSettings {
  Mode mode = Mode::kDisabled;
  Validation validation = Validation::kMetadata;
  StoreOptions store;                        // root, policy; its wait is this one's
  absl::Duration wait = absl::Seconds(600);  // for locks: of the look-up, and again of publishing
  int threads = 0;
};

class Startup {
 public:
  // Draws the resolution id.
  explicit Startup(const StartupSettings& settings);
  ~Startup();
  Startup(const Startup&) = delete;
  Startup& operator=(const Startup&) = delete;

  // UNRESOLVED: mode disabled, or nothing that the runtime is for (`why`). Touches nothing: kLoad,
  // with Outcome::kDisabled and no attempt.
  Decision SkipDirect(absl::string_view why);

  // UNRESOLVED: the model or its settings cannot have an artifact. preferred: kLoad, required:
  // kFail; the store is not touched.
  Decision Ineligible(absl::string_view why);

  // What `identify` gives; runs with the store's digests of sources.
  struct Identified {
    Identity identity;
    int64_t bytes_hashed = 0;
  };
  using Identify = std::function<absl::StatusOr<Identified>(const DigestCache& digests)>;

  // UNRESOLVED: opens the store, computes the identity, looks it up. A hit: kRestore. With mode
  // disabled as SkipDirect.
  Decision Resolve(const Identify& identify);

  // After kRestore.
  const Lease& lease() const;

  void Planned();            // LEASE_OWNED_BY_LOADER -> RESTORE_PLANNED
  void BeginCommit();        // RESTORE_PLANNED -> COMMIT_STARTED; before the first change
  LeaseCarrier Committed();  // COMMIT_STARTED -> CARRIER_OWNED
  void BackendOwns();        // CARRIER_OWNED -> BACKEND_OWNED; the backend took the lease
  void BackendReady();       // BACKEND_OWNED -> BACKEND_READY
  // BACKEND_READY, or canonical -> IN_SERVICE. Decides the outcome for good.
  void InService();

  // A failure in any state but IN_SERVICE, at `reason` (kPlanFailed, kCommitFailed,
  // kFinalizationFailed, kBackendFailed, kSourceChanged, kCanonicalLoadFailed).
  // From CARRIER_OWNED on, whoever has the lease has freed it before. A failure of a canonical load
  // is kFail.
  Decision Fail(Reason reason, const absl::Status& status);

  // Canonical, preferred, and there was no artifact or a corrupt one. Once.
  bool may_publish() const;
  // Publishes what `producer` holds, and keeps the record. Never fails the start, and does not wait
  // for another process that builds.
  const PublicationRecord& Publish(const ArtifactLayout& layout, PartProducer& producer);

  StartupState state() const { return state_; }
  // Of kFail.
  const absl::Status& status() const { return status_; }
  const StartupRecord& record() const { return record_; }
  StartupRecord& record() { return record_; }  // for bytes and times of phases
  const std::optional<Identity>& identity() const { return identity_; }
  Store* store() { return store_.get(); }

 private:
  void Move(StartupState from, StartupState to);
  void Enter(StartupState to);
  // What comes after a failure; `survives`: a start in preferred mode does.
  Decision Decide(const Failure& failure, AttemptResult result, bool survives);

  const StartupSettings settings_;
  StartupState state_ = StartupState::kUnresolved;
  StartupRecord record_;
  std::unique_ptr<Store> store_;
  std::optional<Identity> identity_;
  std::optional<Lease> lease_;
  absl::Time deadline_;
  bool publishable_ = false;
  absl::Status status_;
};

// Adds the time of a scope to a phase of a record.
class PhaseTimer {
 public:
  PhaseTimer(StartupRecord& record, Phase phase) : record_(record), phase_(phase) {}
  ~PhaseTimer() { record_.phase(phase_) += absl::Now() - start_; }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  StartupRecord& record_;
  const Phase phase_;
  const absl::Time start_ = absl::Now();
};

}  // namespace dlo::hwr
