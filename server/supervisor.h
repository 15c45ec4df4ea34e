// Keeps one worker process per rank: starts it, watches it, restarts it, stops it.
//
//   Supervisor supervisor(options, &links, connect, events);
//   supervisor.Start();                                        // starts the workers
//   link_events forward to supervisor.OnAttached / OnReady / OnStartFailed / OnDetached
//   supervisor.Stop(absl::Seconds(5));                         // drain, then kill; nothing is left
//
// The unit that fails together is the dispatch domain: its ranks talk to each other in ways that
// nothing repairs, so the loss of one is the loss of all. A rank is lost when its process ends, its
// link breaks, it is not heard of for `heartbeat_timeout`, it is stuck in a visit (visit_watch.h),
// or somebody condemns its domain. Then the domain's other processes get SIGTERM and, those that
// are left after `kill_grace`, SIGKILL; a silent rank gets SIGKILL at once. A rank that exits
// because its collective failed is given a moment, in which the peer that caused it may be seen to
// be gone: that one is blamed. What the flight recorders of the domain's ranks say of the loss goes
// into a report (loss_report.h).
//
// The ranks of a domain that gathers weights meet through a store: each start binds a new listening
// socket for it, which the domain's first rank inherits (--rendezvous-fd) and the others are told
// of (--rendezvous).
//
// The workers of remote ranks are on other hosts, where somebody else starts them and starts them
// again. They attach when they like; a domain begins, and its local workers are started, when all
// of its remote ranks are attached, however long that takes. A remote rank is lost at once when its
// link ends; the links of those that are left are ended with the domain, upon which they exit.
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
#include "base/flight_recorder.h"
#include "server/dispatch_domain.h"
#include "server/loss_report.h"
#include "server/metrics.h"
#include "server/rank.h"
#include "server/rank_placement.h"
#include "server/visit_watch.h"
#include "server/worker_link_service.h"
#include "server/worker_process.h"

namespace dlo {

struct SupervisorOptions {
  std::vector<DispatchDomain> domains = IndependentReplicas(1);
  std::vector<int> remote_ranks;  // the others are started here
  std::filesystem::path worker_binary;
  // Of every rank; to those that are started here --link-fd, --recorder-fd, --rank and
  // --incarnation are added.
  std::vector<std::string> worker_arguments;
  std::vector<RankPlacement> placement;  // by rank, --threads is added; empty: anywhere
  absl::Duration attach_timeout = absl::Seconds(30);     // from start to Hello
  absl::Duration heartbeat_timeout = absl::Seconds(10);  // several heartbeat intervals
  absl::Duration kill_grace = absl::Seconds(15);         // from SIGTERM to SIGKILL
  absl::Duration backoff_initial = absl::Milliseconds(200);
  absl::Duration backoff_max = absl::Seconds(30);
  absl::Duration stable_after = absl::Seconds(60);
  int start_attempts_max = 3;
  std::shared_ptr<ServerMetrics> metrics = nullptr;  // not null
  VisitWatchOptions visits;
  std::filesystem::path report_folder;  // empty: no reports are written
  int reports_max = 32;                 // files that are kept
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

  void OnAttached(int rank, uint64_t incarnation);
  void OnReady(int rank);
  void OnStartFailed(int rank, absl::Status why);
  void OnDetached(int rank, uint64_t incarnation);
  // The rank exits because a collective failed; `blamed` may be the cause.
  void OnGroupBroken(int rank, std::vector<int> blamed, std::string message);
  void OnHeartbeat(int rank, v1::Heartbeat heartbeat);

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

    std::string flag() const;  // of the ranks that do not serve it
  };
  // kAttached is a remote rank's, until its domain begins.
  enum class RankPhase { kStarting, kAttached, kLoading, kReady };
  struct Rank {
    int domain = 0;
    bool remote = false;
    RankPhase phase = RankPhase::kStarting;
    uint64_t incarnation = 0;
    std::optional<WorkerProcess> process;  // local
    std::optional<FlightMemory> recorder;  // local; of this start
    absl::Time since;                      // of this phase
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
    Domain(std::vector<int> its_ranks, const VisitWatchOptions& watch)
        : ranks(std::move(its_ranks)), visits(watch, ranks) {}

    std::vector<int> ranks;
    DomainPhase phase = DomainPhase::kWaiting;
    bool begun = false;  // kUp: its remote ranks, if any, are attached and it has its processes
    VisitWatch visits;
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
  void BeginIfAttached(int domain);
  absl::Status StartWorker(int rank, const Rendezvous& rendezvous);
  void BlameForBrokenGroup(int domain);
  void CheckDomain(int domain);
  void CheckHealth(int rank);
  RankLoss Explain(RankLoss loss, int domain) const;
  void HandleLoss(int rank, RankLoss loss);
  void EndProcesses(Domain& domain);
  // Another start would end alike.
  bool IsPermanent(int rank) const;
  void GiveUp(int domain, const RankLoss& loss);
  bool AnyProcess(const Domain& domain) const;
  bool AnyProcess() const;
  RankState StateOf(const Rank& rank) const;
  void PublishStates();
  bool AnyAttachedRemote() const;

  const SupervisorOptions options_;
  const ReportFolder reports_;
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
