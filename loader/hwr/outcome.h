// The words of the Host Weight Runtime: modes, outcomes, reasons, and the records that tell what
// happened. Plain values.
//
// Each word has one short name, which is fit for a label of a metric: the names are bounded, and
// hold no path, model or identity.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace dlo::hwr {

enum class Mode : uint8_t {
  kDisabled,   // the store is never touched, nothing is hashed
  kPreferred,  // a hit if there is one; else load from the checkpoint, and publish
  kRequired    // a hit, or the start fails; never loads otherwise, never publishes
};

// INVALID_ARGUMENT unless `name` is "disabled", "preferred" or "required".
absl::StatusOr<Mode> ParseMode(absl::string_view name);
absl::string_view ModeName(Mode mode);

enum class Outcome : uint8_t {
  kUndecided,          // the start is not that far, or ended before
  kDisabled,           // "canonical-direct": loaded as usual, without having asked
  kLocalHit,           // weights come from the store
  kCanonicalFallback,  // loaded as usual after having asked
  kFailed
};
absl::string_view OutcomeName(Outcome outcome);

// How much of an artifact is looked at before it is used.
enum class Validation : uint8_t {
  kMetadata,  // owner, modes, links, sizes, manifest against marker, identity byte for byte
  kFull       // and the SHA-256 of every part; paid once a boot for the same files
};

// INVALID_ARGUMENT unless `name` is "metadata" or "full".
absl::StatusOr<Validation> ParseValidation(absl::string_view name);
absl::string_view ValidationName(Validation validation);

enum class Stage : uint8_t {
  kConfiguration,
  kIdentity,
  kDomain,
  kLookup,
  kValidation,
  kCapacity,
  kProduction,
  kRestoration,
  kLifecycle,
  kCanonicalLoad
};
absl::string_view StageName(Stage stage);

enum class Reason : uint8_t {
  kNone,
  // configuration
  kInvalidConfig,
  kIneligible,
  // identity
  kSourceMissing,
  kSourceChanged,
  kIdentityFailed,
  // domain
  kPolicyMismatch,
  kDomainUnavailable,
  kFilesystemRefused,
  kStorageClassMismatch,
  kNotPrivate,
  // lookup and validation
  kMiss,
  kDenied,
  kLockTimeout,
  kManifestCorrupt,
  kManifestIncompatible,
  kChecksumMismatch,
  kIdentityCollision,
  kIoError,
  // capacity
  kArtifactTooLarge,
  kStoreLimit,
  kFreeSpace,
  kNoSpace,
  // production
  kProducerFailed,
  // restoration
  kPlanFailed,
  kCommitFailed,
  kFinalizationFailed,
  kBackendFailed,
  kCanonicalLoadFailed,
  // lifecycle
  kActiveBuild,
  kNotFound,
  kUncertain
};
absl::string_view ReasonName(Reason reason);

// Whether a start in preferred mode survives it: the same attempt may well succeed later, or
// nothing is wrong but that there is no artifact. Not so: configuration, policy, filesystem,
// ownership, and an identity collision, which somebody has to look at.
bool Retryable(Reason reason);

struct Failure {
  Stage stage = Stage::kLookup;
  Reason reason = Reason::kNone;
  std::string message;

  bool retryable() const { return Retryable(reason); }
  // "lookup/lock-timeout: ...".
  std::string Text() const;
  // UNAVAILABLE if retryable, RESOURCE_EXHAUSTED for capacity, else FAILED_PRECONDITION.
  absl::Status ToStatus() const;
};

enum class AttemptResult : uint8_t { kHit, kMiss, kSuccess, kTimeout, kError, kSkipped };
absl::string_view AttemptResultName(AttemptResult result);

enum class NextAction : uint8_t {
  kReturnLease,
  kContinue,
  kCanonicalFallback,
  kFreshCanonicalLoad,
  kFailStartup
};
absl::string_view NextActionName(NextAction action);

struct Attempt {
  Stage stage = Stage::kLookup;
  AttemptResult result = AttemptResult::kSuccess;
  Reason reason = Reason::kNone;
  bool retryable = false;
  NextAction next = NextAction::kContinue;
  std::string message;  // for the log; may hold paths
};

enum class PublicationOutcome : uint8_t {
  kNotAttempted,
  kAlreadyPresent,
  kPublished,
  kJoined,  // another process built it meanwhile
  kBusy,    // another process builds, and was not waited for any longer
  kFailed
};
absl::string_view PublicationOutcomeName(PublicationOutcome outcome);

// Apart from the start's own outcome, which it never revises.
struct PublicationRecord {
  PublicationOutcome outcome = PublicationOutcome::kNotAttempted;
  Failure failure;  // kBusy, kFailed
  std::string key;
  absl::Duration waited;  // for another builder
  absl::Duration time;    // in all
  int64_t bytes = 0;      // written
  int evicted = 0;        // artifacts that had to make room
};

// Where the time of a start goes.
enum class Phase : uint8_t {
  kIdentity,
  kLookup,
  kMap,
  kPlan,
  kCommit,
  kFinalize,
  kEnable,
  kLoad,
  kPublish
};
inline constexpr int kNumPhases = 9;
absl::string_view PhaseName(Phase phase);

// What one start of a worker did about its host weights.
struct StartupRecord {
  std::string resolution_id;  // random; in every log line of this start
  Mode mode = Mode::kDisabled;
  Outcome outcome = Outcome::kUndecided;
  bool recovered = false;  // discarded a restored model and loaded a fresh one
  std::string key;         // of the artifact; empty: not computed
  std::vector<Attempt> attempts;
  absl::Duration phases[kNumPhases];
  int64_t bytes_hashed = 0;  // of sources, for the identity
  int64_t bytes_read = 0;    // by the ordinary loader
  int64_t bytes_mapped = 0;  // of the artifact
  int64_t bytes_pinned = 0;
  PublicationRecord publication;

  absl::Duration& phase(Phase p) { return phases[static_cast<int>(p)]; }
  absl::Duration phase(Phase p) const { return phases[static_cast<int>(p)]; }
};

}  // namespace dlo::hwr
