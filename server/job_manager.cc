#include "server/job_manager.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "proto/convert.h"
#include "server/status_details.h"

namespace dlo {
namespace {

constexpr int kPageSizeDefault = 50;
constexpr int kPageSizeMax = 1000;
constexpr size_t kIdShownMax = 128;

v1::Job QueuedJob(const JobSpec& spec) {
  v1::Job job;
  job.set_id(spec.id);
  job.set_state(v1::JOB_STATE_QUEUED);
  *job.mutable_settings() = ToProto(spec.settings);
  *job.mutable_create_time() = ToProto(spec.create_time);
  return job;
}

std::string SerializedRequest(const JobSpec& spec) {
  v1::GenerateRequest request;
  request.set_request_id(spec.id);
  request.set_prompt(spec.prompt);
  request.set_negative_prompt(spec.negative_prompt);
  *request.mutable_settings() = ToProto(spec.settings);
  request.set_output_format(spec.output_format);
  request.set_trace(spec.trace);
  return request.SerializeAsString();
}

// How an ended job ends the call of a client that waits for its video.
grpc::Status OutcomeOf(const v1::Job& job) {
  if (job.state() == v1::JOB_STATE_SUCCEEDED) return grpc::Status::OK;
  if (job.state() == v1::JOB_STATE_CANCELLED) {
    return grpc::Status(grpc::StatusCode::CANCELLED, "the job was cancelled");
  }
  return StatusWithReason(static_cast<grpc::StatusCode>(job.failure().code()),
                          job.failure().reason(), job.failure().message());
}

grpc::Status NotFound(const std::string& id) {
  return StatusWithReason(grpc::StatusCode::NOT_FOUND, "JOB_NOT_FOUND",
                          absl::StrCat("there is no job \"", Clip(id, kIdShownMax),
                                       "\": never submitted, deleted, or its time was up"));
}

grpc::Status StoreFailure(const absl::Status& status) {
  return StatusWithReason(static_cast<grpc::StatusCode>(status.code()),
                          absl::IsResourceExhausted(status) ? "DISK_FULL" : "STORE_FAILED",
                          absl::StrCat("the job store failed: ", status.message()));
}

grpc::Status ResultFailure(const absl::Status& status) {
  return StatusWithReason(
      static_cast<grpc::StatusCode>(status.code()),
      absl::IsResourceExhausted(status) ? "DISK_FULL" : "RESULT_NOT_STORED",
      absl::StrCat("the video was made but could not be kept: ", status.message()));
}

// Where a page ends. Opaque to clients; tied to the states that were asked for.
std::string PageToken(int64_t sequence, const std::vector<int>& states) {
  return absl::WebSafeBase64Escape(absl::StrCat(sequence, "/", absl::StrJoin(states, ",")));
}

std::optional<int64_t> ParsePageToken(const std::string& token, const std::vector<int>& states) {
  std::string text;
  if (!absl::WebSafeBase64Unescape(token, &text)) return std::nullopt;
  const std::vector<std::string> parts = absl::StrSplit(text, '/');
  int64_t sequence = 0;
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &sequence) || sequence <= 0 ||
      parts[1] != absl::StrJoin(states, ",")) {
    return std::nullopt;
  }
  return sequence;
}

}  // namespace

// One job from its submission until its end is recorded. Called by the scheduler's thread, those of
// the manager and any other.
class JobManager::LiveJob : public JobListener, public std::enable_shared_from_this<LiveJob> {
 public:
  LiveJob(JobManager* manager, JobSpec spec)
      : manager_(manager),
        disk_(manager->NextDisk()),
        spec_(std::move(spec)),
        snapshot_(QueuedJob(spec_)) {}

  // One that has a record.
  LiveJob(JobManager* manager, JobSpec spec, v1::Job snapshot)
      : manager_(manager),
        disk_(manager->NextDisk()),
        spec_(std::move(spec)),
        record_status_(grpc::Status::OK),
        snapshot_(std::move(snapshot)) {}

  void Submit(bool admitted) {
    std::shared_ptr<Job> job = std::make_shared<Job>(spec_, weak_from_this());
    job->admitted = admitted;
    {
      absl::MutexLock lock(&mutex_);
      job_ = job;
    }
    manager_->scheduler_->Submit(std::move(job));
  }

  v1::Job snapshot() {
    absl::MutexLock lock(&mutex_);
    return snapshot_;
  }
  bool is_older() {
    absl::MutexLock lock(&mutex_);
    return older_;
  }

  void AddWatcher(std::shared_ptr<JobWatcher> watcher) {
    v1::GenerateEvent event;
    grpc::Status outcome;
    Phase phase;
    {
      absl::MutexLock lock(&mutex_);
      phase = phase_;
      outcome = outcome_;
      *event.mutable_job() = snapshot_;
      if (phase <= Phase::kEnded) {
        if (phase == Phase::kRunning) watcher->OnEvent(event);
        watchers_.push_back(std::move(watcher));
        return;
      }
    }
    if (phase == Phase::kTold) watcher->OnEvent(event);
    watcher->OnEnd(outcome);
  }

  void RemoveWatcher(const JobWatcher* watcher) {
    absl::MutexLock lock(&mutex_);
    watchers_.erase(std::remove_if(watchers_.begin(), watchers_.end(),
                                   [watcher](const auto& entry) { return entry.get() == watcher; }),
                    watchers_.end());
  }

  // Once it is known whether there is a record of the job: OK, or why not.
  void WhenRecorded(std::function<void(const grpc::Status&)> then) {
    grpc::Status status;
    {
      absl::MutexLock lock(&mutex_);
      if (!record_status_) {
        when_recorded_.push_back(std::move(then));
        return;
      }
      status = *record_status_;
    }
    then(status);
  }

  // Once the end was told: OK, or why the job goes on without this server.
  void WhenEnded(std::function<void(const grpc::Status&)> then) {
    grpc::Status status;
    {
      absl::MutexLock lock(&mutex_);
      if (phase_ <= Phase::kEnded) {
        when_ended_.push_back(std::move(then));
        return;
      }
      if (phase_ == Phase::kClosed) status = outcome_;
    }
    then(status);
  }

  // A job of an earlier submission has the id. It has ended: all others are live.
  void BecomeOlderJob(v1::Job job) {
    manager_->Erase(spec_.id, this);
    {
      absl::MutexLock lock(&mutex_);
      older_ = true;
      snapshot_ = std::move(job);
      outcome_ = OutcomeOf(snapshot_);
      phase_ = Phase::kEnded;
    }
    SetRecorded(grpc::Status::OK);
    TellEnd();
  }

  void OnEvent(v1::GenerateEvent event) override {
    absl::MutexLock lock(&mutex_);
    if (phase_ > Phase::kRunning) return;
    if (event.has_job()) {
      const bool changed = event.job().state() != snapshot_.state();
      snapshot_ = event.job();
      if (phase_ == Phase::kNew && !record_status_) {
        Insert();
      } else if (changed) {
        Update();
      }
      phase_ = Phase::kRunning;
    } else if (event.has_progress()) {
      *snapshot_.mutable_progress() = event.progress();
    }
    for (const std::shared_ptr<JobWatcher>& watcher : watchers_) watcher->OnEvent(event);
  }

  void OnStarted(ResultSource source) override {
    absl::MutexLock lock(&mutex_);
    source_ = std::move(source);
  }

  void OnResult() override {
    disk_->Post([self = shared_from_this()] { self->TakeResult(); });
  }

  void OnEnd(grpc::Status status) override {
    bool refused = false;
    bool waits = false;
    {
      absl::MutexLock lock(&mutex_);
      refused = phase_ == Phase::kNew && !record_status_;
      waits = !source_ && ReasonOf(status) == kShuttingDownReason;
    }
    if (refused) {
      Close(status);
      SetRecorded(status);
    } else if (waits) {
      Close(StatusWithReason(grpc::StatusCode::UNAVAILABLE, kShuttingDownReason,
                             absl::StrCat("the server is shutting down; job ", spec_.id,
                                          " stays queued and runs after the restart")));
    } else {
      Fail(status);
    }
  }

  void Cancel() {
    Finish(
        v1::JOB_STATE_CANCELLED, [](v1::Job*) {},
        grpc::Status(grpc::StatusCode::CANCELLED, "the job was cancelled"));
  }

  void Fail(const grpc::Status& status) {
    const auto fill = [&status](v1::Job* job) {
      job->mutable_failure()->set_code(status.error_code());
      job->mutable_failure()->set_reason(ReasonOf(status));
      job->mutable_failure()->set_message(status.error_message());
    };
    if (Finish(v1::JOB_STATE_FAILED, fill, status)) {
      spdlog::warn("job {} failed: {} ({})", spec_.id, status.error_message(), ReasonOf(status));
    }
  }

 private:
  // kNew: the scheduler has not answered. kEnded: decided, not told. kClosed: over for this server
  // without an end.
  enum class Phase { kNew, kRunning, kEnded, kTold, kClosed };

  // False if the job has ended already: of a video, a cancellation and a failure the first wins.
  bool Finish(v1::JobState state, const std::function<void(v1::Job*)>& fill,
              const grpc::Status& outcome) {
    std::shared_ptr<Job> job;
    {
      absl::MutexLock lock(&mutex_);
      if (phase_ > Phase::kRunning) return false;
      phase_ = Phase::kEnded;
      outcome_ = outcome;
      const absl::Time now = absl::Now();
      snapshot_.set_state(state);
      if (snapshot_.has_progress()) {
        snapshot_.mutable_progress()->set_queue_position(0);
        snapshot_.mutable_progress()->clear_remaining();
      }
      *snapshot_.mutable_end_time() = ToProto(now);
      *snapshot_.mutable_expire_time() = ToProto(now + manager_->options_.result_ttl);
      fill(&snapshot_);
      RecordEnd();
      manager_->options_.metrics->requests().Ended(snapshot_);
      job = job_;
    }
    if (job != nullptr) manager_->scheduler_->Release(std::move(job));
    // Closes and removes a part of a video.
    disk_->Post([self = shared_from_this()] { self->writer_.reset(); });
    return true;
  }

  // Over without an end: refused, or left to the next server.
  void Close(const grpc::Status& status) {
    std::vector<std::shared_ptr<JobWatcher>> watchers;
    std::vector<std::function<void(const grpc::Status&)>> waiters;
    std::shared_ptr<Job> job;
    {
      absl::MutexLock lock(&mutex_);
      if (phase_ > Phase::kRunning) return;
      phase_ = Phase::kClosed;
      outcome_ = status;
      watchers.swap(watchers_);
      waiters.swap(when_ended_);
      job = job_;
    }
    if (job != nullptr) manager_->scheduler_->Release(std::move(job));
    manager_->Erase(spec_.id, this);
    for (const auto& watcher : watchers) watcher->OnEnd(status);
    for (const auto& waiter : waiters) waiter(status);
  }

  JobRecord Record() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    JobRecord record{.id = spec_.id, .state = snapshot_.state(), .job = {}};
    if (snapshot_.has_expire_time()) record.expire_time = FromProto(snapshot_.expire_time());
    record.result_bytes = snapshot_.result().size_bytes() + snapshot_.result().timeline_bytes();
    record.job = snapshot_.SerializeAsString();
    return record;
  }

  // The three writes of a record are asked for under the lock, so they come in order.
  void Insert() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    JobRecord record = Record();
    record.request = SerializedRequest(spec_);
    if (spec_.deadline != absl::InfiniteFuture()) record.deadline = spec_.deadline;
    manager_->records_.Run(
        [record](JobStore& store) { return store.Insert(record); },
        [self = shared_from_this()](const absl::Status& status) { self->OnInserted(status); });
  }

  // States that follow each other before the store comes to them are one write.
  void Update() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (std::exchange(update_asked_, true)) return;
    manager_->records_.Run(
        [self = shared_from_this()](JobStore& store) {
          JobRecord record;
          {
            absl::MutexLock lock(&self->mutex_);
            self->update_asked_ = false;
            // The write of the end is behind this one.
            if (self->phase_ > Phase::kRunning) return absl::OkStatus();
            record = self->Record();
          }
          return store.Update(record);
        },
        [id = spec_.id](const absl::Status& status) {
          if (status.ok() || absl::IsNotFound(status)) return;
          spdlog::warn("job {}: its state is not recorded: {}", id, std::string(status.message()));
        });
  }

  void RecordEnd() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto removed = std::make_shared<int>(0);
    manager_->records_.Run(
        [record = Record(), removed](JobStore& store) -> absl::Status {
          RETURN_IF_ERROR(store.Update(record));
          ASSIGN_OR_RETURN(*removed, store.RemoveForRoom());
          return absl::OkStatus();
        },
        [self = shared_from_this(), removed](const absl::Status& status) {
          if (status.ok() && *removed > 0) {
            spdlog::info("removed {} ended jobs to stay below jobs.result_bytes_max", *removed);
          }
          self->OnEndRecorded(status);
        },
        StoreThread::Retry::kUntilDone);
  }

  void OnInserted(const absl::Status& status) {
    if (status.ok()) return SetRecorded(grpc::Status::OK);
    spdlog::error("job {} cannot be recorded: {}", spec_.id, std::string(status.message()));
    const grpc::Status failure = StoreFailure(status);
    Close(failure);
    SetRecorded(failure);
  }

  void SetRecorded(const grpc::Status& status) {
    std::vector<std::function<void(const grpc::Status&)>> waiters;
    {
      absl::MutexLock lock(&mutex_);
      if (record_status_) return;
      record_status_ = status;
      waiters.swap(when_recorded_);
    }
    if (!status.ok()) manager_->options_.metrics->requests().Refused(ReasonOf(status));
    for (const auto& waiter : waiters) waiter(status);
  }

  void OnEndRecorded(const absl::Status& status) {
    if (status.ok() || absl::IsNotFound(status)) {
      manager_->Erase(spec_.id, this);
    } else {
      spdlog::error("job {}: its end is not recorded, trying again: {}", spec_.id,
                    std::string(status.message()));
    }
    TellEnd();
  }

  void TellEnd() {
    std::vector<std::shared_ptr<JobWatcher>> watchers;
    std::vector<std::function<void(const grpc::Status&)>> waiters;
    v1::GenerateEvent event;
    grpc::Status outcome;
    {
      absl::MutexLock lock(&mutex_);
      if (phase_ != Phase::kEnded) return;
      phase_ = Phase::kTold;
      watchers.swap(watchers_);
      waiters.swap(when_ended_);
      *event.mutable_job() = snapshot_;
      outcome = outcome_;
    }
    for (const auto& watcher : watchers) {
      watcher->OnEvent(event);
      watcher->OnEnd(outcome);
    }
    for (const auto& waiter : waiters) waiter(grpc::Status::OK);
  }

  // The rest runs on the job's disk thread.

  void TakeResult() {
    std::optional<ResultSource> source;
    {
      absl::MutexLock lock(&mutex_);
      if (phase_ > Phase::kRunning) return;
      source = source_;
    }
    if (!source) return;
    std::optional<ResultItem> item = source->queue->Pop(source->wave);
    if (!item) return;
    if (const auto* chunk = std::get_if<v1::ResultChunk>(&*item)) {
      TakeChunk(*chunk);
    } else {
      TakeFinished(std::get<v1::WaveFinished>(std::move(*item)));
    }
  }

  void TakeChunk(const v1::ResultChunk& chunk) {
    if (!writer_) {
      absl::StatusOr<AtomicFile> writer = CreateResult(manager_->store_->ResultPath(spec_.id));
      if (!writer.ok()) return FailResult(ResultFailure(writer.status()));
      writer_.emplace(*std::move(writer));
    }
    const int64_t limit = manager_->options_.result_bytes_max;
    if (chunk.offset() != writer_->size_bytes()) return FailGap(chunk.offset());
    if (writer_->size_bytes() + static_cast<int64_t>(chunk.data().size()) > limit) {
      return FailResult(StatusWithReason(
          grpc::StatusCode::RESOURCE_EXHAUSTED, "RESULT_TOO_LARGE",
          absl::StrCat("the video has more than jobs.result_bytes_max (", limit, ") bytes")));
    }
    const absl::Status written = writer_->Write(chunk.data());
    if (!written.ok()) FailResult(ResultFailure(written));
  }

  void TakeFinished(v1::WaveFinished finished) {
    const int64_t received = writer_ ? writer_->size_bytes() : 0;
    if (received == 0 || finished.size_bytes() != received) return FailGap(finished.size_bytes());
    if (const std::string sha256 = writer_->Sha256Hex(); sha256 != finished.sha256()) {
      return FailResult(StatusWithReason(
          grpc::StatusCode::DATA_LOSS, "RESULT_CORRUPT",
          absl::StrCat("the video that came has SHA-256 ", sha256, ", the worker made ",
                       Clip(finished.sha256(), kIdShownMax))));
    }
    const absl::Status committed = writer_->Commit();
    if (!committed.ok()) return FailResult(ResultFailure(committed));
    manager_->forecaster_->Learn(spec_, finished.times());
    const int64_t timeline_bytes = KeepTimeline(finished.timeline());
    const auto fill = [&finished, timeline_bytes](v1::Job* job) {
      const int steps = job->settings().num_inference_steps();
      job->mutable_progress()->set_step(steps);
      job->mutable_progress()->set_num_steps(steps);
      v1::Result* result = job->mutable_result();
      result->set_size_bytes(finished.size_bytes());
      result->set_sha256(finished.sha256());
      result->set_media_type(finished.media_type());
      result->set_timeline_bytes(timeline_bytes);
      *result->mutable_times() = std::move(*finished.mutable_times());
      *result->mutable_times()->mutable_queue() =
          ToProto(FromProto(job->start_time()) - FromProto(job->create_time()));
      *result->add_ranks() = std::move(*finished.mutable_usage());
    };
    if (!Finish(v1::JOB_STATE_SUCCEEDED, fill, grpc::Status::OK)) {
      std::error_code ignored;
      std::filesystem::remove(manager_->store_->ResultPath(spec_.id), ignored);
      std::filesystem::remove(manager_->store_->TimelinePath(spec_.id), ignored);
    }
  }

  // Writes it beside the video; returns its size, 0 if there is none. The video is worth more: a
  // timeline that cannot be kept fails nothing.
  int64_t KeepTimeline(const std::string& json) {
    if (json.empty()) return 0;
    absl::StatusOr<AtomicFile> writer = CreateResult(manager_->store_->TimelinePath(spec_.id));
    absl::Status status = writer.status();
    if (status.ok()) status = writer->Write(json);
    if (status.ok()) status = writer->Commit();
    if (status.ok()) return static_cast<int64_t>(json.size());
    spdlog::warn("job {}: its timeline is not kept: {}", spec_.id, std::string(status.message()));
    return 0;
  }

  void FailGap(int64_t position) {
    FailResult(StatusWithReason(
        grpc::StatusCode::INTERNAL, "RESULT_INCOMPLETE",
        absl::StrCat("the worker's result has a gap: ", writer_ ? writer_->size_bytes() : 0,
                     " bytes came, the next message stands at ", position)));
  }

  // The part that was written goes first: it may hold the room that the record needs.
  void FailResult(const grpc::Status& status) {
    writer_.reset();
    Fail(status);
  }

  JobManager* const manager_;
  TaskThread* const disk_;
  const JobSpec spec_;

  absl::Mutex mutex_;
  Phase phase_ ABSL_GUARDED_BY(mutex_) = Phase::kNew;
  bool older_ ABSL_GUARDED_BY(mutex_) = false;
  bool update_asked_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<grpc::Status> record_status_ ABSL_GUARDED_BY(mutex_);
  v1::Job snapshot_ ABSL_GUARDED_BY(mutex_);
  grpc::Status outcome_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Job> job_ ABSL_GUARDED_BY(mutex_);
  std::optional<ResultSource> source_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<JobWatcher>> watchers_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::function<void(const grpc::Status&)>> when_recorded_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::function<void(const grpc::Status&)>> when_ended_ ABSL_GUARDED_BY(mutex_);

  std::optional<AtomicFile> writer_;  // its disk thread's
};

JobManager::JobManager(JobManagerOptions options, std::shared_ptr<const ModelCard> card,
                       std::unique_ptr<JobStore> store, Scheduler* scheduler,
                       Forecaster* forecaster)
    : options_(options),
      card_(std::move(card)),
      scheduler_(scheduler),
      forecaster_(forecaster),
      store_(store.get()),
      records_(std::move(store)) {}

JobManager::~JobManager() { Flush(); }

absl::Status JobManager::Recover() {
  std::vector<JobRecord> unfinished;
  absl::Status status;
  records_.Run(
      [&](JobStore& store) -> absl::Status {
        ASSIGN_OR_RETURN(unfinished, store.Unfinished());
        return absl::OkStatus();
      },
      [&](const absl::Status& result) { status = result; });
  records_.Flush();
  RETURN_IF_ERROR(status);
  for (const JobRecord& record : unfinished) RecoverJob(record);
  records_.Flush();
  return absl::OkStatus();
}

void JobManager::RecoverJob(const JobRecord& record) {
  v1::Job job;
  v1::GenerateRequest request;
  const bool readable = job.ParseFromString(record.job) && request.ParseFromString(record.request);
  job.set_id(record.id);
  JobSpec spec;
  std::vector<FieldViolation> wrong;
  if (readable) wrong = ResolveRequest(*card_, request, &spec);
  spec.id = record.id;
  spec.create_time = FromProto(job.create_time());
  spec.deadline = record.deadline.value_or(absl::InfiniteFuture());

  auto live = std::make_shared<LiveJob>(this, spec, job);
  {
    absl::MutexLock lock(&mutex_);
    live_[record.id] = live;
  }
  if (!readable) {
    live->Fail(StatusWithReason(grpc::StatusCode::DATA_LOSS, "RECORD_UNREADABLE",
                                "the server was restarted and cannot read the job's record"));
  } else if (job.state() != v1::JOB_STATE_QUEUED) {
    live->Fail(
        StatusWithReason(grpc::StatusCode::UNAVAILABLE, "SERVER_RESTARTED",
                         absl::StrCat("the server ended while the job was running (",
                                      v1::JobState_Name(job.state()), "); submit it again")));
  } else if (!wrong.empty()) {
    live->Fail(StatusWithReason(
        grpc::StatusCode::INVALID_ARGUMENT, "REQUEST_NOT_VALID",
        absl::StrCat("the server was restarted with a model that cannot run the request: ",
                     wrong[0].field, ": ", wrong[0].description)));
  } else {
    spdlog::info("job {} is queued again", record.id);
    live->Submit(/*admitted=*/true);
  }
}

void JobManager::Submit(JobSpec spec, std::shared_ptr<JobWatcher> watcher, SubmitReply reply) {
  std::shared_ptr<LiveJob> live;
  bool is_new = false;
  const std::string id = spec.id;
  const bool id_is_random = spec.id_is_random;
  {
    absl::MutexLock lock(&mutex_);
    std::shared_ptr<LiveJob>& entry = live_[id];
    is_new = entry == nullptr;
    if (is_new) entry = std::make_shared<LiveJob>(this, std::move(spec));
    live = entry;
  }
  if (watcher != nullptr) live->AddWatcher(std::move(watcher));
  live->WhenRecorded([live, is_new, reply = std::move(reply)](const grpc::Status& status) {
    reply(status, live->snapshot(), is_new && !live->is_older());
  });
  if (!is_new) return;
  if (id_is_random) return live->Submit(/*admitted=*/false);
  // The id is ours from here on: nobody else inserts it.
  FindRecorded(id, [live](const grpc::Status& status, const v1::Job& job) {
    if (status.ok()) {
      live->BecomeOlderJob(job);
    } else if (status.error_code() == grpc::StatusCode::NOT_FOUND) {
      live->Submit(/*admitted=*/false);
    } else {
      live->OnEnd(status);
    }
  });
}

void JobManager::Get(const std::string& id, Reply reply) {
  const std::shared_ptr<LiveJob> live = FindLive(id);
  if (live == nullptr) return FindRecorded(id, std::move(reply));
  live->WhenRecorded([this, id, live, reply = std::move(reply)](const grpc::Status& status) {
    if (!status.ok()) return FindRecorded(id, reply);
    reply(status, live->snapshot());
  });
}

void JobManager::List(const v1::ListJobsRequest& request, ListReply reply) {
  std::vector<FieldViolation> wrong;
  std::vector<int> states(request.states().begin(), request.states().end());
  std::sort(states.begin(), states.end());
  states.erase(std::unique(states.begin(), states.end()), states.end());
  for (const int state : states) {
    if (state == v1::JOB_STATE_UNSPECIFIED || !v1::JobState_IsValid(state)) {
      wrong.push_back({"states", absl::StrCat(state, " is not a state; leave it empty for all")});
    }
  }
  if (request.page_size() < 0 || request.page_size() > kPageSizeMax) {
    wrong.push_back({"page_size", absl::StrCat(request.page_size(), " is not from 1 to ",
                                               kPageSizeMax, ", or 0 for ", kPageSizeDefault)});
  }
  int64_t before = 0;
  if (!request.page_token().empty()) {
    const std::optional<int64_t> position = ParsePageToken(request.page_token(), states);
    if (!position) {
      wrong.push_back({"page_token", "is not the next_page_token of a list of these states"});
    } else {
      before = *position;
    }
  }
  if (!wrong.empty()) return reply(BadRequestStatus(wrong), {});

  const int page_size = request.page_size() == 0 ? kPageSizeDefault : request.page_size();
  const auto records = std::make_shared<std::vector<JobRecord>>();
  records_.Run(
      [=](JobStore& store) -> absl::Status {
        ASSIGN_OR_RETURN(*records, store.List(states, before, page_size + 1));
        return absl::OkStatus();
      },
      [=, this](const absl::Status& status) {
        if (!status.ok()) return reply(StoreFailure(status), {});
        v1::ListJobsResponse response;
        if (records->size() > static_cast<size_t>(page_size)) {
          records->resize(page_size);
          response.set_next_page_token(PageToken(records->back().sequence, states));
        }
        for (const JobRecord& record : *records) {
          v1::Job job;
          job.ParseFromString(record.job);
          // A live job may be further than its record: in its steps, or with an end that the disk
          // had no room for.
          if (const std::shared_ptr<LiveJob> live = FindLive(record.id)) job = live->snapshot();
          const bool asked_for =
              states.empty() || std::binary_search(states.begin(), states.end(), job.state());
          if (asked_for) *response.add_jobs() = std::move(job);
        }
        reply(grpc::Status::OK, std::move(response));
      });
}

void JobManager::Watch(const std::string& id, std::shared_ptr<JobWatcher> watcher) {
  const auto from_record = [this, id, watcher] {
    FindRecorded(id, [this, id, watcher](const grpc::Status& status, const v1::Job& job) {
      if (!status.ok()) return watcher->OnEnd(status);
      // Submitted in between.
      if (!job.has_expire_time() && FindLive(id) != nullptr) return Watch(id, watcher);
      v1::GenerateEvent event;
      *event.mutable_job() = job;
      watcher->OnEvent(event);
      watcher->OnEnd(job.has_expire_time()
                         ? OutcomeOf(job)
                         : StatusWithReason(grpc::StatusCode::UNAVAILABLE, kShuttingDownReason,
                                            "the server is shutting down; the job stays queued"));
    });
  };
  const std::shared_ptr<LiveJob> live = FindLive(id);
  if (live == nullptr) return from_record();
  live->WhenRecorded([live, watcher, from_record](const grpc::Status& status) {
    if (!status.ok()) return from_record();
    live->AddWatcher(watcher);
  });
}

void JobManager::Unwatch(const std::string& id, const JobWatcher* watcher) {
  if (const std::shared_ptr<LiveJob> live = FindLive(id)) live->RemoveWatcher(watcher);
}

void JobManager::Cancel(const std::string& id, Reply reply) {
  const auto from_record = [this, id, reply] {
    FindRecorded(id, [this, id, reply](const grpc::Status& status, const v1::Job& job) {
      if (status.ok() && !job.has_expire_time()) {
        // Submitted in between.
        if (FindLive(id) != nullptr) return Cancel(id, reply);
        return reply(StatusWithReason(grpc::StatusCode::UNAVAILABLE, kShuttingDownReason,
                                      "the server is shutting down; the job stays queued"),
                     job);
      }
      reply(status, job);
    });
  };
  const std::shared_ptr<LiveJob> live = FindLive(id);
  if (live == nullptr) return from_record();
  live->WhenRecorded([live, reply, from_record](const grpc::Status& status) {
    if (!status.ok()) return from_record();
    live->Cancel();
    live->WhenEnded([live, reply](const grpc::Status& ended) { reply(ended, live->snapshot()); });
  });
}

void JobManager::Delete(const std::string& id, Reply reply) {
  Cancel(id, [this, id, reply](const grpc::Status& status, const v1::Job& job) {
    if (!status.ok()) return reply(status, job);
    const auto existed = std::make_shared<bool>(false);
    records_.Run(
        [id, existed](JobStore& store) -> absl::Status {
          ASSIGN_OR_RETURN(*existed, store.Remove(id));
          return absl::OkStatus();
        },
        [id, existed, reply, job](const absl::Status& removed) {
          if (!removed.ok()) return reply(StoreFailure(removed), job);
          reply(*existed ? grpc::Status::OK : NotFound(id), job);
        });
  });
}

void JobManager::OpenResult(const std::string& id, ResultPart part, ResultReply reply) {
  Get(id, [this, part, reply = std::move(reply)](const grpc::Status& status, const v1::Job& job) {
    if (!status.ok()) return reply(status, nullptr);
    OpenResultOf(job, part, reply);
  });
}

void JobManager::OpenResultOf(const v1::Job& job, ResultPart part, const ResultReply& reply) {
  const bool ended = job.has_expire_time();
  if (job.state() != v1::JOB_STATE_SUCCEEDED) {
    return reply(
        StatusWithReason(
            grpc::StatusCode::FAILED_PRECONDITION, ended ? "NO_RESULT" : "NOT_FINISHED",
            absl::StrCat("job ", job.id(), " is in state ", v1::JobState_Name(job.state()),
                         ended ? " and has no result" : "; watch it until it has succeeded")),
        nullptr);
  }
  if (part == ResultPart::kTimeline && job.result().timeline_bytes() == 0) {
    return reply(
        StatusWithReason(
            grpc::StatusCode::NOT_FOUND, "NO_TIMELINE",
            absl::StrCat("job ", job.id(), " has no timeline; it was not asked for with trace")),
        nullptr);
  }
  reading_.Post([reply, id = job.id(),
                 path = part == ResultPart::kTimeline ? store_->TimelinePath(job.id())
                                                      : store_->ResultPath(job.id())] {
    absl::StatusOr<ResultReader> reader = ResultReader::Open(path);
    if (!reader.ok()) {
      return reply(
          StatusWithReason(
              static_cast<grpc::StatusCode>(reader.status().code()), "RESULT_LOST",
              absl::StrCat("the result of job ", id, " is gone: ", reader.status().message())),
          nullptr);
    }
    reply(grpc::Status::OK, std::make_shared<ResultReader>(*std::move(reader)));
  });
}

void JobManager::Flush() {
  absl::BlockingCounter written(static_cast<int>(disk_.size()));
  for (TaskThread& disk : disk_) disk.Post([&written] { written.DecrementCount(); });
  written.Wait();
  records_.Flush();
}

std::shared_ptr<JobManager::LiveJob> JobManager::FindLive(const std::string& id) {
  absl::MutexLock lock(&mutex_);
  const auto it = live_.find(id);
  return it == live_.end() ? nullptr : it->second;
}

void JobManager::Erase(const std::string& id, const LiveJob* live) {
  std::shared_ptr<LiveJob> last;
  absl::MutexLock lock(&mutex_);
  const auto it = live_.find(id);
  if (it == live_.end() || it->second.get() != live) return;
  last = std::move(it->second);
  live_.erase(it);
}

void JobManager::FindRecorded(const std::string& id, Reply reply) {
  const auto record = std::make_shared<std::optional<JobRecord>>();
  records_.Run(
      [id, record](JobStore& store) -> absl::Status {
        ASSIGN_OR_RETURN(*record, store.Find(id));
        return absl::OkStatus();
      },
      [id, record, reply = std::move(reply)](const absl::Status& status) {
        v1::Job job;
        if (!status.ok()) return reply(StoreFailure(status), job);
        if (!*record) return reply(NotFound(id), job);
        if (!job.ParseFromString((*record)->job)) {
          return reply(StatusWithReason(grpc::StatusCode::DATA_LOSS, "RECORD_UNREADABLE",
                                        "the job's record cannot be read"),
                       job);
        }
        reply(grpc::Status::OK, job);
      });
}

}  // namespace dlo
