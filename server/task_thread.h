// A thread that runs what it is given, in order.
//
//   TaskThread disk;
//   disk.Post([...] { writer->Write(...); });
//
// Thread-safe. Destruction runs what was posted before it and joins.
#pragma once

#include <deque>
#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace dlo {

class TaskThread {
 public:
  TaskThread() : thread_([this] { Loop(); }) {}
  ~TaskThread() {
    {
      absl::MutexLock lock(&mutex_);
      stopped_ = true;
    }
    thread_.join();
  }
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  void Post(std::function<void()> task) {
    absl::MutexLock lock(&mutex_);
    tasks_.push_back(std::move(task));
  }

 private:
  void Loop() {
    const auto awake = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return stopped_ || !tasks_.empty();
    };
    while (true) {
      std::deque<std::function<void()>> tasks;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(&awake));
        if (tasks_.empty()) return;
        tasks.swap(tasks_);
      }
      for (std::function<void()>& task : tasks) {
        task();
        task = nullptr;  // what it holds may be the last of its kind
      }
    }
  }

  absl::Mutex mutex_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace dlo
