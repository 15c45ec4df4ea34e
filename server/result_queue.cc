#include "server/result_queue.h"

#include <utility>

namespace dlo {
namespace {

int64_t ItemBytes(const ResultItem& item) {
  if (const auto* chunk = std::get_if<v1::ResultChunk>(&item)) {
    return static_cast<int64_t>(chunk->data().size());
  }
  return static_cast<int64_t>(std::get<v1::WaveFinished>(item).timeline().size());
}

}  // namespace

void ResultQueue::SetOnRoom(std::function<void()> on_room) {
  absl::MutexLock lock(&mutex_);
  on_room_ = std::move(on_room);
  producer_waits_ = false;
}

void ResultQueue::Open(uint64_t wave, std::function<void()> on_item) {
  absl::MutexLock lock(&mutex_);
  lanes_[wave].on_item = std::move(on_item);
}

void ResultQueue::Close(uint64_t wave) {
  std::map<uint64_t, Lane>::node_type closed;
  std::function<void()> on_room;
  {
    absl::MutexLock lock(&mutex_);
    closed = lanes_.extract(wave);
    if (closed.empty()) return;
    messages_ -= static_cast<int>(closed.mapped().items.size());
    bytes_ -= closed.mapped().bytes;
    on_room = RoomCallback();
  }
  if (on_room) on_room();
}

bool ResultQueue::Push(uint64_t wave, ResultItem item) {
  std::function<void()> on_item;
  bool room;
  {
    absl::MutexLock lock(&mutex_);
    const auto it = lanes_.find(wave);
    if (it == lanes_.end()) {
      ++dropped_;
      return true;
    }
    Lane& lane = it->second;
    const int64_t item_bytes = ItemBytes(item);
    lane.items.push_back(std::move(item));
    lane.bytes += item_bytes;
    ++messages_;
    bytes_ += item_bytes;
    room = !full();
    if (!room) producer_waits_ = true;
    on_item = lane.on_item;
  }
  if (on_item) on_item();
  return room;
}

std::optional<ResultItem> ResultQueue::Pop(uint64_t wave) {
  std::optional<ResultItem> item;
  std::function<void()> on_room;
  {
    absl::MutexLock lock(&mutex_);
    const auto it = lanes_.find(wave);
    if (it == lanes_.end() || it->second.items.empty()) return std::nullopt;
    Lane& lane = it->second;
    item = std::move(lane.items.front());
    lane.items.pop_front();
    const int64_t item_bytes = ItemBytes(*item);
    lane.bytes -= item_bytes;
    --messages_;
    bytes_ -= item_bytes;
    on_room = RoomCallback();
  }
  if (on_room) on_room();
  return item;
}

std::function<void()> ResultQueue::RoomCallback() {
  if (!producer_waits_ || full()) return nullptr;
  producer_waits_ = false;
  return on_room_;
}

bool ResultQueue::holds_back() const {
  absl::MutexLock lock(&mutex_);
  return producer_waits_;
}

int64_t ResultQueue::bytes() const {
  absl::MutexLock lock(&mutex_);
  return bytes_;
}

int ResultQueue::messages() const {
  absl::MutexLock lock(&mutex_);
  return messages_;
}

int64_t ResultQueue::dropped() const {
  absl::MutexLock lock(&mutex_);
  return dropped_;
}

}  // namespace dlo
