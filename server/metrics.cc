#include "server/metrics.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/cgroup_memory.h"
#include "loader/hwr/outcome.h"
#include "proto/build_id.h"
#include "proto/convert.h"
#include "server/compatibility_key.h"

namespace dlo {
namespace {

constexpr char kOther[] = "other";
constexpr char kAll[] = "all";

// Reasons of statuses (docs/reference.md, errors). One that is added there is added here.
const std::vector<std::string>& FailureReasons() {
  static const auto* const reasons = new std::vector<std::string>{
      "RANK_LOST",         "WAVE_DEADLINE",     "COLLECTIVE_FAILED", "STUCK_VISIT",
      "WEIGHTS_CHANGED",   "OUT_OF_MEMORY",     "ENCODING_FAILED",   "GENERATION_FAILED",
      "RESULT_INCOMPLETE", "RESULT_CORRUPT",    "RESULT_TOO_LARGE",  "RESULT_NOT_STORED",
      "DISK_FULL",         "DEADLINE_EXCEEDED", "SHUTTING_DOWN",     "SERVER_RESTARTED",
      "REQUEST_NOT_VALID", "RECORD_UNREADABLE"};
  return *reasons;
}

const std::vector<std::string>& RefusalReasons() {
  static const auto* const reasons =
      new std::vector<std::string>{"INVALID_ARGUMENT", "QUEUE_FULL",   "DEADLINE_EXCEEDED",
                                   "SHUTTING_DOWN",    "STORE_FAILED", "DISK_FULL"};
  return *reasons;
}

// What Supervisor says of a loss.
const std::vector<std::string>& RestartReasons() {
  static const auto* const reasons = new std::vector<std::string>{
      "killed", "exited",        "start_failed", "not_attached",     "link_broken",
      "silent", "wave_deadline", "stuck_visit",  "collective_failed"};
  return *reasons;
}

// The names of all values of one of the Host Weight Runtime's enumerations.
template <typename E>
std::vector<std::string> Words(E first, E last, absl::string_view (*name)(E)) {
  std::vector<std::string> words;
  for (int i = static_cast<int>(first); i <= static_cast<int>(last); ++i) {
    words.emplace_back(name(static_cast<E>(i)));
  }
  return words;
}

std::vector<std::string> StartupOutcomes() {
  return Words(hwr::Outcome::kDisabled, hwr::Outcome::kFailed, hwr::OutcomeName);
}
std::vector<std::string> StartupReasons() {
  return Words(hwr::Reason::kInvalidConfig, hwr::Reason::kUncertain, hwr::ReasonName);
}
std::vector<std::string> PublicationOutcomes() {
  return Words(hwr::PublicationOutcome::kAlreadyPresent, hwr::PublicationOutcome::kFailed,
               hwr::PublicationOutcomeName);
}

const std::vector<std::pair<RankState, const char*>>& RankStates() {
  static const auto* const states = new std::vector<std::pair<RankState, const char*>>{
      {RankState::kDown, "down"},       {RankState::kStarting, "starting"},
      {RankState::kLoading, "loading"}, {RankState::kReady, "ready"},
      {RankState::kEnding, "ending"},   {RankState::kGivenUp, "given_up"}};
  return *states;
}

// From a step of the demo model to hours of a long video.
const prometheus::Histogram::BucketBoundaries& DurationBuckets() {
  static const auto* const buckets = new prometheus::Histogram::BucketBoundaries{
      0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2,  0.5,  1,    2,
      5,     10,    20,    50,   100,  200,  500, 1000, 2000, 5000, 10000};
  return *buckets;
}

double Seconds(absl::Duration duration) { return absl::ToDoubleSeconds(duration); }

prometheus::Family<prometheus::Gauge>& Gauges(prometheus::Registry& registry,
                                              const std::string& name, const std::string& help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
}
prometheus::Gauge& Gauge(prometheus::Registry& registry, const std::string& name,
                         const std::string& help) {
  return Gauges(registry, name, help).Add({});
}
prometheus::Family<prometheus::Counter>& Counters(prometheus::Registry& registry,
                                                  const std::string& name,
                                                  const std::string& help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}
prometheus::Family<prometheus::Histogram>& Histograms(prometheus::Registry& registry,
                                                      const std::string& name,
                                                      const std::string& help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
}
prometheus::Histogram& Durations(prometheus::Registry& registry, const std::string& name,
                                 const std::string& help) {
  return Histograms(registry, name, help).Add({}, DurationBuckets());
}

// Read when somebody asks: nothing of the server waits for it.
class CgroupCollectable : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override {
    const CgroupMemory memory = ReadCgroupMemory();
    return {
        OneGauge("dlo_cgroup_memory_bytes",
                 "Memory that the kernel charges the server's cgroup with, page cache included; "
                 "NaN: there is no memory cgroup.",
                 memory.used_bytes),
        OneGauge("dlo_cgroup_memory_limit_bytes",
                 "Limit of the server's cgroup; +Inf: none, NaN: there is no memory cgroup.",
                 memory.limit_bytes)};
  }

 private:
  static prometheus::MetricFamily OneGauge(const char* name, const char* help, double value) {
    prometheus::MetricFamily family;
    family.name = name;
    family.help = help;
    family.type = prometheus::MetricType::Gauge;
    family.metric.emplace_back().gauge.value = value;
    return family;
  }
};

}  // namespace

CounterSet::CounterSet(prometheus::Registry& registry, const std::string& name,
                       const std::string& help, const std::string& label,
                       std::vector<std::string> values) {
  prometheus::Family<prometheus::Counter>& family = Counters(registry, name, help);
  values.emplace_back(kOther);
  for (const std::string& value : values) counters_[value] = &family.Add({{label, value}});
}

void CounterSet::Increment(const std::string& value) {
  const auto it = counters_.find(value);
  (it == counters_.end() ? counters_.at(kOther) : it->second)->Increment();
}

RequestMetrics::RequestMetrics(prometheus::Registry& registry)
    : waiting_(Gauge(registry, "dlo_requests_waiting", "Requests in the queue.")),
      waiting_max_(Gauge(registry, "dlo_requests_waiting_max",
                         "Requests that may wait (queue.max_waiting); more are refused.")),
      running_(Gauge(registry, "dlo_requests_running", "Requests that ranks work on.")),
      refusals_(registry, "dlo_request_refusals_total",
                "Requests that were refused and became no job, by the reason of the error.",
                "reason", RefusalReasons()),
      failures_(registry, "dlo_request_failures_total",
                "Jobs that failed, by the reason of the error.", "reason", FailureReasons()),
      duration_(Durations(registry, "dlo_request_duration_seconds",
                          "From the submission of a job to its success.")),
      queue_duration_(Durations(registry, "dlo_request_queue_duration_seconds",
                                "From the submission of a job to its start.")),
      step_duration_(Durations(registry, "dlo_denoise_step_duration_seconds",
                               "Of one denoising step, as the server saw them come.")) {
  prometheus::Family<prometheus::Counter>& outcomes =
      Counters(registry, "dlo_requests_total",
               "Requests by outcome: jobs in their last state, and requests that became no job.");
  for (const char* outcome : {"succeeded", "failed", "cancelled", "refused"}) {
    outcomes_[outcome] = &outcomes.Add({{"outcome", outcome}});
  }
  prometheus::Family<prometheus::Histogram>& stages =
      Histograms(registry, "dlo_request_stage_duration_seconds",
                 "Of the stages of jobs that succeeded; encode_tail: what encoding took after the "
                 "last decoded frame.");
  for (const char* stage : {"text", "denoise", "decode", "encode_tail"}) {
    stage_durations_[stage] = &stages.Add({{"stage", stage}}, DurationBuckets());
  }
}

void RequestMetrics::SetQueue(int64_t waiting, int64_t running) {
  waiting_.Set(static_cast<double>(waiting));
  running_.Set(static_cast<double>(running));
}

void RequestMetrics::SetWaitingMax(int waiting_max) { waiting_max_.Set(waiting_max); }

void RequestMetrics::Refused(const std::string& reason) {
  outcomes_.at("refused")->Increment();
  // The only refusal of this code; it has RetryInfo in the place of a reason.
  refusals_.Increment(reason == "RESOURCE_EXHAUSTED" ? "QUEUE_FULL" : reason);
}

void RequestMetrics::Started(absl::Duration queued) { queue_duration_.Observe(Seconds(queued)); }

void RequestMetrics::StepDone(absl::Duration time) { step_duration_.Observe(Seconds(time)); }

void RequestMetrics::Ended(const v1::Job& job) {
  if (job.state() == v1::JOB_STATE_CANCELLED) return outcomes_.at("cancelled")->Increment();
  if (job.state() != v1::JOB_STATE_SUCCEEDED) {
    outcomes_.at("failed")->Increment();
    return failures_.Increment(job.failure().reason());
  }
  outcomes_.at("succeeded")->Increment();
  duration_.Observe(Seconds(FromProto(job.end_time()) - FromProto(job.create_time())));
  const v1::StageTimes& times = job.result().times();
  const auto observe = [this](const char* stage, const google::protobuf::Duration& time) {
    stage_durations_.at(stage)->Observe(Seconds(FromProto(time)));
  };
  observe("text", times.text());
  observe("denoise", times.denoise());
  observe("decode", times.decode());
  observe("encode_tail", times.encode_tail());
}

WaveMetrics::WaveMetrics(prometheus::Registry& registry)
    : requests_(Histograms(registry, "dlo_wave_requests", "Requests in a wave, at its start.")
                    .Add({}, prometheus::Histogram::BucketBoundaries{1, 2, 3, 4, 6, 8, 12, 16, 24,
                                                                     32, 48, 64})),
      fill_(Histograms(registry, "dlo_wave_fill_ratio",
                       "Requests in a wave for each replica of its domain, at its start.")
                .Add({}, prometheus::Histogram::BucketBoundaries{0.125, 0.25, 0.375, 0.5, 0.625,
                                                                 0.75, 0.875, 1})),
      wait_(Durations(registry, "dlo_wave_wait_seconds",
                      "How long a domain that was free and had a request waited for company.")),
      deferrals_(registry, "dlo_wave_deferrals_total",
                 "Requests that a wave left behind because they do not fit its first one, by the "
                 "fields in which they differ (a request counts in each).",
                 "field", CompatibilityFields()),
      late_replies_(Counters(registry, "dlo_late_replies_total",
                             "Replies of ranks that belonged to no running wave and were dropped.")
                        .Add({})) {}

void WaveMetrics::Started(const WaveStart& start) {
  requests_.Observe(start.requests);
  fill_.Observe(static_cast<double>(start.requests) / start.capacity);
  wait_.Observe(Seconds(start.wait));
  for (const std::string& key : start.deferred_keys) {
    for (const std::string& field : DifferingFields(start.key, key)) deferrals_.Increment(field);
  }
}

WorkerMetrics::WorkerMetrics(prometheus::Registry& registry, int num_ranks)
    : restarts_(registry, "dlo_worker_restarts_total",
                "Losses of a dispatch domain, after which its workers are started again (or given "
                "up), by what happened to the rank to blame.",
                "reason", RestartReasons()),
      startups_(registry, "dlo_startups_total",
                "Loads of a model by a worker that came to an end, by where its weights came from.",
                "outcome", StartupOutcomes()),
      startup_reasons_(registry, "dlo_startup_reasons_total",
                       "Steps of loads that did not give what was hoped for, by the reason.",
                       "reason", StartupReasons()),
      publications_(registry, "dlo_publications_total",
                    "Artifacts that a load was to write, by what came of it.", "outcome",
                    PublicationOutcomes()),
      ranks_(num_ranks) {
  auto& attempts = Counters(registry, "dlo_startup_attempts_total",
                            "Steps of loads on the way to their weights, by stage and result.");
  std::vector<std::string> stages =
      Words(hwr::Stage::kConfiguration, hwr::Stage::kCanonicalLoad, hwr::StageName);
  stages.emplace_back(kOther);
  for (const std::string& stage : stages) {
    for (const std::string& result :
         Words(hwr::AttemptResult::kHit, hwr::AttemptResult::kSkipped, hwr::AttemptResultName)) {
      startup_attempts_[{stage, result}] = &attempts.Add({{"stage", stage}, {"result", result}});
    }
  }
  auto& phases = Gauges(registry, "dlo_rank_startup_seconds",
                        "Where the time of the rank's latest load went; all: of the whole load.");
  auto& startup_bytes =
      Gauges(registry, "dlo_rank_startup_bytes",
             "Of the rank's latest load. hashed and read: of the checkpoint, to find its artifact "
             "and by the ordinary loader; mapped: weights that stay in files; pinned: buffers that "
             "the device copies from.");
  auto& backings = Gauges(registry, "dlo_rank_components",
                          "Components of the model by where the host has their weights, since the "
                          "rank's latest load; checkpoint: their blocks.");
  auto& states = Gauges(registry, "dlo_rank_state", "1 for the state that the rank is in, else 0.");
  auto& starts =
      Counters(registry, "dlo_rank_starts_total", "Worker processes started for the rank.");
  auto& bus = Counters(registry, "dlo_rank_bus_bytes_total",
                       "Weights copied from host to device for assignments that finished.");
  auto& fabric = Counters(registry, "dlo_rank_fabric_bytes_total",
                          "Weights received from other ranks for assignments that finished.");
  auto& packed = Counters(registry, "dlo_rank_packed_bytes_total",
                          "Weights packed from the checkpoint's pages for assignments that "
                          "finished.");
  auto& stalls = Counters(registry, "dlo_rank_streaming_stall_seconds_total",
                          "How long computing waited for moves of streamed weights, in assignments "
                          "that finished.");
  auto& device = Gauges(
      registry, "dlo_rank_device_memory_bytes",
      "Device memory of the worker. used: allocated now; weights: of it in weights and slots; "
      "activations: the rest; peak: largest used since the last request began.");
  auto& host = Gauges(registry, "dlo_rank_host_memory_bytes",
                      "Host memory of the worker process, from its smaps_rollup.");
  auto& pinned = Gauges(registry, "dlo_rank_pinned_bytes",
                        "Host buffers that blocks are copied to the device from: page-locked on "
                        "CUDA, ordinary memory on the CPU. Perhaps in no cgroup's figure.");
  auto& mapped = Gauges(registry, "dlo_rank_mapped_bytes",
                        "Address range of files that are mapped read-only and shared, resident or "
                        "not (checkpoints).");
  for (int i = 0; i < num_ranks; ++i) {
    RankMetrics& rank = ranks_[i];
    const std::string name = absl::StrCat(i);
    for (const auto& [state, text] : RankStates()) {
      rank.states_[state] = &states.Add({{"rank", name}, {"state", text}});
    }
    rank.starts_ = &starts.Add({{"rank", name}});
    rank.bus_bytes_ = &bus.Add({{"rank", name}});
    rank.fabric_bytes_ = &fabric.Add({{"rank", name}});
    rank.packed_bytes_ = &packed.Add({{"rank", name}});
    rank.copy_stall_ = &stalls.Add({{"rank", name}, {"move", "copy"}});
    rank.gather_stall_ = &stalls.Add({{"rank", name}, {"move", "gather"}});
    rank.pack_stall_ = &stalls.Add({{"rank", name}, {"move", "pack"}});
    const auto kind = [&name](prometheus::Family<prometheus::Gauge>& family, const char* text) {
      return &family.Add({{"rank", name}, {"kind", text}});
    };
    rank.device_used_ = kind(device, "used");
    rank.device_peak_ = kind(device, "peak");
    rank.device_weights_ = kind(device, "weights");
    rank.device_activations_ = kind(device, "activations");
    rank.host_pss_ = kind(host, "pss");
    rank.host_private_dirty_ = kind(host, "private_dirty");
    rank.host_shared_clean_ = kind(host, "shared_clean");
    rank.pinned_ = &pinned.Add({{"rank", name}});
    rank.mapped_ = &mapped.Add({{"rank", name}});
    for (int p = 0; p < hwr::kNumPhases; ++p) {
      const std::string phase(hwr::PhaseName(static_cast<hwr::Phase>(p)));
      rank.startup_phases_[phase] = &phases.Add({{"rank", name}, {"phase", phase}});
    }
    rank.startup_phases_[kAll] = &phases.Add({{"rank", name}, {"phase", kAll}});
    for (const char* text : {"hashed", "read", "mapped", "pinned"}) {
      rank.startup_bytes_[text] = kind(startup_bytes, text);
    }
    for (const char* backing : {"artifact", "checkpoint", "memory", "device"}) {
      rank.backings_[backing] = &backings.Add({{"rank", name}, {"backing", backing}});
    }
    rank.SetState(RankState::kDown);
  }
}

void WorkerMetrics::Startup(int rank, const v1::StartupRecord& record) {
  startups_.Increment(record.outcome());
  for (const v1::StartupAttempt& attempt : record.attempts()) {
    auto it = startup_attempts_.find({attempt.stage(), attempt.result()});
    if (it == startup_attempts_.end()) it = startup_attempts_.find({kOther, attempt.result()});
    if (it != startup_attempts_.end()) it->second->Increment();
    if (!attempt.reason().empty()) startup_reasons_.Increment(attempt.reason());
  }
  if (record.has_publication()) publications_.Increment(record.publication().outcome());
  ranks_[rank].SetStartup(record);
}

void RankMetrics::SetState(RankState state) {
  for (const auto& [other, gauge] : states_) gauge->Set(other == state ? 1 : 0);
  if (state != RankState::kDown && state != RankState::kGivenUp) return;
  v1::RankMemory nothing;
  nothing.set_host_pss_bytes(0);
  nothing.set_host_private_dirty_bytes(0);
  nothing.set_host_shared_clean_bytes(0);
  SetMemory(nothing);
}

void RankMetrics::SetMemory(const v1::RankMemory& memory) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const auto bytes = [](int64_t count) { return static_cast<double>(count); };
  device_used_->Set(bytes(memory.device_used_bytes()));
  device_peak_->Set(bytes(memory.device_peak_bytes()));
  device_weights_->Set(bytes(memory.device_weights_bytes()));
  device_activations_->Set(bytes(memory.device_activations_bytes()));
  host_pss_->Set(memory.has_host_pss_bytes() ? bytes(memory.host_pss_bytes()) : kNan);
  host_private_dirty_->Set(
      memory.has_host_private_dirty_bytes() ? bytes(memory.host_private_dirty_bytes()) : kNan);
  host_shared_clean_->Set(
      memory.has_host_shared_clean_bytes() ? bytes(memory.host_shared_clean_bytes()) : kNan);
  pinned_->Set(bytes(memory.pinned_bytes()));
  mapped_->Set(bytes(memory.mapped_bytes()));
}

void RankMetrics::SetStartup(const v1::StartupRecord& record) {
  for (const auto& [phase, gauge] : startup_phases_) gauge->Set(0);
  for (const v1::StartupPhase& phase : record.phases()) {
    const auto it = startup_phases_.find(phase.phase());
    if (it != startup_phases_.end()) it->second->Set(Seconds(FromProto(phase.time())));
  }
  startup_phases_.at(kAll)->Set(Seconds(FromProto(record.duration())));
  const auto set = [this](const char* kind, int64_t bytes) {
    startup_bytes_.at(kind)->Set(static_cast<double>(bytes));
  };
  set("hashed", record.hashed_bytes());
  set("read", record.read_bytes());
  set("mapped", record.mapped_bytes());
  set("pinned", record.pinned_bytes());
  for (const auto& [backing, gauge] : backings_) {
    int count = 0;
    for (const v1::HostWeights& weights : record.host_weights()) {
      count += weights.backing() == backing ? 1 : 0;
    }
    gauge->Set(count);
  }
}

void RankMetrics::AddUsage(const v1::RankUsage& usage) {
  bus_bytes_->Increment(static_cast<double>(usage.bus_bytes()));
  for (const v1::StageStreaming& stage : usage.streaming()) {
    fabric_bytes_->Increment(static_cast<double>(stage.fabric_bytes()));
    packed_bytes_->Increment(static_cast<double>(stage.packed_bytes()));
    copy_stall_->Increment(Seconds(FromProto(stage.copy_stall())));
    gather_stall_->Increment(Seconds(FromProto(stage.gather_stall())));
    pack_stall_->Increment(Seconds(FromProto(stage.pack_stall())));
  }
}

ServerMetrics::ServerMetrics(int num_ranks, std::shared_ptr<prometheus::Registry> registry)
    : registry_(std::move(registry)),
      cgroup_(std::make_shared<CgroupCollectable>()),
      serving_(Gauge(*registry_, "dlo_serving",
                     "1 while a dispatch domain is ready, as health says; else 0.")),
      requests_(*registry_),
      waves_(*registry_),
      workers_(*registry_, num_ranks) {
  Gauges(*registry_, "dlo_build_info", "1; the label names the build of dlo-serve and its workers.")
      .Add({{"build_id", BuildId()}})
      .Set(1);
}

}  // namespace dlo
