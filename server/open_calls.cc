#include "server/open_calls.h"

#include <grpcpp/support/server_interceptor.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/match.h"

namespace dlo {

// Made when a call begins and destroyed when all of it was sent.
class OpenCalls::Call : public grpc::experimental::Interceptor {
 public:
  explicit Call(OpenCalls* calls) : calls_(calls) {
    absl::MutexLock lock(&calls_->mutex_);
    ++calls_->count_;
  }
  ~Call() override {
    absl::MutexLock lock(&calls_->mutex_);
    --calls_->count_;
  }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    methods->Proceed();
  }

 private:
  OpenCalls* const calls_;
};

class OpenCalls::Factory : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Factory(OpenCalls* calls) : calls_(calls) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    const bool endless = absl::StartsWith(info->method(), "/grpc.");
    return endless ? nullptr : new Call(calls_);
  }

 private:
  OpenCalls* const calls_;
};

void OpenCalls::Watch(grpc::ServerBuilder* builder) {
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> factories;
  factories.push_back(std::make_unique<Factory>(this));
  builder->experimental().SetInterceptorCreators(std::move(factories));
}

bool OpenCalls::WaitNone(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  const auto none = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return count_ == 0; };
  return mutex_.AwaitWithDeadline(absl::Condition(&none), deadline);
}

}  // namespace dlo
