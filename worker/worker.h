// A worker process from its start to its exit code.
//
//   return RunWorker({.link_fd = 3, .rank = 0}, [] { return Load(); });
//
// Attaches to dlo-serve, loads the pipeline, runs one assignment after another on the calling
// thread, and returns 0 when dlo-serve asks it to drain. Returns 1 when the pipeline cannot be
// loaded, having told why. Exits the process at once when the link is lost, since nobody is left to
// work for, and at a SIGTERM from dlo-serve. When the rank's weight group breaks it says so and
// ends the process without touching a collective again. SIGINT, and SIGTERM from anybody else, are
// ignored: they reach whole process groups, and it is dlo-serve that decides when a worker stops.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/video_pipeline.h"
#include "proto/build_id.h"

namespace dlo {

inline constexpr int kExitLinkLost = 3;
inline constexpr int kExitTerminated = 4;
inline constexpr int kExitGroupBroken = 5;  // a peer is the cause, not this process

struct WorkerOptions {
  int link_fd = -1;  // a connected, non-blocking stream socket; taken over
  int rank = 0;
  uint64_t incarnation = 0;
  std::string build_id = BuildId();
};

struct LoadedPipeline {
  std::unique_ptr<VideoPipeline> pipeline;
  std::vector<int> weight_ranks = {};  // of its weight group, by their rank in it
};
using PipelineLoader = std::function<absl::StatusOr<LoadedPipeline>()>;

int RunWorker(const WorkerOptions& options, const PipelineLoader& load);

}  // namespace dlo
