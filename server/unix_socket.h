// Whether a server may listen on a unix socket's path.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace dlo {

// UNAVAILABLE if a server answers on the socket at `path`. gRPC would unlink the file and bind its
// own, and leave the other server alive and unreachable. A socket file that nobody listens on is no
// obstacle.
absl::Status CheckSocketFree(const std::string& path);

}  // namespace dlo
