#include "server/scheduler.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/convert.h"
#include "server/status_details.h"

namespace dlo {
namespace {

// Between two tellings of the positions in the queue: with many short jobs each start moves all.
constexpr absl::Duration kPositionInterval = absl::Milliseconds(100);
// Submissions that the thread has not looked at yet; beyond it the caller is refused without it.
constexpr int kSubmissionsInInboxMax = 4096;

grpc::Status ShuttingDown() {
  return StatusWithReason(grpc::StatusCode::UNAVAILABLE, "SHUTTING_DOWN",
                          "the server is shutting down; send the request again");
}

grpc::Status LostStatus(const RankLoss& loss) {
  std::map<std::string, std::string> metadata = {{"rank", absl::StrCat(loss.rank)}};
  if (loss.signal) metadata["signal"] = absl::StrCat(*loss.signal);
  if (loss.exit_code) metadata["exit_code"] = absl::StrCat(*loss.exit_code);
  if (!loss.verdict.empty()) metadata["verdict"] = loss.verdict;
  if (!loss.report.empty()) metadata["report"] = loss.report;
  return StatusWithReason(grpc::StatusCode::UNAVAILABLE, loss.reason,
                          absl::StrCat("the worker of rank ", loss.rank, " ", loss.cause,
                                       "; it is being restarted, send the request again"),
                          metadata);
}

v1::ToWorker CancelMessage(uint64_t wave) {
  v1::ToWorker message;
  message.mutable_cancel()->set_wave_id(wave);
  return message;
}

bool AnyCollective(const std::vector<DispatchDomain>& domains) {
  return std::any_of(domains.begin(), domains.end(),
                     [](const DispatchDomain& domain) { return domain.collective(); });
}

}  // namespace

Scheduler::Scheduler(SchedulerOptions options, RankLinks* links)
    : options_(std::move(options)),
      links_(links),
      metrics_(options_.metrics != nullptr
                   ? options_.metrics
                   : std::make_shared<ServerMetrics>(CountRanks(options_.domains))),
      domains_(options_.domains.size()),
      places_(CountRanks(options_.domains)),
      former_({.max_waiting = options_.max_waiting,
               .max_wait =
                   AnyCollective(options_.domains) ? options_.max_wait : absl::ZeroDuration()}) {
  for (size_t d = 0; d < domains_.size(); ++d) {
    domains_[d].ranks = options_.domains[d];
    const std::vector<std::vector<int>>& replicas = domains_[d].ranks.replicas;
    for (size_t i = 0; i < replicas.size(); ++i) {
      for (int rank : replicas[i]) {
        places_[rank] = {static_cast<int>(d), static_cast<int>(i), rank == replicas[i].front()};
      }
    }
  }
  metrics_->requests().SetWaitingMax(options_.max_waiting);
  thread_ = std::thread([this] { Loop(); });
}

Scheduler::~Scheduler() {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  }
  thread_.join();
}

void Scheduler::Submit(std::shared_ptr<Job> job) {
  if (submissions_in_inbox_.fetch_add(1) >= kSubmissionsInInboxMax) {
    submissions_in_inbox_.fetch_sub(1);
    if (auto listener = job->listener.lock()) {
      listener->OnEnd(QueueFullStatus(options_.max_waiting, absl::Seconds(1)));
    }
    return;
  }
  Post([this, job = std::move(job)] {
    submissions_in_inbox_.fetch_sub(1);
    HandleSubmit(job);
  });
}

void Scheduler::Release(std::shared_ptr<Job> job) {
  Post([this, job = std::move(job)] { HandleRelease(job); });
}

void Scheduler::OnDomainReady(int domain) {
  Post([this, domain] {
    domains_[domain].ready = true;
    domains_[domain].free_since = absl::Now();
    Dispatch();
  });
}

void Scheduler::OnDomainLost(int domain, RankLoss loss) {
  Post([this, domain, loss = std::move(loss)] { HandleDomainLost(domain, loss); });
}

void Scheduler::OnHeartbeat(int rank, v1::Heartbeat heartbeat) {
  if (heartbeat.wave_id() == 0) return;
  Post([this, rank, heartbeat = std::move(heartbeat)] {
    const RankPlace& place = places_[rank];
    std::optional<RunningWave>& wave = domains_[place.domain].wave;
    if (!place.primary || !wave || wave->id() != heartbeat.wave_id()) return;
    wave->NoteCounter(place.replica, heartbeat.work_done(), absl::Now());
  });
}

void Scheduler::OnProgress(int rank, v1::WaveProgress progress) {
  Post([this, rank, progress = std::move(progress)] { HandleProgress(rank, progress); });
}

void Scheduler::OnFinished(int rank, uint64_t wave) {
  Post([this, rank, wave] { HandleFinished(rank, wave); });
}

void Scheduler::OnFailed(int rank, v1::WaveFailed failed) {
  Post([this, rank, failed = std::move(failed)] { HandleFailed(rank, failed); });
}

void Scheduler::Drain() {
  Post([this] {
    draining_ = true;
    for (const std::string& id : former_.TakeAll()) {
      const std::shared_ptr<Job> job = active_.at(id);
      End(job, ShuttingDown());
    }
  });
}

void Scheduler::EndAll(grpc::Status status) {
  Post([this, status = std::move(status)] {
    former_.TakeAll();
    const std::map<std::string, std::shared_ptr<Job>> active = active_;
    for (const auto& [id, job] : active) {
      CancelWave(job);
      End(job, status);
    }
  });
}

bool Scheduler::WaitIdle(absl::Time deadline) {
  // Behind everything that was enqueued before.
  Post([] {});
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithDeadline(absl::Condition(&idle_), deadline);
}

void Scheduler::Post(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  inbox_.push_back(std::move(task));
  idle_ = false;
}

void Scheduler::Loop() {
  while (true) {
    std::deque<std::function<void()>> tasks;
    {
      absl::MutexLock lock(&mutex_);
      if (inbox_.empty() && active_.empty()) idle_ = true;
      mutex_.AwaitWithDeadline(absl::Condition(
                                   +[](Scheduler* self) ABSL_NO_THREAD_SAFETY_ANALYSIS {
                                     return self->stopped_ || !self->inbox_.empty();
                                   },
                                   this),
                               NextTimer());
      if (stopped_) return;
      tasks.swap(inbox_);
    }
    for (const std::function<void()>& task : tasks) task();
    RunTimers();
    metrics_->requests().SetQueue(static_cast<int64_t>(former_.size()), CountRunning());
  }
}

absl::Time Scheduler::NextTimer() const {
  absl::Time next = former_.NextDeadline();
  if (changed_from_ < former_.size()) next = std::min(next, next_positions_);
  for (const Domain& domain : domains_) {
    if (domain.wave) {
      if (domain.ready) next = std::min(next, domain.wave->NextDeadline());
    } else if (domain.ready) {
      next = std::min(next, former_.NextTime(Slot(domain)));
    }
  }
  return next;
}

void Scheduler::RunTimers() {
  const absl::Time now = absl::Now();
  EndExpired(now);
  Dispatch();
  CheckOverdueWaves(now);
  TellQueuePositions(now);
}

void Scheduler::EndExpired(absl::Time now) {
  const std::vector<std::string> expired = former_.TakeExpired(now);
  for (const std::string& id : expired) {
    const std::shared_ptr<Job> job = active_.at(id);
    End(job, grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED,
                          "the client's deadline passed while the request was queued"));
  }
  if (!expired.empty()) QueueChanged(0);
}

void Scheduler::CheckOverdueWaves(absl::Time now) {
  for (size_t d = 0; d < domains_.size(); ++d) {
    Domain& domain = domains_[d];
    if (!domain.wave || !domain.ready) continue;
    for (int i = 0; i < domain.wave->num_replicas(); ++i) {
      // A rank whose result waits for the disk is held back, not stuck.
      const int primary = domain.ranks.replicas[i].front();
      if (links_->result_queue(primary)->holds_back()) domain.wave->NoteHeldBack(i, now);
    }
    const std::optional<WaveOverdue> overdue = domain.wave->FindOverdue(now);
    if (!overdue) continue;
    // It gets nothing new until it has been restarted.
    domain.ready = false;
    if (!options_.on_overdue) continue;
    options_.on_overdue(static_cast<int>(d),
                        {.rank = domain.ranks.replicas[overdue->replica].front(),
                         .cause = overdue->cause,
                         .reason = kWaveDeadline});
  }
}

void Scheduler::HandleSubmit(const std::shared_ptr<Job>& job) {
  if (draining_) return End(job, ShuttingDown());
  if (active_.count(job->spec.id) > 0) {
    return End(job,
               StatusWithReason(grpc::StatusCode::ALREADY_EXISTS, "REQUEST_IN_FLIGHT",
                                absl::StrCat("request_id \"", job->spec.id,
                                             "\" is in flight; choose another or leave it empty")));
  }
  const absl::StatusOr<std::string> key =
      options_.wave_key ? options_.wave_key(job->spec)
                        : CompatibilityKey(job->spec.settings, job->spec.output_format,
                                           /*extras=*/nlohmann::json::object());
  if (!key.ok()) return End(job, ToGrpcStatus(key.status()));
  const int beyond_limit = job->admitted ? std::numeric_limits<int>::max() : FreeCapacity();
  if (!former_.Add({job->spec.id, *key, job->spec.deadline}, absl::Now(), beyond_limit)) {
    return End(job, QueueFullStatus(
                        options_.max_waiting,
                        std::max(absl::Seconds(1), absl::Ceil(mean_run_time_, absl::Seconds(1)))));
  }
  active_[job->spec.id] = job;
  job->snapshot.set_id(job->spec.id);
  job->snapshot.set_state(v1::JOB_STATE_QUEUED);
  *job->snapshot.mutable_settings() = ToProto(job->spec.settings);
  *job->snapshot.mutable_create_time() = ToProto(job->spec.create_time);
  job->snapshot.mutable_progress()->set_queue_position(static_cast<int>(former_.size()));
  TellSnapshot(*job);
  Dispatch();
}

void Scheduler::HandleRelease(const std::shared_ptr<Job>& job) {
  const auto entry = active_.find(job->spec.id);
  if (entry != active_.end() && entry->second == job) {
    if (const auto position = former_.Remove(job->spec.id)) QueueChanged(*position);
  }
  CancelWave(job);
  Forget(job);
}

void Scheduler::Forget(const std::shared_ptr<Job>& job) {
  const auto entry = active_.find(job->spec.id);
  if (entry != active_.end() && entry->second == job) active_.erase(entry);
}

RunningWave* Scheduler::FindWave(int rank, uint64_t wave_id) {
  const RankPlace& place = places_[rank];
  std::optional<RunningWave>& wave = domains_[place.domain].wave;
  if (wave && wave->id() == wave_id && place.primary && !wave->replica(place.replica).answered) {
    return &*wave;
  }
  ++late_replies_;
  metrics_->waves().LateReply();
  spdlog::warn("rank {}: dropped a reply for wave {}, which it does not run", rank, wave_id);
  return nullptr;
}

void Scheduler::NoteProgress(int rank, uint64_t wave_id) {
  const RankPlace& place = places_[rank];
  std::optional<RunningWave>& wave = domains_[place.domain].wave;
  if (wave && wave->id() == wave_id) wave->NoteProgress(place.replica, absl::Now());
}

void Scheduler::HandleProgress(int rank, const v1::WaveProgress& progress) {
  RunningWave* const wave = FindWave(rank, progress.wave_id());
  if (wave == nullptr) return;
  const int replica = places_[rank].replica;
  const absl::Time now = absl::Now();
  const std::shared_ptr<Job> job = wave->replica(replica).job;
  if (job == nullptr) return wave->NoteProgress(replica, now);
  job->snapshot.mutable_progress()->set_step(progress.step());
  job->snapshot.mutable_progress()->set_num_steps(progress.num_steps());
  if (job->snapshot.state() != progress.stage()) {
    job->snapshot.set_state(progress.stage());
    wave->NoteStage(replica, progress.stage(), now);
    TellSnapshot(*job);
    return;
  }
  const absl::Duration step_time =
      wave->NoteStep(replica, progress.step(), progress.num_steps(), now);
  metrics_->requests().StepDone(wave->last_step_time(replica));
  v1::Progress* snapshot = job->snapshot.mutable_progress();
  *snapshot->mutable_step_time() = ToProto(step_time);
  *snapshot->mutable_remaining() = ToProto(step_time * (progress.num_steps() - progress.step()));
  if (auto listener = job->listener.lock()) {
    v1::GenerateEvent event;
    *event.mutable_progress() = *snapshot;
    listener->OnEvent(std::move(event));
  }
}

void Scheduler::HandleFinished(int rank, uint64_t wave_id) {
  RunningWave* const wave = FindWave(rank, wave_id);
  if (wave == nullptr) return;
  RunningWave::Replica& replica = wave->replica(places_[rank].replica);
  if (replica.job != nullptr) {
    const absl::Duration run_time = absl::Now() - FromProto(replica.job->snapshot.start_time());
    mean_run_time_ =
        mean_run_time_ == absl::ZeroDuration() ? run_time : mean_run_time_ * 0.8 + run_time * 0.2;
    // From here on the loss of the domain no longer ends the job.
    replica.job = nullptr;
  }
  Answer(rank);
}

void Scheduler::HandleFailed(int rank, const v1::WaveFailed& failed) {
  RunningWave* const wave = FindWave(rank, failed.wave_id());
  if (wave == nullptr) return;
  const std::shared_ptr<Job> job = std::exchange(wave->replica(places_[rank].replica).job, nullptr);
  if (job != nullptr) {
    End(job, StatusWithReason(static_cast<grpc::StatusCode>(failed.code()), failed.reason(),
                              failed.message(), {{"rank", absl::StrCat(rank)}}));
  }
  Answer(rank);
}

void Scheduler::Answer(int rank) {
  const RankPlace& place = places_[rank];
  Domain& domain = domains_[place.domain];
  domain.wave->Answer(place.replica);
  if (!domain.wave->answered()) return;
  domain.wave.reset();
  domain.free_since = absl::Now();
  Dispatch();
}

void Scheduler::HandleDomainLost(int domain_index, const RankLoss& loss) {
  Domain& domain = domains_[domain_index];
  domain.ready = false;
  if (!domain.wave) return;
  for (int i = 0; i < domain.wave->num_replicas(); ++i) {
    const std::shared_ptr<Job> job = std::exchange(domain.wave->replica(i).job, nullptr);
    if (job != nullptr) End(job, LostStatus(loss));
  }
  domain.wave.reset();
}

WaveSlot Scheduler::Slot(const Domain& domain) const {
  return {domain.ranks.capacity(), domain.free_since};
}

int Scheduler::FreeCapacity() const {
  int capacity = 0;
  for (const Domain& domain : domains_) {
    if (domain.ready && !domain.wave) capacity += domain.ranks.capacity();
  }
  return capacity;
}

int64_t Scheduler::CountRunning() const {
  int64_t running = 0;
  for (const Domain& domain : domains_) {
    if (domain.wave) running += domain.wave->num_jobs();
  }
  return running;
}

void Scheduler::Dispatch() {
  bool started = false;
  for (Domain& domain : domains_) {
    if (!domain.ready || domain.wave) continue;
    WaveFormed formed;
    const std::vector<std::string> ids = former_.TakeWave(Slot(domain), absl::Now(), &formed);
    if (ids.empty()) continue;
    StartWave(domain, ids, std::move(formed));
    started = true;
  }
  if (started) QueueChanged(0);
}

void Scheduler::StartWave(Domain& domain, const std::vector<std::string>& ids, WaveFormed formed) {
  metrics_->waves().Started({.requests = static_cast<int>(ids.size()),
                             .capacity = domain.ranks.capacity(),
                             .wait = absl::Now() - formed.leading_since,
                             .key = std::move(formed.key),
                             .deferred_keys = std::move(formed.deferred_keys)});
  const uint64_t id = next_wave_++;
  const std::vector<std::vector<int>>& replicas = domain.ranks.replicas;
  std::vector<std::shared_ptr<Job>> jobs(replicas.size());
  for (size_t i = 0; i < ids.size(); ++i) jobs[i] = active_.at(ids[i]);
  domain.wave.emplace(id, jobs, options_.wave_limits, Forecast(jobs), absl::Now());
  // Nobody may answer before all is in place to take it.
  for (size_t i = 0; i < ids.size(); ++i) StartJob(replicas[i].front(), id, jobs[i]);
  for (size_t i = 0; i < replicas.size(); ++i) {
    v1::ToWorker message;
    v1::Assignment* assignment = message.mutable_assignment();
    assignment->set_wave_id(id);
    if (jobs[i] == nullptr) {
      *assignment->mutable_walk()->mutable_settings() = jobs[0]->snapshot.settings();
    } else {
      v1::WaveRequest* request = assignment->mutable_request();
      request->set_job_id(jobs[i]->spec.id);
      request->set_prompt(jobs[i]->spec.prompt);
      request->set_negative_prompt(jobs[i]->spec.negative_prompt);
      *request->mutable_settings() = jobs[i]->snapshot.settings();
      request->set_output_format(jobs[i]->spec.output_format);
      request->set_trace(jobs[i]->spec.trace);
    }
    for (int rank : replicas[i]) links_->Send(rank, message);
  }
}

WaveForecast Scheduler::Forecast(const std::vector<std::shared_ptr<Job>>& jobs) const {
  WaveForecast slowest;
  if (!options_.forecast) return slowest;
  for (const std::shared_ptr<Job>& job : jobs) {
    if (job == nullptr) continue;
    const WaveForecast forecast = options_.forecast(job->spec);
    slowest.until_decoding = std::max(slowest.until_decoding, forecast.until_decoding);
    slowest.decoding = std::max(slowest.decoding, forecast.decoding);
  }
  return slowest;
}

void Scheduler::StartJob(int rank, uint64_t wave, const std::shared_ptr<Job>& job) {
  job->rank = rank;
  job->source = ResultSource{links_->result_queue(rank), wave};
  job->snapshot.clear_progress();
  job->snapshot.set_state(v1::JOB_STATE_ADMITTED);
  *job->snapshot.mutable_start_time() = ToProto(absl::Now());
  metrics_->requests().Started(absl::Now() - job->spec.create_time);
  job->source->queue->Open(wave, [this, rank, wave, listener = job->listener] {
    Post([this, rank, wave, listener] {
      NoteProgress(rank, wave);
      if (auto locked = listener.lock()) locked->OnResult();
    });
  });
  if (auto listener = job->listener.lock()) listener->OnStarted(*job->source);
  TellSnapshot(*job);
}

void Scheduler::CancelWave(const std::shared_ptr<Job>& job) {
  if (!job->source) return;
  job->source->queue->Close(job->source->wave);
  const RankPlace& place = places_[job->rank];
  Domain& domain = domains_[place.domain];
  if (!domain.wave || domain.wave->replica(place.replica).job != job) return;
  domain.wave->replica(place.replica).job = nullptr;
  for (int rank : domain.ranks.replicas[place.replica]) {
    links_->Send(rank, CancelMessage(domain.wave->id()));
  }
}

void Scheduler::End(const std::shared_ptr<Job>& job, const grpc::Status& status) {
  if (job->source) job->source->queue->Close(job->source->wave);
  // Before the client hears of it: it may send the same id again.
  Forget(job);
  if (auto listener = job->listener.lock()) listener->OnEnd(status);
}

void Scheduler::TellSnapshot(const Job& job) {
  if (auto listener = job.listener.lock()) {
    v1::GenerateEvent event;
    *event.mutable_job() = job.snapshot;
    listener->OnEvent(std::move(event));
  }
}

void Scheduler::TellQueuePositions(absl::Time now) {
  if (changed_from_ >= former_.size()) changed_from_ = std::numeric_limits<size_t>::max();
  if (changed_from_ >= former_.size() || next_positions_ > now) return;
  next_positions_ = now + kPositionInterval;
  for (size_t i = changed_from_; i < former_.size(); ++i) {
    Job& job = *active_.at(former_.id(i));
    job.snapshot.mutable_progress()->set_queue_position(static_cast<int>(i) + 1);
    if (auto listener = job.listener.lock()) {
      v1::GenerateEvent event;
      *event.mutable_progress() = job.snapshot.progress();
      listener->OnEvent(std::move(event));
    }
  }
  changed_from_ = std::numeric_limits<size_t>::max();
}

}  // namespace dlo
