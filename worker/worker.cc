#include "worker/worker.h"

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "runtime/communicator.h"
#include "worker/failpoints.h"
#include "worker/link_client.h"
#include "worker/memory_sampler.h"
#include "worker/startup_record.h"
#include "worker/wave_runner.h"

namespace dlo {
namespace {

// Time for the last messages to leave and for dlo-serve to end the stream.
constexpr absl::Duration kCloseTimeout = absl::Seconds(2);

// What the link's threads hand to the thread that works.
class Mailbox : public LinkHandler {
 public:
  // `server` is the address on another host; empty: this host's.
  Mailbox(std::string server, const MemorySampler* memory)
      : server_(std::move(server)), memory_(memory) {}

  void OnWelcome(v1::Welcome welcome) override {
    absl::MutexLock lock(&mutex_);
    welcome_ = std::move(welcome);
  }

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
    spdlog::error("{}: {}", Described(status), std::string(status.message()));
    spdlog::default_logger()->flush();
    _exit(kExitLinkLost);
  }

  v1::Heartbeat CurrentHeartbeat() override {
    absl::MutexLock lock(&mutex_);
    v1::Heartbeat heartbeat = runner_ == nullptr ? v1::Heartbeat() : runner_->CurrentHeartbeat();
    *heartbeat.mutable_memory() = memory_->latest();
    return heartbeat;
  }

  void SetRunner(WaveRunner* runner) {
    absl::MutexLock lock(&mutex_);
    runner_ = runner;
  }

  // Waits for Welcome; nothing when it is time to exit.
  std::optional<v1::Welcome> WaitWelcome() {
    absl::MutexLock lock(&mutex_);
    const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return drain_ || welcome_.has_value();
    };
    mutex_.Await(absl::Condition(&ready));
    if (drain_) return std::nullopt;
    return welcome_;
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
  std::string Described(const absl::Status& status) {
    if (server_.empty()) return "rank's link to dlo-serve";
    absl::MutexLock lock(&mutex_);
    if (welcome_) return absl::StrCat("lost the link to dlo-serve at ", server_);
    if (absl::IsFailedPrecondition(status)) {
      return absl::StrCat("refused by dlo-serve at ", server_);
    }
    return absl::StrCat("cannot attach to dlo-serve at ", server_,
                        " (if it is there and closes the connection, its log says why)");
  }

  const std::string server_;
  const MemorySampler* const memory_;
  absl::Mutex mutex_;
  std::optional<v1::Welcome> welcome_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::Assignment> assignment_ ABSL_GUARDED_BY(mutex_);
  WaveRunner* runner_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool drain_ ABSL_GUARDED_BY(mutex_) = false;
};

// Whatever the working thread is stuck in, perhaps a collective that never ends, is left as it is.
void Exit(int) { _exit(kExitTerminated); }

void ExitIfFromParent(int, siginfo_t* info, void*) {
  if (info->si_pid == getppid()) _exit(kExitTerminated);
}

void HandleSignals(bool remote) {
  signal(SIGPIPE, SIG_IGN);
  if (remote) {
    signal(SIGINT, Exit);
    signal(SIGTERM, Exit);
    return;
  }
  signal(SIGINT, SIG_IGN);
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

absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const WorkerOptions& options) {
  if (options.connect.empty()) {
    const int flags = fcntl(options.link_fd, F_GETFL);
    if (flags < 0 || fcntl(options.link_fd, F_SETFL, flags | O_NONBLOCK) < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--link-fd=", options.link_fd,
                       " is not an open descriptor; dlo-serve starts its workers itself, those on "
                       "other hosts are started with --connect"));
    }
    return grpc::CreateInsecureChannelFromFd("dlo-serve", options.link_fd);
  }
  RouteGrpcLog();
  ASSIGN_OR_RETURN(const LinkTls tls, LoadLinkTls(options.tls));
  std::shared_ptr<grpc::Channel> channel = LinkChannel(options.connect, tls, options.keepalive);
  spdlog::info("connecting to dlo-serve at {}", options.connect);
  // It may come up later than we do. If it does not, the call that follows tells why.
  channel->WaitForConnected(absl::ToChronoTime(absl::Now() + options.connect_timeout));
  return channel;
}

absl::StatusOr<std::unique_ptr<FlightRecorder>> OpenRecorder(const WorkerOptions& options) {
  if (options.recorder_fd >= 0) return FlightRecorder::Open(options.recorder_fd);
  if (!options.recorder_file.empty()) return FlightRecorder::OpenFile(options.recorder_file);
  return FlightRecorder::Private();
}

// Tells dlo-serve, which ends us otherwise before it has heard.
int FailToStart(LinkClient& link, const absl::Status& status, const StartupReport& report) {
  spdlog::error("cannot load the model: {}", std::string(status.message()));
  v1::FromWorker message;
  message.mutable_load_failed()->set_code(static_cast<int>(status.code()));
  message.mutable_load_failed()->set_message(std::string(status.message()));
  *message.mutable_load_failed()->mutable_startup() = ToProto(report);
  link.Send(std::move(message));
  link.Close(kCloseTimeout);
  return 1;
}

}  // namespace

int RunWorker(const WorkerOptions& options, const PipelineLoader& load) {
  const bool remote = !options.connect.empty();
  HandleSignals(remote);
  absl::StatusOr<std::unique_ptr<FlightRecorder>> recorder = OpenRecorder(options);
  if (!recorder.ok()) {
    spdlog::error("{}", std::string(recorder.status().message()));
    return 1;
  }
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = OpenChannel(options);
  if (!channel.ok()) {
    spdlog::error("{}", std::string(channel.status().message()));
    return 1;
  }

  v1::Hello hello;
  hello.set_protocol_version(kLinkProtocolVersion);
  hello.set_build_id(options.build_id);
  hello.set_rank(options.rank);
  hello.set_pid(getpid());
  hello.set_incarnation(options.incarnation);
  MemorySampler memory;
  Mailbox mailbox(options.connect, &memory);
  LinkClient link(*channel, hello, &mailbox);
  if (remote) {
    const std::optional<v1::Welcome> welcome = mailbox.WaitWelcome();
    if (!welcome) {
      link.Close(kCloseTimeout);
      return 0;
    }
    spdlog::info("attached to dlo-serve at {}", options.connect);
    if (options.on_welcome) {
      const absl::Status status = options.on_welcome(*welcome);
      if (!status.ok()) {
        return FailToStart(link, status, {.record = {.outcome = hwr::Outcome::kFailed}});
      }
    }
  }

  const Failpoints failpoints(options.failpoints, options.rank, options.link_fd);
  const auto send = [&](v1::FromWorker m) {
    return failpoints.Send(std::move(m),
                           [&link](v1::FromWorker n) { return link.Send(std::move(n)); });
  };
  failpoints.OnLoading();
  const FlightToken loading = (*recorder)->Begin(FlightOp::kLoad);
  StartupReport report;
  absl::StatusOr<LoadedPipeline> loaded = load(recorder->get(), &report);
  (*recorder)->End(loading, loaded.ok());
  // It may have failed before anything was decided.
  if (!loaded.ok()) report.record.outcome = hwr::Outcome::kFailed;
  LogStartup(report);
  if (!loaded.ok()) return FailToStart(link, loaded.status(), report);
  WaveRunner runner(loaded->pipeline.get(), options.rank, send, recorder->get());
  mailbox.SetRunner(&runner);
  memory.SetPipeline(loaded->pipeline.get());
  v1::FromWorker ready;
  *ready.mutable_ready()->mutable_startup() = ToProto(report);
  send(std::move(ready));
  while (std::optional<v1::Assignment> assignment = mailbox.Take()) {
    const absl::Status status = runner.Run(*assignment);
    if (status.ok()) continue;
    spdlog::error("the rank can do nothing more: {}", std::string(status.message()));
    v1::FromWorker broken;
    broken.mutable_group_broken()->set_message(std::string(status.message()));
    for (int rank : BlamedRanks(status, loaded->weight_ranks)) {
      broken.mutable_group_broken()->add_blamed_ranks(rank);
    }
    link.Send(std::move(broken));
    link.Close(kCloseTimeout);
    spdlog::default_logger()->flush();
    // Destroying the pipeline would wait for streams that wait for peers.
    _exit(kExitGroupBroken);
  }
  link.Close(kCloseTimeout);
  mailbox.SetRunner(nullptr);
  memory.SetPipeline(nullptr);
  return 0;
}

}  // namespace dlo
