// Keeps one worker process per rank: starts it, watches it, restarts it, stops it.
//
//   Supervisor supervisor(options, &links, connect, events);
//   supervisor.Start();                                        // starts the workers
//   link_events forward to supervisor.OnAttached / OnReady / OnStartFailed / OnDetached
//   supervisor.Stop(absl::Seconds(5));                         // drain, then kill; nothing is left
//
// The unit that fails together is the dispatch domain: its ranks talk to each other in ways that
// nothing repairs, so the loss of one is the loss of all. A rank is lost when its process ends, its
// link breaks, it is not heard of for `heartbeat_timeout`, or somebody condemns its domain. Then
// the domain's other processes get SIGTERM and, those that are left after `kill_grace`, SIGKILL;
// a silent rank gets SIGKILL at once. A rank that exits because its collective failed is given a
// moment, in which the peer that caused it may be seen to be gone: that one is blamed.
//
// The ranks of a domain that gathers weights meet through a store: each start binds a new listening
// socket for it, which the domain's first rank inherits (--rendezvous-fd) and the others are told
// of (--rendezvous).
//
// A lost domain is started again, once none of its processes is left, after a back-off that doubles
// with every loss and starts afresh once it has been ready for `stable_after`. After
// `start_attempts_max` losses in a row before it was ready it is given up, and at once where a
// domain that was never ready fails for a reason that another start would meet again (a model that
// is not there or not right); when all domains are given up, the supervisor gives up.
//
// One thread owns all state; public methods are thread-safe and do not block, except Stop. Events
// come from that thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/dispatch_domain.h"
#include "server/rank.h"
#include "server/rank_placement.h"
#include "server/worker_link_service.h"
#include "server/worker_process.h"

namespace dlo {

struct SupervisorOptions {
  std::vector<DispatchDomain> domains = IndependentReplicas(1);
  std::filesystem::path worker_binary;
  std::vector<std::string>
      worker_arguments;  // of every rank; --link-fd, --rank and --incarnation are added
  std::vector<RankPlacement> placement;  // by rank, --threads is added; empty: anywhere
  absl::Duration attach_timeout = absl::Seconds(30);     // from start to Hello
  absl::Duration heartbeat_timeout = absl::Seconds(10);  // several heartbeat intervals
  absl::Duration kill_grace = absl::Seconds(15);         // from SIGTERM to SIGKILL
  absl::Duration backoff_initial = absl::Milliseconds(200);
  absl::Duration backoff_max = absl::Seconds(30);
  absl::Duration stable_after = absl::Seconds(60);
  int start_attempts_max = 3;
};

struct SupervisorEvents {
  std::function<void(int domain)> on_ready;
  // At the first sign; the domain's processes may still be ending.
  std::function<void(int domain, RankLoss loss)> on_lost;
  // No worker is started any more. The status says why the last one was lost.
  std::function<void(absl::Status)> on_gave_up;
};

class Supervisor {
 public:
  // `connect` takes over the server's end of a link (a connected, non-blocking socket).
  Supervisor(SupervisorOptions options, WorkerLinkService* links,
             std::function<void(int fd)> connect, SupervisorEvents events);
  // Kills and reaps what still runs.
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  // Once; the events may come from now on.
  void Start();

  void OnAttached(int rank);
  void OnReady(int rank);
  void OnStartFailed(int rank, absl::Status why);
  void OnDetached(int rank, uint64_t incarnation);
  // The rank exits because a collective failed; `blamed` may be the cause.
  void OnGroupBroken(int rank, std::vector<int> blamed, std::string message);

  // Restarts a domain that is ready but gets nowhere; no other.
  void Condemn(int domain, RankLoss loss);

  // Asks the workers to exit, kills after `grace` those that have not, and returns when none is
  // left. Idempotent.
  void Stop(absl::Duration grace);

 private:
  struct Rendezvous {
    int fd = -1;
    int port = 0;
    int server_rank = 0;
  };
  enum class RankPhase { kStarting, kLoading, kReady };
  struct Rank {
    int domain = 0;
    RankPhase phase = RankPhase::kStarting;
    uint64_t incarnation = 0;
    std::optional<WorkerProcess> process;
    absl::Time since;  // of this phase
    // Of this incarnation:
    std::optional<absl::Time> detached_at;
    absl::Status start_failure;
    std::optional<RankLoss> broken_group;  // as the rank told
  };
  enum class DomainPhase {
    kWaiting,  // until start_at, with no process
    kUp,       // its ranks start, load or are ready
    kEnding    // until none of its processes is left
  };
  struct Domain {
    std::vector<int> ranks;
    DomainPhase phase = DomainPhase::kWaiting;
    absl::Time start_at;
    absl::Time kill_at;                            // kEnding
    absl::Time blame_at = absl::InfiniteFuture();  // kUp, with a rank whose collective failed
    std::optional<absl::Time> ready_since;         // kUp, once all its ranks are
    bool ever_ready = false;
    bool gave_up = false;

    int losses = 0;         // in a row
    int failed_starts = 0;  // in a row
  };

  void Post(std::function<void()> task);
  void Loop();
  int PollTimeoutMs() const;
  void Step(int domain);
  void Reap(int domain);
  void StartDomain(int domain);
  absl::Status StartWorker(int rank, const Rendezvous& rendezvous);
  void BlameForBrokenGroup(int domain);
  void CheckHealth(int rank);
  void HandleLoss(int rank, RankLoss loss);
  void EndProcesses(Domain& domain);
  // Another start would end alike.
  bool IsPermanent(int rank) const;
  void GiveUp(int domain, const RankLoss& loss);
  bool AnyProcess(const Domain& domain) const;
  bool AnyProcess() const;

  const SupervisorOptions options_;
  WorkerLinkService* const links_;
  const std::function<void(int fd)> connect_;
  const SupervisorEvents events_;
  const int wake_fd_;

  absl::Mutex mutex_;
  std::vector<std::function<void()>> inbox_ ABSL_GUARDED_BY(mutex_);

  // The thread's own.
  std::vector<Rank> ranks_;
  std::vector<Domain> domains_;
  std::optional<absl::Time> kill_at_;  // stopping

  absl::Mutex stop_mutex_;
  std::thread thread_ ABSL_GUARDED_BY(stop_mutex_);
};

}  // namespace dlo
