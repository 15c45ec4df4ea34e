#include "server/supervisor.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <tuple>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace dlo {
namespace {

// From the end of a worker's link to its kill.
constexpr absl::Duration kExitGrace = absl::Seconds(5);
// From the exit of a rank whose collective failed to blaming the peer it names.
constexpr absl::Duration kBlameGrace = absl::Milliseconds(500);

// A TCP socket that listens on some port of the loopback interface.
absl::StatusOr<std::pair<int, int>> ListenOnLoopback() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return absl::ErrnoToStatus(errno, "has no rendezvous: socket");
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(fd, SOMAXCONN) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    const int error = errno;
    close(fd);
    return absl::ErrnoToStatus(error, "has no rendezvous on 127.0.0.1");
  }
  return std::make_pair(fd, int{ntohs(address.sin_port)});
}

// A value of dlo_worker_restarts_total's label (metrics.cc lists them).
std::string RestartReason(const RankLoss& loss) {
  if (!loss.kind.empty()) return loss.kind;
  if (loss.reason != kRankLost) return absl::AsciiStrToLower(loss.reason);
  if (loss.signal) return "killed";
  return loss.exit_code ? "exited" : "";
}

}  // namespace

Supervisor::Supervisor(SupervisorOptions options, WorkerLinkService* links,
                       std::function<void(int fd)> connect, SupervisorEvents events)
    : options_(std::move(options)),
      reports_(options_.report_folder, options_.reports_max),
      links_(links),
      connect_(std::move(connect)),
      events_(std::move(events)),
      wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      ranks_(CountRanks(options_.domains)) {
  for (size_t d = 0; d < options_.domains.size(); ++d) {
    domains_.emplace_back(options_.domains[d].ranks(), options_.visits).start_at = absl::Now();
    for (int rank : domains_[d].ranks) ranks_[rank].domain = static_cast<int>(d);
  }
  for (int rank : options_.remote_ranks) ranks_[rank].remote = true;
}

void Supervisor::Start() {
  absl::MutexLock lock(&stop_mutex_);
  thread_ = std::thread([this] { Loop(); });
}

Supervisor::~Supervisor() {
  Stop(absl::ZeroDuration());
  close(wake_fd_);
}

void Supervisor::OnAttached(int rank, uint64_t incarnation) {
  Post([this, rank, incarnation] {
    Rank& r = ranks_[rank];
    if (r.remote) {
      r.incarnation = incarnation;
      r.phase = RankPhase::kAttached;
      r.since = absl::Now();
      r.start_failure = absl::OkStatus();
      r.broken_group.reset();
      return BeginIfAttached(r.domain);
    }
    if (r.phase != RankPhase::kStarting) return;
    r.phase = RankPhase::kLoading;
    r.since = absl::Now();
  });
}

void Supervisor::OnReady(int rank) {
  Post([this, rank] {
    Rank& r = ranks_[rank];
    Domain& domain = domains_[r.domain];
    if (r.phase != RankPhase::kLoading || domain.phase != DomainPhase::kUp) return;
    r.phase = RankPhase::kReady;
    r.since = absl::Now();
    if (!std::all_of(domain.ranks.begin(), domain.ranks.end(),
                     [this](int other) { return ranks_[other].phase == RankPhase::kReady; })) {
      return;
    }
    domain.ready_since = absl::Now();
    domain.ever_ready = true;
    domain.failed_starts = 0;
    if (!kill_at_) events_.on_ready(r.domain);
  });
}

void Supervisor::Condemn(int domain, RankLoss loss) {
  Post([this, domain, loss = std::move(loss)] {
    if (domains_[domain].ready_since && !kill_at_) HandleLoss(loss.rank, loss);
  });
}

void Supervisor::OnStartFailed(int rank, absl::Status why) {
  Post([this, rank, why = std::move(why)] { ranks_[rank].start_failure = why; });
}

void Supervisor::OnDetached(int rank, uint64_t incarnation) {
  Post([this, rank, incarnation] {
    Rank& r = ranks_[rank];
    if (r.incarnation != incarnation) return;
    if (!r.remote) {
      r.detached_at = absl::Now();
      return;
    }
    // Nothing of a remote worker will be known that is not known now.
    const bool in_domain = std::exchange(r.phase, RankPhase::kStarting) > RankPhase::kAttached;
    if (!in_domain) spdlog::warn("rank {}: the worker left before its domain began", rank);
    if (!in_domain || kill_at_) return;
    if (r.broken_group) {
      Domain& domain = domains_[r.domain];
      domain.blame_at = std::min(domain.blame_at, absl::Now() + kBlameGrace);
      return;
    }
    HandleLoss(rank,
               {.rank = rank, .cause = "lost its link, from another host", .kind = "link_broken"});
  });
}

void Supervisor::OnHeartbeat(int rank, v1::Heartbeat heartbeat) {
  if (options_.visits.factor <= 0) return;
  Post([this, rank, heartbeat = std::move(heartbeat)] {
    domains_[ranks_[rank].domain].visits.Note(rank,
                                              {.wave = heartbeat.wave_id(),
                                               .stage = heartbeat.stage(),
                                               .step = heartbeat.step(),
                                               .visit = static_cast<int64_t>(heartbeat.visit())},
                                              absl::Now());
  });
}

void Supervisor::OnGroupBroken(int rank, std::vector<int> blamed, std::string message) {
  Post([this, rank, blamed = std::move(blamed), message = std::move(message)] {
    const int culprit = blamed.empty() ? rank : blamed.front();
    if (culprit < 0 || culprit >= static_cast<int>(ranks_.size()) ||
        ranks_[culprit].domain != ranks_[rank].domain) {
      return;
    }
    ranks_[rank].broken_group =
        RankLoss{.rank = culprit,
                 .cause = blamed.empty() ? absl::StrCat("lost its weight group: ", message)
                                         : absl::StrCat("failed its weight group: ", message),
                 .reason = kCollectiveFailed};
  });
}

void Supervisor::Stop(absl::Duration grace) {
  absl::MutexLock lock(&stop_mutex_);
  if (!thread_.joinable()) return;
  Post([this, grace] {
    kill_at_ = absl::Now() + grace;
    v1::ToWorker drain;
    drain.mutable_drain();
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      links_->Send(static_cast<int>(rank), drain);
      // One that is still loading has nothing to finish, and would not hear of it.
      Rank& r = ranks_[rank];
      if (r.process && r.phase != RankPhase::kReady) r.process->Signal(SIGKILL);
      if (r.remote && r.phase == RankPhase::kLoading) {
        links_->EndRemote(static_cast<int>(rank), r.incarnation);
        r.phase = RankPhase::kStarting;
      }
    }
    for (Domain& domain : domains_) domain.kill_at = std::min(domain.kill_at, *kill_at_);
  });
  thread_.join();
}

void Supervisor::Post(std::function<void()> task) {
  {
    absl::MutexLock lock(&mutex_);
    inbox_.push_back(std::move(task));
  }
  const uint64_t one = 1;
  // A full counter also wakes the thread.
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
}

void Supervisor::Loop() {
  while (true) {
    std::vector<pollfd> fds = {{wake_fd_, POLLIN, 0}};
    for (const Rank& rank : ranks_) {
      if (rank.process) fds.push_back({rank.process->pidfd(), POLLIN, 0});
    }
    poll(fds.data(), fds.size(), PollTimeoutMs());
    uint64_t wakes;
    [[maybe_unused]] const ssize_t bytes = read(wake_fd_, &wakes, sizeof(wakes));
    std::vector<std::function<void()>> tasks;
    {
      absl::MutexLock lock(&mutex_);
      tasks.swap(inbox_);
    }
    for (const std::function<void()>& task : tasks) task();

    for (size_t d = 0; d < domains_.size(); ++d) Step(static_cast<int>(d));
    PublishStates();
    if (kill_at_ && !AnyProcess() && (!AnyAttachedRemote() || absl::Now() >= *kill_at_)) return;
  }
}

void Supervisor::Step(int d) {
  Domain& domain = domains_[d];
  Reap(d);
  const absl::Time now = absl::Now();
  if ((kill_at_ && now >= *kill_at_) ||
      (domain.phase == DomainPhase::kEnding && now >= domain.kill_at)) {
    for (int rank : domain.ranks) {
      if (ranks_[rank].process) ranks_[rank].process->Signal(SIGKILL);
    }
  } else if (domain.phase == DomainPhase::kUp && domain.begun && !kill_at_) {
    CheckDomain(d);
  }
  if (AnyProcess(domain)) return;
  if (domain.phase == DomainPhase::kEnding) domain.phase = DomainPhase::kWaiting;
  if (domain.phase == DomainPhase::kWaiting && !kill_at_ && !domain.gave_up &&
      now >= domain.start_at) {
    StartDomain(d);
  }
}

void Supervisor::CheckDomain(int d) {
  Domain& domain = domains_[d];
  for (int rank : domain.ranks) {
    const bool there = ranks_[rank].remote || ranks_[rank].process;
    if (domain.phase == DomainPhase::kUp && there) CheckHealth(rank);
  }
  if (domain.phase != DomainPhase::kUp || !domain.ready_since) return;
  const std::optional<StuckVisit> stuck = domain.visits.Find(absl::Now());
  if (!stuck) return;
  HandleLoss(stuck->rank, {.rank = stuck->rank, .cause = stuck->cause, .reason = kStuckVisit});
}

void Supervisor::Reap(int d) {
  Domain& domain = domains_[d];
  std::optional<RankLoss> loss;
  for (int rank : domain.ranks) {
    if (!ranks_[rank].process) continue;
    const std::optional<ExitStatus> exit = ranks_[rank].process->TryWait();
    if (!exit) continue;
    ranks_[rank].process.reset();
    if (ranks_[rank].broken_group) {
      domain.blame_at = std::min(domain.blame_at, absl::Now() + kBlameGrace);
      continue;
    }
    // One that was killed is the reason that others, which talked to it, exit.
    if (loss && (loss->signal || !exit->signal)) continue;
    loss = RankLoss{.rank = rank,
                    .cause = exit->ToString(),
                    .signal = exit->signal,
                    .exit_code = exit->exit_code,
                    .certain = exit->signal.has_value()};
  }
  if (domain.phase != DomainPhase::kUp || kill_at_) return;
  if (loss) {
    HandleLoss(loss->rank, *loss);
  } else if (absl::Now() >= domain.blame_at) {
    BlameForBrokenGroup(d);
  }
}

void Supervisor::BlameForBrokenGroup(int d) {
  for (int rank : domains_[d].ranks) {
    if (ranks_[rank].process || !ranks_[rank].broken_group) continue;
    const RankLoss loss = *ranks_[rank].broken_group;
    // It answers nobody, so it would not hear of SIGTERM either.
    if (ranks_[loss.rank].process) ranks_[loss.rank].process->Signal(SIGKILL);
    return HandleLoss(loss.rank, loss);
  }
}

bool Supervisor::AnyProcess(const Domain& domain) const {
  return std::any_of(domain.ranks.begin(), domain.ranks.end(),
                     [this](int rank) { return ranks_[rank].process.has_value(); });
}

bool Supervisor::AnyProcess() const {
  return std::any_of(domains_.begin(), domains_.end(),
                     [this](const Domain& domain) { return AnyProcess(domain); });
}

RankState Supervisor::StateOf(const Rank& rank) const {
  const Domain& domain = domains_[rank.domain];
  switch (domain.phase) {
    case DomainPhase::kWaiting:
      return domain.gave_up ? RankState::kGivenUp : RankState::kDown;
    case DomainPhase::kEnding:
      return rank.process ? RankState::kEnding : RankState::kDown;
    case DomainPhase::kUp:
      break;
  }
  switch (rank.phase) {
    case RankPhase::kStarting:
    case RankPhase::kAttached:  // and waits for the others of its domain
      return RankState::kStarting;
    case RankPhase::kLoading:
      return RankState::kLoading;
    case RankPhase::kReady:
      return RankState::kReady;
  }
  return RankState::kDown;
}

void Supervisor::PublishStates() {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    options_.metrics->rank(static_cast<int>(rank)).SetState(StateOf(ranks_[rank]));
  }
}

bool Supervisor::AnyAttachedRemote() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
    return rank.remote && rank.phase != RankPhase::kStarting;
  });
}

int Supervisor::PollTimeoutMs() const {
  absl::Time next = absl::InfiniteFuture();
  const absl::Time now = absl::Now();
  for (const Domain& domain : domains_) {
    // After a kill the pidfd wakes us.
    const auto at = [&](absl::Time kill_at) {
      if (now < kill_at) next = std::min(next, kill_at);
    };
    if (kill_at_) at(*kill_at_);
    switch (domain.phase) {
      case DomainPhase::kWaiting:
        if (!domain.gave_up && !kill_at_) next = std::min(next, domain.start_at);
        break;
      case DomainPhase::kEnding:
        at(domain.kill_at);
        break;
      case DomainPhase::kUp:
        if (kill_at_) break;
        next = std::min({next, domain.blame_at,
                         now + std::min(options_.heartbeat_timeout / 4, absl::Milliseconds(250))});
        break;
    }
  }
  if (next == absl::InfiniteFuture()) return -1;
  return static_cast<int>(std::max<int64_t>(0, absl::ToInt64Milliseconds(next - now) + 1));
}

std::string Supervisor::Rendezvous::flag() const {
  return absl::StrCat("--rendezvous=127.0.0.1:", port);
}

void Supervisor::StartDomain(int d) {
  Domain& domain = domains_[d];
  domain.phase = DomainPhase::kUp;
  domain.begun = false;
  domain.ready_since.reset();
  domain.blame_at = absl::InfiniteFuture();
  domain.visits = VisitWatch(options_.visits, domain.ranks);
  // A report of this start has nothing of an earlier one.
  for (int rank : domain.ranks) ranks_[rank].recorder.reset();
  BeginIfAttached(d);
  if (domain.begun || domain.phase != DomainPhase::kUp) return;
  for (int rank : domain.ranks) {
    if (ranks_[rank].remote && ranks_[rank].phase == RankPhase::kStarting) {
      spdlog::info("rank {}: waiting for its worker to attach from another host", rank);
    }
  }
}

void Supervisor::BeginIfAttached(int d) {
  Domain& domain = domains_[d];
  if (domain.phase != DomainPhase::kUp || domain.begun || kill_at_) return;
  for (int rank : domain.ranks) {
    if (ranks_[rank].remote && ranks_[rank].phase == RankPhase::kStarting) return;
  }
  domain.begun = true;
  Rendezvous rendezvous = {.server_rank = domain.ranks.front()};
  if (options_.domains[d].collective()) {
    const absl::StatusOr<std::pair<int, int>> listening = ListenOnLoopback();
    if (!listening.ok()) {
      ranks_[rendezvous.server_rank].start_failure = listening.status();
      return HandleLoss(rendezvous.server_rank, {.rank = rendezvous.server_rank});
    }
    std::tie(rendezvous.fd, rendezvous.port) = *listening;
  }
  absl::Cleanup close_rendezvous = [&] {
    if (rendezvous.fd >= 0) close(rendezvous.fd);
  };
  for (int rank : domain.ranks) {
    Rank& r = ranks_[rank];
    if (!r.remote) continue;
    r.phase = RankPhase::kLoading;
    r.since = absl::Now();
    std::vector<std::string> arguments = options_.worker_arguments;
    if (rendezvous.fd >= 0) arguments.push_back(rendezvous.flag());
    links_->Welcome(rank, arguments);
  }
  for (int rank : domain.ranks) {
    if (ranks_[rank].remote) continue;
    const absl::Status status = StartWorker(rank, rendezvous);
    if (status.ok()) continue;
    ranks_[rank].start_failure = status;
    return HandleLoss(rank, {.rank = rank});
  }
}

absl::Status Supervisor::StartWorker(int rank, const Rendezvous& rendezvous) {
  Rank& r = ranks_[rank];
  ++r.incarnation;
  r.phase = RankPhase::kStarting;
  r.detached_at.reset();
  r.start_failure = absl::OkStatus();
  r.broken_group.reset();
  r.since = absl::Now();
  links_->Expect(rank, r.incarnation);

  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    return absl::ErrnoToStatus(errno, "has no link: socketpair");
  }
  WorkerCommand command{
      .binary = options_.worker_binary, .arguments = options_.worker_arguments, .link_fd = ends[1]};
  for (std::string argument :
       {absl::StrCat("--link-fd=", kWorkerLinkFd), absl::StrCat("--rank=", rank),
        absl::StrCat("--incarnation=", r.incarnation)}) {
    command.arguments.push_back(std::move(argument));
  }
  if (rendezvous.fd >= 0 && rank == rendezvous.server_rank) {
    command.rendezvous_fd = rendezvous.fd;
    command.arguments.push_back(absl::StrCat("--rendezvous-fd=", kWorkerRendezvousFd));
  } else if (rendezvous.fd >= 0) {
    command.arguments.push_back(rendezvous.flag());
  }
  if (absl::StatusOr<FlightMemory> memory = FlightMemory::Create(); memory.ok()) {
    r.recorder.emplace(*std::move(memory));
    command.recorder_fd = r.recorder->fd();
    command.arguments.push_back(absl::StrCat("--recorder-fd=", kWorkerRecorderFd));
  } else {
    spdlog::warn("rank {}: no flight recorder: {}", rank, std::string(memory.status().message()));
  }
  if (!options_.placement.empty()) {
    const RankPlacement& place = options_.placement[rank];
    command.arguments.push_back(absl::StrCat("--threads=", place.threads));
    command.environment = place.environment;
    command.cores = place.cores;
  }
  absl::StatusOr<WorkerProcess> process = WorkerProcess::Spawn(command);
  close(ends[1]);
  if (!process.ok()) {
    close(ends[0]);
    return process.status();
  }
  r.process.emplace(*std::move(process));
  options_.metrics->rank(rank).CountStart();
  connect_(ends[0]);
  spdlog::info("rank {}: started worker {} (start {})", rank, r.process->pid(), r.incarnation);
  return absl::OkStatus();
}

void Supervisor::CheckHealth(int rank) {
  Rank& r = ranks_[rank];
  Domain& domain = domains_[r.domain];
  const absl::Time now = absl::Now();
  if (r.detached_at) {
    // A process that ends closes its link first, and its own exit status tells more than our kill.
    if (now - *r.detached_at >= kExitGrace) {
      HandleLoss(rank, {.rank = rank, .cause = "broke its link", .kind = "link_broken"});
    }
    return;
  }
  if (r.phase == RankPhase::kStarting) {
    // A remote one has gone because its collective failed, and the domain is about to end.
    if (!r.remote && now - r.since >= options_.attach_timeout) {
      // It may be stopped, and then would not hear a SIGTERM.
      if (r.process) r.process->Signal(SIGKILL);
      HandleLoss(rank, {.rank = rank,
                        .cause = absl::StrCat("did not attach within ",
                                              absl::FormatDuration(options_.attach_timeout)),
                        .kind = "not_attached"});
    }
    return;
  }
  const absl::Time heard = std::max(links_->LastHeard(rank), r.since);
  if (now - heard >= options_.heartbeat_timeout) {
    if (r.process) r.process->Signal(SIGKILL);
    HandleLoss(rank, {.rank = rank,
                      .cause = absl::StrCat("was not heard of for ",
                                            absl::FormatDuration(options_.heartbeat_timeout)),
                      .kind = "silent",
                      .certain = true});
    return;
  }
  if (domain.ready_since && now - *domain.ready_since >= options_.stable_after) domain.losses = 0;
}

void Supervisor::HandleLoss(int rank, RankLoss loss) {
  const int d = ranks_[rank].domain;
  Domain& domain = domains_[d];
  if (domain.phase != DomainPhase::kUp) return;
  const absl::Status& start_failure = ranks_[rank].start_failure;
  if (!start_failure.ok()) {
    loss.cause = std::string(start_failure.message());
    loss.kind = "start_failed";
    loss.certain = true;
  }
  options_.metrics->workers().Lost(RestartReason(loss));
  ++domain.losses;
  if (domain.ready_since) {
    domain.failed_starts = 0;
  } else if (!ranks_[rank].remote) {
    ++domain.failed_starts;
  }
  domain.phase = DomainPhase::kEnding;
  domain.ready_since.reset();
  domain.start_at =
      absl::Now() +
      std::min(options_.backoff_max, options_.backoff_initial * std::pow(2.0, domain.losses - 1));
  spdlog::error("rank {}: the worker {}", rank, loss.cause);
  loss = Explain(std::move(loss), d);
  EndProcesses(domain);
  if (!AnyProcess(domain)) domain.phase = DomainPhase::kWaiting;
  events_.on_lost(d, loss);
  if (domain.failed_starts >= options_.start_attempts_max || IsPermanent(rank)) GiveUp(d, loss);
}

RankLoss Supervisor::Explain(RankLoss loss, int d) const {
  std::vector<RankTrace> traces;
  for (int rank : domains_[d].ranks) {
    RankTrace& trace = traces.emplace_back(RankTrace{.rank = rank});
    if (ranks_[rank].recorder) trace.log = ranks_[rank].recorder->Read();
  }
  if (std::all_of(traces.begin(), traces.end(),
                  [](const RankTrace& trace) { return trace.log.records.empty(); })) {
    return loss;
  }
  loss = Judge(std::move(loss), traces);
  spdlog::error("verdict: {}", loss.verdict);
  if (options_.report_folder.empty()) return loss;
  const absl::Time now = absl::Now();
  const absl::StatusOr<std::string> report = reports_.Write(d, LossReport(loss, traces, now), now);
  if (report.ok()) {
    spdlog::error("report: {}", *report);
    loss.report = *report;
  } else {
    spdlog::warn("no report: {}", std::string(report.status().message()));
  }
  return loss;
}

void Supervisor::EndProcesses(Domain& domain) {
  domain.kill_at = absl::Now() + options_.kill_grace;
  for (int rank : domain.ranks) {
    Rank& r = ranks_[rank];
    if (r.remote) {
      // One that is still to attach, or to begin, belongs to the next start.
      if (r.phase <= RankPhase::kAttached) continue;
      links_->EndRemote(rank, r.incarnation);
      r.phase = RankPhase::kStarting;
      continue;
    }
    // From here on nothing that the old link still holds is heard.
    links_->Expect(rank, r.incarnation + 1);
    if (!r.process) continue;
    spdlog::info("rank {}: ending worker {}", rank, r.process->pid());
    r.process->Signal(SIGTERM);
  }
}

bool Supervisor::IsPermanent(int rank) const {
  // What is wrong on another host may be put right while we wait.
  if (domains_[ranks_[rank].domain].ever_ready || ranks_[rank].remote) return false;
  switch (ranks_[rank].start_failure.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kUnimplemented:
      return true;
    case absl::StatusCode::kFailedPrecondition:
      // Among several it may be what a lost peer looks like.
      return domains_[ranks_[rank].domain].ranks.size() == 1;
    default:
      return false;
  }
}

void Supervisor::GiveUp(int d, const RankLoss& loss) {
  Domain& domain = domains_[d];
  domain.gave_up = true;
  const Rank& rank = ranks_[loss.rank];
  const std::string message = absl::StrCat(
      "the worker of rank ", loss.rank, " ", loss.cause,
      IsPermanent(loss.rank) ? ""
                             : absl::StrCat(" (start ", rank.incarnation, "; giving up after ",
                                            domain.failed_starts, " in a row)"));
  if (!std::all_of(domains_.begin(), domains_.end(),
                   [](const Domain& other) { return other.gave_up; })) {
    spdlog::error("{}; the other replicas go on", message);
    return;
  }
  events_.on_gave_up(absl::Status(
      rank.start_failure.ok() ? absl::StatusCode::kUnavailable : rank.start_failure.code(),
      message));
}

}  // namespace dlo
