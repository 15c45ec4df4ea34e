#include "server/generation_service.h"

#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "proto/convert.h"
#include "server/request_resolution.h"
#include "server/status_details.h"

namespace dlo {
namespace {

// Events that wait for the client; beyond it the newest progress takes the place of the one before.
constexpr size_t kPendingEventsMax = 256;

// One Generate call. Kept alive by gRPC until OnDone.
class GenerateCall : public grpc::ServerWriteReactor<v1::GenerateEvent>, public JobListener {
 public:
  explicit GenerateCall(Scheduler* scheduler) : scheduler_(scheduler) {}

  void Begin(std::shared_ptr<GenerateCall> self, JobSpec spec) {
    job_ = std::make_shared<Job>(std::move(spec), self);
    self_ = std::move(self);
    scheduler_->Submit(job_);
  }

  void Refuse(std::shared_ptr<GenerateCall> self, const grpc::Status& status) {
    self_ = std::move(self);
    OnEnd(status);
  }

  void OnEvent(v1::GenerateEvent event) override {
    absl::MutexLock lock(&mutex_);
    if (end_) return;
    if (event.has_job()) last_job_ = event.job();
    if (event.has_progress() && pending_.size() >= kPendingEventsMax &&
        pending_.back().has_progress()) {
      pending_.back() = std::move(event);
    } else {
      pending_.push_back(std::move(event));
    }
    Pump();
  }

  void OnStarted(ResultSource source) override {
    absl::MutexLock lock(&mutex_);
    source_ = std::move(source);
  }

  void OnResult() override {
    absl::MutexLock lock(&mutex_);
    ++results_announced_;
    Pump();
  }

  void OnEnd(grpc::Status status) override {
    absl::MutexLock lock(&mutex_);
    EndWith(std::move(status));
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) EndWith(grpc::Status::CANCELLED);
    Pump();
  }

  void OnCancel() override {
    // Also the client's deadline ends here.
    if (job_ != nullptr) scheduler_->Release(job_);
    absl::MutexLock lock(&mutex_);
    EndWith(grpc::Status::CANCELLED);
  }

  void OnDone() override {
    if (job_ != nullptr) scheduler_->Release(std::move(job_));
    const std::shared_ptr<GenerateCall> last = std::move(self_);
  }

 private:
  void EndWith(grpc::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (end_) return;
    pending_.clear();
    source_.reset();
    end_ = std::move(status);
    Pump();
  }

  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_) return;
    if (pending_.empty() && !end_ && source_ && results_announced_ > 0) TakeResult();
    if (!pending_.empty()) {
      out_ = std::move(pending_.front());
      pending_.pop_front();
      writing_ = true;
      StartWrite(&out_);
    } else if (end_) {
      finished_ = true;
      Finish(*end_);
    }
  }

  // Makes the next piece of the result, if it is there, the next event.
  void TakeResult() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::optional<ResultItem> item = source_->queue->Pop(source_->wave);
    if (!item) return;
    --results_announced_;
    v1::GenerateEvent event;
    if (auto* chunk = std::get_if<v1::ResultChunk>(&*item)) {
      if (chunk->offset() != bytes_sent_) return FailResult(chunk->offset());
      bytes_sent_ += static_cast<int64_t>(chunk->data().size());
      *event.mutable_chunk() = std::move(*chunk);
      pending_.push_back(std::move(event));
      return;
    }
    auto& finished = std::get<v1::WaveFinished>(*item);
    if (finished.size_bytes() != bytes_sent_) return FailResult(finished.size_bytes());
    FillLastJob(std::move(finished));
    *event.mutable_job() = last_job_;
    pending_.push_back(std::move(event));
    source_.reset();
    end_ = grpc::Status::OK;
    // Before the client hears of it: it may send the same id again.
    scheduler_->Release(job_);
  }

  void FailResult(int64_t position) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    source_.reset();
    end_ = StatusWithReason(grpc::StatusCode::INTERNAL, "RESULT_INCOMPLETE",
                            absl::StrCat("the worker's result has a gap: ", bytes_sent_,
                                         " bytes came, the next message stands at ", position));
  }

  void FillLastJob(v1::WaveFinished finished) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    last_job_.set_state(v1::JOB_STATE_SUCCEEDED);
    last_job_.mutable_progress()->set_step(last_job_.settings().num_inference_steps());
    last_job_.mutable_progress()->set_num_steps(last_job_.settings().num_inference_steps());
    *last_job_.mutable_end_time() = ToProto(absl::Now());
    v1::Result* result = last_job_.mutable_result();
    result->set_size_bytes(finished.size_bytes());
    result->set_sha256(finished.sha256());
    result->set_media_type(finished.media_type());
    *result->mutable_times() = std::move(*finished.mutable_times());
    *result->mutable_times()->mutable_queue() =
        ToProto(FromProto(last_job_.start_time()) - FromProto(last_job_.create_time()));
    *result->add_ranks() = std::move(*finished.mutable_usage());
  }

  Scheduler* const scheduler_;
  std::shared_ptr<GenerateCall> self_;
  std::shared_ptr<Job> job_;

  absl::Mutex mutex_;
  std::deque<v1::GenerateEvent> pending_ ABSL_GUARDED_BY(mutex_);
  v1::GenerateEvent out_ ABSL_GUARDED_BY(mutex_);
  v1::Job last_job_ ABSL_GUARDED_BY(mutex_);
  std::optional<ResultSource> source_ ABSL_GUARDED_BY(mutex_);
  // A result may be taken only once it was announced: then every event that came before it is in
  // `pending_`.
  int results_announced_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t bytes_sent_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

grpc::ServerWriteReactor<v1::GenerateEvent>* GenerationService::Generate(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  auto call = std::make_shared<GenerateCall>(scheduler_);
  GenerateCall* const reactor = call.get();
  JobSpec spec;
  const std::vector<FieldViolation> wrong = ResolveRequest(*card_, *request, &spec);
  if (!wrong.empty()) {
    reactor->Refuse(std::move(call), BadRequestStatus(wrong));
    return reactor;
  }
  spec.create_time = absl::Now();
  spec.deadline = absl::FromChrono(context->deadline());
  reactor->Begin(std::move(call), std::move(spec));
  return reactor;
}

}  // namespace dlo
