// Streams blocks from host memory through a few device slots, ahead of the computing.
//
//   ASSIGN_OR_RETURN(auto streamer,
//                    BlockStreamer::Create(device, rings, {.slots = 2}, communicator));
//   RETURN_IF_ERROR(streamer->Start(plan));
//   for (...) {
//     ASSIGN_OR_RETURN(BlockLease block, streamer->Acquire(ring));
//     Compute(block);
//   }
//
// A worker has one streamer: all its rings (both experts, the text encoder) share the slots and one
// sequence of visits, the plan's. Each visit v passes two moves, with k slots and two intake
// buffers:
//
//     move        AllGather                    rank-local, staged           rank-local
//     fill(v)     copy: shard -> buffer v % 2  pack: pages -> buffer v % 2  -
//     deliver(v)  comm: gather -> slot v % k   copy: buffer -> slot v % k   copy: block -> v % k
//
//     move        waits for                                           then records
//     fill(v)     delivered(v - 2): its buffer is free                filled(v)
//     deliver(v)  filled(v), and released(v - k): its slot is free    delivered(v)
//     compute(v)  delivered(v)                                        released(v)
//
// Acquire(v) first enqueues deliver up to v + k - 1 and fill one further, then makes the compute
// stream wait. Every event waited for has been recorded before the wait is enqueued, and all ranks
// of a group enqueue the same gathers in the same order. In the steady state a visit takes the
// longest of its moves and its computing, not their sum.
//
// How long moves take and how long computing waits for them is measured on the streams themselves
// (stamps before and after each move and each wait, see runtime/stream.h) and read kVisitsUnread
// visits later, so that no device is waited for on the way.
//
// In a group a rank whose own move failed aborts the communicator, so that the others fail at once
// instead of at the gather's deadline.
//
// Nothing after Create allocates, logs, or creates an event, but for what an error says. Belongs to
// one thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/flight_recorder.h"
#include "offload/block_layout.h"
#include "offload/block_ring.h"
#include "offload/streamer_stats.h"
#include "offload/visit_log.h"
#include "offload/visit_plan.h"
#include "runtime/communicator.h"
#include "runtime/device.h"
#include "runtime/stream.h"

namespace dlo {

// Where a block's bytes lie on the host. Exactly one of `bytes` and `pieces` is used.
struct HostBlock {
  BlockLayout layout;
  // In layout order, in memory a device can copy from: this rank's shard (layout.shard_bytes(group
  // size)) with a communicator, else the whole block.
  const std::byte* bytes = nullptr;
  // The whole block, tensor by tensor, wherever the checkpoint's pages have it; packed on the way
  // into one of two staging buffers. A page that is gone, or whose file has changed, fails the
  // visit with DATA_LOSS. Without a communicator only; other blocks may lie in `bytes`.
  std::vector<PackPiece> pieces;
};

struct StreamerOptions {
  int slots = 2;  // at least 2
  // Notes each visit and keeps the current one's number; outlives the streamer. Null: none.
  FlightRecorder* recorder = nullptr;
};

class BlockStreamer final : private LeaseOwner {
 public:
  // `rings[r]` holds the streamed blocks of ring r; what `bytes` and `pieces` point to outlives the
  // streamer. With `communicator` (its size is the group's) the host blocks are shards and blocks
  // are gathered, and none may have `pieces`. INVALID_ARGUMENT for a wrong option
  // or block, RESOURCE_EXHAUSTED if the device has no room for the slots.
  static absl::StatusOr<std::unique_ptr<BlockStreamer>> Create(
      Device& device, std::vector<std::vector<HostBlock>> rings, const StreamerOptions& options,
      Communicator* communicator);
  ~BlockStreamer();
  BlockStreamer(const BlockStreamer&) = delete;
  BlockStreamer& operator=(const BlockStreamer&) = delete;

  // Begins a plan over these rings and its first fetches. INVALID_ARGUMENT if the plan's ring sizes
  // are not these rings'; FAILED_PRECONDITION while a lease is held. An earlier plan that did not
  // end is abandoned: not to be done with a communicator (Finish it), whose group would be left at
  // different gathers. With `log`, which is cleared and must live until the next Start or the end,
  // every visit is noted in it.
  absl::Status Start(VisitPlan plan, VisitLog* log = nullptr);

  // The plan's next block, which must be of `ring`. One lease at a time. Errors: the failed move's,
  // with ring and block; the streamer then serves nothing until Start. FAILED_PRECONDITION at the
  // plan's end, for another ring, or while a lease is held.
  absl::StatusOr<BlockLease> Acquire(int ring);

  // Walks the rest of the plan without computing, for ranks that have nothing to compute while
  // others of their group do. The error of Start if that found no room.
  absl::Status Finish();

  // Gives the slots and shard buffers back to the device, once nothing uses them any more; the next
  // Start takes them again (RESOURCE_EXHAUSTED if there is no room then). FAILED_PRECONDITION while
  // a lease is held. A plan that did not end is abandoned, as by Start.
  absl::Status Stop();

  // The next one; any thread.
  int64_t visit() const { return visit_.load(std::memory_order_relaxed); }

  // Of ring r, or of all, since Start: bytes of the moves that were enqueued, times of the visits
  // whose leases have ended. Waits for these on the host.
  const StreamerStats& stats(int ring);
  StreamerStats stats();

  // When the plan started: zero of the log's times.
  absl::Time start_time() const { return start_time_; }
  // What the two moves of a visit are: "pack" or "copy", and "copy" or "gather"; the first is empty
  // if there is only one.
  absl::string_view fill_kind() const {
    return fill_stream_ == nullptr ? "" : staged_ ? "pack" : "copy";
  }
  absl::string_view deliver_kind() const { return communicator_ != nullptr ? "gather" : "copy"; }

  // slots x largest block + 2 x largest shard, in gathered size: what is allocated on the device
  // from Create or Start to Stop.
  int64_t device_bytes() const {
    return num_slots() * slot_bytes_ + num_shard_buffers() * shard_bytes_;
  }
  // Two staging buffers of the largest block that is packed.
  int64_t staging_bytes() const;

 private:
  // Visits that the host may be ahead of the device before it waits to read their times.
  static constexpr int64_t kVisitsUnread = 64;

  // One visit's stamps, until they are read.
  struct Marks {
    int ring = 0;
    int64_t block = 0;
    std::unique_ptr<Stamp> fill_begin, fill_end, deliver_begin, deliver_end;
    std::unique_ptr<Stamp> wait_begin, compute_begin, compute_end;
  };

  BlockStreamer(Device& device, std::vector<std::vector<HostBlock>> rings,
                const StreamerOptions& options, Communicator* communicator);
  absl::Status Allocate(int slots);
  absl::Status AllocateOnDevice();
  void ResetStreams();

  int64_t group_size() const { return communicator_ == nullptr ? 1 : communicator_->size(); }
  const HostBlock& At(const VisitPlan::Cursor& cursor) const {
    return rings_[cursor.ring()][cursor.block()];
  }
  int64_t num_slots() const { return static_cast<int64_t>(delivered_.size()); }
  int64_t num_shard_buffers() const { return communicator_ == nullptr ? 0 : kIntakeBuffers; }

  // Enqueues every move that visit v may have under way. An error stops its kind of move and waits
  // for the visit that it belongs to.
  void Advance(int64_t v);
  absl::Status Fill(const VisitPlan::Cursor& cursor);
  absl::Status Deliver(const VisitPlan::Cursor& cursor);
  void Release() override;
  absl::Status Break(const VisitPlan::Cursor& cursor, const absl::Status& cause);

  Marks& MarksOf(int64_t visit) { return marks_[visit % static_cast<int64_t>(marks_.size())]; }
  // Reads the stamps of visits up to `end`, not included.
  void ReadMarks(int64_t end);

  Device& device_;
  const std::vector<std::vector<HostBlock>> rings_;
  Communicator* const communicator_;
  FlightRecorder* const recorder_;
  FlightToken visit_token_;  // of the visit that is leased
  bool staged_ = false;      // some blocks are packed

  std::unique_ptr<Stream> fill_stream_;  // null: deliveries start from the host blocks themselves
  std::unique_ptr<Stream> deliver_stream_;
  Stream& compute_stream_;

  static constexpr int64_t kIntakeBuffers = 2;

  int64_t shard_bytes_ = 0;                                   // of the largest
  int64_t slot_bytes_ = 0;                                    // of one
  std::vector<DeviceBuffer> slots_;                           // none from Stop to Start
  std::vector<DeviceBuffer> shard_buffers_;                   // likewise; with a communicator
  std::vector<std::unique_ptr<HostBuffer>> staging_buffers_;  // two, if staged
  std::vector<std::unique_ptr<Event>> filled_;                // a buffer each
  std::vector<std::unique_ptr<Event>> delivered_;             // a slot each
  std::vector<std::unique_ptr<Event>> released_;              // a slot each

  VisitPlan plan_;
  std::optional<VisitPlan::Cursor> cursor_;   // the next visit to compute
  std::atomic<int64_t> visit_ = 0;            // its number
  std::optional<VisitPlan::Cursor> fill_;     // the next visit to fill
  std::optional<VisitPlan::Cursor> deliver_;  // the next visit to deliver
  bool leased_ = false;
  absl::Status fill_status_, deliver_status_;  // of the moves enqueued
  absl::Status broken_;                        // what Acquire returned

  std::unique_ptr<Stamp> started_;
  absl::Time start_time_;
  std::vector<Marks> marks_;          // a circle
  int64_t marks_read_ = 0;            // visits whose stamps were read
  absl::Duration last_wait_begin_;    // of the last visit that was read, from started_ on
  std::vector<StreamerStats> stats_;  // a ring each
  VisitLog* log_ = nullptr;
};

// The ring of one component, as its forward pass sees it.
class StreamingRing : public BlockRing {
 public:
  StreamingRing(BlockStreamer& streamer, int ring, int64_t num_blocks)
      : streamer_(streamer), ring_(ring), num_blocks_(num_blocks) {}
  int64_t num_blocks() const override { return num_blocks_; }
  absl::StatusOr<BlockLease> Acquire() override { return streamer_.Acquire(ring_); }
  // The plan says where a forward begins.
  void Rewind() override {}

 private:
  BlockStreamer& streamer_;
  const int ring_;
  const int64_t num_blocks_;
};

}  // namespace dlo
