// dlo-serve without its configuration: the public server, the scheduler, the links and the
// supervisor, put together.
//
//   ASSIGN_OR_RETURN(auto frontend, Frontend::Start(options, card));
//   frontend->Shutdown(absl::Seconds(30));  // finishes what runs
//
// Start returns when the public port listens. Health says SERVING while at least one dispatch
// domain is ready, which is when a request that comes will be worked on; how many domains there are
// to work is not its matter. Thread-safe.
#pragma once

#include <grpcpp/server.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "models/model_card.h"
#include "proto/link_channel.h"
#include "server/forecaster.h"
#include "server/generation_service.h"
#include "server/health_service.h"
#include "server/job_manager.h"
#include "server/job_store.h"
#include "server/metrics.h"
#include "server/metrics_server.h"
#include "server/open_calls.h"
#include "server/scheduler.h"
#include "server/status_board.h"
#include "server/supervisor.h"
#include "server/worker_link_service.h"

namespace dlo {

// Where the workers of ranks on other hosts attach.
struct RemoteWorkers {
  std::vector<int> ranks;
  std::string listen;  // host:port (port 0: any free one)
  LinkTls tls;
  LinkKeepalive keepalive;
};

struct FrontendOptions {
  std::string listen = "127.0.0.1:0";  // host:port (port 0: any free one) or unix:path
  std::string metrics_listen;          // HOST:PORT; empty: metrics are not served
  // Counts for all parts; null: a new one. Those of the parts are set from it.
  std::shared_ptr<ServerMetrics> metrics;
  // The parts' own counts and domains are set from it.
  std::vector<DispatchDomain> domains = IndependentReplicas(1);
  SchedulerOptions scheduler;
  SupervisorOptions supervisor;
  WorkerLinkOptions links;
  std::optional<RemoteWorkers> remote;
  // How often clients may at most ask whether the server lives, and after what silence the server
  // asks them; one that does not answer within as long again has gone.
  absl::Duration client_ping_interval_min = absl::Seconds(10);
  absl::Duration client_silence_max = absl::Minutes(1);
  JobStoreOptions store;  // its folder has no default
  JobManagerOptions jobs;
  ForecasterOptions forecaster;
  // Told when the service starts and stops being able to work.
  std::function<void(bool serving)> on_serving;
  // Told once, when the workers cannot be kept alive. Must not call Shutdown itself.
  std::function<void(absl::Status)> on_failure;
};

class Frontend : private LinkEvents {
 public:
  // UNAVAILABLE when `listen`, `metrics_listen` or `remote.listen` cannot be bound; see also
  // JobStore::Open.
  static absl::StatusOr<std::unique_ptr<Frontend>> Start(FrontendOptions options,
                                                         std::shared_ptr<const ModelCard> card);
  // Shutdown without grace.
  ~Frontend() override;

  // With the port that was chosen.
  const std::string& address() const { return address_; }
  // Empty if metrics are not served.
  std::string metrics_address() const {
    return metrics_server_ == nullptr ? "" : metrics_server_->address();
  }
  const std::string& worker_address() const { return worker_address_; }

  // What waits in a rank's result queue for its clients.
  int64_t result_bytes_waiting(int rank) { return links_.result_queue(rank)->bytes(); }

  // Replies that belonged to no running wave.
  int64_t late_replies() const { return scheduler_.late_replies(); }

  // Refuses new requests, leaves queued ones to the next start, finishes what runs and delivers
  // what is asked for within `grace`, ends the rest, stops the workers. Idempotent.
  void Shutdown(absl::Duration grace);

 private:
  Frontend(FrontendOptions options, std::shared_ptr<const ModelCard> card,
           std::unique_ptr<JobStore> store);
  absl::Status Listen();
  absl::Status ListenForWorkers();
  absl::Status StartWorkers();
  void SetDomainReady(int domain, bool ready);
  SchedulerOptions SchedulerOptionsWithHook();

  void OnAttached(int rank, uint64_t incarnation) override;
  void OnStartup(int rank, v1::StartupRecord record) override;
  void OnReady(int rank) override;
  void OnStartFailed(int rank, absl::Status why) override;
  void OnDetached(int rank, uint64_t incarnation, std::string reason) override;
  void OnGroupBroken(int rank, v1::GroupBroken broken) override;
  void OnHeartbeat(int rank, v1::Heartbeat heartbeat) override;
  void OnProgress(int rank, v1::WaveProgress progress) override;
  void OnFinished(int rank, const v1::WaveFinished& finished) override;
  void OnFailed(int rank, v1::WaveFailed failed) override;

  const FrontendOptions options_;
  std::string address_;
  std::unique_ptr<MetricsServer> metrics_server_;
  std::string worker_address_;

  // In the order of their dependence; the supervisor goes first, the servers before the services
  // they call.
  Forecaster forecaster_;
  WorkerLinkService links_;
  RemoteWorkerLinkService remote_links_{&links_};
  Scheduler scheduler_;
  JobManager jobs_;
  StatusBoard board_;
  GenerationService service_;
  HealthService health_;
  OpenCalls calls_;
  std::unique_ptr<grpc::Server> link_server_;
  std::unique_ptr<grpc::Server> remote_link_server_;  // null: all ranks are on this host
  std::unique_ptr<grpc::Server> public_server_;
  std::unique_ptr<Supervisor> supervisor_;

  absl::Mutex mutex_;
  std::vector<bool> domain_ready_ ABSL_GUARDED_BY(mutex_);
  bool serving_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace dlo
