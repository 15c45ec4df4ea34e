// The thread that the job store belongs to. What is asked of it while it flushes is written
// together with the next flush, so the number of jobs per second is not bound to that of flushes.
//
//   StoreThread thread(std::move(store));
//   thread.Run([](JobStore& store) { return store.Insert(record); },
//              [](absl::Status status) { ...durable, or not... });
//
// Operations run in the order of their Run. Thread-safe; `done` runs on this thread and must not
// block. Jobs whose time is up are removed by it. Destruction finishes what was asked before.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/job_store.h"

namespace dlo {

class StoreThread {
 public:
  using Done = std::function<void(absl::Status)>;
  enum class Retry { kNo, kUntilDone };

  explicit StoreThread(std::unique_ptr<JobStore> store);
  ~StoreThread();
  StoreThread(const StoreThread&) = delete;
  StoreThread& operator=(const StoreThread&) = delete;

  // `operation` may run twice (see JobStore::Transaction). kUntilDone: while it fails for want of
  // room or the like it is tried again every second, and `done` is called after each attempt.
  void Run(JobStore::Operation operation, Done done, Retry retry = Retry::kNo);

  // Returns when what was asked before has been done, and what that asked in turn.
  void Flush();

 private:
  struct Request {
    JobStore::Operation operation;
    Done done;
    Retry retry = Retry::kNo;
  };

  void Loop();
  void RunBatch(std::vector<Request> batch);
  void RemoveExpired();

  const std::unique_ptr<JobStore> store_;

  absl::Mutex mutex_;
  std::vector<Request> inbox_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;

  // The thread's own.
  std::vector<Request> failed_;  // to be tried again
  absl::Time retry_at_ = absl::InfiniteFuture();
  absl::Time next_expiry_ = absl::InfinitePast();

  std::thread thread_;
};

}  // namespace dlo
