#include "worker/memory_sampler.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "absl/time/clock.h"
#include "worker/process_memory.h"

namespace dlo {
namespace {

// Times as long as a sample took.
constexpr int kIdleFactor = 20;

}  // namespace

MemorySampler::MemorySampler(absl::Duration interval)
    : interval_(interval), thread_([this] { Loop(); }) {}

MemorySampler::~MemorySampler() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void MemorySampler::SetPipeline(const VideoPipeline* pipeline) {
  {
    const std::lock_guard<std::mutex> lock(pipeline_mutex_);
    pipeline_ = pipeline;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stale_ = true;
  }
  wake_.notify_one();
}

v1::RankMemory MemorySampler::latest() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return latest_;
}

void MemorySampler::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    stale_ = false;
    lock.unlock();
    const absl::Time start = absl::Now();
    v1::RankMemory sample = Sample();
    const absl::Duration idle = std::max(interval_, (absl::Now() - start) * kIdleFactor);
    lock.lock();
    latest_ = std::move(sample);
    wake_.wait_for(lock, absl::ToChronoNanoseconds(idle), [this] { return stopped_ || stale_; });
  }
}

v1::RankMemory MemorySampler::Sample() {
  v1::RankMemory memory;
  std::ifstream rollup("/proc/self/smaps_rollup");
  ParseSmapsRollup(rollup, &memory);
  std::ifstream maps("/proc/self/maps");
  memory.set_mapped_bytes(MappedFileBytes(maps));
  const std::lock_guard<std::mutex> lock(pipeline_mutex_);
  if (pipeline_ == nullptr) return memory;
  const PipelineMemory device = pipeline_->memory();
  memory.set_device_used_bytes(device.used_bytes);
  memory.set_device_peak_bytes(device.peak_bytes);
  memory.set_device_weights_bytes(device.weights_bytes);
  memory.set_device_activations_bytes(
      std::max<int64_t>(0, device.used_bytes - device.weights_bytes));
  memory.set_pinned_bytes(device.pinned_bytes);
  return memory;
}

}  // namespace dlo
