#include "server/supervisor.h"

#include <fcntl.h>
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
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace dlo {
namespace {

// From the end of a worker's link to its kill.
constexpr absl::Duration kExitGrace = absl::Seconds(5);

}  // namespace

Supervisor::Supervisor(SupervisorOptions options, WorkerLinkService* links,
                       std::function<void(int fd)> connect, SupervisorEvents events)
    : options_(std::move(options)),
      links_(links),
      connect_(std::move(connect)),
      events_(std::move(events)),
      wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      ranks_(options_.num_ranks) {
  for (Rank& rank : ranks_) rank.start_at = absl::Now();
}

void Supervisor::Start() {
  absl::MutexLock lock(&stop_mutex_);
  thread_ = std::thread([this] { Loop(); });
}

Supervisor::~Supervisor() {
  Stop(absl::ZeroDuration());
  close(wake_fd_);
}

void Supervisor::OnAttached(int rank) {
  Post([this, rank] {
    Rank& r = ranks_[rank];
    if (r.phase != Phase::kStarting) return;
    r.phase = Phase::kLoading;
    r.since = absl::Now();
  });
}

void Supervisor::OnReady(int rank) {
  Post([this, rank] {
    Rank& r = ranks_[rank];
    if (r.phase != Phase::kLoading || !r.killed_because.empty()) return;
    r.phase = Phase::kReady;
    r.was_ready = true;
    r.since = absl::Now();
    r.failed_starts = 0;
    if (!kill_at_) events_.on_ready(rank);
  });
}

void Supervisor::OnStartFailed(int rank, absl::Status why) {
  Post([this, rank, why = std::move(why)] { ranks_[rank].start_failure = why; });
}

void Supervisor::OnDetached(int rank, uint64_t incarnation) {
  Post([this, rank, incarnation] {
    Rank& r = ranks_[rank];
    if (r.incarnation == incarnation) r.detached_at = absl::Now();
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
      if (ranks_[rank].process && ranks_[rank].phase != Phase::kReady) {
        ranks_[rank].process->Signal(SIGKILL);
      }
    }
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

    const absl::Time now = absl::Now();
    for (size_t i = 0; i < ranks_.size(); ++i) {
      const int rank = static_cast<int>(i);
      Rank& r = ranks_[i];
      if (r.process) {
        if (const auto exit = r.process->TryWait()) {
          HandleExit(rank, *exit);
        } else if (kill_at_ && now >= *kill_at_) {
          r.process->Signal(SIGKILL);
        } else if (!kill_at_) {
          CheckHealth(rank);
        }
      } else if (!kill_at_ && !gave_up_ && now >= r.start_at) {
        StartWorker(rank);
      }
    }
    if (kill_at_ && !AnyProcess()) return;
  }
}

bool Supervisor::AnyProcess() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const Rank& rank) { return rank.process.has_value(); });
}

int Supervisor::PollTimeoutMs() const {
  absl::Time next = absl::InfiniteFuture();
  const absl::Time now = absl::Now();
  for (const Rank& rank : ranks_) {
    if (kill_at_) {
      // After the kill the pidfd wakes us.
      if (now < *kill_at_) next = *kill_at_;
    } else if (!rank.process) {
      if (!gave_up_) next = std::min(next, rank.start_at);
    } else {
      next =
          std::min(next, now + std::min(options_.heartbeat_timeout / 4, absl::Milliseconds(250)));
    }
  }
  if (next == absl::InfiniteFuture()) return -1;
  return static_cast<int>(std::max<int64_t>(0, absl::ToInt64Milliseconds(next - now) + 1));
}

void Supervisor::StartWorker(int rank) {
  Rank& r = ranks_[rank];
  ++r.incarnation;
  r.was_ready = false;
  r.detached_at.reset();
  r.start_failure = absl::OkStatus();
  r.killed_because.clear();
  r.since = absl::Now();
  links_->Expect(rank, r.incarnation);

  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    HandleLoss(rank, {absl::StrCat("has no link: socketpair: ", strerror(errno))});
    return;
  }
  WorkerCommand command{options_.worker_binary, options_.worker_arguments, ends[1]};
  for (std::string argument :
       {absl::StrCat("--link-fd=", kWorkerLinkFd), absl::StrCat("--rank=", rank),
        absl::StrCat("--incarnation=", r.incarnation)}) {
    command.arguments.push_back(std::move(argument));
  }
  absl::StatusOr<WorkerProcess> process = WorkerProcess::Spawn(command);
  close(ends[1]);
  if (!process.ok()) {
    close(ends[0]);
    r.start_failure = process.status();
    HandleLoss(rank, {});
    return;
  }
  r.process.emplace(*std::move(process));
  r.phase = Phase::kStarting;
  connect_(ends[0]);
  spdlog::info("rank {}: started worker {} (start {})", rank, r.process->pid(), r.incarnation);
}

void Supervisor::CheckHealth(int rank) {
  Rank& r = ranks_[rank];
  const absl::Time now = absl::Now();
  if (!r.killed_because.empty()) return;
  if (r.detached_at) {
    // A process that ends closes its link first, and its own exit status tells more than our kill.
    if (now - *r.detached_at >= kExitGrace) Kill(rank, "broke its link");
    return;
  }
  if (r.phase == Phase::kStarting) {
    if (now - r.since >= options_.attach_timeout) {
      Kill(rank,
           absl::StrCat("did not attach within ", absl::FormatDuration(options_.attach_timeout)));
    }
    return;
  }
  const absl::Time heard = std::max(links_->LastHeard(rank), r.since);
  if (now - heard >= options_.heartbeat_timeout) {
    Kill(rank,
         absl::StrCat("was not heard of for ", absl::FormatDuration(options_.heartbeat_timeout)));
    return;
  }
  if (r.phase == Phase::kReady && now - r.since >= options_.stable_after) r.losses = 0;
}

void Supervisor::Kill(int rank, std::string because) {
  Rank& r = ranks_[rank];
  spdlog::error("rank {}: worker {} {}; killing it", rank, r.process->pid(), because);
  r.killed_because = std::move(because);
  r.process->Signal(SIGKILL);
}

void Supervisor::HandleExit(int rank, const ExitStatus& exit) {
  Rank& r = ranks_[rank];
  RankLoss loss{exit.ToString(), exit.signal, exit.exit_code};
  if (!r.killed_because.empty()) loss.cause = absl::StrCat(r.killed_because, " and ", loss.cause);
  r.process.reset();
  HandleLoss(rank, std::move(loss));
}

void Supervisor::HandleLoss(int rank, RankLoss loss) {
  Rank& r = ranks_[rank];
  // From here on nothing that the old link still holds is heard.
  links_->Expect(rank, r.incarnation + 1);
  ++r.losses;
  r.failed_starts = r.was_ready ? 0 : r.failed_starts + 1;
  r.phase = Phase::kWaiting;
  r.start_at = absl::Now() + std::min(options_.backoff_max,
                                      options_.backoff_initial * std::pow(2.0, r.losses - 1));
  if (!r.start_failure.ok()) loss.cause = std::string(r.start_failure.message());
  if (kill_at_) return;
  spdlog::error("rank {}: the worker {}", rank, loss.cause);
  events_.on_lost(rank, loss);
  if (r.failed_starts < options_.start_attempts_max || gave_up_) return;
  gave_up_ = true;
  events_.on_gave_up(absl::Status(
      r.start_failure.ok() ? absl::StatusCode::kUnavailable : r.start_failure.code(),
      absl::StrCat("the worker of rank ", rank, " ", loss.cause, " (start ", r.incarnation,
                   "; giving up after ", r.failed_starts, " in a row)")));
}

}  // namespace dlo
