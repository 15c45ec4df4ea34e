#include "server/running_wave.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dlo {
namespace {

constexpr size_t kStepsAveraged = 8;

}  // namespace

RunningWave::RunningWave(uint64_t id, std::vector<std::shared_ptr<Job>> jobs, WaveLimits limits,
                         WaveForecast forecast, absl::Time now)
    : id_(id), limits_(limits), forecast_(forecast), start_(now), runs_(jobs.size()) {
  for (size_t i = 0; i < jobs.size(); ++i) {
    runs_[i].replica.job = std::move(jobs[i]);
    runs_[i].last_progress = now;
    runs_[i].last_step = now;
  }
}

bool RunningWave::answered() const {
  return std::all_of(runs_.begin(), runs_.end(),
                     [](const Run& run) { return run.replica.answered; });
}

int RunningWave::num_jobs() const {
  return static_cast<int>(std::count_if(runs_.begin(), runs_.end(),
                                        [](const Run& run) { return run.replica.job != nullptr; }));
}

void RunningWave::NoteCounter(int i, uint64_t counter, absl::Time now) {
  if (runs_[i].counter == counter) return;
  runs_[i].counter = counter;
  NoteProgress(i, now);
}

void RunningWave::NoteHeldBack(int i, absl::Time now) {
  runs_[i].held_back = true;
  NoteProgress(i, now);
}

void RunningWave::NoteStage(int i, v1::JobState stage, absl::Time now) {
  Run& run = runs_[i];
  run.denoising = stage == v1::JOB_STATE_DENOISING;
  if (run.denoising) run.denoising_since = now;
  run.last_step = now;
  NoteProgress(i, now);
}

absl::Duration RunningWave::NoteStep(int i, int step, int num_steps, absl::Time now) {
  Run& run = runs_[i];
  run.step_times.push_back(now - run.last_step);
  if (run.step_times.size() > kStepsAveraged) run.step_times.pop_front();
  run.last_step = now;
  absl::Duration sum;
  for (absl::Duration time : run.step_times) sum += time;
  const absl::Duration step_time = sum / static_cast<int64_t>(run.step_times.size());
  if (run.denoising && step > 0) {
    // By all steps so far, not only the last few: they belong to the whole.
    const absl::Duration denoising = (now - run.denoising_since) / step * num_steps;
    run.predicted = std::max(run.predicted, run.denoising_since - start_ + denoising);
  }
  NoteProgress(i, now);
  return step_time;
}

absl::Duration RunningWave::Predicted(const Run& run) const {
  const absl::Duration forecast = forecast_.until_decoding + forecast_.decoding;
  if (forecast == absl::ZeroDuration() && !run.denoising) return absl::ZeroDuration();
  return std::max(forecast, run.predicted + forecast_.decoding);
}

absl::Time RunningWave::TooLongAt(const Run& run) const {
  const absl::Duration predicted = Predicted(run);
  if (run.held_back || predicted == absl::ZeroDuration()) return absl::InfiniteFuture();
  return start_ + std::max(limits_.total_min, predicted * limits_.total_factor);
}

absl::Time RunningWave::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const Run& run : runs_) {
    if (!run.replica.answered) next = std::min({next, StalledAt(run), TooLongAt(run)});
  }
  return next;
}

std::optional<WaveOverdue> RunningWave::FindOverdue(absl::Time now) const {
  int first = -1;
  for (int i = 0; i < num_replicas(); ++i) {
    const Run& run = runs_[i];
    if (run.replica.answered || std::min(StalledAt(run), TooLongAt(run)) > now) continue;
    // One that waits for another in a collective stops after it.
    if (first < 0 || run.last_progress < runs_[first].last_progress) first = i;
  }
  if (first < 0) return std::nullopt;
  if (StalledAt(runs_[first]) <= now) {
    return WaveOverdue{
        first, absl::StrCat("made no progress for ", absl::FormatDuration(limits_.stall_timeout),
                            " (wave.stall_timeout)")};
  }
  return WaveOverdue{
      first, absl::StrCat("was still at work after ",
                          absl::FormatDuration(absl::Trunc(now - start_, absl::Milliseconds(1))),
                          ", more than ", limits_.total_factor, " times the predicted ",
                          absl::FormatDuration(
                              absl::Trunc(Predicted(runs_[first]), absl::Milliseconds(1))))};
}

}  // namespace dlo
