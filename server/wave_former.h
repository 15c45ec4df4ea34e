// Decides which waiting requests run together, and when: a bounded queue and the rule that forms
// waves from it. On a clock that the caller passes in, so it needs none of its own.
//
//   WaveFormer former({.max_waiting = 64, .max_wait = absl::Milliseconds(500)});
//   former.Add({.id = "a", .key = key}, now);
//   for (const std::string& id : former.TakeExpired(now)) ...   // their deadline has passed
//   std::vector<std::string> wave = former.TakeWave({.capacity = 4, .free_since = t}, now);
//   ... nothing yet: ask again at former.NextTime({...}), or when something was added
//
// The oldest request leads: its key says who may join, from anywhere in the queue, up to the
// capacity. The wave starts as soon as it is full, as nobody who could join has come for the stable
// window, or as its leader has waited `max_wait` at the head of a domain that was free. Requests
// that cannot join neither count nor keep it waiting.
//
// So nothing starves: every wave that starts while a request waits is led by an older one, and
// whoever overtakes an incompatible request does so in a wave that would have run anyway. A request
// waits for each incompatible one before it at most once.
//
// A value; one thread at a time.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace dlo {

struct WaveFormerOptions {
  int max_waiting = 64;
  // How long a leader waits for others: 0 where replicas are independent.
  absl::Duration max_wait;
};

// What a wave left behind, and since when it could have started, had it been full.
struct WaveFormed {
  absl::Time leading_since;
  std::string key;
  // Of the requests that would be in the wave if all keys were equal, in their order.
  std::vector<std::string> deferred_keys;
};

// A part of the service that could start a wave.
struct WaveSlot {
  int capacity = 1;
  absl::Time free_since = absl::InfinitePast();
};

class WaveFormer {
 public:
  struct Waiter {
    std::string id;
    std::string key;  // equal keys may share a wave
    absl::Time deadline = absl::InfiniteFuture();
  };

  explicit WaveFormer(WaveFormerOptions options) : options_(options) {}

  // min(300 ms, max_wait / 2).
  static absl::Duration StableWindow(absl::Duration max_wait);

  // False if the queue is full: max_waiting and `free_capacity`, the places in slots that are free.
  // Ids are distinct.
  bool Add(Waiter waiter, absl::Time now, int free_capacity = 0);

  // Where it stood, if it was there.
  std::optional<size_t> Remove(const std::string& id);

  // Removes and returns those whose deadline has passed.
  std::vector<std::string> TakeExpired(absl::Time now);

  // Removes and returns the next wave, its leader first, if it is to start now; else nothing.
  // `formed` may be null; it is filled if a wave is returned.
  std::vector<std::string> TakeWave(const WaveSlot& slot, absl::Time now,
                                    WaveFormed* formed = nullptr);

  // When TakeWave for that slot gives something, if nothing changes. InfiniteFuture: never.
  absl::Time NextTime(const WaveSlot& slot) const;

  // The first deadline of all. InfiniteFuture: none.
  absl::Time NextDeadline() const;

  // Removes and returns all.
  std::vector<std::string> TakeAll();

  size_t size() const { return waiting_.size(); }
  const std::string& id(size_t position) const { return waiting_[position].waiter.id; }

 private:
  struct Entry {
    Waiter waiter;
    absl::Time added;
  };
  struct Candidates {
    std::vector<size_t> positions;  // ascending; the first is the leader
    absl::Time last_added;
  };

  Candidates FindCandidates(const WaveSlot& slot) const;
  absl::Time StartTime(const WaveSlot& slot, const Candidates& candidates) const;
  WaveFormed Describe(const WaveSlot& slot) const;

  WaveFormerOptions options_;
  std::deque<Entry> waiting_;
};

}  // namespace dlo
