#include "server/generation_service.h"

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "proto/convert.h"
#include "server/raw_messages.h"
#include "server/request_resolution.h"
#include "server/status_details.h"

namespace dlo {
namespace {

// Events that wait for the client; beyond it the newest progress takes the place of the one before.
constexpr size_t kPendingEventsMax = 256;
constexpr int64_t kChunkBytes = int64_t{1} << 20;

// Reads a result piece by piece on the reading thread.
class ChunkSource {
 public:
  ChunkSource(JobManager* jobs, std::shared_ptr<ResultReader> reader, int64_t offset)
      : jobs_(jobs), reader_(std::move(reader)), offset_(offset) {}

  bool at_end() const { return offset_ >= reader_->size_bytes(); }

  // One read at a time.
  void Read(std::function<void(absl::StatusOr<v1::ResultChunk>)> then) {
    jobs_->reading_thread().Post(
        [reader = reader_, offset = offset_, then = std::move(then)]() mutable {
          absl::StatusOr<std::string> bytes = reader->Read(offset, kChunkBytes);
          if (!bytes.ok()) return then(bytes.status());
          v1::ResultChunk chunk;
          chunk.set_offset(offset);
          chunk.set_data(*std::move(bytes));
          then(std::move(chunk));
        });
    offset_ += kChunkBytes;
  }

 private:
  JobManager* const jobs_;
  const std::shared_ptr<ResultReader> reader_;
  int64_t offset_;
};

// The stream of one call: what waits to be written, then its status. Lives until gRPC's OnDone.
template <typename Message>
class StreamCall : public GenerationService::Stream,
                   public std::enable_shared_from_this<StreamCall<Message>> {
 public:
  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) EndWith(grpc::Status::CANCELLED);
    Pump();
  }

  void OnCancel() override {
    // Also the client's deadline ends here.
    absl::MutexLock lock(&mutex_);
    EndWith(grpc::Status::CANCELLED);
  }

  void OnDone() override {
    // The last reference, perhaps.
    const std::shared_ptr<StreamCall> self = std::move(self_);
  }

 protected:
  void KeepAlive(std::shared_ptr<StreamCall> self) { self_ = std::move(self); }

  // What waits is not sent any more.
  void EndWith(grpc::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (end_) return;
    pending_.clear();
    end_ = std::move(status);
    Pump();
  }

  // After what waits.
  void EndAfterAll(grpc::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (end_) return;
    end_ = std::move(status);
    Pump();
  }

  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_ || (held_ && !end_)) return;
    if (!pending_.empty()) {
      out_ = SerializeResponse(pending_.front());
      pending_.pop_front();
      writing_ = true;
      StartWrite(&out_);
    } else if (end_) {
      finished_ = true;
      Finish(*end_);
    } else {
      OnIdle();
    }
  }

  // Everything was written and the end has not come.
  virtual void OnIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {}

  absl::Mutex mutex_;
  std::deque<Message> pending_ ABSL_GUARDED_BY(mutex_);
  bool held_ ABSL_GUARDED_BY(mutex_) = false;  // nothing is written yet
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);

 private:
  std::shared_ptr<StreamCall> self_;
  grpc::ByteBuffer out_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

// A call that ends at once.
class RefusedCall : public StreamCall<v1::GenerateEvent> {
 public:
  static RefusedCall* Start(const grpc::Status& status) {
    auto call = std::make_shared<RefusedCall>();
    RefusedCall* const reactor = call.get();
    reactor->KeepAlive(std::move(call));
    absl::MutexLock lock(&reactor->mutex_);
    reactor->EndWith(status);
    return reactor;
  }
};

class DownloadCall : public StreamCall<v1::ResultChunk> {
 public:
  static DownloadCall* Start(JobManager* jobs, const v1::DownloadResultRequest& request) {
    auto call = std::make_shared<DownloadCall>();
    DownloadCall* const reactor = call.get();
    reactor->KeepAlive(call);
    jobs->OpenResult(request.id(), request.timeline() ? ResultPart::kTimeline : ResultPart::kVideo,
                     [call, jobs, offset = request.offset()](const grpc::Status& status,
                                                             std::shared_ptr<ResultReader> reader) {
                       call->Begin(jobs, offset, status, std::move(reader));
                     });
    return reactor;
  }

 private:
  void Begin(JobManager* jobs, int64_t offset, const grpc::Status& status,
             std::shared_ptr<ResultReader> reader) {
    absl::MutexLock lock(&mutex_);
    if (!status.ok()) return EndWith(status);
    if (offset < 0 || offset > reader->size_bytes()) {
      return EndWith(grpc::Status(grpc::StatusCode::OUT_OF_RANGE,
                                  absl::StrCat("offset is ", offset, ", but the result has ",
                                               reader->size_bytes(), " bytes")));
    }
    source_.emplace(jobs, std::move(reader), offset);
    Pump();
  }

  void OnIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) override {
    if (!source_ || reading_) return;
    if (source_->at_end()) return EndAfterAll(grpc::Status::OK);
    reading_ = true;
    source_->Read([self = std::static_pointer_cast<DownloadCall>(shared_from_this())](
                      absl::StatusOr<v1::ResultChunk> chunk) { self->Take(std::move(chunk)); });
  }

  void Take(absl::StatusOr<v1::ResultChunk> chunk) {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    if (end_) return;
    if (!chunk.ok()) return EndWith(ToGrpcStatus(chunk.status()));
    pending_.push_back(*std::move(chunk));
    Pump();
  }

  std::optional<ChunkSource> source_ ABSL_GUARDED_BY(mutex_);
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
};

// WatchJob.
class WatchCall : public StreamCall<v1::GenerateEvent>, public JobWatcher {
 public:
  static WatchCall* Start(JobManager* jobs, const std::string& id) {
    auto call = std::make_shared<WatchCall>(jobs, id);
    WatchCall* const reactor = call.get();
    reactor->KeepAlive(call);
    jobs->Watch(id, std::move(call));
    return reactor;
  }

  WatchCall(JobManager* jobs, std::string id) : jobs_(jobs), id_(std::move(id)) {}

  void OnEvent(const v1::GenerateEvent& event) override {
    absl::MutexLock lock(&mutex_);
    if (end_) return;
    if (event.has_job() && IsLast(event.job())) last_job_ = event.job();
    TakeEvent(event);
    Pump();
  }

  void OnEnd(const grpc::Status& status) override {
    absl::MutexLock lock(&mutex_);
    EndAfterAll(last_job_ ? grpc::Status::OK : status);
  }

  void OnCancel() override {
    jobs_->Unwatch(id_, this);
    StreamCall::OnCancel();
  }

 protected:
  static bool IsLast(const v1::Job& job) { return job.has_expire_time(); }

  void TakeEvent(const v1::GenerateEvent& event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (event.has_progress() && pending_.size() >= kPendingEventsMax &&
        pending_.back().has_progress()) {
      pending_.back() = event;
    } else {
      pending_.push_back(event);
    }
  }

  JobManager* const jobs_;
  const std::string id_;
  std::optional<v1::Job> last_job_ ABSL_GUARDED_BY(mutex_);
};

// Generate: submits, watches, and sends the video before the last Job.
class GenerateCall : public WatchCall {
 public:
  static GenerateCall* Start(JobManager* jobs, JobSpec spec) {
    auto call = std::make_shared<GenerateCall>(jobs, spec.id);
    GenerateCall* const reactor = call.get();
    reactor->KeepAlive(call);
    {
      absl::MutexLock lock(&reactor->mutex_);
      // The client hears of nothing that a crash could make undone.
      reactor->held_ = true;
    }
    jobs->Submit(std::move(spec), call,
                 [call](const grpc::Status& status, const v1::Job&, bool created) {
                   call->Accept(status, created);
                 });
    return reactor;
  }

  // The answer to validate_only.
  static GenerateCall* Answer(JobManager* jobs, v1::Job job) {
    auto call = std::make_shared<GenerateCall>(jobs, "");
    GenerateCall* const reactor = call.get();
    reactor->KeepAlive(std::move(call));
    absl::MutexLock lock(&reactor->mutex_);
    *reactor->pending_.emplace_back().mutable_job() = std::move(job);
    reactor->EndAfterAll(grpc::Status::OK);
    return reactor;
  }

  using WatchCall::WatchCall;

  void OnEvent(const v1::GenerateEvent& event) override {
    absl::MutexLock lock(&mutex_);
    if (end_) return;
    if (event.has_job() && IsLast(event.job())) {
      last_job_ = event.job();
      if (event.job().state() == v1::JOB_STATE_SUCCEEDED) return;  // after the video
    }
    TakeEvent(event);
    Pump();
  }

  void OnEnd(const grpc::Status& status) override {
    if (!status.ok()) {
      absl::MutexLock lock(&mutex_);
      return EndAfterAll(status);
    }
    jobs_->OpenResult(id_, ResultPart::kVideo,
                      [self = std::static_pointer_cast<GenerateCall>(shared_from_this())](
                          const grpc::Status& opened, std::shared_ptr<ResultReader> reader) {
                        self->BeginVideo(opened, std::move(reader));
                      });
  }

  void OnCancel() override {
    bool cancel = false;
    {
      absl::MutexLock lock(&mutex_);
      cancel = created_ && !last_job_;
      cancelled_ = true;
    }
    if (cancel) CancelJob();
    WatchCall::OnCancel();
  }

 private:
  void Accept(const grpc::Status& status, bool created) {
    bool cancel = false;
    {
      absl::MutexLock lock(&mutex_);
      held_ = false;
      created_ = created && status.ok();
      cancel = created_ && cancelled_;
      if (status.ok()) {
        Pump();
      } else {
        EndWith(status);
      }
    }
    if (cancel) CancelJob();
  }

  void CancelJob() {
    jobs_->Cancel(id_, [](const grpc::Status&, const v1::Job&) {});
  }

  void BeginVideo(const grpc::Status& status, std::shared_ptr<ResultReader> reader) {
    absl::MutexLock lock(&mutex_);
    if (!status.ok()) return EndAfterAll(status);
    source_.emplace(jobs_, std::move(reader), 0);
    Pump();
  }

  void OnIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) override {
    if (!source_ || reading_) return;
    if (source_->at_end()) {
      *pending_.emplace_back().mutable_job() = *last_job_;
      return EndAfterAll(grpc::Status::OK);
    }
    reading_ = true;
    source_->Read([self = std::static_pointer_cast<GenerateCall>(shared_from_this())](
                      absl::StatusOr<v1::ResultChunk> chunk) { self->Take(std::move(chunk)); });
  }

  void Take(absl::StatusOr<v1::ResultChunk> chunk) {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    if (end_) return;
    if (!chunk.ok()) return EndWith(ToGrpcStatus(chunk.status()));
    *pending_.emplace_back().mutable_chunk() = *std::move(chunk);
    Pump();
  }

  bool created_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<ChunkSource> source_ ABSL_GUARDED_BY(mutex_);
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
};

// Of a call with one answer: `handle` gets its request and what sends the response.
template <typename Request, typename Response>
grpc::ServerUnaryReactor* AnswerUnary(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* body, grpc::ByteBuffer* answer,
    const std::function<void(const Request&,
                             std::function<void(const grpc::Status&, const Response&)>)>& handle) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  Request request;
  if (const grpc::Status status = ParseRequest(*body, &request); !status.ok()) {
    reactor->Finish(status);
    return reactor;
  }
  handle(request, [reactor, answer](const grpc::Status& status, const Response& response) {
    if (status.ok()) *answer = SerializeResponse(response);
    reactor->Finish(status);
  });
  return reactor;
}

}  // namespace

// The answer to validate_only.
v1::Job GenerationService::ResolvedJob(const JobSpec& spec) const {
  v1::Job job;
  *job.mutable_settings() = ToProto(spec.settings);
  *job.mutable_forecast() = forecaster_->Forecast(spec);
  return job;
}

grpc::Status GenerationService::Refuse(const std::vector<FieldViolation>& wrong) const {
  metrics_->requests().Refused("INVALID_ARGUMENT");
  return BadRequestStatus(wrong);
}

GenerationService::Stream* GenerationService::Generate(Context* context, const Bytes* body) {
  v1::GenerateRequest request;
  if (const grpc::Status status = ParseRequest(*body, &request); !status.ok()) {
    return RefusedCall::Start(status);
  }
  JobSpec spec;
  const std::vector<FieldViolation> wrong = ResolveRequest(*card_, request, &spec);
  if (!wrong.empty()) return RefusedCall::Start(Refuse(wrong));
  if (request.validate_only()) return GenerateCall::Answer(jobs_, ResolvedJob(spec));
  spec.create_time = absl::Now();
  spec.deadline = absl::FromChrono(context->deadline());
  return GenerateCall::Start(jobs_, std::move(spec));
}

GenerationService::Unary* GenerationService::SubmitJob(Context* context, const Bytes* body,
                                                       Bytes* job) {
  return AnswerUnary<v1::GenerateRequest, v1::Job>(
      context, body, job, [this](const v1::GenerateRequest& request, JobManager::Reply reply) {
        JobSpec spec;
        const std::vector<FieldViolation> wrong = ResolveRequest(*card_, request, &spec);
        if (!wrong.empty()) return reply(Refuse(wrong), v1::Job());
        if (request.validate_only()) return reply(grpc::Status::OK, ResolvedJob(spec));
        spec.create_time = absl::Now();
        jobs_->Submit(
            std::move(spec), nullptr,
            [reply = std::move(reply)](const grpc::Status& status, const v1::Job& submitted, bool) {
              reply(status, submitted);
            });
      });
}

GenerationService::Unary* GenerationService::GetJob(Context* context, const Bytes* body,
                                                    Bytes* job) {
  return AnswerUnary<v1::GetJobRequest, v1::Job>(
      context, body, job, [this](const v1::GetJobRequest& request, JobManager::Reply reply) {
        jobs_->Get(request.id(), std::move(reply));
      });
}

GenerationService::Unary* GenerationService::ListJobs(Context* context, const Bytes* body,
                                                      Bytes* response) {
  return AnswerUnary<v1::ListJobsRequest, v1::ListJobsResponse>(
      context, body, response,
      [this](const v1::ListJobsRequest& request, JobManager::ListReply reply) {
        jobs_->List(request, std::move(reply));
      });
}

GenerationService::Stream* GenerationService::WatchJob(Context*, const Bytes* body) {
  v1::WatchJobRequest request;
  if (const grpc::Status status = ParseRequest(*body, &request); !status.ok()) {
    return RefusedCall::Start(status);
  }
  return WatchCall::Start(jobs_, request.id());
}

GenerationService::Stream* GenerationService::DownloadResult(Context*, const Bytes* body) {
  v1::DownloadResultRequest request;
  if (const grpc::Status status = ParseRequest(*body, &request); !status.ok()) {
    return RefusedCall::Start(status);
  }
  return DownloadCall::Start(jobs_, request);
}

GenerationService::Unary* GenerationService::CancelJob(Context* context, const Bytes* body,
                                                       Bytes* job) {
  return AnswerUnary<v1::CancelJobRequest, v1::Job>(
      context, body, job, [this](const v1::CancelJobRequest& request, JobManager::Reply reply) {
        jobs_->Cancel(request.id(), std::move(reply));
      });
}

GenerationService::Unary* GenerationService::DeleteJob(Context* context, const Bytes* body,
                                                       Bytes* response) {
  using Reply = std::function<void(const grpc::Status&, const v1::DeleteJobResponse&)>;
  return AnswerUnary<v1::DeleteJobRequest, v1::DeleteJobResponse>(
      context, body, response, [this](const v1::DeleteJobRequest& request, Reply reply) {
        jobs_->Delete(request.id(),
                      [reply = std::move(reply)](const grpc::Status& status, const v1::Job&) {
                        reply(status, v1::DeleteJobResponse());
                      });
      });
}

GenerationService::Unary* GenerationService::GetStatus(Context* context, const Bytes* body,
                                                       Bytes* response) {
  using Reply = std::function<void(const grpc::Status&, const v1::ServerStatus&)>;
  return AnswerUnary<v1::GetStatusRequest, v1::ServerStatus>(
      context, body, response, [this](const v1::GetStatusRequest&, const Reply& reply) {
        reply(grpc::Status::OK, board_->Get());
      });
}

}  // namespace dlo
