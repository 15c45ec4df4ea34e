// The standard health service (grpc.health.v1), with one answer for the server as a whole and for
// each service that it was told of.
//
//   HealthService health({"dlo.v1.VideoGeneration"});
//   builder.RegisterService(&health);
//   health.SetServing(true);
//
// It says NOT_SERVING until it is told otherwise; gRPC's own says SERVING between the binding of
// the port and the first status that it is given. Check of a name that is not known is NOT_FOUND,
// Watch tells SERVICE_UNKNOWN. A watcher that reads slowly misses what did not last. Thread-safe;
// outlives the server.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace dlo {

class HealthService : public grpc::health::v1::Health::CallbackService {
 public:
  explicit HealthService(const std::vector<std::string>& services);
  ~HealthService() override;

  void SetServing(bool serving);
  // NOT_SERVING for good.
  void Shutdown();

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context,
                                  const grpc::health::v1::HealthCheckRequest* request,
                                  grpc::health::v1::HealthCheckResponse* response) override;
  grpc::ServerWriteReactor<grpc::health::v1::HealthCheckResponse>* Watch(
      grpc::CallbackServerContext* context,
      const grpc::health::v1::HealthCheckRequest* request) override;

 private:
  using ServingStatus = grpc::health::v1::HealthCheckResponse::ServingStatus;
  class WatchCall;

  ServingStatus StatusOf(const std::string& name) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void Forget(WatchCall* call);

  std::set<std::string> names_;  // with the empty one, the server's
  absl::Mutex mutex_;
  bool serving_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<WatchCall*, std::unique_ptr<WatchCall>> watchers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dlo
