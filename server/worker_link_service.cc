#include "server/worker_link_service.h"

#include <spdlog/spdlog.h>

#include <atomic>
#include <deque>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "proto/build_id.h"
#include "proto/convert.h"

namespace dlo {

// One stream. Kept alive by gRPC until OnDone and by the service while it is the rank's.
class LinkSession : public grpc::ServerBidiReactor<v1::FromWorker, v1::ToWorker> {
 public:
  // `peer` is the address of a worker on another host; empty: it is ours.
  LinkSession(WorkerLinkService* service, LinkEvents* events, std::string peer)
      : service_(service), events_(events), peer_(std::move(peer)) {}

  bool remote() const { return !peer_.empty(); }
  const std::string& peer() const { return peer_; }

  void Begin(std::shared_ptr<LinkSession> self) {
    self_ = std::move(self);
    ReadOn();
  }

  void Send(v1::ToWorker message) {
    absl::MutexLock lock(&mutex_);
    outbox_.push_back(std::move(message));
    Pump();
  }

  void End(grpc::Status status) {
    absl::MutexLock lock(&mutex_);
    if (!end_) end_ = std::move(status);
    Pump();
  }

  // Once for each message that was read.
  void ReadOn() {
    absl::MutexLock lock(&mutex_);
    held_back_ = false;
    last_heard_ = absl::Now();
    if (!finished_) StartRead(&in_);
  }

  absl::Time LastHeard() const {
    absl::MutexLock lock(&mutex_);
    return held_back_ ? absl::Now() : last_heard_;
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      Detach("closed the link");
      End(grpc::Status::OK);
      return;
    }
    if (!greeted_) {
      Greet();
      return;
    }
    if (!service_->IsCurrent(rank_, incarnation_)) return;
    Handle();
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) {
      outbox_.clear();
      if (!end_) end_ = grpc::Status(grpc::StatusCode::UNAVAILABLE, "the link broke");
    }
    Pump();
  }

  void OnCancel() override {
    Detach("lost the link");
    End(grpc::Status::CANCELLED);
  }

  void OnDone() override {
    Detach("lost the link");
    const std::shared_ptr<LinkSession> last = std::move(self_);
  }

 private:
  void Greet() {
    std::string refusal = "the first message must be Hello";
    uint64_t incarnation = 0;
    if (in_.has_hello()) refusal = service_->Register(in_.hello(), self_, &incarnation);
    if (!refusal.empty()) {
      spdlog::error("refused a worker{}: {}", remote() ? " from " + peer_ : "", refusal);
      if (!remote() && service_->IsCurrent(in_.hello().rank(), in_.hello().incarnation())) {
        events_->OnStartFailed(in_.hello().rank(), absl::FailedPreconditionError(
                                                       absl::StrCat("was refused: ", refusal)));
      }
      End(grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, refusal));
      return;
    }
    greeted_ = true;
    rank_ = in_.hello().rank();
    incarnation_ = incarnation;
    if (remote()) {
      spdlog::info("rank {}: worker {} attached from {}", rank_, in_.hello().pid(), peer_);
    }
    events_->OnAttached(rank_, incarnation_);
    if (!remote()) service_->Welcome(rank_, {});
    ReadOn();
  }

  void Handle() {
    switch (in_.message_case()) {
      case v1::FromWorker::kReady:
        if (in_.ready().has_startup()) {
          events_->OnStartup(rank_, std::move(*in_.mutable_ready()->mutable_startup()));
        }
        events_->OnReady(rank_);
        break;
      case v1::FromWorker::kLoadFailed: {
        const v1::LoadFailed& failed = in_.load_failed();
        if (failed.has_startup()) events_->OnStartup(rank_, failed.startup());
        events_->OnStartFailed(
            rank_, absl::Status(static_cast<absl::StatusCode>(failed.code()),
                                absl::StrCat("could not load the model: ", failed.message())));
        break;
      }
      case v1::FromWorker::kGroupBroken:
        events_->OnGroupBroken(rank_, std::move(*in_.mutable_group_broken()));
        break;
      case v1::FromWorker::kProgress:
        events_->OnProgress(rank_, std::move(*in_.mutable_progress()));
        break;
      case v1::FromWorker::kFailed:
        events_->OnFailed(rank_, std::move(*in_.mutable_failed()));
        break;
      case v1::FromWorker::kChunk:
        Push(in_.chunk().wave_id(), std::move(*in_.mutable_chunk()->mutable_chunk()));
        return;
      case v1::FromWorker::kFinished: {
        // The rank is free before the result is taken: from here on its loss no longer ends this
        // wave.
        const uint64_t wave = in_.finished().wave_id();
        events_->OnFinished(rank_, in_.finished());
        Push(wave, std::move(*in_.mutable_finished()));
        return;
      }
      case v1::FromWorker::kHeartbeat:
        events_->OnHeartbeat(rank_, std::move(*in_.mutable_heartbeat()));
        break;
      default:
        break;
    }
    ReadOn();
  }

  // Either Push or, once there is room, the queue's callback reads on.
  void Push(uint64_t wave, ResultItem item) {
    {
      absl::MutexLock lock(&mutex_);
      held_back_ = true;
    }
    if (service_->result_queue(rank_)->Push(wave, std::move(item))) ReadOn();
  }

  void Detach(std::string reason) {
    if (greeted_) service_->Deregister(rank_, incarnation_, this, std::move(reason));
  }

  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_) return;
    if (!outbox_.empty()) {
      out_ = std::move(outbox_.front());
      outbox_.pop_front();
      writing_ = true;
      StartWrite(&out_);
    } else if (end_) {
      finished_ = true;
      Finish(*end_);
    }
  }

  WorkerLinkService* const service_;
  LinkEvents* const events_;
  const std::string peer_;
  std::shared_ptr<LinkSession> self_;
  v1::FromWorker in_;

  // Written before the first event of the rank, on the reading thread.
  std::atomic<bool> greeted_ = false;
  int rank_ = -1;
  uint64_t incarnation_ = 0;

  mutable absl::Mutex mutex_;
  std::deque<v1::ToWorker> outbox_ ABSL_GUARDED_BY(mutex_);
  v1::ToWorker out_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool held_back_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time last_heard_ ABSL_GUARDED_BY(mutex_);
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
};

WorkerLinkService::WorkerLinkService(WorkerLinkOptions options, LinkEvents* events)
    : options_(std::move(options)), events_(events), ranks_(options_.num_ranks) {
  for (Rank& rank : ranks_) rank.queue = std::make_shared<ResultQueue>(options_.result_limits);
  for (int rank : options_.remote_ranks) ranks_[rank].remote = true;
}

WorkerLinkService::~WorkerLinkService() = default;

void WorkerLinkService::Expect(int rank, uint64_t incarnation) {
  std::shared_ptr<LinkSession> old;
  {
    absl::MutexLock lock(&mutex_);
    ranks_[rank].incarnation = incarnation;
    old = std::move(ranks_[rank].session);
    ranks_[rank].session = nullptr;
  }
  if (old != nullptr) {
    old->End(grpc::Status(grpc::StatusCode::ABORTED, "the rank is started again"));
  }
}

void WorkerLinkService::EndRemote(int rank, uint64_t incarnation) {
  std::shared_ptr<LinkSession> old;
  {
    absl::MutexLock lock(&mutex_);
    if (ranks_[rank].incarnation != incarnation) return;
    // The next attachment takes the number after it.
    ++ranks_[rank].incarnation;
    old = std::move(ranks_[rank].session);
    ranks_[rank].session = nullptr;
  }
  if (old != nullptr) {
    old->End(grpc::Status(grpc::StatusCode::ABORTED, "its dispatch domain is started again"));
  }
}

void WorkerLinkService::Welcome(int rank, const std::vector<std::string>& arguments) {
  v1::ToWorker message;
  *message.mutable_welcome()->mutable_heartbeat_interval() = ToProto(options_.heartbeat_interval);
  for (const std::string& argument : arguments) message.mutable_welcome()->add_arguments(argument);
  Send(rank, std::move(message));
}

absl::Time WorkerLinkService::LastHeard(int rank) const {
  std::shared_ptr<LinkSession> session;
  {
    absl::MutexLock lock(&mutex_);
    session = ranks_[rank].session;
  }
  return session == nullptr ? absl::InfinitePast() : session->LastHeard();
}

void WorkerLinkService::Send(int rank, v1::ToWorker message) {
  std::shared_ptr<LinkSession> session;
  {
    absl::MutexLock lock(&mutex_);
    session = ranks_[rank].session;
  }
  if (session != nullptr) session->Send(std::move(message));
}

std::shared_ptr<ResultQueue> WorkerLinkService::result_queue(int rank) {
  absl::MutexLock lock(&mutex_);
  return ranks_[rank].queue;
}

grpc::ServerBidiReactor<v1::FromWorker, v1::ToWorker>* WorkerLinkService::Attach(
    grpc::CallbackServerContext* context) {
  auto session = std::make_shared<LinkSession>(this, events_, /*peer=*/"");
  LinkSession* const reactor = session.get();
  reactor->Begin(std::move(session));
  return reactor;
}

grpc::ServerBidiReactor<v1::FromWorker, v1::ToWorker>* WorkerLinkService::AttachRemote(
    grpc::CallbackServerContext* context) {
  auto session = std::make_shared<LinkSession>(this, events_, context->peer());
  LinkSession* const reactor = session.get();
  reactor->Begin(std::move(session));
  return reactor;
}

std::string WorkerLinkService::Register(const v1::Hello& hello,
                                        const std::shared_ptr<LinkSession>& session,
                                        uint64_t* incarnation) {
  if (hello.protocol_version() != kLinkProtocolVersion) {
    return absl::StrCat("dlo-worker speaks link protocol ", hello.protocol_version(),
                        ", dlo-serve ", kLinkProtocolVersion, "; install both from one build");
  }
  if (hello.build_id() != options_.build_id) {
    return absl::StrCat("dlo-worker is build ", hello.build_id(), ", dlo-serve is build ",
                        options_.build_id, "; install both from one build");
  }
  absl::MutexLock lock(&mutex_);
  std::string refusal = CheckPlace(hello, session->remote());
  if (!refusal.empty()) return refusal;
  Rank& rank = ranks_[hello.rank()];
  if (rank.remote) ++rank.incarnation;
  *incarnation = rank.incarnation;
  rank.session = session;
  rank.queue->SetOnRoom([weak = std::weak_ptr<LinkSession>(session)] {
    if (auto locked = weak.lock()) locked->ReadOn();
  });
  return "";
}

std::string WorkerLinkService::CheckPlace(const v1::Hello& hello, bool remote) const {
  if (hello.rank() < 0 || hello.rank() >= static_cast<int>(ranks_.size())) {
    return absl::StrCat("rank ", hello.rank(), " is not in 0..", ranks_.size() - 1);
  }
  const Rank& rank = ranks_[hello.rank()];
  if (remote && !rank.remote) {
    return absl::StrCat("rank ", hello.rank(), " is started by dlo-serve itself; from other hosts ",
                        RemoteRanks(), " may attach (worker.remote_ranks)");
  }
  if (!rank.remote && hello.incarnation() != rank.incarnation) {
    return absl::StrCat("rank ", hello.rank(), " is at start ", rank.incarnation,
                        ", this worker belongs to start ", hello.incarnation());
  }
  if (rank.session == nullptr) return "";
  return absl::StrCat("rank ", hello.rank(), " is already attached",
                      remote ? ", from " + rank.session->peer() : "");
}

std::string WorkerLinkService::RemoteRanks() const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].remote) ranks.push_back(static_cast<int>(rank));
  }
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

void WorkerLinkService::Deregister(int rank, uint64_t incarnation, const LinkSession* session,
                                   std::string reason) {
  std::shared_ptr<LinkSession> last;
  {
    absl::MutexLock lock(&mutex_);
    if (ranks_[rank].session.get() != session) return;
    last = std::move(ranks_[rank].session);
    ranks_[rank].session = nullptr;
  }
  events_->OnDetached(rank, incarnation, std::move(reason));
}

bool WorkerLinkService::IsCurrent(int rank, uint64_t incarnation) const {
  absl::MutexLock lock(&mutex_);
  return rank >= 0 && rank < static_cast<int>(ranks_.size()) &&
         ranks_[rank].incarnation == incarnation;
}

}  // namespace dlo
