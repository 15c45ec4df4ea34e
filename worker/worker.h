// A worker process from its start to its exit code.
//
//   return RunWorker({.link_fd = 3, .rank = 0},
//                    [&](FlightRecorder* recorder, StartupReport* report) { return Load(); });
//
// Attaches to dlo-serve, loads the pipeline, runs one assignment after another on the calling
// thread, and returns 0 when dlo-serve asks it to drain. Returns 1 when the pipeline cannot be
// loaded, having told why. Exits the process at once when the link is lost, since nobody is left to
// work for, and at a SIGTERM from dlo-serve. When the rank's weight group breaks it says so and
// ends the process without touching a collective again. SIGINT, and SIGTERM from anybody else, are
// ignored: they reach whole process groups, and it is dlo-serve that decides when a worker stops.
//
// A worker on another host (`connect`) waits for dlo-serve to come up and for its dispatch domain
// to start, and loads only then. Whoever started it may end it with SIGTERM or SIGINT, and starts
// it again when it has exited.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/flight_recorder.h"
#include "dlo/v1/worker_link.pb.h"
#include "models/video_pipeline.h"
#include "proto/build_id.h"
#include "proto/link_channel.h"

namespace dlo {

inline constexpr int kExitLinkLost = 3;
inline constexpr int kExitTerminated = 4;
inline constexpr int kExitGroupBroken = 5;  // a peer is the cause, not this process

struct WorkerOptions {
  int link_fd = -1;  // a connected, non-blocking stream socket; taken over
  // In place of link_fd: the address of a dlo-serve on another host.
  std::string connect;
  LinkTlsFiles tls;
  LinkKeepalive keepalive;
  absl::Duration connect_timeout = absl::Seconds(30);
  // Told on the calling thread, before the pipeline is loaded, what Welcome brought; with
  // `connect`.
  std::function<absl::Status(const v1::Welcome&)> on_welcome;

  int rank = 0;
  uint64_t incarnation = 0;
  std::string build_id = BuildId();
  std::string failpoints;     // a folder of a test's; see failpoints.h
  int recorder_fd = -1;       // the frontend's FlightMemory; taken over
  std::string recorder_file;  // in its place a file of this host; neither: of no use to others
};

struct LoadedPipeline {
  std::unique_ptr<VideoPipeline> pipeline;
  std::vector<int> weight_ranks = {};  // of its weight group, by their rank in it
};
// The recorder outlives the pipeline. The report is filled in also by a load that fails.
using PipelineLoader =
    std::function<absl::StatusOr<LoadedPipeline>(FlightRecorder* recorder, StartupReport* report)>;

int RunWorker(const WorkerOptions& options, const PipelineLoader& load);

}  // namespace dlo
