// Finds the rank of a dispatch domain that is alive and stuck in a visit of a streamed block.
//
//   VisitWatch watch(options, ranks);
//   watch.Note(rank, {.wave = 3, .stage = v1::JOB_STATE_DENOISING, .step = 2, .visit = 37}, now);
//   if (std::optional<StuckVisit> stuck = watch.Find(now)) ...
//
// A rank's heartbeats say how many visits it has done. From how far it got between two of them
// follows the time of a visit; the median over the domain's visits in the same wave and stage is
// what one takes there. A rank whose number has not grown for `factor` times that, and for `floor`,
// is stuck. Since the host thread may be far ahead of a device and then wait for it, three times
// the longest pause that a rank of the domain has made and gone on from is allowed too, and nothing
// is judged before two steps of denoising are done (in other stages: ten advances), as the pauses
// are not known until then. The wave's own deadline (running_wave.h) holds all the while.
//
// The ranks of a domain walk in step, so one that is stuck stops the others a little later, maybe
// in a stage that it has not reached: to blame is the lowest visit of the wave, among equals the
// one that stopped first.
//
// On a clock that the caller passes in. A value; one thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "dlo/v1/worker_link.pb.h"

namespace dlo {

struct VisitWatchOptions {
  double factor = 50;  // times the median; 0: nothing is ever stuck
  absl::Duration floor = absl::Minutes(1);
};

struct VisitPlace {
  uint64_t wave = 0;  // 0: idle
  v1::JobState stage = v1::JOB_STATE_UNSPECIFIED;
  int step = 0;       // done
  int64_t visit = 0;  // done, in the wave
};

struct StuckVisit {
  int rank = 0;
  std::string cause;  // with the rank's worker as its subject
};

class VisitWatch {
 public:
  VisitWatch(VisitWatchOptions options, std::vector<int> ranks);

  // As a heartbeat of the rank tells.
  void Note(int rank, const VisitPlace& place, absl::Time now);

  std::optional<StuckVisit> Find(absl::Time now) const;

 private:
  struct Rank {
    VisitPlace place;
    absl::Time since;       // of this visit
    int first_step = 0;     // at the first heartbeat of this wave and stage
    bool advanced = false;  // since then; the first visit's beginning was not seen
  };

  bool InStage(const Rank& rank) const;
  bool Judged() const;
  absl::Duration Median() const;
  absl::Duration Limit() const;

  VisitWatchOptions options_;
  std::map<int, Rank> ranks_;
  // Of the wave and stage that are measured.
  uint64_t wave_ = 0;
  v1::JobState stage_ = v1::JOB_STATE_UNSPECIFIED;
  std::deque<absl::Duration> visit_times_;
  int64_t advances_ = 0;
  int steps_ = 0;
  absl::Duration longest_pause_;
};

}  // namespace dlo
