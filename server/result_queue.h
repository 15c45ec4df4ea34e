// What a rank has sent of its results and the disk has not taken yet: one queue per rank, bounded
// in messages and bytes.
//
//   queue.Open(wave, [job] { job->OnResult(); });        // before the rank hears of the wave
//   if (queue.Push(wave, std::move(chunk))) ReadNext();  // else full: on_room reads on
//   while (std::optional<ResultItem> item = queue.Pop(wave)) ...
//   queue.Close(wave);  // drops what is there and whatever still comes
//
// The queue takes every Push, since the message has already been received; that it is full tells
// the producer to receive no more, so it never holds more than its limits and one message. Each
// wave is a lane of its own. Thread-safe. Callbacks run on the thread that called Push, Pop or
// Close, outside the lock; one may still run while Close returns.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "dlo/v1/video_generation.pb.h"
#include "dlo/v1/worker_link.pb.h"

namespace dlo {

// A part of the video, or what ends it.
using ResultItem = std::variant<v1::ResultChunk, v1::WaveFinished>;

class ResultQueue {
 public:
  struct Limits {
    int messages = 64;
    int64_t bytes = int64_t{16} << 20;
  };

  explicit ResultQueue(Limits limits) : limits_(limits) {}
  ResultQueue(const ResultQueue&) = delete;
  ResultQueue& operator=(const ResultQueue&) = delete;

  // A new producer's. Takes the place of the last one, whose pending call is forgotten.
  void SetOnRoom(std::function<void()> on_room);

  // Starts the lane of `wave`. `on_item` is called after each item that arrives.
  void Open(uint64_t wave, std::function<void()> on_item);
  void Close(uint64_t wave);

  // False if the queue is full with this item: then on_room is called exactly once, perhaps before
  // Push returns, and the producer pushes nothing until then. An item of a wave that is not open is
  // dropped.
  bool Push(uint64_t wave, ResultItem item);

  // The oldest item of `wave`, if there is one.
  std::optional<ResultItem> Pop(uint64_t wave);

  // Whether the producer waits for something to be taken.
  bool holds_back() const;

  int64_t bytes() const;
  int messages() const;
  int64_t dropped() const;  // items of waves that were not open

 private:
  struct Lane {
    std::deque<ResultItem> items;
    int64_t bytes = 0;
    std::function<void()> on_item;
  };

  bool full() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return messages_ >= limits_.messages || bytes_ >= limits_.bytes;
  }
  // What to call, outside the lock, after something was removed.
  std::function<void()> RoomCallback() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Limits limits_;
  mutable absl::Mutex mutex_;
  std::map<uint64_t, Lane> lanes_ ABSL_GUARDED_BY(mutex_);
  std::function<void()> on_room_ ABSL_GUARDED_BY(mutex_);
  bool producer_waits_ ABSL_GUARDED_BY(mutex_) = false;
  int messages_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace dlo
