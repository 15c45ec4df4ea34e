// A worker process from its start to its exit code.
//
//   return RunWorker({.link_fd = 3, .rank = 0}, [] { return LoadVideoPipeline(options); });
//
// Attaches to dlo-serve, loads the pipeline, runs one assignment after another on the calling
// thread, and returns 0 when dlo-serve asks it to drain. Returns 1 when the pipeline cannot be
// loaded, having told why. Exits the process at once when the link is lost, since nobody is left to
// work for, and at a SIGTERM from dlo-serve. SIGINT, and SIGTERM from anybody else, are ignored:
// they reach whole process groups, and it is dlo-serve that decides when a worker stops.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "models/video_pipeline.h"
#include "proto/build_id.h"

namespace dlo {

inline constexpr int kExitLinkLost = 3;
inline constexpr int kExitTerminated = 4;

struct WorkerOptions {
  int link_fd = -1;  // a connected, non-blocking stream socket; taken over
  int rank = 0;
  uint64_t incarnation = 0;
  std::string build_id = BuildId();
  std::string failpoints;  // a folder of a test's; see failpoints.h
};

using PipelineLoader = std::function<absl::StatusOr<std::unique_ptr<VideoPipeline>>()>;

int RunWorker(const WorkerOptions& options, const PipelineLoader& load);

}  // namespace dlo
