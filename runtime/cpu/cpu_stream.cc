#include "runtime/cpu/cpu_stream.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/communicator.h"

namespace dlo {
namespace {

// std::mutex rather than absl's: ThreadSanitizer sees through it although Abseil is not built with
// it.

// Counts how often it was recorded and how often the stream has got there, so that a wait is for
// the latest Record before it even if the event is recorded again meanwhile.
class CpuEvent : public Event {
 public:
  // At Record: the ticket that Reach will bring.
  uint64_t Take() {
    const std::lock_guard lock(mutex_);
    return ++taken_;
  }
  uint64_t taken() const {
    const std::lock_guard lock(mutex_);
    return taken_;
  }
  void Reach(uint64_t ticket, const absl::Status& status) {
    {
      const std::lock_guard lock(mutex_);
      reached_ = ticket;
      if (status.ok()) {
        failed_from_ = 0;
      } else if (failed_from_ == 0) {
        failed_from_ = ticket;
        status_ = status;
      }
    }
    changed_.notify_all();
  }
  absl::Status Await(uint64_t ticket) const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_ >= ticket; });
    // A stream that broke since then must not fail who waits for what was before.
    return failed_from_ != 0 && ticket >= failed_from_ ? status_ : absl::OkStatus();
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  uint64_t taken_ = 0;
  uint64_t reached_ = 0;
  uint64_t failed_from_ = 0;  // the first ticket that a broken stream brought; 0: none
  absl::Status status_;
};

class CpuStamp : public Stamp {
 public:
  // At Mark.
  void Await() { time_ns_.store(kAwaited, std::memory_order_relaxed); }
  // When the stream gets there.
  void Reach() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    time_ns_.store(std::chrono::nanoseconds(now).count(), std::memory_order_release);
    time_ns_.notify_all();
  }
  absl::Duration Since(const Stamp& earlier) const override {
    return absl::Nanoseconds(time_ns() - static_cast<const CpuStamp&>(earlier).time_ns());
  }

 private:
  static constexpr int64_t kAwaited = -1;

  int64_t time_ns() const {
    time_ns_.wait(kAwaited, std::memory_order_acquire);
    return time_ns_.load(std::memory_order_acquire);
  }

  std::atomic<int64_t> time_ns_ = 0;
};

// One enqueued operation; which fields count depends on the kind.
struct Operation {
  enum class Kind { kCopy, kPack, kAllGather, kRecord, kWait, kMark };
  Kind kind = Kind::kCopy;
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  int64_t bytes = 0;
  absl::Span<const PackPiece> pieces;
  Communicator* communicator = nullptr;
  CpuEvent* record = nullptr;
  const CpuEvent* wait = nullptr;
  CpuStamp* stamp = nullptr;
  uint64_t ticket = 0;
};

absl::Status Perform(const Operation& op, const absl::Status& so_far) {
  if (op.kind == Operation::Kind::kRecord) {
    op.record->Reach(op.ticket, so_far);
    return so_far;
  }
  if (op.kind == Operation::Kind::kMark) {
    op.stamp->Reach();
    return so_far;
  }
  if (!so_far.ok()) return so_far;
  switch (op.kind) {
    case Operation::Kind::kCopy:
      std::memcpy(op.to, op.from, op.bytes);
      return absl::OkStatus();
    case Operation::Kind::kPack:
      return PackPieces(op.to, op.pieces);
    case Operation::Kind::kAllGather:
      return op.communicator->AllGather(absl::MakeConstSpan(op.from, op.bytes),
                                        absl::MakeSpan(op.to, op.bytes * op.communicator->size()));
    case Operation::Kind::kWait:
      return op.wait->Await(op.ticket);
    case Operation::Kind::kRecord:
    case Operation::Kind::kMark:
      break;
  }
  return absl::OkStatus();
}

bool IsMove(const Operation& op) {
  return op.kind == Operation::Kind::kCopy || op.kind == Operation::Kind::kPack ||
         op.kind == Operation::Kind::kAllGather;
}

CpuMove Describe(const Operation& op, const std::string& stream) {
  const CpuMove::Kind kind = op.kind == Operation::Kind::kCopy   ? CpuMove::Kind::kCopy
                             : op.kind == Operation::Kind::kPack ? CpuMove::Kind::kPack
                                                                 : CpuMove::Kind::kAllGather;
  return {.kind = kind, .stream = stream, .to = op.to, .from = op.from, .bytes = op.bytes};
}

// The calls of Stream as operations.
class OperationStream : public Stream {
 public:
  absl::Status CopyFromHost(std::byte* device, const std::byte* host, int64_t bytes) override {
    return Submit({.kind = Operation::Kind::kCopy, .to = device, .from = host, .bytes = bytes});
  }
  absl::Status Pack(std::byte* host, absl::Span<const PackPiece> pieces) override {
    return Submit({.kind = Operation::Kind::kPack, .to = host, .pieces = pieces});
  }
  absl::Status AllGather(Communicator& communicator, const std::byte* shard, std::byte* whole,
                         int64_t shard_bytes) override {
    return Submit({.kind = Operation::Kind::kAllGather,
                   .to = whole,
                   .from = shard,
                   .bytes = shard_bytes,
                   .communicator = &communicator});
  }
  absl::Status Record(Event& event) override {
    auto& own = static_cast<CpuEvent&>(event);
    return Submit({.kind = Operation::Kind::kRecord, .record = &own, .ticket = own.Take()});
  }
  absl::Status Wait(const Event& event) override {
    const auto& own = static_cast<const CpuEvent&>(event);
    return Submit({.kind = Operation::Kind::kWait, .wait = &own, .ticket = own.taken()});
  }
  absl::Status Mark(Stamp& stamp) override {
    auto& own = static_cast<CpuStamp&>(stamp);
    own.Await();
    return Submit({.kind = Operation::Kind::kMark, .stamp = &own});
  }

 protected:
  virtual absl::Status Submit(const Operation& op) = 0;
};

class InlineStream : public OperationStream {
 public:
  absl::Status Synchronize() override { return status_; }
  void Reset() override { status_ = absl::OkStatus(); }

 private:
  absl::Status Submit(const Operation& op) override { return status_ = Perform(op, status_); }

  absl::Status status_;
};

class ThreadStream : public OperationStream {
 public:
  ThreadStream(const std::string& name, CpuMoveHooks hooks, int capacity)
      : name_(name), hooks_(std::move(hooks)), queue_(capacity), thread_([this] { Run(); }) {
    pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
  }
  ~ThreadStream() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  absl::Status Synchronize() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return count_ == 0; });
    return status_;
  }
  void Reset() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return count_ == 0; });
    status_ = absl::OkStatus();
  }

 private:
  absl::Status Submit(const Operation& op) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return count_ < queue_.size(); });
    queue_[(first_ + count_++) % queue_.size()] = op;
    changed_.notify_all();
    return status_;
  }

  void Run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return count_ > 0 || stop_; });
      if (count_ == 0) return;  // stopped, and everything has happened
      const Operation op = queue_[first_];
      absl::Status status = status_;
      lock.unlock();
      status = PerformHooked(op, status);
      lock.lock();
      status_ = std::move(status);
      first_ = (first_ + 1) % queue_.size();
      --count_;
      changed_.notify_all();
    }
  }

  absl::Status PerformHooked(const Operation& op, const absl::Status& so_far) {
    const bool hooked = IsMove(op) && so_far.ok();
    if (hooked && hooks_.before) {
      if (absl::Status status = hooks_.before(Describe(op, name_)); !status.ok()) return status;
    }
    absl::Status status = Perform(op, so_far);
    if (hooked && hooks_.after && status.ok()) status = hooks_.after(Describe(op, name_));
    return status;
  }

  const std::string name_;
  const CpuMoveHooks hooks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Operation> queue_;  // a circle of fixed size
  size_t first_ = 0;
  size_t count_ = 0;
  absl::Status status_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace

std::unique_ptr<Event> MakeCpuEvent() { return std::make_unique<CpuEvent>(); }

std::unique_ptr<Stamp> MakeCpuStamp() { return std::make_unique<CpuStamp>(); }

std::unique_ptr<Stream> MakeThreadStream(const std::string& name, CpuMoveHooks hooks,
                                         int capacity) {
  return std::make_unique<ThreadStream>(name, std::move(hooks), capacity);
}

std::unique_ptr<Stream> MakeInlineStream() { return std::make_unique<InlineStream>(); }

}  // namespace dlo
