#include "server/health_service.h"

#include <optional>
#include <utility>

namespace dlo {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// Lives until OnDone.
class HealthService::WatchCall : public grpc::ServerWriteReactor<HealthCheckResponse> {
 public:
  WatchCall(HealthService* service, std::string name) : service_(service), name_(std::move(name)) {}

  const std::string& name() const { return name_; }

  void Tell(ServingStatus status) {
    absl::MutexLock lock(&mutex_);
    next_ = status;
    Pump();
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) ended_ = true;
    Pump();
  }

  void OnCancel() override {
    absl::MutexLock lock(&mutex_);
    ended_ = true;
    Pump();
  }

  void OnDone() override { service_->Forget(this); }

 private:
  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_) return;
    if (ended_) {
      finished_ = true;
      Finish(grpc::Status::CANCELLED);
    } else if (next_ && next_ != told_) {
      told_ = next_;
      out_.set_status(*next_);
      writing_ = true;
      StartWrite(&out_);
    }
  }

  HealthService* const service_;
  const std::string name_;
  absl::Mutex mutex_;
  std::optional<ServingStatus> next_ ABSL_GUARDED_BY(mutex_);
  std::optional<ServingStatus> told_ ABSL_GUARDED_BY(mutex_);
  HealthCheckResponse out_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

HealthService::HealthService(const std::vector<std::string>& services)
    : names_(services.begin(), services.end()) {
  names_.insert("");
}

HealthService::~HealthService() = default;

void HealthService::SetServing(bool serving) {
  absl::MutexLock lock(&mutex_);
  serving_ = serving && !stopped_;
  for (const auto& [call, owner] : watchers_) call->Tell(StatusOf(call->name()));
}

void HealthService::Shutdown() {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  }
  SetServing(false);
}

HealthService::ServingStatus HealthService::StatusOf(const std::string& name) const {
  if (names_.count(name) == 0) return HealthCheckResponse::SERVICE_UNKNOWN;
  return serving_ ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
}

void HealthService::Forget(WatchCall* call) {
  std::unique_ptr<WatchCall> last;
  absl::MutexLock lock(&mutex_);
  const auto it = watchers_.find(call);
  last = std::move(it->second);
  watchers_.erase(it);
}

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* context,
                                               const HealthCheckRequest* request,
                                               HealthCheckResponse* response) {
  ServingStatus status;
  {
    absl::MutexLock lock(&mutex_);
    status = StatusOf(request->service());
  }
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  if (status == HealthCheckResponse::SERVICE_UNKNOWN) {
    reactor->Finish(grpc::Status(grpc::StatusCode::NOT_FOUND, "service name unknown"));
  } else {
    response->set_status(status);
    reactor->Finish(grpc::Status::OK);
  }
  return reactor;
}

grpc::ServerWriteReactor<HealthCheckResponse>* HealthService::Watch(
    grpc::CallbackServerContext* context, const HealthCheckRequest* request) {
  auto call = std::make_unique<WatchCall>(this, request->service());
  WatchCall* const reactor = call.get();
  absl::MutexLock lock(&mutex_);
  watchers_[reactor] = std::move(call);
  reactor->Tell(StatusOf(request->service()));
  return reactor;
}

}  // namespace dlo
