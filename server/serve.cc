#include "server/serve.h"

#include <poll.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/topology.h"
#include "loader/model_path.h"
#include "models/model_card.h"
#include "models/model_plan.h"
#include "proto/build_id.h"
#include "server/frontend.h"

namespace dlo {
namespace {

// What ends the server: a signal, or the workers.
class EndEvents {
 public:
  EndEvents() : failure_fd_(eventfd(0, EFD_CLOEXEC)) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    signal(SIGPIPE, SIG_IGN);
    // A write beyond the limit on file sizes is an error, like one to a full disk.
    signal(SIGXFSZ, SIG_IGN);
    signal_fd_ = signalfd(-1, &signals, SFD_CLOEXEC);
  }
  ~EndEvents() {
    close(failure_fd_);
    close(signal_fd_);
  }

  void Fail(absl::Status failure) {
    {
      absl::MutexLock lock(&mutex_);
      failure_ = std::move(failure);
    }
    Wake();
  }
  absl::Status failure() {
    absl::MutexLock lock(&mutex_);
    return failure_;
  }

  // Ends the next Wait.
  void Wake() { eventfd_write(failure_fd_, 1); }

  // The signal that came, or 0 for Fail and Wake.
  int Wait() {
    std::array<pollfd, 2> fds = {{{signal_fd_, POLLIN, 0}, {failure_fd_, POLLIN, 0}}};
    while (poll(fds.data(), fds.size(), -1) < 0) {
    }
    signalfd_siginfo info;
    if ((fds[0].revents & POLLIN) != 0 && read(signal_fd_, &info, sizeof(info)) == sizeof(info)) {
      return static_cast<int>(info.ssi_signo);
    }
    eventfd_t count;
    eventfd_read(failure_fd_, &count);
    return 0;
  }

 private:
  int signal_fd_ = -1;
  const int failure_fd_;
  absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

absl::StatusOr<FrontendOptions> ToFrontendOptions(const ServeConfig& config,
                                                  const std::filesystem::path& model,
                                                  const InstallLayout& layout) {
  ASSIGN_OR_RETURN(const Topology topology, Topology::Create({.dp = config.parallel.dp}));
  FrontendOptions options;
  const WeightTransfer transfer = topology.EffectiveTransfer(config.offload.transfer);
  options.domains = DispatchDomains(topology, transfer);
  if (transfer != config.offload.transfer) {
    spdlog::info("offload.transfer is {}: with one replica there is nothing to gather",
                 std::string(WeightTransferName(transfer)));
  }
  options.forecaster.transfer = std::string(WeightTransferName(transfer));
  if (transfer != WeightTransfer::kNone) {
    const std::optional<GroupKind> group = topology.WeightGroup(transfer);
    options.forecaster.sharers =
        group ? static_cast<int>(topology.Group(*group, Rank{0}).size()) : 1;
  }
  options.scheduler.max_wait = config.wave.max_wait;
  options.scheduler.wave_limits.stall_timeout = config.wave.stall_timeout;
  options.listen = config.listen;
  options.metrics_listen = config.metrics_listen;
  options.scheduler.max_waiting = config.queue_max_waiting;
  options.store = {.folder = config.data_dir, .bytes_max = config.jobs_result_bytes_max};
  options.jobs = {.result_ttl = config.jobs_result_ttl,
                  .result_bytes_max = config.jobs_result_bytes_max};
  options.links.build_id = BuildId();
  options.supervisor.worker_binary = layout.executable_dir / "dlo-worker";
  options.supervisor.worker_arguments = {
      absl::StrCat("--model=", model.string()),
      absl::StrCat("--dtype=", std::string(DTypeName(config.model.dtype))),
      absl::StrCat("--quantization=", OnlineQuantizationName(config.model.quantization)),
      absl::StrCat("--device=", config.device), absl::StrCat("--log-level=", config.log_level)};
  if (transfer != WeightTransfer::kNone) {
    for (std::string argument :
         {absl::StrCat("--dp=", config.parallel.dp),
          absl::StrCat("--transfer=", WeightTransferName(transfer)),
          absl::StrCat("--slots=", config.offload.slots),
          absl::StrCat("--resident-layers=", config.offload.resident_layers),
          absl::StrCat("--checkpoint-mmap=",
                       CheckpointMmapName(config.host_weights.checkpoint_mmap)),
          absl::StrCat("--host-weights-mode=", hwr::ModeName(config.host_weights.mode)),
          absl::StrCat("--host-weights-root=", config.host_weights.root.string()),
          absl::StrCat("--host-weights-validation=",
                       hwr::ValidationName(config.host_weights.validation)),
          absl::StrCat("--host-weights-max-store-bytes=", config.host_weights.max_store_bytes),
          absl::StrCat("--host-weights-min-free-bytes=", config.host_weights.min_free_bytes),
          absl::StrCat("--host-weights-wait-s=", absl::ToInt64Seconds(config.host_weights.wait)),
          absl::StrCat("--model-from-hub=", model.string() != config.model.path ? "true" : "false"),
          absl::StrCat("--device-memory-limit=", config.offload.device_memory_limit_bytes),
          absl::StrCat("--host-memory-limit=", config.offload.host_memory_limit_bytes),
          // A peer computes at its own pace between two collectives, for as long as a wave may be
          // without progress.
          absl::StrCat(
              "--collective-timeout-s=",
              absl::ToInt64Seconds(absl::Ceil(config.wave.stall_timeout, absl::Seconds(1))))}) {
      options.supervisor.worker_arguments.push_back(std::move(argument));
    }
  }
  options.supervisor.visits = {.factor = static_cast<double>(config.wave.stuck_factor),
                               .floor = config.wave.stuck_floor};
  const int local_ranks = topology.world_size() - config.remote.ranks;
  if (config.remote.ranks > 0) {
    RemoteWorkers& remote = options.remote.emplace();
    remote.listen = config.remote.listen;
    ASSIGN_OR_RETURN(remote.tls, LoadLinkTls(config.remote.tls));
    for (int rank = local_ranks; rank < topology.world_size(); ++rank) {
      remote.ranks.push_back(rank);
    }
  }
  PlacementOptions placement{.num_ranks = local_ranks,
                             .threads = config.worker_threads,
                             .threads_set = getenv("OMP_NUM_THREADS") != nullptr,
                             .cuda = config.device == "cuda"};
  if (const char* devices = getenv("CUDA_VISIBLE_DEVICES")) placement.visible_devices = devices;
  ASSIGN_OR_RETURN(options.supervisor.placement, PlaceRanks(placement, ReadHostCores()));
  // Of the others their own hosts decide.
  options.supervisor.placement.resize(topology.world_size());
  return options;
}

absl::StatusOr<std::unique_ptr<Frontend>> StartFrontend(const ServeConfig& config,
                                                        const InstallLayout& layout,
                                                        EndEvents* end) {
  ASSIGN_OR_RETURN(const std::filesystem::path model, ResolveModelPath(config.model.path));
  ASSIGN_OR_RETURN(std::unique_ptr<ModelCard> card, ReadModelCard(model));
  spdlog::info("dlo-serve {}: model {} from {}", BuildId(), card->name(), model.string());
  ASSIGN_OR_RETURN(FrontendOptions options, ToFrontendOptions(config, model, layout));
  std::shared_ptr<const ModelCard> shared_card = std::move(card);
  // How many kResidentLayersAuto are, only the workers know; then none are counted.
  options.forecaster.work = [card = shared_card, model = config.model,
                             resident =
                                 std::max(0, config.offload.resident_layers)](const JobSpec& spec) {
    return WorkOf(*card, model.dtype,
                  {spec.settings, spec.prompt, spec.negative_prompt, resident, model.quantization});
  };
  if (config.wave.compatibility == WaveCompatibility::kSchedule) {
    options.scheduler.wave_key =
        [card = shared_card](const JobSpec& spec) -> absl::StatusOr<std::string> {
      ASSIGN_OR_RETURN(const VisitPlan plan, VisitPlanOf(*card, spec.settings));
      return plan.digest();
    };
  }
  options.on_failure = [end](absl::Status failure) { end->Fail(std::move(failure)); };
  return Frontend::Start(std::move(options), std::move(shared_card));
}

// The kernel kills the workers with us and everything else of ours is unnamed; only a listening
// socket's file is left to remove.
[[noreturn]] void ExitAtOnce(const ServeConfig& config, int signal) {
  spdlog::warn("second signal: exiting at once");
  spdlog::default_logger()->flush();
  absl::string_view listen = config.listen;
  if (absl::ConsumePrefix(&listen, "unix:")) unlink(std::string(listen).c_str());
  _exit(128 + signal);
}

}  // namespace

int Serve(const ServeConfig& config, const InstallLayout& layout) {
  EndEvents end;
  StartLogging("dlo-serve", config.log_level);
  for (const std::string& notice : config.notices) spdlog::warn("{}", notice);
  absl::StatusOr<std::unique_ptr<Frontend>> frontend = StartFrontend(config, layout, &end);
  if (!frontend.ok()) {
    spdlog::error("{}", std::string(frontend.status().message()));
    return 1;
  }
  absl::Duration grace = config.shutdown_grace;
  if (end.Wait() == 0) {
    spdlog::error("{}", std::string(end.failure().message()));
    grace = absl::ZeroDuration();
  } else {
    spdlog::info("shutting down: finishing what runs, for at most {}", absl::FormatDuration(grace));
  }
  std::atomic<bool> finished = false;
  std::thread shutdown([&] {
    (*frontend)->Shutdown(grace);
    finished = true;
    end.Wake();
  });
  while (!finished) {
    if (const int signal = end.Wait(); signal != 0) ExitAtOnce(config, signal);
  }
  shutdown.join();
  frontend->reset();
  if (!end.failure().ok()) return 1;
  spdlog::info("stopped");
  return 0;
}

}  // namespace dlo
