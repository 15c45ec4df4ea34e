#include "runtime/cpu/cpu_stream.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <utility>

#include "runtime/communicator.h"
#include "runtime/operation_stream.h"

namespace dlo {
namespace {

using Kind = StreamOperation::Kind;

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

absl::Status Perform(const StreamOperation& op, const absl::Status& so_far) {
  if (op.kind == Kind::kRecord) {
    op.record->Reach(op.ticket, so_far);
    return so_far;
  }
  if (op.kind == Kind::kMark) {
    static_cast<CpuStamp*>(op.stamp)->Reach();
    return so_far;
  }
  if (!so_far.ok()) return so_far;
  switch (op.kind) {
    case Kind::kCopy:
      std::memcpy(op.to, op.from, op.bytes);
      return absl::OkStatus();
    case Kind::kPack:
      return PackPieces(op.to, op.pieces);
    case Kind::kAllGather:
      return op.communicator->AllGather(absl::MakeConstSpan(op.from, op.bytes),
                                        absl::MakeSpan(op.to, op.bytes * op.communicator->size()));
    case Kind::kWait:
      return op.wait->Await(op.ticket);
    case Kind::kRecord:
    case Kind::kMark:
      break;
  }
  return absl::OkStatus();
}

CpuMove Describe(const StreamOperation& op, const std::string& stream) {
  const CpuMove::Kind kind = op.kind == Kind::kCopy   ? CpuMove::Kind::kCopy
                             : op.kind == Kind::kPack ? CpuMove::Kind::kPack
                                                      : CpuMove::Kind::kAllGather;
  return {.kind = kind, .stream = stream, .to = op.to, .from = op.from, .bytes = op.bytes};
}

class InlineStream : public OperationStream {
 public:
  absl::Status Synchronize() override { return status_; }
  void Reset() override { status_ = absl::OkStatus(); }

 private:
  absl::Status Submit(const StreamOperation& op) override { return status_ = Perform(op, status_); }
  void Expect(Stamp& stamp) override { static_cast<CpuStamp&>(stamp).Await(); }

  absl::Status status_;
};

class ThreadStream : public OperationStream {
 public:
  ThreadStream(const std::string& name, CpuMoveHooks hooks, int capacity)
      : name_(name),
        hooks_(std::move(hooks)),
        thread_(name, capacity, [this](const StreamOperation& op, const absl::Status& so_far) {
          return PerformHooked(op, so_far);
        }) {}

  absl::Status Synchronize() override { return thread_.Synchronize(); }
  void Reset() override { thread_.Reset(); }

 private:
  absl::Status Submit(const StreamOperation& op) override { return thread_.Submit(op); }
  void Expect(Stamp& stamp) override { static_cast<CpuStamp&>(stamp).Await(); }

  absl::Status PerformHooked(const StreamOperation& op, const absl::Status& so_far) {
    const bool hooked = op.moves() && so_far.ok();
    if (hooked && hooks_.before) {
      if (absl::Status status = hooks_.before(Describe(op, name_)); !status.ok()) return status;
    }
    absl::Status status = Perform(op, so_far);
    if (hooked && hooks_.after && status.ok()) status = hooks_.after(Describe(op, name_));
    return status;
  }

  const std::string name_;
  const CpuMoveHooks hooks_;
  OperationThread thread_;  // last: it uses all of the above
};

}  // namespace

std::unique_ptr<Event> MakeCpuEvent() { return std::make_unique<TicketEvent>(); }

std::unique_ptr<Stamp> MakeCpuStamp() { return std::make_unique<CpuStamp>(); }

std::unique_ptr<Stream> MakeThreadStream(const std::string& name, CpuMoveHooks hooks,
                                         int capacity) {
  return std::make_unique<ThreadStream>(name, std::move(hooks), capacity);
}

std::unique_ptr<Stream> MakeInlineStream() { return std::make_unique<InlineStream>(); }

}  // namespace dlo
