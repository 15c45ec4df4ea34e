#include "runtime/operation_stream.h"

#include <pthread.h>

#include <utility>

namespace dlo {

using Kind = StreamOperation::Kind;

uint64_t TicketEvent::Take() {
  const std::lock_guard lock(mutex_);
  return ++taken_;
}

uint64_t TicketEvent::taken() const {
  const std::lock_guard lock(mutex_);
  return taken_;
}

void TicketEvent::Reach(uint64_t ticket, const absl::Status& status) {
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

absl::Status TicketEvent::Await(uint64_t ticket) const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reached_ >= ticket; });
  // A stream that broke since then must not fail who waits for what was before.
  return failed_from_ != 0 && ticket >= failed_from_ ? status_ : absl::OkStatus();
}

absl::Status OperationStream::CopyFromHost(std::byte* device, const std::byte* host,
                                           int64_t bytes) {
  return Submit({.kind = Kind::kCopy, .to = device, .from = host, .bytes = bytes});
}

absl::Status OperationStream::Pack(std::byte* host, absl::Span<const PackPiece> pieces) {
  return Submit({.kind = Kind::kPack, .to = host, .pieces = pieces});
}

absl::Status OperationStream::AllGather(Communicator& communicator, const std::byte* shard,
                                        std::byte* whole, int64_t shard_bytes) {
  return Submit({.kind = Kind::kAllGather,
                 .to = whole,
                 .from = shard,
                 .bytes = shard_bytes,
                 .communicator = &communicator});
}

absl::Status OperationStream::Record(Event& event) {
  auto& own = static_cast<TicketEvent&>(event);
  return Submit({.kind = Kind::kRecord, .record = &own, .ticket = own.Take()});
}

absl::Status OperationStream::Wait(const Event& event) {
  const auto& own = static_cast<const TicketEvent&>(event);
  return Submit({.kind = Kind::kWait, .wait = &own, .ticket = own.taken()});
}

absl::Status OperationStream::Mark(Stamp& stamp) {
  Expect(stamp);
  return Submit({.kind = Kind::kMark, .stamp = &stamp});
}

OperationThread::OperationThread(const std::string& name, int capacity, Perform perform)
    : perform_(std::move(perform)), queue_(capacity), thread_([this] { Run(); }) {
  pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
}

OperationThread::~OperationThread() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

absl::Status OperationThread::Submit(const StreamOperation& op) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return count_ < queue_.size(); });
  queue_[(first_ + count_++) % queue_.size()] = op;
  changed_.notify_all();
  return status_;
}

absl::Status OperationThread::Synchronize() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return count_ == 0; });
  return status_;
}

void OperationThread::Reset() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return count_ == 0; });
  status_ = absl::OkStatus();
}

void OperationThread::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return count_ > 0 || stop_; });
    if (count_ == 0) return;  // stopped, and everything has happened
    const StreamOperation op = queue_[first_];
    absl::Status status = status_;
    lock.unlock();
    status = perform_(op, status);
    lock.lock();
    status_ = std::move(status);
    first_ = (first_ + 1) % queue_.size();
    --count_;
    changed_.notify_all();
  }
}

}  // namespace dlo
