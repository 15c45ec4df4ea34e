// Jobs in words, for people and for the files of shell scripts.
#pragma once

#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "client/console.h"
#include "client/progress_bar.h"
#include "dlo/v1/video_generation.pb.h"
#include "media/video_writer.h"

namespace dlo {

v1::OutputFormat ToProto(VideoFormat format);

// "queued", "encoding text", ..., "succeeded"; "unknown" for a state of a later version.
std::string StateName(v1::JobState state);
// The inverse; spaces may be written as - or _.
std::optional<v1::JobState> StateOfName(absl::string_view name);

// "128 x 128, 17 frames at 16 fps, 30 steps, guidance 5, shift 3, unipc, seed 7".
std::string DescribeSettings(const v1::VideoSettings& settings);

// "4.31 s (queue 0.00 s, text 0.02 s, denoise 3.90 s, decode 0.31 s, encode 0.08 s)".
std::string DescribeTimes(const v1::StageTimes& times);

// "18.4 MB over the bus; computing waited 0.21 s (copy 0.21 s), 93 % hidden" of
// all ranks that told; empty if none streamed. The share is that of the worst stage.
std::string DescribeStreaming(const v1::Result& result);

// Two lines: time, operations and bytes; the passes over the blocks.
std::string DescribeForecast(const v1::Forecast& forecast);

// "denoising 3/30", "queued, position 2", "failed: no memory (OUT_OF_MEMORY)".
std::string DescribeState(const v1::Job& job);

// Several lines "name: value".
std::string DescribeJob(const v1::Job& job);

// One line: id, state, time of creation (UTC) and settings, separated by tabs.
std::string JobLine(const v1::Job& job);

// Shows the events of a job until its end. One thread at a time.
class JobProgress {
 public:
  // `bar` outlives it.
  explicit JobProgress(ProgressBar* bar) : bar_(*bar) {}

  void TakeJob(const v1::Job& job);
  void TakeProgress(const v1::Progress& progress);
  void TakeReceived(int64_t bytes);

 private:
  ProgressBar& bar_;
  ProgressState state_;
  bool denoising_ = false;
  bool settings_noted_ = false;
};

}  // namespace dlo
