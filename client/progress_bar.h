// How far a request is: a line redrawn in place on a terminal, plain lines elsewhere.
//
//   ProgressBar bar(console);
//   bar.Update({.stage = "denoising", .step = 12, .num_steps = 30,
//               .step_time = absl::Milliseconds(1320)});
//   bar.Clear();
//
// One thread at a time.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/console.h"

namespace dlo {

struct ProgressState {
  std::string stage;
  int queue_position = 0;  // 0: not queued
  int step = 0;
  int num_steps = 0;         // 0: the stage has no steps
  absl::Duration step_time;  // zero: not known
  absl::Duration remaining;  // zero: not known
  int64_t received_bytes = 0;
};

// "1.32 s", "24 s", "2 min 05 s", "1 h 02 min".
std::string HumanDuration(absl::Duration duration);

// "345 kB", "1.2 MB".
std::string HumanBytes(int64_t bytes);

// One line of at most columns - 1 characters (a full last column makes some terminals wrap): stage,
// bar, steps, seconds a step, time left. What does not fit goes, the least useful first. columns 0:
// no bar and no limit.
std::string RenderProgress(const ProgressState& state, int columns);

class ProgressBar {
 public:
  // Draws nothing if `quiet`. `console` must outlive the bar.
  ProgressBar(const Console& console, bool quiet) : console_(console), quiet_(quiet) {}
  ~ProgressBar() { Clear(); }

  void Update(const ProgressState& state);
  // A line that stays.
  void Note(absl::string_view line);
  // Takes the bar away; no trace of it is left on a terminal.
  void Clear();

 private:
  const Console& console_;
  const bool quiet_;
  std::string drawn_;
};

}  // namespace dlo
