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
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "models/model_card.h"
#include "server/forecaster.h"
#include "server/generation_service.h"
#include "server/job_manager.h"
#include "server/job_store.h"
#include "server/scheduler.h"
#include "server/supervisor.h"
#include "server/worker_link_service.h"

namespace dlo {

struct FrontendOptions {
  std::string listen = "127.0.0.1:0";  // host:port (port 0: any free one) or unix:path
  // The parts' own counts and domains are set from it.
  std::vector<DispatchDomain> domains = IndependentReplicas(1);
  SchedulerOptions scheduler;
  SupervisorOptions supervisor;
  WorkerLinkOptions links;
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
  // UNAVAILABLE when `listen` cannot be bound; see also JobStore::Open.
  static absl::StatusOr<std::unique_ptr<Frontend>> Start(FrontendOptions options,
                                                         std::shared_ptr<const ModelCard> card);
  // Shutdown without grace.
  ~Frontend() override;

  // With the port that was chosen.
  const std::string& address() const { return address_; }

  // What waits in a rank's result queue for its clients.
  int64_t result_bytes_waiting(int rank) { return links_.result_queue(rank)->bytes(); }

  // Replies that belonged to no running wave.
  int64_t late_replies() const { return scheduler_.late_replies(); }

  // Refuses new requests, leaves queued ones to the next start, finishes what runs within `grace`,
  // ends the rest, stops the workers. Idempotent.
  void Shutdown(absl::Duration grace);

 private:
  Frontend(FrontendOptions options, std::shared_ptr<const ModelCard> card,
           std::unique_ptr<JobStore> store);
  absl::Status Listen();
  void StartWorkers();
  void SetDomainReady(int domain, bool ready);
  SchedulerOptions SchedulerOptionsWithHook();

  void OnAttached(int rank) override;
  void OnReady(int rank) override;
  void OnStartFailed(int rank, absl::Status why) override;
  void OnDetached(int rank, uint64_t incarnation, std::string reason) override;
  void OnGroupBroken(int rank, v1::GroupBroken broken) override;
  void OnHeartbeat(int rank, v1::Heartbeat heartbeat) override;
  void OnProgress(int rank, v1::WaveProgress progress) override;
  void OnFinished(int rank, uint64_t wave) override;
  void OnFailed(int rank, v1::WaveFailed failed) override;

  const FrontendOptions options_;
  std::string address_;

  // In the order of their dependence; the supervisor goes first, the servers before the services
  // they call.
  Forecaster forecaster_;
  WorkerLinkService links_;
  Scheduler scheduler_;
  JobManager jobs_;
  GenerationService service_;
  std::unique_ptr<grpc::Server> link_server_;
  std::unique_ptr<grpc::Server> public_server_;
  std::unique_ptr<Supervisor> supervisor_;

  absl::Mutex mutex_;
  std::vector<bool> domain_ready_ ABSL_GUARDED_BY(mutex_);
  bool serving_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace dlo
