#include "server/scheduler.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/convert.h"
#include "server/status_details.h"

namespace dlo {
namespace {

constexpr size_t kStepsAveraged = 8;
constexpr absl::Duration kStallCheckInterval = absl::Seconds(1);
// Submissions that the thread has not looked at yet; beyond it the caller is refused without it.
constexpr int kSubmissionsInInboxMax = 4096;

grpc::Status ShuttingDown() {
  return StatusWithReason(grpc::StatusCode::UNAVAILABLE, "SHUTTING_DOWN",
                          "the server is shutting down; send the request again");
}

grpc::Status RankLostStatus(int rank, const RankLoss& loss) {
  std::map<std::string, std::string> metadata = {{"rank", absl::StrCat(rank)}};
  if (loss.signal) metadata["signal"] = absl::StrCat(*loss.signal);
  if (loss.exit_code) metadata["exit_code"] = absl::StrCat(*loss.exit_code);
  return StatusWithReason(grpc::StatusCode::UNAVAILABLE, "RANK_LOST",
                          absl::StrCat("the worker of rank ", rank, " ", loss.cause,
                                       "; it is being restarted, send the request again"),
                          metadata);
}

v1::ToWorker CancelMessage(uint64_t wave) {
  v1::ToWorker message;
  message.mutable_cancel()->set_wave_id(wave);
  return message;
}

}  // namespace

Scheduler::Scheduler(SchedulerOptions options, RankLinks* links)
    : options_(options), links_(links), ranks_(options.num_ranks), thread_([this] { Loop(); }) {}

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

void Scheduler::OnRankReady(int rank) {
  Post([this, rank] {
    ranks_[rank].ready = true;
    Dispatch();
  });
}

void Scheduler::OnRankLost(int rank, RankLoss loss) {
  Post([this, rank, loss = std::move(loss)] { HandleRankLost(rank, loss); });
}

void Scheduler::OnProgress(int rank, v1::WaveProgress progress) {
  Post([this, rank, progress = std::move(progress)] { HandleProgress(rank, progress); });
}

void Scheduler::OnFinished(int rank, uint64_t wave) {
  Post([this, rank, wave] {
    Rank& r = ranks_[rank];
    if (r.wave != wave) return;
    if (r.job != nullptr) {
      const absl::Duration run_time = absl::Now() - FromProto(r.job->snapshot.start_time());
      mean_run_time_ =
          mean_run_time_ == absl::ZeroDuration() ? run_time : mean_run_time_ * 0.8 + run_time * 0.2;
    }
    FreeRank(r);
    Dispatch();
  });
}

void Scheduler::OnFailed(int rank, v1::WaveFailed failed) {
  Post([this, rank, failed = std::move(failed)] { HandleFailed(rank, failed); });
}

void Scheduler::Drain() {
  Post([this] {
    draining_ = true;
    const std::deque<std::shared_ptr<Job>> waiting = std::exchange(waiting_, {});
    for (const std::shared_ptr<Job>& job : waiting) End(job, ShuttingDown());
  });
}

void Scheduler::EndAll(grpc::Status status) {
  Post([this, status = std::move(status)] {
    waiting_.clear();
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
  }
}

absl::Time Scheduler::NextTimer() const {
  absl::Time next = next_stall_check_;
  for (const std::shared_ptr<Job>& job : waiting_) next = std::min(next, job->spec.deadline);
  return next;
}

void Scheduler::RunTimers() {
  const absl::Time now = absl::Now();
  for (size_t i = 0; i < waiting_.size();) {
    if (waiting_[i]->spec.deadline > now) {
      ++i;
      continue;
    }
    const std::shared_ptr<Job> job = waiting_[i];
    waiting_.erase(waiting_.begin() + i);
    End(job, grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED,
                          "the client's deadline passed while the request was queued"));
    TellQueuePositions(i);
  }
  const bool delivering = std::any_of(active_.begin(), active_.end(), [](const auto& entry) {
    return entry.second->source.has_value();
  });
  if (!delivering) {
    next_stall_check_ = absl::InfiniteFuture();
  } else if (next_stall_check_ == absl::InfiniteFuture()) {
    next_stall_check_ = now + std::min(kStallCheckInterval, options_.client_stall_timeout);
  } else if (next_stall_check_ <= now) {
    CheckStalledClients();
    next_stall_check_ = now + std::min(kStallCheckInterval, options_.client_stall_timeout);
  }
}

void Scheduler::CheckStalledClients() {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const std::shared_ptr<ResultQueue> queue = links_->result_queue(static_cast<int>(rank));
    const auto wave = queue->StalledSince(absl::Now() - options_.client_stall_timeout);
    if (!wave) continue;
    const auto stalled = std::find_if(active_.begin(), active_.end(), [&](const auto& entry) {
      const auto& source = entry.second->source;
      return source && source->queue == queue && source->wave == *wave;
    });
    if (stalled == active_.end()) continue;
    const std::shared_ptr<Job> job = stalled->second;
    spdlog::warn("job {}: the client has taken nothing for {}; giving it up", job->spec.id,
                 absl::FormatDuration(options_.client_stall_timeout));
    CancelWave(job);
    End(job, StatusWithReason(grpc::StatusCode::ABORTED, "CLIENT_TOO_SLOW",
                              absl::StrCat("the result was not read for ",
                                           absl::FormatDuration(options_.client_stall_timeout))));
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
  const bool rank_idle = std::any_of(ranks_.begin(), ranks_.end(),
                                     [](const Rank& rank) { return rank.ready && rank.wave == 0; });
  if (!rank_idle && waiting_.size() >= static_cast<size_t>(options_.max_waiting)) {
    return End(job, QueueFullStatus(
                        options_.max_waiting,
                        std::max(absl::Seconds(1), absl::Ceil(mean_run_time_, absl::Seconds(1)))));
  }
  active_[job->spec.id] = job;
  waiting_.push_back(job);
  job->snapshot.set_id(job->spec.id);
  job->snapshot.set_state(v1::JOB_STATE_QUEUED);
  *job->snapshot.mutable_settings() = ToProto(job->spec.settings);
  *job->snapshot.mutable_create_time() = ToProto(job->spec.create_time);
  job->snapshot.mutable_progress()->set_queue_position(static_cast<int>(waiting_.size()));
  TellSnapshot(*job);
  Dispatch();
}

void Scheduler::HandleRelease(const std::shared_ptr<Job>& job) {
  const auto it = std::find(waiting_.begin(), waiting_.end(), job);
  if (it != waiting_.end()) {
    const size_t position = it - waiting_.begin();
    waiting_.erase(it);
    TellQueuePositions(position);
  }
  CancelWave(job);
  Forget(job);
}

void Scheduler::Forget(const std::shared_ptr<Job>& job) {
  const auto entry = active_.find(job->spec.id);
  if (entry != active_.end() && entry->second == job) active_.erase(entry);
}

void Scheduler::HandleProgress(int rank, const v1::WaveProgress& progress) {
  Rank& r = ranks_[rank];
  if (r.wave == 0 || r.wave != progress.wave_id() || r.job == nullptr) return;
  Job& job = *r.job;
  const absl::Time now = absl::Now();
  job.snapshot.mutable_progress()->set_step(progress.step());
  job.snapshot.mutable_progress()->set_num_steps(progress.num_steps());
  if (job.snapshot.state() != progress.stage()) {
    job.snapshot.set_state(progress.stage());
    r.last_step = now;
    TellSnapshot(job);
    return;
  }
  r.step_times.push_back(now - r.last_step);
  if (r.step_times.size() > kStepsAveraged) r.step_times.pop_front();
  r.last_step = now;
  absl::Duration sum;
  for (absl::Duration time : r.step_times) sum += time;
  const absl::Duration step_time = sum / static_cast<int64_t>(r.step_times.size());
  v1::Progress* snapshot = job.snapshot.mutable_progress();
  *snapshot->mutable_step_time() = ToProto(step_time);
  *snapshot->mutable_remaining() = ToProto(step_time * (progress.num_steps() - progress.step()));
  if (auto listener = job.listener.lock()) {
    v1::GenerateEvent event;
    *event.mutable_progress() = *snapshot;
    listener->OnEvent(std::move(event));
  }
}

void Scheduler::HandleFailed(int rank, const v1::WaveFailed& failed) {
  Rank& r = ranks_[rank];
  if (r.wave == 0 || r.wave != failed.wave_id()) return;
  const std::shared_ptr<Job> job = r.job;
  FreeRank(r);
  if (job != nullptr) {
    End(job, StatusWithReason(static_cast<grpc::StatusCode>(failed.code()), failed.reason(),
                              failed.message(), {{"rank", absl::StrCat(rank)}}));
  }
  Dispatch();
}

void Scheduler::HandleRankLost(int rank, const RankLoss& loss) {
  Rank& r = ranks_[rank];
  const std::shared_ptr<Job> job = r.job;
  FreeRank(r);
  r.ready = false;
  if (job != nullptr) End(job, RankLostStatus(rank, loss));
}

void Scheduler::Dispatch() {
  bool started = false;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (waiting_.empty()) break;
    if (!ranks_[rank].ready || ranks_[rank].wave != 0) continue;
    const std::shared_ptr<Job> job = waiting_.front();
    waiting_.pop_front();
    Start(static_cast<int>(rank), job);
    started = true;
  }
  if (started) TellQueuePositions(0);
}

void Scheduler::Start(int rank, const std::shared_ptr<Job>& job) {
  Rank& r = ranks_[rank];
  r.wave = next_wave_++;
  r.job = job;
  r.step_times.clear();
  job->rank = rank;
  job->source = ResultSource{links_->result_queue(rank), r.wave};
  job->snapshot.clear_progress();
  *job->snapshot.mutable_start_time() = ToProto(absl::Now());

  job->source->queue->Open(r.wave, [this, listener = job->listener] {
    Post([listener] {
      if (auto locked = listener.lock()) locked->OnResult();
    });
  });
  if (auto listener = job->listener.lock()) listener->OnStarted(*job->source);

  v1::ToWorker message;
  v1::Assignment* assignment = message.mutable_assignment();
  assignment->set_wave_id(r.wave);
  v1::WaveRequest* request = assignment->mutable_request();
  request->set_job_id(job->spec.id);
  request->set_prompt(job->spec.prompt);
  request->set_negative_prompt(job->spec.negative_prompt);
  *request->mutable_settings() = job->snapshot.settings();
  request->set_output_format(job->spec.output_format);
  links_->Send(rank, std::move(message));
}

void Scheduler::FreeRank(Rank& rank) {
  rank.wave = 0;
  rank.job = nullptr;
}

void Scheduler::CancelWave(const std::shared_ptr<Job>& job) {
  if (!job->source) return;
  job->source->queue->Close(job->source->wave);
  Rank& r = ranks_[job->rank];
  if (r.job != job) return;
  r.job = nullptr;
  links_->Send(job->rank, CancelMessage(r.wave));
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

void Scheduler::TellQueuePositions(size_t from) {
  for (size_t i = from; i < waiting_.size(); ++i) {
    Job& job = *waiting_[i];
    job.snapshot.mutable_progress()->set_queue_position(static_cast<int>(i) + 1);
    if (auto listener = job.listener.lock()) {
      v1::GenerateEvent event;
      *event.mutable_progress() = job.snapshot.progress();
      listener->OnEvent(std::move(event));
    }
  }
}

}  // namespace dlo
