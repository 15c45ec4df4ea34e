// Streams of a CUDA device.
//
// Computing goes on libtorch's current stream, enqueued by the calling thread. Every other stream
// is a CUDA stream that a host thread feeds, since two kinds of its operations are the host's:
// packing, and a gather, which NCCL's communicator polls for its deadline (runtime/communicator.h).
// Before either the thread waits for its CUDA stream; copies, records and waits it only enqueues. A
// wait takes two steps: on the host until the event's record has been enqueued, then on the device.
// So the computing thread waits on the host for a gather, but never for a copy.
#pragma once

#include <memory>
#include <string>

#include "runtime/stream.h"

namespace dlo {

std::unique_ptr<Event> MakeCudaEvent();
std::unique_ptr<Stamp> MakeCudaStamp();

std::unique_ptr<Stream> MakeCudaComputeStream();
// With room for `capacity` operations; a call blocks while it is full.
std::unique_ptr<Stream> MakeCudaThreadStream(const std::string& name, int device,
                                             int capacity = 128);

}  // namespace dlo
