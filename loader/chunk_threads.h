// Numbered pieces of work, done by a few threads in the order of their numbers.
//
//   ASSIGN_OR_RETURN(int threads, RunChunks(chunks.size(), options.threads, "loading weights",
//                                           [&](int64_t i) { return Load(chunks[i]); }));
//
// May run from any thread; starts and joins its own.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dlo {

// Runs chunk(0) to chunk(num_chunks - 1), each once, on `threads` threads, this one among them (0:
// as many as there are cores; fewer, with a warning about `what`, if no more can be started).
// Returns how many there were, or the error of the first chunk in their order that fails, whenever
// it does; after an error no further chunk begins. When a chunk begins all before it have begun and
// will end, so it may wait for them.
absl::StatusOr<int> RunChunks(int64_t num_chunks, int threads, absl::string_view what,
                              absl::FunctionRef<absl::Status(int64_t)> chunk);

}  // namespace dlo
