// Host memory of exactly the size asked for, pinned piece by piece.
//
//   ASSIGN_OR_RETURN(std::unique_ptr<PinnedMemory> memory,
//                    PinnedMemory::Allocate(bytes, {.pin = ..., .unpin = ...}));
//   Copy(memory->data(), memory->bytes());
//
// An allocator of pinned memory that rounds sizes up (libtorch's to a power of two) can double what
// a model takes, and drivers fail on single registrations of hundreds of GiB
// (https://github.com/vllm-project/vllm/issues/51081). So it is a mapping of its own, in whole
// pages, of which at most kPinPieceBytes are pinned by one call.
//
// One owner; const members may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dlo {

inline constexpr int64_t kPinPieceBytes = int64_t{64} << 30;

// The driver's calls. A piece that was pinned is unpinned by its address.
struct PinCalls {
  std::function<absl::Status(std::byte* data, int64_t bytes)> pin;
  std::function<absl::Status(std::byte* data)> unpin;
};

class PinnedMemory {
 public:
  // Zeroed. RESOURCE_EXHAUSTED without room for the mapping; the error of `pin`, with the piece,
  // when one fails: those before it are unpinned and the mapping is gone. `piece_bytes` is a
  // multiple of the page size.
  static absl::StatusOr<std::unique_ptr<PinnedMemory>> Allocate(
      int64_t bytes, PinCalls calls, int64_t piece_bytes = kPinPieceBytes);

  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  // Unpins, last piece first. A mapping of which a piece stays pinned is never unmapped: a device
  // may still be reading it.
  ~PinnedMemory();

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  PinnedMemory(std::byte* data, int64_t bytes, int64_t mapped_bytes, PinCalls calls,
               int64_t piece_bytes)
      : data_(data),
        bytes_(bytes),
        mapped_bytes_(mapped_bytes),
        piece_bytes_(piece_bytes),
        calls_(std::move(calls)) {}

  std::byte* const data_;
  const int64_t bytes_;
  const int64_t mapped_bytes_;
  const int64_t piece_bytes_;
  const PinCalls calls_;
  int64_t num_pinned_ = 0;  // pieces
};

}  // namespace dlo
