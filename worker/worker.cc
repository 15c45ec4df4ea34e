#include "worker/worker.h"

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "runtime/communicator.h"
#include "worker/link_client.h"
#include "worker/wave_runner.h"

namespace dlo {
namespace {

// Time for the last messages to leave and for dlo-serve to end the stream.
constexpr absl::Duration kCloseTimeout = absl::Seconds(2);

// What the link's threads hand to the thread that works.
class Mailbox : public LinkHandler {
 public:
  void OnAssignment(v1::Assignment assignment) override {
    absl::MutexLock lock(&mutex_);
    assignment_ = std::move(assignment);
  }

  void OnCancel(uint64_t wave) override {
    absl::MutexLock lock(&mutex_);
    if (runner_ != nullptr) runner_->Cancel(wave);
  }

  void OnDrain() override {
    absl::MutexLock lock(&mutex_);
    drain_ = true;
  }

  void OnClosed(absl::Status status) override {
    if (status.ok()) return;
    spdlog::error("rank's link to dlo-serve: {}", std::string(status.message()));
    spdlog::default_logger()->flush();
    _exit(kExitLinkLost);
  }

  v1::Heartbeat CurrentHeartbeat() override {
    absl::MutexLock lock(&mutex_);
    return runner_ == nullptr ? v1::Heartbeat() : runner_->CurrentHeartbeat();
  }

  void SetRunner(WaveRunner* runner) {
    absl::MutexLock lock(&mutex_);
    runner_ = runner;
  }

  // The next assignment; nothing when it is time to exit.
  std::optional<v1::Assignment> Take() {
    absl::MutexLock lock(&mutex_);
    const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return drain_ || assignment_.has_value();
    };
    mutex_.Await(absl::Condition(&ready));
    return std::exchange(assignment_, std::nullopt);
  }

 private:
  absl::Mutex mutex_;
  std::optional<v1::Assignment> assignment_ ABSL_GUARDED_BY(mutex_);
  WaveRunner* runner_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool drain_ ABSL_GUARDED_BY(mutex_) = false;
};

// Whatever the working thread is stuck in, perhaps a collective that never ends, is left as it is.
void ExitIfFromParent(int signal, siginfo_t* info, void* context) {
  if (info->si_pid == getppid()) _exit(kExitTerminated);
}

void HandleSignals() {
  signal(SIGINT, SIG_IGN);
  signal(SIGPIPE, SIG_IGN);
  struct sigaction action = {};
  action.sa_sigaction = ExitIfFromParent;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
}

// The ranks to blame for an error of the weight group.
std::vector<int> BlamedRanks(const absl::Status& status, const std::vector<int>& weight_ranks) {
  std::vector<int> ranks;
  for (int peer : PeersOfError(status)) {
    if (peer >= 0 && peer < static_cast<int>(weight_ranks.size())) {
      ranks.push_back(weight_ranks[peer]);
    }
  }
  return ranks;
}

}  // namespace

int RunWorker(const WorkerOptions& options, const PipelineLoader& load) {
  HandleSignals();
  const int flags = fcntl(options.link_fd, F_GETFL);
  if (flags < 0 || fcntl(options.link_fd, F_SETFL, flags | O_NONBLOCK) < 0) {
    spdlog::error("--link-fd={} is not an open descriptor; dlo-serve starts its workers itself",
                  options.link_fd);
    return 1;
  }

  v1::Hello hello;
  hello.set_protocol_version(kLinkProtocolVersion);
  hello.set_build_id(options.build_id);
  hello.set_rank(options.rank);
  hello.set_pid(getpid());
  hello.set_incarnation(options.incarnation);
  Mailbox mailbox;
  LinkClient link(grpc::CreateInsecureChannelFromFd("dlo-serve", options.link_fd), hello, &mailbox);

  absl::StatusOr<LoadedPipeline> loaded = load();
  v1::FromWorker message;
  if (!loaded.ok()) {
    spdlog::error("cannot load the model: {}", std::string(loaded.status().message()));
    message.mutable_load_failed()->set_code(static_cast<int>(loaded.status().code()));
    message.mutable_load_failed()->set_message(std::string(loaded.status().message()));
    link.Send(std::move(message));
    link.Close(kCloseTimeout);
    return 1;
  }
  WaveRunner runner(loaded->pipeline.get(), options.rank,
                    [&link](v1::FromWorker m) { return link.Send(std::move(m)); });
  mailbox.SetRunner(&runner);
  message.mutable_ready();
  link.Send(std::move(message));
  while (std::optional<v1::Assignment> assignment = mailbox.Take()) {
    const absl::Status status = runner.Run(*assignment);
    if (status.ok()) continue;
    spdlog::error("the rank can do nothing more: {}", std::string(status.message()));
    message.mutable_group_broken()->set_message(std::string(status.message()));
    for (int rank : BlamedRanks(status, loaded->weight_ranks)) {
      message.mutable_group_broken()->add_blamed_ranks(rank);
    }
    link.Send(std::move(message));
    link.Close(kCloseTimeout);
    spdlog::default_logger()->flush();
    // Destroying the pipeline would wait for streams that wait for peers.
    _exit(kExitGroupBroken);
  }
  link.Close(kCloseTimeout);
  mailbox.SetRunner(nullptr);
  return 0;
}

}  // namespace dlo
