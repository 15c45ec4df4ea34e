// dlo-worker with a scripted pipeline, for process tests that need no model. What its start does
// comes on the command line:
//   --load-error=TEXT   the model cannot be loaded
//   --load-signal=N     dies while loading
//   --load-hold=PATH    loads until PATH exists; %r in it is the rank
//   --startup-record    says that it found no artifact and published one
//   --build-id=TEXT     pretends to be of another build
//   --keepalive-ms=N    of a link to another host: interval and timeout
//   --connect-timeout-ms=N
//   --stray             sends replies of other waves before each of its own last ones
//   --send-hold=PATH    waits after the first of several chunks of a video until PATH exists
#include <grpcpp/create_channel_posix.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "server/testing/scripted_pipeline.h"
#include "worker/link_client.h"
#include "worker/wave_runner.h"
#include "worker/worker.h"
#include "worker/worker_flags.h"

namespace dlo {
namespace {

// A worker that knows the link and not its rules.
class LooseWorker : public LinkHandler {
 public:
  LooseWorker(const WorkerOptions& options, bool stray, std::string send_hold)
      : stray_(stray),
        send_hold_(std::move(send_hold)),
        recorder_(FlightRecorder::Private()),
        pipeline_(NewScriptedPipeline(recorder_.get())),
        runner_(
            pipeline_.get(), options.rank, [this](v1::FromWorker m) { return Send(m); },
            recorder_.get()) {
    v1::Hello hello;
    hello.set_protocol_version(kLinkProtocolVersion);
    hello.set_build_id(options.build_id);
    hello.set_rank(options.rank);
    hello.set_incarnation(options.incarnation);
    link_ = std::make_unique<LinkClient>(
        grpc::CreateInsecureChannelFromFd("dlo-serve", options.link_fd), hello, this);
    v1::FromWorker ready;
    ready.mutable_ready();
    link_->Send(ready);
  }

  void OnAssignment(v1::Assignment assignment) override { (void)runner_.Run(assignment); }
  void OnCancel(uint64_t wave) override {}
  void OnDrain() override { _exit(0); }
  void OnClosed(absl::Status status) override { _exit(kExitLinkLost); }
  v1::Heartbeat CurrentHeartbeat() override { return runner_.CurrentHeartbeat(); }

 private:
  bool Send(const v1::FromWorker& message) {
    if (stray_ && message.has_finished()) {
      for (const uint64_t wave :
           {message.finished().wave_id() - 1, message.finished().wave_id() + 9}) {
        v1::FromWorker stray = message;
        stray.mutable_finished()->set_wave_id(wave);
        link_->Send(stray);
        stray.mutable_failed()->set_wave_id(wave);
        stray.mutable_failed()->set_code(13);
        link_->Send(stray);
        stray.mutable_progress()->set_wave_id(wave);
        link_->Send(stray);
        stray.mutable_chunk()->set_wave_id(wave);
        stray.mutable_chunk()->mutable_chunk()->set_data("not yours");
        link_->Send(stray);
      }
    }
    const bool sent = link_->Send(message);
    // Only the chunks before the last are as large.
    const bool holds = !send_hold_.empty() && message.has_chunk() &&
                       message.chunk().chunk().offset() == 0 &&
                       message.chunk().chunk().data().size() == size_t{1} << 20;
    while (holds && !std::filesystem::exists(send_hold_)) absl::SleepFor(absl::Milliseconds(2));
    return sent;
  }

  const bool stray_;
  const std::string send_hold_;
  const std::unique_ptr<FlightRecorder> recorder_;
  const std::unique_ptr<VideoPipeline> pipeline_;
  WaveRunner runner_;
  std::unique_ptr<LinkClient> link_;
};

hwr::StartupRecord FallbackRecord() {
  hwr::StartupRecord record{.resolution_id = "scripted",
                            .mode = hwr::Mode::kPreferred,
                            .outcome = hwr::Outcome::kCanonicalFallback,
                            .key = "0123"};
  record.attempts.push_back({.stage = hwr::Stage::kLookup,
                             .result = hwr::AttemptResult::kMiss,
                             .reason = hwr::Reason::kMiss,
                             .retryable = true,
                             .next = hwr::NextAction::kCanonicalFallback,
                             .message = "no such artifact"});
  record.phase(hwr::Phase::kLoad) = absl::Seconds(2);
  record.bytes_read = 4096;
  record.publication = {.outcome = hwr::PublicationOutcome::kPublished, .bytes = 2048};
  return record;
}

}  // namespace
}  // namespace dlo

int main(int argc, char** argv) {
  CLI::App app;
  dlo::WorkerFlags flags;
  dlo::WorkerOptions& options = flags.options;
  std::string load_error;
  std::string load_hold;
  std::string send_hold;
  int load_signal = 0;
  bool stray = false;
  int keepalive_ms = 0;
  dlo::hwr::StartupRecord startup{.resolution_id = "scripted"};
  app.allow_extras();
  flags.AddTo(app);
  int connect_timeout_ms = 0;
  app.add_option("--keepalive-ms", keepalive_ms);
  app.add_option("--connect-timeout-ms", connect_timeout_ms);
  app.add_option("--build-id", options.build_id);
  app.add_option("--load-error", load_error);
  app.add_option("--load-signal", load_signal);
  app.add_option("--load-hold", load_hold);
  app.add_flag_callback("--startup-record", [&startup] { startup = dlo::FallbackRecord(); });
  app.add_flag("--stray", stray);
  app.add_option("--send-hold", send_hold);
  CLI11_PARSE(app, argc, argv);
  if (const absl::Status status = flags.Finish(app, argc, argv); !status.ok()) {
    std::cerr << status << std::endl;
    return 2;
  }
  dlo::StartLogging("scripted-worker " + std::to_string(options.rank), "info");
  if (connect_timeout_ms > 0) options.connect_timeout = absl::Milliseconds(connect_timeout_ms);
  if (keepalive_ms > 0) {
    options.keepalive = {absl::Milliseconds(keepalive_ms), absl::Milliseconds(keepalive_ms)};
  }
  if (stray || !send_hold.empty()) {
    const dlo::LooseWorker worker(options, stray, send_hold);
    while (true) pause();
  }
  using Loaded = absl::StatusOr<dlo::LoadedPipeline>;
  return dlo::RunWorker(
      options, [&](dlo::FlightRecorder* recorder, dlo::StartupReport* report) -> Loaded {
        report->record = startup;
        report->components = {{.component = "transformer", .backing = "memory"}};
        load_hold = absl::StrReplaceAll(load_hold, {{"%r", std::to_string(options.rank)}});
        if (load_signal != 0) raise(load_signal);
        while (!load_hold.empty() && !std::filesystem::exists(load_hold)) {
          absl::SleepFor(absl::Milliseconds(2));
        }
        if (!load_error.empty()) return absl::NotFoundError(load_error);
        return dlo::LoadedPipeline{dlo::NewScriptedPipeline(recorder)};
      });
}
