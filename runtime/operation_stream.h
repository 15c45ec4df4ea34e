// Streams whose operations a host thread performs: what the CPU's and CUDA's have in common.
//
//   class Own : public OperationStream {
//     absl::Status Submit(const StreamOperation& op) override { return thread_.Submit(op); }
//   };
//   OperationThread thread("copy", 128, [](const StreamOperation& op, const absl::Status& so_far) {
//     return so_far.ok() ? PerformIt(op) : so_far;
//   });
//
// OperationStream turns the calls of Stream into StreamOperations. OperationThread performs them
// one after another on a thread of its own. Nothing here allocates once it is made.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "runtime/stream.h"

namespace dlo {

// An event that counts how often it was recorded and how often the recording stream has got there,
// so that a wait is for the latest Record before it even if the event is recorded again meanwhile.
// Thread-safe. (std::mutex rather than absl's: ThreadSanitizer sees through it although Abseil is
// not built with it.)
class TicketEvent : public Event {
 public:
  // At Record: the ticket that Reach will bring.
  uint64_t Take();
  uint64_t taken() const;
  // The stream got to the Record of that ticket in this state.
  void Reach(uint64_t ticket, const absl::Status& status);
  // Waits on the host; the state that Reach brought.
  absl::Status Await(uint64_t ticket) const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  uint64_t taken_ = 0;
  uint64_t reached_ = 0;
  uint64_t failed_from_ = 0;  // the first ticket that a broken stream brought; 0: none
  absl::Status status_;
};

// One enqueued operation; which fields count depends on the kind.
struct StreamOperation {
  enum class Kind : uint8_t { kCopy, kPack, kAllGather, kRecord, kWait, kMark };
  Kind kind = Kind::kCopy;
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  int64_t bytes = 0;
  absl::Span<const PackPiece> pieces;
  Communicator* communicator = nullptr;
  TicketEvent* record = nullptr;
  const TicketEvent* wait = nullptr;
  Stamp* stamp = nullptr;
  uint64_t ticket = 0;

  bool moves() const { return kind <= Kind::kAllGather; }
};

// Events given to it are TicketEvents.
class OperationStream : public Stream {
 public:
  absl::Status CopyFromHost(std::byte* device, const std::byte* host, int64_t bytes) override;
  absl::Status Pack(std::byte* host, absl::Span<const PackPiece> pieces) override;
  absl::Status AllGather(Communicator& communicator, const std::byte* shard, std::byte* whole,
                         int64_t shard_bytes) override;
  absl::Status Record(Event& event) override;
  absl::Status Wait(const Event& event) override;
  absl::Status Mark(Stamp& stamp) override;

 private:
  virtual absl::Status Submit(const StreamOperation& op) = 0;
  // At Mark, before the operation is submitted.
  virtual void Expect(Stamp& stamp) = 0;
};

class OperationThread {
 public:
  // Called on the thread with the state of the operations before; returns that after this one.
  using Perform =
      std::function<absl::Status(const StreamOperation& op, const absl::Status& so_far)>;

  OperationThread(const std::string& name, int capacity, Perform perform);
  // Performs what was submitted.
  ~OperationThread();

  // Blocks while `capacity` operations wait. Returns the state of those that were performed.
  absl::Status Submit(const StreamOperation& op);
  absl::Status Synchronize();
  // Waits for the thread to be idle and clears its state.
  void Reset();

 private:
  void Run();

  const Perform perform_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<StreamOperation> queue_;  // a circle of fixed size
  size_t first_ = 0;
  size_t count_ = 0;
  absl::Status status_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace dlo
