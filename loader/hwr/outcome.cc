#include "loader/hwr/outcome.h"

#include "absl/strings/str_cat.h"

namespace dlo::hwr {

absl::StatusOr<Mode> ParseMode(absl::string_view name) {
  for (const Mode mode : {Mode::kDisabled, Mode::kPreferred, Mode::kRequired}) {
    if (name == ModeName(mode)) return mode;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the mode of host weights is disabled, preferred or required, not ", name));
}

absl::string_view ModeName(Mode mode) {
  switch (mode) {
    case Mode::kDisabled:
      return "disabled";
    case Mode::kPreferred:
      return "preferred";
    case Mode::kRequired:
      return "required";
  }
  return "";
}

absl::string_view OutcomeName(Outcome outcome) {
  switch (outcome) {
    case Outcome::kUndecided:
      return "undecided";
    case Outcome::kDisabled:
      return "canonical-direct";
    case Outcome::kLocalHit:
      return "local-hit";
    case Outcome::kCanonicalFallback:
      return "canonical-fallback";
    case Outcome::kFailed:
      return "failed";
  }
  return "";
}

absl::StatusOr<Validation> ParseValidation(absl::string_view name) {
  for (const Validation validation : {Validation::kMetadata, Validation::kFull}) {
    if (name == ValidationName(validation)) return validation;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the validation of host weights is metadata or full, not ", name));
}

absl::string_view ValidationName(Validation validation) {
  return validation == Validation::kFull ? "full" : "metadata";
}

absl::string_view StageName(Stage stage) {
  switch (stage) {
    case Stage::kConfiguration:
      return "configuration";
    case Stage::kIdentity:
      return "identity";
    case Stage::kDomain:
      return "domain";
    case Stage::kLookup:
      return "lookup";
    case Stage::kValidation:
      return "validation";
    case Stage::kCapacity:
      return "capacity";
    case Stage::kProduction:
      return "production";
    case Stage::kRestoration:
      return "restoration";
    case Stage::kLifecycle:
      return "lifecycle";
    case Stage::kCanonicalLoad:
      return "canonical-load";
  }
  return "";
}

absl::string_view ReasonName(Reason reason) {
  switch (reason) {
    case Reason::kNone:
      return "none";
    case Reason::kInvalidConfig:
      return "invalid-config";
    case Reason::kIneligible:
      return "ineligible";
    case Reason::kSourceMissing:
      return "source-missing";
    case Reason::kSourceChanged:
      return "source-changed";
    case Reason::kIdentityFailed:
      return "identity-failed";
    case Reason::kPolicyMismatch:
      return "policy-mismatch";
    case Reason::kDomainUnavailable:
      return "domain-unavailable";
    case Reason::kFilesystemRefused:
      return "filesystem-refused";
    case Reason::kStorageClassMismatch:
      return "storage-class-mismatch";
    case Reason::kNotPrivate:
      return "not-private";
    case Reason::kMiss:
      return "miss";
    case Reason::kDenied:
      return "denied";
    case Reason::kLockTimeout:
      return "lock-timeout";
    case Reason::kManifestCorrupt:
      return "manifest-corrupt";
    case Reason::kManifestIncompatible:
      return "manifest-incompatible";
    case Reason::kChecksumMismatch:
      return "checksum-mismatch";
    case Reason::kIdentityCollision:
      return "identity-collision";
    case Reason::kIoError:
      return "io-error";
    case Reason::kArtifactTooLarge:
      return "artifact-too-large";
    case Reason::kStoreLimit:
      return "store-limit";
    case Reason::kFreeSpace:
      return "free-space";
    case Reason::kNoSpace:
      return "no-space";
    case Reason::kProducerFailed:
      return "producer-failed";
    case Reason::kPlanFailed:
      return "plan-failed";
    case Reason::kCommitFailed:
      return "commit-failed";
    case Reason::kFinalizationFailed:
      return "finalization-failed";
    case Reason::kBackendFailed:
      return "backend-failed";
    case Reason::kCanonicalLoadFailed:
      return "canonical-load-failed";
    case Reason::kActiveBuild:
      return "active-build";
    case Reason::kNotFound:
      return "not-found";
    case Reason::kUncertain:
      return "uncertain";
  }
  return "";
}

bool Retryable(Reason reason) {
  switch (reason) {
    case Reason::kInvalidConfig:
    case Reason::kPolicyMismatch:
    case Reason::kFilesystemRefused:
    case Reason::kStorageClassMismatch:
    case Reason::kNotPrivate:
    case Reason::kIdentityCollision:
    case Reason::kProducerFailed:
    case Reason::kCanonicalLoadFailed:
      return false;
    default:
      return true;
  }
}

std::string Failure::Text() const {
  return absl::StrCat(StageName(stage), "/", ReasonName(reason), message.empty() ? "" : ": ",
                      message);
}

absl::Status Failure::ToStatus() const {
  const std::string text = absl::StrCat("host weights: ", Text());
  switch (reason) {
    case Reason::kNotFound:
    case Reason::kMiss:
      return absl::NotFoundError(text);
    case Reason::kArtifactTooLarge:
    case Reason::kStoreLimit:
    case Reason::kFreeSpace:
    case Reason::kNoSpace:
      return absl::ResourceExhaustedError(text);
    case Reason::kLockTimeout:
    case Reason::kActiveBuild:
    case Reason::kDomainUnavailable:
    case Reason::kIoError:
      return absl::UnavailableError(text);
    case Reason::kDenied:
    case Reason::kManifestCorrupt:
    case Reason::kChecksumMismatch:
      return absl::DataLossError(text);
    default:
      return absl::FailedPreconditionError(text);
  }
}

absl::string_view AttemptResultName(AttemptResult result) {
  switch (result) {
    case AttemptResult::kHit:
      return "hit";
    case AttemptResult::kMiss:
      return "miss";
    case AttemptResult::kSuccess:
      return "success";
    case AttemptResult::kTimeout:
      return "timeout";
    case AttemptResult::kError:
      return "error";
    case AttemptResult::kSkipped:
      return "skipped";
  }
  return "";
}

absl::string_view NextActionName(NextAction action) {
  switch (action) {
    case NextAction::kReturnLease:
      return "return-lease";
    case NextAction::kContinue:
      return "continue";
    case NextAction::kCanonicalFallback:
      return "canonical-fallback";
    case NextAction::kFreshCanonicalLoad:
      return "fresh-canonical-load";
    case NextAction::kFailStartup:
      return "fail-startup";
  }
  return "";
}

absl::string_view PublicationOutcomeName(PublicationOutcome outcome) {
  switch (outcome) {
    case PublicationOutcome::kNotAttempted:
      return "not-attempted";
    case PublicationOutcome::kAlreadyPresent:
      return "already-present";
    case PublicationOutcome::kPublished:
      return "published";
    case PublicationOutcome::kJoined:
      return "joined";
    case PublicationOutcome::kBusy:
      return "busy";
    case PublicationOutcome::kFailed:
      return "failed";
  }
  return "";
}

absl::string_view PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kIdentity:
      return "identity";
    case Phase::kLookup:
      return "lookup";
    case Phase::kMap:
      return "map";
    case Phase::kPlan:
      return "plan";
    case Phase::kCommit:
      return "commit";
    case Phase::kFinalize:
      return "finalize";
    case Phase::kEnable:
      return "enable";
    case Phase::kLoad:
      return "load";
    case Phase::kPublish:
      return "publish";
  }
  return "";
}

}  // namespace dlo::hwr
