// Collective operations among the ranks of one group.
//
//   ASSIGN_OR_RETURN(std::unique_ptr<Communicator> weights,
//                    factory.Create({.name = "weights/0", .rank = 1, .size = 4}));
//   RETURN_IF_ERROR(weights->AllGather(shard, slot));
//
// Ranks here count within the group. Every rank of the group calls the same operations with the
// same sizes in the same order. An operation blocks the calling thread until its result is in
// memory; the thread of a stream may be that thread, which is how operations are put on a stream.
// Buffers are host memory, or device memory for a communicator of that device, and belong to the
// caller; when a call has returned, in whatever way, nothing touches them any more.
//
// Every operation has a deadline: the earlier of the communicator's timeout and the one given. An
// error names group, rank, operation, its sequence number and the peers that are known to be the
// cause; PeersOfError gives them as numbers:
//   DEADLINE_EXCEEDED    peers that sent nothing in time
//   UNAVAILABLE          a peer is gone
//   ABORTED              Abort was called
//   INTERNAL             ranks disagree about the operation, or the library failed
//   INVALID_ARGUMENT     wrong sizes or ranks; nothing was sent and the communicator stays usable
//   FAILED_PRECONDITION  the communicator is broken, or another thread is in an operation
// After any error but INVALID_ARGUMENT the ranks may be out of step. So the communicator is broken
// for good: its connections are closed, which peers notice at once, and each later call fails at
// once with FAILED_PRECONDITION and the first error's text.
//
// One operation at a time. Abort and status may be called from any thread at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/dtype.h"
#include "base/flight_recorder.h"
#include "base/topology.h"
#include "runtime/device.h"

namespace dlo {

inline constexpr int kNoPeer = -1;

// One operation, as an implementation and a fault hook see it. Sizes and ranks have been checked.
struct CollectiveOp {
  enum class Kind : uint8_t {
    kAllGather,
    kAllToAll,
    kAllReduceSum,
    kBroadcast,
    kSendRecv,
    kBarrier,
    kAllocateBuffer
  };

  Kind kind = Kind::kBarrier;
  uint64_t sequence = 0;  // counts the operations of the communicator from 1
  absl::Time deadline;
  const std::byte* send = nullptr;
  std::byte* recv = nullptr;
  int64_t send_bytes = 0;  // kAllGather, kAllToAll: of one rank's part
  int64_t recv_bytes = 0;  // kAllGather, kAllToAll: of one rank's part
  int to = kNoPeer;        // kSendRecv
  int from = kNoPeer;      // kSendRecv; kBroadcast: the root
  DType dtype = DType::kU8;
};
absl::string_view CollectiveName(CollectiveOp::Kind kind);

class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  // `recv` is size() parts, part r from rank r; `send` is this rank's part. `send` may be that part
  // of `recv` itself, which saves a copy; else they must not overlap.
  absl::Status AllGather(absl::Span<const std::byte> send, absl::Span<std::byte> recv,
                         absl::Time deadline = absl::InfiniteFuture());

  // Both are size() equal parts. Part r of `send` goes to rank r; part r of `recv` comes from it.
  // They must not overlap.
  absl::Status AllToAll(absl::Span<const std::byte> send, absl::Span<std::byte> recv,
                        absl::Time deadline = absl::InfiniteFuture());

  // Replaces `data` (elements of kF32 or kBF16) by the sum over the ranks, the same bytes on each.
  // Host implementations add in the order of ranks, in float32.
  absl::Status AllReduceSum(absl::Span<std::byte> data, DType dtype,
                            absl::Time deadline = absl::InfiniteFuture());

  // Replaces `data` by that of `root`.
  absl::Status Broadcast(absl::Span<std::byte> data, int root,
                         absl::Time deadline = absl::InfiniteFuture());

  // Sends to one rank while receiving from another. All ranks of the group call it, those with
  // nothing to send or to receive with kNoPeer and an empty span, so that sequence numbers stay in
  // step. Buffers must not overlap.
  absl::Status SendRecv(absl::Span<const std::byte> send, int to, absl::Span<std::byte> recv,
                        int from, absl::Time deadline = absl::InfiniteFuture());

  // Returns when all ranks have called it.
  absl::Status Barrier(absl::Time deadline = absl::InfiniteFuture());

  // Memory that this communicator moves fastest, for long-lived buffers such as slots; aligned to
  // 4096 bytes. An operation like the others: all ranks call it, with the same size.
  // RESOURCE_EXHAUSTED where there is no room. The buffer must not outlive the communicator.
  absl::StatusOr<DeviceBuffer> AllocateBuffer(int64_t bytes);

  // Breaks the communicator with ABORTED and `reason`; an operation in progress returns soon. Does
  // nothing if it is broken already.
  void Abort(absl::string_view reason);

  // Notes each operation in `recorder`, which outlives the communicator. Before the first one.
  void Record(FlightRecorder* recorder);

  // OK, or the error that broke the communicator.
  absl::Status status() const;

  // Sequence number of the latest operation begun.
  uint64_t sequence() const;

 protected:
  Communicator(std::string name, int rank, int size, absl::Duration operation_timeout)
      : name_(std::move(name)), rank_(rank), size_(size), operation_timeout_(operation_timeout) {}

 private:
  // Does one operation. An error says what happened and may carry peers (see PeerError); the rest
  // is added here.
  virtual absl::Status Run(const CollectiveOp& op) = 0;

  // The same for kAllocateBuffer. Ordinary host memory here.
  virtual absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes, absl::Time deadline);

  // Makes a Run in progress, or about to start, return soon. Any thread; may come again.
  virtual void Interrupt() = 0;

  // Gives up the connections, so that peers notice. Once, with no Run in progress or to come.
  virtual void Close() = 0;

  absl::Status Perform(CollectiveOp op, absl::Time deadline);
  absl::Status Perform(CollectiveOp op, absl::Time deadline,
                       const std::function<absl::Status(const CollectiveOp&)>& run);
  absl::Status CheckPeer(CollectiveOp::Kind kind, absl::string_view what, int peer) const;
  std::string Where(CollectiveOp::Kind kind) const;

  const std::string name_;
  const int rank_;
  const int size_;
  const absl::Duration operation_timeout_;
  FlightRecorder* recorder_ = nullptr;
  int recorder_group_ = -1;

  // std::mutex rather than absl's: ThreadSanitizer sees through it although Abseil is not built
  // with it.
  mutable std::mutex mutex_;
  absl::Status broken_;
  uint64_t sequence_ = 0;
  CollectiveOp::Kind running_kind_ = CollectiveOp::Kind::kBarrier;
  bool running_ = false;
  bool closed_ = false;
};

// An error that one or more peers are known to be the cause of.
absl::Status PeerError(absl::StatusCode code, absl::Span<const int> peers,
                       absl::string_view message);
std::vector<int> PeersOfError(const absl::Status& status);

// A group as one of its ranks sees it.
struct GroupSpec {
  std::string name;  // the same on all ranks, unlike that of any other group
  int rank = 0;
  int size = 1;
  absl::Duration setup_timeout = absl::Minutes(1);
  absl::Duration operation_timeout = absl::Minutes(5);
  // Bulk traffic beside which kernels compute: a hint to move it without the compute units.
  bool spare_compute = false;
};
// INVALID_ARGUMENT naming the group and the field.
absl::Status CheckGroupSpec(const GroupSpec& spec);

class CommunicatorFactory {
 public:
  virtual ~CommunicatorFactory() = default;

  // Returns when all ranks of the group are connected. DEADLINE_EXCEEDED names the ranks that did
  // not come within the setup timeout.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Create(const GroupSpec& spec) = 0;
};

// Where ranks leave each other what they need to connect. Thread-safe.
class RendezvousStore {
 public:
  virtual ~RendezvousStore() = default;
  virtual absl::Status Set(const std::string& key, const std::string& value) = 0;
  // Waits for the key. DEADLINE_EXCEEDED names it.
  virtual absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) = 0;
};

// The groups of one rank; null where the group would be this rank alone.
struct RankCommunicators {
  std::unique_ptr<Communicator> weights;  // carries nothing but streamed weights
  std::unique_ptr<Communicator> replica;
  std::unique_ptr<Communicator> tp;
  std::unique_ptr<Communicator> ulysses;
  std::unique_ptr<Communicator> ring;
  std::unique_ptr<Communicator> cfg;
  std::unique_ptr<Communicator> hsdp;
};

struct GroupTimeouts {
  absl::Duration setup = absl::Minutes(1);
  absl::Duration operation = absl::Minutes(5);
};

// Creates them in the order above, the same on every rank. There is no group over the world: what
// belongs to a request stays within its replica. The first error ends it and names the group. With
// a recorder each of them notes its operations there.
absl::StatusOr<RankCommunicators> CreateRankCommunicators(const Topology& topology, Rank rank,
                                                          WeightTransfer transfer,
                                                          const GroupTimeouts& timeouts,
                                                          CommunicatorFactory& factory,
                                                          FlightRecorder* recorder = nullptr);

}  // namespace dlo
