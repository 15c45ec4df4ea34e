// Keeps one worker process per rank: starts it, watches it, restarts it, stops it.
//
//   Supervisor supervisor(options, &links, connect, events);
//   supervisor.Start();                                        // starts the workers
//   link_events forward to supervisor.OnAttached / OnReady / OnStartFailed / OnDetached
//   supervisor.Stop(absl::Seconds(5));                         // drain, then kill; nothing is left
//
// A worker is lost when its process ends, its link breaks, or it is not heard of for
// `heartbeat_timeout`; in the last two cases it is killed. A lost worker is started again after a
// back-off that doubles with every loss and starts afresh once a worker has been ready for
// `stable_after`. `start_attempts_max` losses in a row before a worker was ready: the supervisor
// gives up.
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
#include "server/rank.h"
#include "server/worker_link_service.h"
#include "server/worker_process.h"

namespace dlo {

struct SupervisorOptions {
  int num_ranks = 1;
  std::filesystem::path worker_binary;
  std::vector<std::string>
      worker_arguments;  // of every rank; --link-fd, --rank and --incarnation are added
  absl::Duration attach_timeout = absl::Seconds(30);     // from start to Hello
  absl::Duration heartbeat_timeout = absl::Seconds(10);  // several heartbeat intervals
  absl::Duration backoff_initial = absl::Milliseconds(200);
  absl::Duration backoff_max = absl::Seconds(30);
  absl::Duration stable_after = absl::Seconds(60);
  int start_attempts_max = 3;
};

struct SupervisorEvents {
  std::function<void(int rank)> on_ready;
  std::function<void(int rank, RankLoss loss)> on_lost;
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

  // Asks the workers to exit, kills after `grace` those that have not, and returns when none is
  // left. Idempotent.
  void Stop(absl::Duration grace);

 private:
  enum class Phase { kWaiting, kStarting, kLoading, kReady };
  struct Rank {
    Phase phase = Phase::kWaiting;
    uint64_t incarnation = 0;
    std::optional<WorkerProcess> process;
    absl::Time start_at;  // kWaiting: when it is started
    absl::Time since;     // of this phase
    // Of this incarnation:
    bool was_ready = false;
    std::optional<absl::Time> detached_at;
    absl::Status start_failure;
    std::string killed_because;

    int losses = 0;         // in a row
    int failed_starts = 0;  // in a row
  };

  void Post(std::function<void()> task);
  void Loop();
  int PollTimeoutMs() const;
  void StartWorker(int rank);
  void CheckHealth(int rank);
  void Kill(int rank, std::string because);
  void HandleExit(int rank, const ExitStatus& exit);
  void HandleLoss(int rank, RankLoss loss);
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
  bool gave_up_ = false;
  std::optional<absl::Time> kill_at_;  // stopping

  absl::Mutex stop_mutex_;
  std::thread thread_ ABSL_GUARDED_BY(stop_mutex_);
};

}  // namespace dlo
