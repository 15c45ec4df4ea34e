#include "server/wave_former.h"

#include <algorithm>
#include <utility>

namespace dlo {

absl::Duration WaveFormer::StableWindow(absl::Duration max_wait) {
  return std::min(absl::Milliseconds(300), max_wait / 2);
}

bool WaveFormer::Add(Waiter waiter, absl::Time now, int free_capacity) {
  if (waiting_.size() >= static_cast<size_t>(options_.max_waiting) + free_capacity) return false;
  waiting_.push_back({std::move(waiter), now});
  return true;
}

std::optional<size_t> WaveFormer::Remove(const std::string& id) {
  const auto it = std::find_if(waiting_.begin(), waiting_.end(),
                               [&](const Entry& entry) { return entry.waiter.id == id; });
  if (it == waiting_.end()) return std::nullopt;
  const size_t position = it - waiting_.begin();
  waiting_.erase(it);
  return position;
}

std::vector<std::string> WaveFormer::TakeExpired(absl::Time now) {
  std::vector<std::string> expired;
  std::deque<Entry> left;
  for (Entry& entry : waiting_) {
    if (entry.waiter.deadline <= now) {
      expired.push_back(std::move(entry.waiter.id));
    } else {
      left.push_back(std::move(entry));
    }
  }
  waiting_ = std::move(left);
  return expired;
}

std::vector<std::string> WaveFormer::TakeAll() { return TakeExpired(absl::InfiniteFuture()); }

WaveFormer::Candidates WaveFormer::FindCandidates(const WaveSlot& slot) const {
  Candidates found;
  for (size_t i = 0; i < waiting_.size(); ++i) {
    if (waiting_[i].waiter.key != waiting_.front().waiter.key) continue;
    found.positions.push_back(i);
    found.last_added = waiting_[i].added;
    if (found.positions.size() >= static_cast<size_t>(slot.capacity)) break;
  }
  return found;
}

absl::Time WaveFormer::StartTime(const WaveSlot& slot, const Candidates& candidates) const {
  if (candidates.positions.empty()) return absl::InfiniteFuture();
  if (candidates.positions.size() >= static_cast<size_t>(slot.capacity)) {
    return absl::InfinitePast();
  }
  // Those who came while the slot was busy have not been waited for yet.
  const absl::Time leading_since = std::max(slot.free_since, waiting_.front().added);
  const absl::Time last_joined = std::max(slot.free_since, candidates.last_added);
  return std::min(leading_since + options_.max_wait, last_joined + StableWindow(options_.max_wait));
}

WaveFormed WaveFormer::Describe(const WaveSlot& slot) const {
  const Entry& leader = waiting_.front();
  WaveFormed formed{std::max(slot.free_since, leader.added), leader.waiter.key, {}};
  const size_t places = std::min<size_t>(slot.capacity, waiting_.size());
  for (size_t i = 0; i < places; ++i) {
    const std::string& key = waiting_[i].waiter.key;
    if (key != formed.key) formed.deferred_keys.push_back(key);
  }
  return formed;
}

std::vector<std::string> WaveFormer::TakeWave(const WaveSlot& slot, absl::Time now,
                                              WaveFormed* formed) {
  const Candidates candidates = FindCandidates(slot);
  if (StartTime(slot, candidates) > now) return {};
  if (formed != nullptr) *formed = Describe(slot);
  std::vector<std::string> wave;
  for (size_t position : candidates.positions) {
    wave.push_back(std::move(waiting_[position].waiter.id));
  }
  for (auto it = candidates.positions.rbegin(); it != candidates.positions.rend(); ++it) {
    waiting_.erase(waiting_.begin() + static_cast<int64_t>(*it));
  }
  return wave;
}

absl::Time WaveFormer::NextTime(const WaveSlot& slot) const {
  return StartTime(slot, FindCandidates(slot));
}

absl::Time WaveFormer::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const Entry& entry : waiting_) next = std::min(next, entry.waiter.deadline);
  return next;
}

}  // namespace dlo
