// What dlo-serve counts of itself: the series behind /metrics (metrics_server.h). docs/reference.md
// lists them.
//
//   auto metrics = std::make_shared<ServerMetrics>(/*num_ranks=*/4);
//   metrics->requests().Refused("QUEUE_FULL");
//   metrics->rank(0).SetState(RankState::kReady);
//
// Every series is there from the construction on: label values come from closed sets, and a value
// that is in none of them counts as "other". A test gives a registry of its own and reads that.
//
// Thread-safe. The hooks only count: none blocks, fails or allocates more than a short string.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "dlo/v1/video_generation.pb.h"
#include "dlo/v1/worker_link.pb.h"

namespace dlo {

// One counter for each value of one label.
class CounterSet {
 public:
  // `values` without "other", which is added.
  CounterSet(prometheus::Registry& registry, const std::string& name, const std::string& help,
             const std::string& label, std::vector<std::string> values);
  void Increment(const std::string& value);

 private:
  std::map<std::string, prometheus::Counter*> counters_;
};

class RequestMetrics {
 public:
  explicit RequestMetrics(prometheus::Registry& registry);

  // Those that the scheduler has now, and how many may wait.
  void SetQueue(int64_t waiting, int64_t running);
  void SetWaitingMax(int waiting_max);
  // A request that became no job. `reason` as in the status (ReasonOf).
  void Refused(const std::string& reason);
  // A job was given to a rank.
  void Started(absl::Duration queued);
  void StepDone(absl::Duration time);
  // A job reached its last state, with times and failure in it.
  void Ended(const v1::Job& job);

 private:
  prometheus::Gauge& waiting_;
  prometheus::Gauge& waiting_max_;
  prometheus::Gauge& running_;
  std::map<std::string, prometheus::Counter*> outcomes_;
  CounterSet refusals_;
  CounterSet failures_;
  prometheus::Histogram& duration_;
  prometheus::Histogram& queue_duration_;
  prometheus::Histogram& step_duration_;
  std::map<std::string, prometheus::Histogram*> stage_durations_;
};

// What was known when a wave started.
struct WaveStart {
  int requests = 0;
  int capacity = 1;     // replicas of the domain
  absl::Duration wait;  // from the time that it could have started, had it been full
  // Of the wave, and of each request that would have been in it but for its key.
  std::string key;
  std::vector<std::string> deferred_keys;
};

class WaveMetrics {
 public:
  explicit WaveMetrics(prometheus::Registry& registry);
  void Started(const WaveStart& start);
  // A reply was dropped.
  void LateReply() { late_replies_.Increment(); }

 private:
  prometheus::Histogram& requests_;
  prometheus::Histogram& fill_;
  prometheus::Histogram& wait_;
  CounterSet deferrals_;
  prometheus::Counter& late_replies_;
};

enum class RankState {
  kDown,      // no process; one will be started
  kStarting,  // the process has not attached yet
  kLoading,
  kReady,
  kEnding,  // lost, its process not gone yet
  kGivenUp  // no process is started any more
};

// Of one rank.
class RankMetrics {
 public:
  // kDown and kGivenUp take its memory to 0.
  void SetState(RankState state);
  // A process was started.
  void CountStart() { starts_->Increment(); }
  void SetMemory(const v1::RankMemory& memory);
  // What an assignment that finished took.
  void AddUsage(const v1::RankUsage& usage);
  // Of its latest start.
  void SetStartup(const v1::StartupRecord& record);

 private:
  friend class WorkerMetrics;
  std::map<std::string, prometheus::Gauge*> startup_phases_;
  std::map<std::string, prometheus::Gauge*> startup_bytes_;
  std::map<std::string, prometheus::Gauge*> backings_;
  std::map<RankState, prometheus::Gauge*> states_;
  prometheus::Counter* starts_ = nullptr;
  prometheus::Counter* bus_bytes_ = nullptr;
  prometheus::Counter* fabric_bytes_ = nullptr;
  prometheus::Counter* packed_bytes_ = nullptr;
  prometheus::Counter* copy_stall_ = nullptr;
  prometheus::Counter* gather_stall_ = nullptr;
  prometheus::Counter* pack_stall_ = nullptr;
  prometheus::Gauge* device_used_ = nullptr;
  prometheus::Gauge* device_peak_ = nullptr;
  prometheus::Gauge* device_weights_ = nullptr;
  prometheus::Gauge* device_activations_ = nullptr;
  prometheus::Gauge* host_pss_ = nullptr;
  prometheus::Gauge* host_private_dirty_ = nullptr;
  prometheus::Gauge* host_shared_clean_ = nullptr;
  prometheus::Gauge* pinned_ = nullptr;
  prometheus::Gauge* mapped_ = nullptr;
};

class WorkerMetrics {
 public:
  WorkerMetrics(prometheus::Registry& registry, int num_ranks);
  // A dispatch domain was lost. `reason`: what happened to the rank to blame.
  void Lost(const std::string& reason) { restarts_.Increment(reason); }
  // A rank has loaded its model, or has not.
  void Startup(int rank, const v1::StartupRecord& record);
  RankMetrics& rank(int rank) { return ranks_[rank]; }

 private:
  CounterSet restarts_;
  CounterSet startups_;
  CounterSet startup_reasons_;
  CounterSet publications_;
  std::map<std::pair<std::string, std::string>, prometheus::Counter*> startup_attempts_;
  std::vector<RankMetrics> ranks_;
};

class ServerMetrics {
 public:
  explicit ServerMetrics(int num_ranks, std::shared_ptr<prometheus::Registry> registry =
                                            std::make_shared<prometheus::Registry>());
  ServerMetrics(const ServerMetrics&) = delete;
  ServerMetrics& operator=(const ServerMetrics&) = delete;

  void SetServing(bool serving) { serving_.Set(serving ? 1 : 0); }
  RequestMetrics& requests() { return requests_; }
  WaveMetrics& waves() { return waves_; }
  WorkerMetrics& workers() { return workers_; }
  RankMetrics& rank(int rank) { return workers_.rank(rank); }

  // All that is to be served: the registry, and what is read when somebody asks (the cgroup).
  std::vector<std::shared_ptr<prometheus::Collectable>> collectables() const {
    return {registry_, cgroup_};
  }

 private:
  const std::shared_ptr<prometheus::Registry> registry_;
  const std::shared_ptr<prometheus::Collectable> cgroup_;
  prometheus::Gauge& serving_;
  RequestMetrics requests_;
  WaveMetrics waves_;
  WorkerMetrics workers_;
};

}  // namespace dlo
