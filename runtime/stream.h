// Ordered queues of work on a device, and the points in them that others wait for.
//
//   std::unique_ptr<Stream> copy = device->CreateStream("copy");
//   std::unique_ptr<Event> copied = device->CreateEvent();
//   RETURN_IF_ERROR(copy->CopyFromHost(slot, host, bytes));
//   RETURN_IF_ERROR(copy->Record(*copied));
//   RETURN_IF_ERROR(device->compute_stream().Wait(*copied));
//
// A call enqueues and returns; work of one stream happens in the order of the calls, work of
// different streams at once. Three kinds share the interface: on the CPU a stream is a thread (the
// compute stream is the calling thread itself, and its Wait blocks); on CUDA it is a CUDA stream;
// in the simulator it is a clock.
//
// Errors: a failed operation breaks its stream. What was enqueued behind it does not happen, events
// recorded behind it carry the error to whoever waits for them, and every later call returns it.
// Reset mends the stream once it is idle.
//
// Nothing here allocates after creation. One thread calls a stream at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/pack.h"

namespace dlo {

class Communicator;

// A point in a stream. Recorded again and again; a wait means the latest Record before it. Waiting
// for an event that was never recorded does not wait.
class Event {
 public:
  virtual ~Event() = default;
};

// A moment in a stream's work, for measuring. Marked again and again.
class Stamp {
 public:
  virtual ~Stamp() = default;

  // From when a stream got to the latest Mark of `earlier` to when one got to the latest of this
  // stamp; negative if that was before. Waits on the host until both have been got to. Both were
  // marked, on streams of one device.
  virtual absl::Duration Since(const Stamp& earlier) const = 0;
};

class Stream {
 public:
  virtual ~Stream() = default;

  // `host` stays unchanged until the copy has happened.
  virtual absl::Status CopyFromHost(std::byte* device, const std::byte* host, int64_t bytes) = 0;

  // Copies each piece to `host` + offset, with the errors of PackPieces; `pieces` outlives the
  // operation.
  virtual absl::Status Pack(std::byte* host, absl::Span<const PackPiece> pieces) = 0;

  // Every rank's `shard_bytes` bytes at `shard`, in rank order, to `whole` of every rank
  // (shard_bytes * size bytes).
  virtual absl::Status AllGather(Communicator& communicator, const std::byte* shard,
                                 std::byte* whole, int64_t shard_bytes) = 0;

  virtual absl::Status Record(Event& event) = 0;
  virtual absl::Status Wait(const Event& event) = 0;
  // Notes when the stream gets here. If it is broken the stamp's time means nothing.
  virtual absl::Status Mark(Stamp& stamp) = 0;

  // Waits on the host until everything enqueued has happened; the stream's error, if it broke.
  virtual absl::Status Synchronize() = 0;

  // Waits for the stream to be idle and clears its error.
  virtual void Reset() = 0;
};

}  // namespace dlo
