#include "loader/hwr/startup.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "loader/hwr/folder_io.h"
#include "spdlog/spdlog.h"

namespace dlo::hwr {

absl::string_view StartupStateName(StartupState state) {
  switch (state) {
    case StartupState::kUnresolved:
      return "UNRESOLVED";
    case StartupState::kLeaseOwnedByLoader:
      return "LEASE_OWNED_BY_LOADER";
    case StartupState::kRestorePlanned:
      return "RESTORE_PLANNED";
    case StartupState::kCommitStarted:
      return "COMMIT_STARTED";
    case StartupState::kCarrierOwned:
      return "CARRIER_OWNED";
    case StartupState::kBackendOwned:
      return "BACKEND_OWNED";
    case StartupState::kBackendReady:
      return "BACKEND_READY";
    case StartupState::kCanonical:
      return "CANONICAL";
    case StartupState::kInService:
      return "IN_SERVICE";
    case StartupState::kFailed:
      return "FAILED";
  }
  return "";
}

namespace {

// Any order but the documented one is a mistake in the program, not in its input.
[[noreturn]] void Illegal(const StartupRecord& record, StartupState state, absl::string_view what) {
  spdlog::critical("host weights {}: {}", record.resolution_id,
                   absl::StrCat(what, " in state ", StartupStateName(state)));
  spdlog::default_logger_raw()->flush();
  std::abort();
}

Stage StageOf(Reason reason) {
  switch (reason) {
    case Reason::kSourceChanged:
    case Reason::kSourceMissing:
    case Reason::kIdentityFailed:
      return Stage::kIdentity;
    case Reason::kCanonicalLoadFailed:
      return Stage::kCanonicalLoad;
    default:
      return Stage::kRestoration;
  }
}

}  // namespace

Startup::Startup(const StartupSettings& settings)
    : settings_(settings), deadline_(absl::Now() + settings.wait) {
  record_.resolution_id = RandomHex(8);
  record_.mode = settings.mode;
}

Startup::~Startup() = default;

void Startup::Enter(StartupState to) {
  spdlog::info("host weights {}: {}", record_.resolution_id,
               absl::StrCat(StartupStateName(state_), " -> ", StartupStateName(to)));
  state_ = to;
}

void Startup::Move(StartupState from, StartupState to) {
  if (state_ != from)
    Illegal(record_, state_, absl::StrCat("transition to ", StartupStateName(to)));
  Enter(to);
}

Decision Startup::SkipDirect(absl::string_view why) {
  if (state_ != StartupState::kUnresolved) Illegal(record_, state_, "SkipDirect");
  record_.outcome = Outcome::kDisabled;
  state_ = StartupState::kCanonical;
  spdlog::debug("host weights {}: not asked for: {}", record_.resolution_id, std::string(why));
  return Decision::kLoad;
}

Decision Startup::Decide(const Failure& failure, AttemptResult result, bool survives) {
  Attempt attempt = {.stage = failure.stage,
                     .result = result,
                     .reason = failure.reason,
                     .retryable = failure.retryable(),
                     .message = failure.message};
  const bool committed =
      state_ == StartupState::kCommitStarted || state_ == StartupState::kCarrierOwned ||
      state_ == StartupState::kBackendOwned || state_ == StartupState::kBackendReady;
  lease_.reset();
  if (settings_.mode == Mode::kPreferred && survives) {
    attempt.next = committed ? NextAction::kFreshCanonicalLoad : NextAction::kCanonicalFallback;
    record_.attempts.push_back(attempt);
    record_.outcome = Outcome::kCanonicalFallback;
    record_.recovered = committed;
    spdlog::log(result == AttemptResult::kMiss ? spdlog::level::info : spdlog::level::warn,
                "host weights {}: {}: {}", record_.resolution_id, failure.Text(),
                committed ? "the model is discarded, and a new one loaded from the checkpoint"
                          : "loading from the checkpoint");
    if (committed) publishable_ = false;
    Enter(StartupState::kCanonical);
    return committed ? Decision::kFreshLoad : Decision::kLoad;
  }
  attempt.next = NextAction::kFailStartup;
  record_.attempts.push_back(attempt);
  record_.outcome = Outcome::kFailed;
  publishable_ = false;
  status_ = failure.ToStatus();
  spdlog::error("host weights {}: {}", record_.resolution_id, status_.ToString());
  Enter(StartupState::kFailed);
  return Decision::kFail;
}

Decision Startup::Ineligible(absl::string_view why) {
  if (state_ != StartupState::kUnresolved) Illegal(record_, state_, "Ineligible");
  return Decide({Stage::kConfiguration, Reason::kIneligible, std::string(why)},
                AttemptResult::kSkipped, /*survives=*/true);
}

Decision Startup::Resolve(const Identify& identify) {
  if (state_ != StartupState::kUnresolved) Illegal(record_, state_, "Resolve");
  if (settings_.mode == Mode::kDisabled) return SkipDirect("the mode is disabled");

  StoreOptions options = settings_.store;
  options.wait = deadline_ - absl::Now();
  Store::OpenResult opened = [&] {
    const PhaseTimer timer(record_, Phase::kLookup);
    return Store::Open(options);
  }();
  if (Failure* failure = std::get_if<Failure>(&opened)) {
    const bool timeout = failure->reason == Reason::kDomainUnavailable;
    return Decide(*failure, timeout ? AttemptResult::kTimeout : AttemptResult::kError,
                  failure->retryable());
  }
  store_ = std::get<std::unique_ptr<Store>>(std::move(opened));

  const absl::StatusOr<Identified> identified = [&] {
    const PhaseTimer timer(record_, Phase::kIdentity);
    return identify(store_->digests(deadline_));
  }();
  if (!identified.ok()) {
    Reason reason = Reason::kIdentityFailed;
    if (absl::IsNotFound(identified.status())) reason = Reason::kSourceMissing;
    if (absl::IsFailedPrecondition(identified.status())) reason = Reason::kSourceChanged;
    // The load itself will tell what is wrong with the files, if it is more than that.
    return Decide({Stage::kIdentity, reason, std::string(identified.status().message())},
                  AttemptResult::kError, /*survives=*/true);
  }
  identity_ = identified->identity;
  record_.key = identity_->key;
  record_.bytes_hashed = identified->bytes_hashed;

  const absl::Time start = absl::Now();
  LookupResult found = store_->Lookup(
      *identity_,
      {.validation = settings_.validation, .deadline = deadline_, .threads = settings_.threads});
  record_.phase(Phase::kMap) += found.map_time;
  record_.phase(Phase::kLookup) += absl::Now() - start - found.map_time;
  switch (found.status) {
    case LookupStatus::kHit:
      record_.attempts.push_back({.stage = Stage::kLookup,
                                  .result = AttemptResult::kHit,
                                  .next = NextAction::kReturnLease});
      lease_ = std::move(found.lease);
      record_.bytes_mapped = lease_->bytes();
      spdlog::info("host weights {}: the artifact {} is there: {} bytes mapped",
                   record_.resolution_id, record_.key, record_.bytes_mapped);
      Move(StartupState::kUnresolved, StartupState::kLeaseOwnedByLoader);
      return Decision::kRestore;
    case LookupStatus::kMiss:
      publishable_ = true;
      return Decide(found.failure, AttemptResult::kMiss, /*survives=*/true);
    case LookupStatus::kInvalid:
      publishable_ = true;
      return Decide(found.failure, AttemptResult::kError, /*survives=*/true);
    case LookupStatus::kTimeout:
      return Decide(found.failure, AttemptResult::kTimeout, found.failure.retryable());
    case LookupStatus::kFailed:
      break;
  }
  return Decide(found.failure, AttemptResult::kError, found.failure.retryable());
}

const Lease& Startup::lease() const {
  if (!lease_) Illegal(record_, state_, "lease()");
  return *lease_;
}

void Startup::Planned() { Move(StartupState::kLeaseOwnedByLoader, StartupState::kRestorePlanned); }

void Startup::BeginCommit() { Move(StartupState::kRestorePlanned, StartupState::kCommitStarted); }

LeaseCarrier Startup::Committed() {
  Move(StartupState::kCommitStarted, StartupState::kCarrierOwned);
  LeaseCarrier carrier(*std::move(lease_));
  lease_.reset();
  return carrier;
}

void Startup::BackendOwns() { Move(StartupState::kCarrierOwned, StartupState::kBackendOwned); }

void Startup::BackendReady() { Move(StartupState::kBackendOwned, StartupState::kBackendReady); }

void Startup::InService() {
  const bool restored = state_ == StartupState::kBackendReady;
  if (!restored && state_ != StartupState::kCanonical) Illegal(record_, state_, "InService");
  if (restored) record_.outcome = Outcome::kLocalHit;
  Enter(StartupState::kInService);
}

Decision Startup::Fail(Reason reason, const absl::Status& status) {
  if (state_ == StartupState::kInService || state_ == StartupState::kFailed ||
      state_ == StartupState::kUnresolved) {
    Illegal(record_, state_, "Fail");
  }
  const Failure failure = {StageOf(reason), reason, std::string(status.message())};
  if (state_ == StartupState::kCanonical) {
    const Decision decision = Decide(failure, AttemptResult::kError, /*survives=*/false);
    status_ = status;  // an ordinary error of loading
    return decision;
  }
  // The artifact may be as good as it was: what failed before the commit is no reason to publish
  // another.
  publishable_ = false;
  return Decide(failure, AttemptResult::kError, /*survives=*/true);
}

bool Startup::may_publish() const {
  return state_ == StartupState::kCanonical && publishable_ && settings_.mode == Mode::kPreferred &&
         store_ != nullptr;
}

const PublicationRecord& Startup::Publish(const ArtifactLayout& layout, PartProducer& producer) {
  if (!may_publish()) Illegal(record_, state_, "Publish");
  publishable_ = false;  // once
  const PhaseTimer timer(record_, Phase::kPublish);
  record_.publication = store_->Publish(*identity_, layout, producer,
                                        {.deadline = absl::Now() + settings_.wait,
                                         .builder_deadline = absl::InfinitePast(),
                                         .threads = settings_.threads});
  return record_.publication;
}

}  // namespace dlo::hwr
