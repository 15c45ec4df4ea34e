// Communicators between processes on the memory of CUDA devices, by NCCL.
//
//   ASSIGN_OR_RETURN(auto factory, OpenNcclFactory(store, {.device = 0, .prefix = "run-7"}));
//   ASSIGN_OR_RETURN(auto weights, factory->Create({.name = "weights/0", .rank = 0, .size = 8,
//                                                   .spare_compute = true}));
//   ASSIGN_OR_RETURN(DeviceBuffer slot, weights->AllocateBuffer(slot_bytes));
//
// Buffers are memory of the device, and what writes them must have finished when a call is made: an
// operation runs on a stream of the communicator's own, and the call returns when the device is
// done. Communicators are non-blocking: while an operation runs, the device, NCCL's own error
// state, the deadline and Abort are polled, and any fault aborts the communicator, which ends its
// kernels. NCCL does not tell which peer is the cause, so errors name one only where a single peer
// takes part.
//
// With spare_compute, NCCL 2.28 or newer moves AllGather and AllToAll between buffers of
// AllocateBuffer by copy engines and leaves the compute units to kernels. AllReduceSum adds in an
// order that NCCL chooses.
//
// The code lives in libdlo_cuda.so and is there where that was built with NCCL. Thread-safety and
// errors as in runtime/communicator.h; `store` must outlive the factory.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "runtime/communicator.h"

namespace dlo {

struct NcclOptions {
  int device = 0;
  std::string prefix;  // sets apart the runs that share a store
};

// FAILED_PRECONDITION names what is missing: the library, NCCL in it, the driver, or the device.
absl::StatusOr<std::unique_ptr<CommunicatorFactory>> OpenNcclFactory(RendezvousStore& store,
                                                                     const NcclOptions& options);

// Looked up by name in libdlo_cuda.so: a new factory, owned by the caller, or null with `error`
// set.
inline constexpr char kNcclOpenSymbol[] = "dlo_nccl_open";
using NcclOpenFunction = CommunicatorFactory* (*)(RendezvousStore* store,
                                                  const NcclOptions* options, std::string* error);

}  // namespace dlo
