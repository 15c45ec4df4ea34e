// Decides which jobs run where and when. One thread owns all of its state; every public method only
// enqueues and returns.
//
//   Scheduler scheduler({.domains = IndependentReplicas(2), .max_waiting = 64}, &links);
//   scheduler.Submit(job);           // the listener hears of everything that follows
//   scheduler.OnDomainReady(0);
//   ...
//   scheduler.Release(job);          // nobody is interested any more
//
// Jobs wait in one bounded FIFO. A dispatch domain that is ready and free takes a wave from it, by
// the rules of wave_former.h: one job for each of its replicas, as far as they go; the other
// replicas walk the plan. A replica on its own is a domain of one, whose waves are single jobs.
//
// A wave runs until each replica has answered. A failure or cancellation is its own job's alone.
// When a wave is overdue (running_wave.h) the supervisor is asked to restart the domain; when a
// domain is lost, those of its jobs end that had not answered, with UNAVAILABLE and an ErrorInfo
// that names the rank to blame, and the jobs in the queue stay.
//
// A reply counts if its wave is the one that the domain runs and it comes from a replica's primary
// rank that has not answered yet; others are dropped and counted.
//
// Every submitted job must be released, whether it succeeded, ended or was given up: releasing a
// waiting job removes it, releasing a running one cancels its part of the wave. `links` outlives
// the scheduler.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "dlo/v1/worker_link.pb.h"
#include "server/compatibility_key.h"
#include "server/dispatch_domain.h"
#include "server/job.h"
#include "server/metrics.h"
#include "server/rank.h"
#include "server/running_wave.h"
#include "server/wave_former.h"

namespace dlo {

struct SchedulerOptions {
  std::vector<DispatchDomain> domains = IndependentReplicas(1);
  int max_waiting = 64;  // jobs in the queue, those that run not counted
  // How long the first job of a wave waits for others, in collective domains.
  absl::Duration max_wait = absl::Milliseconds(500);
  // Equal texts may share a wave; by default those of CompatibilityKey.
  std::function<absl::StatusOr<std::string>(const JobSpec&)> wave_key;
  WaveLimits wave_limits;
  // How long a job will take; by default not known.
  std::function<WaveForecast(const JobSpec&)> forecast;
  // Told, by the scheduler's thread, that a domain must be restarted.
  std::function<void(int domain, RankLoss loss)> on_overdue;
  std::shared_ptr<ServerMetrics> metrics = nullptr;  // null: counted for nobody
};

class Scheduler {
 public:
  Scheduler(SchedulerOptions options, RankLinks* links);
  // Stops the thread. No job is told.
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Ends the job with ALREADY_EXISTS (its id is in flight), RESOURCE_EXHAUSTED (the queue is full),
  // UNAVAILABLE (shutting down) or DEADLINE_EXCEEDED; else the first event is the job, queued.
  void Submit(std::shared_ptr<Job> job);
  void Release(std::shared_ptr<Job> job);

  // All ranks of the domain are ready; it is gone, and will be ready again.
  void OnDomainReady(int domain);
  void OnDomainLost(int domain, RankLoss loss);

  void OnHeartbeat(int rank, v1::Heartbeat heartbeat);
  void OnProgress(int rank, v1::WaveProgress progress);
  // The WaveFinished itself travels through the result queue, behind the video.
  void OnFinished(int rank, uint64_t wave);
  void OnFailed(int rank, v1::WaveFailed failed);

  // From now on new jobs are refused and waiting ones end, with UNAVAILABLE and reason
  // SHUTTING_DOWN. What runs goes on.
  void Drain();
  // Ends every job that has not ended.
  void EndAll(grpc::Status status);
  // Whether every submitted job was released or had ended before `deadline`.
  bool WaitIdle(absl::Time deadline);

  // Replies that belonged to no running wave.
  int64_t late_replies() const { return late_replies_; }

 private:
  struct Domain {
    DispatchDomain ranks;
    bool ready = false;  // for a wave; not while its restart is on the way
    absl::Time free_since = absl::InfinitePast();
    std::optional<RunningWave> wave;
  };
  // Where a rank belongs.
  struct RankPlace {
    int domain = 0;
    int replica = 0;
    bool primary = false;
  };

  void Post(std::function<void()> task);
  void Loop();
  // All below run on the scheduler's thread.
  absl::Time NextTimer() const;
  void RunTimers();
  void HandleSubmit(const std::shared_ptr<Job>& job);
  void HandleRelease(const std::shared_ptr<Job>& job);
  void HandleProgress(int rank, const v1::WaveProgress& progress);
  void HandleFinished(int rank, uint64_t wave);
  void HandleFailed(int rank, const v1::WaveFailed& failed);
  void HandleDomainLost(int domain, const RankLoss& loss);
  WaveSlot Slot(const Domain& domain) const;
  int FreeCapacity() const;
  int64_t CountRunning() const;
  void Dispatch();
  void StartWave(Domain& domain, const std::vector<std::string>& ids, WaveFormed formed);
  WaveForecast Forecast(const std::vector<std::shared_ptr<Job>>& jobs) const;
  void StartJob(int rank, uint64_t wave, const std::shared_ptr<Job>& job);
  // The wave that `rank` is to reply to; null, and counted, if `wave` is not it.
  RunningWave* FindWave(int rank, uint64_t wave);
  void Answer(int rank);
  void NoteProgress(int rank, uint64_t wave);
  void Forget(const std::shared_ptr<Job>& job);
  void CancelWave(const std::shared_ptr<Job>& job);
  void End(const std::shared_ptr<Job>& job, const grpc::Status& status);
  void EndExpired(absl::Time now);
  void CheckOverdueWaves(absl::Time now);
  void TellSnapshot(const Job& job);
  // Marks them as changed from the position `from` on; RunTimers tells them.
  void QueueChanged(size_t from) { changed_from_ = std::min(changed_from_, from); }
  void TellQueuePositions(absl::Time now);

  const SchedulerOptions options_;
  RankLinks* const links_;
  const std::shared_ptr<ServerMetrics> metrics_;
  std::atomic<int> submissions_in_inbox_ = 0;
  std::atomic<int64_t> late_replies_ = 0;

  absl::Mutex mutex_;
  std::deque<std::function<void()>> inbox_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool idle_ ABSL_GUARDED_BY(mutex_) = true;

  std::vector<Domain> domains_;
  std::vector<RankPlace> places_;  // by rank
  WaveFormer former_;
  std::map<std::string, std::shared_ptr<Job>> active_;  // by id, until released or ended
  uint64_t next_wave_ = 1;
  bool draining_ = false;
  size_t changed_from_ = std::numeric_limits<size_t>::max();
  absl::Time next_positions_ = absl::InfinitePast();
  absl::Duration mean_run_time_ = absl::ZeroDuration();

  std::thread thread_;
};

}  // namespace dlo
