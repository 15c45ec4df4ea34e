// One wave while it runs: who works on what, who has answered, and by when to expect more.
//
//   RunningWave wave(id, jobs, limits, now);
//   wave.NoteProgress(replica, now);  ...  wave.replica(1).job = nullptr;  ...  wave.Answer(1);
//   if (std::optional<WaveOverdue> overdue = wave.FindOverdue(now)) ...
//
// A wave is overdue when a replica that has not answered shows no progress for `stall_timeout`, or
// takes longer than `total_factor` times the predicted time, but never before `total_min`. The
// prediction is the longer of the forecast and what the request's own steps foretell, so that what
// makes steady progress is not overdue for being long. Without a forecast only the denoising has
// one, and from the decoding on only the progress counts.
//
// On a clock that the caller passes in. A value; one thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/job.h"

namespace dlo {

struct WaveLimits {
  absl::Duration stall_timeout = absl::Minutes(10);
  absl::Duration total_min = absl::Seconds(600);
  double total_factor = 5;
};

// Of the slowest of its requests; zero: not known.
struct WaveForecast {
  absl::Duration until_decoding;
  absl::Duration decoding;
};

struct WaveOverdue {
  int replica = 0;    // that has been without progress for longest
  std::string cause;  // with a rank's worker as its subject
};

class RunningWave {
 public:
  struct Replica {
    std::shared_ptr<Job> job;  // null: it walks the plan, or nobody waits for its answer any more
    bool answered = false;
  };

  // `jobs` has an entry for each replica of the domain; null for those that only walk the plan.
  RunningWave(uint64_t id, std::vector<std::shared_ptr<Job>> jobs, WaveLimits limits,
              WaveForecast forecast, absl::Time now);

  uint64_t id() const { return id_; }
  int num_replicas() const { return static_cast<int>(runs_.size()); }
  Replica& replica(int i) { return runs_[i].replica; }

  void Answer(int i) { runs_[i].replica.answered = true; }
  bool answered() const;  // by all
  int num_jobs() const;   // whose replicas work on them

  // Anything that a replica can only do by working.
  void NoteProgress(int i, absl::Time now) { runs_[i].last_progress = now; }
  // The counter in a heartbeat: progress if it differs from the last one.
  void NoteCounter(int i, uint64_t counter, absl::Time now);
  // It cannot get rid of its video, which is whole.
  void NoteHeldBack(int i, absl::Time now);
  // The replica enters another stage of its request.
  void NoteStage(int i, v1::JobState stage, absl::Time now);
  // A step of `num_steps` was done. Returns the mean time of the last few.
  absl::Duration NoteStep(int i, int step, int num_steps, absl::Time now);
  // The time of the step that was noted last; there must be one.
  absl::Duration last_step_time(int i) const { return runs_[i].step_times.back(); }

  // When FindOverdue may find something, if nothing changes.
  absl::Time NextDeadline() const;
  std::optional<WaveOverdue> FindOverdue(absl::Time now) const;

 private:
  struct Run {
    Replica replica;
    absl::Time last_progress;
    uint64_t counter = 0;
    bool denoising = false;
    bool held_back = false;
    absl::Time denoising_since;
    absl::Time last_step;
    std::deque<absl::Duration> step_times;  // of the last few
    // Of text and denoising together; the longest so far, so that a fast step never tightens it.
    absl::Duration predicted;
  };

  absl::Time StalledAt(const Run& run) const { return run.last_progress + limits_.stall_timeout; }
  // Zero: not known.
  absl::Duration Predicted(const Run& run) const;
  absl::Time TooLongAt(const Run& run) const;

  const uint64_t id_;
  const WaveLimits limits_;
  const WaveForecast forecast_;
  const absl::Time start_;
  std::vector<Run> runs_;
};

}  // namespace dlo
