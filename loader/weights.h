// Fills memory with a checkpoint's tensors, cast to the run's dtypes while they are read.
//
//   std::vector<std::byte*> destinations = ...;  // destinations[i]: specs[i].bytes() bytes
//   RETURN_IF_ERROR(LoadTensors(checkpoint, specs, destinations,
//                               {.ignore_unexpected = {"norm_added_q"}}));
//
// All checks come first: unless the checkpoint holds every spec in the right shape and a dtype that
// can be cast, and nothing else, nothing is written and INVALID_ARGUMENT tells the first few
// offenders of each kind with file, name and count. A spec is found under its name or, failing
// that, its first alias present; names a spec could go by are never unexpected. Casts
// are those of loader/cast.h.
//
// DATA_LOSS, with the destinations in an unspecified state, if a file changed since the checkpoint
// was opened or cannot be read.
//
// Pages of the file are dropped from the process as they are used, so that the peak is the result
// plus a few MiB. Thread-safety: may run from any thread; starts and joins its own. The caller owns
// the destinations, which need no alignment.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/tensor_spec.h"
#include "loader/checkpoint.h"

namespace dlo {

struct LoadOptions {
  // A tensor of the checkpoint that no spec asks for is passed over if its name contains one of
  // these.
  std::vector<std::string> ignore_unexpected;
  // The specs are part of a model: names that none of them asks for are passed over.
  bool partial = false;
  int threads = 0;                             // 0: as many as the process may use cores
  std::atomic<int64_t>* read_bytes = nullptr;  // counts bytes of files that are read
};

// The checks of LoadTensors alone: nothing is read but headers.
absl::Status CheckTensors(const Checkpoint& checkpoint, absl::Span<const TensorSpec> specs,
                          const LoadOptions& options = {});

absl::Status LoadTensors(const Checkpoint& checkpoint, absl::Span<const TensorSpec> specs,
                         absl::Span<std::byte* const> destinations,
                         const LoadOptions& options = {});

}  // namespace dlo
