#include "server/frontend.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_posix.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "proto/convert.h"
#include "server/bind_error.h"
#include "server/status_details.h"
#include "server/unix_socket.h"

namespace dlo {
namespace {

// How long calls that were ended may take to reach their clients.
constexpr absl::Duration kFlushTime = absl::Seconds(2);
// How long clients may take to close their connections, once no call is left. A blocking client
// between two calls looks at its connection every few seconds only, so it is not waited for.
constexpr absl::Duration kGoodbyeTime = absl::Milliseconds(300);

FrontendOptions WithDomains(FrontendOptions options) {
  options.links.num_ranks = CountRanks(options.domains);
  options.scheduler.domains = options.domains;
  options.supervisor.domains = options.domains;
  if (options.metrics == nullptr) {
    options.metrics = std::make_shared<ServerMetrics>(options.links.num_ranks);
  }
  options.scheduler.metrics = options.metrics;
  options.supervisor.metrics = options.metrics;
  options.jobs.metrics = options.metrics;
  options.supervisor.report_folder = options.store.folder / "reports";
  if (options.remote) {
    options.links.remote_ranks = options.remote->ranks;
    options.supervisor.remote_ranks = options.remote->ranks;
  }
  return options;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Frontend>> Frontend::Start(FrontendOptions options,
                                                          std::shared_ptr<const ModelCard> card) {
  static std::once_flag once;
  std::call_once(once, [] { grpc::reflection::InitProtoReflectionServerBuilderPlugin(); });
  ASSIGN_OR_RETURN(std::unique_ptr<JobStore> store, JobStore::Open(options.store));
  std::unique_ptr<Frontend> frontend(
      new Frontend(std::move(options), std::move(card), std::move(store)));
  RETURN_IF_ERROR(frontend->jobs_.Recover());
  RETURN_IF_ERROR(frontend->Listen());
  RETURN_IF_ERROR(frontend->StartWorkers());
  return frontend;
}

Frontend::Frontend(FrontendOptions options, std::shared_ptr<const ModelCard> card,
                   std::unique_ptr<JobStore> store)
    : options_(WithDomains(std::move(options))),
      forecaster_(options_.forecaster),
      links_(options_.links, this),
      scheduler_(SchedulerOptionsWithHook(), &links_),
      jobs_(options_.jobs, card, std::move(store), &scheduler_, &forecaster_),
      board_(options_.links.num_ranks),
      service_(std::move(card), &forecaster_, &jobs_, &board_, options_.metrics),
      health_({v1::VideoGeneration::service_full_name()}),
      domain_ready_(options_.domains.size(), false) {}

Frontend::~Frontend() { Shutdown(absl::ZeroDuration()); }

absl::Status Frontend::Listen() {
  if (absl::string_view path = options_.listen; absl::ConsumePrefix(&path, "unix:")) {
    RETURN_IF_ERROR(CheckSocketFree(std::string(path)));
  }
  if (!options_.metrics_listen.empty()) {
    ASSIGN_OR_RETURN(metrics_server_, MetricsServer::Start(options_.metrics_listen,
                                                           options_.metrics->collectables()));
    spdlog::info("metrics on http://{}/metrics", metrics_server_->address());
  }
  grpc::ServerBuilder links;
  links.RegisterService(&links_);
  link_server_ = links.BuildAndStart();
  if (link_server_ == nullptr) return absl::InternalError("the workers' server does not start");

  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(options_.listen, grpc::InsecureServerCredentials(), &port);
  // With it a second server would share the port in silence.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  const auto milliseconds = [](absl::Duration duration) {
    return static_cast<int>(absl::ToInt64Milliseconds(duration));
  };
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             milliseconds(options_.client_ping_interval_min));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, milliseconds(options_.client_silence_max));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                             milliseconds(options_.client_silence_max));
  // A stream on which nothing happens for long is no reason to stop asking.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.RegisterService(&service_);
  builder.RegisterService(&health_);
  calls_.Watch(&builder);
  public_server_ = builder.BuildAndStart();
  if (public_server_ == nullptr) {
    const std::string why = FindBindError(options_.listen);
    return absl::UnavailableError(absl::StrCat("cannot listen on ", options_.listen,
                                               why.empty() ? "" : absl::StrCat(": ", why)));
  }
  address_ = options_.listen;
  if (!absl::StartsWith(address_, "unix:")) {
    address_ = absl::StrCat(address_.substr(0, address_.rfind(':')), ":", port);
  }
  return absl::OkStatus();
}

absl::Status Frontend::ListenForWorkers() {
  if (!options_.remote) return absl::OkStatus();
  RouteGrpcLog();
  const std::string& listen = options_.remote->listen;
  grpc::ServerBuilder builder;
  int port = 0;
  AddLinkPort(builder, listen, options_.remote->tls, options_.remote->keepalive, &port);
  builder.RegisterService(&remote_links_);
  remote_link_server_ = builder.BuildAndStart();
  if (remote_link_server_ == nullptr) {
    const std::string why = FindBindError(listen);
    return absl::UnavailableError(absl::StrCat("cannot listen for workers on ", listen,
                                               why.empty() ? "" : absl::StrCat(": ", why)));
  }
  worker_address_ = absl::StrCat(listen.substr(0, listen.rfind(':')), ":", port);
  spdlog::info("waiting for the workers of other hosts on {}", worker_address_);
  return absl::OkStatus();
}

SchedulerOptions Frontend::SchedulerOptionsWithHook() {
  SchedulerOptions options = options_.scheduler;
  // There is a supervisor by the time that a wave runs.
  options.on_overdue = [this](int domain, RankLoss loss) {
    supervisor_->Condemn(domain, std::move(loss));
  };
  options.forecast = [this](const JobSpec& spec) {
    const v1::StageTimes times = forecaster_.Forecast(spec).times();
    return WaveForecast{.until_decoding = FromProto(times.text()) + FromProto(times.denoise()),
                        .decoding = FromProto(times.decode())};
  };
  return options;
}

absl::Status Frontend::StartWorkers() {
  SupervisorEvents events;
  events.on_ready = [this](int domain) {
    scheduler_.OnDomainReady(domain);
    SetDomainReady(domain, true);
  };
  events.on_lost = [this](int domain, RankLoss loss) {
    SetDomainReady(domain, false);
    scheduler_.OnDomainLost(domain, std::move(loss));
  };
  events.on_gave_up = [this](absl::Status status) {
    if (options_.on_failure) options_.on_failure(std::move(status));
  };
  supervisor_ = std::make_unique<Supervisor>(
      options_.supervisor, &links_,
      [this](int fd) { grpc::AddInsecureChannelFromFd(link_server_.get(), fd); },
      std::move(events));
  RETURN_IF_ERROR(ListenForWorkers());
  supervisor_->Start();
  return absl::OkStatus();
}

void Frontend::Shutdown(absl::Duration grace) {
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return;
    stopping_ = true;
    board_.SetServing(false);
  }
  options_.metrics->SetServing(false);
  const absl::Time deadline = absl::Now() + grace;
  health_.Shutdown();
  scheduler_.Drain();
  if (!scheduler_.WaitIdle(deadline)) {
    scheduler_.EndAll(StatusWithReason(grpc::StatusCode::UNAVAILABLE, "SHUTTING_DOWN",
                                       "the server was shut down before the request was finished"));
    // No job is told of anything from here on.
    scheduler_.WaitIdle(absl::InfiniteFuture());
  }
  jobs_.Flush();
  if (public_server_ != nullptr) {
    calls_.WaitNone(std::max(deadline, absl::Now() + kFlushTime));
    public_server_->Shutdown(absl::ToChronoTime(absl::Now() + kGoodbyeTime));
    public_server_->Wait();
  }
  if (supervisor_ != nullptr) supervisor_->Stop(std::max(deadline - absl::Now(), kFlushTime));
  for (grpc::Server* server : {remote_link_server_.get(), link_server_.get()}) {
    if (server == nullptr) continue;
    server->Shutdown(absl::ToChronoTime(absl::Now()));
    server->Wait();
  }
}

void Frontend::SetDomainReady(int domain, bool ready) {
  bool changed = false;
  bool serving = false;
  {
    absl::MutexLock lock(&mutex_);
    domain_ready_[domain] = ready;
    board_.SetReady(options_.domains[domain].ranks(), ready);
    serving = !stopping_ && std::any_of(domain_ready_.begin(), domain_ready_.end(),
                                        [](bool is_ready) { return is_ready; });
    changed = serving != serving_;
    serving_ = serving;
    board_.SetServing(serving);
  }
  if (!changed) return;
  options_.metrics->SetServing(serving);
  health_.SetServing(serving);
  if (serving) {
    spdlog::info("serving on {}", address_);
  } else {
    spdlog::warn("not serving");
  }
  if (options_.on_serving) options_.on_serving(serving);
}

void Frontend::OnAttached(int rank, uint64_t incarnation) {
  supervisor_->OnAttached(rank, incarnation);
}
void Frontend::OnStartup(int rank, v1::StartupRecord record) {
  options_.metrics->workers().Startup(rank, record);
  board_.SetStartup(rank, std::move(record));
}
void Frontend::OnReady(int rank) { supervisor_->OnReady(rank); }
void Frontend::OnStartFailed(int rank, absl::Status why) {
  supervisor_->OnStartFailed(rank, std::move(why));
}
void Frontend::OnDetached(int rank, uint64_t incarnation, std::string reason) {
  spdlog::debug("rank {}: the worker {}", rank, reason);
  supervisor_->OnDetached(rank, incarnation);
}

void Frontend::OnGroupBroken(int rank, v1::GroupBroken broken) {
  supervisor_->OnGroupBroken(rank, {broken.blamed_ranks().begin(), broken.blamed_ranks().end()},
                             broken.message());
}
void Frontend::OnHeartbeat(int rank, v1::Heartbeat heartbeat) {
  if (heartbeat.has_memory()) options_.metrics->rank(rank).SetMemory(heartbeat.memory());
  supervisor_->OnHeartbeat(rank, heartbeat);
  scheduler_.OnHeartbeat(rank, std::move(heartbeat));
}
void Frontend::OnProgress(int rank, v1::WaveProgress progress) {
  scheduler_.OnProgress(rank, std::move(progress));
}
void Frontend::OnFinished(int rank, const v1::WaveFinished& finished) {
  options_.metrics->rank(rank).AddUsage(finished.usage());
  scheduler_.OnFinished(rank, finished.wave_id());
}
void Frontend::OnFailed(int rank, v1::WaveFailed failed) {
  scheduler_.OnFailed(rank, std::move(failed));
}

}  // namespace dlo
