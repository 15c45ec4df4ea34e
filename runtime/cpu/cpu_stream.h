// Streams of the CPU device.
#pragma once

#include <memory>
#include <string>

#include "runtime/stream.h"

namespace dlo {

std::unique_ptr<Event> MakeCpuEvent();

// A stream served by a thread of its own, with room for `capacity` operations; a call blocks while
// it is full.
std::unique_ptr<Stream> MakeThreadStream(const std::string& name, int capacity = 64);

// A stream that is the calling thread: each operation happens before its call returns.
std::unique_ptr<Stream> MakeInlineStream();

}  // namespace dlo
