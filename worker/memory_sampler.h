// Looks at the memory of this process every few seconds, on a thread of its own: the kernel walks
// all page tables for it, which takes a second for some hundred gigabytes.
//
//   MemorySampler sampler;
//   sampler.SetPipeline(pipeline.get());
//   *heartbeat.mutable_memory() = sampler.latest();
//   sampler.SetPipeline(nullptr);   // before the pipeline goes
//
// It is idle for at least 20 times as long as it looks. Thread-safe.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "absl/time/time.h"
#include "dlo/v1/worker_link.pb.h"
#include "models/video_pipeline.h"

namespace dlo {

class MemorySampler {
 public:
  explicit MemorySampler(absl::Duration interval = absl::Seconds(2));
  ~MemorySampler();
  MemorySampler(const MemorySampler&) = delete;
  MemorySampler& operator=(const MemorySampler&) = delete;

  // Whose device memory is told too; null: nobody's. Waits for a look at the pipeline before.
  void SetPipeline(const VideoPipeline* pipeline);

  // The last sample; empty before the first.
  v1::RankMemory latest() const;

 private:
  void Loop();
  v1::RankMemory Sample();

  const absl::Duration interval_;
  std::mutex pipeline_mutex_;
  const VideoPipeline* pipeline_ = nullptr;  // guarded by pipeline_mutex_

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  // Guarded by mutex_.
  v1::RankMemory latest_;
  bool stale_ = false;  // look again at once
  bool stopped_ = false;

  std::thread thread_;
};

}  // namespace dlo
