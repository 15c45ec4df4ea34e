// The command `dlo-client status`: asks the standard gRPC health service, and the server's own
// GetStatus for what its ranks are doing.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/console.h"

namespace dlo {

struct StatusOptions {
  std::string endpoint;
  absl::Duration wait;  // how long to wait for SERVING, and for a server to listen at all
};

// Prints SERVING or NOT_SERVING to console.out, then a few lines for each rank; OK exactly for
// SERVING. FAILED_PRECONDITION:
// NOT_SERVING (still, after the wait); UNAVAILABLE: nobody answers; CANCELLED: interrupted.
absl::Status CheckServing(const StatusOptions& options, const Console& console,
                          Interrupt& interrupt);

}  // namespace dlo
