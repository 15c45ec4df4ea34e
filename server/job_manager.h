// Jobs from their submission to the removal of their results.
//
//   JobManager jobs(options, card, std::move(store), &scheduler, &forecaster);
//   jobs.Recover();                                   // what an earlier server left behind
//   jobs.Submit(spec, nullptr, [](grpc::Status status, const v1::Job& job, bool created) { ... });
//
//            Submit ──► scheduler ──► rank ──► result queue
//              │ record    │ events, end          │ chunks
//              ▼           ▼                      ▼
//        store thread ◄── LiveJob ──────► a disk thread (result file)
//                          └► watchers
//
// A job is told to nobody before its record is durable, and its end not before that of its record
// was tried (a full disk does not hide an end; the record is then retried). The video goes from the
// rank's result queue to the disk whether anybody watches or not, so no client can hold a rank
// back.
//
// Thread-safe; nothing blocks but Flush and the destructor. Replies come once each, on any thread,
// and must not block. `scheduler` and `forecaster` outlive the manager; the scheduler has no job
// left when it is destroyed.
#pragma once

#include <grpcpp/support/status.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "dlo/v1/video_generation.pb.h"
#include "models/model_card.h"
#include "server/forecaster.h"
#include "server/job_store.h"
#include "server/metrics.h"
#include "server/request_resolution.h"
#include "server/scheduler.h"
#include "server/store_thread.h"
#include "server/task_thread.h"

namespace dlo {

struct JobManagerOptions {
  absl::Duration result_ttl = absl::Hours(24);       // from the end of a job to its removal
  int64_t result_bytes_max = int64_t{10} << 30;      // a larger result fails its job
  std::shared_ptr<ServerMetrics> metrics = nullptr;  // not null
};

// Follows one job. Called by any thread, one call at a time; must not block. OnEvent must not call
// the manager.
class JobWatcher {
 public:
  virtual ~JobWatcher() = default;
  // A Job or its progress. The first is a Job, and if the job ends the last is.
  virtual void OnEvent(const v1::GenerateEvent& event) = 0;
  // Nothing follows. OK: the job succeeded; CANCELLED: it was cancelled; else the error that it
  // failed with, or the one for which the events stop (no Job in a last state was told then).
  virtual void OnEnd(const grpc::Status& status) = 0;
};

// What DownloadResult sends.
enum class ResultPart { kVideo, kTimeline };

class JobManager {
 public:
  using Reply = std::function<void(const grpc::Status& status, const v1::Job& job)>;
  // `created`: this submission made the job.
  using SubmitReply =
      std::function<void(const grpc::Status& status, const v1::Job& job, bool created)>;
  using ListReply = std::function<void(const grpc::Status& status, v1::ListJobsResponse response)>;
  using ResultReply =
      std::function<void(const grpc::Status& status, std::shared_ptr<ResultReader> result)>;

  // `forecaster` learns from every job that succeeds.
  JobManager(JobManagerOptions options, std::shared_ptr<const ModelCard> card,
             std::unique_ptr<JobStore> store, Scheduler* scheduler, Forecaster* forecaster);
  ~JobManager();
  JobManager(const JobManager&) = delete;
  JobManager& operator=(const JobManager&) = delete;

  // Submits again what was queued and fails what ran. Once, before anything else.
  absl::Status Recover();

  // `watcher` (may be null) sees every event from the first on, some of them perhaps before the
  // reply.
  void Submit(JobSpec spec, std::shared_ptr<JobWatcher> watcher, SubmitReply reply);
  void Get(const std::string& id, Reply reply);
  void List(const v1::ListJobsRequest& request, ListReply reply);
  // Ends with NOT_FOUND if there is no such job.
  void Watch(const std::string& id, std::shared_ptr<JobWatcher> watcher);
  // Before the watcher goes away, if it has not ended. OnEnd may still come.
  void Unwatch(const std::string& id, const JobWatcher* watcher);
  void Cancel(const std::string& id, Reply reply);
  void Delete(const std::string& id, Reply reply);
  void OpenResult(const std::string& id, ResultPart part, ResultReply reply);

  // For the reading of results, which may block.
  TaskThread& reading_thread() { return reading_; }

  // Returns when every end that was decided is on the disk and told.
  void Flush();

 private:
  class LiveJob;

  TaskThread* NextDisk() { return &disk_[next_disk_++ % disk_.size()]; }
  std::shared_ptr<LiveJob> FindLive(const std::string& id);
  void Erase(const std::string& id, const LiveJob* live);
  // Of a job that is not live.
  void FindRecorded(const std::string& id, Reply reply);
  void OpenResultOf(const v1::Job& job, ResultPart part, const ResultReply& reply);
  void RecoverJob(const JobRecord& record);

  const JobManagerOptions options_;
  const std::shared_ptr<const ModelCard> card_;
  Scheduler* const scheduler_;
  Forecaster* const forecaster_;
  JobStore* const store_;  // only for the paths of results; the rest is the store thread's

  absl::Mutex mutex_;
  // Not ended, or ended and not yet recorded so.
  std::map<std::string, std::shared_ptr<LiveJob>> live_ ABSL_GUARDED_BY(mutex_);

  StoreThread records_;
  // They write results, each job's all by one. Most of their time they wait for the disk to flush,
  // which several can do for the price of one.
  std::array<TaskThread, 4> disk_;
  std::atomic<size_t> next_disk_ = 0;
  TaskThread reading_;
};

}  // namespace dlo
