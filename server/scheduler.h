// Decides which job runs where and when. One thread owns all of its state; every public method only
// enqueues and returns.
//
//   Scheduler scheduler({.num_ranks = 1, .max_waiting = 64}, &links);
//   scheduler.Submit(job);           // the listener hears of everything that follows
//   scheduler.OnRankReady(0);
//   ...
//   scheduler.Release(job);          // nobody is interested any more
//
// Jobs wait in one bounded FIFO; each idle and ready rank takes the head. Every submitted job must
// be released, whether it succeeded, ended or was given up: releasing a waiting job removes it,
// releasing a running one cancels its wave. A rank whose wave was cancelled is busy until it has
// answered. `links` outlives the scheduler.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "dlo/v1/worker_link.pb.h"
#include "server/job.h"
#include "server/rank.h"

namespace dlo {

struct SchedulerOptions {
  int num_ranks = 1;
  int max_waiting = 64;  // jobs in the queue, those that run not counted
  // A client that takes nothing for so long, while its result keeps a rank from sending, loses its
  // job.
  absl::Duration client_stall_timeout = absl::Seconds(60);
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

  void OnRankReady(int rank);
  void OnRankLost(int rank, RankLoss loss);
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

 private:
  struct Rank {
    bool ready = false;
    uint64_t wave = 0;         // that it works on; 0: idle
    std::shared_ptr<Job> job;  // null: nobody waits for the wave
    absl::Time last_step;
    std::deque<absl::Duration> step_times;  // of the last steps
  };

  void Post(std::function<void()> task);
  void Loop();
  // All below run on the scheduler's thread.
  absl::Time NextTimer() const;
  void RunTimers();
  void HandleSubmit(const std::shared_ptr<Job>& job);
  void HandleRelease(const std::shared_ptr<Job>& job);
  void HandleProgress(int rank, const v1::WaveProgress& progress);
  void HandleFailed(int rank, const v1::WaveFailed& failed);
  void HandleRankLost(int rank, const RankLoss& loss);
  void Dispatch();
  void Start(int rank, const std::shared_ptr<Job>& job);
  void FreeRank(Rank& rank);
  void Forget(const std::shared_ptr<Job>& job);
  void CancelWave(const std::shared_ptr<Job>& job);
  void End(const std::shared_ptr<Job>& job, const grpc::Status& status);
  void TellSnapshot(const Job& job);
  void TellQueuePositions(size_t from);
  void CheckStalledClients();

  const SchedulerOptions options_;
  RankLinks* const links_;
  std::atomic<int> submissions_in_inbox_ = 0;

  absl::Mutex mutex_;
  std::deque<std::function<void()>> inbox_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool idle_ ABSL_GUARDED_BY(mutex_) = true;

  std::vector<Rank> ranks_;
  std::deque<std::shared_ptr<Job>> waiting_;
  std::map<std::string, std::shared_ptr<Job>> active_;  // by id, until released or ended
  uint64_t next_wave_ = 1;
  bool draining_ = false;
  absl::Duration mean_run_time_ = absl::ZeroDuration();
  absl::Time next_stall_check_ = absl::InfiniteFuture();

  std::thread thread_;
};

}  // namespace dlo
