// Bringing the pages of mapped tensors into memory and into this process's page tables before they
// are needed, by several threads.
//
//   ASSIGN_OR_RETURN(FaultInStats stats, FaultIn(pieces, /*threads=*/4));
//
// Without it the first walk over the blocks would take a page fault per page, and on a cold cache
// wait for the disk once per read-ahead. May run from any thread; starts and joins its own. The
// kernel may take the pages back at any time; they come again when they are read.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/pack.h"

namespace dlo {

struct FaultInStats {
  int64_t bytes = 0;
  int64_t disk_bytes = 0;  // that this process caused to be read meanwhile; the rest was cached
  absl::Duration time;
  int threads = 0;
};

// The pages of the pieces that are part of a file's mapping; others are passed over. threads 0: as
// many as there are cores. DATA_LOSS, as PackPieces, for pages that are not there.
absl::StatusOr<FaultInStats> FaultIn(absl::Span<const PackPiece> pieces, int threads);

}  // namespace dlo
