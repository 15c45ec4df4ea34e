// The server's end of the links to the workers: one stream per rank, a handshake, and the flow
// control of results.
//
//   WorkerLinkService service({.num_ranks = 2, .remote_ranks = {1}}, &events);
//   service.Expect(0, incarnation);          // then the worker may attach
//   service.Send(0, message);
//
// A stream is accepted if protocol version, build id and the rank's expected incarnation agree, and
// refused with the reason otherwise. The workers of remote ranks are started by others and attach
// when they like, through a service of their own (RemoteWorkerLinkService); each attachment gets
// the rank's next incarnation, and waits for Welcome. While a rank's result queue is full its
// stream is not read, so the worker blocks in its send and nothing accumulates here. Thread-safe.
// Events come on gRPC's threads and must not block; `events` outlives the server that the service
// is registered with.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "dlo/v1/worker_link.grpc.pb.h"
#include "server/rank.h"

namespace dlo {

class LinkEvents {
 public:
  virtual ~LinkEvents() = default;
  virtual void OnAttached(int rank, uint64_t incarnation) = 0;
  // How a start went, before OnReady or OnStartFailed.
  virtual void OnStartup(int rank, v1::StartupRecord record) = 0;
  virtual void OnReady(int rank) = 0;
  // It will not become ready: its model cannot be loaded, or it was refused. The message has the
  // worker as its subject.
  virtual void OnStartFailed(int rank, absl::Status why) = 0;
  // The stream of a rank that was attached has ended.
  virtual void OnDetached(int rank, uint64_t incarnation, std::string reason) = 0;
  virtual void OnGroupBroken(int rank, v1::GroupBroken broken) = 0;
  virtual void OnHeartbeat(int rank, v1::Heartbeat heartbeat) = 0;
  virtual void OnProgress(int rank, v1::WaveProgress progress) = 0;
  virtual void OnFinished(int rank, const v1::WaveFinished& finished) = 0;
  virtual void OnFailed(int rank, v1::WaveFailed failed) = 0;
};

struct WorkerLinkOptions {
  int num_ranks = 1;
  std::vector<int> remote_ranks;
  absl::Duration heartbeat_interval = absl::Seconds(1);
  ResultQueue::Limits result_limits;
  std::string build_id;
};

class LinkSession;

class WorkerLinkService : public v1::WorkerLink::CallbackService, public RankLinks {
 public:
  WorkerLinkService(WorkerLinkOptions options, LinkEvents* events);
  ~WorkerLinkService() override;

  // From now on only this incarnation of the local rank is heard; the stream of an earlier one is
  // ended.
  void Expect(int rank, uint64_t incarnation);

  // Lets the worker of a remote rank begin; `arguments` are its flags.
  void Welcome(int rank, const std::vector<std::string>& arguments);

  // Ends the stream of a remote rank if it is still this one. It is not heard from now on.
  void EndRemote(int rank, uint64_t incarnation);

  // When the rank was last heard. Now, while its stream is not read because its queue is full.
  absl::Time LastHeard(int rank) const;

  void Send(int rank, v1::ToWorker message) override;
  std::shared_ptr<ResultQueue> result_queue(int rank) override;

  grpc::ServerBidiReactor<v1::FromWorker, v1::ToWorker>* Attach(
      grpc::CallbackServerContext* context) override;
  // The same for a remote rank. The peer has been authenticated.
  grpc::ServerBidiReactor<v1::FromWorker, v1::ToWorker>* AttachRemote(
      grpc::CallbackServerContext* context);

 private:
  friend class LinkSession;
  struct Rank {
    bool remote = false;
    uint64_t incarnation = 0;
    std::shared_ptr<LinkSession> session;
    std::shared_ptr<ResultQueue> queue;
  };

  // Empty, or why the worker is refused; with the incarnation that it has.
  std::string Register(const v1::Hello& hello, const std::shared_ptr<LinkSession>& session,
                       uint64_t* incarnation);
  std::string CheckPlace(const v1::Hello& hello, bool remote) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string RemoteRanks() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Deregister(int rank, uint64_t incarnation, const LinkSession* session, std::string reason);
  bool IsCurrent(int rank, uint64_t incarnation) const;

  const WorkerLinkOptions options_;
  LinkEvents* const events_;
  mutable absl::Mutex mutex_;
  std::vector<Rank> ranks_ ABSL_GUARDED_BY(mutex_);
};

// What workers of remote ranks call, on a server that only lets in authenticated peers.
class RemoteWorkerLinkService : public v1::WorkerLink::CallbackService {
 public:
  explicit RemoteWorkerLinkService(WorkerLinkService* links) : links_(links) {}

  grpc::ServerBidiReactor<v1::FromWorker, v1::ToWorker>* Attach(
      grpc::CallbackServerContext* context) override {
    return links_->AttachRemote(context);
  }

 private:
  WorkerLinkService* const links_;
};

}  // namespace dlo
