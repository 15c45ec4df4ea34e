// When everything happened to each visit of a plan: what a timeline is drawn from.
//
//   VisitLog log(8192);
//   RETURN_IF_ERROR(streamer->Start(plan, &log));
//   ... Acquire ...
//   streamer->stats();   // brings the log up to the last visit
//   for (int64_t i = 0; i < log.size(); ++i) Draw(log[i]);
//
// Keeps the newest visits, in memory that it takes once. One thread at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/time/time.h"

namespace dlo {

// Times from the plan's start on.
struct VisitTimes {
  int64_t visit = 0;
  int ring = 0;
  int64_t block = 0;
  // The move into an intake buffer (a pack, or the copy of a shard); both zero if there is none.
  absl::Duration fill_begin, fill_end;
  // The move into the slot (a copy, or a gather).
  absl::Duration deliver_begin, deliver_end;
  // The computing was ready for the block; had it; had used it.
  absl::Duration wait_begin, compute_begin, compute_end;
};

class VisitLog {
 public:
  // At least 1.
  explicit VisitLog(int64_t capacity) : visits_(capacity) {}

  void Clear() { count_ = 0; }
  void Add(const VisitTimes& times) { visits_[count_++ % capacity()] = times; }

  int64_t capacity() const { return static_cast<int64_t>(visits_.size()); }
  int64_t size() const { return count_ < capacity() ? count_ : capacity(); }
  int64_t dropped() const { return count_ - size(); }  // the oldest
  // 0 is the oldest that was kept.
  const VisitTimes& operator[](int64_t i) const { return visits_[(dropped() + i) % capacity()]; }

 private:
  std::vector<VisitTimes> visits_;
  int64_t count_ = 0;
};

}  // namespace dlo
