// Runs one assignment: pipeline, encoder beside it, and the messages that tell dlo-serve of both.
//
//   WaveRunner runner(pipeline.get(), rank,
//                     [&](v1::FromWorker message) { return link.Send(std::move(message)); },
//                     recorder.get());
//   runner.Run(assignment);  // ends with WaveFinished or WaveFailed
//
// Run belongs to one thread: whatever goes wrong in a request is told in WaveFailed, and the next
// one can run, unless the rank's weight group is broken. Cancel and CurrentHeartbeat are
// thread-safe. Pipeline and recorder are borrowed.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "base/flight_recorder.h"
#include "dlo/v1/worker_link.pb.h"
#include "models/video_pipeline.h"

namespace dlo {

class WaveRunner {
 public:
  // `send` may block; false: nobody listens any more. What runs is noted in `recorder`.
  WaveRunner(VideoPipeline* pipeline, int rank, std::function<bool(v1::FromWorker)> send,
             FlightRecorder* recorder)
      : pipeline_(pipeline), rank_(rank), send_(std::move(send)), recorder_(recorder) {}

  // Computes a request or walks a plan. What is left of the plan of a request that failed or was
  // cancelled is walked after the answer. An error is the pipeline's health(): the wave was not
  // answered, and the rank can do nothing more.
  absl::Status Run(const v1::Assignment& assignment);

  // Ends the wave at its next step; without effect on any other, past or future.
  void Cancel(uint64_t wave) { cancelled_wave_ = wave; }

  v1::Heartbeat CurrentHeartbeat() const;

 private:
  class Observer;

  v1::WaveFailed Generate(const v1::Assignment& assignment, bool* started);
  absl::Status RunRequest(const v1::Assignment& assignment);
  absl::Status Walk(const v1::Assignment& assignment);
  absl::Status WalkOn(const v1::Assignment& assignment, bool started);
  bool SendVideo(uint64_t wave, const std::string& bytes);

  VideoPipeline* const pipeline_;
  const int rank_;
  const std::function<bool(v1::FromWorker)> send_;
  FlightRecorder* const recorder_;
  std::atomic<uint64_t> wave_ = 0;
  std::atomic<uint64_t> cancelled_wave_ = 0;
  std::atomic<v1::JobState> stage_ = v1::JOB_STATE_UNSPECIFIED;
  std::atomic<int> step_ = 0;
  std::atomic<uint64_t> work_done_ = 0;
};

}  // namespace dlo
