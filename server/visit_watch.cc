#include "server/visit_watch.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace dlo {
namespace {

constexpr size_t kVisitTimesMax = 256;
constexpr int kStepsMin = 2;
constexpr int64_t kAdvancesMin = 10;
constexpr int kPauseFactor = 3;

absl::string_view StageName(v1::JobState stage) {
  switch (stage) {
    case v1::JOB_STATE_ENCODING_TEXT:
      return "text";
    case v1::JOB_STATE_DENOISING:
      return "denoise";
    case v1::JOB_STATE_DECODING:
      return "decode";
    default:
      return "walking the plan";
  }
}

std::string Rounded(absl::Duration duration) {
  return absl::FormatDuration(absl::Trunc(duration, absl::Milliseconds(1)));
}

}  // namespace

VisitWatch::VisitWatch(VisitWatchOptions options, std::vector<int> ranks) : options_(options) {
  for (int rank : ranks) ranks_[rank];
}

void VisitWatch::Note(int rank, const VisitPlace& place, absl::Time now) {
  const auto entry = ranks_.find(rank);
  if (entry == ranks_.end()) return;
  Rank& r = entry->second;
  if (place.wave != 0 && (place.wave > wave_ || (place.wave == wave_ && place.stage > stage_))) {
    wave_ = place.wave;
    stage_ = place.stage;
    visit_times_.clear();
    advances_ = 0;
    steps_ = 0;
    longest_pause_ = absl::ZeroDuration();
  }
  const bool same = place.wave == r.place.wave && place.stage == r.place.stage;
  if (!same) {
    r = {.place = place, .since = now, .first_step = place.step};
    return;
  }
  const int64_t visits = place.visit - r.place.visit;
  r.place = place;
  if (InStage(r)) steps_ = std::max(steps_, place.step - r.first_step);
  if (visits == 0) return;
  const absl::Duration pause = now - std::exchange(r.since, now);
  // What began before its stage was seen is no measure.
  if (!std::exchange(r.advanced, true) || visits < 0 || !InStage(r)) return;
  visit_times_.push_back(pause / visits);
  if (visit_times_.size() > kVisitTimesMax) visit_times_.pop_front();
  longest_pause_ = std::max(longest_pause_, pause);
  ++advances_;
}

bool VisitWatch::InStage(const Rank& rank) const {
  return wave_ != 0 && rank.place.wave == wave_ && rank.place.stage == stage_;
}

bool VisitWatch::Judged() const {
  if (options_.factor <= 0 || visit_times_.empty()) return false;
  return stage_ == v1::JOB_STATE_DENOISING ? steps_ >= kStepsMin : advances_ >= kAdvancesMin;
}

absl::Duration VisitWatch::Median() const {
  std::vector<absl::Duration> times(visit_times_.begin(), visit_times_.end());
  const auto middle = times.begin() + static_cast<ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

absl::Duration VisitWatch::Limit() const {
  return std::max(
      {options_.floor, Median() * options_.factor, longest_pause_ * int64_t{kPauseFactor}});
}

std::optional<StuckVisit> VisitWatch::Find(absl::Time now) const {
  if (!Judged()) return std::nullopt;
  const absl::Duration limit = Limit();
  const std::pair<const int, Rank>* lagging = nullptr;
  bool any_stuck = false;
  for (const auto& entry : ranks_) {
    const Rank& rank = entry.second;
    if (rank.place.wave != wave_) continue;
    any_stuck = any_stuck || (InStage(rank) && now - rank.since >= limit);
    if (lagging == nullptr || rank.place.visit < lagging->second.place.visit ||
        (rank.place.visit == lagging->second.place.visit && rank.since < lagging->second.since)) {
      lagging = &entry;
    }
  }
  // One that is behind and still advances is slow, not stuck.
  if (!any_stuck || now - lagging->second.since < limit) return std::nullopt;
  std::vector<std::string> others;
  for (const auto& [rank, r] : ranks_) {
    if (rank == lagging->first || r.place.wave != wave_) continue;
    others.push_back(absl::StrCat("rank ", rank, " is at visit ", r.place.visit));
  }
  const Rank& stuck = lagging->second;
  return StuckVisit{
      lagging->first,
      absl::StrCat("got no further than visit ", stuck.place.visit, " (",
                   StageName(stuck.place.stage), ", after step ", stuck.place.step, ") for ",
                   Rounded(now - stuck.since), ", where the median visit takes ", Rounded(Median()),
                   others.empty() ? "" : absl::StrCat("; ", absl::StrJoin(others, ", ")))};
}

}  // namespace dlo
