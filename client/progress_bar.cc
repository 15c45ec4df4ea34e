#include "client/progress_bar.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace dlo {
namespace {

constexpr int kBarMin = 8;
constexpr int kBarMax = 40;

std::string Stage(const ProgressState& state) {
  if (state.received_bytes > 0) {
    return absl::StrCat(state.stage, " ", HumanBytes(state.received_bytes));
  }
  if (state.queue_position > 0) {
    return absl::StrCat(state.stage, ", position ", state.queue_position);
  }
  return state.stage;
}

std::string Bar(const ProgressState& state, int cells) {
  const int done = static_cast<int>(int64_t{cells} * std::clamp(state.step, 0, state.num_steps) /
                                    state.num_steps);
  std::string bar(done, '=');
  if (done < cells) bar += '>';
  bar.resize(cells, ' ');
  return absl::StrCat("[", bar, "]");
}

}  // namespace

std::string HumanDuration(absl::Duration duration) {
  const double seconds = absl::ToDoubleSeconds(duration);
  if (seconds < 9.995) return absl::StrFormat("%.2f s", seconds);
  const int64_t whole = std::llround(seconds);
  if (whole < 60) return absl::StrFormat("%d s", whole);
  if (whole < 3600) return absl::StrFormat("%d min %02d s", whole / 60, whole % 60);
  return absl::StrFormat("%d h %02d min", whole / 3600, whole / 60 % 60);
}

std::string HumanBytes(int64_t bytes) {
  if (bytes < 1000) return absl::StrFormat("%d B", bytes);
  if (bytes < 999'500) return absl::StrFormat("%.0f kB", bytes / 1e3);
  if (bytes < 999'950'000) return absl::StrFormat("%.1f MB", bytes / 1e6);
  return absl::StrFormat("%.2f GB", bytes / 1e9);
}

std::string RenderProgress(const ProgressState& state, int columns) {
  std::string line = Stage(state);
  if (state.num_steps <= 0) {
    if (columns > 0) line.resize(std::min<size_t>(line.size(), std::max(0, columns - 1)));
    return line;
  }
  absl::StrAppend(&line, " ");
  const size_t bar_at = line.size();
  std::string rest = absl::StrCat(state.step, "/", state.num_steps);
  std::vector<std::string> extras;  // the more useful first
  if (state.remaining > absl::ZeroDuration()) {
    extras.push_back(absl::StrCat(HumanDuration(state.remaining), " left"));
  }
  if (state.step_time > absl::ZeroDuration()) {
    extras.push_back(absl::StrCat(HumanDuration(state.step_time), "/step"));
  }
  const int room = columns - 1;
  for (const std::string& extra : extras) {
    const std::string longer = absl::StrCat(rest, ", ", extra);
    if (columns > 0 && static_cast<int>(bar_at + longer.size()) > room) break;
    rest = longer;
  }
  if (columns > 0) {
    constexpr int kBracketsAndBlank = 3;
    const int cells = room - static_cast<int>(bar_at + rest.size()) - kBracketsAndBlank;
    if (cells >= kBarMin) absl::StrAppend(&line, Bar(state, std::min(cells, kBarMax)), " ");
  }
  line += rest;
  if (columns > 0) line.resize(std::min<size_t>(line.size(), std::max(0, room)));
  return line;
}

void ProgressBar::Update(const ProgressState& state) {
  if (quiet_) return;
  const bool terminal = static_cast<bool>(console_.columns);
  const std::string line = RenderProgress(state, terminal ? std::max(1, console_.columns()) : 0);
  if (line == drawn_) return;
  if (terminal) {
    *console_.err << "\r" << line << "\x1b[K" << std::flush;
  } else {
    *console_.err << line << std::endl;
  }
  drawn_ = line;
}

void ProgressBar::Note(absl::string_view line) {
  if (quiet_) return;
  Clear();
  *console_.err << std::string(line) << std::endl;
}

void ProgressBar::Clear() {
  if (!drawn_.empty() && console_.columns) *console_.err << "\r\x1b[K" << std::flush;
  drawn_.clear();
}

}  // namespace dlo
