// Streams of the CPU device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "runtime/stream.h"

namespace dlo {

// A move on a stream's thread, as a test sees it.
struct CpuMove {
  enum class Kind : uint8_t { kCopy, kPack, kAllGather };
  Kind kind = Kind::kCopy;
  const std::string& stream;  // its name
  std::byte* to = nullptr;
  const std::byte* from = nullptr;  // not of a kPack
  int64_t bytes = 0;                // kAllGather: of a shard; not of a kPack
};

// Called on the stream's thread around each move: may block (a slow device), touch the buffers, or
// return an error, with which the move fails (before it, it does not happen).
struct CpuMoveHooks {
  std::function<absl::Status(const CpuMove&)> before;
  std::function<absl::Status(const CpuMove&)> after;
};

std::unique_ptr<Event> MakeCpuEvent();
std::unique_ptr<Stamp> MakeCpuStamp();

// A stream served by a thread of its own, with room for `capacity` operations; a call blocks while
// it is full.
std::unique_ptr<Stream> MakeThreadStream(const std::string& name, CpuMoveHooks hooks = {},
                                         int capacity = 128);

// A stream that is the calling thread: each operation happens before its call returns.
std::unique_ptr<Stream> MakeInlineStream();

}  // namespace dlo
