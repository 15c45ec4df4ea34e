// A submitted request on its way through the server, and the one who watches it.
#pragma once

#include <grpcpp/support/status.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "dlo/v1/video_generation.pb.h"
#include "server/request_resolution.h"
#include "server/result_queue.h"

namespace dlo {

// Where a running job's video comes out: `queue->Pop(wave)` until the WaveFinished.
struct ResultSource {
  std::shared_ptr<ResultQueue> queue;
  uint64_t wave = 0;
};

// Told what happens to a job. Called by the scheduler's thread (a refusal at once perhaps by the
// submitting one); must not block.
class JobListener {
 public:
  virtual ~JobListener() = default;
  virtual void OnEvent(v1::GenerateEvent event) = 0;
  // The job was given to a rank; its video will be in `source`.
  virtual void OnStarted(ResultSource source) = 0;
  // One more item can be taken from the source. Events that precede it have been told.
  virtual void OnResult() = 0;
  // The job ended without a (whole) video. Nothing follows.
  virtual void OnEnd(grpc::Status status) = 0;
};

// Owned by the scheduler's thread, but for `spec`, which never changes.
struct Job {
  Job(JobSpec spec, std::weak_ptr<JobListener> listener)
      : spec(std::move(spec)), listener(std::move(listener)) {}

  const JobSpec spec;
  const std::weak_ptr<JobListener> listener;

  // Set before it is submitted. An earlier run of the server took it: the queue's limit does not
  // apply.
  bool admitted = false;

  v1::Job snapshot;  // what clients see
  std::optional<ResultSource> source;
  int rank = -1;  // that works on it
};

}  // namespace dlo
